"""What histograms keep: exact ends, every value in its bin, and nothing of the order in which values came."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edge_runtime.prepare.quant_histogram import BINS, Histogram

NUMBERS = st.floats(-1e6, 1e6, width=32, allow_nan=False, allow_subnormal=False)


def counted(*parts: NDArray[np.float32]) -> Histogram:
    made = Histogram()
    for part in parts:
        made.add(part)
    return made


def same(one: Histogram, other: Histogram) -> bool:
    return (one.first, one.exponent, one.low, one.high) == (other.first, other.exponent, other.low, other.high) and (
        np.array_equal(one.counts, other.counts)
    )


@settings(max_examples=20, deadline=None)
@given(st.lists(st.lists(NUMBERS, min_size=1, max_size=8), min_size=1, max_size=5), st.randoms())
def test_neither_order_nor_parts_matter(parts: list[list[float]], random: object) -> None:
    arrays = [np.array(part, np.float32) for part in parts]
    once = counted(np.concatenate(arrays))
    shuffled = list(arrays)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert same(counted(*shuffled), once)


@settings(max_examples=20, deadline=None)
@given(st.lists(NUMBERS, min_size=1, max_size=60))
def test_every_value_is_counted_where_it_is(values: list[float]) -> None:
    array = np.array(values, np.float32)
    made = counted(array)
    assert made.counts.sum() == array.size
    assert (made.low, made.high) == (min(0.0, float(array.min())), max(0.0, float(array.max())))
    wanted, _ = np.histogram(array.astype(np.float64), made.edges())
    last = made.edges()[-1]
    assert (array < last).all()  # np.histogram's last bin alone has its end
    assert np.array_equal(wanted, made.counts)


@settings(max_examples=20, deadline=None)
@given(st.lists(NUMBERS, min_size=1, max_size=60))
def test_bins_are_as_fine_as_the_values_allow(values: list[float]) -> None:
    made = counted(np.array(values, np.float32))
    if made.high > made.low:
        width = 2.0**made.exponent
        assert (made.high - made.low) / width > BINS / 2 - 2 or made.exponent == -100


@settings(max_examples=20, deadline=None)
@given(st.lists(NUMBERS, min_size=1, max_size=60))
def test_magnitudes_are_all_of_them(values: list[float]) -> None:
    array = np.array(values, np.float32)
    counts, width = counted(array).magnitudes()
    assert counts.sum() == array.size
    largest = float(np.abs(array).max())
    assert (counts.size - 1) * width <= largest <= counts.size * width or largest < width


def test_what_is_kept_does_not_grow() -> None:
    made = counted(np.linspace(-1, 3, 200_001, dtype=np.float32), np.full(7, 4e30, np.float32))
    assert made.counts.shape == (BINS,)
    assert made.counts.sum() == 200_008
    assert made.counts[: -made.first].sum() == 50_000  # what is below zero stays below it


def test_nothing_and_zeros() -> None:
    made = counted(np.zeros((0, 3), np.float32), np.zeros((2, 3), np.float32))
    assert (made.low, made.high, made.counts.sum()) == (0.0, 0.0, 6)
    assert made.counts[-made.first] == 6


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused_whole(bad: float) -> None:
    made = counted(np.ones(3, np.float32))
    with pytest.raises(ValueError, match="not finite"):
        made.add(np.array([1.0, bad], np.float32))
    assert same(made, counted(np.ones(3, np.float32)))
