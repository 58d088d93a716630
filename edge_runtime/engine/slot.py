"""The slot of a model: the engine that new batches open against, its ladder, and the leases on engines before it.

A Resident is an engine with everything that belongs to it: lanes, buffers, decoder. A batch is opened
against a lease on the current resident, and only that engine runs it. The ladder holds further residents,
loaded and warm, that an exchange can make current at once. What an exchange leaves out is retired; when its
last lease comes back, `release` hands it to the caller to close, off every lock.

Nothing here locks: the pipeline calls it under the model's own Condition.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from edge_runtime.engine.protocol import Engine, InputBuffer, Lane
from edge_runtime.errors import EngineError
from edge_runtime.records.frames import Decoder

log = logging.getLogger(__name__)


class Tally:
    """Frames that an engine's lanes have brought to an end, since it was loaded, and the runs under way.

    Each lane writes only its own row, so that nothing is locked on a frame's way.
    """

    __slots__ = ("_rows", "_since_ns")

    def __init__(self, lanes: int) -> None:
        self._rows = [[0, 0, 0] for _ in range(lanes)]
        self._since_ns = [0] * lanes

    def began(self, lane: int, now_ns: int) -> None:
        """A lane has begun to run a batch, at a monotonic time; 0: it has ended."""
        self._since_ns[lane] = now_ns

    def longest_ns(self, now_ns: int) -> int:
        """For how long the longest run under way has been going on; 0 when there is none."""
        return max((now_ns - since_ns for since_ns in self._since_ns if since_ns), default=0)

    def ran(self, lane: int, frames: int, sick: int) -> None:
        """A batch ran; of its `frames` results, `sick` had nothing but values that are no numbers or no boxes."""
        row = self._rows[lane]
        row[0] += frames
        row[1] += sick

    def failed(self, lane: int, frames: int) -> None:
        """A batch of so many frames ended in an error of the engine or of its decoder."""
        self._rows[lane][2] += frames

    def total(self) -> tuple[int, int, int]:
        """(frames with a result, the sick among them, frames failed), over all lanes."""
        return sum(row[0] for row in self._rows), sum(row[1] for row in self._rows), sum(row[2] for row in self._rows)


class Resident:
    """An engine in use: its lanes (one per lane thread), its pool of input buffers, its decoder.

    `places` is how many frames a batch may hold; `buffers` how many input buffers are made, each of
    `places` rounded up to what the engine can run.
    """

    def __init__(self, engine: Engine, decoder: Decoder, *, lanes: int, places: int, buffers: int) -> None:
        allowed = engine.allowed_batches
        if allowed is not None:
            places = min(places, allowed[-1])
        self.engine = engine
        self.info = engine.info
        self.decoder = decoder
        self.places = places
        self.sizes = _sizes(allowed, places)
        self.lanes: Sequence[Lane] = [engine.open_lane() for _ in range(lanes)]
        self.tally = Tally(lanes)
        self.run_cpu_s: float | None = None  # what a run of one picture costs, once somebody has measured it
        # last in, first out: buffers that load never needs are never touched and cost no memory
        self.free: list[InputBuffer] = [engine.allocate(self.sizes[-1]) for _ in range(buffers)]
        self.buffers = buffers
        self.leases = 0
        self.retired = False
        self.closed = threading.Event()

    def close(self) -> None:
        """Free buffers and engine. Buffers that a writer never gave back stay allocated: that writer may wake."""
        if self.leases:
            raise EngineError(f"engine {self.info.digest} was closed under {self.leases} leases", code="engine_leased")
        if missing := self.buffers - len(self.free):
            log.error("engine %s: %d buffers are still held by a stuck writer and are lost", self.info.digest, missing)
        for buffer in self.free:
            self.engine.release(buffer)
        self.free = []
        self.lanes = []
        try:
            self.engine.close()
        finally:
            self.closed.set()


def _sizes(allowed: tuple[int, ...] | None, places: int) -> tuple[int, ...]:
    """For n = 1..places the batch size to run n frames at: sizes[n - 1]."""
    if allowed is None:
        return tuple(range(1, places + 1))
    return tuple(next(size for size in allowed if size >= count) for count in range(1, places + 1))


class EngineSlot:
    """Holds the current resident, or none with a reason, and the ladder beside it."""

    def __init__(self, resident: Resident | None, reason: str | None = None, others: Sequence[Resident] = ()) -> None:
        self.current = resident
        self.reason = reason
        self.ladder: tuple[Resident, ...] = () if resident is None else (resident, *others)

    def acquire(self) -> Resident:
        """A lease on the current resident."""
        resident = self.current
        if resident is None:
            raise EngineError(self.reason or "no engine", code="model_down")
        resident.leases += 1
        return resident

    def release(self, resident: Resident) -> Resident | None:
        """Give a lease back; returns the resident where it is to be closed now, by the caller, off every lock."""
        resident.leases -= 1
        assert resident.leases >= 0
        return resident if resident.retired and resident.leases == 0 else None

    def exchange(
        self, resident: Resident | None, reason: str | None = None, others: Sequence[Resident] = ()
    ) -> list[Resident]:
        """Let new batches open against `resident` (None: the model is down for `reason`).

        The new ladder is `resident` and `others`; what was on the old one and is not on the new one is retired.
        Returns those of the retired that nothing leases any more: the caller is to close them now.
        """
        before = self.ladder
        self.current, self.reason = resident, reason
        self.ladder = () if resident is None else (resident, *others)
        retired = [each for each in before if each not in self.ladder]
        for each in retired:
            each.retired = True
        return [each for each in retired if each.leases == 0]
