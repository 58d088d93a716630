"""Frame rates for cameras: who gets how much of what there is.

First every camera's `min_fps`; then, by priority, what it wants. Cameras of equal priority get the same share of the
way from the one to the other. There are two kinds of limits: energy (one for the whole device), and time on a model's
lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Bound = Literal["energy", "time"]

_CLOSE = 1e-9


@dataclass(frozen=True, slots=True)
class Claim:
    """A camera's claim. Rates in Hz: `now` is what it brings at present; `least` comes before all else, up to `demand`
    next, up to `ceiling` from what is left over (nobody asks for it now, and it may come at any time). `work_j`: energy
    of one frame over all its models, in the costs that are known beforehand, J. `busy_s`: lane seconds of one frame, by
    model."""

    name: str
    priority: int
    now: float
    least: float
    demand: float
    ceiling: float
    work_j: float
    busy_s: Mapping[str, float]


@dataclass(slots=True)
class Allotment:
    """Rates by camera, Hz, and by what each camera that got less than its demand was bound."""

    rates: dict[str, float]
    bound: dict[str, Bound]

    def work_w(self, claims: Sequence[Claim], *, demanded: bool) -> float:
        """Energy per second of these rates; `demanded`: of no more than what is asked for now."""
        return sum(
            claim.work_j * (min(self.rates[claim.name], claim.demand) if demanded else self.rates[claim.name])
            for claim in claims
        )


class _Room:
    """What is left of energy and of each model's lane time."""

    def __init__(self, work_w: float, lane_s: Mapping[str, float]) -> None:
        self.work_w = work_w
        self.lane_s = dict(lane_s)

    def share(self, claims: Sequence[Claim], steps: Sequence[float]) -> tuple[float, Bound | None]:
        """The largest share of `steps` (Hz by claim) that all of them can have, 0-1, and what bounds it."""
        found = 1.0
        bound: Bound | None = None
        need_w = sum(claim.work_j * step for claim, step in zip(claims, steps, strict=True))
        if need_w > max(self.work_w, 0.0) + _CLOSE:
            found, bound = max(0.0, self.work_w) / need_w, "energy"
        for model, left_s in self.lane_s.items():
            need_s = sum(claim.busy_s.get(model, 0.0) * step for claim, step in zip(claims, steps, strict=True))
            if need_s > max(left_s, 0.0) + _CLOSE and (share := max(0.0, left_s) / need_s) < found:
                found, bound = share, "time"
        return found, bound

    def take(self, claims: Sequence[Claim], steps: Sequence[float]) -> None:
        for claim, step in zip(claims, steps, strict=True):
            self.work_w -= claim.work_j * step
            for model, busy_s in claim.busy_s.items():
                if model in self.lane_s:
                    self.lane_s[model] -= busy_s * step


def allot(claims: Sequence[Claim], work_w: float, lane_s: Mapping[str, float]) -> Allotment:
    """Rates such that their work is at most `work_w`, and their time on a model's lanes `lane_s[model]` a second.

    A model that is not in `lane_s` has no such limit. Where not even every `least` fits, all get the same share of it:
    a budget comes before them.
    """
    room = _Room(work_w, lane_s)
    result = Allotment(dict.fromkeys((claim.name for claim in claims), 0.0), {})
    tiers = [
        [claim for claim in claims if claim.priority == priority]
        for priority in sorted({claim.priority for claim in claims}, reverse=True)
    ]
    _fill(result, room, list(claims), lambda claim: claim.least, demanded=True)
    for tier in tiers:
        _fill(result, room, tier, lambda claim: claim.demand, demanded=True)
    # what is left over is for whoever brings more next: nobody knows who
    _fill(result, room, list(claims), lambda claim: claim.ceiling, demanded=False)
    return result


def _fill(
    result: Allotment, room: _Room, claims: Sequence[Claim], goal: Callable[[Claim], float], *, demanded: bool
) -> None:
    """Raise the rates of `claims` towards their goals, all by the same share of their ways."""
    open_claims = list(claims)
    while open_claims:
        steps = [max(0.0, goal(claim) - result.rates[claim.name]) for claim in open_claims]
        share, bound = room.share(open_claims, steps)
        given = [share * step for step in steps]
        room.take(open_claims, given)
        for claim, step in zip(open_claims, given, strict=True):
            result.rates[claim.name] += step
        if bound is None:
            return
        # lanes of one model may be full while another's are not: its cameras go on
        stopped = [
            claim
            for claim in open_claims
            if bound == "energy" or any(room.lane_s.get(model, 1.0) <= _CLOSE * 10 for model in claim.busy_s)
        ]
        if demanded:
            for claim in stopped:
                if result.rates[claim.name] < goal(claim) - _CLOSE:
                    result.bound.setdefault(claim.name, bound)
        open_claims = [claim for claim in open_claims if claim not in stopped] if stopped else []
