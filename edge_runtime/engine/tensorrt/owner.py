"""The thread "gpu": all CUDA and TensorRT calls of the process happen there.

It runs what others ask for, in order, and watches for the ends of runs: it sleeps until just before one is expected,
then looks in short intervals. It never waits inside CUDA for one lane, so another lane can be fed at any time.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from edge_runtime.engine.tensorrt.cuda import Cuda, CudaFatal
from edge_runtime.errors import EngineError
from edge_runtime.threads import ThreadGroup

log = logging.getLogger(__name__)

T = TypeVar("T")

SLEEP_SHARE = 0.9
"""Of the expected time of a run, how much is slept through before its end is looked for."""
_LOOK_SHARE = 0.02
_LOOK_MIN_S, _LOOK_MAX_S = 50e-6, 1e-3
_UP_SHARE, _UP_MOST, _DOWN = 0.2, 1.1, 0.95

_START_S = 5.0
"""How long the thread may take to end where its start was given up."""

_buried: list[object] = []
"""What is never destroyed."""

Refused = Callable[[EngineError], None]


class Closable(Protocol):
    """What lives on the GPU as long as it is not closed."""

    def close(self) -> None: ...


class Watch:
    """The end of a run that the owner waits for; one a lane, used again and again.

    `poll` tells, on the owner, whether it has ended; `finish` takes the error that ended it, or None. `expected_s` is
    how long a run is expected to take, learnt from those before.
    """

    __slots__ = ("due_s", "expected_s", "finish", "looks", "poll", "since_s")

    def __init__(self, poll: Callable[[], bool], finish: Callable[[EngineError | None], None]) -> None:
        self.poll = poll
        self.finish = finish
        self.expected_s = 0.0
        self.since_s = self.due_s = 0.0
        self.looks = 0

    def begin(self, now_s: float) -> None:
        """A run was enqueued."""
        self.since_s, self.looks = now_s, 0
        self.due_s = now_s + max(SLEEP_SHARE * self.expected_s, _LOOK_MIN_S)

    def missed(self, now_s: float) -> None:
        """It was looked for and has not ended: when to look again."""
        self.looks += 1
        over = now_s - self.since_s > 2 * self.expected_s
        share_s = _LOOK_SHARE * (now_s - self.since_s if over else self.expected_s)
        self.due_s = now_s + min(max(share_s, _LOOK_MIN_S), _LOOK_MAX_S)

    def ended(self, now_s: float) -> None:
        """It has ended: learn from how long it took. A run that was over at the first look may have been faster than is
        known; one after a pause of the owner seems slower than it was, so one alone does not count for much."""
        took_s = now_s - self.since_s
        if self.expected_s == 0.0:
            self.expected_s = took_s
        elif self.looks == 0:
            self.expected_s *= _DOWN
        else:
            expected_s = self.expected_s + _UP_SHARE * (took_s - self.expected_s)
            self.expected_s = min(expected_s, _UP_MOST * self.expected_s)


class _Call(Generic[T]):
    """A job that somebody waits for."""

    def __init__(self, job: Callable[[], T]) -> None:
        self._job = job
        self._done = threading.Event()
        self._result: T
        self._error: BaseException | None = None

    def run(self) -> None:
        """Raises CudaFatal alone: then `refuse` is to follow."""
        try:
            self._result = self._job()
        except CudaFatal:
            raise
        except BaseException as error:  # noqa: BLE001  handed to whoever waits
            self._error = without_frames(error)
        finally:
            del self._job  # what it holds is let go of here, on the owner
        self._done.set()

    def refuse(self, error: EngineError) -> None:
        self._error = error
        self._done.set()

    @property
    def succeeded(self) -> bool:
        return hasattr(self, "_result")

    def wait(self) -> T:
        self._done.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._result


def _not_started(error: CudaFatal) -> EngineError:
    return EngineError(
        f"the GPU cannot be used: {error.message}",
        code="cuda_failed",
        where="GPU",
        remedy="see what the kernel says of the GPU (dmesg); a restart of the daemon tries again",
    )


def _unexpected(error: Exception) -> EngineError:
    return EngineError(f"the GPU's thread met something unexpected: {error!r}", where="GPU", remedy="see the log")


E = TypeVar("E", bound=BaseException)


def without_frames(error: E) -> E:
    """The error, whose frames hold no TensorRT objects any more: those may not be destroyed on another thread."""
    known: BaseException | None = error
    while known is not None:
        traceback.clear_frames(known.__traceback__)
        known = known.__cause__ or known.__context__
    return error


class GpuOwner:
    """Owns the GPU of this process, through a door that is passed in and not started.

    `on_fatal` is called once, on the thread "gpu", when a sticky error has ended all work on the GPU, or a fault has
    ended the thread: the process has to end. After a sticky error everything raises CudaFatal. `fatals` counts them (0
    or 1), for reports. A GPU that fails at its very start is none of that: whoever starts it hears of it, and can do
    without.
    """

    def __init__(
        self,
        cuda: Cuda,
        on_fatal: Callable[[str], None] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cuda = cuda
        self.fatals = 0
        self._on_fatal = on_fatal
        self._clock = clock
        self._threads = ThreadGroup(self._broke)
        # safe to put into from a garbage collection, which a Condition is not
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Refused | None] | None] = queue.SimpleQueue()
        # Locked: nothing came since the last look. SimpleQueue.get itself may not be given a time-out: where that runs
        # out between two looks of its own, it waits for ever (Python 3.10 to 3.12).
        self._quiet = threading.Lock()
        self._watched: list[Watch] = []
        self._living: list[Closable] = []
        self._thread: threading.Thread | None = None
        self._fatal: CudaFatal | None = None
        self._ended = threading.Event()
        self._end = threading.Event()

    def start(self) -> None:
        """Start the thread and the door on it. Raises EngineError where the GPU cannot be had; then it has ended."""
        started: _Call[None] = _Call(self.cuda.start)
        self._thread = self._threads.spawn("gpu", lambda: self._run(started))
        try:
            started.wait()
        except BaseException:  # also an interrupt: then the thread may run, or hang in the driver
            self.stop(_START_S)
            raise

    @property
    def on_thread(self) -> bool:
        """Whether this is the thread "gpu"."""
        return threading.current_thread() is self._thread

    @property
    def ended(self) -> bool:
        """Whether the thread has ended, and with it everything on the GPU."""
        return self._ended.is_set()

    def is_dead(self) -> bool:
        """Whether a sticky error has ended all work on the GPU."""
        return self._fatal is not None

    def require_alive(self) -> None:
        """Raises CudaFatal after a sticky error."""
        if self._fatal is not None:
            raise self._again()

    def call(self, job: Callable[[], T]) -> T:
        """What `job` returns or raises, run on the thread "gpu". Raises EngineError after `stop` (code "engine_state"),
        CudaFatal after a sticky error."""
        if self.on_thread:
            return job()
        call = _Call(job)
        self.post(call.run, call.refuse)
        del job
        return call.wait()

    def post(self, job: Callable[[], Any], refused: Refused | None = None) -> None:
        """Run `job` on the thread "gpu", some time. Where it never will, `refused` is called with the reason, here or
        there. Takes no lock."""
        self._put((job, refused))
        if self._ended.is_set():
            self._refuse_all()

    def watch(self, watch: Watch) -> None:
        """Let `watch.finish` be called when the run that was just enqueued has ended. On the thread "gpu"."""
        watch.begin(self._clock())
        self._watched.append(watch)

    def unwatch(self, watch: Watch) -> None:
        """Wait for it no longer. On the thread "gpu"."""
        self._watched = [known for known in self._watched if known is not watch]

    def adopt(self, living: Closable) -> None:
        """Close it before the door is closed, unless it is disowned before; what was adopted last is closed first. On
        the thread "gpu"."""
        self._living.append(living)

    def disown(self, living: Closable) -> None:
        """It is closed. On the thread "gpu"."""
        self._living = [known for known in self._living if known is not living]

    def bury(self, *objects: object) -> None:
        """Keep these for ever: after a sticky error nothing of TensorRT's can be destroyed safely."""
        _buried.extend(objects)

    def stop(self, deadline_s: float) -> list[str]:
        """Close what still lives on the GPU, close the door, end the thread. Idempotent. The name of the thread where
        it did not end in time: it hangs in the driver, and the process should end."""
        self._end.set()
        self._put(None)
        return self._threads.join(deadline_s)

    # --- on the thread "gpu"

    def _run(self, started: _Call[None]) -> None:
        try:
            started.run()
        except CudaFatal as error:
            self._fatal = without_frames(error)
            started.refuse(_not_started(error))
        try:
            if started.succeeded:
                self._loop()
        finally:
            try:
                self._shut()
            finally:
                self._ended.set()
                self._refuse_all()

    def _loop(self) -> None:
        while not self._end.is_set():
            self._do(self._next())
            self._look()

    def _next(self) -> tuple[Callable[[], Any], Refused | None] | None:
        """The next job, or None where the end of a run is to be looked for first."""
        with contextlib.suppress(queue.Empty):
            return self._jobs.get_nowait()
        if not self._watched:
            self._quiet.acquire()
        elif (wait_s := min(watch.due_s for watch in self._watched) - self._clock()) > 0:
            self._quiet.acquire(timeout=wait_s)
        with contextlib.suppress(queue.Empty):
            return self._jobs.get_nowait()
        return None

    def _do(self, task: tuple[Callable[[], Any], Refused | None] | None) -> None:
        if task is None:
            return
        job, refused = task
        if self._fatal is not None:
            if refused is not None:
                refused(self._again())
            else:
                self.bury(job)  # what it would free
            return
        try:
            job()
        except CudaFatal as error:
            self._die(error)
            if refused is not None:
                refused(self._again())
        except Exception as error:
            log.exception("a job on the GPU's thread failed")
            if refused is not None:  # whoever waits is never left waiting
                refused(_unexpected(error))

    def _look(self) -> None:
        """Look for the ends of those runs that are due."""
        if not self._watched:
            return
        now_s = self._clock()
        for watch in [each for each in self._watched if each.due_s <= now_s]:
            error: EngineError | None = None
            try:
                if not watch.poll():
                    watch.missed(self._clock())
                    continue
            except CudaFatal as fatal:
                self._die(fatal)
                return
            except EngineError as failed:
                error = failed
            except Exception as failed:
                log.exception("the end of a run could not be looked for")
                error = _unexpected(failed)
            self._watched.remove(watch)
            watch.ended(self._clock())
            watch.finish(error)

    def _die(self, error: CudaFatal) -> None:
        """A sticky error: whoever waits hears of it, once for all."""
        without_frames(error)
        if self._fatal is not None:
            return
        self._fatal = error
        self.fatals += 1
        log.critical("all work on the GPU has ended: %s", str(error))
        watched, self._watched = self._watched, []
        for watch in watched:
            watch.finish(self._again())
        try:
            if self._on_fatal is not None:
                self._on_fatal(str(error))
        except Exception:
            log.exception("what was to be done after a sticky error failed")

    def _broke(self, _: str, error: BaseException) -> None:
        """The thread has ended by a fault of ours: nobody would notice."""
        if self._fatal is None and self._on_fatal is not None:
            self._on_fatal(f"the GPU's thread has ended by itself: {error!r}")

    def _again(self) -> CudaFatal:
        assert self._fatal is not None
        return CudaFatal(self._fatal.call, self._fatal.number, self._fatal.text)

    def _shut(self) -> None:
        for living in reversed(list(self._living)):
            self._close(living)
        while self._drain_one():  # memory that was let go of meanwhile
            pass
        watched, self._watched = self._watched, []
        for watch in watched:  # of what could not be closed
            watch.finish(self._refusal())
        try:
            self.cuda.stop()
        except Exception:
            log.exception("the GPU could not be given back")

    def _close(self, living: Closable) -> None:
        try:
            living.close()
        except Exception:
            log.exception("an engine could not be closed")

    def _drain_one(self) -> bool:
        try:
            task = self._jobs.get_nowait()
        except queue.Empty:
            return False
        if task is not None and task[1] is not None:
            task[1](self._refusal())
        else:
            self._do(task)
        return True

    # --- on any thread

    def _put(self, task: tuple[Callable[[], Any], Refused | None] | None) -> None:
        self._jobs.put(task)
        with contextlib.suppress(RuntimeError):  # it is known already that something came
            self._quiet.release()

    def _refusal(self) -> EngineError:
        if self._fatal is not None:
            return self._again()
        return EngineError("the GPU's thread has ended", code="engine_state", where="GPU")

    def _refuse_all(self) -> None:
        while True:
            try:
                task = self._jobs.get_nowait()
            except queue.Empty:
                return
            if task is not None and task[1] is not None:
                task[1](self._refusal())
            elif task is not None:  # what it would free has lost its thread, and may not be destroyed on this one
                self.bury(task[0])
