"""The simulated device in real time: its watts follow the lanes' busy time, its clock slows them down."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.engine.protocol import Engine
from edge_runtime.errors import EngineError
from edge_runtime.hardware.protocol import SensorError
from edge_runtime.hardware.sources import Sensors
from edge_runtime.pipeline.lanes import BusyClock
from edge_runtime.sim.device import AMBIENT_C, SIM_MODE, SimDevice, sim_candidate
from edge_runtime.sim.lane import OtherWork, StretchedEngine
from edge_runtime.sim.module import MODULES, plant_parameters
from edge_runtime.sim.plant import Plant
from edge_runtime.sim.sensors import Fault
from tests.awaiting import wait_until
from tests.fakes import FakeEngine, FakeLane

NX = "orin-nx-16gb"


class Machine:
    """A device whose time and load a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str = NX, **options: object) -> None:
        self.now_ns = 0
        self.busy_ns = 0
        monkeypatch.setattr(time, "monotonic_ns", lambda: self.now_ns)
        self.device = SimDevice(MODULES[name], lambda: self.busy_ns, lambda: 2, noise=0.0, **options)  # type: ignore[arg-type]

    def after(self, seconds: float, utilisation: float) -> float:
        watts = 0.0
        for _ in range(round(seconds / 0.1)):
            self.now_ns += 100_000_000
            self.busy_ns += int(100_000_000 * 2 * utilisation)
            watts = self.device.read().watts or 0.0
        return watts


@pytest.mark.parametrize("name", sorted(MODULES))
def test_power_goes_from_idle_to_busy_with_the_lanes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, name)
    device, plant = machine.device, Plant(MODULES[name], AMBIENT_C)
    assert device.name == "simulated"
    idle_w = machine.after(3, 0)
    quantum_w = device.quantum_w
    assert quantum_w is not None
    step_w = len(device.rails) * quantum_w / 2 + 1e-9
    assert idle_w == pytest.approx(device.idle_w, abs=step_w)
    for utilisation in (0.5, 1.0):
        settled = plant.settled(utilisation, utilisation)
        assert settled is not None
        for _ in range(20):
            watts = machine.after(60, utilisation)
        assert watts == pytest.approx(settled[0], abs=step_w + 0.02)
        reading = device.read()
        assert reading.tj_c == pytest.approx(settled[1], abs=0.2)
        assert reading.mode == SIM_MODE
        assert sum(reading.rails_w[rail] for rail in device.rails) == pytest.approx(reading.watts)


def test_a_capped_clock_slows_down_and_takes_less(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    device = machine.device
    full_w = machine.after(5, 1.0)
    assert device.speed() == 1.0
    device.set_gpu_cap(306e6)
    assert device.speed() == pytest.approx(306 / 612)
    each = MODULES[NX]
    slow_w = machine.after(5, 1.0)
    # frames take twice as long: the GPU is as busy at a slower clock, and the CPU has half as much to do
    saved_w = each.gpu_w * (1 - 0.5**1.7) + each.cpu_w / 2
    assert full_w - slow_w == pytest.approx(saved_w, abs=0.2)
    device.set_gpu_cap(None)
    assert device.speed() == 1.0
    assert device.clocks_hz == MODULES[NX].gpu_steps_hz


def test_cpu_time_counts_where_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_s = [0.0]
    machine = Machine(monkeypatch, cpu_s=lambda: cpu_s[0])
    idle_w = machine.after(3, 0)
    watts = 0.0
    for _ in range(50):
        cpu_s[0] += 0.1 * MODULES[NX].cpu_cores
        watts = machine.after(0.1, 0)
    assert watts - idle_w == pytest.approx(MODULES[NX].cpu_w, abs=0.15)


def test_decoding_costs_also_where_nothing_is_inferred(monkeypatch: pytest.MonkeyPatch) -> None:
    process_s = [5.0]
    other = OtherWork(lambda: process_s[0])
    machine = Machine(monkeypatch, cpu_s=other.cpu_s)
    idle_w = machine.after(3, 0)
    watts = 0.0
    for _ in range(50):
        process_s[0] += 0.1 * MODULES[NX].cpu_cores / 2
        watts = machine.after(0.1, 0)
    assert watts - idle_w == pytest.approx(MODULES[NX].cpu_w / 2, abs=0.15)
    # the same time, and all of it inferring
    for _ in range(50):
        process_s[0] += 0.1 * MODULES[NX].cpu_cores / 2
        other.inferred(0.1 * MODULES[NX].cpu_cores / 2)
        watts = machine.after(0.1, 0)
    assert watts == pytest.approx(idle_w, abs=0.15)
    # however much it is, the module has no more cores
    for _ in range(50):
        process_s[0] += 100.0
        watts = machine.after(0.1, 0)
    assert watts - idle_w == pytest.approx(MODULES[NX].cpu_w, abs=0.3)


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), max_size=50))
def test_other_work_never_falls_and_is_what_is_left(steps: list[tuple[float, bool]]) -> None:
    process_s, inferred_s, longest_s = 0.0, 0.0, 0.0
    other = OtherWork(lambda: process_s)
    last_s = 0.0
    for cpu_s, inferring in steps:
        process_s += cpu_s
        now_s = other.cpu_s()  # in the middle of a run
        if inferring:
            other.inferred(cpu_s)
            inferred_s += cpu_s
            longest_s = max(longest_s, cpu_s)
        assert last_s <= now_s <= other.cpu_s() + 1e-9
        last_s = other.cpu_s()
        assert -1e-9 <= last_s - (process_s - inferred_s) <= longest_s + 1e-9


