"""How a model is best made INT8: range method, bits of weights, operators, and what makes it lose less.

Each is decided by what was measured on calibration pictures, and a step that brings nothing nearer is not taken. The
worst blocks are in float meanwhile: with them in INT8 nothing else would count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from edge_runtime.prepare.latency import Latencies
from edge_runtime.prepare.quant import Family, Method, QuantPlan
from edge_runtime.prepare.quant_blocks import tail
from edge_runtime.prepare.quant_graph import activations, operators_of
from edge_runtime.prepare.quant_improve import correct_biases, equalise, round_weights, see
from edge_runtime.prepare.quant_judge import Budget, Candidates, Recipe
from edge_runtime.prepare.quant_meter import ActivationMeter
from edge_runtime.prepare.quant_store import Kept

__all__ = ["METHODS", "Improver", "fastest", "first_recipe", "operator_sets"]

METHODS: tuple[Method, ...] = ("minmax", "percentile", "mse", "entropy")
_LAYERS = frozenset(("Conv", "Gemm", "MatMul", "Clip", "Relu"))
_ELEMENTWISE = frozenset(("Add", "AveragePool", "GlobalAveragePool", "LeakyRelu", "MaxPool", "Mul", "Sigmoid"))
_SOME = 32
_Bits = Literal[7, 8]


def operator_sets(family: Family) -> dict[str, frozenset[str]]:
    """What may be INT8 at all, by name: everything first."""
    able = operators_of(family)
    if family == "tensorrt":
        return {"all operators": able}
    return {
        "all operators": able,
        "layers and what is between": able & (_LAYERS | _ELEMENTWISE),
        "layers alone": able & _LAYERS,
    }


def first_recipe(
    model: Any,
    meter: ActivationMeter,
    candidates: Candidates,
    methods: Sequence[Method],
    bits: Sequence[_Bits],
) -> Recipe:
    """The nearest of quick methods and of bits, with everything in INT8."""
    family = candidates.family
    quick: list[Method] = [method for method in methods if method != "entropy"]
    quick = quick or list(methods)
    found: list[tuple[float, int, Recipe]] = []

    def put(method: Method, width: _Bits) -> None:
        ranges = meter.ranges(method, symmetric=family == "tensorrt")
        plan = QuantPlan(family, operators_of(family), tail(model), ranges, method, width)
        recipe = Recipe(model, plan, model)
        found.append((candidates.distance(recipe, frozenset(), _SOME), len(found), recipe))

    for method in quick:
        put(method, bits[0])
    best = min(found)[2].plan.method
    for width in bits[1:]:
        put(best, width)
    return min(found)[2]


class Improver:
    """Steps from a recipe to better ones, with some blocks in float."""

    def __init__(self, candidates: Candidates, kept: frozenset[str], budget: Budget, seed: int) -> None:
        self._candidates = candidates
        self._kept = kept
        self._budget = budget
        self._seed = seed
        self.improved: list[str] = []

    def improve(self, recipe: Recipe, meter: ActivationMeter, methods: Sequence[Method], part: float) -> Recipe:
        """The best that was found within `part` of the time."""
        best, distance = recipe, self._distance(recipe)
        family, probe = self._candidates.family, self._candidates.probe
        symmetric = family == "tensorrt"

        def better(made: Recipe, what: str) -> bool:
            nonlocal best, distance
            found = self._distance(made)
            self._candidates.progress(f"trying {what}", 0, 0)
            if found >= distance:
                return False
            best, distance = made, found
            return True

        for method in methods:
            if method != recipe.plan.method and self._budget.allows(f"ranges by {method}", part):
                plan = replace(recipe.plan, ranges=meter.ranges(method, symmetric=symmetric), method=method)
                better(replace(recipe, plan=plan), f"ranges by {method}")
        if self._budget.allows("rounded weights and corrected biases", part):
            plain, plan = best.model, best.plan
            both = self._corrected(plain, plan, rounded=True)
            if better(Recipe(plain, plan, both), "rounded weights and corrected biases"):
                self.improved += ["rounded weights", "corrected biases"]
            elif self._budget.allows("corrected biases", part):
                alone = self._corrected(plain, plan, rounded=False)
                if better(Recipe(plain, plan, alone), "corrected biases"):
                    self.improved.append("corrected biases")
        equal = equalise(recipe.model)
        if _bytes(equal) != _bytes(recipe.model) and self._budget.allows("equal channels", part):
            again = ActivationMeter(equal, activations(equal), probe.where)
            again.show((Kept(each) for each in probe.inputs(_SOME)), probe.spec)
            plan = replace(best.plan, ranges=again.ranges(best.plan.method, symmetric=symmetric))
            corrected = equal
            if "rounded weights" in self.improved:
                corrected = self._corrected(equal, plan, rounded=True)
            if better(Recipe(equal, plan, corrected), "equal channels"):
                self.improved.append("equal channels")
        return best

    def _distance(self, recipe: Recipe) -> float:
        return self._candidates.distance(recipe, self._kept, _SOME)

    def _corrected(self, model: Any, plan: QuantPlan, *, rounded: bool) -> Any:
        """The model with corrected biases, and weights rounded before: rounding moves means, which biases make good."""

        def find() -> Any:
            seen = see(model, plan, self._candidates.probe, self._seed)
            return correct_biases(round_weights(model, plan, seen) if rounded else model, plan, seen, model)

        ranges = sorted((name, each.low, each.high) for name, each in plan.ranges.items())
        told = repr((rounded, ranges, sorted(plan.operators), plan.weight_bits, self._seed)).encode()
        return self._candidates.store.model(told + _bytes(model), find)


def fastest(found: Latencies, names: Sequence[str]) -> str:
    """Which of the models behind the first one is fastest; the first of those that chance alone may set apart."""
    best = max(found.speed[1:])
    for name, speed, high in zip(names, found.speed[1:], found.high[1:], strict=True):
        if speed == best or high >= best:
            return name
    raise ValueError("no models were measured")


def _bytes(model: Any) -> bytes:
    made: bytes = model.SerializeToString(deterministic=True)
    return made
