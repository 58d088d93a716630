"""What the governor is tried on: modules, specimens of them, air, loads, faults. A cell's name says all of it."""

from __future__ import annotations

import itertools
import math
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from edge_runtime.errors import UsageError
from edge_runtime.records.governing import Budget, Site
from edge_runtime.sim.load import Schedule, SimCamera, SimLoad, SimModel, SimVariant, Sine, Steps, flapping
from edge_runtime.sim.module import plant_parameters
from edge_runtime.sim.plant import PlantParameters
from edge_runtime.sim.sensors import FAULT_KINDS, Fault

DURATION_S = 600.0
FAULT_DURATION_S, FAULT_S = 420.0, (300.0, 320.0)
FAULT_STEP_S = 305.0
"""With a fault, the load rises tenfold in the middle of it."""

# module -> (power mode, budget W). The mode is the fastest one: its watts are what has to be held. The budget binds at
# the full load with nominal figures, and with all watts doubled is still above idle (but for the smallest module).
BUDGETS: dict[str, tuple[str, float]] = {
    "orin-nano-4gb": ("10W", 5.8),
    "orin-nano-8gb": ("MAXN_SUPER", 11.5),
    "orin-nx-8gb": ("40W", 13.0),
    "orin-nx-16gb": ("40W", 13.0),
    "agx-orin-32gb": ("MAXN", 19.0),
    "agx-orin-64gb": ("MAXN", 30.0),
    "agx-xavier": ("MAXN", 18.0),
}
TEMPERATURE_C = 85.0

FACTORS = (0.5, 1.0, 2.0)
TAU_FACTORS = (0.5, 2.0)
AMBIENTS_C = (0, 25, 45)
LOADS = ("steady", "step", "sine", "flapping")

# name, wanted fps, min_fps, priority
_CAMERAS = (("gate", 30.0, 10.0, 2), ("yard", 30.0, 5.0, 1), ("lane", 15.0, 5.0, 1), ("roof", 25.0, 0.0, 0))
# two lanes and 100 frames a second: 90 % busy on the first variant, at full clock
VARIANTS = (SimVariant("fp32-512", 0.018), SimVariant("fp32-416", 0.0123), SimVariant("fp32-320", 0.0082))
_STEP_LOW = 0.1
_STEP_S = (200.0, 400.0)
_SINE = (0.2, 1.0, 300.0)
_FLAP_S = 60.0
_COST_FACTORS = (0.8, 1.25)
"""How far off the costs are that a governor is told of."""
_COSTS_UNKNOWN = 3
"""In one of so many cells it is told of none."""
_CLOCKS = "/clocks"


@dataclass(frozen=True, slots=True)
class Cell:
    """One run: a module whose figures are `power`, ... times the nominal ones, in air of `ambient_c`, with a load (one
    of `LOADS`, or "fault-KIND"). `clocks`: the GPU's clock may be capped."""

    module: str
    power: float
    resistance: float
    tau: float
    leakage: float
    ambient_c: int
    load: str
    clocks: bool = False

    @property
    def name(self) -> str:
        """Says which cell it is: `parse` makes the cell of it."""
        return (
            f"{self.module}/p{self.power:.2f}/r{self.resistance:.2f}/t{self.tau:.2f}/l{self.leakage:.2f}"
            f"/a{self.ambient_c}/{self.load}{_CLOCKS if self.clocks else ''}"
        )

    @property
    def fault(self) -> str | None:
        """The kind of its sensor fault, if it has one."""
        return self.load.removeprefix("fault-") if self.load.startswith("fault-") else None

    @property
    def seed(self) -> int:
        """The same for a cell wherever it is run, with clocks and without."""
        return zlib.crc32(self.name.removesuffix(_CLOCKS).encode())


def parse(name: str) -> Cell:
    """The cell of that name. Raises UsageError."""
    try:
        module, power, resistance, tau, leakage, ambient, load = name.removesuffix(_CLOCKS).split("/")
        cell = Cell(
            module,
            float(power.removeprefix("p")),
            float(resistance.removeprefix("r")),
            float(tau.removeprefix("t")),
            float(leakage.removeprefix("l")),
            int(ambient.removeprefix("a")),
            load,
            name.endswith(_CLOCKS),
        )
    except ValueError:
        cell = None
    if cell is None or not _is_one(cell):
        raise UsageError(
            f"{name!r} is no cell",
            where="--cell",
            remedy="for example orin-nx-16gb/p1.00/r1.00/t1.00/l1.00/a25/step: what the table prints",
        )
    return cell


