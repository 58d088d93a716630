"""TensorRT and CUDA fail, at every call that the backend makes of them, one at a time.

What comes of it is an error of ours with words, or the right answer: never a wrong one, nothing left behind, no wait
without an end.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_runtime.errors import EdgeError, EngineError
from tests.engine.graphs import classifier, data_dependent
from tests.engine.tensorrt.fake_parts import ILLEGAL_ADDRESS, Segfault
from tests.engine.tensorrt.rigs import TENSORRT, USUAL, Kind, Rig, fill

USED = tuple(kind for kind in TENSORRT if kind.name in USUAL)
ALLOCATIONS = ("cuMemAlloc", "cuMemHostAlloc")
ENDINGS = (
    "cuMemFree",
    "cuMemFreeHost",
    "cuStreamDestroy",
    "cuEventDestroy",
    "cuGraphExecDestroy",
    "cuGraphDestroy",
    "cuDevicePrimaryCtxRelease",
    "cuCtxPopCurrent",
)
"""Where these fail, something is left: nobody can free what the driver does not."""
STARTING = ("cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent")
"""Where these fail, nothing of the process's is on the GPU yet: it goes on without."""
WRONG: dict[str, Any] = {
    "ICudaEngine.get_tensor_dtype": "BF16",
    "ICudaEngine.get_tensor_location": "HOST",
    "ICudaEngine.get_tensor_format": "CHW32",
    "IExecutionContext.infer_shapes": ["x"],
}
"""What a call gives in place of its usual answer, where that is neither None nor false."""
TELLING = (
    "get_tensor_name",
    "get_tensor_mode",
    "get_tensor_shape",
    "get_tensor_profile_shape",
    "create_engine_inspector",
)
"""What cannot fail: they read what is there."""


class Life:
    """A whole life of an engine, with everything in it that a daemon does. Collects what went wrong."""

    def __init__(self, kind: Kind, root: Path, model: bytes, **options: Any) -> None:
        self.rig = Rig(kind, root)
        self.model, self.options = model, options
        self.errors: list[EdgeError] = []
        self.wrong: list[str] = []
        self.answers = 0

    def live(self) -> None:
        """Start, load, run, close and stop; after an error what is left of it."""
        try:
            self.rig.start()
        except EdgeError as error:
            self.errors.append(told(error))
        else:
            try:
                self._load_and_run()
            except EdgeError as error:
                self.errors.append(told(error))
            except Segfault as error:
                self.wrong.append(f"segmentation fault: {error}")
        self.rig.stop()

    def _load_and_run(self) -> None:
        engine = self.rig.load(self.model, batches=(1, 2, 3), **self.options)
        buffers = []
        try:
            lanes = [engine.open_lane(), engine.open_lane()]
            for _ in range(2):
                buffers.append(engine.allocate(3))  # noqa: PERF401  what was made is given back if the next fails
            for seed, count in enumerate([1, 1, 1, 3, 3, 2, 1, 1, 1]):
                lane, buffer = lanes[seed % 2 if seed > 6 else 0], buffers[seed % 2 if seed > 2 else 0]
                self._run(lane, buffer, seed, count)
            engine.release(buffers.pop())
            self._run(lanes[0], buffers[0], 99, 3)
        finally:
            try:
                engine.close()
            finally:
                for buffer in buffers:
                    engine.release(buffer)

    def _run(self, lane: Any, buffer: Any, seed: int, count: int) -> None:
        expected = self._picture(buffer.array, seed, count)
        try:
            lane.submit(buffer, count)
            result = lane.collect()["y"]
        except EngineError as error:
            self.errors.append(told(error))
            return
        self.answers += 1
        if result.shape != expected.shape or not np.allclose(result, expected, rtol=1e-5):
            self.wrong.append(f"seed {seed}, batch {count}: {result} and not {expected}")

    def _picture(self, array: np.ndarray[Any, Any], seed: int, count: int) -> np.ndarray[Any, Any]:
        if self.options:  # the data-dependent model
            array[:] = seed % 7 + 1
            return np.full((count, seed % 7 + 1), seed % 7 + 1, np.float32)
        return fill(array, seed, count)


def told(error: EdgeError) -> EdgeError:
    """The error, without the frames that it went through: they hold what it is about."""
    return error.with_traceback(None)


def sites(kind: Kind, root: Path, model: bytes, **options: Any) -> dict[str, int]:
    """Every call that a life makes, and how often."""
    life = Life(kind, root, model, **options)
    life.live()
    life.rig.machine.check_empty()
    assert (life.errors, life.wrong, life.answers) == ([], [], 10)
    return dict(life.rig.machine.calls)


