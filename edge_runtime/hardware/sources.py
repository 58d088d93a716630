"""The device's sensor sources in the order of preference, and which of them is used for what now.

A source is read only while it is needed: the best one always, the next ones while those before them are in doubt.
Reading all of them all the time would cost power and add nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_runtime.hardware.choice import LATE_S, Change, Choice, stale_s
from edge_runtime.hardware.energy import Origin, Sample
from edge_runtime.hardware.feed import QUANTITIES, Candidate, Feed, Quantity
from edge_runtime.hardware.modules import Module, Unknown, identify
from edge_runtime.hardware.protocol import SensorSource
from edge_runtime.records.power import DeviceReading, SensorSwitch, ThermalReading, Unavailable
from edge_runtime.threads import ThreadGroup

log = logging.getLogger(__name__)

_ROOT = Path("/")

FIRST_READING_S = 0.5
"""So long a start waits for the best source's first reading, so that the first window has one at its start."""


@dataclass(frozen=True, slots=True)
class SourceState:
    """A source: what it is used for, why it cannot be used for something (None: it can), what it read last.

    `origin`: None before the first reading.
    """

    name: str
    used_for: tuple[Quantity, ...]
    reasons: Mapping[Quantity, str | None]
    readings: Mapping[Quantity, DeviceReading | None]
    origin: Origin | None


