"""The sampler thread: spans end between readings, sensors fail and come back, one that blocks holds up nobody."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import pytest

from edge_runtime.hardware.energy import IdlePower
from edge_runtime.hardware.protocol import SensorError
from edge_runtime.hardware.sampler import HURRIED_S, Sampler
from edge_runtime.hardware.sources import Sensors
from edge_runtime.records.power import Energy, SensorSwitch, ThermalReading, Unavailable
from tests.awaiting import wait_until
from tests.hardware.fake_source import FakeSource


@contextlib.contextmanager
def sampling(
    *sources: FakeSource, idle: IdlePower | None = None, switches: list[SensorSwitch] | None = None
) -> Iterator[Sampler]:
    told = [] if switches is None else switches
    sensors = Sensors([source.candidate() for source in sources], on_switch=told.append)
    sampler = Sampler(sensors, idle=idle, period_s=0.02)
    sampler.start()
    try:
        yield sampler
    finally:
        for source in sources:
            source.gate.set()
        assert sampler.stop(2.0) == []


def span(sampler: Sampler, start_ns: int) -> Energy:
    found = sampler.energy(start_ns, time.monotonic_ns())
    assert isinstance(found, Energy), found
    return found


def test_a_span_that_ends_now_waits_for_the_next_reading() -> None:
    source = FakeSource(period_s=0.1)
    with sampling(source, idle=IdlePower({"15W": 1.0})) as sampler:
        start_ns, seen = time.monotonic_ns(), source.reads
        wait_until(lambda: source.reads > seen + 3)
        end_ns = time.monotonic_ns()
        found = sampler.energy(start_ns, end_ns)
        assert isinstance(found, Energy), found
        assert found.joules == pytest.approx(5.0 * (end_ns - start_ns) / 1e9, rel=1e-6)
        assert found.net_joules == pytest.approx(4.0 * (end_ns - start_ns) / 1e9, rel=1e-6)
        assert found.source == "ina3221"
        assert found.rate_hz == pytest.approx(10, rel=0.5)
        assert sampler.watts() == 5.0
        assert sampler.none_reason is None


def test_a_sensor_that_fails_is_unavailable_with_its_reason_and_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    source = FakeSource()
    switches: list[SensorSwitch] = []
    caplog.set_level("INFO")
    with sampling(source, switches=switches) as sampler:
        assert isinstance(sampler.temperature(), ThermalReading)
        source.error = SensorError("EIO", where="VDD_IN")
        start_ns = time.monotonic_ns()
        found = sampler.energy(start_ns, time.monotonic_ns())
        assert isinstance(found, Unavailable)
        assert "VDD_IN: EIO" in found.reason
        wait_until(lambda: len(switches) == 1)
        assert "VDD_IN: EIO" in str(sampler.temperature())
        assert "VDD_IN: EIO" in str(sampler.none_reason)
        assert sampler.watts() is None
        source.error = None
        wait_until(lambda: len(switches) == 2)
        assert isinstance(sampler.temperature(), ThermalReading)
    assert [(switch.before, switch.after) for switch in switches] == [("ina3221", None), (None, "ina3221")]
    messages = [record.getMessage() for record in caplog.records]
    assert sum("no source for power and temperature any more" in message for message in messages) == 1
    assert sum("sensor ina3221: VDD_IN: EIO" in message for message in messages) == 1


def test_a_window_over_a_switch_has_its_energy_from_both_sources() -> None:
    best, other = FakeSource("ina3221", period_s=0.1), FakeSource("tegrastats", period_s=0.1)
    other.watts = 6.0
    with sampling(best, other) as sampler:
        start_ns, seen = time.monotonic_ns(), best.reads
        wait_until(lambda: best.reads > seen + 3)
        best.error = SensorError("EIO")
        wait_until(lambda: other.reads > 5)
        # not lost yet: the span waits until the other one has taken over
        found = span(sampler, start_ns)
        assert found.source == "ina3221+tegrastats"
        assert found.peak_w == 6.0
        assert 5.0 < found.mean_w < 6.0


def test_a_sensor_that_blocks_holds_up_neither_the_thread_nor_a_span_that_is_in_a_hurry() -> None:
    source = FakeSource()
    with sampling(source) as sampler:
        source.gate.clear()
        wait_until(lambda: source.blocked)
        ticked_ns = sampler.tick_ns
        sampler.hurry()
        start_ns = time.monotonic_ns()
        found = sampler.energy(start_ns - 10_000_000, start_ns)
        assert isinstance(found, Unavailable)
        assert time.monotonic_ns() - start_ns < (HURRIED_S + 0.3) * 1e9
        assert sampler.tick_ns > ticked_ns
        assert sampler.stop(0.3) == ["sensor-ina3221"]


def test_idle_power_is_learned_from_a_span_in_its_mode() -> None:
    source = FakeSource(period_s=0.1)
    with sampling(source) as sampler:
        start_ns, seen = time.monotonic_ns(), source.reads
        wait_until(lambda: source.reads > seen + 3)
        assert span(sampler, start_ns).net_joules is None
        assert sampler.learn_idle(start_ns, time.monotonic_ns()) == pytest.approx(5.0)
        source.watts = 7.0
        start_ns, seen = time.monotonic_ns(), source.reads
        wait_until(lambda: source.reads > seen + 3)
        found = span(sampler, start_ns)
        assert found.idle_w == pytest.approx(5.0)
        assert found.net_joules == pytest.approx(2.0 * found.joules / found.mean_w, rel=0.2)
        source.mode = None
        seen = source.reads
        wait_until(lambda: source.reads > seen + 2)
        start_ns, seen = time.monotonic_ns(), source.reads
        wait_until(lambda: source.reads > seen + 3)
        assert sampler.learn_idle(start_ns, time.monotonic_ns()) is None


def test_the_governor_gets_every_reading_once_and_knows_how_often_to_expect_one() -> None:
    source = FakeSource(period_s=0.05)
    with sampling(source) as sampler:
        seen: list[tuple[int, float]] = []

        def look() -> int:
            seen.extend(sampler.readings_since(seen[-1][0] if seen else 0))
            return len(seen)

        wait_until(lambda: look() > 5)
        times = [t_ns for t_ns, _ in seen]
        assert times == sorted(set(times))
        assert {watts for _, watts in seen} == {5.0}
        origin = sampler.power_origin()
        assert origin is not None
        assert (origin.source, origin.period_s) == ("ina3221", 0.05)
        source.error = SensorError("EIO")
        wait_until(lambda: sampler.power_origin() is None)
        assert sampler.readings_since(0) == []


def test_without_a_sensor_the_reason_is_said() -> None:
    sampler = Sampler(Unavailable("nothing here"))
    sampler.start()
    assert not sampler.supervised
    assert sampler.energy(0, 1) == Unavailable("nothing here")
    assert sampler.temperature() == Unavailable("nothing here")
    assert (sampler.watts(), sampler.none_reason) == (None, "nothing here")
    assert sampler.seconds_above(0, 1, 1.0) == Unavailable("nothing here")
    assert (sampler.readings_since(0), sampler.power_origin()) == ([], None)
    assert sampler.stop() == []
