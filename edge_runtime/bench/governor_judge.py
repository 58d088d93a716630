"""How well a budget was held, by what the plant really did: figures of one run, and what would be good ones."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from edge_runtime.bench.governor_best import Best
from edge_runtime.bench.governor_cells import FAULT_S, Setup
from edge_runtime.records.governing import Decision
from edge_runtime.sim.world import GOVERNOR_PERIOD_S, Second

BEGINNING_S = 10
"""So long after the start, and after each change of the load, is not judged by what is settled."""
OVER_SHARE = 0.03
"""A second counts as above the budget from this share on."""
SETTLED_FPS, SETTLED_FPS_LEAST = 0.10, 1.0
"""Frames a second are settled from this share below what they end at, or from this many below, whichever is less."""
SMOOTH_S = 3
STEADY_AFTER_S = 60
STEADY_C, STEADY_OVER_S = 0.5, 30
BACK_FPS = 0.9


@dataclass(frozen=True, slots=True)
class Segment:
    """A span without a jump of the load (s), and the best point for it."""

    start_s: int
    end_s: int
    best: Best


@dataclass(frozen=True, slots=True)
class Figures:
    """One cell under one controller. Shares are 0-1; None: there is nothing to tell.

    `over`: share of the seconds (after the first 10) whose mean power was above the budget by more than 3 %.
    `overshoot`: the highest of these means over the budget, minus 1; `overshoot_start`: of the first 10 s.
    `settle_s`: the longest time from the start or a jump of the load until power is at most 3 % above the budget and
    frames a second (means over 3 s) are at least 90 % of what they end at (the last third), and both stay so; more
    frames while it is still cool are no fault. With a sensor fault it is not told, nor where load never stands still.
    `tj_over_c`: highest Tj minus its limit. `throttled_s`: for how long the hardware slowed itself down. `fps`: frames
    over those of the best point, without the first 10 s of each span; `fps_worst`: of the worst span. `variant`: share
    of that time on the best point's variant. `least`: the worst camera's frames over its `min_fps`, where the best
    point holds all of them. `changes`: of the operating point a minute, where load and temperature are steady.
    With a sensor fault: `fault_over` and `fault_overshoot` as above while it lasts, `safe_periods`: periods of the
    governor until the safe point, `back_s`: from its end until 90 % of the best point's frames flow again.
    """

    cell: str
    controller: str
    over: float
    overshoot: float
    overshoot_start: float
    settle_s: float | None
    tj_over_c: float
    throttled_s: float
    fps: float
    fps_worst: float
    variant: float
    least: float | None
    changes: float | None
    fault_over: float | None = None
    fault_overshoot: float | None = None
    safe_periods: float | None = None
    back_s: float | None = None

    def as_dict(self) -> dict[str, object]:
        return {name: _rounded(value) for name, value in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class Criterion:
    """A figure and from where on it is good. `most`: at most this is; else at least."""

    figure: str
    title: str
    limit: float
    most: bool = True

    def met(self, value: float) -> bool:
        return value <= self.limit if self.most else value >= self.limit


CRITERIA = (
    Criterion("over", "seconds above the budget by > 3 %", 0.005),
    Criterion("overshoot", "overshoot after 10 s", 0.05),
    Criterion("settle_s", "settled after, s", 10.0),
    Criterion("tj_over_c", "max Tj - limit, degC", 1.0),
    Criterion("throttled_s", "throttled by the hardware, s", 0.0),
    Criterion("fps", "frames / best", 0.95, most=False),
    Criterion("least", "worst camera / its min_fps", 0.95, most=False),
    Criterion("variant", "time on the best variant", 0.90, most=False),
    Criterion("changes", "changes a minute when steady", 2.0),
)


def judge(
    setup: Setup,
    controller: str,
    truth: Sequence[Second],
    segments: Sequence[Segment],
    decisions: Sequence[tuple[float, Decision]],
) -> Figures:
    """The figures of a run; `truth` has a second each, `decisions` those that changed something."""
    budget = setup.budget
    assert budget.power_w is not None
    assert budget.temperature_c is not None
    excess = [second.power_w / budget.power_w - 1 for second in truth]
    smooth = cell_is_smooth(setup)
    frames = [sum(second.completed) for second in truth]
    got = sum(sum(frames[each.start_s + BEGINNING_S : each.end_s]) for each in segments)
    best = sum(each.best.fps * (each.end_s - each.start_s - BEGINNING_S) for each in segments)
    ratios = [_fps_ratio(frames, each) for each in segments if each.best.fps > 0]
    faulty = excess[int(FAULT_S[0]) : int(FAULT_S[1])] if setup.faults else None
    return Figures(
        cell=setup.cell.name,
        controller=controller,
        over=_share_over(excess[BEGINNING_S:]),
        overshoot=max(excess[BEGINNING_S:]),
        overshoot_start=max(excess[:BEGINNING_S]),
        settle_s=None if smooth or setup.faults else max(_settle_s(excess, frames, each) for each in segments),
        tj_over_c=max(second.tj_c for second in truth) - budget.temperature_c,
        throttled_s=sum(second.throttled_s for second in truth),
        fps=got / best if best > 0 else 1.0,
        fps_worst=min(ratios, default=1.0),
        variant=_variant_share(truth, segments),
        least=_least(setup, truth, segments),
        changes=None if smooth or setup.faults else _changes_a_minute(truth, segments),
        fault_over=None if faulty is None else _share_over(faulty),
        fault_overshoot=None if faulty is None else max(faulty),
        safe_periods=_safe_periods(decisions) if setup.faults else None,
        back_s=_back_s(frames, segments[-1]) if setup.faults else None,
    )


def cell_is_smooth(setup: Setup) -> bool:
    """Whether its load never stands still."""
    return setup.cell.load == "sine"


def _share_over(excess: Sequence[float]) -> float:
    return sum(each > OVER_SHARE for each in excess) / len(excess)


def _fps_ratio(frames: Sequence[int], segment: Segment) -> float:
    judged = frames[segment.start_s + BEGINNING_S : segment.end_s]
    return sum(judged) / len(judged) / segment.best.fps


def _means(values: Sequence[float], count: int) -> list[float]:
    return [statistics.fmean(values[max(0, index + 1 - count) : index + 1]) for index in range(len(values))]


def _settle_s(excess: Sequence[float], frames: Sequence[int], segment: Segment) -> float:
    over = excess[segment.start_s : segment.end_s]
    fps = _means(frames[segment.start_s : segment.end_s], SMOOTH_S)
    final = statistics.fmean(frames[segment.end_s - max(1, len(over) // 3) : segment.end_s])
    band = max(SETTLED_FPS * final, SETTLED_FPS_LEAST)
    for index in range(len(over) - 1, -1, -1):
        if over[index] > OVER_SHARE or fps[index] < final - band:
            return float(index + 1)
    return 0.0


def _variant_share(truth: Sequence[Second], segments: Sequence[Segment]) -> float:
    hits = total = 0
    for segment in segments:
        judged = truth[segment.start_s + BEGINNING_S : segment.end_s]
        hits += sum(second.variants[0] == segment.best.variant for second in judged)
        total += len(judged)
    return hits / total


def _least(setup: Setup, truth: Sequence[Second], segments: Sequence[Segment]) -> float | None:
    worst: float | None = None
    for segment in segments:
        judged = truth[segment.start_s + BEGINNING_S : segment.end_s]
        if not segment.best.least_held:
            continue
        for index, camera in enumerate(setup.load.cameras):
            offered = sum(second.offered[index] for second in judged) / len(judged)
            least_hz = min(camera.min_hz, offered)
            if least_hz > 0:
                ratio = sum(second.completed[index] for second in judged) / len(judged) / least_hz
                worst = ratio if worst is None else min(worst, ratio)
    return worst


def _changes_a_minute(truth: Sequence[Second], segments: Sequence[Segment]) -> float | None:
    seconds = changes = 0
    for segment in segments:
        for index in range(segment.start_s + STEADY_AFTER_S, segment.end_s):
            if abs(truth[index].tj_c - truth[index - STEADY_OVER_S].tj_c) < STEADY_C:
                seconds += 1
                changes += truth[index].changes
    return changes * 60 / seconds if seconds >= 60 else None


def _safe_periods(decisions: Sequence[tuple[float, Decision]]) -> float | None:
    for t_s, decision in decisions:
        if FAULT_S[0] < t_s <= FAULT_S[1] and decision.state == "safe":
            return math.ceil((t_s - FAULT_S[0]) / GOVERNOR_PERIOD_S - 1e-9)
    return None


def _back_s(frames: Sequence[int], segment: Segment) -> float | None:
    end_s = int(FAULT_S[1])
    fps = _means(frames, SMOOTH_S)
    for index in range(end_s, len(frames)):
        if fps[index] >= BACK_FPS * segment.best.fps:
            return float(index + 1 - end_s)
    return None


def _rounded(value: object) -> object:
    return round(value, 4) if isinstance(value, float) else value
