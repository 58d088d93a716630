"""A first simulated Orin: power and temperature that follow how busy the lanes really are.

Every figure here is a model's and is reported as `simulated`. Idle and loaded power come from public
measurements where there are any; what is marked [assume] has no public source. Frequency scaling,
leakage, throttling and sensor faults are not modelled yet.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from edge_runtime.hardware.feed import Candidate
from edge_runtime.records.power import DeviceReading


@dataclass(frozen=True, slots=True)
class SimModule:
    """A module in its default power mode: `idle_w` and `busy_w` module power (W) with no and with full load,
    `resistance_c_w` junction to ambient (degC/W), `tau_s` thermal time constant (s), the rail names it reports."""

    name: str
    idle_w: float
    busy_w: float
    resistance_c_w: float
    tau_s: float
    rails: tuple[str, ...] = ("VDD_IN",)


_AGX = ("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0")
_XAVIER = ("GPU", "CPU", "SOC", "CV", "VDDRQ", "SYS5V")

MODULES: dict[str, SimModule] = {
    module.name: module
    for module in (
        # idle: tegrastats of an Orin Nano Super, 4.654 W; loaded: the 15 W and 10 W modes' own names [assume]
        SimModule("orin-nano-4gb", 3.8, 10.0, 2.3, 90.0),
        SimModule("orin-nano-8gb", 4.6, 15.0, 2.1, 90.0),
        # NX 16 bench: idle 4.6 W/58 degC, 16.9 W/71 in the 25 W mode; resistance from Tj = 50.8 + 1.32 P
        SimModule("orin-nx-8gb", 4.6, 15.0, 1.3, 120.0),
        SimModule("orin-nx-16gb", 4.6, 16.9, 1.3, 120.0),
        # AGX: idle total 6.8 W; 30 W mode under stress GPU 7.6 + CPU 5.6 W on top of it
        SimModule("agx-orin-32gb", 6.8, 20.0, 0.9, 150.0, _AGX),
        SimModule("agx-orin-64gb", 6.8, 22.0, 0.9, 150.0, _AGX),
        SimModule("agx-xavier", 5.5, 20.0, 1.0, 150.0, _XAVIER),  # [assume]
    )
}

AMBIENT_C = 25.0

SIM_MODE = "simulated"
"""What the power mode of a simulated device is called; its idle power is the module's `idle_w`."""


class SimDevice:
    """Module power = idle + (busy - idle) x utilisation; Tj follows it with one time constant.

    A `SensorSource`. `busy_ns` gives the lanes' cumulative busy time, `lanes` how many there are: utilisation is the
    share of lane time spent inferring since the reading before, 0-1.
    """

    name = "simulated"
    period_s = 0.1
    quantum_w: float | None = 0.0

    def __init__(self, module: SimModule, busy_ns: Callable[[], int], lanes: Callable[[], int]) -> None:
        self._module = module
        self._busy_ns = busy_ns
        self._lanes = lanes
        self._t_ns = time.monotonic_ns()
        self._last_busy_ns = busy_ns()
        self._watts = module.idle_w
        self._tj_c = AMBIENT_C + module.resistance_c_w * module.idle_w

    @property
    def rails(self) -> tuple[str, ...]:
        return self._module.rails

    def read(self) -> DeviceReading:
        """Advance to now; called once a period."""
        now_ns = time.monotonic_ns()
        span_ns = now_ns - self._t_ns
        if span_ns > 0:
            busy_ns = self._busy_ns()
            utilisation = (busy_ns - self._last_busy_ns) / (span_ns * max(1, self._lanes()))
            module = self._module
            self._watts = module.idle_w + (module.busy_w - module.idle_w) * min(1.0, max(0.0, utilisation))
            settled_c = AMBIENT_C + module.resistance_c_w * self._watts
            self._tj_c += (settled_c - self._tj_c) * -math.expm1(-span_ns / 1e9 / module.tau_s)
            self._t_ns, self._last_busy_ns = now_ns, busy_ns
        return DeviceReading(
            now_ns,
            watts=self._watts,
            rails_w=dict.fromkeys(self.rails, self._watts / len(self.rails)),
            tj_c=self._tj_c,
            zones_c={"tj": self._tj_c},
            throttling=False,
            mode=SIM_MODE,
        )

    def close(self) -> None:
        """There is nothing to let go of."""


def sim_candidate(device: SimDevice) -> Candidate:
    """The simulated device as the one source there is; its power may stand still, as idle power does here."""
    return Candidate(device.name, lambda: device, steady=True)
