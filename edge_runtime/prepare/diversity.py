"""A few pictures of very many that are unlike each other, chosen as they come, in memory that does not grow.

A picture is described by 16 x 16 cells, each its mean brightness and colours. Two pictures differ by the cells that
differ most (a vector k-norm: the root of the mean of the largest squares), so that a person who walks through a scene
counts, and noise over all of it does not.

Chosen is by farthest point: while there is room, what is farther than `novelty` from all that was chosen. Then a
newcomer replaces one of the two chosen that are nearest to each other, where it is farther from every one than those
two are from each other. So the least distance within the choice never falls once it is full. It is the greedy k-centre
selection (Gonzalez 1985) made to run over a stream; unlike that one it does not promise how far what was left out may
be.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edge_runtime.records.frames import Pixels
from edge_runtime.records.spec import InputSpec

__all__ = ["NOVELTY", "Descriptor", "Selection", "describe", "distance"]

Descriptor = NDArray[np.float32]
"""[256, 3]: by cell, brightness and two colour differences; 0-1, colours around 0."""
NOVELTY = 0.08
"""Of the range from black to white. Measured at 10 frames a second: neighbours of a room where now and then one enters
are 0.005 apart (median), of a square with people who walk 0.04; frames 2.5 s apart 0.09 and 0.24."""
_CELLS, _CELL = 16, 4
_LARGEST = 8
_SPEC = InputSpec(_CELLS * _CELL, _CELLS * _CELL, resize="stretch", pixel="bgr24")
_TO_CELL = np.array(((0.114, 0.587, 0.299), (0.5, -0.331, -0.169), (-0.081, -0.419, 0.5)), np.float32)
"""Blue, green and red to brightness and colour differences (BT.601)."""


def describe(pixels: Pixels) -> Descriptor:
    """What of a picture is compared. Raises CameraError where its format cannot be read."""
    place = np.empty(_SPEC.shape, np.uint8)
    pixels.write_into(place, _SPEC)
    cells = place.reshape(_CELLS, _CELL, _CELLS, _CELL, 3).mean(axis=(1, 3), dtype=np.float32)
    described: Descriptor = cells.reshape(-1, 3) @ _TO_CELL.T / np.float32(255)
    return described


def distance(descriptors: NDArray[np.float32], other: Descriptor) -> NDArray[np.float32]:
    """[n] of [n, 256, 3]: how far each is from the other; 0 for the same, 1 for cells that go from black to white."""
    squares = np.square(descriptors - other).sum(axis=-1)
    largest = np.partition(squares, squares.shape[-1] - _LARGEST, axis=-1)[..., -_LARGEST:]
    result: NDArray[np.float32] = np.sqrt(largest.mean(axis=-1))
    return result


@dataclass(slots=True)
class Selection:
    """The keys of what is chosen, in the order in which they came. The same pictures in the same order give the same.

    `capacity` may be changed at any time, and holds from the next `add` on.
    """

    capacity: int
    novelty: float = NOVELTY
    keys: list[str] = field(default_factory=list)
    _described: NDArray[np.float32] = field(default_factory=lambda: np.empty((0, _CELLS**2, 3), np.float32))
    _apart: NDArray[np.float32] = field(default_factory=lambda: np.empty((0, 0), np.float32))

    def nearest(self, descriptor: Descriptor) -> float:
        """How far a picture is from the one chosen that is most like it; infinite where there is none."""
        return float(distance(self._described, descriptor).min(initial=np.inf))

    @property
    def closest(self) -> float:
        """The least distance of two that are chosen; infinite where there are fewer."""
        return float(self._apart.min(initial=np.inf))

    def wants(self, descriptor: Descriptor) -> bool:
        """Whether `add` would be an improvement."""
        near = self.nearest(descriptor)
        return near > self.novelty and (len(self.keys) < self.capacity or near > self.closest)

    def add(self, key: str, descriptor: Descriptor) -> list[str]:
        """Choose a picture; returns the keys of those that have to go for it."""
        apart = distance(self._described, descriptor)
        count = len(self.keys)
        wider = np.full((count + 1, count + 1), np.inf, np.float32)
        wider[:count, :count] = self._apart
        wider[count, :count] = wider[:count, count] = apart
        self._apart = wider
        self._described = np.concatenate((self._described, descriptor[None]))
        self.keys.append(key)
        return [self.give_up() for _ in range(count + 1 - max(self.capacity, 0))]

    def give_up(self) -> str:
        """Take one out, at least one being there: of the two nearest to each other the one that has the nearer next,
        else the later one. Returns its key."""
        return self._take_out(self._most_alike())

    def _most_alike(self) -> int:
        if len(self.keys) < 2:
            return len(self.keys) - 1
        one, other = sorted(divmod(int(self._apart.argmin()), len(self.keys)))
        first, second = (np.partition(self._apart[place], 1)[1] for place in (one, other))
        return one if first < second else other

    def _take_out(self, place: int) -> str:
        self._apart = np.delete(np.delete(self._apart, place, axis=0), place, axis=1)
        self._described = np.delete(self._described, place, axis=0)
        return self.keys.pop(place)
