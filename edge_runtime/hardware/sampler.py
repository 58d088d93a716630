"""One thread reads the sensors at a fixed rate and keeps cumulative joules."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from edge_runtime.hardware.energy import MAX_GAP_PERIODS, EnergyMeter
from edge_runtime.hardware.protocol import PowerSensor, SensorError, ThermalSensor
from edge_runtime.records.power import Energy, PowerReading, ThermalReading, Unavailable
from edge_runtime.threads import ThreadGroup

log = logging.getLogger(__name__)

STALE_PERIODS = 10.0
"""A temperature older than this many periods is unavailable."""


class Sampler:
    """Reads `power` and `thermal` every `period_s` seconds on its own thread.

    `keep_s`: how far back a span may start. A sensor that fails leaves a hole, never a number; its
    failure is logged once, and once more when it is back.
    """

    def __init__(
        self,
        power: PowerSensor | None,
        thermal: ThermalSensor | None,
        *,
        period_s: float = 0.1,
        keep_s: float = 60.0,
        none_reason: str = "no power sensor",
        on_death: Callable[[str, BaseException], None] | None = None,
    ) -> None:
        self._power = power
        self._thermal = thermal
        self._period_s = period_s
        self._none_reason = none_reason
        self._changed = threading.Condition()
        self._meter: EnergyMeter | None = None
        if power is not None:
            self._meter = EnergyMeter(power.source, power.rails, period_s=period_s, idle_w=power.idle_w, keep_s=keep_s)
        self._temperature: ThermalReading | Unavailable = Unavailable("no temperature sensor")
        self._last_power: PowerReading | None = None
        self._power_error: str | None = None
        self._thermal_error: str | None = None
        self._stop = threading.Event()
        self.tick_ns = time.monotonic_ns()
        self._threads = ThreadGroup(on_death)

    def start(self) -> None:
        if self._power is not None or self._thermal is not None:
            self.sample()
            self._threads.spawn("sampler", self._loop)

    def stop(self, deadline_s: float = 1.0) -> list[str]:
        """End the thread; returns its name where a sensor holds it up."""
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
        return self._threads.join(deadline_s)

    def sample(self) -> None:
        """Read everything once."""
        reading, self._power_error = self._read_power()
        with self._changed:
            if reading is not None and self._meter is not None:
                self._meter.add(reading)
                self._last_power = reading
            self._changed.notify_all()
        if self._thermal is None:
            return
        try:
            self._temperature = self._thermal.read()
        except (SensorError, OSError, ValueError) as error:
            self._temperature = Unavailable(str(error))
            if self._thermal_error is None:
                log.warning("temperature: %s", error)
            self._thermal_error = str(error)
        else:
            if self._thermal_error is not None:
                log.info("temperature: readings are back")
            self._thermal_error = None

    @property
    def supervised(self) -> bool:
        """Whether there is a sensor, and so a thread that has to tick."""
        return self._power is not None or self._thermal is not None

    @property
    def none_reason(self) -> str | None:
        """Why there is no power at all; None where there is a sensor."""
        return self._none_reason if self._power is None else None

    def watts(self) -> float | None:
        """The newest power reading, W; None where there is none or it is stale."""
        newest = self._last_power
        if newest is None or (time.monotonic_ns() - newest.t_ns) / 1e9 > STALE_PERIODS * self._period_s:
            return None
        return newest.watts

    def temperature(self) -> ThermalReading | Unavailable:
        """The newest temperatures, unless they are stale."""
        newest = self._temperature
        if isinstance(newest, ThermalReading):
            age_s = (time.monotonic_ns() - newest.t_ns) / 1e9
            if age_s > STALE_PERIODS * self._period_s:
                return Unavailable(f"the last reading is {age_s:.1f} s old")
        return newest

    def energy(self, start_ns: int, end_ns: int) -> Energy | Unavailable:
        """Energy of a past span. Waits up to three periods for the first reading after its end, to interpolate."""
        if self._meter is None:
            return Unavailable(self._none_reason)
        limit = time.monotonic() + MAX_GAP_PERIODS * self._period_s
        with self._changed:
            while (self._meter.last_ns or 0) < end_ns and not self._stop.is_set():
                left_s = limit - time.monotonic()
                if left_s <= 0:
                    break
                self._changed.wait(left_s)
            energy = self._meter.span(start_ns, end_ns)
        if isinstance(energy, Unavailable) and self._power_error is not None:
            return Unavailable(f"{energy.reason}; {self._power_error}")
        return energy

    def _read_power(self) -> tuple[PowerReading | None, str | None]:
        if self._power is None:
            return None, None
        try:
            reading = self._power.read()
        except (SensorError, OSError, ValueError) as error:
            if self._power_error is None:
                log.warning("power: %s", error)
            return None, str(error)
        if self._power_error is not None:
            log.info("power: readings are back")
        return reading, None

    def _loop(self) -> None:
        due = time.monotonic() + self._period_s
        while not self._stop.wait(max(0.0, due - time.monotonic())):
            self.tick_ns = time.monotonic_ns()
            self.sample()
            # a slow sensor makes a hole; it does not make a burst of readings afterwards
            due = max(due + self._period_s, time.monotonic())
