"""What a program says about the device, value by value: what cannot be is left out, with its reason."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TypeGuard

from edge_runtime.hardware.modules import Module, Unknown, module_power
from edge_runtime.hardware.sysfs_power import MAX_RAIL_W
from edge_runtime.hardware.sysfs_thermal import JUNCTION, MAX_C, MIN_C
from edge_runtime.records.power import DeviceReading

MAX_CLOCK_HZ = 5e9
"""More than any GPU of a module runs at."""

"""Zones on the die; not tboard and tdiode (the board), pmic (a constant) or thermal (a mean)."""


@dataclass(slots=True)
class Findings:
    """Rails in W by NVIDIA's names, zones in degC by lower-case names; the rest as in DeviceReading."""

    rails_w: dict[str, float] = field(default_factory=dict)
    zones_c: dict[str, float] = field(default_factory=dict)
    gpu_load: float | None = None
    gpu_hz: float | None = None
    fan: float | None = None
    mode: str | None = None
    reasons: dict[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Whether there is any value."""
        return bool(self.rails_w or self.zones_c) or self.gpu_load is not None or self.gpu_hz is not None

    def add_rail(self, name: str, value_mw: object) -> None:
        """A rail's power as it was told, mW if it is a number. The first of a name counts."""
        if _between(value_mw, 0, MAX_RAIL_W * 1000):
            self.rails_w.setdefault(name, float(value_mw) / 1000)
        else:
            self.reasons.setdefault(f"rail {name}", f"{value_mw!r} mW cannot be")

    def add_zone(self, name: str, value_c: object) -> None:
        """A zone's temperature as it was told, degC if it is a number. -256 is what a sensor reads that is off."""
        name = name.lower()
        if _between(value_c, MIN_C, MAX_C):
            self.zones_c.setdefault(name, float(value_c))
        else:
            self.reasons.setdefault(f"zone {name}", f"{value_c!r} degC cannot be: disconnected or power-gated")

    def add_gpu(self, load_percent: object, clock_hz: object) -> None:
        """The GPU's load in % and clock in Hz as they were told; a clock of 0 is a GPU that is switched off."""
        if _between(load_percent, 0, 100):
            self.gpu_load = float(load_percent) / 100
        elif load_percent is not None:
            self.reasons["gpu"] = f"its load is given as {load_percent!r}"
        if _between(clock_hz, 0, MAX_CLOCK_HZ):
            self.gpu_hz = float(clock_hz)
        elif clock_hz is not None:
            self.reasons["gpu clock"] = f"it is given as {clock_hz!r}"

    def reading(self, module: Module | Unknown, t_ns: int) -> DeviceReading:
        """All of it, taken at `t_ns`, with module power and Tj: the zone `tj`, else the hottest zone on the die."""
        reasons = dict(self.reasons)
        watts, reason = module_power(module, self.rails_w)
        if reason is not None:
            reasons["power"] = reason
        junctions_c = [value for name, value in self.zones_c.items() if JUNCTION.fullmatch(name)]
        tj_c = self.zones_c.get("tj", max(junctions_c, default=None))
        if tj_c is None:
            reasons["tj"] = "no zone on the die can be read"
        if self.gpu_load is None:
            reasons.setdefault("gpu", "its load is not given")
        return DeviceReading(
            t_ns=t_ns,
            watts=watts,
            rails_w=self.rails_w,
            tj_c=tj_c,
            zones_c=self.zones_c,
            gpu_load=self.gpu_load,
            gpu_hz=self.gpu_hz,
            fan=self.fan,
            mode=self.mode,
            reasons=reasons,
        )


def _between(value: object, low: float, high: float) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value) and low <= value <= high
