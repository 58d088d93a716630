"""Joules: the oracle of the facts, the holes that make a span unknown, and that spans add up."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.hardware.energy import EnergyMeter
from edge_runtime.records.power import Energy, PowerReading, Unavailable

S = 1_000_000_000


def make_meter(
    readings: list[tuple[float, float]], *, period_s: float = 1.0, idle_w: float | None = None
) -> EnergyMeter:
    meter = EnergyMeter("test", ("VDD_IN",), period_s=period_s, idle_w=idle_w, keep_s=1000)
    for t_s, watts in readings:
        meter.add(PowerReading(int(t_s * S), watts, {}))
    return meter


def joules(span: Energy | Unavailable) -> float:
    assert isinstance(span, Energy), span
    return span.joules


def test_the_trapezoid_rule_gives_11_joules_where_mean_times_span_says_10() -> None:
    span = make_meter([(0, 2), (1, 4), (3, 4)]).span(0, 3 * S)
    assert joules(span) == pytest.approx(11.0, rel=1e-12)


def test_end_points_are_interpolated() -> None:
    # power rises from 0 to 10 W over 10 s: energy of [2.5 s, 7.25 s] is the area under the line
    meter = make_meter([(t, float(t)) for t in range(11)])
    assert joules(meter.span(int(2.5 * S), int(7.25 * S))) == pytest.approx((7.25**2 - 2.5**2) / 2, rel=1e-12)


def test_net_is_without_idle_and_unknown_without_a_measured_idle() -> None:
    readings = [(0.0, 5.0), (1.0, 5.0), (2.0, 5.0)]
    with_idle = make_meter(readings, idle_w=2.0).span(0, 2 * S)
    without = make_meter(readings).span(0, 2 * S)
    assert isinstance(with_idle, Energy)
    assert isinstance(without, Energy)
    assert with_idle.net_joules == pytest.approx(6.0)
    assert without.net_joules is None
    assert (with_idle.mean_w, with_idle.peak_w, with_idle.samples) == (5.0, 5.0, 3)


@pytest.mark.parametrize(
    ("readings", "span", "reason"),
    [
        ([], (0, 1), "no reading"),
        ([(0, 1)], (0, 1), "no reading at or after the end"),
        ([(1, 1), (2, 1), (3, 1)], (0, 2), "no reading at or before the start"),
        ([(0, 1), (1, 1), (2, 1)], (0.2, 0.4), "only 0 readings"),
        ([(0, 1), (1, 1), (2, 1)], (0.5, 1.5), "only 1 readings"),
        ([(0, 1), (1, 1), (5, 1), (6, 1)], (0, 6), "a hole of 4.0 s"),
        ([(0, 1), (1, 1)], (1, 1), "empty"),
    ],
)
def test_a_span_that_cannot_be_known_says_why_and_is_never_zero(
    readings: list[tuple[float, float]], span: tuple[float, float], reason: str
) -> None:
    found = make_meter(readings).span(int(span[0] * S), int(span[1] * S))
    assert isinstance(found, Unavailable)
    assert reason in found.reason


def test_readings_that_go_back_in_time_or_repeat_are_refused_and_counted() -> None:
    meter = make_meter([(0, 2), (1, 2), (1, 1000), (0.5, 1000), (2, 2)])
    assert meter.refused == 2
    assert joules(meter.span(0, 2 * S)) == pytest.approx(4.0)


def test_old_readings_are_forgotten_but_never_the_ones_a_span_needs() -> None:
    meter = EnergyMeter("test", (), period_s=0.1, idle_w=None, keep_s=10)
    for index in range(10_000):
        meter.add(PowerReading(index * S // 10, 3.0, {}))
    assert len(meter._times) < 120
    assert joules(meter.span(int(990.05 * S), int(999.9 * S))) == pytest.approx(3.0 * 9.85)


@given(
    st.lists(st.tuples(st.integers(1, 20), st.floats(0.1, 60)), min_size=12, max_size=60),
    st.lists(st.floats(0, 1), min_size=1, max_size=5),
)
def test_adjoining_spans_add_up_however_they_are_cut(steps: list[tuple[int, float]], cuts: list[float]) -> None:
    t_ns, readings = 0, []
    for step, watts in steps:
        readings.append((t_ns / S, watts))
        t_ns += step * S // 10
    meter = make_meter(readings, period_s=10)
    end_ns = int(readings[-1][0] * S)
    whole = joules(meter.span(0, end_ns))
    edges = sorted({0, end_ns, *(int(cut * end_ns) for cut in cuts)})
    parts = [meter.span(start, end) for start, end in pairwise(edges)]
    # the meter's own _at is what both use: compare with a sum over the polygon worked out apart
    apart = sum((a[1] + b[1]) / 2 * (b[0] - a[0]) for a, b in pairwise(readings))
    assert whole == pytest.approx(apart, rel=1e-9)
    if all(isinstance(part, Energy) for part in parts):
        assert sum(joules(part) for part in parts) == pytest.approx(whole, rel=1e-9)
