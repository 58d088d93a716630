"""The Jetson modules as declared tables: how they are recognised, which rails make up their power, their modes.

Sources: NVIDIA's Jetson Linux Developer Guides (rails, shunts, nvpmodel modes) and the device trees of Linux
(compatible strings, rail labels). What has no public source is not listed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from edge_runtime.hardware.sysfs_files import UnreadableError, read_text

_GIB = 1024**3
_ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class PowerMode:
    """A mode of nvpmodel: its number and name, and what it caps (clocks, not power). None: not capped."""

    number: int
    name: str
    cpu_cores: int
    cpu_mhz: float | None = None
    gpu_mhz: float | None = None


@dataclass(frozen=True, slots=True)
class Module:
    """What is declared about a module.

    `name` as in `hardware = "sim:NAME"`; `parts` NVIDIA's part numbers; `words` a pattern for the device tree's model
    and compatible where the part number is not known; `memory_gib` as it is sold. `rails`: module power is their sum,
    by NVIDIA's names; `other_rails` are parts of those or stand beside them and are never added. `older_names`: what
    a rail was called by older releases. `unlabelled`: the rail of a power monitor that has no label, by chip.
    `quantum_w`: the step of a power reading, W (INA3221: 40 uV over the shunt x bus voltage; the coarsest rail's);
    `current_step_ma` the step of a current. `modes` with nvpmodel's numbers, `super_modes` after the "Super" update;
    empty or partial where not known. `gpu_names`: device-tree or devfreq names of the GPU.
    """

    name: str
    title: str
    parts: tuple[str, ...]
    words: str
    memory_gib: int
    rails: tuple[str, ...]
    other_rails: tuple[str, ...] = ()
    older_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unlabelled: Mapping[str, str] = field(default_factory=dict)
    quantum_w: float | None = None
    current_step_ma: int = 8
    modes: tuple[PowerMode, ...] = ()
    default_mode: int | None = None
    super_modes: tuple[PowerMode, ...] = ()
    super_default_mode: int | None = None
    gpu_names: tuple[str, ...] = ("gpu", "ga10b")

    def power_mode(self, number: int, name: str) -> PowerMode | None:
        """The declared mode with this number and name; None where it is not known. A number alone says nothing."""
        for mode in (*self.super_modes, *self.modes):
            if mode.number == number and mode.name == name.removeprefix("MODE_"):
                return mode
        return None


@dataclass(frozen=True, slots=True)
class Unknown:
    """Which module this is cannot be told, and why: so nobody knows what its power is the sum of."""

    reason: str

    @property
    def rails(self) -> tuple[str, ...]:
        return ()

    @property
    def quantum_w(self) -> None:
        return None


@dataclass(frozen=True, slots=True)
class Recognition:
    """Which module this is, and by what it was recognised."""

    module: Module | Unknown
    because: str


# VDDQ_VDD2_1V8AO is behind VIN_SYS_5V0: adding it would count it twice
_AGX_ORIN_RAILS = ("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0")
_AGX_ORIN_OTHER = ("VDDQ_VDD2_1V8AO",)
# VDD_IN holds the other two
_INPUT = ("VDD_IN",)
_INPUT_OTHER = ("VDD_CPU_GPU_CV", "VDD_SOC")

_15W = PowerMode(1, "15W", 4, 1113.6, 408.0)
_30W = PowerMode(2, "30W", 8, 1728.0, 612.0)
_NX_10W = PowerMode(1, "10W", 4, 1190.4, 612.0)
_NX_25W = PowerMode(3, "25W", 8, 1497.6, 408.0)

MODULES: tuple[Module, ...] = (
    Module(
        "agx-orin-32gb",
        "Jetson AGX Orin 32GB",
        ("p3701-0000", "p3701-0004"),
        "AGX Orin|p3701-",
        32,
        _AGX_ORIN_RAILS,
        _AGX_ORIN_OTHER,
        quantum_w=0.39,
        current_step_ma=20,
        modes=(PowerMode(0, "MAXN", 8), _15W, _30W, PowerMode(3, "40W", 8, 1497.6, 816.0)),
        default_mode=2,
    ),
    Module(
        "agx-orin-64gb",
        "Jetson AGX Orin 64GB",
        ("p3701-0000", "p3701-0005", "p3701-0008"),
        "AGX Orin|p3701-",
        64,
        _AGX_ORIN_RAILS,
        _AGX_ORIN_OTHER,
        quantum_w=0.39,
        current_step_ma=20,
        modes=(PowerMode(0, "MAXN", 12), _15W, _30W, PowerMode(3, "50W", 12, 1497.6, 816.0)),
        default_mode=2,
    ),
    Module(
        "orin-nx-8gb",
        "Jetson Orin NX 8GB",
        ("p3767-0001",),
        "Orin NX",
        8,
        _INPUT,
        _INPUT_OTHER,
        quantum_w=0.04,
        modes=(PowerMode(0, "MAXN", 6), PowerMode(3, "20W", 6, 1497.6, 408.0)),
        super_modes=(PowerMode(4, "40W", 6, 1984.0, 1173.0),),
        super_default_mode=4,
    ),
    Module(
        "orin-nx-16gb",
        "Jetson Orin NX 16GB",
        ("p3767-0000",),
        "Orin NX",
        16,
        _INPUT,
        _INPUT_OTHER,
        quantum_w=0.04,
        modes=(PowerMode(0, "MAXN", 8), _NX_10W, PowerMode(2, "15W", 4, 1651.2, 612.0), _NX_25W),
        default_mode=2,
        super_modes=(
            PowerMode(0, "MAXN_SUPER", 8),
            PowerMode(2, "15W", 4, 1420.8, 612.0),
            _NX_25W,
            PowerMode(4, "40W", 8, 1497.6, 1173.0),
        ),
        super_default_mode=4,
    ),
    Module(
        "orin-nano-4gb",
        "Jetson Orin Nano 4GB",
        ("p3767-0004",),
        "Orin Nano",
        4,
        _INPUT,
        _INPUT_OTHER,
        quantum_w=0.04,
        modes=(
            PowerMode(0, "10W", 6),
            PowerMode(1, "7W_AI", 4, 806.4, 408.0),
            PowerMode(2, "7W_CPU", 4, 960.0, 306.0),
        ),
        default_mode=0,
    ),
    Module(
        "orin-nano-8gb",
        "Jetson Orin Nano 8GB",
        ("p3767-0003", "p3767-0005"),
        "Orin Nano",
        8,
        _INPUT,
        _INPUT_OTHER,
        quantum_w=0.04,
        modes=(PowerMode(0, "15W", 6), PowerMode(1, "7W", 4, 960.0, 408.0)),
        default_mode=0,
        super_modes=(
            PowerMode(0, "15W", 6, 1497.6, 612.0),
            PowerMode(1, "25W", 6, 1344.0, 918.0),
            PowerMode(2, "MAXN_SUPER", 6, 1728.0, 1020.0),
        ),
        super_default_mode=1,
    ),
    Module(
        "agx-xavier",
        "Jetson AGX Xavier",
        ("p2888-0001", "p2888-0003", "p2888-0004", "p2888-0005", "p2888-0006", "p2888-0008"),
        "AGX Xavier|Jetson-AGX|jetson-xavier$|p2888-|p2972-",
        32,
        # six supplies side by side: here, and only here, module power is all of them
        ("GPU", "CPU", "SOC", "CV", "VDDRQ", "SYS5V"),
        quantum_w=0.15,
        gpu_names=("gv11b", "gpu"),
    ),
    Module(
        "xavier-nx",
        "Jetson Xavier NX",
        ("p3668-0000", "p3668-0001", "p3668-0003"),
        "Xavier NX|p3668-",
        8,
        _INPUT,
        _INPUT_OTHER,
        older_names={"VDD_IN": ("5V_IN",)},
        quantum_w=0.04,
        gpu_names=("gv11b", "gpu"),
    ),
    Module(
        "tx2",
        "Jetson TX2",
        ("p3310-1000", "p3489-0000", "p3489-0888", "p3636-0001"),
        "TX2|quill|p3310-|p3489-|p3636-",
        8,
        _INPUT,
        ("VDD_SYS_GPU", "VDD_SYS_SOC", "VDD_SYS_CPU", "VDD_SYS_DDR", "VDD_4V0_WIFI"),
        gpu_names=("gp10b", "gpu"),
    ),
    Module(
        "nano",
        "Jetson Nano",
        ("p3448-0000", "p3448-0002", "p3448-0003"),
        "Jetson Nano|jetson-nano|p3448-",
        4,
        ("POM_5V_IN",),
        ("POM_5V_GPU", "POM_5V_CPU"),
        older_names={"POM_5V_IN": ("VDD_IN",)},
        quantum_w=0.04,
        gpu_names=("gpu", "gm20b"),
    ),
    Module(
        "thor",
        "Jetson Thor",
        ("p3834-0005", "p3834-0008"),
        "Thor|p3834-",
        128,
        # measured on the carrier board by an INA238, which has no label of its own
        ("VIN",),
        ("VDD_GPU", "VDD_CPU_SOC_MSS", "VIN_SYS_5V0"),
        unlabelled={"ina238": "VIN"},
        current_step_ma=20,
        gpu_names=("gpu-gpc-0", "gpu"),
    ),
)


def identify(root: Path = _ROOT) -> Module | Unknown:
    """The module whose files lie below `root`; see `recognise`."""
    return recognise(root).module


def recognise(root: Path = _ROOT) -> Recognition:
    """The module by the part number in the device tree's `compatible`, else by its words there or in `model`.

    Where several modules are meant (the AGX Orin developer kit has either memory) MemTotal decides. Part numbers of
    carrier boards are passed over.
    """
    compatible = _device_tree(root, "compatible")
    model = " ".join(_device_tree(root, "model"))
    if not compatible and not model:
        return _unknown("no device tree below /proc/device-tree: this is not a Jetson")
    for entry in compatible:
        parts = re.findall(r"p\d{4}-\d{4}", entry)
        if found := [module for module in MODULES if not set(parts).isdisjoint(module.parts)]:
            return _by_memory(found, f"compatible {entry!r}", root)
    for where, text in (("model", model), *(("compatible", entry) for entry in compatible)):
        if found := [module for module in MODULES if re.search(module.words, text)]:
            return _by_memory(found, f"{where} {text!r}", root)
    return _unknown(f"{model or compatible[0]!r} is no Jetson module that is known here")


def module_power(module: Module | Unknown, rails_w: Mapping[str, float]) -> tuple[float | None, str | None]:
    """Module power, W, by the declared rails and nothing else; or None and why.

    `rails_w`: every rail that could be read, W. A declared rail that is missing makes the whole unavailable: a part
    of it would look like a device that saves power. So does a sum that cannot be: a module that runs takes some.
    """
    if isinstance(module, Unknown):
        return None, f"which rails make up module power is not known: {module.reason}"
    found: list[float] = []
    for rail in module.rails:
        names = (rail, *module.older_names.get(rail, ()))
        watts = next((rails_w[name] for name in names if name in rails_w), None)
        if watts is None:
            return None, f"{rail} is missing, and module power of a {module.title} is {' + '.join(module.rails)}"
        found.append(watts)
    total = sum(found)
    if not (math.isfinite(total) and total > 0):
        return None, f"{' + '.join(module.rails)} is {total} W, which cannot be"
    return total, None


def _by_memory(found: list[Module], by: str, root: Path) -> Recognition:
    if len(found) == 1:
        return Recognition(found[0], by)
    found = sorted(found, key=lambda module: module.memory_gib)
    total = _memory_bytes(root)
    if total is None:
        return Recognition(found[0], f"{by}; MemTotal cannot be read, so the smaller one is assumed")
    # MemTotal is what the firmware left of it
    module = next((module for module in found if total <= module.memory_gib * _GIB), found[-1])
    return Recognition(module, f"{by} and MemTotal {total / _GIB:.1f} GiB")


def _unknown(reason: str) -> Recognition:
    return Recognition(Unknown(reason), reason)


def _device_tree(root: Path, name: str) -> list[str]:
    for folder in ("proc/device-tree", "sys/firmware/devicetree/base"):
        try:
            text = read_text(root / folder / name, 4096)
        except UnreadableError:
            continue
        return [entry for entry in text.split("\0") if entry]
    return []


def _memory_bytes(root: Path) -> int | None:
    try:
        found = re.search(r"^MemTotal:\s+([0-9]{1,15}) kB", read_text(root / "proc/meminfo", 65536), re.MULTILINE)
    except UnreadableError:
        return None
    return None if found is None else int(found[1]) * 1024
