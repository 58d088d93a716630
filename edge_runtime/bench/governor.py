"""The governor on simulated modules: how well it holds a budget, and what that costs in frames. In virtual time."""

from __future__ import annotations

import math
import multiprocessing
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

from edge_runtime.bench.governor_baselines import BangBang, Static, Uncontrolled
from edge_runtime.bench.governor_best import Best, best_point
from edge_runtime.bench.governor_cells import FAULT_S, Cell, Setup, parse, set_up
from edge_runtime.bench.governor_judge import (
    BEGINNING_S,
    CRITERIA,
    FAULT_CRITERIA,
    Figures,
    Segment,
    cell_is_smooth,
    judge,
)
from edge_runtime.sim.module import declared
from edge_runtime.sim.plant import Plant
from edge_runtime.sim.sensors import SimSensor
from edge_runtime.sim.world import Steered, World, steer

Factory = Callable[[Setup], Steered]

SMOOTH_SEGMENT_S, SMOOTH_BEST_S = 30, 5
"""A load that never stands still is judged in spans of the first length, by the best points for each of the second."""


def _governed(_: Setup) -> Steered:
    from edge_runtime.governor.controller import Controller

    return Controller()


CONTROLLERS: dict[str, Factory] = {
    "governed": _governed,
    "uncontrolled": lambda _: Uncontrolled(),
    "static": Static,
    "bang-bang": lambda _: BangBang(),
}


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A cell that no governor could hold, and why."""

    cell: str
    reason: str


@dataclass(frozen=True, slots=True)
class Row:
    """A criterion over all cells of a controller: `met` share of the cells, the median and the worst figure (infinite:
    never), and the cell that had it."""

    title: str
    cells: int
    met: float
    median: float
    worst: float
    worst_cell: str


@dataclass(frozen=True, slots=True)
class GovernorBench:
    """All figures, and the cells that were left out."""

    figures: list[Figures]
    left_out: list[LeftOut]

    def controllers(self) -> list[str]:
        """Those that took part, in order."""
        return list(dict.fromkeys(each.controller for each in self.figures))

    def of(self, controller: str, *, faults: bool) -> list[Figures]:
        """A controller's figures, with sensor faults or without."""
        return [
            each for each in self.figures if each.controller == controller and (each.fault_over is not None) == faults
        ]

    def summary(self, controller: str, *, faults: bool) -> list[Row]:
        """A row for each criterion, over the cells without sensor faults or with them."""
        found = self.of(controller, faults=faults)
        rows = []
        for criterion in FAULT_CRITERIA if faults else CRITERIA:
            told: list[tuple[float, str]] = []
            for each in found:
                value = getattr(each, criterion.figure)
                if faults and value is None:
                    value = math.inf
                if value is not None and (not criterion.kinds or parse(each.cell).fault in criterion.kinds):
                    told.append((value, each.cell))
            if not told:
                continue
            worst, cell = max(told) if criterion.most else min(told)
            values = [value for value, _ in told]
            met = sum(criterion.met(value) for value in values) / len(values)
            rows.append(Row(criterion.title, len(told), met, statistics.median(values), worst, cell))
        return rows

    def as_dict(self) -> dict[str, object]:
        return {
            "criteria": {
                each.title: f"{'at most' if each.most else 'at least'} {each.limit:g}"
                for each in (*CRITERIA, *FAULT_CRITERIA)
            },
            "summary": {
                controller: [
                    {
                        "criterion": row.title,
                        "cells": row.cells,
                        "met": round(row.met, 4),
                        "median": row.median if math.isfinite(row.median) else "never",
                        "worst": row.worst if math.isfinite(row.worst) else "never",
                        "worst_cell": row.worst_cell,
                    }
                    for faults in (False, True)
                    for row in self.summary(controller, faults=faults)
                ]
                for controller in self.controllers()
            },
            "left_out": {each.cell: each.reason for each in self.left_out},
            "cells": [each.as_dict() for each in self.figures],
        }


def run_cell(cell: Cell, controller: str, factory: Factory | None = None) -> Figures | LeftOut:
    """One run of a cell under the controller of that name, or under the one that `factory` makes."""
    setup = set_up(cell)
    segments = find_segments(setup)
    if isinstance(segments, LeftOut):
        return segments
    sensor = SimSensor(declared(cell.module), seed=cell.seed, faults=setup.faults, mode=setup.plant.mode)
    world = World(Plant(setup.plant, cell.ambient_c), setup.load, sensor, seed=cell.seed)
    steered = (factory or CONTROLLERS[controller])(setup)
    decisions = steer(world, steered, setup.site, setup.budget, setup.duration_s)
    return judge(setup, controller, world.truth, segments, decisions)


def find_segments(setup: Setup) -> list[Segment] | LeftOut:
    """The spans without a jump of the load and without a fault, each with its best points."""
    plant = Plant(setup.plant, setup.cell.ambient_c)
    end_s = int(setup.duration_s)
    smooth = cell_is_smooth(setup)
    if setup.faults:
        spans = [(0, int(FAULT_S[0])), (int(FAULT_S[1]), end_s)]
    elif smooth:
        spans = list(pairwise(range(0, end_s + 1, SMOOTH_SEGMENT_S)))
    else:
        spans = list(pairwise([0, *(int(each) for each in setup.load.changes_s() if each < end_s), end_s]))
    segments = []
    known: dict[tuple[float, ...], Best] = {}
    for start_s, end_s in spans:
        bests: list[Best] = []
        step_s = SMOOTH_BEST_S if smooth else end_s - start_s
        for from_s in range(start_s, end_s, step_s):
            until_s = from_s + step_s
            offered = tuple(camera.schedule.mean_hz(from_s, until_s) for camera in setup.load.cameras)
            best = known.get(offered) or best_point(plant, setup.load, offered, setup.budget)
            if best is None:
                reason = f"from {from_s} s to {until_s} s the cameras alone take it above a budget"
                return LeftOut(setup.cell.name, f"{reason}, without a single frame inferred")
            known[offered] = best
            bests += [best] * step_s
        beginning_s = 0 if smooth and start_s else BEGINNING_S
        segments.append(Segment(start_s, end_s, tuple(bests), beginning_s))
    return segments


def run_cells(
    cells: Sequence[Cell],
    controllers: Sequence[str],
    *,
    jobs: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> GovernorBench:
    """Every cell under every controller, on `jobs` processes. `progress` is told how many runs are done, and of how
    many."""
    work = [(cell, controller) for cell in cells for controller in controllers]
    figures: list[Figures] = []
    left_out: dict[str, LeftOut] = {}
    for number, found in enumerate(_results(work, jobs), start=1):
        if isinstance(found, LeftOut):
            left_out[found.cell] = found
        else:
            figures.append(found)
        if progress is not None:
            progress(number, len(work))
    order = {name: index for index, name in enumerate(controllers)}
    figures.sort(key=lambda each: order[each.controller])
    return GovernorBench(figures, list(left_out.values()))


def _results(work: Sequence[tuple[Cell, str]], jobs: int) -> Iterator[Figures | LeftOut]:
    if jobs == 1:
        yield from map(_run, work)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(_run, work, chunksize=4)


def _run(work: tuple[Cell, str]) -> Figures | LeftOut:
    return run_cell(*work)
