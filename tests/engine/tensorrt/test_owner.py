"""The thread "gpu": one thread for all work, no lane waits for another, errors reach whoever waits, ends are clean."""

from __future__ import annotations

import gc
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import cast

import pytest

from edge_runtime.engine.tensorrt.cuda import Cuda, CudaError, CudaFatal
from edge_runtime.engine.tensorrt.owner import GpuOwner, Watch
from edge_runtime.errors import EngineError

SOON_S = 10.0


class PlainDoor:
    """Only starts and stops."""

    def __init__(self, error: EngineError | None = None) -> None:
        self.error = error
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append(f"start on {threading.current_thread().name}")
        if self.error is not None:
            raise self.error

    def stop(self) -> None:
        self.calls.append(f"stop on {threading.current_thread().name}")


def made(door: PlainDoor, on_fatal: Callable[[str], None] | None = None) -> GpuOwner:
    return GpuOwner(cast(Cuda, door), on_fatal)


@pytest.fixture
def owner() -> Iterator[GpuOwner]:
    owner = made(PlainDoor())
    owner.start()
    yield owner
    assert owner.stop(SOON_S) == []


class Run:
    """A run of a lane that ends when the test says so."""

    def __init__(self) -> None:
        self.over = False
        self.looks = 0
        self.looked = threading.Event()
        self.error: EngineError | None = None
        self.finished = threading.Event()
        self.raises: EngineError | None = None
        self.watch = Watch(self._poll, self._finish)

    def _poll(self) -> bool:
        self.looks += 1
        self.looked.set()
        if self.raises is not None:
            raise self.raises
        return self.over

    def _finish(self, error: EngineError | None) -> None:
        self.error = error
        self.finished.set()


def test_everything_runs_on_one_thread() -> None:
    door = PlainDoor()
    owner = made(door)
    owner.start()
    assert owner.call(lambda: threading.current_thread().name) == "gpu"
    assert owner.call(lambda: owner.call(lambda: owner.on_thread))
    assert not owner.on_thread
    assert owner.stop(SOON_S) == []
    assert owner.stop(SOON_S) == []
    assert owner.ended
    assert door.calls == ["start on gpu", "stop on gpu"]


def test_a_gpu_that_cannot_be_had() -> None:
    owner = made(PlainDoor(CudaError("cuInit", 100, "no CUDA-capable device is detected")))
    with pytest.raises(CudaError, match="no CUDA-capable device"):
        owner.start()
    assert owner.ended
    with pytest.raises(EngineError) as caught:
        owner.call(lambda: None)
    assert caught.value.code == "engine_state"


