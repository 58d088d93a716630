"""Whole pictures on a frame's way: copied by who writes, scaled by the run into their places, beside those written."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_runtime.camera.av_pixels import AvPixels, frame_of
from edge_runtime.engine.protocol import Engine, InputBuffer, Lane
from edge_runtime.engine.tensorrt import pictures as room
from edge_runtime.engine.tensorrt.cuda import HostMemory
from edge_runtime.engine.tensorrt.letterbox import NAME, SOURCE, reference
from edge_runtime.engine.tensorrt.nvrtc import kernel_image
from edge_runtime.engine.tensorrt.pictures import PictureMemory, Pictures, expected_bytes
from edge_runtime.engine.tensorrt.scaler import Letterbox, Scaler
from edge_runtime.errors import EdgeError, EngineError
from edge_runtime.records.frames import PictureKind, PictureLayout
from edge_runtime.records.spec import InputSpec
from tests.engine.graphs import SIDE, graph, node
from tests.engine.tensorrt import kernel_cpu
from tests.engine.tensorrt.fake_nvrtc import FakeNvrtc
from tests.engine.tensorrt.fake_parts import ILLEGAL_ADDRESS
from tests.engine.tensorrt.rigs import TENSORRT, USUAL, Rig
from tests.engine.tensorrt.test_letterbox import picture_of

VALUES = 3 * SIDE * SIDE
SMALL = (20, 16)
PYCUDA = TENSORRT[0]
MAPPED = TENSORRT[1]
EVERY_KIND: tuple[PictureKind, ...] = ("bgr24", "rgba", "nv12", "yuv420p")


def echo() -> bytes:
    """[b, 3, H, W] -> [b, 3 * H * W]: the input itself."""
    return graph([node("Flatten", ["x"], ["y"], axis=1)], outputs=[("y", ("batch", VALUES))])


def decoded(layout: PictureLayout, seed: int = 1, shown: tuple[int, int] | None = None) -> AvPixels:
    """A picture as a decoder leaves it."""
    flat, planes, start = picture_of(layout, seed), [], 0
    for rows, row_bytes in layout.planes:
        planes.append((memoryview(flat[start : start + rows * row_bytes].tobytes()), row_bytes))
        start += rows * row_bytes
    return AvPixels(frame_of(layout.kind, layout.width, layout.height, planes), shown)


def expected(layout: PictureLayout, spec: InputSpec, seed: int = 1) -> NDArray[Any]:
    """What the model gets to see. These frames do not say where their colours lie: swscale takes the centre then."""
    layout = layout if layout.kind in ("bgr24", "rgba") else replace(layout, siting=(0.5, 0.5))
    return np.asarray(reference(picture_of(layout, seed), layout, spec)).reshape(-1)


def close(found: NDArray[Any], wanted: NDArray[Any]) -> None:
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-3)


@pytest.fixture(
    params=[
        pytest.param(kind, id=kind.name, marks=() if kind in (MAPPED,) or kind.name in USUAL else pytest.mark.full)
        for kind in TENSORRT
    ]
)
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    yield from started(Rig(request.param, tmp_path, scales=True))


@pytest.fixture
def pycuda(tmp_path: Path) -> Iterator[Rig]:
    yield from started(Rig(PYCUDA, tmp_path, scales=True))


def started(made: Rig) -> Iterator[Rig]:
    compiled()
    made.start()
    yield made
    made.stop()
    made.machine.check_empty()


def compiled() -> None:
    try:
        kernel_cpu._library(SOURCE)
    except kernel_cpu.Unavailable as reason:
        pytest.skip(str(reason))


class Used:
    """An engine with a lane and a buffer of four places."""

    def __init__(self, rig: Rig, **options: Any) -> None:
        options = {"input": {"resize": "letterbox-center"}, "labels": [str(n) for n in range(VALUES)]} | options
        self.rig = rig
        self.engine: Engine = rig.load(echo(), batches=(1, 2, 4), **options)
        self.spec = self.engine.info.input
        self.lane: Lane = self.engine.open_lane()
        self.buffer: InputBuffer = self.engine.allocate(4)

    def take(self, index: int, pixels: Any) -> bool:
        """As the pipeline does. Whether it is scaled on the GPU."""
        assert self.buffer.pictures is not None
        if self.buffer.pictures.take(index, pixels) is not None:
            self.buffer.array[index] = np.nan  # nothing of it may be read
            return True
        pixels.write_into(self.buffer.array[index], self.spec)
        return False

    def run(self, count: int) -> NDArray[Any]:
        self.lane.submit(self.buffer, count)
        return np.array(self.lane.collect()["y"])

    def end(self) -> None:
        self.engine.release(self.buffer)
        self.engine.close()


def test_every_kind_of_picture_is_what_numpy_says(rig: Rig) -> None:
    used = Used(rig)
    for turn in range(2):
        layouts = [PictureLayout(kind, 97 + turn, 61) for kind in EVERY_KIND]
        for index, layout in enumerate(layouts):
            assert used.take(index, decoded(layout, turn + 1))
        for found, layout in zip(used.run(4), layouts, strict=True):
            close(found, expected(layout, used.spec, turn + 1))
    used.end()


def test_a_batch_mixes_written_and_scaled_places(rig: Rig) -> None:
    used, large, small = Used(rig), PictureLayout("nv12", 90, 70), PictureLayout("yuv420p", *SMALL)
    for seed, pattern in enumerate(["GCGC", "CGGC", "CCCG", "GCCC", "CCCC", "GGGG", "C", "G", "CG"], 1):
        wanted = []
        for index, each in enumerate(pattern):
            pixels = decoded(large if each == "G" else small, seed + index)
            assert used.take(index, pixels) == (each == "G")
            if each == "G":
                wanted.append(expected(large, used.spec, seed + index))
            else:
                wanted.append(used.buffer.array[index].reshape(-1).copy())
        for found, right in zip(used.run(len(pattern)), wanted, strict=True):
            close(found, right)
    used.end()


def test_it_is_the_cpus_picture_within_what_the_scaler_rounds(pycuda: Rig) -> None:
    used, layout = Used(pycuda), PictureLayout("yuv420p", 160, 90)
    pixels = decoded(layout)
    assert used.buffer.pictures is not None
    transform = used.buffer.pictures.take(0, pixels)
    place = np.empty(used.spec.shape, np.float32)
    assert pixels.write_into(place, used.spec) == transform  # what postprocessing inverts
    difference = np.abs(used.run(1)[0] - place.reshape(-1))
    assert difference.mean() < 1.0
    assert difference.max() < 8.0
    used.end()


def test_a_camera_whose_size_changes_and_memory_that_grows(rig: Rig) -> None:
    used = Used(rig)
    before = rig.machine.live()["host"]
    for seed, (width, height) in enumerate([(64, 48), (100, 70), (40, 60), (120, 80), (64, 48), (121, 79)], 1):
        layouts = [PictureLayout(kind, width, height) for kind in ("nv12", "bgr24")]
        for index, layout in enumerate(layouts):
            assert used.take(index, decoded(layout, seed))
        for found, layout in zip(used.run(2), layouts, strict=True):
            close(found, expected(layout, used.spec, seed))
    assert rig.owner is not None
    rig.owner.call(lambda: None)
    assert rig.machine.live()["host"] <= before + 3  # a picture a place, and the outputs
    used.end()


def test_a_run_takes_its_pictures(rig: Rig) -> None:
    used, layout = Used(rig), PictureLayout("rgba", 90, 70)
    used.take(0, decoded(layout))
    close(used.run(1)[0], expected(layout, used.spec))
    used.buffer.array[0] = 7.0
    assert (used.run(1)[0] == 7.0).all()
    used.take(0, decoded(layout))
    assert used.buffer.pictures is not None
    used.buffer.pictures.clear(0)
    used.buffer.array[0] = 9.0
    assert (used.run(1)[0] == 9.0).all()
    used.end()


def test_a_picture_behind_the_batch_is_not_scaled(pycuda: Rig) -> None:
    used, layout = Used(pycuda), PictureLayout("rgba", 90, 70)
    used.take(0, decoded(layout))
    used.take(1, decoded(layout, 2))
    launches = pycuda.machine.calls["cuLaunchKernel"]
    close(used.run(1)[0], expected(layout, used.spec))
    assert pycuda.machine.calls["cuLaunchKernel"] == launches + 1
    used.end()


def test_a_picture_that_hardware_has_scaled(pycuda: Rig) -> None:
    used, layout = Used(pycuda), PictureLayout("nv12", 96, 54)
    pixels = decoded(layout, shown=(1920, 1080))
    assert used.buffer.pictures is not None
    transform = used.buffer.pictures.take(0, pixels)
    assert transform is not None
    assert (transform.src_width, transform.src_height) == (1920, 1080)
    close(used.run(1)[0], expected(layout, used.spec))
    used.end()


class Turned(AvPixels):
    """As a stream with a display matrix has it."""

    def __init__(self, frame: Any) -> None:
        super().__init__(frame)
        self._orientation = self.orientation._replace(flip_rows=True, flip_columns=True)


def test_what_stays_on_the_cpu(pycuda: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    used = Used(pycuda)
    large = decoded(PictureLayout("nv12", 90, 70))
    same_size = decoded(PictureLayout("nv12", SIDE, SIDE))
    packed = AvPixels(frame_of("yuyv422", 90, 70, [(memoryview(bytes(180 * 70)), 180)]))
    for pixels in (same_size, decoded(PictureLayout("bgr24", *SMALL)), packed, Turned(large.frame)):
        assert not used.take(0, pixels)
        close(used.run(1)[0], used.buffer.array[0].reshape(-1))
    monkeypatch.setattr(room, "MOST_SIDE_PX", 89)
    assert not used.take(0, large)
    used.end()


def test_a_writer_that_is_late_writes_into_nothing_that_runs(rig: Rig) -> None:
    """Its place was voided and its batch has run: the picture is for no later batch, whatever its size."""
    used, layout = Used(rig), PictureLayout("nv12", 90, 70)
    inside, go_on = threading.Event(), threading.Event()

    class Slow(AvPixels):
        def copy_whole(self, target: NDArray[np.uint8]) -> None:
            inside.set()
            go_on.wait(10)
            super().copy_whole(target)

    slow = Slow(decoded(PictureLayout("nv12", 300, 200)).frame)
    writer = threading.Thread(target=lambda: used.take(1, slow))
    writer.start()
    assert inside.wait(10)
    used.take(0, decoded(layout))
    close(used.run(2)[0], expected(layout, used.spec))
    go_on.set()
    writer.join(10)
    used.buffer.array[1] = 5.0
    used.take(0, decoded(layout, 2))
    found = used.run(2)
    close(found[0], expected(layout, used.spec, 2))
    assert (found[1] == 5.0).all()
    used.end()


def test_a_buffer_given_back_while_its_pictures_are_scaled(rig: Rig) -> None:
    """Their memory stays until the run has ended, or the run says that it is gone; it never reads what was freed."""
    assert rig.owner is not None
    layout = PictureLayout("bgr24", 90, 70)
    for _ in range(4):
        used = Used(rig)
        used.take(0, decoded(layout))
        used.run(1)
        used.take(0, decoded(layout, 2))
        hold = threading.Event()
        rig.owner.post(lambda hold=hold: hold.wait(10))  # type: ignore[misc]
        used.lane.submit(used.buffer, 1)
        releasing = threading.Thread(target=used.engine.release, args=(used.buffer,))
        releasing.start()
        hold.set()
        code = ""
        try:
            close(used.lane.collect()["y"][0], expected(layout, used.spec, 2))
        except EdgeError as error:
            code = error.code
            error.with_traceback(None)
        assert code in ("", "engine_state")
        releasing.join(10)
        used.engine.close()
        del used
    rig.machine.check()


def test_an_engine_that_is_closed_under_a_stuck_writer(rig: Rig) -> None:
    """Nobody releases its buffer: the picture's memory stays while it is written into, and is freed then."""
    assert rig.owner is not None
    used, layout = Used(rig), PictureLayout("nv12", 90, 70)
    inside, go_on = threading.Event(), threading.Event()

    class Slow(AvPixels):
        def copy_whole(self, target: NDArray[np.uint8]) -> None:
            inside.set()
            go_on.wait(10)
            super().copy_whole(target)

    assert used.take(0, decoded(layout))
    writer = threading.Thread(target=used.take, args=(1, Slow(decoded(layout).frame)))
    writer.start()
    assert inside.wait(10)
    used.engine.close()
    rig.owner.call(lambda: None)
    assert rig.machine.live()["host"] == 2  # the buffer, and the picture that is written
    go_on.set()
    writer.join(10)
    rig.owner.call(lambda: None)
    assert rig.machine.live()["host"] == 1
    assert not used.take(0, decoded(layout))  # and nothing new is made for it
    assert rig.machine.live()["host"] == 1
    used.engine.release(used.buffer)  # late


