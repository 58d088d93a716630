"""What the sensors of a simulated module say about it: in steps, with noise, late, and with faults by a script."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from edge_runtime.hardware.modules import Module
from edge_runtime.hardware.protocol import SensorError
from edge_runtime.records.power import DeviceReading
from edge_runtime.sim.plant import Plant

SENSOR_PERIOD_S = 0.1
TJ_STEP_C = 1 / 32
"""Junction temperatures as tegrastats prints them (51.093C) are multiples of this."""

NOISE = 0.01
"""Standard deviation of a reading over the dynamic power in it [assume]: enough for its steps to change."""

SPIKE_EVERY, SPIKE_FACTOR, SPIKE_C = 5, 4.0, 30.0
DISCONNECTED_C = -256.0

FaultKind = Literal["missing", "eio", "frozen", "stale", "minus_256", "spike", "zero"]
"""missing: no power, no temperature. eio: reading raises. frozen: new readings with the old values. stale: the old
reading again and again. minus_256: Tj of a disconnected sensor. spike: every fifth reading has four times the power
and 30 degC more. zero: every rail reads 0 W."""

FAULT_KINDS: tuple[FaultKind, ...] = get_args(FaultKind)


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with the sensors, from when until when, s since the sensor's start."""

    kind: FaultKind
    start_s: float
    end_s: float


# rail -> its shares of (static, GPU, CPU) power. How static power is spread over rails: [assume]
_INPUT_RAILS = {
    "VDD_IN": (1.0, 1.0, 1.0),
    "VDD_CPU_GPU_CV": (0.1, 1.0, 1.0),
    "VDD_SOC": (0.4, 0.0, 0.0),
}
_AGX_ORIN_RAILS = {
    "VDD_GPU_SOC": (0.4, 1.0, 0.0),
    "VDD_CPU_CV": (0.1, 0.0, 1.0),
    "VIN_SYS_5V0": (0.5, 0.0, 0.0),
    "VDDQ_VDD2_1V8AO": (0.2, 0.0, 0.0),
}
_XAVIER_RAILS = {
    "GPU": (0.1, 1.0, 0.0),
    "CPU": (0.1, 0.0, 1.0),
    "SOC": (0.3, 0.0, 0.0),
    "CV": (0.05, 0.0, 0.0),
    "VDDRQ": (0.15, 0.0, 0.0),
    "SYS5V": (0.3, 0.0, 0.0),
}
_SHARES = {**_INPUT_RAILS, **_AGX_ORIN_RAILS, **_XAVIER_RAILS}


class SimSensor:
    """The power monitor and thermal zones of `module`.

    `convert` at the end of every conversion, `read` as a program would: it gets the conversion before the last one.
    `noise`: as `NOISE`. `faults` by time since `origin_ns`. For one thread.
    """

    def __init__(
        self,
        module: Module,
        *,
        noise: float = NOISE,
        seed: int = 0,
        faults: Sequence[Fault] = (),
        mode: str | None = None,
        origin_ns: int = 0,
    ) -> None:
        self._rails = module.rails
        self._shares = [(rail, *_SHARES[rail]) for rail in (*module.rails, *module.other_rails)]
        self._quantum_w = module.quantum_w or 0.0
        self._noise = noise
        self._gauss = random.Random(seed).gauss
        self._faults = tuple(faults)
        self._mode = mode
        self._origin_ns = origin_ns
        self._last: DeviceReading | None = None
        self._before: DeviceReading | None = None
        self._given: DeviceReading | None = None
        self._reads = 0

    def convert(self, plant: Plant) -> None:
        """A conversion is done: what the plant is now can be read after the next one."""
        static_w, gpu_w, cpu_w = plant.static_w, plant.gpu_w, plant.cpu_w
        quantum_w, noise = self._quantum_w, self._noise
        rails_w: dict[str, float] = {}
        for rail, static_share, gpu_share, cpu_share in self._shares:
            dynamic_w = gpu_share * gpu_w + cpu_share * cpu_w
            watts = static_share * static_w + dynamic_w
            if noise and dynamic_w:
                watts = max(0.0, self._gauss(watts, noise * dynamic_w))
            rails_w[rail] = round(watts / quantum_w) * quantum_w if quantum_w else watts
        tj_c = round(plant.tj_c / TJ_STEP_C) * TJ_STEP_C
        self._before, self._last = (
            self._last,
            DeviceReading(
                0,
                watts=sum([rails_w[rail] for rail in self._rails]),
                rails_w=rails_w,
                tj_c=tj_c,
                zones_c={"tj": tj_c},
                gpu_load=plant.gpu_load,
                gpu_hz=plant.gpu_hz,
                throttling=plant.throttled,
                fan=plant.fan,
                mode=self._mode,
            ),
        )

    def read(self, t_ns: int) -> DeviceReading:
        """A reading at `t_ns`, as it comes: also one that cannot be. Raises SensorError by the script, and before the
        first conversion."""
        converted = self._before or self._last
        if converted is None:
            raise SensorError("simulated: nothing was converted yet")
        self._reads += 1
        reading = replace(converted, t_ns=t_ns)
        since_s = (t_ns - self._origin_ns) / 1e9
        for fault in self._faults:
            if fault.start_s <= since_s < fault.end_s:
                reading = self._faulty(fault.kind, reading)
        self._given = reading
        return reading

    def _faulty(self, kind: FaultKind, reading: DeviceReading) -> DeviceReading:
        given = self._given
        if kind == "eio":
            raise SensorError("simulated: [Errno 5] Input/output error")
        if kind == "missing":
            reason = "simulated: it is not there"
            return replace(
                reading, watts=None, rails_w={}, tj_c=None, zones_c={}, reasons={"power": reason, "tj": reason}
            )
        if kind == "frozen":
            return reading if given is None else replace(given, t_ns=reading.t_ns)
        if kind == "stale":
            return reading if given is None else given
        if kind == "minus_256":
            return replace(reading, tj_c=DISCONNECTED_C, zones_c={"tj": DISCONNECTED_C})
        if kind == "zero":
            return replace(reading, watts=0.0, rails_w=dict.fromkeys(reading.rails_w, 0.0))
        if self._reads % SPIKE_EVERY or reading.watts is None or reading.tj_c is None:
            return reading
        hot_c = reading.tj_c + SPIKE_C
        return replace(
            reading,
            watts=reading.watts * SPIKE_FACTOR,
            rails_w={rail: watts * SPIKE_FACTOR for rail, watts in reading.rails_w.items()},
            tj_c=hot_c,
            zones_c={"tj": hot_c},
        )
