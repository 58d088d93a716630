"""The simulated sensors: steps, noise, delay and every fault, exactly."""

from __future__ import annotations

import pytest

from edge_runtime.hardware.modules import module_power
from edge_runtime.hardware.protocol import SensorError
from edge_runtime.records.power import DeviceReading
from edge_runtime.sim.gauge import Gauge
from edge_runtime.sim.module import MODULES, declared
from edge_runtime.sim.plant import Plant
from edge_runtime.sim.sensors import FAULT_KINDS, SENSOR_PERIOD_S, Fault, FaultKind, SimSensor

PERIOD_NS = int(SENSOR_PERIOD_S * 1e9)


def loaded(name: str, seconds: float = 5.0) -> Plant:
    plant = Plant(MODULES[name], 25.0)
    plant.step(seconds, 0.7, 0.4)
    return plant


def readings(sensor: SimSensor, plant: Plant, count: int) -> list[DeviceReading | str]:
    """One conversion and one reading a period, from 0.1 s on; a failed one as its message."""
    found: list[DeviceReading | str] = []
    for number in range(1, count + 1):
        plant.step(SENSOR_PERIOD_S, 0.7, 0.4)
        sensor.convert(plant)
        try:
            found.append(sensor.read(number * PERIOD_NS))
        except SensorError as error:
            found.append(error.message)
    return found


@pytest.mark.parametrize("name", sorted(MODULES))
def test_every_rail_is_rounded_to_its_step_and_module_power_is_their_sum(name: str) -> None:
    plant, module = loaded(name), declared(name)
    sensor = SimSensor(module, noise=0.0)
    sensor.convert(plant)
    reading = sensor.read(1)
    assert module.quantum_w is not None
    for watts in reading.rails_w.values():
        assert watts / module.quantum_w == pytest.approx(round(watts / module.quantum_w))
    assert set(reading.rails_w) == {*module.rails, *module.other_rails}
    assert reading.watts is not None
    power_w, reason = module_power(module, reading.rails_w)
    assert reason is None
    assert power_w == pytest.approx(reading.watts)
    # half a step a rail, no more
    assert abs(reading.watts - plant.power_w) <= len(module.rails) * module.quantum_w / 2 + 1e-9


def test_a_reading_is_the_conversion_before_the_last_one() -> None:
    plant = Plant(MODULES["orin-nx-16gb"], 25.0)
    sensor = SimSensor(declared("orin-nx-16gb"), noise=0.0)
    with pytest.raises(SensorError):
        sensor.read(1)
    truth = []
    for number in range(1, 30):
        truth.append(plant.power_w)
        sensor.convert(plant)
        reading = sensor.read(number * PERIOD_NS)
        assert reading.watts == pytest.approx(truth[max(0, number - 2)], abs=0.0201)
        assert reading.t_ns == number * PERIOD_NS
        plant.step(SENSOR_PERIOD_S, 1.0, 1.0)
    assert truth[-1] > truth[0] + 5


def test_noise_makes_the_steps_change_and_has_no_bias() -> None:
    plant = loaded("agx-orin-64gb", 3000)
    sensor = SimSensor(declared("agx-orin-64gb"), noise=0.01, seed=1)
    watts = []
    for number in range(1, 3000):
        sensor.convert(plant)
        reading = sensor.read(number)
        assert reading.watts is not None
        watts.append(reading.watts)
    # three rails, each at most half a step of 0.39 W wrong where noise is too small to change it
    assert sum(watts) / len(watts) == pytest.approx(plant.power_w, abs=3 * 0.39 / 2)
    again = SimSensor(declared("agx-orin-64gb"), noise=0.01, seed=1)
    again.convert(plant)
    assert again.read(1).watts == watts[0]
    small = SimSensor(declared("orin-nx-16gb"), noise=0.01, seed=1)
    nx = loaded("orin-nx-16gb", 3000)
    seen = set()
    for number in range(1, 200):
        small.convert(nx)
        seen.add(small.read(number).watts)
    assert len(seen) > 3


def faulty(kind: FaultKind) -> list[DeviceReading | str]:
    """Twenty readings; the fault is on from the one at 0.5 s to the one at 1.4 s."""
    sensor = SimSensor(declared("orin-nx-16gb"), faults=[Fault(kind, 0.45, 1.45)], seed=2)
    return readings(sensor, loaded("orin-nx-16gb"), 20)


