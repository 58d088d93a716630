"""The device as physics sees it: watts from clocks and load, two thermal nodes, a fan, hardware that throttles itself.

A model, stepped by whoever has the time: virtual (`world`) or real (`device`). What its figures are and where they
come from is in `module`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

MAX_STEP_S = 0.1
"""Longer steps are cut into such ones: shorter than every time constant and than the throttling's own period."""

GPU_EXPONENT, CPU_EXPONENT = 1.7, 2.4
"""Dynamic power over the clock, at the same share of time busy."""

SETTLED_MAX_C = 150.0
"""The search for a settled temperature goes no further; every module has shut itself down long before."""


@dataclass(frozen=True, slots=True)
class PlantParameters:
    """A module in a power mode. Watts are module power.

    `static_w` with no load at a junction of `reference_c`; it grows by `leakage_per_c` of itself a degC. `gpu_w`,
    `cpu_w`: on top of it with the GPU, the CPU busy all the time at this mode's highest clocks (what memory and the
    rest of the chip add to it included). `gpu_steps_hz`: the GPU's clocks, ascending, the mode's cap last.
    `junction_c_w` and `sink_c_w`: junction to heat sink, and heat sink to air with the fan at full speed, degC/W;
    without it the latter is `still_air` times that. `tau_junction_s`, `tau_sink_s` (fan at full speed): their time
    constants, `tau_power_s` the one with which power follows load. The fan starts at `fan_c[0]`, is at full speed from
    `fan_c[1]`, and slows down only when the junction is `fan_hysteresis_c` cooler. From `passive_c` the clocks go
    down a step every `throttle_period_s`, and up again below `passive_c - passive_hysteresis_c`; at `critical_c` the
    module switches itself off.
    """

    name: str
    mode: str
    static_w: float
    gpu_w: float
    cpu_w: float
    cpu_cores: int
    gpu_steps_hz: tuple[float, ...]
    sink_c_w: float
    tau_sink_s: float
    passive_c: float
    critical_c: float = 104.5
    reference_c: float = 50.0
    leakage_per_c: float = 0.005
    junction_c_w: float = 0.3
    tau_junction_s: float = 2.0
    tau_power_s: float = 0.5
    still_air: float = 1.5
    fan_c: tuple[float, float] = (50.0, 70.0)
    fan_hysteresis_c: float = 5.0
    passive_hysteresis_c: float = 3.0
    throttle_period_s: float = 1.0

    @property
    def gpu_max_hz(self) -> float:
        return self.gpu_steps_hz[-1]

    def scaled(
        self, *, power: float = 1.0, thermal_resistance: float = 1.0, tau: float = 1.0, leakage: float = 1.0
    ) -> PlantParameters:
        """Another specimen: all watts, both resistances, all time constants, the leakage's slope times a factor."""
        return replace(
            self,
            static_w=self.static_w * power,
            gpu_w=self.gpu_w * power,
            cpu_w=self.cpu_w * power,
            junction_c_w=self.junction_c_w * thermal_resistance,
            sink_c_w=self.sink_c_w * thermal_resistance,
            tau_junction_s=self.tau_junction_s * tau,
            tau_sink_s=self.tau_sink_s * tau,
            tau_power_s=self.tau_power_s * tau,
            leakage_per_c=self.leakage_per_c * leakage,
        )


