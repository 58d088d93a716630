"""The search of `prepare quantize`: quant_search's, told in the words of the bundle, the command and the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edge_runtime.prepare.quant import Family
from edge_runtime.prepare.quant_graph import planned, quantisable
from edge_runtime.prepare.quant_meter import ActivationMeter
from edge_runtime.prepare.quant_pareto import Point
from edge_runtime.prepare.quant_probe import Probe
from edge_runtime.prepare.quant_search import search
from edge_runtime.prepare.quantize_records import SEARCHING, MethodChoice, Progress, Searched, Tried

__all__ = ["search_plan"]

_UNIT = "change of the answers where it alone is INT8 (0-1)"


def search_plan(
    model: Any,
    meter: ActivationMeter,
    *,
    family: Family,
    probe: Probe,
    search_loss: float,
    method: MethodChoice,
    minutes: float | None,
    folder: Path,
    seed: int,
    progress: Progress,
) -> Searched:
    """A `Search` (quantize_records.py). Raises UsageError (code "dataset_invalid") where the float model finds nothing
    in the calibration pictures."""
    found = search(
        model,
        meter,
        family=family,
        probe=probe,
        search_loss=search_loss,
        folder=folder,
        method=None if method == "auto" else method,
        minutes=minutes,
        seed=seed,
        progress=lambda what, done, of: progress(f"{SEARCHING} {family}, {what}", done, of),
    )
    possible = frozenset(quantisable(model, family))

    def tried(point: Point) -> Tried:
        return Tried(
            name=point.name,
            loss=point.loss,
            agreement=point.agreement,
            latency_ms=point.latency_ms,
            speed=point.speed,
            speed_low=point.speed_low,
            speed_high=point.speed_high,
            int8_share=point.int8_share,
            size_bytes=point.size_bytes,
            sqnr_db=point.sqnr_db,
            kept_float=len(possible - set(planned(model, point.plan))),
            front=point in found.front,
            chosen=point is found.chosen,
        )

    rows = tuple(tried(point) for point in sorted(found.points, key=lambda each: (-each.benefit, each.loss, each.name)))
    best = found.chosen or min(found.points, key=lambda each: each.loss, default=None)
    return Searched(
        model=found.model,
        method="minmax" if best is None else best.plan.method,
        kept_float=next((row.kept_float for row in rows if row.chosen), 0),
        float_ms=found.float_ms,
        allowed=search_loss,
        tried=rows,
        sensitivities=found.sensitivities,
        unit=_UNIT,
        said=f"{found.said}; --minutes left no time for more"
        if found.not_tried and found.model is None
        else found.said,
        improved=found.improved,
        notes=(f"the time did not allow {'; '.join(found.not_tried)}",) if found.not_tried else (),
    )