class Sensors:
    """Watts and degrees from the best source that has them; the two may come from different ones.

    `on_switch` is told of every change of source after the first choice, on the thread that calls `tick`.
    `read_all`: whether to read all sources all the time, needed or not.

    `tick` wants calling several times a second; everything else may be called from any thread and never blocks on
    a sensor.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        *,
        read_all: bool = False,
        on_switch: Callable[[SensorSwitch], None] | None = None,
        on_death: Callable[[str, BaseException], None] | None = None,
    ) -> None:
        self._feeds = [Feed(candidate) for candidate in candidates]
        names = [feed.name for feed in self._feeds]
        self._choices: dict[Quantity, Choice] = {quantity: Choice(names) for quantity in QUANTITIES}
        self._read_all = read_all
        self._ever: set[Quantity] = set()
        self._on_switch = on_switch
        self._threads = ThreadGroup(on_death)

    def start(self, wait_s: float = FIRST_READING_S) -> None:
        """Begin with the best source; waits a moment for its first reading, or failure."""
        for feed in self._feeds:
            self._threads.spawn(f"sensor-{feed.name}", feed.run)
        first = self._feeds if self._read_all else self._feeds[:1]
        for feed in first:
            feed.want(True)
        end = time.monotonic() + wait_s
        for feed in first:
            feed.wait_outcome(max(0.0, end - time.monotonic()))

    def stop(self, deadline_s: float = 1.0) -> list[str]:
        """End all threads; the names of those that a sensor holds up. Idempotent."""
        end = time.monotonic() + deadline_s
        for feed in self._feeds:
            feed.end()
        if not self._threads.join(deadline_s / 3):
            return []
        for feed in self._feeds:
            # on a thread: whoever is stuck in a read may be stuck in a close too
            self._threads.spawn(f"close-{feed.name}", feed.close_source)
        return self._threads.join(max(0.0, end - time.monotonic()))

    def tick(self) -> None:
        """Choose anew by how the sources have been doing, and have those read that are needed."""
        now_ns = time.monotonic_ns()
        standings = {q: [feed.standing(q, now_ns) for feed in self._feeds] for q in QUANTITIES}
        changes: dict[Change, list[Quantity]] = {}
        for quantity, choice in self._choices.items():
            if (change := choice.decide(now_ns, standings[quantity])) is not None:
                changes.setdefault(change, []).append(quantity)
        used = {choice.chosen for choice in self._choices.values()}
        missing = set(QUANTITIES)
        for index, feed in enumerate(self._feeds):
            feed.want(self._read_all or bool(missing) or index in used)
            missing = {quantity for quantity in missing if standings[quantity][index].doubt}
        for change, quantities in changes.items():
            self._tell(change, quantities)

    def power(self) -> DeviceReading | Unavailable:
        """The newest reading of the source that gives power; its `watts` is there."""
        found = self._newest("power")
        return found if isinstance(found, Unavailable) else found[1]

    def power_since(self, t_ns: int) -> list[Sample]:
        """The readings of power after a time, oldest first, by the source that gives power now.

        After a switch that is also what this one read while the other one was not known to be lost yet.
        """
        index = self._choices["power"].chosen
        return [] if index is None else self._feeds[index].power_since(t_ns)

    def power_origin(self) -> Origin | None:
        """What the source that gives power now is; None where none does."""
        index = self._choices["power"].chosen
        return None if index is None else self._feeds[index].origin

    def patience_s(self) -> float:
        """How long a reading of power may take to come from now on: until the source is lost and another is taken.

        0 where no source gives power.
        """
        index = self._choices["power"].chosen
        return 0.0 if index is None else stale_s(self._feeds[index].period_s()) + LATE_S

    def temperature(self) -> ThermalReading | Unavailable:
        """The newest temperatures."""
        found = self._newest("temperature")
        if isinstance(found, Unavailable):
            return found
        feed, reading = found
        assert reading.tj_c is not None
        about = ("tj", "zone ", "throttling", "over_current")
        return ThermalReading(
            t_ns=reading.t_ns,
            tj_c=reading.tj_c,
            zones_c=reading.zones_c,
            source=feed.name,
            throttling=reading.throttling,
            over_current=feed.over_current(),
            reasons={what: reason for what, reason in reading.reasons.items() if what.startswith(about)},
        )

    def states(self) -> list[SourceState]:
        """Every source as it is now, in the order of preference."""
        now_ns = time.monotonic_ns()
        return [
            SourceState(
                name=feed.name,
                used_for=tuple(quantity for quantity in QUANTITIES if self._choices[quantity].chosen == index),
                reasons={quantity: feed.standing(quantity, now_ns).reason for quantity in QUANTITIES},
                readings={quantity: feed.newest(quantity) for quantity in QUANTITIES},
                origin=feed.origin,
            )
            for index, feed in enumerate(self._feeds)
        ]

    def _newest(self, quantity: Quantity) -> tuple[Feed, DeviceReading] | Unavailable:
        now_ns = time.monotonic_ns()
        index = self._choices[quantity].chosen
        feeds = self._feeds if index is None else [self._feeds[index]]
        reasons = []
        for feed in feeds:
            reason = feed.standing(quantity, now_ns).reason
            reading = feed.newest(quantity)
            if index is not None and reason is None and reading is not None:
                return feed, reading
            reasons.append(f"{feed.name}: {reason or 'good again, but not for long enough yet'}")
        return Unavailable("; ".join(reasons))

    def _tell(self, change: Change, quantities: Sequence[Quantity]) -> None:
        before, after = (None if index is None else self._feeds[index].name for index in (change.before, change.after))
        switch = SensorSwitch(" and ".join(quantities), before, after, change.reason)
        log.log(logging.INFO if before is None else logging.WARNING, "sensors: %s", switch)
        first = not self._ever.issuperset(quantities)
        self._ever.update(quantities)
        if self._on_switch is not None and not first:
            self._on_switch(switch)


def candidates(root: Path) -> list[Candidate]:
    """The sources of a Jetson whose files lie below `root`, the best first: the kernel's own files cost least and
    tell most; jtop gives the same through a service; tegrastats through a program."""
    module = identify(root)
    return [
        Candidate("ina3221", lambda: _sysfs(root)),
        Candidate("jtop", lambda: _jtop(module)),
        Candidate("tegrastats", lambda: _tegrastats(module)),
    ]


# Each is imported when it is opened: most devices need one of them, and a start without a Jetson none.


def _sysfs(root: Path) -> SensorSource:
    from edge_runtime.hardware.sysfs import SysfsSource

    return SysfsSource(root)


def _jtop(module: Module | Unknown) -> SensorSource:
    from edge_runtime.hardware.jtop import JtopSource

    return JtopSource(module)


def _tegrastats(module: Module | Unknown) -> SensorSource:
    from edge_runtime.hardware.tegrastats import TegrastatsSource

    return TegrastatsSource(module)


def make_sensors(
    hardware: str,
    root: Path = _ROOT,
    *,
    on_switch: Callable[[SensorSwitch], None] | None = None,
    on_death: Callable[[str, BaseException], None] | None = None,
) -> Sensors | Unavailable:
    """The sensors for `hardware`: "auto", "jetson" or "none"; or why there are none, in one sentence.

    "auto" has them on a module that is known. "jetson" has them anywhere: sources that are not there are tried
    again, at last once a minute.
    """
    if hardware == "none":
        return Unavailable('hardware = "none"')
    if hardware == "auto" and isinstance(module := identify(root), Unknown):
        return Unavailable(f"no sensors: {module.reason}")
    return Sensors(candidates(root), on_switch=on_switch, on_death=on_death)
