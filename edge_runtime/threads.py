"""Named threads with an owner that notices when one dies and joins them within a deadline."""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

_PR_SET_NAME = 15
try:
    _prctl: Callable[..., int] | None = ctypes.CDLL(None).prctl
except (OSError, AttributeError):  # not Linux: names stay Python's own
    _prctl = None


def set_os_thread_name(name: str) -> None:
    """Show the calling thread in top, perf and py-spy as `name` (the kernel keeps 15 bytes; prctl(2)).

    Python sets it by itself only from 3.14 on.
    """
    if _prctl is not None:
        _prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


class ThreadGroup:
    """The threads of one owner.

    They are daemon threads: one that hangs in a driver cannot keep the process from ending, but the
    owner joins them in `join` and says which ones did not come. `on_death(name, error)` is called on the
    dying thread when its target raised.
    """

    def __init__(self, on_death: Callable[[str, BaseException], None] | None = None) -> None:
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._on_death = on_death

    def spawn(self, name: str, target: Callable[[], None]) -> threading.Thread:
        """Start `target` on a new thread called `name`."""

        def body() -> None:
            set_os_thread_name(name)
            try:
                target()
            except BaseException as error:
                log.exception("thread %s died", name)
                if self._on_death is not None:
                    self._on_death(name, error)

        thread = threading.Thread(target=body, name=name, daemon=True)
        with self._lock:
            self._threads = [known for known in self._threads if known.is_alive()]
            thread.start()  # may fail where the system has no more: then there is nothing to join
            self._threads.append(thread)
        return thread

    def alive(self) -> list[str]:
        """Names of the threads still running."""
        with self._lock:
            return [thread.name for thread in self._threads if thread.is_alive()]

    def join(self, deadline_s: float) -> list[str]:
        """Wait up to `deadline_s` for all of them; returns the names of those still alive."""
        end = time.monotonic() + deadline_s
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))
        return self.alive()