def test_errors_go_to_whoever_asked(owner: GpuOwner) -> None:
    with pytest.raises(ZeroDivisionError):
        owner.call(lambda: 1 // 0)
    assert owner.call(lambda: 7) == 7


def test_an_error_keeps_nothing_of_the_job_alive(owner: GpuOwner) -> None:
    class Thing:
        pass

    alive: list[weakref.ref[Thing]] = []

    def job() -> None:
        thing = Thing()
        alive.append(weakref.ref(thing))
        raise CudaError("cuMemAlloc", 2, "out of memory")

    with pytest.raises(CudaError) as caught:
        owner.call(job)
    assert caught.value.code == "gpu_memory"
    assert caught.value.retryable
    assert alive[0]() is None


def test_a_job_that_nobody_waits_for_may_fail(owner: GpuOwner, caplog: pytest.LogCaptureFixture) -> None:
    owner.post(lambda: 1 // 0)
    assert owner.call(lambda: 7) == 7
    assert "failed" in caplog.text


def test_one_lane_never_waits_for_another(owner: GpuOwner) -> None:
    slow, fast = Run(), Run()
    fast.over = True
    owner.call(lambda: owner.watch(slow.watch))
    assert slow.looked.wait(SOON_S)
    for _ in range(50):
        fast.finished.clear()
        owner.post(lambda: owner.watch(fast.watch))
        assert fast.finished.wait(SOON_S)
    assert not slow.finished.is_set()
    slow.over = True
    assert slow.finished.wait(SOON_S)
    assert slow.error is None


def test_an_error_of_one_run_is_its_own(owner: GpuOwner) -> None:
    bad, good = Run(), Run()
    bad.raises = CudaError("cuEventQuery", 1, "invalid argument")
    for run in (bad, good):
        owner.call(partial(owner.watch, run.watch))
    assert bad.finished.wait(SOON_S)
    assert bad.error is bad.raises
    good.over = True
    assert good.finished.wait(SOON_S)
    assert good.error is None
    assert not owner.is_dead()


def test_a_sticky_error_ends_everything_once() -> None:
    told: list[str] = []
    door = PlainDoor()
    owner = made(door, told.append)
    owner.start()
    waiting, bad = Run(), Run()
    owner.call(lambda: owner.watch(waiting.watch))
    bad.raises = CudaFatal("cuEventQuery", 700, "an illegal memory access was encountered")
    owner.post(lambda: owner.watch(bad.watch))
    for run in (waiting, bad):
        assert run.finished.wait(SOON_S)
        assert isinstance(run.error, CudaFatal)
        assert run.error.code == "gpu_fatal"
    with pytest.raises(CudaFatal, match="illegal memory access"):
        owner.call(lambda: None)
    with pytest.raises(CudaFatal):
        owner.require_alive()
    assert owner.fatals == 1
    assert len(told) == 1
    assert "700" in told[0]
    assert owner.stop(SOON_S) == []
    assert door.calls[-1] == "stop on gpu"


def test_a_job_that_meets_a_sticky_error_hears_of_it() -> None:
    owner = made(PlainDoor())
    owner.start()

    def job() -> None:
        raise CudaFatal("cuMemAlloc", 719, "unspecified launch failure")

    with pytest.raises(CudaFatal):
        owner.call(job)
    assert owner.is_dead()
    refused: list[EngineError] = []
    heard = threading.Event()

    def hear(error: EngineError) -> None:
        refused.append(error)
        heard.set()

    owner.post(job, hear)
    assert heard.wait(SOON_S)
    assert refused[0].code == "gpu_fatal"
    assert owner.stop(SOON_S) == []


def test_what_lives_is_closed_before_the_door() -> None:
    door = PlainDoor()
    owner = made(door)
    owner.start()

    class Living:
        def close(self) -> None:
            door.calls.append(f"close on {threading.current_thread().name}")
            owner.post(lambda: door.calls.append("freed"))
            owner.disown(self)
            if len(door.calls) == 2:
                raise RuntimeError("cannot")

    for living in (Living(), Living()):
        owner.call(partial(owner.adopt, living))
    assert owner.stop(SOON_S) == []
    assert door.calls == ["start on gpu", "close on gpu", "close on gpu", "freed", "freed", "stop on gpu"]


def answer_of(owner: GpuOwner) -> str:
    try:
        owner.call(lambda: None)
    except EngineError as error:
        return error.code
    return "done"


def test_no_job_is_ever_lost(owner: GpuOwner) -> None:
    """Whoever asks while the thread ends gets an answer: done or refused."""
    outcomes: list[str] = []

    def ask() -> None:
        while (answer := answer_of(owner)) == "done":
            pass
        outcomes.append(answer)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert owner.stop(SOON_S) == []
    for thread in threads:
        thread.join(SOON_S)
        assert not thread.is_alive()
    assert outcomes == ["engine_state"] * 3


def test_memory_is_given_back_from_within_a_collection(owner: GpuOwner) -> None:
    class Cycle:
        def __init__(self) -> None:
            self.me = self

    done = threading.Event()
    weakref.finalize(Cycle(), lambda: owner.post(done.set))
    owner.call(gc.collect)
    assert done.wait(SOON_S)


def test_a_stuck_driver_is_named(caplog: pytest.LogCaptureFixture) -> None:
    owner = made(PlainDoor())
    owner.start()
    stuck, go_on = threading.Event(), threading.Event()

    def hang() -> None:
        stuck.set()
        go_on.wait(SOON_S)

    owner.post(hang)
    assert stuck.wait(SOON_S)
    assert owner.stop(0.01) == ["gpu"]
    go_on.set()
    assert owner.stop(SOON_S) == []


def test_the_first_look_comes_just_before_the_end() -> None:
    watch = Watch(lambda: True, Run()._finish)
    watch.begin(100.0)
    assert 100.0 < watch.due_s < 100.001  # nothing is known yet
    watch.missed(watch.due_s)
    watch.ended(100.010)
    assert watch.expected_s == pytest.approx(0.010)
    watch.begin(200.0)
    assert watch.due_s == pytest.approx(200.009)
    watch.missed(200.009)
    assert watch.due_s == pytest.approx(200.0092)  # 2 % of a run later
    watch.begin(300.0)
    for _ in range(100):
        watch.missed(watch.due_s)
    assert watch.due_s < 300.009 + 100 * 0.001 + 1e-6  # at most a millisecond apart, however late it is


def replay(watch: Watch, took_s: float, runs: int) -> tuple[float, int]:
    """(delay until the end is seen, looks for it) of the last of so many runs that take `took_s`."""
    for _ in range(runs):
        watch.begin(0.0)
        now_s, looks = watch.due_s, 1
        while now_s < took_s:
            watch.missed(now_s)
            now_s, looks = watch.due_s, looks + 1
        watch.ended(now_s)
    return now_s - took_s, looks


@pytest.mark.parametrize("took_s", [0.0003, 0.002, 0.010, 0.100])
def test_what_a_run_takes_is_learnt_and_its_end_is_seen_at_once(took_s: float) -> None:
    watch = Watch(lambda: True, Run()._finish)
    for before_s in (0.0, 10 * took_s, took_s / 10):
        if before_s:
            replay(watch, before_s, 100)
        delay_s, looks = replay(watch, took_s, 200)
        assert delay_s <= max(0.06 * took_s, 100e-6)
        assert looks <= 12


def test_one_pause_of_the_owner_does_not_spoil_what_was_learnt() -> None:
    watch = Watch(lambda: True, Run()._finish)
    replay(watch, 0.010, 100)
    watch.begin(0.0)
    watch.missed(0.009)
    watch.ended(0.500)
    delay_s, _ = replay(watch, 0.010, 1)
    assert delay_s < 0.001


def test_nobody_hears_of_a_door_that_does_not_close(caplog: pytest.LogCaptureFixture) -> None:
    class Bad(PlainDoor):
        def stop(self) -> None:
            raise CudaError("cuCtxPopCurrent", 201, "invalid device context")

    owner = made(Bad())
    owner.start()
    with caplog.at_level(logging.ERROR):
        assert owner.stop(SOON_S) == []
    assert "could not be given back" in caplog.text


def test_the_shortest_waits_end() -> None:
    """SimpleQueue.get with a time-out may wait for ever where that runs out between two looks of its own (Python 3.10
    to 3.12): here once in some thousand waits of a nanosecond."""
    # read when a run begins, when nothing is due yet, before the wait, when its end is looked for, and when it was seen
    now_s = itertools.cycle([0.0, 0.0, 50e-6 - 1e-9, 1.0, 1.0])
    owner = GpuOwner(cast(Cuda, PlainDoor()), clock=lambda: next(now_s))
    owner.start()
    over, runs = threading.Event(), 0

    def begin() -> None:
        watch.expected_s = 0.0
        owner.watch(watch)

    def finish(error: EngineError | None) -> None:
        nonlocal runs
        runs += 1
        if runs < 30_000:
            owner.post(begin)  # before the thread waits for it: then its wait looks twice
        else:
            over.set()

    watch = Watch(lambda: True, finish)
    owner.post(begin)
    ended = over.wait(SOON_S)
    assert owner.stop(SOON_S) == []
    assert ended, f"the end of run {runs} was never looked for"