@pytest.mark.parametrize("kind", FAULT_KINDS)
def test_a_fault_lasts_as_long_as_its_script_says(kind: FaultKind) -> None:
    whole = readings(SimSensor(declared("orin-nx-16gb"), seed=2), loaded("orin-nx-16gb"), 20)
    found = faulty(kind)
    assert found[:4] == whole[:4]
    assert found[14:] == whole[14:]
    assert found[4:14] != whole[4:14]


def test_each_fault_is_what_it_says() -> None:
    for reading in faulty("missing")[4:14]:
        assert isinstance(reading, DeviceReading)
        assert (reading.watts, reading.tj_c, dict(reading.rails_w)) == (None, None, {})
        assert {"power", "tj"} <= set(reading.reasons)
    assert all(isinstance(reading, str) and "Errno 5" in reading for reading in faulty("eio")[4:14])
    frozen, stale = faulty("frozen"), faulty("stale")
    before = frozen[3]
    for number, (new, old) in enumerate(zip(frozen[4:14], stale[4:14], strict=True), start=5):
        assert isinstance(new, DeviceReading)
        assert isinstance(before, DeviceReading)
        assert (new.watts, new.rails_w, new.tj_c) == (before.watts, before.rails_w, before.tj_c)
        assert new.t_ns == number * PERIOD_NS
        assert old == stale[3]
    for reading in faulty("minus_256")[4:14]:
        assert isinstance(reading, DeviceReading)
        assert (reading.tj_c, dict(reading.zones_c)) == (-256.0, {"tj": -256.0})
        assert reading.watts is not None
    for reading in faulty("zero")[4:14]:
        assert isinstance(reading, DeviceReading)
        assert reading.watts == 0.0
    spiky, plain = (
        faulty("spike")[4:14],
        readings(SimSensor(declared("orin-nx-16gb"), seed=2), loaded("orin-nx-16gb"), 20)[4:14],
    )
    spikes = [index for index, (one, other) in enumerate(zip(spiky, plain, strict=True)) if one != other]
    assert len(spikes) == 2
    for index in spikes:
        one, other = spiky[index], plain[index]
        assert isinstance(one, DeviceReading)
        assert isinstance(other, DeviceReading)
        assert one.watts == pytest.approx(4 * (other.watts or 0))


@pytest.mark.parametrize(
    ("kind", "power", "temperature"),
    [
        ("missing", False, False),
        ("eio", False, False),
        ("stale", False, False),
        ("zero", False, True),
        ("minus_256", True, False),
        ("frozen", True, True),
        ("spike", True, True),
    ],
)
def test_what_cannot_be_is_no_reading(kind: FaultKind, power: bool, temperature: bool) -> None:
    plant = loaded("orin-nx-16gb")
    sensor = SimSensor(declared("orin-nx-16gb"), faults=[Fault(kind, 0.45, 10)])
    gauge = Gauge(sensor)
    assert gauge.look().power_w is None

    def poll(first: int, last: int) -> None:
        for number in range(first, last):
            sensor.convert(plant)
            gauge.poll(number * PERIOD_NS)

    poll(1, 5)
    good = gauge.look()
    assert good.power_w == pytest.approx(plant.power_w, rel=0.03)
    assert good.tj_c == pytest.approx(plant.tj_c, abs=0.05)
    poll(5, 9)
    bad = gauge.look()
    assert (bad.power_w is not None, bad.tj_c is not None) == (power, temperature)
    assert (bad.power_reason is None, bad.tj_reason is None) == (power, temperature)


def test_power_that_stands_still_for_a_minute_is_no_reading() -> None:
    plant = loaded("orin-nx-16gb")
    sensor = SimSensor(declared("orin-nx-16gb"), faults=[Fault("frozen", 1, 1000)])
    gauge = Gauge(sensor)
    for number in range(1, 700):
        sensor.convert(plant)
        gauge.poll(number * PERIOD_NS)
        if number == 590:
            assert gauge.look().power_w is not None
        if number == 650:
            gauge.look()
    assert gauge.look().power_reason == "frozen"
