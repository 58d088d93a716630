"""What range of a tensor 8 bits are spent on, from what it was seen to hold.

- "minmax": all that was seen.
- "percentile": all but the rarest values, 0.01 % of them (half of that at each end where ends are chosen apart).
- "entropy": the cut of which the quantised distribution tells most of the true one, by the Kullback-Leibler divergence
  of S. Migacz, "8-bit inference with TensorRT" (GTC 2017), as onnxruntime's calibrator has it too.
- "mse": the range with the least squared error of rounding and cutting together.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.prepare.quant import Method, TensorRange
from edge_runtime.prepare.quant_histogram import Histogram

__all__ = ["PERCENTILE", "range_of"]

PERCENTILE = 99.99
_LEVELS = 128
"""Of magnitudes in 8 bits with a sign."""
_CUTS = 96
"""Entropy looks at about so many cuts at the most."""
_SHARES = np.linspace(1.0, 0.02, 99)
"""Of the seen range, what "mse" tries."""
_FINER = np.array([1.02, 1.01, 1.0, 0.99, 0.98])


def range_of(seen: Histogram, method: Method, *, symmetric: bool, percentile: float = PERCENTILE) -> TensorRange:
    """The range of a tensor. `symmetric`: as much below zero as above it, for S8 with 255 levels; else the ends are
    chosen apart, for U8 with 256 levels. Zero is always inside, and nothing beyond what was seen (where not symmetric).

    `percentile`: in (0, 100]. Raises ValueError for another, or another method.
    """
    if not 0 < percentile <= 100:
        raise ValueError(f"{percentile:g} is no percentile")
    if method == "minmax":
        found = seen.low, seen.high
    elif method == "percentile":
        found = _percentile(seen, percentile / 100, symmetric)
    elif method == "entropy":
        cut = _entropy(*seen.magnitudes())
        found = -cut, cut
    elif method == "mse":
        found = _least_error(seen, symmetric)
    else:
        raise ValueError(f"there is no method {method!r}")
    low, high = max(found[0], seen.low), min(found[1], seen.high)
    if symmetric:
        reach = max(-low, high)
        return TensorRange(-reach, reach)
    return TensorRange(min(low, 0.0), max(high, 0.0))


def _percentile(seen: Histogram, share: float, symmetric: bool) -> tuple[float, float]:
    if symmetric:
        counts, width = seen.magnitudes()
        total = int(counts.sum())
        cut = float(np.searchsorted(np.cumsum(counts), share * total) + 1) * width if total else 0.0
        return -cut, cut
    total = int(seen.counts.sum())
    if not total:
        return 0.0, 0.0
    edges, rest = seen.edges(), (1 - share) / 2 * total
    below = np.cumsum(seen.counts)
    above = np.cumsum(seen.counts[::-1])
    # the first bin at either end with which more than the rest is cut away stays
    first = int(np.searchsorted(below, rest, side="right"))
    last = seen.counts.size - int(np.searchsorted(above, rest, side="right"))
    return float(edges[min(first, seen.counts.size - 1)]), float(edges[max(last, 1)])


def _entropy(counts: NDArray[np.int64], width: float) -> float:
    """The magnitude to cut at, from counts of magnitudes in bins of `width`.

    A cut keeps the first n bins and adds what is beyond to the last. Their distribution P is compared with Q, what is
    left of it in 128 levels: each level's count is spread evenly over those of its bins that are not empty. The first
    bin, which a ReLU fills with zeros, counts as the second: zero is exact in any range, and would outweigh the rest.
    """
    bins = counts.size
    if bins <= _LEVELS:
        return bins * width
    counts = np.concatenate([counts[1:2], counts[1:]])
    step = max(1, -(-(bins - _LEVELS) // _CUTS))
    cuts = [*range(_LEVELS, bins, step), bins]
    before = np.concatenate([[0], np.cumsum(counts)]).astype(np.float64)
    filled = np.concatenate([[0], np.cumsum(counts > 0)])
    best, cut = np.inf, bins
    for size in cuts:
        starts = np.arange(_LEVELS + 1) * size // _LEVELS
        kept = counts[:size].astype(np.float64)
        sums, places = np.diff(before[starts]), np.diff(filled[starts])
        spread = np.divide(sums, places, out=np.zeros(_LEVELS), where=places > 0)
        said = np.repeat(spread, np.diff(starts)) * (kept > 0)
        kept[-1] += before[-1] - before[size]
        divergence = _divergence(kept, said)
        if divergence < best:
            best, cut = divergence, size
    return cut * width


def _divergence(true: NDArray[np.float64], said: NDArray[np.float64]) -> float:
    """Kullback-Leibler divergence of two lists of counts, those that are empty filled up a little."""
    if not true.any() or not said.any():
        return float("inf")
    p, q = (_smoothed(each) for each in (true, said))
    return float(np.sum(p * np.log(p / q)))


def _smoothed(counts: NDArray[np.float64], share: float = 1e-4) -> NDArray[np.float64]:
    """A distribution without zeros: those get `share` of a count each, which the others give."""
    empty = counts == 0
    zeros = int(empty.sum())
    taken = share * zeros / (counts.size - zeros)
    made = np.where(empty, share, np.maximum(counts - taken, share))
    result: NDArray[np.float64] = made / made.sum()
    return result


def _least_error(seen: Histogram, symmetric: bool) -> tuple[float, float]:
    held = seen.counts > 0
    if not held.any():
        return 0.0, 0.0
    values, counts = seen.centres()[held], seen.counts[held].astype(np.float64)
    if symmetric:
        reach = max(-seen.low, seen.high)
        cuts = reach * _SHARES
        cuts = cuts[np.argmin(_errors(values, counts, -cuts, cuts, 127, symmetric=True))] * _FINER
        cut = float(cuts[np.argmin(_errors(values, counts, -cuts, cuts, 127, symmetric=True))])
        return -cut, cut
    low, high = seen.low, seen.high
    best = int(np.argmin(_errors(values, counts, low * _SHARES, high * _SHARES, 255)))
    low, high = low * float(_SHARES[best]), high * float(_SHARES[best])
    for _ in range(2):  # each end by itself, given the other
        highs = np.unique(np.concatenate([seen.high * _SHARES, high * _FINER]))
        high = float(highs[np.argmin(_errors(values, counts, np.full(highs.size, low), highs, 255))])
        lows = np.unique(np.concatenate([seen.low * _SHARES, low * _FINER]))
        low = float(lows[np.argmin(_errors(values, counts, lows, np.full(lows.size, high), 255))])
    return low, high


def _errors(
    values: NDArray[np.float64],
    counts: NDArray[np.float64],
    lows: NDArray[np.floating[Any]],
    highs: NDArray[np.floating[Any]],
    levels: int,
    *,
    symmetric: bool = False,
) -> NDArray[np.float64]:
    """[candidates]: the sum of squared errors of rounding to `levels` steps between a low and a high end, of values
    [n] that are there `counts` [n] times. Symmetric: `levels` steps to each side of zero."""
    steps = np.maximum((highs if symmetric else highs - lows) / levels, np.finfo(np.float64).tiny)[:, None]
    offsets = np.zeros_like(steps) if symmetric else np.round(-lows[:, None] / steps)
    least = -levels if symmetric else 0
    said = (np.clip(np.round(values / steps) + offsets, least, levels) - offsets) * steps
    errors: NDArray[np.float64] = ((said - values) ** 2) @ counts
    return errors
