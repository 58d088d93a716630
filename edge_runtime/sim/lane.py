"""Lanes of a simulated module: as much slower than this machine as its GPU's clock is below the highest one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from numpy.typing import NDArray

from edge_runtime.engine.protocol import Engine, EngineInfo, InputBuffer, Lane

SLICE_S = 0.01
"""So soon a run under way notices another clock."""


class OtherWork:
    """What this process does beside inferring, which is the simulated GPU's: decoding, scaling, reporting. Any thread
    may call."""

    def __init__(self, process_s: Callable[[], float] = time.process_time) -> None:
        self._process_s = process_s
        self._lock = threading.Lock()
        self._inferred_s = 0.0
        self._most_s = 0.0

    def inferred(self, cpu_s: float) -> None:
        """A run has ended that took so much CPU time, s."""
        with self._lock:
            self._inferred_s += cpu_s

    def cpu_s(self) -> float:
        """Its CPU time, s of one core, cumulative; it never falls. A run under way is in it until it ends: it is early
        by that much at the most."""
        with self._lock:
            self._most_s = max(self._most_s, self._process_s() - self._inferred_s)
            return self._most_s


class StretchedEngine:
    """An engine whose runs take 1/`speed()` times as long (0 < speed <= 1); all else is the engine's.

    The lane is occupied meanwhile: whoever counts busy time counts the stretched one. `inferred` is given the CPU time
    that each run really took, s.
    """

    def __init__(
        self, engine: Engine, speed: Callable[[], float], inferred: Callable[[float], None] = lambda _: None
    ) -> None:
        self._engine = engine
        self._speed = speed
        self._inferred = inferred

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    @property
    def allowed_batches(self) -> tuple[int, ...] | None:
        return self._engine.allowed_batches

    def open_lane(self) -> Lane:
        return _StretchedLane(self._engine.open_lane(), self._speed, self._inferred)

    def allocate(self, max_batch: int) -> InputBuffer:
        return self._engine.allocate(max_batch)

    def release(self, buffer: InputBuffer) -> None:
        self._engine.release(buffer)

    def close(self) -> None:
        self._engine.close()


class _StretchedLane:
    def __init__(self, lane: Lane, speed: Callable[[], float], inferred: Callable[[float], None]) -> None:
        self._lane = lane
        self._speed = speed
        self._inferred = inferred
        self._t_submit_s = self._cpu_submit_s = 0.0

    def submit(self, buffer: InputBuffer, count: int) -> None:
        self._t_submit_s, self._cpu_submit_s = time.perf_counter(), time.thread_time()
        self._lane.submit(buffer, count)

    def collect(self) -> Mapping[str, NDArray[Any]]:
        try:
            outputs = self._lane.collect()
        finally:
            self._inferred(time.thread_time() - self._cpu_submit_s)
        now_s = time.perf_counter()
        # what the run is worth, in seconds at the highest clock; what was done of it until now, at the clock of now
        work_s = now_s - self._t_submit_s
        left_s = work_s * (1.0 - self._speed())
        while left_s > 0:
            speed = self._speed()
            time.sleep(min(SLICE_S, left_s / speed))
            then_s, now_s = now_s, time.perf_counter()
            left_s -= (now_s - then_s) * speed
        return outputs
