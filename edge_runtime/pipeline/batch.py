"""A batch and its places."""

from __future__ import annotations

from enum import IntEnum

from edge_runtime.engine.protocol import InputBuffer
from edge_runtime.engine.slot import Resident
from edge_runtime.pipeline.ledger import Entry
from edge_runtime.records.frames import Transform


class PlaceState(IntEnum):
    """WRITING until its writer is done; then READY, or VOID where it failed or came late."""

    WRITING = 0
    READY = 1
    VOID = 2


class Place:
    """One frame's part of a batch buffer. Its writer alone touches `array` until it calls `written`."""

    __slots__ = ("batch", "entry", "index", "state", "t_claim_ns", "t_written_ns", "transform")

    def __init__(self, batch: Batch, index: int, entry: Entry, t_claim_ns: int) -> None:
        self.batch = batch
        self.index = index
        self.entry = entry
        self.state = PlaceState.WRITING
        self.transform: Transform | None = None
        self.t_claim_ns = t_claim_ns
        self.t_written_ns = 0


class Batch:
    """Frames that run together on one engine.

    `deadline_ns`: when it is closed at the latest. `writers` counts writers still inside the buffer, also
    those whose place was voided: the buffer is free when it is done and `writers` is 0.
    """

    __slots__ = ("buffer", "closed", "deadline_ns", "done", "places", "resident", "t_closed_ns", "writers", "writing")

    def __init__(self, resident: Resident, buffer: InputBuffer, deadline_ns: int) -> None:
        self.resident = resident
        self.buffer = buffer
        self.deadline_ns = deadline_ns
        self.places: list[Place] = []
        self.writers = 0
        self.writing = 0
        self.closed = False
        self.t_closed_ns = 0
        self.done = False

    @property
    def size(self) -> int:
        """The batch size to run it at: its places, padded to what the engine can run."""
        return self.resident.sizes[len(self.places) - 1]
