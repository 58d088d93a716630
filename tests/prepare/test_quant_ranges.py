"""Ranges by every method: bounds that always hold, known distributions, and onnxruntime's own calibrator."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnxruntime.quantization.calibrate import HistogramCollector

from edge_runtime.prepare.quant import Method, TensorRange
from edge_runtime.prepare.quant_histogram import Histogram
from edge_runtime.prepare.quant_ranges import range_of

METHODS: tuple[Method, ...] = get_args(Method)
BOTH = pytest.mark.parametrize("symmetric", [False, True])


def seen(values: Any) -> Histogram:
    made = Histogram()
    made.add(np.asarray(values, np.float32))
    return made


def squared_error(values: NDArray[np.float32], found: TensorRange, *, symmetric: bool) -> float:
    """Of rounding to 8 bits, plainly written."""
    wide = values.astype(np.float64)
    if symmetric:
        scale = found.high / 127
        said = np.clip(np.round(wide / scale), -127, 127) * scale
    else:
        scale = (found.high - found.low) / 255
        zero = np.round(-found.low / scale)
        said = (np.clip(np.round(wide / scale) + zero, 0, 255) - zero) * scale
    return float(((said - wide) ** 2).sum())


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=200),
    st.sampled_from(METHODS),
    st.booleans(),
)
def test_zero_is_inside_and_nothing_beyond_what_was_seen(values: list[float], method: Method, symmetric: bool) -> None:
    histogram = seen(values)
    found = range_of(histogram, method, symmetric=symmetric)
    assert np.isfinite([found.low, found.high]).all()
    assert found.low <= 0 <= found.high
    if symmetric:
        assert found.low == -found.high
        assert found.high <= max(-histogram.low, histogram.high)
    else:
        assert histogram.low <= found.low
        assert found.high <= histogram.high


@settings(max_examples=8, deadline=None)
@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=5, max_size=200), st.integers(-20, 20))
def test_scaled_by_a_power_of_two_all_ranges_scale_with_it(values: list[float], power: int) -> None:
    array = np.array(values, np.float32)
    array[np.abs(array) < 1e-3] = 0
    for method in METHODS:
        one = range_of(seen(array), method, symmetric=False)
        other = range_of(seen(np.ldexp(array, power)), method, symmetric=False)
        assert (np.ldexp(one.low, power), np.ldexp(one.high, power)) == pytest.approx((other.low, other.high))


@BOTH
def test_minmax_is_exact(symmetric: bool) -> None:
    found = range_of(seen([-0.3, 0.1, 2.7]), "minmax", symmetric=symmetric)
    low = np.float32(-2.7) if symmetric else np.float32(-0.3)
    assert found == TensorRange(float(low), float(np.float32(2.7)))


def test_percentile_cuts_what_is_rare() -> None:
    values = np.concatenate([np.linspace(0, 1, 100_000), [50.0] * 3])
    assert range_of(seen(values), "percentile", symmetric=False).high == pytest.approx(1.0, abs=0.06)
    assert range_of(seen(values), "percentile", symmetric=False, percentile=100).high == 50.0
    both = range_of(seen(np.concatenate([values, -values])), "percentile", symmetric=True)
    assert both.high == pytest.approx(1.0, abs=0.06)


def test_percentile_is_near_that_of_numpy() -> None:
    values = np.random.default_rng(5).standard_normal(400_000).astype(np.float32)
    found = range_of(seen(values), "percentile", symmetric=False, percentile=99.0)
    assert (found.low, found.high) == pytest.approx(tuple(np.percentile(values, [0.5, 99.5])), abs=0.02)
    both = range_of(seen(values), "percentile", symmetric=True, percentile=99.0)
    assert both.high == pytest.approx(float(np.percentile(np.abs(values), 99.0)), abs=0.02)


@pytest.mark.parametrize("percentile", [0.0, -1.0, 100.1, float("nan")])
def test_no_percentile(percentile: float) -> None:
    with pytest.raises(ValueError, match="percentile"):
        range_of(seen([1.0]), "percentile", symmetric=False, percentile=percentile)


@BOTH
@pytest.mark.parametrize("kind", ["normal", "one-sided", "outliers", "even"])
def test_mse_is_never_worse_than_all_and_the_best_of_a_plain_scan(kind: str, symmetric: bool) -> None:
    rng = np.random.default_rng(11)
    values = {
        "normal": rng.standard_normal(40_000),
        "one-sided": np.maximum(rng.standard_normal(40_000), 0) * 3,
        "outliers": np.concatenate([rng.standard_normal(40_000), [80.0, -30.0]]),
        "even": rng.uniform(-1, 2, 40_000),
    }[kind].astype(np.float32)
    histogram = seen(values)
    error = squared_error(values, range_of(histogram, "mse", symmetric=symmetric), symmetric=symmetric)
    everything = range_of(histogram, "minmax", symmetric=symmetric)
    shares = np.linspace(0.02, 1, 50)
    scanned = min(
        squared_error(values, TensorRange(everything.low * share, everything.high * share), symmetric=symmetric)
        for share in shares
    )
    assert error <= 1.05 * squared_error(values, everything, symmetric=symmetric)
    assert error <= 1.05 * scanned
    if kind == "outliers":
        assert error < 0.95 * squared_error(values, everything, symmetric=symmetric)


@pytest.mark.parametrize("kind", ["one-sided", "outliers"])
def test_entropy_and_percentile_are_near_those_of_onnxruntime(kind: str) -> None:
    rng = np.random.default_rng(3)
    values = {
        "normal": rng.standard_normal(61_234),
        "one-sided": np.maximum(rng.standard_normal(61_234), 0) * 3,
        "outliers": np.concatenate([rng.laplace(size=61_234), [60.0, -25.0]]),
    }[kind].astype(np.float32)
    theirs = _theirs(values, "entropy")
    ours = range_of(seen(values), "entropy", symmetric=True)
    reach = max(-theirs[0], theirs[1])
    # bins and cuts are not the same ones: what counts is the quality of the cut, so errors are compared
    mine, other = (squared_error(values, TensorRange(-each, each), symmetric=True) for each in (ours.high, reach))
    assert mine <= 1.3 * other
    assert ours.high > 0.6 * reach
    low, high = _theirs(values, "percentile")
    found = range_of(seen(values), "percentile", symmetric=False)
    width = 3 * (float(values.max()) - float(values.min())) / 1024
    assert (found.low, found.high) == pytest.approx((min(low, 0.0), high), abs=width)


def test_entropy_of_what_fits_into_the_levels_is_all_of_it() -> None:
    assert range_of(seen(np.zeros(4)), "entropy", symmetric=True) == TensorRange(0.0, 0.0)


def test_no_method() -> None:
    with pytest.raises(ValueError, match="no method"):
        range_of(seen([1.0]), "guess", symmetric=False)  # type: ignore[arg-type]


def _theirs(values: NDArray[np.float32], method: str) -> tuple[float, float]:
    """The range that onnxruntime's calibrator finds."""
    collector: Any = HistogramCollector(
        method=method, symmetric=method == "entropy", num_bins=1024, num_quantized_bins=128, percentile=99.99,
        scenario="same",
    )  # fmt: skip
    collector.collect({"x": [values]})
    low, high = collector.compute_collection_result()["x"][:2]
    return float(low), float(high)


def test_the_least_error_cuts_each_end_by_itself() -> None:
    """One end is full of values, of the other one is far out: by derivation the best cut there is at 2.2."""
    values = np.concatenate([np.random.default_rng(5).uniform(-1, 0, 200_000), [3.0]]).astype(np.float32)
    seen = Histogram()
    seen.add(values)
    found = range_of(seen, "mse", symmetric=False)
    assert found.low < -0.95
    assert 2 < found.high < 2.5
