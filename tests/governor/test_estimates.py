"""What the governor learns: the cost of a frame, base power, and the heat sink."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.governor.energy import LAG_S, EnergyState, begun, measured, missed, unsure
from edge_runtime.governor.thermal import ThermalState, allowed_w, felt

SPAN_S = 0.25


HZ = 50.0


def learn(base_w: float, scale: float, works_w: list[float], noise_w: float = 0.05, seed: int = 0) -> EnergyState:
    """A device that answers as the model says, with a lag, under these loads of 10 s each."""
    noise = random.Random(seed)
    power_w = base_w + scale * works_w[0]
    state = begun(power_w, works_w[0], HZ, scale_sd=1.5, picture_j=0.01)
    for work_w in works_w:
        for _ in range(40):
            before_w = power_w
            power_w += (base_w + scale * work_w - power_w) * -math.expm1(-SPAN_S / LAG_S)
            mean_w = (before_w + power_w) / 2
            state = measured(state, mean_w + noise.gauss(0, noise_w), work_w, HZ, SPAN_S, 0.04)
    return state


@given(st.floats(2, 12), st.floats(0.3, 4.0), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_base_and_scale_are_found_from_a_load_that_moves(base_w: float, scale: float, seed: int) -> None:
    state = learn(base_w, scale, [0.5, 2.0, 4.0, 1.0, 3.0, 5.0, 2.0], seed=seed)
    assert state.base_w == pytest.approx(base_w, abs=0.6)
    assert state.scale == pytest.approx(scale, rel=0.12, abs=0.1)


@given(st.floats(0.005, 0.05), st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_pictures_that_are_only_decoded_are_told_from_those_that_are_inferred(picture_j: float, seed: int) -> None:
    noise = random.Random(seed)
    state = begun(5.0 + 10 * picture_j + 2.0, 1.0, 10.0, scale_sd=1.5, picture_j=0.01)
    power_w = 5.0 + 10 * picture_j + 2.0
    for work_w, hz in ((1.0, 10.0), (2.0, 10.0), (2.0, 100.0), (0.5, 100.0), (0.5, 20.0), (3.0, 60.0), (1.0, 10.0)):
        for _ in range(40):
            power_w += (5.0 + hz * picture_j + 2.0 * work_w - power_w) * -math.expm1(-SPAN_S / LAG_S)
            state = measured(state, power_w + noise.gauss(0, 0.03), work_w, hz, SPAN_S, 0.04)
    assert state.scale == pytest.approx(2.0, abs=0.3)
    assert state.picture_j == pytest.approx(picture_j, abs=0.006)


def test_a_load_that_stands_still_says_nothing_about_the_scale() -> None:
    """Whole frames make the measured load uneven, and power does not follow: that must not make frames look free."""
    state = learn(5.0, 2.0, [1.0, 3.0, 2.0])
    before, noise = state.scale, random.Random(1)
    for _ in range(2400):
        state = measured(state, 9.0 + noise.gauss(0, 0.05), 2.0 + noise.gauss(0, 0.3), HZ, SPAN_S, 0.04)
    assert state.scale == pytest.approx(before, rel=0.15)
    assert state.power_w(2.0) == pytest.approx(9.0, abs=0.3)


def test_it_knows_what_it_does_not_know() -> None:
    state = begun(7.0, 1.0, HZ, scale_sd=1.5, picture_j=0.01)
    # at the load that was seen it is sure, beyond it is not: what more takes may be several times what was believed
    assert state.sd_w(1.0) < 0.1
    assert state.sd_w(2.0) > 1.0
    learned = learn(5.0, 2.0, [1.0, 3.0, 2.0])
    assert learned.sd_w(3.0) < 0.5
    assert abs(learned.power_w(3.0) - 11.0) < 2.5 * max(learned.sd_w(3.0), 0.1)


def test_a_change_of_unknown_cost_leaves_what_is_measured_as_sure_as_it_was() -> None:
    state = learn(5.0, 1.0, [1.0, 3.0])
    after = unsure(state, 0.2)
    assert after.sd_w(state.work_w) == pytest.approx(state.sd_w(state.work_w), rel=0.05)
    assert after.sd_w(2 * state.work_w) > state.sd_w(2 * state.work_w)


def test_without_readings_the_load_goes_on() -> None:
    state = learn(5.0, 1.0, [1.0, 3.0])
    before = state.slow_base_w
    for _ in range(40):
        state = missed(state, 1.0, HZ, SPAN_S)
    assert state.work_w == pytest.approx(1.0, abs=1e-3)
    assert state.slow_base_w == before


@given(
    st.lists(
        st.tuples(st.floats(0.01, 500), st.floats(0, 200), st.floats(0, 2000)), min_size=1, max_size=60
    ),
    st.floats(0, 2),
)  # fmt: skip
def test_no_reading_makes_it_nonsense(readings: list[tuple[float, float, float]], quantum_w: float) -> None:
    state = begun(*readings[0], scale_sd=1.5, picture_j=0.01)
    for power_w, work_w, hz in readings:
        state = measured(state, power_w, work_w, hz, SPAN_S, quantum_w)
        assert 0.0 <= state.base_w < 1e7
        assert 0.1 <= state.scale <= 10.0
        assert 0.0 <= state.picture_j < 1e6
        assert math.isfinite(state.sd_w(100.0))
        assert all(state.covariance[index][index] > 0 for index in range(3))


class Sink:
    """Two thermal masses, as they are."""

    def __init__(self, resistance_c_w: float, tau_s: float, die_c_w: float, ambient_c: float, power_w: float) -> None:
        self.resistance_c_w, self.tau_s, self.die_c_w, self.ambient_c = resistance_c_w, tau_s, die_c_w, ambient_c
        self.sink_c = ambient_c + resistance_c_w * power_w
        self.tj_c = self.sink_c + die_c_w * power_w

    def step(self, power_w: float, span_s: float) -> float:
        settled_c = self.ambient_c + self.resistance_c_w * power_w
        self.sink_c += (settled_c - self.sink_c) * -math.expm1(-span_s / self.tau_s)
        self.tj_c += (self.sink_c + self.die_c_w * power_w - self.tj_c) * -math.expm1(-span_s / 2.0)
        return round(self.tj_c * 32) / 32

    def sustained_w(self, limit_c: float) -> float:
        return (limit_c - self.ambient_c) / (self.resistance_c_w + self.die_c_w)


@given(st.floats(0.4, 5.0), st.floats(30, 360), st.floats(0.15, 0.6), st.floats(0, 45), st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_the_limit_is_reached_and_not_passed(
    resistance_c_w: float, tau_s: float, die_c_w: float, ambient_c: float, seed: int
) -> None:
    """Whatever the sink is like: at most half a degree beyond, and in the end at the limit."""
    noise = random.Random(seed)
    limit_c, most_w = 85.0, 20.0
    sink = Sink(resistance_c_w, tau_s, die_c_w, ambient_c, 4.0)
    if sink.sustained_w(limit_c) < 5.0:
        return
    state = ThermalState()
    power_w, hottest_c = 4.0, 0.0
    for _ in range(int(max(1200.0, 8 * tau_s) / SPAN_S)):
        tj_c = sink.step(power_w, SPAN_S)
        hottest_c = max(hottest_c, sink.tj_c)
        state = felt(state, tj_c, power_w + noise.gauss(0, 0.05), SPAN_S, 15.0)
        power_w = min(max(allowed_w(state, limit_c), 4.0), most_w)
    assert hottest_c <= limit_c + 0.5
    assert sink.tj_c >= min(limit_c, ambient_c + (resistance_c_w + die_c_w) * most_w) - 1.0
