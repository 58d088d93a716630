"""Candidates of a search written, judged on calibration pictures, and remembered: within the time there is.

A candidate for TensorRT is judged through its imitation in floats (quant_imitate.py), and one that the symmetric
validator does not accept says so and is never taken.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx

from edge_runtime.prepare.quant import Family, QuantPlan
from edge_runtime.prepare.quant_blocks import Block, blocks, int8_share, work_of
from edge_runtime.prepare.quant_check import check_symmetric
from edge_runtime.prepare.quant_graph import planned, quantise
from edge_runtime.prepare.quant_imitate import imitate_symmetric
from edge_runtime.prepare.quant_layers import with_layers_of
from edge_runtime.prepare.quant_pareto import Point
from edge_runtime.prepare.quant_probe import Probe
from edge_runtime.prepare.quant_store import Store

__all__ = ["Budget", "Candidates", "Recipe"]


class Budget:
    """The time of a search; it remembers what it did not allow."""

    def __init__(self, minutes: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = None if minutes is None else minutes * 60
        self._clock = clock
        self._started = clock()
        self.not_tried: list[str] = []

    def allows(self, what: str, part: float = 1.0) -> bool:
        """Whether `part` (0-1) of the time is not over yet: what comes first may not take what the rest needs."""
        if self._limit_s is None or self._clock() - self._started < part * self._limit_s:
            return True
        if what not in self.not_tried:
            self.not_tried.append(what)
        return False


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a model is made INT8: `model` (float) and its `plan`, in which only what can never be INT8 is kept in float;
    `corrected`: the model whose weights and biases the layers in INT8 have."""

    model: Any
    plan: QuantPlan
    corrected: Any


@dataclass(slots=True)
class Candidates:
    """What a search may ask of a candidate, which is a recipe and the blocks that stay in float."""

    family: Family
    probe: Probe
    store: Store
    blocks: tuple[Block, ...]
    work: dict[str, float]
    progress: Callable[[str, int, int], None]
    points: dict[tuple[frozenset[str], frozenset[str]], Point] = field(default_factory=dict)

    @classmethod
    def of(
        cls, model: Any, family: Family, probe: Probe, folder: Path, progress: Callable[[str, int, int], None]
    ) -> Candidates:
        work = work_of(model, probe)
        store = Store(folder / "judged.json", probe.digest())
        return cls(family, probe, store, blocks(model, family, work), work, progress)

    def plan(self, recipe: Recipe, kept: frozenset[str]) -> QuantPlan:
        """The recipe's plan with the blocks of these names in float."""
        nodes = {node for block in self.blocks if block.name in kept for node in block.nodes}
        return replace(recipe.plan, keep_float=recipe.plan.keep_float | nodes)

    def write(self, recipe: Recipe, plan: QuantPlan) -> bytes:
        """The artefact (ONNX)."""
        mixed = with_layers_of(recipe.model, recipe.corrected, planned(recipe.model, plan))
        made: bytes = quantise(mixed, plan).SerializeToString(deterministic=True)
        return made

    def distance(self, recipe: Recipe, kept: frozenset[str], pictures: int) -> float:
        """`Judgement.distance` on so many pictures."""
        data = self._run(self.write(recipe, self.plan(recipe, kept)))
        return self.store.number(f"distance {pictures}", data, lambda: self.probe.distance(data, pictures))

    def judge(self, name: str, recipe: Recipe, kept: frozenset[str]) -> Point:
        """The candidate judged on all pictures, under a name that no other one has."""
        plan = self.plan(recipe, kept)
        key = (kept, plan.operators)
        if key in self.points:
            return self.points[key]
        data = self.write(recipe, plan)
        run = self._run(data)
        found = self.store.judgement(run, lambda: self.probe.judge(run, agreement=True))
        problems: Sequence[str] = ()
        if self.family == "tensorrt":
            problems = check_symmetric(onnx.load_model_from_string(data))
        while any(point.name == name for point in self.points.values()):
            name += "'"
        self.points[key] = Point(
            name,
            plan,
            found.loss,
            1.0 if found.agreement is None else found.agreement,
            found.distance,
            min(found.sqnr_db.values(), default=0.0),
            len(data),
            int8_share(recipe.model, plan, self.work),
            problems=tuple(problems),
        )
        self.progress(f"judged {name}", len(self.points), 0)
        return self.points[key]

    def _run(self, data: bytes) -> bytes:
        return imitate_symmetric(data) if self.family == "tensorrt" else data
