"""The search for what of a model becomes INT8: on calibration pictures, against the float model alone.

First blocks are made INT8 alone or in groups, which says how sensitive they are (quant_sense.py). With the worst of
them in float it is found what makes INT8 lose less (quant_recipe.py). Then, by two orders, sensitivity for the work
that float costs and sensitivity alone, the fewest blocks that have to stay in float are looked for, and blocks
are given back to INT8 one by one while the loss allows it. What is left is measured in turns with the float model,
since fewer operations in INT8 can be faster: each border costs a conversion. The fastest of many has been lucky too, so
the one that is chosen is measured afresh.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from edge_runtime.prepare.latency import Latencies, measure_latency
from edge_runtime.prepare.quant import Family, Method
from edge_runtime.prepare.quant_blocks import Block, last_blocks
from edge_runtime.prepare.quant_judge import Budget, Candidates, Recipe
from edge_runtime.prepare.quant_meter import ActivationMeter
from edge_runtime.prepare.quant_pareto import Point, choose, front
from edge_runtime.prepare.quant_probe import Probe
from edge_runtime.prepare.quant_recipe import METHODS, Improver, fastest, first_recipe, operator_sets
from edge_runtime.prepare.quant_said import said
from edge_runtime.prepare.quant_sense import sense
from edge_runtime.records.spec import InputSpec

__all__ = ["Measure", "SearchResult", "search"]

MIN_AGREEMENT = 0.97
"""Of a classifier: share of pictures with the same first class."""
LEAST_SHARE = 0.05
"""Of the multiplications: with fewer in INT8 an artefact is a float model with borders in it."""
_FEW = 4
"""Pictures that a block is sensed on: many blocks, and only their order counts."""
_MEASURED = 6
_GIVEN_BACK = 8
_FINE = 20
"""Of all blocks: how exact the number of those in float has to be."""
_ROUNDS, _ROUNDS_AFRESH = 20, 150
_Progress = Callable[[str, int, int], None]
_Bits = Literal[7, 8]


class Measure(Protocol):
    """As `measure_latency`."""

    def __call__(
        self, models: Sequence[bytes], spec: InputSpec, *, where: str, rounds: int, limit_s: float, seed: int
    ) -> Latencies: ...


@dataclass(frozen=True, slots=True)
class SearchResult:
    """`points`: all that were judged; `front` of them; `chosen` and its `model` (ONNX), None where float is better.

    `sensitivities`: blocks by what they alone in INT8 change (`Judgement.distance`, 0-1), the worst first; of blocks
    that were only measured together, their part. `improved`: what was found to help. `said`: in one line what INT8
    brings here. `not_tried`: what the time did not allow.
    """

    points: tuple[Point, ...]
    front: tuple[Point, ...]
    chosen: Point | None
    model: bytes | None
    sensitivities: tuple[tuple[str, float], ...]
    improved: tuple[str, ...]
    float_ms: float | None
    said: str
    not_tried: tuple[str, ...]


def search(
    model: Any,
    meter: ActivationMeter,
    *,
    family: Family,
    probe: Probe,
    search_loss: float,
    folder: Path,
    method: Method | None = None,
    weight_bits: _Bits | None = None,
    min_agreement: float = MIN_AGREEMENT,
    minutes: float | None = None,
    seed: int = 0,
    progress: _Progress = lambda *_: None,
    clock: Callable[[], float] = time.monotonic,
    measure: Measure = measure_latency,
) -> SearchResult:
    """Search for the fastest within `search_loss`; for family "tensorrt", which is not here, for the one with most
    multiplications in INT8.

    `model`: as `float_model` makes it. `search_loss`: relative, on calibration pictures, against the float model's own
    answers (`Judgement.loss`). `folder`: exists; what was judged is kept there by digest, so that a search that was
    stopped goes on where it was. `method`: the only range method to try. `weight_bits`: 7 or 8; left out, for the
    family "onnxruntime" the nearer on this processor: where it has no VNNI, pairs of products of 8 bits saturate.
    `min_agreement` (0-1): of a classifier, the share of pictures whose first class has to stay. `minutes`: bounds it,
    by `clock` (s); what is begun is ended, so that it may take a little longer. `seed`: of all that is drawn.

    Without a bound on time the same arguments give the same points on the same set of operators, which is the one that
    is measured to be fastest; which point is chosen follows from what is measured too.
    """
    candidates = Candidates.of(model, family, probe, folder, progress)
    budget = Budget(minutes, clock)
    needed = min_agreement if probe.classifies else 0.0
    work = _Search(candidates, budget, search_loss, needed, measure, seed)
    methods: tuple[Method, ...] = (method,) if method else METHODS
    bits: tuple[_Bits, ...] = (weight_bits,) if weight_bits else ((7, 8) if family == "onnxruntime" else (8,))
    recipe = first_recipe(model, meter, candidates, methods, bits)
    recipe = work.with_operators(recipe)
    work.sense(recipe)
    improver = Improver(candidates, work.worst(), budget, seed)
    recipe = improver.improve(recipe, meter, methods, 0.5)
    work.look_around(recipe)
    points, float_ms = work.measured(recipe)
    chosen = choose(points, search_loss, min_agreement=needed, least_share=LEAST_SHARE)
    lucky = chosen
    if chosen is not None and family == "onnxruntime":
        lucky = work.afresh(recipe, chosen)
        points = [lucky if point is chosen else point for point in points]
        chosen = lucky if (lucky.speed_low or 0.0) > 1.0 else None
    return SearchResult(
        tuple(points),
        front(points),
        chosen,
        None if chosen is None else candidates.write(recipe, chosen.plan),
        tuple(work.harms.items()),
        tuple(improver.improved),
        float_ms,
        said(family, points, chosen, lucky, search_loss, needed, LEAST_SHARE),
        tuple(budget.not_tried),
    )


class _Search:
    def __init__(
        self, candidates: Candidates, budget: Budget, limit: float, needed: float, measure: Measure, seed: int
    ) -> None:
        self._candidates = candidates
        self._blocks = candidates.blocks
        self._names = frozenset(block.name for block in candidates.blocks)
        self._budget = budget
        self._limit = limit
        self._needed = needed
        self._measure = measure
        self._seed = seed
        self.harms: Mapping[str, float] = {}

    def with_operators(self, recipe: Recipe) -> Recipe:
        """With the set of operators that runs fastest here, everything else in INT8."""
        sets = operator_sets(self._candidates.family)
        if len(sets) == 1:
            return recipe
        recipes = {name: replace(recipe, plan=replace(recipe.plan, operators=each)) for name, each in sets.items()}
        plans = [self._candidates.write(each, each.plan) for each in recipes.values()]
        names = list(recipes)
        # kept, as a search that goes on has to go on with the same set
        place = self._candidates.store.number(
            "operators", b"".join(plans), lambda: float(names.index(fastest(self._times(plans, _ROUNDS), names)))
        )
        return recipes[names[int(place)]]

    def sense(self, recipe: Recipe) -> None:
        """How far blocks alone in INT8 take the answers."""
        done = 0

        def harm_of(group: frozenset[str]) -> float:
            nonlocal done
            done += 1
            harm = self._candidates.distance(recipe, self._names - group, _FEW)
            self._candidates.progress("sensitivities", done, 0)
            return harm

        names = [block.name for block in self._blocks]
        self.harms = sense(names, harm_of, lambda: self._budget.allows("sensitivities of all single blocks", 0.3))

    def worst(self) -> frozenset[str]:
        """The fewest blocks that do half of the harm (as noise adds up, by squares)."""
        whole = sum(harm**2 for harm in self.harms.values())
        found: list[str] = []
        for name in self.harms:
            if whole <= 0 or sum(self.harms[each] ** 2 for each in found) >= whole / 2:
                break
            found.append(name)
        return frozenset(found)

    def look_around(self, recipe: Recipe) -> None:
        """Judge candidates: everything, then what has to stay in float."""
        everything = self._judge("everything", recipe, frozenset())
        if self._good(everything):
            return
        last = last_blocks(recipe.model, self._blocks)
        ends = last | {block.name for block in self._blocks[:1]}
        for name, kept in (("last layers in float", last), ("first and last layers in float", ends)):
            if self._budget.allows(name, 0.85):
                self._judge(name, recipe, kept)
        by_price = sorted(self._blocks, key=self._price, reverse=True)
        by_harm = sorted(self._blocks, key=lambda block: -self.harms[block.name])
        for name, order in (("sensitive for their work", by_price), ("sensitive", by_harm)):
            self._narrow(name, recipe, order, everything)
        if (best := self._best()) is not None:
            self._give_back(recipe, best)
            self._others(recipe)

    def measured(self, recipe: Recipe) -> tuple[list[Point], float | None]:
        """The points, those of most interest with their times, and the float model's time (ms)."""
        points = list(self._candidates.points.values())
        if self._candidates.family == "tensorrt":
            return points, None
        good = sorted(
            (point for point in points if self._good(point)), key=lambda point: (-point.int8_share, point.loss)
        )
        timed = good[: _MEASURED - 2]
        near = [point for point in front(points) if point not in timed]
        room = _MEASURED - len(timed)
        timed += [near[index * len(near) // room] for index in range(min(room, len(near)))]
        timed = list({point.name: point for point in timed}.values())
        self._candidates.progress("measuring", 0, len(timed))
        found = self._times([self._candidates.write(recipe, point.plan) for point in timed], _ROUNDS)
        times = {point.name: _timed(point, found, place + 1) for place, point in enumerate(timed)}
        return [times.get(point.name, point) for point in points], found.median_ms[0]

    def afresh(self, recipe: Recipe, point: Point) -> Point:
        """The point with times that had no part in its being chosen."""
        found = self._times([self._candidates.write(recipe, point.plan)], _ROUNDS_AFRESH)
        return _timed(point, found, 1)

    def _times(self, models: Sequence[bytes], rounds: int) -> Latencies:
        probe = self._candidates.probe
        return self._measure(
            [probe.model, *models], probe.spec, where=probe.where, rounds=rounds, limit_s=30.0, seed=self._seed
        )

    def _judge(self, name: str, recipe: Recipe, kept: frozenset[str]) -> Point:
        return self._candidates.judge(name, recipe, kept)

    def _narrow(self, name: str, recipe: Recipe, order: Sequence[Block], seen: Point) -> None:
        """The fewest of the first blocks of an order that have to be in float, all of them being enough: guessed by
        what is left of the harm, and by halving where guesses do not help."""
        left = [sum(self.harms[block.name] ** 2 for block in order[place:]) ** 0.5 for place in range(len(order) + 1)]
        low, high, per_harm = 0, len(order), self._excess(seen) / max(left[0], 1e-12)
        while high - low > max(1, len(order) // _FINE) and self._budget.allows(f"blocks in float, {name}", 0.9):
            guess = next(place for place in range(len(order) + 1) if per_harm * left[place] <= 1)
            # a guess at an end says little: then the middle
            middle = guess if low + 1 < guess < high - 1 else (low + high) // 2
            if sum(block.share for block in order[middle:]) < LEAST_SHARE:
                high = middle  # not worth asking
                continue
            kept = frozenset(block.name for block in order[:middle])
            point = self._judge(f"{middle} in float, {name}", recipe, kept)
            if self._good(point):
                high = middle
            else:
                low = middle
            per_harm = self._excess(point) / max(left[middle], 1e-12)

    def _excess(self, point: Point) -> float:
        """What a point loses by what it may; above 1 it is too much."""
        apart = (1 - point.agreement) / max(1 - self._needed, 1e-9) if self._needed else 0.0
        return max(point.loss / max(self._limit, 1e-9), apart)

    def _give_back(self, recipe: Recipe, best: Point) -> None:
        """Blocks in float made INT8 again while the loss allows it, those of most work for their harm first."""
        kept = self._kept(best)
        waiting = [block for block in sorted(self._blocks, key=self._price) if block.name in kept]
        for block in waiting[:_GIVEN_BACK]:
            if not self._budget.allows("more blocks given back", 0.95):
                return
            fewer = kept - {block.name}
            if self._good(self._judge(f"{len(fewer)} in float, refined", recipe, fewer)):
                kept = fewer

    def _others(self, recipe: Recipe) -> None:
        """The best once more with each other set of operators."""
        best = self._best()
        for name, operators in operator_sets(self._candidates.family).items():
            if best is None or operators == recipe.plan.operators or not self._budget.allows(name, 1.0):
                continue
            other = replace(recipe, plan=replace(recipe.plan, operators=operators))
            self._judge(f"{best.name}, {name}", other, self._kept(best))

    def _best(self) -> Point | None:
        good = [point for point in self._candidates.points.values() if self._good(point)]
        return max(good, key=lambda point: (point.int8_share, -point.loss), default=None)

    def _kept(self, point: Point) -> frozenset[str]:
        return next(key[0] for key, each in self._candidates.points.items() if each is point)

    def _price(self, block: Block) -> float:
        return self.harms[block.name] ** 2 / (block.share + 1e-3)

    def _good(self, point: Point) -> bool:
        return point.loss <= self._limit and point.agreement >= self._needed and not point.problems


def _timed(point: Point, found: Latencies, place: int) -> Point:
    return replace(
        point, latency_ms=found.median_ms[place], float_ms=found.median_ms[0], speed=found.speed[place],
        speed_low=found.low[place], speed_high=found.high[place],
    )  # fmt: skip
