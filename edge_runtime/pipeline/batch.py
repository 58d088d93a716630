"""A batch and its places."""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol

from edge_runtime.engine.protocol import InputBuffer
from edge_runtime.engine.slot import Resident
from edge_runtime.pipeline.ledger import Entry
from edge_runtime.records.frames import Output, Transform


class PlaceState(IntEnum):
    """WRITING until its writer is done; then READY, VOID where it failed or came late, or CACHED: answered already."""

    WRITING = 0
    READY = 1
    VOID = 2
    CACHED = 3


class Memo(Protocol):
    """What a cache wants to know once a frame has its own answer."""

    def keep(self, output: Output) -> None: ...


class Place:
    """One frame's part of a batch buffer. Its writer alone touches `array` until it calls `written`."""

    __slots__ = ("batch", "entry", "index", "memo", "state", "t_claim_ns", "t_written_ns", "transform")

    def __init__(self, batch: Batch, index: int, entry: Entry, t_claim_ns: int) -> None:
        self.batch = batch
        self.index = index
        self.entry = entry
        self.state = PlaceState.WRITING
        self.transform: Transform | None = None
        self.memo: Memo | None = None
        self.t_claim_ns = t_claim_ns
        self.t_written_ns = 0


class Batch:
    """Frames that run together on one engine.

    `deadline_ns`: when it is closed at the latest. `writers` counts writers still inside the buffer, also
    those whose place was voided: the buffer is free when it is done and `writers` is 0. `vacant`: indexes of CACHED
    places, which other frames may take while it is open.
    """

    __slots__ = (
        "buffer", "closed", "deadline_ns", "done", "places", "resident", "t_closed_ns", "vacant", "writers", "writing",
    )  # fmt: skip

    def __init__(self, resident: Resident, buffer: InputBuffer, deadline_ns: int) -> None:
        self.resident = resident
        self.buffer = buffer
        self.deadline_ns = deadline_ns
        self.places: list[Place] = []
        self.vacant: list[int] = []
        self.writers = 0
        self.writing = 0
        self.closed = False
        self.t_closed_ns = 0
        self.done = False

    @property
    def size(self) -> int:
        """The batch size to run it at: its places up to the last READY one, padded to what the engine can run."""
        count = max(place.index for place in self.places if place.state is PlaceState.READY) + 1
        return self.resident.sizes[count - 1]

    def add(self, entry: Entry, t_claim_ns: int) -> Place:
        """A place for one more frame, WRITING."""
        place = Place(self, self.vacant.pop() if self.vacant else len(self.places), entry, t_claim_ns)
        if place.index == len(self.places):
            self.places.append(place)
        else:
            self.places[place.index] = place
        self.writers += 1
        self.writing += 1
        return place

    @property
    def taken(self) -> int:
        """How many of its places no other frame may have."""
        return len(self.places) - len(self.vacant)
