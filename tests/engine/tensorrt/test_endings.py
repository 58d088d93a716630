"""Starts and ends that cross: what is closed while its thread ends, a start that fails or is given up, late writers."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from edge_runtime.engine.tensorrt import owner as owners
from edge_runtime.engine.tensorrt.bindings_door import CudaBindingsDoor
from edge_runtime.engine.tensorrt.cuda import Cuda, CudaFatal
from edge_runtime.engine.tensorrt.owner import GpuOwner
from edge_runtime.errors import EngineError
from tests.awaiting import wait_until
from tests.engine.graphs import classifier
from tests.engine.tensorrt.fake_bindings import make_driver
from tests.engine.tensorrt.fake_machine import Machine
from tests.engine.tensorrt.rigs import TENSORRT, USUAL, Kind, Rig
from tests.engine.tensorrt.test_owner import SOON_S, PlainDoor, made

KINDS = pytest.mark.parametrize("kind", [each for each in TENSORRT if each.name in USUAL], ids=lambda each: each.name)


def started(kind: Kind, root: Path) -> tuple[Rig, GpuOwner]:
    rig = Rig(kind, root)
    rig.start()
    assert rig.owner is not None
    return rig, rig.owner


class Held:
    """Keeps the thread "gpu" in a job until it is let go of."""

    def __init__(self, owner: GpuOwner) -> None:
        inside, self._go_on = threading.Event(), threading.Event()

        def hold() -> None:
            inside.set()
            self._go_on.wait(SOON_S)

        owner.post(hold)
        assert inside.wait(SOON_S)

    def let_go(self) -> None:
        self._go_on.set()


class Aside:
    """Runs on a thread of its own, and keeps what was raised."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.error: EngineError | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except EngineError as error:
            self.error = error.with_traceback(None)

    def join(self) -> None:
        self._thread.join(SOON_S)
        assert not self._thread.is_alive()


@KINDS
def test_an_engine_that_is_closed_while_its_thread_ends(kind: Kind, tmp_path: Path) -> None:
    rig, owner = started(kind, tmp_path)
    engine = rig.load(classifier())
    held = Held(owner)
    closing = Aside(engine.close)
    wait_until(lambda: owner._jobs.qsize() == 1)
    assert owner.stop(0.0) == ["gpu"]
    held.let_go()
    rig.stop()
    closing.join()
    assert closing.error is None
    rig.machine.check_empty()  # TensorRT's objects went before the context


@KINDS
def test_a_buffer_that_is_given_back_while_its_thread_ends(kind: Kind, tmp_path: Path) -> None:
    rig, owner = started(kind, tmp_path)
    engine = rig.load(classifier())
    buffer = engine.allocate(1)
    held = Held(owner)
    releasing = Aside(lambda: engine.release(buffer))
    wait_until(lambda: owner._jobs.qsize() == 2)
    assert owner.stop(0.0) == ["gpu"]
    held.let_go()
    rig.stop()
    releasing.join()
    assert releasing.error is None
    rig.machine.check_empty()


@KINDS
def test_a_stuck_writer_keeps_its_memory_when_its_engine_is_gone(kind: Kind, tmp_path: Path) -> None:
    rig, owner = started(kind, tmp_path)
    engine = rig.load(classifier())
    place = engine.allocate(2).array[1]
    engine.close()
    del engine
    owner.call(gc.collect)  # the one thread on which PyCUDA would free it at once
    place[:] = 7.0
    assert (place == 7.0).all()
    assert rig.machine.live()["host"] == 1
    rig.machine.check()
    del place
    owner.call(lambda: None)
    rig.stop()
    rig.machine.check_empty()


@KINDS
def test_what_is_let_go_of_after_the_end_is_not_destroyed_on_another_thread(kind: Kind, tmp_path: Path) -> None:
    rig, _ = started(kind, tmp_path)
    engine = rig.load(classifier())
    buffer = engine.allocate(1)
    engine.close()
    rig.stop()
    engine.release(buffer)
    del engine, buffer
    gc.collect()
    rig.machine.check()
    assert rig.machine.live() == {"host": 1, "contexts": 1}  # it stays mapped, and so its context


def test_a_gpu_that_fails_at_its_start_does_not_end_the_process() -> None:
    told: list[str] = []
    door = PlainDoor(CudaFatal("cuDevicePrimaryCtxRetain", 999, "unknown error"))
    owner = made(door, told.append)
    with pytest.raises(EngineError, match="unknown error") as caught:
        owner.start()
    assert (caught.value.code, caught.value.where, told, owner.fatals) == ("cuda_failed", "GPU", [], 0)
    assert owner.ended
    assert door.calls[-1] == "stop on gpu"


def test_a_start_that_is_given_up_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(owners._Call, "wait", interrupted)
    door = PlainDoor()
    owner = made(door)
    with pytest.raises(KeyboardInterrupt):
        owner.start()
    assert owner.ended
    assert door.calls == ["start on gpu", "stop on gpu"]


def test_a_thread_that_a_fault_has_ended_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []
    owner = made(PlainDoor(), told.append)
    owner.start()

    def worse(_: EngineError) -> None:
        raise RuntimeError("and who waits for it is broken")

    owner.post(lambda: 1 // 0, worse)
    wait_until(lambda: told)
    assert owner.ended
    assert "who waits for it is broken" in told[0]
    assert "thread gpu died" in caplog.text
    assert owner.stop(SOON_S) == []


def bindings(**wrong: BaseException) -> tuple[CudaBindingsDoor, Machine]:
    """A door whose library raises at some calls, as cuda.bindings does."""
    machine = Machine()
    driver = make_driver(machine)
    for name, error in wrong.items():

        def function(*_: Any, error: BaseException = error) -> Any:
            raise error

        function.__name__ = name
        setattr(driver, name, function)
    return CudaBindingsDoor(driver), machine


def test_bindings_that_do_not_find_the_drivers_library() -> None:
    door, machine = bindings(cuInit=RuntimeError("Failed to dlopen libcuda.so.1"))
    with pytest.raises(EngineError, match=r"cuInit cannot be called: Failed to dlopen") as caught:
        GpuOwner(cast(Cuda, door)).start()
    assert caught.value.code == "cuda_missing"
    assert "docs/jetson.md" in (caught.value.remedy or "")
    machine.check_empty()


def test_bindings_that_are_newer_than_the_driver() -> None:
    door, machine = bindings(cuEventElapsedTime=RuntimeError('Function "cuEventElapsedTime_v2" not found'))
    owner = GpuOwner(cast(Cuda, door))
    owner.start()

    def measure() -> None:
        timers = [door.timer(), door.timer()]
        try:
            door.elapsed_ms(*timers)
        finally:
            for each in timers:
                door.free_event(each)

    with pytest.raises(EngineError, match="cuEventElapsedTime_v2") as caught:
        owner.call(measure)
    assert (caught.value.code, caught.value.where) == ("cuda_missing", "cuda.bindings")
    assert not owner.is_dead()
    assert owner.stop(SOON_S) == []
    machine.check_empty()
