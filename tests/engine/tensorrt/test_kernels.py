"""Kernels through the doors, timers, and NVRTC: on the fakes, and with the real compiler."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_runtime.engine.tensorrt.cuda import Cuda
from edge_runtime.engine.tensorrt.letterbox import NAME, SOURCE, LetterboxKernel, Source, reference
from edge_runtime.engine.tensorrt.nvrtc import compile_kernels, kernel_image
from edge_runtime.engine.tensorrt.probe import Here
from edge_runtime.errors import EngineError
from edge_runtime.records.frames import PictureLayout
from edge_runtime.records.spec import InputSpec
from tests.engine.tensorrt import kernel_cpu, real_bindings
from tests.engine.tensorrt.fake_nvrtc import IMAGE, FakeNvrtc
from tests.engine.tensorrt.rigs import TENSORRT, Kind, Rig

HERE = Here("10.3.0", "8.7", "Orin", "12.6", "36.4.3")


@pytest.fixture(params=[TENSORRT[0], TENSORRT[2]], ids=lambda kind: kind.name)
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    kind: Kind = request.param
    made = Rig(kind, tmp_path)
    made.machine.kernels[NAME] = kernel_cpu.on_machine
    made.start()
    yield made
    made.stop()
    made.machine.check_empty()


def letterboxed(cuda: Cuda, picture: Any, spec: InputSpec) -> Any:
    """On the owner's thread: a picture to the GPU, into a place, and back."""
    stream = cuda.stream()
    there, back = cuda.host(picture.nbytes), cuda.host(4 * int(np.prod(spec.shape)))
    source, place = cuda.allocate(picture.nbytes), cuda.allocate(back.nbytes)
    kernel = LetterboxKernel(cuda, IMAGE)
    start, end = cuda.timer(), cuda.timer()
    there.array[:] = picture.reshape(-1)
    cuda.copy_in(source.address, there, picture.nbytes, stream)
    cuda.record(start, stream)
    height, width, channels = picture.shape
    kernel.enqueue(Source("bgr24", width, height, source.address, width * channels), place.address, spec, stream)
    cuda.record(end, stream)
    cuda.copy_out(back, place.address, back.nbytes, stream)
    cuda.synchronise(stream)
    assert cuda.elapsed_ms(start, end) > 0
    answer = np.array(back.array).view(np.float32).reshape(spec.shape)
    kernel.close()
    kernel.close()
    for event in (start, end):
        cuda.free_event(event)
    for memory in (source, place):
        cuda.free(memory)
    for host in (there, back):
        cuda.free_host(host)
    cuda.free_stream(stream)
    return answer


def test_a_picture_goes_through_the_door(rig: Rig) -> None:
    picture = np.random.default_rng(2).integers(0, 255, (90, 161, 3), np.uint8)
    spec = InputSpec(64, 48, mean=(1.0, 2.0, 3.0))
    assert rig.owner is not None
    cuda = rig.owner.cuda
    try:
        found = rig.owner.call(lambda: letterboxed(cuda, picture, spec))
    except kernel_cpu.Unavailable as reason:
        pytest.skip(str(reason))
    np.testing.assert_allclose(found, reference(picture.reshape(-1), PictureLayout("bgr24", 161, 90), spec), atol=2e-3)


def test_what_is_no_kernel_is_refused(rig: Rig) -> None:
    owner = rig.owner
    assert owner is not None
    for image, name in ((b"nothing", NAME), (IMAGE, "another")):
        with pytest.raises(EngineError, match=r"image|symbol"):
            owner.call(lambda image=image, name=name: owner.cuda.load_kernel(image, name))  # type: ignore[misc]


def test_a_timer_that_is_none_has_no_time(rig: Rig) -> None:
    owner = rig.owner
    assert owner is not None

    def job() -> None:
        cuda = owner.cuda
        stream, plain, timer = cuda.stream(), cuda.event(), cuda.timer()
        for event in (plain, timer):
            cuda.record(event, stream)
        cuda.synchronise(stream)
        try:
            cuda.elapsed_ms(plain, timer)
        finally:
            for event in (plain, timer):
                cuda.free_event(event)
            cuda.free_stream(stream)

    with pytest.raises(EngineError, match="handle"):
        owner.call(job)


# --- NVRTC


def nvrtc_library() -> Any:
    try:
        return real_bindings.nvrtc()
    except real_bindings.Unavailable as reason:
        if os.environ.get("CI") == "true":
            pytest.fail(f"the real NVRTC has to be there in CI: {reason}")
        pytest.skip(f"no NVRTC: {reason}")


@pytest.mark.full
def test_the_real_nvrtc_compiles_it_for_an_orin(tmp_path: Path) -> None:
    library, asked = nvrtc_library(), []

    def load(name: str) -> Any:
        asked.append(name)
        return library

    image = kernel_image(tmp_path, SOURCE, HERE, load=load)
    assert image.startswith(b"\x7fELF")
    assert NAME.encode() in image
    assert asked == ["libnvrtc.so.12"]
    assert kernel_image(tmp_path, SOURCE, HERE, load=load) == image  # as it was kept
    assert len(asked) == 1
    (kept,) = tmp_path.iterdir()
    kept.write_bytes(kept.read_bytes()[:-1])
    assert kernel_image(tmp_path, SOURCE, HERE, load=load) == image
    assert len(asked) == 2
    with pytest.raises(EngineError, match=r'bad\.cu.*"x" is undefined') as error:
        compile_kernels('extern "C" __global__ void f() { x; }', "bad.cu", HERE, load=load)
    assert error.value.code == "kernel_invalid"


def test_an_older_compiler_is_taken_and_never_a_newer_one(tmp_path: Path) -> None:
    library, asked = FakeNvrtc(), []

    def load(name: str) -> Any:
        asked.append(name)
        if not name.endswith("libnvrtc.so.12"):
            raise OSError(f"{name}: cannot open shared object file")
        return library

    here = Here("10.13.3", "11.0", "Thor", "13.0", "38.2")
    assert kernel_image(tmp_path / "kernels", SOURCE, here, load=load) == IMAGE
    assert library.options[0] == b"-arch=sm_110"
    assert {name.rpartition(".")[2] for name in asked} == {"13", "12"}
    assert library.open == 0
    with pytest.raises(EngineError, match=r"no NVRTC of CUDA 11") as error:
        compile_kernels("", "x.cu", Here("10.3.0", "8.7", "Orin", "11.4"), load=load)
    assert error.value.code == "nvrtc_missing"


@pytest.mark.parametrize("call", ["create", "compile", "size"])
def test_nothing_of_a_compilation_that_failed_stays(call: str, tmp_path: Path) -> None:
    library: Any = FakeNvrtc(**{call: 1})
    with pytest.raises(EngineError) as error:
        kernel_image(tmp_path, SOURCE, HERE, load=lambda _: library)
    assert error.value.code == "kernel_invalid"
    assert library.open == 0
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert kernel_image(tmp_path / "file" / "kernels", SOURCE, HERE, load=lambda _: FakeNvrtc()) == IMAGE
