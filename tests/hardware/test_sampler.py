"""The sampler thread: spans end between readings, sensors fail and come back, one that blocks holds up nobody."""

from __future__ import annotations

import threading
import time

import pytest

from edge_runtime.hardware.protocol import SensorError
from edge_runtime.hardware.sampler import Sampler
from edge_runtime.records.power import Energy, PowerReading, ThermalReading, Unavailable
from tests.awaiting import wait_until


class FakePower:
    source = "fake"
    rails = ("VDD_IN",)
    idle_w: float | None = 1.0

    def __init__(self) -> None:
        self.broken = False
        self.blocked = threading.Event()
        self.blocked.set()
        self.reads = 0

    def read(self) -> PowerReading:
        self.blocked.wait()
        self.reads += 1
        if self.broken:
            raise SensorError("EIO", where="VDD_IN")
        return PowerReading(time.monotonic_ns(), 5.0, {"VDD_IN": 5.0})


class FakeThermal:
    def __init__(self) -> None:
        self.broken = False

    def read(self) -> ThermalReading:
        if self.broken:
            raise SensorError("EAGAIN", where="tj-thermal")
        return ThermalReading(time.monotonic_ns(), 50.0, {"tj": 50.0})


def test_a_span_that_ends_now_waits_for_the_next_reading() -> None:
    sampler = Sampler(FakePower(), None, period_s=0.02)
    sampler.start()
    try:
        start_ns = time.monotonic_ns()
        time.sleep(0.1)
        end_ns = time.monotonic_ns()
        span = sampler.energy(start_ns, end_ns)
        assert isinstance(span, Energy), span
        assert span.joules == pytest.approx(5.0 * (end_ns - start_ns) / 1e9, rel=1e-6)
        assert span.net_joules == pytest.approx(4.0 * (end_ns - start_ns) / 1e9, rel=1e-6)
    finally:
        assert sampler.stop() == []


def test_a_failing_sensor_is_unavailable_with_its_reason_logged_once_and_comes_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    power, thermal = FakePower(), FakeThermal()
    caplog.set_level("INFO")
    sampler = Sampler(power, thermal, period_s=0.01)
    sampler.start()
    try:
        assert isinstance(sampler.temperature(), ThermalReading)
        power.broken = thermal.broken = True
        start_ns, seen = time.monotonic_ns(), power.reads
        wait_until(lambda: power.reads > seen + 5)
        span = sampler.energy(start_ns, time.monotonic_ns())
        assert isinstance(span, Unavailable)
        assert "EIO" in span.reason
        temperature = sampler.temperature()
        assert isinstance(temperature, Unavailable)
        assert "EAGAIN" in temperature.reason
        power.broken = thermal.broken = False
        wait_until(lambda: isinstance(sampler.temperature(), ThermalReading))
        seen = power.reads
        wait_until(lambda: power.reads > seen + 1)
    finally:
        sampler.stop()
    messages = [record.getMessage() for record in caplog.records]
    assert sum("EIO" in message for message in messages) == 1
    assert sum("power: readings are back" in message for message in messages) == 1
    assert sum("temperature: readings are back" in message for message in messages) == 1


def test_a_sensor_that_blocks_holds_up_neither_a_span_nor_the_stop() -> None:
    power = FakePower()
    sampler = Sampler(power, None, period_s=0.02)
    sampler.start()
    power.blocked.clear()
    start_ns = time.monotonic_ns()
    span = sampler.energy(start_ns, start_ns + 10_000_000)
    assert isinstance(span, Unavailable)
    assert time.monotonic_ns() - start_ns < 1_000_000_000
    assert sampler.stop(0.05) == ["sampler"]
    power.blocked.set()
    assert sampler.stop(2.0) == []


def test_without_a_sensor_the_reason_is_said() -> None:
    sampler = Sampler(None, None, none_reason="nothing here")
    sampler.start()
    assert sampler.energy(0, 1) == Unavailable("nothing here")
    assert isinstance(sampler.temperature(), Unavailable)
    assert sampler.stop() == []


def test_a_temperature_that_stays_is_stale() -> None:
    class Frozen:
        def read(self) -> ThermalReading:
            return ThermalReading(time.monotonic_ns() - 5_000_000_000, 50.0, {})

    sampler = Sampler(None, Frozen(), period_s=0.1)
    sampler.sample()
    temperature = sampler.temperature()
    assert isinstance(temperature, Unavailable)
    assert "5.0 s old" in temperature.reason
