"""The thread "loader": whatever loads models does it there, one job at a time, at a lower priority than the lanes."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from edge_runtime.errors import EdgeError
from edge_runtime.threads import ThreadGroup

log = logging.getLogger(__name__)

T = TypeVar("T")

NICE = 5
"""Lower than the lanes', and not the lowest: this thread holds the interpreter's lock now and then, and while the
kernel lets it wait everybody else would."""


class Loader:
    """Runs jobs that load models. `call` from any thread but its own; `stop` ends it.

    `cancel` is set by `stop`: a job should look at it wherever it waits.
    """

    def __init__(self, on_death: Callable[[str, BaseException], None] | None = None) -> None:
        self._threads = ThreadGroup(on_death)
        self._lock = threading.Lock()
        self._ready = threading.Condition(self._lock)
        self._job: tuple[Callable[[], Any], Future[Any]] | None = None
        self._what: str | None = None
        self._next: dict[str, Callable[[], Any]] = {}
        self.cancel = threading.Event()

    def start(self) -> None:
        self._threads.spawn("loader", self._run)

    def call(self, what: str, job: Callable[[], T]) -> T:
        """What `job` returns or raises. `what` names it for others who come meanwhile.

        Raises EdgeError: `busy` while another job is under way, `stopping` after `stop`.
        """
        future: Future[T] = Future()
        with self._ready:
            self._check_stopping()
            if self._what is not None:
                raise EdgeError(
                    f"another change of models is under way: {self._what}",
                    code="busy",
                    remedy="wait for it to end, then try again",
                    retryable=True,
                )
            self._begin(what, job, future)
        return future.result()

    def post(self, what: str, job: Callable[[], None]) -> None:
        """Run `job` as soon as nothing else runs; one that was posted as the same `what` and has not begun is replaced
        by it."""
        with self._ready:
            if self.cancel.is_set():
                return
            if self._what is None:
                self._begin(what, job, Future())
            else:
                self._next[what] = job

    def stop(self, deadline_s: float) -> list[str]:
        """Ends the thread after the job in hand, which is told to give up; the name of the thread if it did not."""
        with self._ready:
            self.cancel.set()
            self._next.clear()
            self._ready.notify()
        return self._threads.join(deadline_s)

    # --- under the lock

    def _check_stopping(self) -> None:
        if self.cancel.is_set():
            raise EdgeError("the daemon is stopping", code="stopping", retryable=True)

    def _begin(self, what: str, job: Callable[[], Any], future: Future[Any]) -> None:
        self._what = what
        self._job = (job, future)
        self._ready.notify()

    # --- on the thread "loader"

    def _run(self) -> None:
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        except OSError as error:
            log.info("the loader keeps its priority: %s", error.strerror)
        while (task := self._take()) is not None:
            self._do(*task)
            del task  # an error's frames hold what could not be loaded: nothing of it stays until the next job

    def _take(self) -> tuple[Callable[[], Any], Future[Any]] | None:
        with self._ready:
            while self._job is None and not self.cancel.is_set():
                self._ready.wait()
            task, self._job = self._job, None
            return task

    def _do(self, job: Callable[[], Any], future: Future[Any]) -> None:
        answer: Callable[[], None]
        try:
            answer = partial(future.set_result, job())
        except Exception as error:  # noqa: BLE001  handed to whoever waits
            answer = partial(future.set_exception, error)
        with self._ready:
            # free again before the answer is out: who hears of the end may begin the next at once
            self._what = None
            if (what := next(iter(self._next), None)) is not None:
                self._begin(what, self._next.pop(what), Future())
        answer()
