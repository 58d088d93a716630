"""The simulated modules' figures, each with where it is from. [assume]: there is no public source.

Measured on an Orin NX 16GB with a fan: idle 4.6 W/58 degC; 16.9 W/71 in the 25 W mode (GPU 408 MHz, 8 cores at 1.4976
GHz); 27.6/86 and 29.4/89 in faster ones. Measured on AGX Orin under stress, by mode (MAXN, 50W, 30W, 15W): GPU rail
40.4, 18.4, 7.6, 5.2 W; CPU rail 15.2, 6.0, 5.6, 1.6 W; idle total 6.8 W. Power over the clock: GPU f^1.7, CPU f^2.4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from edge_runtime.hardware import modules
from edge_runtime.hardware.modules import PowerMode
from edge_runtime.sim.plant import CPU_EXPONENT, GPU_EXPONENT, PlantParameters

GPU_LOWEST_HZ, GPU_STEP_HZ = 306e6, 102e6
"""The GPU's clocks, up to the mode's cap. [assume] for the Nano and the Xavier."""


@dataclass(frozen=True, slots=True)
class _Silicon:
    """A module that nothing caps: `gpu_w` at `gpu_mhz`, `cpu_w` with `cpu_cores` at `cpu_mhz`, full load, without
    `static_w`."""

    static_w: float
    gpu_w: float
    gpu_mhz: float
    cpu_w: float
    cpu_mhz: float
    cpu_cores: int
    sink_c_w: float
    tau_sink_s: float
    passive_c: float
    reference_c: float = 50.0  # [assume]; a heat sink at idle


# An NX: GPU 12.8 W at 1173 MHz [calc]. CPU with what memory and the rest of the chip add: 27.6 - 12.8 - 4.6 - 0.6 W
# (leakage) = 9.6 W with 8 cores at 1.4976 GHz, which also gives the 25 W mode's 16.9 W.
_NX_GPU_W, _NX_GPU_MHZ = 12.8, 1173.0
_NX_CPU_W, _NX_CPU_MHZ = 9.6, 1497.6
# of those 9.6 W what goes with memory and the chip: AGX's CPU rail has 6.0 W with 12 cores at that clock
_NX_UNCORE_W = _NX_CPU_W - 6.0 * 8 / 12


def _gpu_w(mhz: float, cores: int = 1024) -> float:
    return _NX_GPU_W * cores / 1024 * math.pow(mhz / _NX_GPU_MHZ, GPU_EXPONENT)


def _cpu_w(mhz: float, cores: int, uncore: float = 1.0) -> float:
    whole = (_NX_CPU_W - _NX_UNCORE_W + uncore * _NX_UNCORE_W) * cores / 8
    return whole * math.pow(mhz / _NX_CPU_MHZ, CPU_EXPONENT)


# Clocks, cores and CUDA cores: NVIDIA's data sheets. Heat sinks and their time constants: the middle of what such
# sinks have [assume]. Passive trip points are 95 or 99 degC, by kernel; which has which: [assume].
_SILICON: dict[str, _Silicon] = {
    # idle [assume]; half the GPU and half the width of memory of the 8 GB one [calc]
    "orin-nano-4gb": _Silicon(3.8, _gpu_w(625, 512), 625, _cpu_w(1510.4, 6, 0.5), 1510.4, 6, 2.3, 90.0, 95.0),
    # idle: tegrastats of an Orin Nano Super, 4.654 W; the rest of it is an NX with fewer cores [calc]
    "orin-nano-8gb": _Silicon(4.65, _gpu_w(1020), 1020, _cpu_w(1728, 6), 1728, 6, 2.0, 90.0, 99.0),
    # idle as the 16 GB one [assume]
    "orin-nx-8gb": _Silicon(4.6, _gpu_w(1173), 1173, _cpu_w(1984, 6), 1984, 6, 1.0, 120.0, 99.0, 58.0),
    # Tj = 50.8 + 1.32 P: as if it stood in air of 51 degC, with a fan
    "orin-nx-16gb": _Silicon(4.6, _gpu_w(1173), 1173, _cpu_w(1984, 8), 1984, 8, 1.0, 120.0, 99.0, 58.0),
    # 1792 of the 64 GB one's 2048 CUDA cores, 8 of its 12 cores [calc]
    "agx-orin-32gb": _Silicon(
        6.8, 40.4 * 1792 / 2048 * (930 / 1301) ** GPU_EXPONENT, 930, 15.2 * 8 / 12, 2201.6, 8, 0.65, 150.0, 95.0
    ),
    "agx-orin-64gb": _Silicon(6.8, 40.4, 1301, 15.2, 2201.6, 12, 0.6, 150.0, 99.0),
    "agx-xavier": _Silicon(5.5, 20.0, 1377, 12.0, 2265.6, 8, 0.8, 150.0, 95.0),  # [assume], all of it
}

# Measured in that mode, (GPU, CPU) W under stress: the 30 W and 15 W modes also switch parts of the GPU off.
_MEASURED_W: dict[tuple[str, str], tuple[float, float]] = {
    ("agx-orin-64gb", "MAXN"): (40.4, 15.2),
    ("agx-orin-64gb", "50W"): (18.4, 6.0),
    ("agx-orin-64gb", "30W"): (7.6, 5.6),
    ("agx-orin-64gb", "15W"): (5.2, 1.6),
    ("agx-orin-32gb", "30W"): (7.6 * 1792 / 2048, 5.6),  # [assume] as much less as it has fewer cores
}

# The Xavier's modes are not declared with the modules; this is its default one, in round figures [assume].
_XAVIER_30W = PowerMode(3, "30W_ALL", 8, 1200.0, 900.0)

# what the first Orin Nano and NX, before the "Super" update, run their GPU at where nothing caps it
_GPU_BEFORE_SUPER_MHZ = {"orin-nano-8gb": 625.0, "orin-nx-8gb": 765.0, "orin-nx-16gb": 918.0}
_CPU_BEFORE_SUPER_MHZ = {"orin-nano-8gb": 1510.4}

_DECLARED = {module.name: module for module in modules.MODULES}


def declared(name: str) -> modules.Module:
    """What is declared about the module: its rails, quanta and modes."""
    return _DECLARED[name]


def modes(name: str) -> dict[str, PowerMode]:
    """The module's power modes by name; of two with one name, the one of before the "Super" update."""
    module = _DECLARED[name]
    known = {mode.name: mode for mode in (*module.super_modes, *module.modes)}
    return known or {_XAVIER_30W.name: _XAVIER_30W, "MAXN": PowerMode(0, "MAXN", 8)}


