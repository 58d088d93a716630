"""The page that tells what `prepare quantize` found: one file, no network, no pictures of people inside.

The same findings give the same bytes, as its sha256 is part of the bundle that it tells of.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from edge_runtime.engine.bundle import Bundle
from edge_runtime.prepare.quantize_records import Artefact, CalibrationFacts
from edge_runtime.prepare.report_plots import pareto_plot, sensitivity_plot
from edge_runtime.prepare.samples import Dataset

__all__ = ["render_report"]

_TEMPLATE = "report.html"
_CLASSES = 15


def render_report(
    source: Bundle,
    artefacts: Sequence[Artefact],
    calibration: CalibrationFacts,
    data: Dataset,
    cpu: str,
    notes: Sequence[str],
) -> bytes:
    """An HTML page, UTF-8. `data`: what was judged by; `cpu`: where times were measured."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["percent"] = lambda value: f"{100 * value:.2f} %"
    environment.filters["figure"] = lambda value, form: "" if value is None else form % value
    rows = [_row(each) for each in artefacts]
    page = environment.get_template(_TEMPLATE).render(
        bundle=source.manifest.bundle,
        digest=source.digest,
        artefacts=rows,
        gates=[row for row in rows if row["gate"] is not None],
        calibration=calibration,
        data={"name": data.name, "pictures": len(data.samples)},
        cpu=cpu,
        notes=notes,
    )
    return page.encode()


def _row(artefact: Artefact) -> dict[str, Any]:
    searched, comparison = artefact.searched, artefact.comparison
    changes = [] if comparison is None else [item for item in comparison.classes.items() if item[1].difference < 0]
    return {
        "name": artefact.name,
        "source": artefact.source,
        "family": artefact.family,
        "outcome": artefact.outcome,
        "backend": "ONNX Runtime" if artefact.family == "onnxruntime" else "TensorRT",
        "verdict": "not made" if artefact.gate is None else artefact.gate.verdict,
        "advice": _advice(artefact),
        "speed": _speed(artefact),
        "css": artefact.outcome.partition(" ")[0],
        "gate": artefact.gate,
        "searched": searched,
        "timed": any(each.latency_ms is not None for each in searched.tried),
        "pareto": pareto_plot(searched.tried, allowed=searched.allowed, float_ms=searched.float_ms)
        if searched.tried
        else "",
        "sensitivities": sensitivity_plot(searched.sensitivities, searched.unit) if searched.sensitivities else "",
        "comparison": comparison,
        "classes": sorted(changes, key=lambda item: (item[1].difference, item[0]))[:_CLASSES],
    }


def _speed(artefact: Artefact) -> str:
    chosen = artefact.searched.chosen
    if artefact.family == "tensorrt":
        return "not measured"
    if chosen is None or chosen.speed is None:
        return ""
    between = "" if chosen.speed_low is None else f" ({chosen.speed_low:.2f}–{chosen.speed_high:.2f})"
    return f"{chosen.speed:.2f} x{between}"


def _advice(artefact: Artefact) -> str:
    """What to do now."""
    gate = artefact.gate
    if artefact.outcome == "accepted":
        if artefact.family == "tensorrt":
            return "Measure it on the device before it is used."
        return "It stands before float, and is what the daemon takes of itself."
    if gate is None:
        return "Stay with float."
    if gate.verdict == "not enough data":
        return f"Judge by about {gate.pictures_needed} pictures." if gate.pictures_needed else "Judge by more pictures."
    return (
        "Stay with float, calibrate with more varied pictures, keep more in float by a smaller --search-loss, or allow "
        "more by --max-loss."
    )
