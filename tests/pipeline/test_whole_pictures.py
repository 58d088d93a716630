"""Where an engine scales whole pictures, the pipeline brings them; a cache has it look at scaled ones."""

from __future__ import annotations

from typing import Any

import pytest
from numpy.typing import NDArray

from edge_runtime.engine.protocol import InputBuffer
from edge_runtime.engine.slot import EngineSlot, Resident
from edge_runtime.pipeline.batch import Batch, Place, PlaceState
from edge_runtime.pipeline.cache import AnswerCache
from edge_runtime.pipeline.desk import Desk
from edge_runtime.pipeline.lanes import write_place
from edge_runtime.pipeline.ledger import Ledger
from edge_runtime.records.activity import CacheMode
from edge_runtime.records.frames import Frame, Pixels, Transform
from tests.fakes import FakeEngine, FakePixels, fake_decoder

WHOLE = Transform(8, 4, 1, 1, 1, 1, 0, 0)


class FakePictures:
    """Takes pictures of even numbers."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.cleared: list[int] = []
        self.error: Exception | None = None

    def take(self, index: int, pixels: Pixels) -> Transform | None:
        assert isinstance(pixels, FakePixels)
        if self.error is not None:
            raise self.error
        if pixels.number % 2:
            return None
        self.taken.append(pixels.number)
        return WHOLE

    def clear(self, index: int) -> None:
        self.cleared.append(index)


class ScalingEngine(FakeEngine):
    """An engine whose buffers have room for whole pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.pictures = FakePictures()

    def allocate(self, max_batch: int) -> InputBuffer:
        buffer = super().allocate(max_batch)
        buffer.pictures = self.pictures
        return buffer


class Rig:
    def __init__(self, mode: CacheMode = "off") -> None:
        self.engine = ScalingEngine()
        self.ledger = Ledger()
        self.resident = Resident(self.engine, fake_decoder, lanes=1, places=1, buffers=3)
        self.desk = Desk("m", EngineSlot(self.resident), self.ledger, lanes=1, batch_timeout_s=0)
        self.stream = self.ledger.open_stream("gate", "m", lambda _: None)
        self.mailbox = self.desk.attach(self.stream)
        self.cache = AnswerCache(mode)

    def write(self, number: int) -> tuple[Place, NDArray[Any]]:
        """A frame on its way up to the run, which it then is brought back from."""
        frame = Frame("gate", number, 1, FakePixels(number))
        self.desk.put(self.mailbox, self.ledger.captured(self.stream, frame))
        place = self.desk.poll()
        assert isinstance(place, Place)
        array = place.batch.buffer.array
        array.fill(-1)
        batch = write_place(self.desk, place, self.ledger, self.cache, take=True)
        seen = array[0].copy()
        if isinstance(batch, Batch):
            self.desk.done(batch)
        return place, seen


def test_a_picture_is_taken_whole_or_written() -> None:
    rig = Rig()
    place, seen = rig.write(2)
    assert (place.state, place.transform, place.memo) == (PlaceState.READY, WHOLE, None)
    assert (seen == -1).all()  # nobody wrote a scaled one
    place, seen = rig.write(3)
    assert place.state is PlaceState.READY
    assert (seen == 3).all()
    assert rig.engine.pictures.taken == [2]


@pytest.mark.parametrize("mode", ["exact", "scene"])
def test_a_cache_sees_scaled_pictures(mode: CacheMode) -> None:
    rig = Rig(mode)
    for number in (2, 3):
        _, seen = rig.write(number)
        assert (seen == number).all()
    assert rig.engine.pictures.taken == []
    assert rig.engine.pictures.cleared == [0, 0]
    rig.cache.configure("off", 10.0)
    rig.write(4)
    assert rig.engine.pictures.taken == [4]


def test_a_picture_that_cannot_be_copied_fails_its_frame() -> None:
    rig = Rig()
    rig.engine.pictures.error = ValueError("oh")
    place, _ = rig.write(2)
    assert place.state is PlaceState.VOID
    rig.engine.pictures.error = None
    place, _ = rig.write(4)
    assert place.state is PlaceState.READY