def test_a_run_says_what_cpu_time_it_took_also_one_that_fails() -> None:
    class Burning(FakeEngine):
        """Its runs take 20 ms of CPU time, and the second one fails."""

        def open_lane(self) -> FakeLane:
            lane, runs = super().open_lane(), [0]
            collect = lane.collect

            def burn() -> Any:
                end_s = time.thread_time() + 0.02
                while time.thread_time() < end_s:
                    pass
                runs[0] += 1
                if runs[0] == 2:
                    raise EngineError("broken", code="engine_run")
                return collect()

            lane.collect = burn  # type: ignore[method-assign]
            return lane

    taken_s: list[float] = []
    engine = StretchedEngine(Burning(), lambda: 0.25, taken_s.append)
    lane, buffer = engine.open_lane(), engine.allocate(1)
    lane.submit(buffer, 1)
    lane.collect()
    lane.submit(buffer, 1)
    with pytest.raises(EngineError):
        lane.collect()
    # what stretches a run is no CPU time
    assert len(taken_s) == 2
    assert all(0.02 <= each < 0.04 for each in taken_s)


def test_a_counter_that_goes_back_and_a_long_sleep_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    machine.after(3, 1.0)
    machine.busy_ns = 0
    assert machine.device.idle_w - 0.1 < machine.after(0.1, 0) < 30
    machine.now_ns += int(1e9 * 3600 * 24 * 30)
    started = time.perf_counter()
    assert machine.device.read().watts == pytest.approx(machine.device.idle_w, abs=0.05)
    assert time.perf_counter() - started < 2


def test_one_that_was_too_hot_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, ambient_c=104.0)
    with pytest.raises(SensorError, match="switched itself off"):
        machine.after(60, 1.0)
    assert 0 < machine.device.speed() <= 1


def test_faults_come_by_the_time_since_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, faults=[Fault("eio", 1.0, 2.0)])
    machine.after(0.9, 0)
    with pytest.raises(SensorError):
        machine.after(0.2, 0)


def test_the_product_reads_it_as_any_other_source() -> None:
    device = SimDevice(MODULES[NX], lambda: 0, lambda: 1)
    sensors = Sensors([sim_candidate(device)])
    sensors.start()
    try:
        sensors.tick()
        wait_until(lambda: len(sensors.power_since(0)) >= 3, what="three readings")
        assert sensors.power_since(0)[0].watts == pytest.approx(device.idle_w, abs=0.1)
    finally:
        sensors.stop(1.0)


# --- stretched lanes


def test_a_run_takes_as_much_longer_as_the_clock_is_slower() -> None:
    for speed in (1.0, 0.5, 0.25):
        inner = FakeEngine(call_cost_s=0.03)
        engine: Engine = StretchedEngine(inner, lambda speed=speed: speed)  # type: ignore[misc]
        lane, buffer = engine.open_lane(), engine.allocate(2)
        busy = BusyClock(1)
        buffer.array[:2] = 7
        busy.start(0, time.monotonic_ns())
        lane.submit(buffer, 2)
        outputs = lane.collect()
        busy.stop(0, time.monotonic_ns())
        assert np.array_equal(outputs["out"], [7, 7])
        busy_s = busy.total_ns(0) / 1e9
        # sleeps come back late, never early
        assert inner.busy_s / speed <= busy_s < inner.busy_s / speed + 0.05
        engine.release(buffer)
        engine.close()
        assert inner.closed
        assert (engine.info, engine.allowed_batches) == (inner.info, inner.allowed_batches)


def test_a_run_under_way_goes_on_at_the_new_clock() -> None:
    speed = [0.001]
    engine = StretchedEngine(FakeEngine(call_cost_s=0.02), lambda: speed[0])
    lane, buffer = engine.open_lane(), engine.allocate(1)
    done = threading.Event()

    def work() -> None:
        lane.submit(buffer, 1)
        lane.collect()
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert not done.wait(0.2)
    speed[0] = 1.0
    assert done.wait(5.0)
    thread.join()


def test_a_frame_at_a_slower_clock_costs_what_physics_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stretched busy time is what the plant sees: half the clock takes twice as long at 0.5^1.7 of the power."""
    each = plant_parameters(NX, "40W")
    joules = {}
    for speed in (1.0, 408e6 / each.gpu_max_hz):
        plant = Plant(each, 25.0)
        plant.cap_hz = speed * each.gpu_max_hz
        assert plant.speed == pytest.approx(speed)
        total = 0.0
        for tick in range(2000):  # one run of 1 s of work at full clock, then nothing
            busy = tick * 0.01 < 1.0 / speed
            plant.step(0.01, 1.0 if busy else 0.0, 0.0)
            total += plant.gpu_w * 0.01
        joules[speed] = total
    slow = 408e6 / each.gpu_max_hz
    assert joules[slow] / joules[1.0] == pytest.approx(slow**0.7, rel=0.01)
    assert joules[1.0] == pytest.approx(each.gpu_w * 1.0, rel=0.01)
