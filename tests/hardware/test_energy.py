"""Joules: the oracle of the facts, the holes that make a span unknown, and that spans add up."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.hardware.energy import EnergyMeter, IdlePower, Origin, Sample
from edge_runtime.records.power import Energy, Exceeded, Unavailable

S = 1_000_000_000


def make_meter(
    readings: list[tuple[float, float]],
    *,
    period_s: float = 1.0,
    idle: IdlePower | None = None,
    mode: str | None = "15W",
) -> EnergyMeter:
    meter = EnergyMeter(idle or IdlePower(), keep_s=1000)
    origin = Origin("ina3221", ("VDD_IN",), period_s, 0.04)
    for t_s, watts in readings:
        meter.add(Sample(int(t_s * S), watts, origin, mode))
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


def energy(span: Energy | Unavailable) -> Energy:
    assert isinstance(span, Energy), span
    return span


def test_a_span_says_what_it_was_made_from() -> None:
    found = energy(make_meter([(0.0, 4.0), (1.0, 6.0), (2.0, 5.0)]).span(0, 2 * S))
    assert (found.source, found.rails, found.quantum_w, found.mode) == ("ina3221", ("VDD_IN",), 0.04, "15W")
    assert (found.mean_w, found.peak_w, found.samples, found.rate_hz) == (5.25, 6.0, 3, 1.0)


def test_net_is_without_the_idle_power_of_the_same_mode_and_null_where_that_is_not_known() -> None:
    readings = [(0.0, 5.0), (1.0, 5.0), (2.0, 5.0)]
    idle = IdlePower({"15W": 2.0})
    known = energy(make_meter(readings, idle=idle).span(0, 2 * S))
    assert known.idle_w == 2.0
    assert known.net_joules == pytest.approx(6.0)
    assert known.reasons == {}
    other = energy(make_meter(readings, idle=idle, mode="MAXN").span(0, 2 * S))
    assert (other.idle_w, other.net_joules) == (None, None)
    assert other.reasons["net_joules"] == "idle power was never measured in mode MAXN"
    unknown = energy(make_meter(readings, idle=idle, mode=None).span(0, 2 * S))
    assert unknown.net_joules is None
    assert "mode is not known" in unknown.reasons["net_joules"]
    assert unknown.reasons["mode"] == "the source does not tell it"


def test_a_mode_that_changes_makes_net_unknown_for_that_window_only() -> None:
    meter = make_meter([(0, 5), (1, 5), (2, 5)], idle=IdlePower({"15W": 2.0, "MAXN": 3.0}))
    for t_s in (3, 4, 5):
        meter.add(Sample(t_s * S, 9.0, Origin("ina3221", ("VDD_IN",), 1.0, 0.04), "MAXN"))
    mixed = energy(meter.span(S, 4 * S))
    assert (mixed.mode, mixed.net_joules) == (None, None)
    assert mixed.reasons["mode"] == "it changed in the window"
    assert energy(meter.span(3 * S, 5 * S)).net_joules == pytest.approx(12.0)


def test_idle_power_is_learned_as_the_lowest_of_each_mode() -> None:
    idle = IdlePower()
    for watts in (5.0, 4.6, 4.8):
        idle.learn("15W", watts)
    assert idle.of("15W") == 4.6
    assert isinstance(idle.of("MAXN"), Unavailable)


def test_a_window_over_a_switch_names_both_sources_and_counts_gaps_by_the_slower_one() -> None:
    fast = Origin("ina3221", ("VDD_IN",), 0.1, 0.04)
    slow = Origin("tegrastats", ("VDD_IN",), 1.0, None)
    meter = EnergyMeter(IdlePower(), keep_s=1000)
    for index in range(11):
        meter.add(Sample(index * S // 10, 5.0, fast, "15W"))
    for t_s in (3, 4, 5):
        meter.add(Sample(t_s * S, 6.0, slow))
    both = energy(meter.span(0, 5 * S))
    assert both.joules == pytest.approx(5.0 + 2 * 5.5 + 2 * 6.0)
    assert (both.source, both.rails, both.quantum_w) == ("ina3221+tegrastats", ("VDD_IN",), None)
    assert "quantum_w" in both.reasons
    assert energy(meter.span(0, S)).source == "ina3221"
    assert energy(meter.span(3 * S, 5 * S)).source == "tegrastats"
    # back to the fast one: its own gaps count by its own period again
    for half_s in (11, 12, 13):
        meter.add(Sample(half_s * S // 2, 5.0, fast))
    assert meter.span(4 * S, int(6.5 * S)) == Unavailable("a hole of 0.5 s in the readings")


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


def test_a_time_that_repeats_or_goes_back_is_refused_and_no_window_around_it_is_known() -> None:
    meter = make_meter([(0, 2), (1, 2), (2, 2), (2, 1000), (1.5, 1000), (3, 2), (4, 2), (5, 2)])
    assert meter.refused == 2
    assert joules(meter.span(0, 2 * S)) == pytest.approx(4.0)
    assert meter.span(0, 3 * S) == Unavailable("a reading had a time that was not after the one before")
    assert joules(meter.span(3 * S, 5 * S)) == pytest.approx(4.0)


def test_old_readings_are_forgotten_but_never_the_ones_a_span_needs() -> None:
    meter = EnergyMeter(IdlePower(), keep_s=10)
    origin = Origin("test", (), 0.1, None)
    for index in range(10_000):
        meter.add(Sample(index * S // 10, 3.0, origin))
    assert len(meter._points) < 120
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
    # the meter interpolates for both: compare with a sum over the polygon worked out apart
    apart = sum((a[1] + b[1]) / 2 * (b[0] - a[0]) for a, b in pairwise(readings))
    assert whole == pytest.approx(apart, rel=1e-9)
    if all(isinstance(part, Energy) for part in parts):
        assert sum(joules(part) for part in parts) == pytest.approx(whole, rel=1e-9)


@given(
    st.lists(st.tuples(st.integers(1, 20), st.floats(0.1, 60), st.booleans()), min_size=3, max_size=40),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_any_span_is_the_area_under_the_readings_whatever_lies_around_it(
    steps: list[tuple[int, float, bool]], one: float, other: float
) -> None:
    origins = (Origin("ina3221", ("VDD_IN",), 10.0, 0.04), Origin("jtop", ("VDD_IN",), 30.0, 0.04))
    meter = EnergyMeter(IdlePower(), keep_s=1000)
    t_ns, points = 0, []
    for step, watts, is_other in steps:
        points.append((t_ns, watts))
        meter.add(Sample(t_ns, watts, origins[is_other]))
        t_ns += step * S // 10
    start_ns, end_ns = sorted(int(part * points[-1][0]) for part in (one, other))
    found = meter.span(start_ns, end_ns)
    if isinstance(found, Unavailable):
        assert "readings in the window" in found.reason or found.reason == "the span is empty"
        return
    # the oracle: numpy's interpolation at every corner of the line within the span
    corners = [start_ns, *(t for t, _ in points if start_ns < t < end_ns), end_ns]
    watts_at = np.interp(corners, [t for t, _ in points], [watts for _, watts in points]).tolist()
    apart = sum(
        (a + b) / 2 * (t1 - t0) / S for (a, b), (t0, t1) in zip(pairwise(watts_at), pairwise(corners), strict=True)
    )
    assert found.joules == pytest.approx(apart, rel=1e-9, abs=1e-9)
    assert found.peak_w == max(watts for t, watts in points if start_ns <= t <= end_ns)


# ---- seconds above a limit


def test_seconds_above_a_limit_are_those_whose_mean_is_above_it() -> None:
    # means of the seconds: 10, 11, 12, 10 W; a spike within a second that its mean does not show is none
    meter = make_meter([(0, 10), (1, 10), (1.5, 12), (2, 10), (2.01, 12), (3, 12), (3.01, 10), (4, 10)])
    assert meter.seconds_above(0, 4 * S, 10.5) == Exceeded(2.0)
    assert meter.seconds_above(0, 4 * S, 11.5) == Exceeded(1.0)
    assert meter.seconds_above(0, 4 * S, 12.0) == Exceeded(0.0)
    assert meter.seconds_above(0, 4 * S, 9.0) == Exceeded(4.0)


def test_what_is_exactly_at_the_limit_is_not_above_it_however_long_it_has_been_summed_up() -> None:
    meter = make_meter([(t / 10, 10.3) for t in range(100_000)])
    assert meter.seconds_above(9_990 * S, 9_999 * S, 10.3) == Exceeded(0.0)
    assert meter.seconds_above(9_990 * S, 9_999 * S, 10.2999) == Exceeded(9.0)


def test_the_rest_of_a_span_counts_by_the_whole_second_that_ends_with_it() -> None:
    meter = make_meter([(0, 5), (2, 5), (2.000001, 20), (3, 20)])
    # [1.4 s, 2.4 s] has a mean of 11 W
    assert meter.seconds_above(0, int(2.4 * S), 10.9) == Exceeded(pytest.approx(0.4))  # type: ignore[arg-type]
    assert meter.seconds_above(0, int(2.4 * S), 11.1) == Exceeded(0.0)
    # a span of less than a second looks back
    assert meter.seconds_above(int(2.2 * S), int(2.4 * S), 10.9) == Exceeded(pytest.approx(0.2))  # type: ignore[arg-type]


def test_a_second_with_a_hole_is_unknown_and_says_why() -> None:
    readings = [(t / 10, 20.0) for t in range(41) if not 12 <= t <= 18]
    meter = make_meter(readings, period_s=0.1)
    found = meter.seconds_above(0, 4 * S, 15.0)
    assert found == Exceeded(3.0, 1.0, "a hole of 0.8 s in the readings")
    late = meter.seconds_above(2 * S, 6 * S, 15.0)
    assert isinstance(late, Exceeded)
    assert (late.above_s, late.unknown_s) == (2.0, 2.0)
    assert "late or lost" in str(late.reason)
    assert isinstance(meter.seconds_above(7 * S, 9 * S, 15.0), Unavailable)
    assert isinstance(meter.seconds_above(S, 2 * S, 15.0), Unavailable)
    assert isinstance(meter.seconds_above(2 * S, 2 * S, 15.0), Unavailable)


@given(
    st.lists(st.integers(0, 40), min_size=2, max_size=200),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(1, 40),
)
def test_seconds_above_agree_with_the_energy_of_each_second(
    watts: list[int], one: float, other: float, limit: int
) -> None:
    meter = make_meter([(t / 10, float(value)) for t, value in enumerate(watts)], period_s=0.1)
    start_ns, end_ns = sorted(int(part * (len(watts) - 1) / 10 * S) for part in (one, other))
    found = meter.seconds_above(start_ns, end_ns, limit + 0.5)
    above_ns = unknown_ns = 0
    for t_ns in range(start_ns, end_ns, S):
        to_ns = min(t_ns + S, end_ns)
        span = meter.span(to_ns - S, to_ns)
        if isinstance(span, Unavailable):
            unknown_ns += to_ns - t_ns
        elif span.joules > limit + 0.5 + 1e-6:
            above_ns += to_ns - t_ns
        elif span.joules > limit + 0.5 - 1e-6:
            return  # too near to tell
    if unknown_ns == end_ns - start_ns:
        assert isinstance(found, Unavailable)
    else:
        assert isinstance(found, Exceeded)
        assert (found.above_s, found.unknown_s) == (above_ns / 1e9, unknown_ns / 1e9)
        assert (found.reason is None) == (unknown_ns == 0)