class Plant:
    """The state of a module in air of `ambient_c`; begins settled without load. For one thread.

    `power_w` is `static_w + gpu_w + cpu_w`. `tj_c` junction, `sink_c` heat sink. `gpu_hz` the clock in force: the
    lowest of the mode's, `cap_hz` and the hardware's own throttling; `speed` is its share of the mode's. `fan` 0-1.
    `throttled`: the hardware holds its clocks back. `shutdown`: it was too hot, and is off for good.
    """

    __slots__ = (
        "_cap_hz",
        "_cap_index",
        "_cpu_factor",
        "_cpu_share",
        "_fan_c",
        "_gains",
        "_gpu_factor",
        "_throttle_index",
        "_throttle_s",
        "ambient_c",
        "cpu_load",
        "cpu_w",
        "fan",
        "gpu_hz",
        "gpu_load",
        "gpu_w",
        "parameters",
        "power_w",
        "shutdown",
        "sink_c",
        "speed",
        "static_w",
        "throttled",
        "tj_c",
    )

    def __init__(self, parameters: PlantParameters, ambient_c: float) -> None:
        self.parameters = parameters
        self.ambient_c = ambient_c
        top = len(parameters.gpu_steps_hz) - 1
        self._cap_index = self._throttle_index = top
        self._cap_hz: float | None = None
        self._throttle_s = 0.0
        self._gains: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
        self.shutdown = False
        self.gpu_load = self.cpu_load = 0.0
        self._clocks()
        settled = self.settled(0.0, 0.0)
        # a plant that runs away even without load starts with its air, and runs away
        self.static_w, self.tj_c = settled or (parameters.static_w, ambient_c)
        self.gpu_w = self.cpu_w = 0.0
        self.power_w = self.static_w
        self.sink_c = max(ambient_c, self.tj_c - parameters.junction_c_w * self.power_w)
        self._fan_c = self.tj_c
        self.fan = _fan(parameters, self.tj_c)

    @property
    def cap_hz(self) -> float | None:
        """A cap of the GPU's clock from outside: the highest step that is not above it, at least the lowest one."""
        return self._cap_hz

    @cap_hz.setter
    def cap_hz(self, value: float | None) -> None:
        if value == self._cap_hz:
            return
        self._cap_hz = value
        steps = self.parameters.gpu_steps_hz
        top = len(steps) - 1
        self._cap_index = top
        while value is not None and self._cap_index > 0 and steps[self._cap_index] > value:
            self._cap_index -= 1
        self._clocks()

    def step(self, dt_s: float, gpu_load: float, cpu_load: float) -> None:
        """Let `dt_s` go by. `gpu_load`: share of this time that the GPU was busy, 0-1, at the clock it had (a slower
        clock makes it longer: whoever calls has stretched it). `cpu_load`: 0-1, as it were at the full CPU clock."""
        gpu_load = min(1.0, max(0.0, gpu_load))
        cpu_load = min(1.0, max(0.0, cpu_load))
        while dt_s > MAX_STEP_S * 1.000001:
            self._step(MAX_STEP_S, gpu_load, cpu_load)
            dt_s -= MAX_STEP_S
        if dt_s > 0:
            self._step(dt_s, gpu_load, cpu_load)

    def settled(self, gpu_load: float, cpu_load: float, gpu_hz: float | None = None) -> tuple[float, float] | None:
        """(power W, Tj degC) after a long time of this load, as it warms up to it, without any throttling.

        `gpu_hz`: the clock; None: the mode's. None where leakage lets it run away before `SETTLED_MAX_C`.
        """
        each = self.parameters
        share = 1.0 if gpu_hz is None else gpu_hz / each.gpu_max_hz
        dynamic_w = each.gpu_w * gpu_load * share**GPU_EXPONENT + each.cpu_w * cpu_load
        static_w, slope, reference_c = each.static_w, each.leakage_per_c, each.reference_c
        ambient_c = self.ambient_c
        low_c, high_c = ambient_c, SETTLED_MAX_C
        # the fan makes it piecewise; temperature minus what it would cause has one sign change from below
        while high_c - low_c > 1e-6:
            tj_c = (low_c + high_c) / 2
            power_w = dynamic_w + static_w * max(0.0, 1 + slope * (tj_c - reference_c))
            if ambient_c + (each.junction_c_w + _sink_c_w(each, _fan(each, tj_c))) * power_w > tj_c:
                low_c = tj_c
            else:
                high_c = tj_c
        if high_c == SETTLED_MAX_C:
            return None
        return dynamic_w + static_w * max(0.0, 1 + slope * (high_c - reference_c)), high_c

    def _step(self, dt_s: float, gpu_load: float, cpu_load: float) -> None:
        each = self.parameters
        if dt_s != self._gains[0]:
            self._gains = (
                dt_s,
                -math.expm1(-dt_s / each.tau_power_s),
                -math.expm1(-dt_s / each.tau_junction_s),
                -dt_s / each.tau_sink_s,
            )
        _, power_gain, junction_gain, sink_exponent = self._gains
        if self.shutdown:
            static_w = gpu_w = cpu_w = 0.0
        else:
            static_w = each.static_w * max(0.0, 1 + each.leakage_per_c * (self.tj_c - each.reference_c))
            gpu_w = each.gpu_w * gpu_load * self._gpu_factor
            # throttled, the same work takes the CPU longer
            cpu_load = min(1.0, cpu_load / self._cpu_share)
            cpu_w = each.cpu_w * cpu_load * self._cpu_factor
        self.gpu_load, self.cpu_load = gpu_load, cpu_load
        self.static_w += (static_w - self.static_w) * power_gain
        self.gpu_w += (gpu_w - self.gpu_w) * power_gain
        self.cpu_w += (cpu_w - self.cpu_w) * power_gain
        power_w = self.power_w = self.static_w + self.gpu_w + self.cpu_w
        sink_c_w = _sink_c_w(each, self.fan)
        # the sink's heat capacity is what it is: with less air it warms up more slowly, too
        sink_gain = -math.expm1(sink_exponent * each.sink_c_w / sink_c_w)
        rise_c = self.tj_c - self.sink_c
        rise_c += (each.junction_c_w * power_w - rise_c) * junction_gain
        self.sink_c += (self.ambient_c + sink_c_w * power_w - self.sink_c) * sink_gain
        tj_c = self.tj_c = self.sink_c + rise_c
        self._fan_c = max(tj_c, min(self._fan_c, tj_c + each.fan_hysteresis_c))
        self.fan = _fan(each, self._fan_c)
        self._throttle_s += dt_s
        if tj_c >= each.critical_c:
            self.shutdown = True
        if self._throttle_s >= each.throttle_period_s - 1e-9:
            self._throttle_s = 0.0
            if tj_c >= each.passive_c:
                self._throttle(-1)
            elif self.throttled and tj_c < each.passive_c - each.passive_hysteresis_c:
                self._throttle(1)

    def _throttle(self, steps: int) -> None:
        top = len(self.parameters.gpu_steps_hz) - 1
        self._throttle_index = min(top, max(0, self._throttle_index + steps))
        self._clocks()

    def _clocks(self) -> None:
        steps = self.parameters.gpu_steps_hz
        self.throttled = self._throttle_index < len(steps) - 1
        self.gpu_hz = steps[min(self._cap_index, self._throttle_index)]
        self.speed = self.gpu_hz / steps[-1]
        self._gpu_factor = self.speed**GPU_EXPONENT
        # the CPU's clock goes down in the same share; a cap of the GPU's is nothing to it
        self._cpu_share = steps[self._throttle_index] / steps[-1]
        self._cpu_factor = self._cpu_share**CPU_EXPONENT


def _fan(each: PlantParameters, tj_c: float) -> float:
    start_c, full_c = each.fan_c
    return min(1.0, max(0.0, (tj_c - start_c) / (full_c - start_c)))


def _sink_c_w(each: PlantParameters, fan: float) -> float:
    return each.sink_c_w * (each.still_air + (1 - each.still_air) * fan)
