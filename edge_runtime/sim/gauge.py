"""What a program can know of a simulated device's power and temperature: its readings, checked as ours are."""

from __future__ import annotations

from dataclasses import dataclass

from edge_runtime.hardware.feed import FROZEN_S, sane
from edge_runtime.hardware.protocol import SensorError
from edge_runtime.records.power import DeviceReading
from edge_runtime.sim.sensors import SimSensor


@dataclass(frozen=True, slots=True)
class Gauged:
    """Since the look before: mean power (W) and the newest Tj (degC), each None with its reason where none was good.

    `newest`: the last reading there was, good or not; None: there never was one.
    """

    power_w: float | None
    power_reason: str | None
    tj_c: float | None
    tj_reason: str | None
    newest: DeviceReading | None


class Gauge:
    """Reads `sensor` once a period, and gathers until somebody looks."""

    def __init__(self, sensor: SimSensor) -> None:
        self._sensor = sensor
        self._newest: DeviceReading | None = None
        self._last_ns = -1
        self._rails_since_ns = 0
        self._watts = 0.0
        self._count = 0
        self._tj_c: float | None = None
        self._power_reason: str | None = "no reading yet"
        self._tj_reason: str | None = "no reading yet"

    def poll(self, t_ns: int) -> None:
        """One reading, whatever comes of it."""
        try:
            reading = sane(self._sensor.read(t_ns))
        except SensorError as error:
            self._power_reason = self._tj_reason = error.message
            return
        if reading.t_ns <= self._last_ns:
            self._power_reason = self._tj_reason = "it repeats an old reading"
            return
        self._last_ns = reading.t_ns
        if self._newest is None or reading.rails_w != self._newest.rails_w:
            self._rails_since_ns = t_ns
        self._newest = reading
        if reading.watts is None:
            self._power_reason = reading.reasons.get("power", "it gives no power")
        elif (t_ns - self._rails_since_ns) / 1e9 >= FROZEN_S:
            self._power_reason = "frozen"
        else:
            self._watts += reading.watts
            self._count += 1
        if reading.tj_c is None:
            self._tj_reason = reading.reasons.get("tj", "it gives no temperature")
        else:
            self._tj_c = reading.tj_c

    def look(self) -> Gauged:
        """What was gathered since the last look."""
        power_w = self._watts / self._count if self._count else None
        tj_c = self._tj_c
        found = Gauged(
            power_w,
            None if power_w is not None else self._power_reason,
            tj_c,
            None if tj_c is not None else self._tj_reason,
            self._newest,
        )
        self._watts, self._count, self._tj_c = 0.0, 0, None
        return found
