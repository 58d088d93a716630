"""The fakes see what there is to see of whole pictures: the backend, made wrong in one place, does not pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_runtime.camera.av_pixels import AvPixels
from edge_runtime.engine.tensorrt.cuda import HostMemory
from edge_runtime.engine.tensorrt.inlet import Inlet
from edge_runtime.engine.tensorrt.letterbox import LetterboxKernel
from edge_runtime.engine.tensorrt.owner import GpuOwner
from edge_runtime.engine.tensorrt.pictures import Pictures
from edge_runtime.errors import EngineError
from edge_runtime.records.frames import PictureLayout
from tests.engine.tensorrt.fake_parts import Segfault
from tests.engine.tensorrt.rigs import TENSORRT, Kind, Rig
from tests.engine.tensorrt.test_pictures import Used, compiled, decoded, expected

PYCUDA, MAPPED, BINDINGS = TENSORRT[0], TENSORRT[1], TENSORRT[2]
NOT_COLLECTED = {"host": 1, "contexts": 1}
"""What a run leaves whose answer nobody collects: its memory, and for that the context."""
SIZES = ((60, 50), (90, 70), (110, 80))

Patch = Callable[[pytest.MonkeyPatch], None]


def live(rig: Rig) -> list[str]:
    """Run pictures of all sizes beside written places, give buffers back, stop without closing. What went wrong."""
    found: list[str] = []
    try:
        rig.start()
        used = Used(rig)
        for seed, size in enumerate(SIZES, 1):
            found += mixed(used, PictureLayout("nv12", *size), seed)
        used.buffer.array[:2] = 3.0
        if not (used.run(2) == 3.0).all():
            found.append("a picture was used twice")
        release_under_a_writer(used)
        used.buffer = used.engine.allocate(1)
        used.take(0, decoded(PictureLayout("bgr24", 90, 70)))
        used.lane.submit(used.buffer, 1)
        used.engine.release(used.buffer)
    except (EngineError, Segfault) as error:
        found.append(str(error))
        error.with_traceback(None)
    rig.stop()
    try:
        rig.machine.check()
    except AssertionError as error:
        found.append(str(error))
        error.with_traceback(None)
    held = {name: count for name, count in rig.machine.live().items() if count > NOT_COLLECTED.get(name, 0)}
    return [*found, *rig.fatal, *(f"{count} {name} left" for name, count in held.items())]


def release_under_a_writer(used: Used) -> None:
    """The buffer goes back while somebody still copies a picture into it."""
    rig = used.rig

    class Slow(AvPixels):
        def copy_whole(self, target: NDArray[np.uint8]) -> None:
            used.engine.release(used.buffer)
            assert rig.owner is not None
            rig.owner.call(lambda: None)
            super().copy_whole(target)

    assert used.buffer.pictures is not None
    used.buffer.pictures.take(3, Slow(decoded(PictureLayout("rgba", 90, 70)).frame))


def mixed(used: Used, layout: PictureLayout, seed: int) -> list[str]:
    wanted = [expected(layout, used.spec, seed), np.full(used.spec.shape, seed, np.float32).reshape(-1)]
    wanted.append(expected(layout, used.spec, seed + 1))
    used.take(0, decoded(layout, seed))
    used.buffer.array[1] = seed
    used.take(2, decoded(layout, seed + 1))
    answers = used.run(4)
    right = (np.allclose(found, each, atol=2e-3) for found, each in zip(answers, wanted, strict=False))
    return [f"place {index} of {layout} is wrong" for index, fine in enumerate(right) if not fine]


def uploads_nothing(patch: pytest.MonkeyPatch) -> None:
    scale = Inlet._scale

    def wrong(self: Any, picture: Any, place: int, stream: Any) -> None:
        patch.setattr(self._cuda, "copy_in", lambda *_: None)
        scale(self, picture, place, stream)
        patch.undo()
        uploads_nothing(patch)

    patch.setattr(Inlet, "_scale", wrong)


def never_grows(patch: pytest.MonkeyPatch) -> None:
    grow = Inlet.grow
    patch.setattr(Inlet, "grow", lambda self, pictures: None if self._picture else grow(self, pictures))


def frees_no_picture(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Inlet, "free", lambda _: None)


def copies_over_what_was_scaled(patch: pytest.MonkeyPatch) -> None:
    enqueue = Inlet.enqueue

    def wrong(self: Any, address: int, host: Any, nbytes: int, count: int, pictures: Any, stream: Any) -> None:
        enqueue(self, address, host, nbytes, count, pictures, stream)
        self._cuda.copy_in(address, host, nbytes * count, stream)

    patch.setattr(Inlet, "enqueue", wrong)


def takes_every_picture_for_the_first_place(patch: pytest.MonkeyPatch) -> None:
    begin = Pictures.begin_run
    patch.setattr(Pictures, "begin_run", lambda *given: tuple(replace(each, index=0) for each in begin(*given)))


def keeps_pictures_for_the_next_run(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        Pictures, "begin_run", lambda self, count: tuple(each for each in self._waiting[:count] if each is not None)
    )


def frees_memory_that_is_looked_at(patch: pytest.MonkeyPatch) -> None:
    let_go = HostMemory.let_go

    def wrong(self: Any, free: Any) -> None:
        free()
        let_go(self, lambda: None)

    patch.setattr(HostMemory, "let_go", wrong)


def gives_nothing_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pictures, "release", lambda _: None)


def unloads_the_kernel_before_the_engines_end(patch: pytest.MonkeyPatch) -> None:
    adopt = GpuOwner.adopt

    def wrong(self: Any, living: Any) -> None:
        adopt(self, living)
        self._living.sort(key=lambda each: isinstance(each, LetterboxKernel))

    patch.setattr(GpuOwner, "adopt", wrong)


def launches_on_the_writers_thread(patch: pytest.MonkeyPatch) -> None:
    take = Pictures.take

    def wrong(self: Any, index: int, pixels: Any) -> Any:
        self._memory._owner.cuda.host(64)
        return take(self, index, pixels)

    patch.setattr(Pictures, "take", wrong)


@pytest.mark.parametrize("kind", [PYCUDA, MAPPED, BINDINGS], ids=lambda kind: kind.name)
def test_a_right_one_passes(kind: Kind, tmp_path: Path) -> None:
    compiled()
    assert live(Rig(kind, tmp_path, scales=True)) == []


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (PYCUDA, uploads_nothing),
        (BINDINGS, never_grows),
        (PYCUDA, frees_no_picture),
        (BINDINGS, copies_over_what_was_scaled),
        (MAPPED, takes_every_picture_for_the_first_place),
        (PYCUDA, keeps_pictures_for_the_next_run),
        (MAPPED, frees_memory_that_is_looked_at),
        (BINDINGS, gives_nothing_back),
        (BINDINGS, unloads_the_kernel_before_the_engines_end),
        (PYCUDA, launches_on_the_writers_thread),
    ],
    ids=lambda value: value.name if isinstance(value, Kind) else value.__name__,
)
def test_a_wrong_one_is_seen(kind: Kind, wrong: Patch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled()
    wrong(monkeypatch)
    assert live(Rig(kind, tmp_path, scales=True)) != []
