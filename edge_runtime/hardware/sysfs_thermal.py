"""Thermal zones, trip points and cooling devices below /sys/class/thermal.

Temperatures are millidegrees. A gated or disconnected sensor answers EAGAIN or reads -256 degC: it is unavailable.
Whether the hardware slows itself down is told by two things that the kernel really shows:

- a cooling device that slows a processor (cpufreq-*, devfreq-*, *-balanced, *-throttle-alert) has a state above 0;
  a fan and `hot-surface-alert` (Orin: from 70 degC on, a warning only) slow nothing;
- a junction zone has reached a `passive` or `hot` trip point. Where a zone shows which cooling devices its trips
  are bound to, a passive one counts only with one of those above: Orin's at 70 degC has the surface alert alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from edge_runtime.hardware.sysfs_files import SysfsFile, UnreadableError, folders, read_number, read_text

MIN_C = -40.0
MAX_C = 150.0
_LIMIT = 10**9  # millidegrees: of any number at all

JUNCTION = re.compile(r"tj|(cpu|gpu|soc|cv|mcpu|bcpu|aux|ao|pll)\d*")
"""On the die. Not tboard, tdiode (the board) or pmic (a constant)."""
_THROTTLES = re.compile(r"cpufreq|devfreq|balanced|throttle")
_SUFFIX = re.compile(r"[-_](thermal|therm|tegra|die)$")


@dataclass(frozen=True, slots=True)
class Trip:
    """A trip point: `kind` passive, hot, critical or active; `slows` whether reaching it means throttling."""

    kind: str
    temp_c: float
    slows: bool


@dataclass(frozen=True, slots=True)
class Zone:
    """A thermal zone by its name without `-thermal`, in lower case; `junction`: whether it is on the die."""

    name: str
    junction: bool
    temp: SysfsFile
    trips: tuple[Trip, ...]


@dataclass(frozen=True, slots=True)
class Cooling:
    """A cooling device that slows a processor."""

    name: str
    state: SysfsFile


@dataclass(slots=True)
class HeatRead:
    """Temperatures in degC by zone. `tj_from`: the zone that `tj_c` is of. `slowed_by`: why it is throttling."""

    zones_c: dict[str, float] = field(default_factory=dict)
    tj_c: float | None = None
    tj_from: str | None = None
    throttling: bool | None = None
    slowed_by: str | None = None
    reasons: dict[str, str] = field(default_factory=dict)
    lost: bool = False


class HeatReader:
    """Every thermal zone below `root`, and what the kernel does about the heat."""

    def __init__(self, root: Path) -> None:
        self._thermal = root / "sys/class/thermal"
        self.zones: list[Zone] = []
        self.cooling: list[Cooling] = []
        self.dropped: dict[str, str] = {}

    def find(self) -> None:
        """Look for zones, their trip points and the cooling devices; `dropped` says what is not used."""
        self.dropped = {}
        open_files = {file.path: file for file in self._files()}
        self.zones, self.cooling = [], []
        for folder in folders(self._thermal, "thermal_zone"):
            name = self._type_of(folder)
            if name is None:
                continue
            name = _SUFFIX.sub("", name.lower())
            if any(zone.name == name for zone in self.zones):
                self.dropped[folder.name] = f"a second zone {name}"
                continue
            temp = open_files.pop(folder / "temp", None) or SysfsFile(folder / "temp")
            self.zones.append(Zone(name, JUNCTION.fullmatch(name) is not None, temp, _trips(folder)))
        for folder in folders(self._thermal, "cooling_device"):
            name = self._type_of(folder)
            if name is not None and _THROTTLES.search(name):
                state = open_files.pop(folder / "cur_state", None) or SysfsFile(folder / "cur_state")
                self.cooling.append(Cooling(name, state))
        for file in open_files.values():
            file.close()

    def read(self) -> HeatRead:
        """Every temperature that can be read now. Tj is the zone `tj`, else the hottest of the other junctions."""
        found = HeatRead()
        told = False
        for zone in self.zones:
            try:
                found.zones_c[zone.name] = temp_c = _celsius(zone.temp.number(-_LIMIT, _LIMIT))
            except UnreadableError as error:
                found.reasons[f"zone {zone.name}"] = error.reason
                found.lost |= error.lost
                continue
            if zone.junction:
                if found.tj_from != "tj" and (zone.name == "tj" or found.tj_c is None or temp_c > found.tj_c):
                    found.tj_c, found.tj_from = temp_c, zone.name
                told = told or bool(zone.trips)
                for trip in zone.trips:
                    if trip.slows and temp_c >= trip.temp_c:
                        found.slowed_by = f"{zone.name} is over its {trip.kind} trip point of {trip.temp_c:g} degC"
        if found.tj_c is None:
            found.reasons["tj"] = "no junction zone can be read" if self.zones else "no thermal zones"
        for device in self.cooling:
            try:
                state = device.state.number(0, 1_000_000)
            except UnreadableError as error:
                found.lost |= error.lost
                continue
            told = True
            if state > 0:
                found.slowed_by = f"{device.name} is in state {state}"
        if found.slowed_by is not None or told:
            found.throttling = found.slowed_by is not None
        else:
            found.reasons["throttling"] = "neither trip points nor cooling devices can be read"
        return found

    def close(self) -> None:
        """Let go of all files."""
        for file in self._files():
            file.close()

    def _files(self) -> list[SysfsFile]:
        return [zone.temp for zone in self.zones] + [device.state for device in self.cooling]

    def _type_of(self, folder: Path) -> str | None:
        try:
            name = read_text(folder / "type")
        except UnreadableError as error:
            self.dropped[folder.name] = f"its type cannot be read: {error.reason}"
            return None
        if not name or not name.isprintable():
            self.dropped[folder.name] = f"its type is {name!r}"
            return None
        return name


def _celsius(millidegrees: int) -> float:
    temp_c = millidegrees / 1000
    if not MIN_C <= temp_c <= MAX_C:
        raise UnreadableError(f"{temp_c:g} degC cannot be: disconnected or power-gated")
    return temp_c


def _trips(folder: Path) -> tuple[Trip, ...]:
    """The trip points of a zone that can be read; kernels differ in number, temperature and binding."""
    slowing = _slowing_trips(folder)
    trips = []
    for file in folders(folder, "trip_point_"):
        if not file.name.endswith("_type"):
            continue
        number = file.name.removeprefix("trip_point_").removesuffix("_type")
        try:
            kind = read_text(file)
            temp_c = _celsius(read_number(folder / f"trip_point_{number}_temp", -_LIMIT, _LIMIT))
        except UnreadableError:
            continue
        slows = kind == "hot" or (kind == "passive" and (slowing is None or number in slowing))
        trips.append(Trip(kind, temp_c, slows))
    return tuple(trips)


def _slowing_trips(folder: Path) -> set[str] | None:
    """Numbers of the trips that a cooling device of a processor is bound to; None where a zone shows no bindings."""
    slowing: set[str] = set()
    seen = False
    for file in folders(folder, "cdev"):
        if not file.name.endswith("_trip_point"):
            continue
        try:
            trip = read_number(file, -1, 1000)
            name = read_text(folder / file.name.removesuffix("_trip_point") / "type")
        except UnreadableError:
            continue
        seen = True
        if _THROTTLES.search(name):
            slowing.add(str(trip))
    return slowing if seen else None
