"""The slot of a model: the engine that new batches open against, and the leases on engines before it.

A Resident is an engine with everything that belongs to it: lanes, buffers, decoder. A batch is opened
against a lease on the current resident, and only that engine runs it. After an exchange the old resident
is retired; when its last lease comes back, `release` hands it to the caller to close, off every lock.

Nothing here locks: the pipeline calls it under the model's own Condition.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from edge_runtime.engine.protocol import Engine, InputBuffer, Lane
from edge_runtime.errors import EngineError
from edge_runtime.records.frames import Decoder

log = logging.getLogger(__name__)


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
        # last in, first out: buffers that load never needs are never touched and cost no memory
        self.free: list[InputBuffer] = [engine.allocate(self.sizes[-1]) for _ in range(buffers)]
        self.buffers = buffers
        self.leases = 0
        self.retired = False

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
        self.engine.close()


def _sizes(allowed: tuple[int, ...] | None, places: int) -> tuple[int, ...]:
    """For n = 1..places the batch size to run n frames at: sizes[n - 1]."""
    if allowed is None:
        return tuple(range(1, places + 1))
    return tuple(next(size for size in allowed if size >= count) for count in range(1, places + 1))


class EngineSlot:
    """Holds the current resident, or none with a reason."""

    def __init__(self, resident: Resident | None, reason: str | None = None) -> None:
        self.current = resident
        self.reason = reason

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

    def exchange(self, resident: Resident | None, reason: str | None = None) -> Resident | None:
        """Let new batches open against `resident` (None: the model is down for `reason`).

        Returns the old one where nothing leases it any more and the caller is to close it now.
        """
        old, self.current, self.reason = self.current, resident, reason
        if old is None or old is resident:
            return None
        old.retired = True
        return old if old.leases == 0 else None
