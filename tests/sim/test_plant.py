"""The plant against what was measured on modules, against its own equations, and against what no plant may do."""

from __future__ import annotations

import math
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.config import Hardware
from edge_runtime.sim.module import MODULES, gpu_steps_hz, modes, plant_parameters
from edge_runtime.sim.plant import CPU_EXPONENT, GPU_EXPONENT, Plant, PlantParameters

NX_BENCH_C = 50.8
NX = plant_parameters("orin-nx-16gb", "40W")

factors = st.floats(0.5, 2.0)
specimens = st.builds(
    lambda name, power, resistance, tau, leakage: MODULES[name].scaled(
        power=power, thermal_resistance=resistance, tau=tau, leakage=leakage
    ),
    st.sampled_from(sorted(MODULES)),
    factors,
    factors,
    factors,
    factors,
)


def run(plant: Plant, seconds: float, gpu_load: float, cpu_load: float) -> None:
    for _ in range(round(seconds / 0.1)):
        plant.step(0.1, gpu_load, cpu_load)


# --- measured


@pytest.mark.parametrize(
    ("mode", "load", "watts", "tj_c"), [("40W", 0, 4.6, 58), ("25W", 1, 16.9, 71), ("40W", 1, 27.6, 86)]
)
def test_an_nx_is_as_it_was_measured(mode: str, load: float, watts: float, tj_c: float) -> None:
    settled = Plant(plant_parameters("orin-nx-16gb", mode), NX_BENCH_C).settled(load, load)
    assert settled is not None
    assert settled[0] == pytest.approx(watts, abs=0.3)
    assert settled[1] == pytest.approx(tj_c, abs=1.6)


def test_the_nx_follows_the_line_that_was_fitted_to_it() -> None:
    plant = Plant(NX, NX_BENCH_C)
    for load in (0.0, 0.25, 0.5, 0.75, 1.0):
        settled = plant.settled(load, load)
        assert settled is not None
        assert settled[1] == pytest.approx(50.8 + 1.32 * settled[0], abs=2.0)


@pytest.mark.parametrize(
    ("mode", "gpu_w", "cpu_w"), [("MAXN", 40.4, 15.2), ("50W", 18.4, 6.0), ("30W", 7.6, 5.6), ("15W", 5.2, 1.6)]
)
def test_an_agx_under_stress_takes_what_was_measured_by_mode(mode: str, gpu_w: float, cpu_w: float) -> None:
    plant = Plant(plant_parameters("agx-orin-64gb", mode), 25.0)
    run(plant, 20, 1.0, 1.0)
    assert [plant.gpu_w, plant.cpu_w] == pytest.approx([gpu_w, cpu_w])


def test_power_over_the_clock_is_the_measured_one() -> None:
    # an AGX's MAXN and 50W differ in the clocks alone
    maxn = plant_parameters("agx-orin-64gb", "MAXN")
    assert maxn.gpu_w * (816e6 / maxn.gpu_max_hz) ** GPU_EXPONENT == pytest.approx(18.4, rel=0.02)
    plant = Plant(NX, 25.0)
    watts = {}
    for mhz in (408, 1173):
        plant.cap_hz = mhz * 1e6
        run(plant, 20, 1.0, 0.0)
        watts[mhz] = plant.gpu_w
    assert watts[408] == pytest.approx(2.1, abs=0.05)
    assert watts[1173] == pytest.approx(12.8, abs=0.01)
    assert watts[1173] / watts[408] == pytest.approx((1173 / 408) ** GPU_EXPONENT)


def test_there_is_a_module_for_every_name_of_the_configuration() -> None:
    names = {name.removeprefix("sim:") for name in get_args(Hardware) if name.startswith("sim:")}
    assert names == set(MODULES)


@pytest.mark.parametrize("name", sorted(MODULES))
def test_a_mode_caps_clocks_and_with_them_power(name: str) -> None:
    assert MODULES[name].mode in modes(name)
    for mode, declared in modes(name).items():
        each = plant_parameters(name, mode)
        steps = each.gpu_steps_hz
        assert list(steps) == sorted(set(steps))
        assert steps[0] == pytest.approx(306e6)
        if declared.gpu_mhz is not None:
            assert each.gpu_max_hz <= declared.gpu_mhz * 1e6
        assert each.cpu_cores == declared.cpu_cores
    fastest = max(modes(name), key=lambda mode: plant_parameters(name, mode).gpu_max_hz)
    slowest = min(modes(name), key=lambda mode: plant_parameters(name, mode).gpu_max_hz)
    assert plant_parameters(name, slowest).gpu_w <= plant_parameters(name, fastest).gpu_w


def test_a_mode_that_is_not_known_is_refused() -> None:
    with pytest.raises(KeyError):
        plant_parameters("orin-nx-16gb", "60W")


def test_gpu_steps_end_with_the_cap() -> None:
    assert gpu_steps_hz(612e6) == (306e6, 408e6, 510e6, 612e6)
    assert gpu_steps_hz(625e6) == (306e6, 408e6, 510e6, 612e6, 625e6)
    assert gpu_steps_hz(306e6) == (306e6,)


