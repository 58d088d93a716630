"""One thread takes what the sensors have read, chooses between them and keeps cumulative joules."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from edge_runtime.hardware.energy import EnergyMeter, IdlePower, Origin
from edge_runtime.hardware.sources import Sensors
from edge_runtime.records.power import DeviceReading, Energy, Exceeded, ThermalReading, Unavailable
from edge_runtime.threads import ThreadGroup

HURRIED_S = 0.5
"""The most that a span waits for the reading after its end once the end is near."""


class Sampler:
    """Looks at `sensors` every `period_s` seconds on its own thread, which never waits for a sensor.

    `sensors` may be the reason why there are none. `idle`: what net energy is net of. `keep_s`: how far back a span
    may start. A sensor that fails leaves a hole, never a number.
    """

    def __init__(
        self,
        sensors: Sensors | Unavailable,
        *,
        idle: IdlePower | None = None,
        period_s: float = 0.1,
        keep_s: float = 60.0,
        on_death: Callable[[str, BaseException], None] | None = None,
    ) -> None:
        self._sensors = sensors
        self._idle = idle or IdlePower()
        self._period_s = period_s
        self._changed = threading.Condition()
        self._meter = EnergyMeter(self._idle, keep_s=keep_s)
        self._hurried = False
        self._stop = threading.Event()
        self.tick_ns = time.monotonic_ns()
        self._threads = ThreadGroup(on_death)

    def start(self) -> None:
        if isinstance(sensors := self._sensors, Sensors):
            sensors.start()
            self._sample(sensors)
            self._threads.spawn("sampler", lambda: self._loop(sensors))

    def hurry(self) -> None:
        """The end is near: spans wait half a second at most for the reading after their end."""
        with self._changed:
            self._hurried = True
            self._changed.notify_all()

    def stop(self, deadline_s: float = 1.0) -> list[str]:
        """End all threads; the names of those that a sensor holds up."""
        end = time.monotonic() + deadline_s
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
        stuck = self._threads.join(deadline_s)
        if isinstance(self._sensors, Sensors):
            stuck += self._sensors.stop(max(0.0, end - time.monotonic()))
        return stuck

    @property
    def supervised(self) -> bool:
        """Whether there are sensors to look for, and so a thread that has to tick."""
        return isinstance(self._sensors, Sensors)

    @property
    def none_reason(self) -> str | None:
        """Why there is no power now; None where there is."""
        power = self._power()
        return power.reason if isinstance(power, Unavailable) else None

    def watts(self) -> float | None:
        """The newest power reading, W; None where there is none or it is stale."""
        power = self._power()
        return None if isinstance(power, Unavailable) else power.watts

    def temperature(self) -> ThermalReading | Unavailable:
        """The newest temperatures, unless they are stale."""
        return self._sensors if isinstance(self._sensors, Unavailable) else self._sensors.temperature()

    def energy(self, start_ns: int, end_ns: int) -> Energy | Unavailable:
        """Energy of a past span. Waits for the first reading after its end, to interpolate, as long as one may come."""
        if isinstance(self._sensors, Unavailable):
            return self._sensors
        start_s = time.monotonic()
        with self._changed:
            while (self._meter.last_ns or 0) < end_ns and not self._stop.is_set():
                patience_s = self._sensors.patience_s()
                limit_s = min(patience_s, HURRIED_S) if self._hurried else patience_s
                left_s = start_s + limit_s - time.monotonic()
                if left_s <= 0:
                    break
                self._changed.wait(left_s)
            energy = self._meter.span(start_ns, end_ns)
        if isinstance(energy, Unavailable) and (now := self.none_reason) is not None:
            return Unavailable(f"{energy.reason}; {now}")
        return energy

    def seconds_above(self, start_ns: int, end_ns: int, watts: float) -> Exceeded | Unavailable:
        """For how long the mean power of a second was above `watts` in a past span, by the readings that are there."""
        if isinstance(self._sensors, Unavailable):
            return self._sensors
        with self._changed:
            return self._meter.seconds_above(start_ns, end_ns, watts)

    def readings_since(self, t_ns: int) -> list[tuple[int, float]]:
        """Power readings after a monotonic time, oldest first: when and how many W. At most the newest 64, and none
        where power comes from no source now."""
        if isinstance(self._sensors, Unavailable):
            return []
        return [(sample.t_ns, sample.watts) for sample in self._sensors.power_since(t_ns)]

    def power_origin(self) -> Origin | None:
        """What power comes from now, how often a reading is due and its step; None where it comes from nowhere."""
        return None if isinstance(self._sensors, Unavailable) else self._sensors.power_origin()

    def learn_idle(self, start_ns: int, end_ns: int) -> float | None:
        """Take the mean power of a past span in which nothing ran as the idle power of the present power mode, W.

        None, and nothing learned, where the energy or the mode of the span is not known.
        """
        energy = self.energy(start_ns, end_ns)
        if isinstance(energy, Unavailable) or energy.mode is None:
            return None
        self._idle.learn(energy.mode, energy.mean_w)
        return energy.mean_w

    def _power(self) -> DeviceReading | Unavailable:
        return self._sensors if isinstance(self._sensors, Unavailable) else self._sensors.power()

    def _sample(self, sensors: Sensors) -> None:
        """Choose anew and take every new reading, also those that came since the last time."""
        sensors.tick()
        with self._changed:
            for sample in sensors.power_since(self._meter.last_ns or 0):
                self._meter.add(sample)
            self._changed.notify_all()

    def _loop(self, sensors: Sensors) -> None:
        due = time.monotonic() + self._period_s
        while not self._stop.wait(max(0.0, due - time.monotonic())):
            self.tick_ns = time.monotonic_ns()
            self._sample(sensors)
            due = max(due + self._period_s, time.monotonic())