def test_memory_that_comes_when_its_buffer_is_gone_goes_back(pycuda: Rig) -> None:
    assert pycuda.owner is not None

    class Slow(PictureMemory):
        def make(self, nbytes: int) -> HostMemory | None:
            made = super().make(nbytes)
            pictures.release()
            return made

    memory = Slow(pycuda.owner, "m", mapped=False)
    pictures = Pictures(memory, InputSpec(SIDE, SIDE), 1)
    assert pictures.take(0, decoded(PictureLayout("nv12", 90, 70))) is None
    assert memory.used_bytes == 0


def test_a_picture_for_which_there_is_no_room_costs_its_place_nothing(
    pycuda: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    """Cameras of two sizes that share places: the GPU's thread makes no memory for each of their frames."""
    assert pycuda.owner is not None
    small, large = PictureLayout("nv12", 90, 70), PictureLayout("nv12", 180, 140)
    memory = PictureMemory(pycuda.owner, "m", mapped=False, most_bytes=2 * small.nbytes)
    pictures = Pictures(memory, InputSpec(SIDE, SIDE), 2)
    for index in range(2):
        assert pictures.take(index, decoded(small)) is not None
    calls = pycuda.machine.calls["cuMemHostAlloc"]
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert pictures.take(0, decoded(large)) is None
            assert pictures.take(0, decoded(small)) is not None
    assert pycuda.machine.calls["cuMemHostAlloc"] == calls
    assert len(caplog.records) == 1
    pictures.release()
    pictures.release()
    assert memory.used_bytes == 0


def test_without_memory_pictures_are_scaled_on_the_cpu(pycuda: Rig, caplog: pytest.LogCaptureFixture) -> None:
    used, layout = Used(pycuda), PictureLayout("nv12", 90, 70)
    pycuda.machine.inject("cuMemHostAlloc", 2)
    calls = pycuda.machine.calls["cuMemHostAlloc"]
    with caplog.at_level(logging.WARNING):
        for index in range(3):
            assert not used.take(index, decoded(layout))
    assert pycuda.machine.calls["cuMemHostAlloc"] == calls + 1
    assert [each.message for each in caplog.records if "scaled on the CPU" in each.message] != []
    assert len(caplog.records) == 1
    assert used.take(0, decoded(PictureLayout("nv12", 60, 40)))  # a smaller one may fit
    close(used.run(1)[0], expected(PictureLayout("nv12", 60, 40), used.spec))
    used.end()


def test_all_pictures_of_an_engine_are_bounded(pycuda: Rig) -> None:
    assert pycuda.owner is not None
    memory = PictureMemory(pycuda.owner, "m", mapped=False, most_bytes=10_000)
    hosts = [memory.make(4_000), memory.make(4_000), memory.make(4_000)]
    assert [each is not None for each in hosts] == [True, True, False]
    assert hosts[0] is not None
    assert hosts[1] is not None
    memory.give_back(hosts[0])
    assert memory.used_bytes == 4_000
    again = memory.make(6_000)
    assert again is not None
    for each in (hosts[1], again):
        memory.give_back(each)
    assert memory.used_bytes == 0
    assert expected_bytes(4) == 4 * 1920 * 1080 * 3 // 2
    assert expected_bytes(10_000) == room.MOST_BYTES


@pytest.mark.parametrize("call", ["cuLaunchKernel", "cuMemAlloc"])
def test_a_kernel_that_cannot_be_launched_is_that_runs_error(rig: Rig, call: str) -> None:
    used, layout = Used(rig), PictureLayout("nv12", 90, 70)
    used.buffer.array[:] = 1.0
    used.run(1)
    used.take(0, decoded(layout))
    rig.machine.inject(call, 2)
    if call == "cuLaunchKernel" or rig.kind is not MAPPED:
        with pytest.raises(EngineError) as caught:
            used.run(1)
        assert caught.value.code == "gpu_memory"
        caught.value.with_traceback(None)
        del caught
    else:  # nothing is allocated where the GPU reads pictures in place
        used.run(1)
        rig.machine.inject(call, None)
    used.take(0, decoded(layout, 3))
    if rig.kind is MAPPED and call == "cuMemAlloc":
        used.buffer.array[0] = 1.0
        rig.machine._faults.clear()
    close(used.run(1)[0], expected(layout, used.spec, 3))
    used.end()


def test_a_kernel_that_meets_a_sticky_error_ends_everything(pycuda: Rig) -> None:
    used, layout = Used(pycuda), PictureLayout("nv12", 90, 70)
    used.take(0, decoded(layout))
    pycuda.machine.inject("device:kernel", ILLEGAL_ADDRESS)
    with pytest.raises(EngineError) as caught:
        used.run(1)
    assert caught.value.code == "gpu_fatal"
    assert len(pycuda.fatal) == 1
    assert not used.take(1, decoded(PictureLayout("nv12", 400, 300)))  # no memory for it, and no error either
    used.engine.close()
    pycuda.stop()
    pycuda.machine.check()
    pycuda.machine.__init__()  # type: ignore[misc]  # what a sticky error leaves is nobody's


def test_an_engine_that_nobody_closed_goes_before_its_kernel(rig: Rig) -> None:
    used, layout = Used(rig), PictureLayout("nv12", 90, 70)
    used.take(0, decoded(layout))
    close(used.run(1)[0], expected(layout, used.spec))
    used.take(0, decoded(layout, 2))
    used.lane.submit(used.buffer, 1)
    assert rig.owner is not None
    rig.owner.call(lambda: None)  # it has begun
    used.engine.release(used.buffer)
    rig.stop()  # what runs ends first
    used.engine.close()
    answer = used.lane.collect()["y"]
    close(answer[0], expected(layout, used.spec, 2))
    # nobody had collected it: its memory stays, and with it the context
    assert rig.machine.live() in ({}, {"host": 1, "contexts": 1})
    rig.machine.check()
    del answer
    rig.machine.blocks.clear()
    rig.machine.retained = 0


# --- the kernel of a process


def scaler_of(rig: Rig, load: Any = lambda _: FakeNvrtc()) -> Scaler:
    assert rig.owner is not None
    assert rig.here is not None
    return Scaler(rig.owner, rig.here, rig.root / "kernels", load=load)


def none(name: str) -> Any:
    raise OSError(f"{name}: cannot open shared object file")


def wrong(machine: Any, values: Any, grid: Any, block: Any) -> None:
    kernel_cpu.on_machine(machine, [*values[:11], values[11] + 1, *values[12:]], grid, block)  # a pixel further right


@pytest.mark.parametrize("fault", ["nvrtc_missing", "letterbox_wrong", "letterbox_unsupported", "cuda_failed"])
def test_auto_does_without_and_gpu_says_why(pycuda: Rig, fault: str, caplog: pytest.LogCaptureFixture) -> None:
    scaler = scaler_of(pycuda, none if fault == "nvrtc_missing" else lambda _: FakeNvrtc())
    spec = InputSpec(64, 64, pixel="nv12" if fault == "letterbox_unsupported" else "float32")
    if fault == "letterbox_wrong":
        pycuda.machine.kernels[NAME] = wrong
    if fault == "cuda_failed":
        pycuda.machine.inject("cuModuleLoadData", 1)
    assert scaler.kernel_for(spec, "cpu", "tiny fp32") is None
    with caplog.at_level(logging.INFO):
        assert scaler.kernel_for(spec, "auto", "tiny fp32") is None
    assert "tiny fp32: pictures are scaled on the CPU: " in caplog.text
    for _ in range(2):
        with pytest.raises(EngineError) as caught:
            scaler.kernel_for(spec, "gpu", "tiny fp32")
        assert caught.value.code == fault
        assert caught.value.where == "tiny fp32"
        assert caught.value.remedy is not None
        assert 'letterbox = "auto"' in caught.value.remedy


def test_a_kernel_is_made_once_and_for_all_engines(pycuda: Rig) -> None:
    asked: list[str] = []

    def load(name: str) -> Any:
        asked.append(name)
        return FakeNvrtc()

    scaler = scaler_of(pycuda, load)
    wanted: tuple[Letterbox, ...] = ("auto", "gpu", "auto")
    kernels = [scaler.kernel_for(InputSpec(64, 64), each, "m") for each in wanted]
    assert kernels[0] is not None
    assert len({id(each) for each in kernels}) == 1
    assert len(asked) == 1
    assert pycuda.machine.live()["modules"] == 1
    assert {"device", "host", "streams", "events"} & set(pycuda.machine.live()) == set()  # its trial left nothing
    assert pycuda.here is not None
    image = kernel_image(pycuda.root / "kernels", SOURCE, pycuda.here, load=none)
    assert NAME.encode() in image  # kept for the next start


def test_where_the_cpu_scales_no_buffer_has_pictures(tmp_path: Path) -> None:
    made = Rig(PYCUDA, tmp_path)
    made.start()
    engine = made.load(echo(), labels=[str(n) for n in range(VALUES)])
    buffer = engine.allocate(1)
    assert buffer.pictures is None
    engine.release(buffer)
    engine.close()
    made.stop()
    made.machine.check_empty()
