"""Candidates of a search, which of them no other one beats, and which is taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edge_runtime.prepare.quant import QuantPlan

__all__ = ["Point", "choose", "front"]


@dataclass(frozen=True, slots=True)
class Point:
    """A candidate and what came of it on calibration pictures.

    `loss`: relative, as `Judgement.loss`; `agreement` (0-1) and `distance` (0-1) as there; `sqnr_db`: of the worst
    output. `size_bytes`: of the file. `int8_share` (0-1): of the multiplications, those in INT8. `latency_ms` and
    `float_ms` are medians of one run in turns, `speed` is the float model's time by this one's, round by round, and
    `speed_low`, `speed_high` its 90 % interval; None where it was not measured. `problems`: why the backend would not
    take it; such a one is never chosen.
    """

    name: str
    plan: QuantPlan
    loss: float
    agreement: float
    distance: float
    sqnr_db: float
    size_bytes: int
    int8_share: float
    latency_ms: float | None = None
    float_ms: float | None = None
    speed: float | None = None
    speed_low: float | None = None
    speed_high: float | None = None
    problems: tuple[str, ...] = ()

    @property
    def benefit(self) -> float:
        """What candidates are put in order by; above 1 they are worth having. The measured speed; where none was
        measured, 1 and the share of INT8, which is no speed and not to be told as one."""
        return self.speed if self.speed is not None else 1 + self.int8_share


def front(points: Sequence[Point]) -> tuple[Point, ...]:
    """The points that no other one beats in loss, benefit or size without being worse in another; fastest first.

    Only points that were measured alike are compared: where one has a speed, those without are left out.
    """
    measured = [point for point in points if point.speed is not None]
    compared = measured or list(points)
    kept = [one for one in compared if not any(_beats(other, one) for other in compared)]
    return tuple(sorted(kept, key=lambda point: (-point.benefit, point.loss, point.size_bytes, point.name)))


def _beats(one: Point, other: Point) -> bool:
    ours = (one.loss, -one.benefit, one.size_bytes)
    theirs = (other.loss, -other.benefit, other.size_bytes)
    return all(a <= b for a, b in zip(ours, theirs, strict=True)) and ours != theirs


def choose(
    points: Sequence[Point], max_loss: float, *, min_agreement: float = 0.0, least_share: float = 0.0
) -> Point | None:
    """The one of most benefit whose loss is within `max_loss`, whose agreement and share of INT8 are enough, and which
    the backend takes; None where none is better than float. Of equals the one that loses less, then the smaller."""
    good = [
        point
        for point in front([each for each in points if each.agreement >= min_agreement and not each.problems])
        if point.loss <= max_loss and point.benefit > 1.0 and point.int8_share >= least_share
    ]
    return min(good, key=lambda point: (-point.benefit, point.loss, point.size_bytes, point.name), default=None)
