"""The bundle that `prepare quantize` makes: the source's variants, and the accepted ones in their places."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edge_runtime.engine.bundle import Bundle
from edge_runtime.engine.manifest import Backend, VariantTable
from edge_runtime.engine.onnxrt import load_engine
from edge_runtime.engine.probe import ReadImage, record_golden
from edge_runtime.prepare.bundle_draft import BundleDraft
from edge_runtime.prepare.kept import kept_variant
from edge_runtime.prepare.quant import Family
from edge_runtime.prepare.quantize_records import Artefact, CalibrationFacts

__all__ = ["TOLERANCE", "QuantizedDraft"]

TOLERANCE = 0.1
"""Of golden outputs. Another processor's kernels round a value to its neighbour, and what follows takes that on:
99 of 100 values of nanodet_m with everything in INT8, once by INT8 kernels and once by Q and DQ as they stand, are 0.06
of the output's range apart at most."""


class QuantizedDraft:
    """Accepted variants as they come, and the writing in the end."""

    def __init__(self, source: Bundle, out_dir: Path, read_image: ReadImage, notes: list[str]) -> None:
        self.source = source
        self._out_dir = out_dir
        self._read_image = read_image
        self._notes = notes
        self._files: dict[str, bytes] = {}
        self._entries: dict[str, dict[str, Any]] = {}

    def add(
        self,
        table: VariantTable,
        name: str,
        family: Family,
        model: bytes,
        accuracy: dict[str, Any] | None,
        trial: Bundle,
    ) -> None:
        """An accepted variant `name` made of `table`; `trial`: a bundle that ONNX Runtime runs it of."""
        path = f"{name}.onnx"
        self._files[path] = model
        backend: Backend = "tensorrt" if family == "tensorrt" else "onnxruntime"
        entry: dict[str, Any] = {
            "name": name,
            "precision": "int8",
            "size": list(table.size),
            "pixel": table.pixel,
            "files": {backend: {"path": path, "sha256": hashlib.sha256(model).hexdigest()}},
        }
        pictures = self.source.golden_inputs(table.name)
        if table.golden is None or not pictures:
            self._notes.append(f"{table.name} has no golden pictures, so that {name} cannot be proved where it runs")
        else:
            outputs = f"golden/{name}.npz"
            engine = load_engine(trial, name)
            try:
                self._files[outputs] = record_golden(engine, engine.open_lane(), pictures, self._read_image)
            finally:
                engine.close()
            tolerance = max(table.golden.tolerance, TOLERANCE)
            entry["golden"] = {"inputs": table.golden.inputs, "outputs": outputs, "tolerance": tolerance}
        if accuracy is not None:
            entry["accuracy"] = accuracy
        self._entries[name] = entry

    def write(
        self, artefacts: Sequence[Artefact], facts: CalibrationFacts, page: bytes, cpu: str
    ) -> tuple[Bundle, Path]:
        """Write the bundle with the report `page` (HTML) in it; the bundle and where the page is. Raises as
        BundleDraft.write."""
        kept = {table.name: kept_variant(self.source, table, self._files) for table in self.source.manifest.variant}
        report = "report/quantize.html"
        number = 1
        while report in self._files:  # of an earlier run, on other variants
            number += 1
            report = f"report/quantize-{number}.html"
        self._files[report] = page
        listed = {"path": report, "sha256": hashlib.sha256(page).hexdigest()}
        tables: list[dict[str, Any]] = []
        for name, table in kept.items():
            before: list[dict[str, Any]] = []
            behind: list[dict[str, Any]] = []
            for each in artefacts:
                if each.source == name and each.outcome == "accepted":
                    entry = {**self._entries[each.name], "prepared": _prepared(each, facts, listed, cpu)}
                    (before if _faster(each) else behind).append(entry)
            tables += [*before, table, *behind]
        draft = BundleDraft.like(self.source, self._files, tables)
        bundle = draft.write(self._out_dir, None, None, self._notes)
        return bundle, bundle.root / report


def _faster(artefact: Artefact) -> bool:
    """Measured to be faster on this machine, beyond chance, for which it is. What only a device can tell stays behind
    its source: the first variant that a backend can run is what it takes of itself."""
    chosen = artefact.searched.chosen
    return artefact.family == "onnxruntime" and chosen is not None and (chosen.speed_low or 0.0) > 1.0


def _prepared(artefact: Artefact, facts: CalibrationFacts, report: dict[str, str], cpu: str) -> dict[str, Any]:
    gate, searched = artefact.gate, artefact.searched
    assert gate is not None  # an accepted one
    told: dict[str, Any] = {
        "of": artefact.source,
        "method": searched.method,
        "calibration_sha256": facts.sha256,
        "calibration_images": facts.images,
        "kept_float": searched.kept_float,
        "gate": {
            "basis": gate.basis,
            "metric": gate.metric,
            "float_value": round(gate.float_value, 6),
            "value": round(gate.candidate, 6),
            "loss": round(gate.loss, 6),
            "loss_high": None if gate.high is None else round(gate.high, 6),
            "max_loss": gate.max_loss,
            "accept": gate.accept,
            "pictures": gate.pictures,
        },
    }
    chosen = searched.chosen
    if artefact.family == "onnxruntime" and chosen is not None and chosen.speed is not None:
        told["speed"] = {"ratio": round(chosen.speed, 3), "cpu": cpu}
        if chosen.speed_low is not None and chosen.speed_high is not None:
            told["speed"] |= {"low": round(chosen.speed_low, 3), "high": round(chosen.speed_high, 3)}
    return {**told, "report": report}