# --- its own equations


def test_power_follows_load_within_two_seconds() -> None:
    plant = Plant(NX, 25.0)
    idle_w = plant.power_w
    plant.step(NX.tau_power_s, 1.0, 0.0)
    assert plant.gpu_w == pytest.approx(NX.gpu_w * (1 - math.exp(-1)), rel=1e-6)
    run(plant, 1.5, 1.0, 0.0)
    assert plant.power_w - idle_w > 0.95 * NX.gpu_w


def test_junction_and_sink_have_their_time_constants() -> None:
    plant = Plant(NX, 70.0)  # the fan is at full speed, and stays so
    run(plant, 2000, 0.0, 0.0)
    assert plant.fan == 1.0
    sink_c, power_w = plant.sink_c, plant.power_w
    run(plant, NX.tau_sink_s, 0.5, 0.0)
    settled = plant.settled(0.5, 0.0)
    assert settled is not None
    end_c = settled[1] - NX.junction_c_w * settled[0]
    # leakage and the power's own delay bend it a little
    assert (plant.sink_c - sink_c) / (end_c - sink_c) == pytest.approx(1 - math.exp(-1), abs=0.02)
    assert plant.tj_c - plant.sink_c == pytest.approx(NX.junction_c_w * plant.power_w, abs=0.01)
    assert plant.power_w > power_w


def test_in_still_air_the_sink_takes_longer() -> None:
    plant = Plant(NX, -20.0)
    sink_c = plant.sink_c
    run(plant, NX.still_air * NX.tau_sink_s, 0.3, 0.0)
    settled = plant.settled(0.3, 0.0)
    assert settled is not None
    assert plant.fan == 0.0
    end_c = settled[1] - NX.junction_c_w * settled[0]
    assert (plant.sink_c - sink_c) / (end_c - sink_c) == pytest.approx(1 - math.exp(-1), abs=0.02)


def test_steps_of_any_length_come_to_the_same() -> None:
    coarse, fine = Plant(NX, 25.0), Plant(NX, 25.0)
    for _ in range(600):
        coarse.step(1.0, 0.8, 0.3)
    run(fine, 600, 0.8, 0.3)
    assert coarse.tj_c == pytest.approx(fine.tj_c, abs=1e-6)
    finest = Plant(NX, 25.0)
    for _ in range(60_000):
        finest.step(0.01, 0.8, 0.3)
    assert coarse.tj_c == pytest.approx(finest.tj_c, abs=0.05)
    assert coarse.power_w == pytest.approx(finest.power_w, abs=0.01)


@settings(max_examples=15, deadline=None)
@given(specimens, st.floats(0, 45), st.floats(0, 1), st.floats(0, 1))
def test_it_settles_where_it_says_it_will(each: PlantParameters, ambient_c: float, gpu: float, cpu: float) -> None:
    plant = Plant(each, ambient_c)
    settled = plant.settled(gpu, cpu)
    if settled is None or settled[1] > each.passive_c - 0.5:
        return
    for _ in range(100):
        before_c = plant.tj_c
        for _ in range(200):
            plant.step(1.0, gpu, cpu)
        # with much leakage it creeps: what is still to come is several times the last step
        if abs(plant.tj_c - before_c) < 0.002:
            break
    assert plant.power_w == pytest.approx(settled[0], rel=2e-3)
    assert plant.tj_c == pytest.approx(settled[1], abs=0.1)


def test_the_fan_slows_down_only_when_it_is_really_cooler() -> None:
    plant = Plant(NX, 45.0)
    run(plant, 600, 0.3, 0.0)
    assert 0 < plant.fan < 1
    fan, tj_c = plant.fan, plant.tj_c
    while plant.tj_c > tj_c - 0.9 * NX.fan_hysteresis_c:
        plant.step(0.1, 0.0, 0.0)
        assert plant.fan == pytest.approx(fan)
    while plant.tj_c > tj_c - 1.2 * NX.fan_hysteresis_c:
        plant.step(0.1, 0.0, 0.0)
    assert plant.fan < fan


def test_the_clock_is_the_highest_step_that_the_cap_allows() -> None:
    plant = Plant(NX, 25.0)
    for cap_hz, want_hz in ((None, 1173e6), (1172e6, 1122e6), (612e6, 612e6), (100e6, 306e6), (None, 1173e6)):
        plant.cap_hz = cap_hz
        assert plant.gpu_hz == pytest.approx(want_hz)
        assert plant.speed == pytest.approx(want_hz / 1173e6)


def test_no_joule_is_saved_for_free_by_a_slower_clock() -> None:
    plant = Plant(NX, 25.0)
    work = 0.3  # of the GPU's time at full clock
    base = plant.settled(0.0, 0.0)
    for step_hz in NX.gpu_steps_hz:
        speed = step_hz / NX.gpu_max_hz
        if work / speed > 1:
            continue
        full, slow = plant.settled(work, 0.0), plant.settled(work / speed, 0.0, step_hz)
        assert full is not None
        assert slow is not None
        assert base is not None
        # the same frames, for longer at lower power: f^1.7 / f
        assert (slow[0] - base[0]) / (full[0] - base[0]) == pytest.approx(speed ** (GPU_EXPONENT - 1), rel=0.03)


