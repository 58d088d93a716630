"""A simulated Orin in real time: power, temperature and clocks that follow how busy the lanes really are.

Everything it says is a model's, and is reported as `simulated`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from edge_runtime.hardware.feed import Candidate
from edge_runtime.hardware.protocol import SensorError
from edge_runtime.records.power import DeviceReading
from edge_runtime.sim.module import declared
from edge_runtime.sim.plant import Plant, PlantParameters
from edge_runtime.sim.sensors import NOISE, SENSOR_PERIOD_S, Fault, SimSensor

AMBIENT_C = 25.0

SIM_MODE = "simulated"
"""What the power mode of a simulated device is called; its idle power is the device's `idle_w`."""

LONGEST_SPAN_S = 600.0
"""A machine that slept is not caught up with further than this."""


class SimDevice:
    """A `SensorSource` over a plant; `speed` and `set_gpu_cap` may be called from any thread.

    `busy_ns` gives the lanes' cumulative busy time, stretched as `StretchedEngine` does it; `lanes` how many there are:
    the GPU's load is the share of lane time spent inferring. `cpu_s`: the CPU time (s, of all cores) that goes
    with it, cumulative; None: the CPU is as loaded as the lanes would be at full clock.
    """

    name = "simulated"
    period_s = SENSOR_PERIOD_S

    def __init__(
        self,
        module: PlantParameters,
        busy_ns: Callable[[], int],
        lanes: Callable[[], int],
        *,
        ambient_c: float = AMBIENT_C,
        cpu_s: Callable[[], float] | None = None,
        noise: float = NOISE,
        seed: int = 0,
        faults: Sequence[Fault] = (),
    ) -> None:
        self._plant = Plant(module, ambient_c)
        self.idle_w = self._plant.power_w
        self.clocks_hz = module.gpu_steps_hz
        each = declared(module.name)
        self.rails: tuple[str, ...] = each.rails
        self.quantum_w: float | None = each.quantum_w
        self._busy_ns = busy_ns
        self._lanes = lanes
        self._cpu_s = cpu_s
        self._lock = threading.Lock()
        self._t_ns = time.monotonic_ns()
        self._sensor = SimSensor(each, noise=noise, seed=seed, faults=faults, mode=SIM_MODE, origin_ns=self._t_ns)
        self._sensor.convert(self._plant)
        self._last_busy_ns = busy_ns()
        self._last_cpu_s = 0.0 if cpu_s is None else cpu_s()

    def speed(self) -> float:
        """The GPU's clock over the power mode's highest one, above 0, at most 1."""
        return self._plant.speed  # one float: whole at any time

    def set_gpu_cap(self, hz: float | None) -> None:
        """The highest clock that is allowed from now on; None: the power mode's."""
        with self._lock:
            self._advance(time.monotonic_ns())
            self._plant.cap_hz = hz

    def read(self) -> DeviceReading:
        """Advance to now; called once a period. Raises SensorError by the script of faults, and once it was so hot
        that the module switched itself off."""
        with self._lock:
            now_ns = time.monotonic_ns()
            self._advance(now_ns)
            if self._plant.shutdown:
                raise SensorError("the simulated module was too hot and has switched itself off")
            return self._sensor.read(now_ns)

    def close(self) -> None:
        """There is nothing to let go of."""

    def _advance(self, now_ns: int) -> None:
        span_s = (now_ns - self._t_ns) / 1e9
        if span_s <= 0:
            return
        plant = self._plant
        busy_ns = self._busy_ns()
        # a reload may put a counter back
        gpu_load = max(0, busy_ns - self._last_busy_ns) / 1e9 / (span_s * max(1, self._lanes()))
        if self._cpu_s is None:
            cpu_load = gpu_load * plant.speed
        else:
            cpu_s = self._cpu_s()
            cpu_load = (cpu_s - self._last_cpu_s) / (span_s * plant.parameters.cpu_cores)
            self._last_cpu_s = cpu_s
        self._t_ns, self._last_busy_ns = now_ns, busy_ns
        left_s = min(span_s, LONGEST_SPAN_S)
        while left_s > 1e-9:
            step_s = min(SENSOR_PERIOD_S, left_s)
            plant.step(step_s, gpu_load, cpu_load)
            self._sensor.convert(plant)
            left_s -= step_s


def sim_candidate(device: SimDevice) -> Candidate:
    """The simulated device as the one source there is; its power may stand still, as idle power does here."""
    return Candidate(device.name, lambda: device, steady=True)
