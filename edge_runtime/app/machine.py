"""The machine that a daemon runs on, chosen once: its sensors, its clock; of a simulated one, how fast it is."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

from edge_runtime import __version__
from edge_runtime.app.models import Wrap
from edge_runtime.governor.profile import Profile
from edge_runtime.hardware.energy import IdlePower
from edge_runtime.hardware.gpu_clock_client import HelperClock
from edge_runtime.hardware.modules import Module, identify
from edge_runtime.hardware.nvpmodel import read_mode
from edge_runtime.hardware.protocol import ClockControl
from edge_runtime.hardware.sources import Sensors, make_sensors
from edge_runtime.pipeline.pipeline import Pipeline
from edge_runtime.records.power import SensorSwitch, Unavailable
from edge_runtime.sim.clock import SimClock
from edge_runtime.sim.device import SIM_MODE, SimDevice, sim_candidate
from edge_runtime.sim.lane import OtherWork, StretchedEngine
from edge_runtime.sim.module import MODULES
from edge_runtime.sim.sensors import Fault

_ROOT = Path("/")
_SIM = "sim:"


@dataclass(frozen=True, slots=True)
class Machine:
    """What a daemon is given. `name` and `mode`: module and power mode as a profile has them. `clock`: of the GPU, and
    no means against what runs on the CPU; None where there are no sensors to cap it by. `wrap`: makes an engine as slow
    as a simulated GPU is now."""

    name: str
    mode: str | None
    sensors: Sensors | Unavailable
    idle: IdlePower
    clock: ClockControl | None
    wrap: Wrap | None = None

    def lacks(self, profile: Profile) -> str | None:
        """Why a profile says nothing about this machine; None where it does."""
        return profile.fits(self.name, self.mode, {"edge_runtime": __version__, "onnxruntime": version("onnxruntime")})


class Choose(Protocol):
    """Makes a machine of `[device] hardware`; `choose_machine`, but in tests."""

    def __call__(
        self,
        hardware: str,
        pipeline: Pipeline,
        *,
        on_switch: Callable[[SensorSwitch], None],
        on_death: Callable[[str, BaseException], None],
    ) -> Machine: ...


def choose_machine(
    hardware: str,
    pipeline: Pipeline,
    *,
    on_switch: Callable[[SensorSwitch], None],
    on_death: Callable[[str, BaseException], None],
) -> Machine:
    """The machine that `hardware` names. What `pipeline` does is what a simulated one takes power for."""
    if hardware.startswith(_SIM):
        return simulated(hardware.removeprefix(_SIM), pipeline, on_switch=on_switch, on_death=on_death)
    sensors = make_sensors(hardware, _ROOT, on_switch=on_switch, on_death=on_death)
    clock = HelperClock() if isinstance(sensors, Sensors) else None
    module = identify(_ROOT)
    if isinstance(module, Module):
        return Machine(module.name, read_mode(_ROOT).name, sensors, IdlePower(), clock)
    return Machine(platform.machine(), None, sensors, IdlePower(), clock)


def simulated(
    module: str,
    pipeline: Pipeline,
    *,
    on_switch: Callable[[SensorSwitch], None],
    on_death: Callable[[str, BaseException], None],
    faults: Sequence[Fault] = (),
) -> Machine:
    """A simulated module, by its name; `faults`: what goes wrong with its sensors, s from now."""
    other = OtherWork()
    device = SimDevice(MODULES[module], pipeline.busy_ns, pipeline.lanes, cpu_s=other.cpu_s, faults=faults)
    return Machine(
        module,
        SIM_MODE,
        Sensors([sim_candidate(device)], on_switch=on_switch, on_death=on_death),
        IdlePower({SIM_MODE: device.idle_w}),
        SimClock(device),
        lambda engine: StretchedEngine(engine, device.speed, other.inferred),
    )