def times(count: int) -> list[int]:
    """After how many good calls one fails: at once, later, at last."""
    return sorted({0, 1, count // 2, count - 1} & set(range(count)))


MODELS: dict[str, tuple[bytes, dict[str, Any]]] = {
    "plain": (classifier(), {}),
    "data": (data_dependent(), {"labels": [str(n) for n in range(128)]}),
}


def plans(kind: Kind, root: Path, which: str) -> Iterator[tuple[str, Any, int]]:
    """(call, what it gives, after how many) of every fault that is no sticky error."""
    model, options = MODELS[which]
    for site, count in sites(kind, root, model, **options).items():
        if site.startswith("device:") or site.rpartition(".")[2] in TELLING:
            continue
        cuda = site.startswith("cu")
        value = 2 if site in ALLOCATIONS else 1 if cuda else WRONG.get(site, "told by the fake")
        for after in times(count):
            yield site, value, after


def worded(error: EdgeError) -> bool:
    return bool(error.code) and len(error.message) > 10 and bool(error.where or error.remedy)


def faults(life: Life, site: str) -> list[str]:
    """What is not as it has to be after any fault."""
    machine = life.rig.machine
    left = "were left in it" if site in ENDINGS else "?"
    found = [*life.wrong, *(each for each in machine.violations if left not in each), *life.rig.fatal]
    found += [f"an error without words: {error}" for error in life.errors if not worded(error)]
    if site not in ENDINGS:
        found += [f"{count} {name} left" for name, count in machine.live().items()]
        if not life.errors and life.answers != 10:
            found.append("an answer is missing, and no error says why")
    return found


def one_by_one(kind: Kind, root: Path, which: str, share: int) -> int:
    """Every `share`th fault, each in a life of its own. Returns how many there were."""
    model, options = MODELS[which]
    found, done = [], 0
    for site, value, after in list(plans(kind, root, which))[::share]:
        life = Life(kind, root, model, **options)
        life.rig.machine.inject(site, value, after=after)
        life.live()
        found += [f"{site} after {after}: {each}" for each in faults(life, site)]
        done += 1
    assert found == []
    return done


@pytest.mark.parametrize("kind", USED, ids=lambda kind: kind.name)
def test_some_calls_fail(kind: Kind, tmp_path: Path) -> None:
    assert one_by_one(kind, tmp_path, "plain", 7) > 5


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("which", MODELS)
@pytest.mark.parametrize("kind", TENSORRT, ids=lambda kind: kind.name)
def test_every_call_fails_once(kind: Kind, which: str, tmp_path: Path) -> None:
    assert one_by_one(kind, tmp_path, which, 1) > 40


def sticky_one_by_one(kind: Kind, root: Path, which: str, share: int, code: int) -> int:
    model, options = MODELS[which]
    found = sites(kind, root, model, **options)
    places = [
        (site, after) for site, count in found.items() if site.startswith(("cu", "device:")) for after in times(count)
    ]
    done = 0
    for site, after in places[::share]:
        life = Life(kind, root, model, **options)
        life.rig.machine.inject(site, code, after=after)
        life.live()
        where = f"{site} after {after}"
        machine = life.rig.machine
        assert life.wrong == [], where
        assert [each for each in machine.violations if "aborted" in each or "fault" in each] == [], where
        machine._stacks.clear() if site == "cuCtxPopCurrent" else None
        machine.check()
        if machine.sticky and not (life.answers == 10 and not life.errors):  # it was met while something was to be done
            assert life.errors, where
            if site in STARTING:
                assert ([error.code for error in life.errors], life.rig.fatal) == (["cuda_failed"], []), where
                continue
            assert life.errors[0].code == "gpu_fatal", (where, life.errors)
            assert {error.code for error in life.errors} == {"gpu_fatal"}, (where, life.errors)
            owner = life.rig.owner
            assert owner is not None
            assert len(life.rig.fatal) == owner.fatals == 1, where
        done += 1
    return done


@pytest.mark.parametrize("kind", USED, ids=lambda kind: kind.name)
def test_a_sticky_error_ends_everything_at_once(kind: Kind, tmp_path: Path) -> None:
    assert sticky_one_by_one(kind, tmp_path, "plain", 9, ILLEGAL_ADDRESS) > 5


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("which", MODELS)
@pytest.mark.parametrize("code", [700, 702, 714, 719, 999])
@pytest.mark.parametrize("kind", TENSORRT, ids=lambda kind: kind.name)
def test_every_call_meets_a_sticky_error(kind: Kind, code: int, which: str, tmp_path: Path) -> None:
    assert sticky_one_by_one(kind, tmp_path, which, 1, code) > 30