def plant_parameters(name: str, mode: str | None = None) -> PlantParameters:
    """The module in that power mode, by its name; None: its default one (of "Super", where no other is declared).

    Raises KeyError where module or mode are not known here.
    """
    silicon, module, found = _SILICON[name], _DECLARED[name], modes(name)
    chosen = _default_mode(module) if mode is None else found[mode]
    before_super = chosen in module.modes
    gpu_mhz, cpu_mhz = silicon.gpu_mhz, silicon.cpu_mhz
    if before_super:
        gpu_mhz = _GPU_BEFORE_SUPER_MHZ.get(name, gpu_mhz)
        cpu_mhz = _CPU_BEFORE_SUPER_MHZ.get(name, cpu_mhz)
    gpu_mhz = min(gpu_mhz, chosen.gpu_mhz or gpu_mhz)
    cpu_mhz = min(cpu_mhz, chosen.cpu_mhz or cpu_mhz)
    gpu_w = silicon.gpu_w * (gpu_mhz / silicon.gpu_mhz) ** GPU_EXPONENT
    cpu_w = silicon.cpu_w * chosen.cpu_cores / silicon.cpu_cores * (cpu_mhz / silicon.cpu_mhz) ** CPU_EXPONENT
    gpu_w, cpu_w = _MEASURED_W.get((name, chosen.name), (gpu_w, cpu_w))
    return PlantParameters(
        name=name,
        mode=chosen.name,
        static_w=silicon.static_w,
        gpu_w=gpu_w,
        cpu_w=cpu_w,
        cpu_cores=chosen.cpu_cores,
        gpu_steps_hz=gpu_steps_hz(gpu_mhz * 1e6),
        sink_c_w=silicon.sink_c_w,
        tau_sink_s=silicon.tau_sink_s,
        passive_c=silicon.passive_c,
        reference_c=silicon.reference_c,
    )


def gpu_steps_hz(highest_hz: float) -> tuple[float, ...]:
    """The GPU's clocks up to a cap, ascending."""
    steps = [GPU_LOWEST_HZ]
    while steps[-1] + GPU_STEP_HZ < highest_hz - 1e6:
        steps.append(steps[-1] + GPU_STEP_HZ)
    return (*(step for step in steps if step < highest_hz - 1e6), highest_hz)


def _default_mode(module: modules.Module) -> PowerMode:
    if module.default_mode is not None:
        return next(mode for mode in module.modes if mode.number == module.default_mode)
    if module.super_default_mode is not None:
        return next(mode for mode in module.super_modes if mode.number == module.super_default_mode)
    return _XAVIER_30W


MODULES: dict[str, PlantParameters] = {name: plant_parameters(name) for name in _SILICON}
"""Every simulated module in its default power mode, by its name."""
