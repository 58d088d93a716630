"""The selection of unlike pictures: what it keeps of any stream, and that its memory does not grow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from edge_runtime.prepare.diversity import NOVELTY, Descriptor, Selection, describe, distance
from edge_runtime.records.frames import InputArray, Transform
from edge_runtime.records.spec import InputSpec


@dataclass(frozen=True)
class Plain:
    """A picture of given 64 x 64 pixels (BGR, 0-255)."""

    pixels: NDArray[Any]
    width: int = 64
    height: int = 64

    def write_into(self, place: InputArray, spec: InputSpec) -> Transform:
        assert (spec.pixel, spec.shape) == ("bgr24", (64, 64, 3))
        place[:] = self.pixels
        return Transform(64, 64, 64, 64, 64, 64, 0, 0)

    def to_rgb(self) -> NDArray[np.uint8]:
        return self.pixels[..., ::-1].astype(np.uint8)


def grey(level: float) -> Descriptor:
    return np.broadcast_to(np.array((level, 0, 0), np.float32), (256, 3)).copy()


def scene(seed: int = 0, noise: float = 3.0) -> NDArray[Any]:
    """A still street, with a sensor's noise of its own each time."""
    rows = np.linspace(40, 180, 64)[:, None, None] + np.linspace(0, 50, 64)[None, :, None] + np.zeros(3)
    return np.clip(rows + np.random.default_rng(seed).normal(0, noise, rows.shape), 0, 255)


def with_one(pixels: NDArray[Any], row: int, column: int, colour: Sequence[int] = (30, 30, 200)) -> NDArray[Any]:
    """Somebody of 8 x 4 of 64 x 64 pixels, red by default."""
    changed = pixels.copy()
    changed[row : row + 8, column : column + 4] = colour
    return changed


def test_black_and_white_are_one_apart_and_the_same_is_none() -> None:
    black, white = (describe(Plain(np.full((64, 64, 3), level))) for level in (0, 255))
    assert distance(black[None], white)[0] == pytest.approx(1, abs=0.01)
    assert distance(black[None], black)[0] == 0


def test_a_small_change_counts_and_noise_everywhere_does_not() -> None:
    first = describe(Plain(scene(1)))
    assert distance(first[None], describe(Plain(scene(2))))[0] < NOVELTY / 2
    assert distance(first[None], describe(Plain(with_one(scene(3), 20, 20))))[0] > 2 * NOVELTY
    # red of the same brightness as what is behind it
    there = scene(4)[20:28, 20:24].mean()
    red = (there - 60, there - 18, there + 60)
    assert distance(first[None], describe(Plain(with_one(scene(5), 20, 20, red))))[0] > NOVELTY


def test_a_thousand_neighbours_give_one_and_events_are_in() -> None:
    selection = Selection(20)
    events = {300: (8, 8), 500: (40, 8), 800: (20, 50)}
    for number in range(1000):
        pixels = scene(number)
        if number in events:
            pixels = with_one(pixels, *events[number])
        descriptor = describe(Plain(pixels))
        if selection.wants(descriptor):
            selection.add(str(number), descriptor)
    assert selection.keys == ["0", *map(str, events)]


def test_an_event_takes_the_place_of_a_neighbour() -> None:
    """Full of people in one place, then one in another."""
    selection = Selection(5)
    for number, column in enumerate((8, 11, 14, 17, 20)):
        descriptor = describe(Plain(with_one(scene(number), 8, column)))
        assert selection.wants(descriptor)
        assert selection.add(str(number), descriptor) == []
    far = describe(Plain(with_one(scene(9), 48, 48)))
    assert selection.wants(far)
    assert len(selection.add("far", far)) == 1
    assert "far" in selection.keys


LEVELS = st.lists(st.floats(0, 1, width=32), min_size=1, max_size=60)


@given(LEVELS, st.integers(1, 8))
def test_what_is_kept_of_any_stream(levels: list[float], capacity: int) -> None:
    selection = Selection(capacity, novelty=0.03)
    kept: dict[str, float] = {}
    closest = np.inf
    for number, level in enumerate(levels):
        descriptor = grey(level)
        was_full = len(selection.keys) == capacity
        near, before = selection.nearest(descriptor), selection.closest
        wanted = selection.wants(descriptor)
        assert wanted == (near > 0.03 and (not was_full or near > before))
        if not wanted:
            continue
        kept[str(number)] = level
        gone = selection.add(str(number), descriptor)
        assert len(gone) == (1 if was_full else 0)
        for key in gone:
            assert key != str(number) or capacity == 1
            del kept[key]
        assert list(kept) == selection.keys
        assert len(kept) <= capacity
        apart = [abs(one - other) for a, one in kept.items() for b, other in kept.items() if a < b]
        assert selection.closest == pytest.approx(min(apart, default=np.inf), abs=1e-5)
        assert all(each > 0.03 - 1e-5 for each in apart)
        if was_full and capacity > 1:
            assert selection.closest >= closest - 1e-6
        closest = selection.closest


@given(LEVELS)
def test_the_same_stream_gives_the_same(levels: list[float]) -> None:
    def run() -> list[str]:
        selection = Selection(4)
        for number, level in enumerate(levels):
            if selection.wants(grey(level)):
                selection.add(str(number), grey(level))
        return selection.keys

    assert run() == run()


@given(LEVELS, st.integers(0, 5))
def test_a_capacity_that_falls_holds_from_the_next_on(levels: list[float], fewer: int) -> None:
    selection = Selection(60, novelty=0.0)
    for number, level in enumerate(levels):
        selection.add(str(number), grey(level))
    assert len(selection.keys) == len(levels)
    selection.capacity = max(1, len(levels) - fewer)
    gone = selection.add("last", grey(0.5))
    assert len(selection.keys) == selection.capacity
    assert len(gone) == len(levels) + 1 - selection.capacity
    while selection.keys:
        assert selection.give_up() not in selection.keys
    assert selection.closest == np.inf
