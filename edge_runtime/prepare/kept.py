"""A variant taken over from one bundle into another as it is."""

from __future__ import annotations

from typing import Any

from edge_runtime.engine.bundle import Bundle, artefacts_of
from edge_runtime.engine.manifest import BACKENDS, VariantTable

__all__ = ["kept_variant"]


def kept_variant(source: Bundle, table: VariantTable, files: dict[str, bytes]) -> dict[str, Any]:
    """The variant's table for a BundleDraft; its models, plans, golden files and report are added to `files`.

    Raises BundleError where one of them is no longer what the source's manifest says.
    """
    for backend in BACKENDS:
        if table.name in source.variants_for(backend):
            path = source.artefact(table.name, backend).path.relative_to(source.root).as_posix()
            if path not in files:
                files[path] = source.read_artefact(table.name, backend)
    for entry in artefacts_of(table):  # plans: the draft proves every file by its sha256
        if entry.path not in files:
            files[entry.path] = (source.root / entry.path).read_bytes()
    if table.golden is not None:
        outputs = source.read_golden_outputs(table.name)
        if outputs is not None:
            files[table.golden.outputs] = outputs
        for picture in source.golden_inputs(table.name):
            files[picture.relative_to(source.root).as_posix()] = picture.read_bytes()
    if table.prepared is not None and table.prepared.report is not None:
        path = table.prepared.report.path
        if path not in files:
            files[path] = (source.root / path).read_bytes()
    kept = {**table.model_dump(exclude_none=True), "size": list(table.size)}
    if not kept["files"]["tensorrt_plan"]:
        del kept["files"]["tensorrt_plan"]
    return kept
