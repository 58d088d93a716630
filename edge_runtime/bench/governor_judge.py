"""How well a budget was held, by what the plant really did: figures of one run, and what would be good ones."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from edge_runtime.bench.governor_best import Best
from edge_runtime.bench.governor_cells import FAULT_S, Setup
from edge_runtime.records.governing import Decision
from edge_runtime.sim.sensors import FaultKind
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
STEADY_LEAST_S = 60
WORST_LEAST_S = 20
"""Shorter spans say too little to be judged one by one."""
BACK_FPS = 0.9


@dataclass(frozen=True, slots=True)
class Segment:
    """A span without a jump of the load (s), the best point for each of its seconds, and how much of its beginning is
    not judged."""

    start_s: int
    end_s: int
    bests: tuple[Best, ...]
    beginning_s: int = BEGINNING_S

    @property
    def judged(self) -> range:
        """Its seconds but for those at the beginning."""
        return range(self.start_s + self.beginning_s, self.end_s)

    @property
    def best_frames(self) -> float:
        """What the best point would do in the seconds that are judged."""
        return sum(best.fps for best in self.bests[self.beginning_s :])

    def frames(self, frames: Sequence[int]) -> float:
        """How many of a run's frames (by second) count: no more than the best point's, so that a span in which a
        lighter variant did more makes up for no other one."""
        return min(sum(frames[index] for index in self.judged), self.best_frames)


@dataclass(frozen=True, slots=True)
class Figures:
    """One cell under one controller. Shares are 0-1; None: there is nothing to tell.

    `over`: share of the seconds (after the first 10) whose mean power was above the budget by more than 3 %.
    `overshoot`: the highest of these means over the budget, minus 1; `overshoot_start`: of the first 10 s.
    `settle_s`: the longest time from the start or a jump of the load until power is at most 3 % above the budget and
    frames a second (means over 3 s) are at least 90 % of what they end at (the last third), and both stay so; more
    frames while it is still cool are no fault. With a sensor fault it is not told, nor where load never stands still.
    `tj_over_c`: highest Tj minus its limit. `throttled_s`: for how long the hardware slowed itself down. `fps`: frames
    over those of the best point, without the first 10 s after each jump and at most as many as its in each span;
    `fps_worst`: of the worst span that has 20 s or more left. A load that never stands still is cut into spans of 30 s,
    and compared with the best point for every 5 s. `variant`: share of that time on the best point's variant. `least`:
    the worst camera's frames over its `min_fps`, where the best point holds all of them. `changes`: of the operating
    point a minute where the load has not changed for a minute, from when the mean temperature of 30 s is within 0.5
    degC of that before, but at least in the last minute of each span; None: there is no such minute.
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
    fps_worst: float | None
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
    """A figure and from where on it is good. `most`: at most this is; else at least. `kinds`: of the sensor faults that
    it is for; empty: it is for all."""

    figure: str
    title: str
    limit: float
    most: bool = True
    kinds: tuple[FaultKind, ...] = ()

    def met(self, value: float) -> bool:
        return value <= self.limit if self.most else value >= self.limit


CRITERIA = (
    Criterion("over", "seconds above the budget by > 3 %", 0.005),
    Criterion("overshoot", "overshoot after 10 s", 0.05),
    Criterion("settle_s", "settled after, s", 10.0),
    Criterion("tj_over_c", "max Tj - limit, degC", 1.0),
    Criterion("throttled_s", "throttled by the hardware, s", 0.0),
    Criterion("fps", "frames / best", 0.95, most=False),
    Criterion("fps_worst", "frames / best, worst span", 0.95, most=False),
    Criterion("least", "worst camera / its min_fps", 0.95, most=False),
    Criterion("variant", "time on the best variant", 0.90, most=False),
    Criterion("changes", "changes a minute when steady", 2.0),
)
# never over the budget: 1 % for the noise of a second. Frozen readings and spikes are readings like others: nobody can
# tell them at once, and no safe point is asked for
FAULT_CRITERIA = (
    Criterion("fault_overshoot", "overshoot during a sensor fault", 0.01),
    Criterion(
        "safe_periods",
        "periods until the safe point",
        3.0,
        kinds=("missing", "eio", "stale", "minus_256", "zero"),
    ),
    Criterion("back_s", "back after a sensor fault, s", 30.0),
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
    got = sum(each.frames(frames) for each in segments)
    best = sum(each.best_frames for each in segments)
    ratios = [
        each.frames(frames) / each.best_frames
        for each in segments
        if each.best_frames > 0 and len(each.judged) >= WORST_LEAST_S
    ]
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
        fps_worst=min(ratios, default=None),
        variant=_variant_share(truth, segments),
        least=_least(setup, truth, segments),
        changes=None if smooth else _changes_a_minute(truth, segments),
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
        hits += sum(
            truth[index].variants[0] == segment.bests[index - segment.start_s].variant for index in segment.judged
        )
        total += len(segment.judged)
    return hits / total


def _least(setup: Setup, truth: Sequence[Second], segments: Sequence[Segment]) -> float | None:
    worst: float | None = None
    for segment in segments:
        judged = [truth[index] for index in segment.judged]
        if not all(best.least_held for best in segment.bests):
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
        start_s = _steady_from_s(truth, segment)
        if start_s is not None:
            seconds += segment.end_s - start_s
            changes += sum(second.changes for second in truth[start_s : segment.end_s])
    return changes * 60 / seconds if seconds else None


def _steady_from_s(truth: Sequence[Second], segment: Segment) -> int | None:
    """From then on to its end: who makes the temperature swing is judged by what comes after, and not let off."""
    last_s = segment.end_s - STEADY_LEAST_S
    first_s = segment.start_s + STEADY_AFTER_S
    if last_s < first_s:
        return None
    tj_c = [second.tj_c for second in truth]
    for index in range(first_s, last_s):
        middle = index - STEADY_OVER_S
        before_c = statistics.fmean(tj_c[middle - STEADY_OVER_S : middle])
        if abs(statistics.fmean(tj_c[middle:index]) - before_c) < STEADY_C:
            return index
    return last_s


def _safe_periods(decisions: Sequence[tuple[float, Decision]]) -> float | None:
    for t_s, decision in decisions:
        if FAULT_S[0] < t_s <= FAULT_S[1] and decision.state == "safe":
            return math.ceil((t_s - FAULT_S[0]) / GOVERNOR_PERIOD_S - 1e-9)
    return None


def _back_s(frames: Sequence[int], segment: Segment) -> float | None:
    end_s = int(FAULT_S[1])
    fps = _means(frames, SMOOTH_S)
    for index in range(end_s, len(frames)):
        if fps[index] >= BACK_FPS * segment.bests[-1].fps:
            return float(index + 1 - end_s)
    return None


def _rounded(value: object) -> object:
    return round(value, 4) if isinstance(value, float) else value
