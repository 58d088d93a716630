"""What INT8 brings on this device, in one line. An estimate is called one, and a refusal names what refused."""

from __future__ import annotations

from collections.abc import Sequence

from edge_runtime.prepare.quant import Family
from edge_runtime.prepare.quant_pareto import Point

__all__ = ["said"]


def said(
    family: Family,
    points: Sequence[Point],
    chosen: Point | None,
    fastest: Point | None,
    limit: float,
    min_agreement: float,
    least_share: float,
) -> str:
    """`fastest`: what was chosen before it was measured afresh, if anything was. `limit`: what may be lost;
    `min_agreement`: 0 where it is not asked for."""
    if chosen is not None:
        told = f"{chosen.int8_share:.0%} of the multiplications in INT8, {chosen.loss:.1%} lost against the float model"
        if family == "tensorrt":
            return f"{told}; its speed can only be measured on the device"
        return (
            f"INT8 is {_speed(chosen)} times as fast here ({chosen.float_ms:.1f} -> {chosen.latency_ms:.1f} ms), {told}"
        )
    return f"nothing: keep float; {_why(points, fastest, limit, min_agreement, least_share)}"


def _why(points: Sequence[Point], fastest: Point | None, limit: float, min_agreement: float, least_share: float) -> str:
    if fastest is not None:
        return (
            f"the fastest within the allowed loss was measured afresh as {_speed(fastest)} times as fast, which may be "
            "no gain at all"
        )
    taken = [point for point in points if not point.problems]
    if points and not taken:
        return f"the backend would not take any candidate: {'; '.join(points[0].problems[:3])}"
    if not taken:
        return "no candidate could be judged"
    agreeing = [point for point in taken if point.agreement >= min_agreement]
    near = [point for point in agreeing if point.loss <= limit]
    if near:
        worth = [point for point in near if point.int8_share >= least_share and point.speed is not None]
        if worth:
            best = max(worth, key=lambda point: point.benefit)
            return f"the fastest within the allowed loss is {_speed(best)} times as fast"
        most = max(near, key=lambda point: point.int8_share)
        return f"within the allowed loss only {most.int8_share:.0%} of the multiplications can be in INT8"
    if agreeing:
        least = min(agreeing, key=lambda point: point.loss)
        return f"the nearest candidate loses {least.loss:.1%}{_with(least)}, and {limit:.1%} is allowed"
    least = max(taken, key=lambda point: point.agreement)
    return (
        f"the nearest candidate names the same first class in {least.agreement:.1%} of the pictures{_with(least)}, and "
        f"{min_agreement:.1%} is wanted"
    )


def _with(point: Point) -> str:
    speed = "" if point.speed is None else f" at {_speed(point)} times the speed"
    return f"{speed} with {point.int8_share:.0%} of the multiplications in INT8"


def _speed(point: Point) -> str:
    return f"{point.speed:.2f} ({point.speed_low:.2f} to {point.speed_high:.2f})"
