"""One sensor source on a thread of its own: what it read last, and how it has been doing."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from edge_runtime.errors import EdgeError
from edge_runtime.hardware.choice import Standing, Track
from edge_runtime.hardware.energy import Origin, Sample
from edge_runtime.hardware.protocol import SensorSource
from edge_runtime.hardware.sysfs_thermal import MAX_C, MIN_C
from edge_runtime.records.power import DeviceReading

log = logging.getLogger(__name__)

Quantity = Literal["power", "temperature"]
QUANTITIES: tuple[Quantity, ...] = ("power", "temperature")

MAX_W = 300.0
"""More than any Jetson module takes: a Thor is allowed 130 W."""

FROZEN_S = 60.0
"""Exactly the same watts on every rail for this long are no measurement any more, even of an idle module: one step of
one channel is 8 or 20 mA. Sources that see raw values may know sooner."""

KEPT_READINGS = 64
"""So many readings a feed keeps: enough to fill the time in which another source turned out to be lost."""

RETRY_UNKNOWN_S, RETRY_KNOWN_S = 60.0, 5.0
"""The longest pause between tries of a source that never gave anything, and of one that once did."""

LOG_AGAIN_NS = 60_000_000_000


@dataclass(frozen=True, slots=True)
class Candidate:
    """A source that may be there. `make` opens it, on the feed's thread; raises SensorError or OSError.

    `steady`: its power may stay exactly the same for as long as it likes, as a simulated one's does.
    """

    name: str
    make: Callable[[], SensorSource]
    steady: bool = False


class Feed:
    """Reads a source at its own rate on the thread "sensor-NAME", while it is wanted.

    A source that blocks or raises, whatever it raises, is bad for this feed and nobody else.
    """

    def __init__(self, candidate: Candidate) -> None:
        self.name = candidate.name
        self._make = candidate.make
        self._still: _Still | None = None if candidate.steady else _Still()
        self._changed = threading.Condition()
        self._wanted = self._ending = False
        self._period_s = 1.0
        self._source: SensorSource | None = None
        self._samples: deque[Sample] = deque(maxlen=KEPT_READINGS)
        self._tracks: dict[Quantity, Track] = {}
        self._newest: dict[Quantity, DeviceReading] = {}
        self._last_ns = 0
        self._over_current: Counter[str] = Counter()
        self._failing_since_ns: int | None = None
        self._ever_good = False
        self._next_log_ns = 0
        self.origin: Origin | None = None
        self.outcomes = 0

    def run(self) -> None:
        """The thread's work, until `end`."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted or self._ending)
                if self._ending:
                    return
            self._serve()

    def want(self, wanted: bool) -> None:
        """Whether to be read from now on. A source that is not wanted is closed."""
        with self._changed:
            if wanted == self._wanted:
                return
            self._wanted = wanted
            if wanted:
                self._begin()
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._ending = True
            self._changed.notify_all()

    def close_source(self) -> None:
        """Close the source under a read that blocks."""
        if (source := self._source) is not None:
            source.close()

    def wait_outcome(self, timeout_s: float) -> bool:
        """Until the first reading or failure; False when the time is up first."""
        with self._changed:
            return self._changed.wait_for(lambda: self.outcomes > 0, timeout_s)

    def standing(self, quantity: Quantity, now_ns: int) -> Standing:
        with self._changed:
            if not self._wanted:
                return Standing("not read: there is no need of it", 0.0, True)
            return self._tracks[quantity].standing(now_ns)

    def newest(self, quantity: Quantity) -> DeviceReading | None:
        """The newest reading that has this; None where there never was one. It may be old: see `standing`."""
        with self._changed:
            return self._newest.get(quantity)

    def power_since(self, t_ns: int) -> list[Sample]:
        """The readings of power after a time, oldest first."""
        with self._changed:
            return [sample for sample in self._samples if sample.t_ns > t_ns]

    def period_s(self) -> float:
        """How often a reading is due, s."""
        return self._period_s

    def over_current(self) -> Mapping[str, int]:
        """How often each over-current input has triggered since this source was first read."""
        with self._changed:
            return dict(self._over_current)

    # --- the thread's

    def _serve(self) -> None:
        try:
            source = self._make()
        except Exception as error:  # noqa: BLE001 - told by _failed
            self._failed(error)
            self._pause(max(1.0, self._retry_s()))
            return
        self._source = source
        try:
            with self._changed:
                self._period_s = source.period_s
                if self._ending or not self._wanted:  # nobody could close it while it was being made
                    return
                self._begin()
            due = time.monotonic()
            while self._read(source):
                # a slow source makes a hole; it does not make a burst of readings afterwards
                due = max(due + max(source.period_s, self._retry_s()), time.monotonic())
                if self._pause(due - time.monotonic()):
                    break
        finally:
            self._source = None
            self._close(source)

    def _read(self, source: SensorSource) -> bool:
        """One reading; False where this feed is to end or to rest."""
        try:
            reading = sane(source.read())
            origin = Origin(self.name, source.rails, source.period_s, source.quantum_w)
        except Exception as error:  # noqa: BLE001 - told by _failed
            return not self._failed(error)
        if self._still is not None:
            reading = self._still.checked(reading)
        with self._changed:
            self.outcomes += 1
            if reading.t_ns <= self._last_ns:
                for track in self._tracks.values():
                    track.bad(time.monotonic_ns(), "it repeats an old reading")
            else:
                self._last_ns = reading.t_ns
                self._take(reading, origin)
            self._changed.notify_all()
            return self._wanted and not self._ending

    def _take(self, reading: DeviceReading, origin: Origin) -> None:
        self.origin = origin
        if origin.period_s != self._period_s:  # jtop's service may keep to a rate of its own
            self._period_s = origin.period_s
            for track in self._tracks.values():
                track.period_s = origin.period_s
        if reading.watts is not None:
            self._samples.append(Sample(reading.t_ns, reading.watts, origin, reading.mode))
        self._over_current.update(reading.over_current)
        values: dict[Quantity, tuple[float | None, str]] = {
            "power": (reading.watts, reading.reasons.get("power", "it gives no power")),
            "temperature": (reading.tj_c, reading.reasons.get("tj", "it gives no temperature")),
        }
        for quantity, (value, reason) in values.items():
            if value is None:
                self._tracks[quantity].bad(reading.t_ns, reason)
            else:
                self._tracks[quantity].good(reading.t_ns)
                self._newest[quantity] = reading
                self._ever_good = True
                self._failing_since_ns = None

    def _failed(self, error: Exception) -> bool:
        """Note a failure; True where this feed is to end or to rest, and so it was no wonder."""
        now_ns = time.monotonic_ns()
        text = (str(error) or type(error).__name__).removeprefix(f"{self.name}: ")
        with self._changed:
            if self._ending or not self._wanted:
                return True
            self.outcomes += 1
            if self._failing_since_ns is None:
                self._failing_since_ns = now_ns
                if now_ns >= self._next_log_ns:  # one that fails every third time would fill the log
                    self._next_log_ns = now_ns + LOG_AGAIN_NS
                    log.info("sensor %s: %s", self.name, text, exc_info=not isinstance(error, (EdgeError, OSError)))
            for track in self._tracks.values():
                track.bad(now_ns, text)
            self._changed.notify_all()
            return False

    def _begin(self) -> None:
        now_ns = time.monotonic_ns()
        self._tracks = {
            quantity: Track(self._period_s, now_ns, needs_rate=quantity == "power") for quantity in QUANTITIES
        }

    def _retry_s(self) -> float:
        """Pause after a failure: a tenth of the time that it has been failing."""
        if self._failing_since_ns is None:
            return 0.0
        failing_s = (time.monotonic_ns() - self._failing_since_ns) / 1e9
        return min(RETRY_KNOWN_S if self._ever_good else RETRY_UNKNOWN_S, failing_s / 10)

    def _pause(self, duration_s: float) -> bool:
        """True where this feed is to end or to rest."""
        with self._changed:
            return self._changed.wait_for(lambda: self._ending or not self._wanted, max(0.0, duration_s))

    def _close(self, source: SensorSource) -> None:
        try:
            source.close()
        except Exception:
            log.exception("sensor %s did not close as it should", self.name)


