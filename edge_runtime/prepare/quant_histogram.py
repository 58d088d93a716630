"""How often which values were seen, in a bounded number of bins whatever comes.

A bin is as wide as a power of two and starts at a multiple of its width, so that two bins of one width are exactly one
of the next, and zero is always an edge. The width is the least at which all values seen fit into the bins. So what is
kept depends on the values alone (subnormal ones aside): neither on their order nor on how they were cut into pictures.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import frexp, ldexp
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["BINS", "Histogram"]

BINS = 2048
_FINEST = -100
"""Exponent of the least width: what is smaller is zero for any purpose."""
_CHUNK = 1 << 16
"""Values that are counted at a time: temporaries stay in the processor's cache."""


@dataclass(slots=True)
class Histogram:
    """Counts of float32 values.

    Bin `i` holds those from `(first + i) * 2**exponent` up to the next; `counts` is int64 [BINS]. `low` and `high` are
    the least and the largest value, exact, with zero between them: 0 where nothing was seen.
    """

    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(BINS, np.int64))
    first: int = 0
    exponent: int = _FINEST
    low: float = 0.0
    high: float = 0.0

    def add(self, values: NDArray[Any]) -> None:
        """Count float32 values of any shape. Raises ValueError where one is not finite; nothing is counted then."""
        flat = np.ascontiguousarray(values, np.float32).reshape(-1)
        if not flat.size:
            return
        low, high = float(flat.min()), float(flat.max())
        if not (np.isfinite(low) and np.isfinite(high)):  # NaN comes through min and max
            raise ValueError("values that are not finite cannot be counted")
        self._fit(min(low, self.low), max(high, self.high))
        scale = np.float32(ldexp(1.0, -self.exponent))
        # a shift of whole bins is exact below 2**24, and truncation is floor where nothing is negative
        for start in range(0, flat.size, _CHUNK):
            bins = np.floor(flat[start : start + _CHUNK] * scale).astype(np.int32)
            bins -= self.first
            self.counts += np.bincount(bins, minlength=BINS)

    def edges(self) -> NDArray[np.float64]:
        """[BINS + 1] float64: where bins start, and the end of the last."""
        return np.ldexp(np.arange(self.first, self.first + BINS + 1, dtype=np.float64), self.exponent)

    def centres(self) -> NDArray[np.float64]:
        """[BINS] float64: the middles of bins, none beyond `low` or `high`."""
        edges = self.edges()
        return np.clip((edges[:-1] + edges[1:]) / 2, self.low, self.high)

    def magnitudes(self) -> tuple[NDArray[np.int64], float]:
        """Counts of |value| in bins from zero on, int64 [<= BINS], up to the last that is not empty, and the width of a
        bin. A value that is exactly a negative bin's start is counted one bin too high."""
        negative = max(0, min(-self.first, BINS))
        folded = np.zeros(BINS + 1, np.int64)
        below, above = self.counts[:negative][::-1], self.counts[negative:]
        folded[: below.size] += below
        folded[: above.size] += above
        last = int(np.flatnonzero(folded)[-1]) + 1 if folded.any() else 1
        return folded[:last], ldexp(1.0, self.exponent)

    def _fit(self, low: float, high: float) -> None:
        """Widen the bins until all between fits."""
        exponent = max(self.exponent, _exponent(high - low))
        while _bin(high, exponent) - _bin(low, exponent) >= BINS:
            exponent += 1
        first = _bin(low, exponent)
        if (exponent, first) != (self.exponent, self.first):
            held = np.flatnonzero(self.counts)
            counts = np.zeros(BINS, np.int64)
            np.add.at(counts, ((held + self.first) >> (exponent - self.exponent)) - first, self.counts[held])
            self.counts, self.exponent, self.first = counts, exponent, first
        self.low, self.high = low, high


def _exponent(span: float) -> int:
    """The exponent of a width at which `span` fits into the bins, or of the one just too narrow."""
    return max(_FINEST, frexp(span / BINS)[1] - 1) if span > 0 else _FINEST


def _bin(value: float, exponent: int) -> int:
    return int(np.floor(ldexp(value, -exponent)))
