"""What sensors say: watts, degrees, and the joules of a span."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PowerReading:
    """Module power at a monotonic time; `rails_w` are the rails it is made of, by NVIDIA's names."""

    t_ns: int
    watts: float
    rails_w: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ThermalReading:
    """Temperatures at a monotonic time. `tj_c` is the hottest junction; a zone that is not available is absent."""

    t_ns: int
    tj_c: float
    zones_c: Mapping[str, float]
    throttling: bool = False


@dataclass(frozen=True, slots=True)
class Energy:
    """The energy of a span: `joules` gross, `net_joules` without the idle power (None where that is unknown)."""

    source: str
    rails: tuple[str, ...]
    joules: float
    net_joules: float | None
    mean_w: float
    peak_w: float
    samples: int


@dataclass(frozen=True, slots=True)
class Unavailable:
    """Why there is no value. Never a zero."""

    reason: str