# --- what no plant may do


@settings(max_examples=60, deadline=None)
@given(
    specimens,
    st.floats(-20, 60),
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0.5, 60)), min_size=1, max_size=8),
)
def test_power_and_temperature_stay_within_physics(
    each: PlantParameters, ambient_c: float, spans: list[tuple[float, float, float]]
) -> None:
    plant = Plant(each, ambient_c)
    # one that is too hot without any load begins so, and switches itself off
    hottest_c = max(each.critical_c + 5, plant.tj_c)
    least_w = each.static_w * (1 + each.leakage_per_c * (ambient_c - each.reference_c))
    most_w = each.static_w * (1 + each.leakage_per_c * (hottest_c - each.reference_c))
    for gpu_load, cpu_load, seconds in spans:
        for _ in range(math.ceil(seconds)):
            plant.step(seconds / math.ceil(seconds), gpu_load, cpu_load)
            assert ambient_c - 1e-6 <= plant.tj_c <= hottest_c + 1e-6
            assert plant.tj_c >= plant.sink_c
            if not plant.shutdown:
                assert least_w - 1e-9 <= plant.power_w <= most_w + each.gpu_w + each.cpu_w
            assert 0 < plant.speed <= 1


@settings(max_examples=60, deadline=None)
@given(specimens, st.floats(0, 45), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_more_load_and_a_higher_clock_cost_more(
    each: PlantParameters, ambient_c: float, low: float, high: float, cpu: float
) -> None:
    plant = Plant(each, ambient_c)
    low, high = min(low, high), max(low, high)
    less, more = plant.settled(low, cpu), plant.settled(high, cpu)
    if more is not None:
        assert less is not None
        assert less[0] <= more[0] + 1e-6
        assert less[1] <= more[1] + 1e-5
        steps = [plant.settled(high, cpu, hz) for hz in each.gpu_steps_hz]
        watts = [step[0] for step in steps if step is not None]
        assert len(watts) == len(steps)
        assert watts == sorted(watts)


def test_at_the_trip_point_the_clock_goes_down_step_by_step_and_comes_back_late() -> None:
    hot = NX.scaled(thermal_resistance=2.0)
    plant = Plant(hot, 60.0)
    last_hz, last_s, slowest_hz = plant.gpu_hz, -1.0, plant.gpu_hz
    for tick in range(20_000):
        plant.step(0.1, 1.0, 1.0)
        if plant.gpu_hz != last_hz:
            steps = hot.gpu_steps_hz
            assert abs(steps.index(plant.gpu_hz) - steps.index(last_hz)) == 1
            assert tick * 0.1 - last_s >= hot.throttle_period_s - 1e-6
            if plant.gpu_hz < last_hz:
                assert plant.tj_c >= hot.passive_c
            else:
                assert plant.tj_c < hot.passive_c - hot.passive_hysteresis_c
            last_hz, last_s = plant.gpu_hz, tick * 0.1
        slowest_hz = min(slowest_hz, plant.gpu_hz)
        assert plant.throttled == (plant.gpu_hz < hot.gpu_max_hz)
    assert slowest_hz < hot.gpu_max_hz
    assert not plant.shutdown
    # held near the trip point by throttling alone
    assert hot.passive_c - 5 < plant.tj_c < hot.passive_c + 3
    run(plant, 300, 0.0, 0.0)
    assert not plant.throttled
    assert plant.gpu_hz == hot.gpu_max_hz


def test_throttled_the_cpu_takes_longer_for_its_work_at_less_power() -> None:
    plant = Plant(NX, 92.0)
    run(plant, 600, 1.0, 0.1)
    assert plant.gpu_hz == NX.gpu_steps_hz[0]
    assert not plant.shutdown
    share = plant.speed
    assert plant.cpu_w == pytest.approx(NX.cpu_w * (0.1 / share) * share**CPU_EXPONENT)
    run(plant, 20, 1.0, 1.0)
    assert plant.cpu_w == pytest.approx(NX.cpu_w * share**CPU_EXPONENT)


def test_a_runaway_ends_at_the_critical_temperature() -> None:
    wild = NX.scaled(leakage=30.0, thermal_resistance=2.0)
    plant = Plant(wild, 45.0)
    assert plant.settled(0.5, 0.0) is None
    hottest_c = 0.0
    for _ in range(50_000):
        plant.step(0.1, 0.5, 0.0)
        hottest_c = max(hottest_c, plant.tj_c)
    assert plant.shutdown
    assert wild.critical_c <= hottest_c < wild.critical_c + 1
    assert plant.power_w == pytest.approx(0.0, abs=1e-9)
    assert plant.tj_c == pytest.approx(45.0, abs=0.1)