def _is_one(cell: Cell) -> bool:
    factors = (cell.power, cell.resistance, cell.tau, cell.leakage)
    return (
        cell.module in BUDGETS
        and (cell.load in LOADS or cell.fault in FAULT_KINDS)
        and all(math.isfinite(factor) and factor > 0 for factor in factors)
    )


def grid() -> list[Cell]:
    """Every module, watts and resistance times 0.5, 1, 2, time constants times 0.5, 2, in three airs, with four loads;
    and every fault on every module."""
    cells = [
        Cell(module, power, resistance, tau, 1.0, ambient_c, load)
        for module, power, resistance, tau, ambient_c, load in itertools.product(
            BUDGETS, FACTORS, FACTORS, TAU_FACTORS, AMBIENTS_C, LOADS
        )
    ]
    return cells + [Cell(module, 1, 1, 1, 1, 25, f"fault-{kind}") for module in BUDGETS for kind in FAULT_KINDS]


def sample(count: int, seed: int) -> list[Cell]:
    """So many cells from a Latin hypercube over the factors (0.5 to 2, by their logarithm) with modules, airs and loads
    evenly spread; and every kind of fault once."""
    source = random.Random(seed)

    def spread() -> list[float]:
        cuts = [(index + source.random()) / count for index in range(count)]
        source.shuffle(cuts)
        return [round(0.5 * math.exp(cut * math.log(4)), 2) for cut in cuts]

    def deal(words: Sequence[str] | Sequence[int]) -> list[str | int]:
        dealt = [words[index % len(words)] for index in range(count)]
        source.shuffle(dealt)
        return list(dealt)

    modules, airs, loads = deal(tuple(BUDGETS)), deal(AMBIENTS_C), deal(LOADS)
    factors = zip(spread(), spread(), spread(), spread(), strict=True)
    cells = [
        Cell(str(module), *each, int(ambient_c), str(load))
        for module, each, ambient_c, load in zip(modules, factors, airs, loads, strict=True)
    ]
    names = list(BUDGETS)
    return cells + [
        Cell(names[(index + seed) % len(names)], 1, 1, 1, 1, 25, f"fault-{kind}")
        for index, kind in enumerate(FAULT_KINDS)
    ]


@dataclass(frozen=True, slots=True)
class Setup:
    """A cell as it is run. `nominal`: what the data sheet would say of the module; `plant`: what this specimen is.
    `site`: what a governor is told; costs are off by a factor of 0.8 to 1.25 for each variant, or not known at all."""

    cell: Cell
    nominal: PlantParameters
    plant: PlantParameters
    load: SimLoad
    site: Site
    budget: Budget
    duration_s: float
    faults: tuple[Fault, ...]


def set_up(cell: Cell) -> Setup:
    """The cell's plant, load, budget and faults."""
    mode, power_w = BUDGETS[cell.module]
    nominal = plant_parameters(cell.module, mode)
    plant = nominal.scaled(power=cell.power, thermal_resistance=cell.resistance, tau=cell.tau, leakage=cell.leakage)
    kind = next((kind for kind in FAULT_KINDS if kind == cell.fault), None)
    cameras = tuple(
        SimCamera(name, _schedule(cell, index, hz), ("model",), hz, least_hz, priority)
        for index, (name, hz, least_hz, priority) in enumerate(_CAMERAS)
    )
    load = SimLoad(cameras, (SimModel("model", 2, VARIANTS),), plant.gpu_steps_hz if cell.clocks else ())
    return Setup(
        cell,
        nominal,
        plant,
        load,
        load.site(costs_s=_costs_s(cell)),
        Budget(power_w, TEMPERATURE_C),
        DURATION_S if kind is None else FAULT_DURATION_S,
        () if kind is None else (Fault(kind, *FAULT_S),),
    )


def _costs_s(cell: Cell) -> dict[str, float]:
    if cell.seed % _COSTS_UNKNOWN == 0:
        return {}
    low, high = _COST_FACTORS
    source = random.Random(f"costs {cell.seed}")
    return {each.name: each.busy_s(1) * low * (high / low) ** source.random() for each in VARIANTS}


def _schedule(cell: Cell, index: int, hz: float) -> Schedule:
    if cell.fault is not None:
        return Steps((_STEP_LOW * hz, hz), (FAULT_STEP_S,))
    if cell.load == "step":
        return Steps((_STEP_LOW * hz, hz, _STEP_LOW * hz), _STEP_S)
    if cell.load == "sine":
        low, high, period_s = _SINE
        return Sine(low * hz, high * hz, period_s)
    if cell.load == "flapping" and index == 0:
        return flapping(hz, _FLAP_S, DURATION_S)
    return Steps((hz,))
