"""What sensors say: watts, degrees, and the joules of a span."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ThermalReading:
    """Temperatures at a monotonic time, from the source `source`; a zone that is not available is absent.

    `tj_c`: the hottest junction, degC. `throttling`: whether the hardware slows itself down now, None where that is
    not known. `over_current`: how often each over-current input has triggered since the source was first read, by
    name; empty where that is not known. `reasons`: as in `DeviceReading`, as far as they are about these.
    """

    t_ns: int
    tj_c: float
    zones_c: Mapping[str, float]
    source: str
    throttling: bool | None = None
    over_current: Mapping[str, int] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Energy:
    """The energy of a span, and what it was made from.

    `source`: names of all sources that had a part, joined by "+". `rails`: what module power is made of. `joules`:
    gross, J; `net_joules`: without `idle_w`, the module's power with no load in the same power mode. `mean_w`,
    `peak_w`: W, the peak of single readings. `samples`: readings in the span; `rate_hz`: how often they came.
    `quantum_w`: the step of a power reading, the coarsest of all sources'. `mode`: the nvpmodel mode. `reasons`: why
    one of these is None, by its name.
    """

    source: str
    rails: tuple[str, ...]
    joules: float
    net_joules: float | None
    mean_w: float
    peak_w: float
    samples: int
    rate_hz: float
    quantum_w: float | None
    idle_w: float | None
    mode: str | None
    reasons: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Exceeded:
    """For how long a span was above a limit: `above_s` by one-second means, s. For `unknown_s` of the span that cannot
    be told, for `reason`; None where it is 0."""

    above_s: float
    unknown_s: float = 0.0
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Unavailable:
    """Why there is no value. Never a zero."""

    reason: str


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """One look at the device through one source, at a monotonic time. What is missing is None, never 0.

    `watts`: module power by the module's declared rails, W; `rails_w`: every rail that could be read, also those
    that are not part of the sum. `tj_c`: the hottest junction, degC; `zones_c`: every zone that could be read.
    `gpu_load` 0-1, `gpu_hz` Hz. `throttling`: whether the hardware slows itself down now. `over_current`: how often
    each over-current input has triggered since the reading before, by name ("oc1" under-voltage, "oc2" average,
    "oc3" instantaneous); empty where that is not known. `fan` 0-1. `mode`: the nvpmodel mode in words.
    `reasons`: why something is missing, by "power", "tj", "zone NAME", "rail NAME", "gpu", "mode", "fan", ...
    """

    t_ns: int
    watts: float | None = None
    rails_w: Mapping[str, float] = field(default_factory=dict)
    tj_c: float | None = None
    zones_c: Mapping[str, float] = field(default_factory=dict)
    gpu_load: float | None = None
    gpu_hz: float | None = None
    throttling: bool | None = None
    over_current: Mapping[str, int] = field(default_factory=dict)
    fan: float | None = None
    mode: str | None = None
    reasons: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SensorSwitch:
    """Another source is read from now on. `what`: "power", "temperature" or "power and temperature"."""

    what: str
    before: str | None
    after: str | None
    reason: str

    def __str__(self) -> str:
        if self.after is None:
            return f"no source for {self.what} any more: {self.reason}"
        before = "" if self.before is None else f", no longer from {self.before}"
        return f"{self.what} from {self.after}{before}: {self.reason}"