class _Still:
    """Notices power that does not move any more."""

    def __init__(self) -> None:
        self._rails_w: Mapping[str, float] = {}
        self._since_ns = 0

    def checked(self, reading: DeviceReading) -> DeviceReading:
        """The reading, without its watts where they have been the same for too long."""
        if reading.watts is None:
            return reading
        if reading.rails_w != self._rails_w:
            self._rails_w, self._since_ns = reading.rails_w, reading.t_ns
        still_s = (reading.t_ns - self._since_ns) / 1e9
        if still_s < FROZEN_S:
            return reading
        reason = f"frozen: every rail has read exactly the same for {still_s:.0f} s"
        return dataclasses.replace(reading, watts=None, reasons={**reading.reasons, "power": reason})


def sane(reading: DeviceReading) -> DeviceReading:
    """The reading without a power or a junction temperature that cannot be, each with its reason."""
    reasons = dict(reading.reasons)
    watts, tj_c = reading.watts, reading.tj_c
    if watts is not None and not 0.0 < watts <= MAX_W:  # NaN is not, either
        reasons["power"] = f"{watts:g} W cannot be"
        watts = None
    if tj_c is not None and not MIN_C <= tj_c <= MAX_C:
        reasons["tj"] = f"{tj_c:g} degC cannot be"
        tj_c = None
    if reasons == reading.reasons:
        return reading
    return dataclasses.replace(reading, watts=watts, tj_c=tj_c, reasons=reasons)
