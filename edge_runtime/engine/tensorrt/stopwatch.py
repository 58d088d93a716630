"""Where the time of a run goes: a door that takes it, by timers between the copies and the execution of a lane."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from edge_runtime.engine.tensorrt.cuda import Cuda, Event, HostMemory, Stream, open_cuda

_MARKS = 4


@dataclass(frozen=True, slots=True)
class Shares:
    """Of one run, ms: `copy_in`, `execute` and `copy_out` on the GPU's stream, where a launch that comes late counts as
    execution; `launch` on the CPU, which is a part of that."""

    copy_in_ms: float
    launch_ms: float
    execute_ms: float
    copy_out_ms: float


class Stopwatch:
    """Everything but three methods is the door's own. Only one lane may run while it is armed.

    Its methods are for the thread "gpu".
    """

    def __init__(self, door: Cuda) -> None:
        self._door = door
        self._events: list[Event] = []
        self._marks = 0
        self._enqueued_s = self._launched_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._door, name)

    def arm(self) -> None:
        """From now on runs are timed. Raises CudaError."""
        self._events = [self._door.timer() for _ in range(_MARKS)]

    def disarm(self) -> None:
        """No longer. Idempotent."""
        events, self._events = self._events, []
        for event in events:
            self._door.free_event(event)

    def shares(self) -> Shares | None:
        """Of the last run, which has ended; None where it did not copy its input and its outputs. Raises CudaError."""
        if self._marks != _MARKS:
            return None
        spans = [self._door.elapsed_ms(self._events[each], self._events[each + 1]) for each in range(_MARKS - 1)]
        return Shares(spans[0], (self._launched_s - self._enqueued_s) * 1e3, spans[1], spans[2])

    def copy_in(self, to: int, source: HostMemory, nbytes: int, stream: Stream, start: int = 0) -> None:
        self._marks = 0
        self._mark(0, stream)
        self._door.copy_in(to, source, nbytes, stream, start)
        self._mark(1, stream)
        self._enqueued_s = time.perf_counter()

    def copy_out(self, to: HostMemory, source: int, nbytes: int, stream: Stream) -> None:
        if self._marks == 2:
            self._launched_s = time.perf_counter()
        self._mark(2, stream)
        self._door.copy_out(to, source, nbytes, stream)

    def record(self, event: Event, stream: Stream) -> None:
        self._mark(3, stream)
        self._door.record(event, stream)

    def _mark(self, place: int, stream: Stream) -> None:
        if self._events and self._marks == place:
            self._door.record(self._events[place], stream)
            self._marks += 1


def with_stopwatch(prefer: str | None = None, *, open_door: Callable[..., Cuda] = open_cuda) -> tuple[Cuda, Stopwatch]:
    """A door, not started, and the stopwatch that it is. Raises EngineError as cuda.open_cuda."""
    stopwatch = Stopwatch(open_door(prefer))
    return cast(Cuda, stopwatch), stopwatch
