"""`prepare fuse`: a bundle whose models take a picture's bytes, with the rest of preprocessing in their graph."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edge_runtime.engine.bundle import Bundle
from edge_runtime.engine.manifest import BACKENDS, VariantTable
from edge_runtime.engine.probe import ReadImage
from edge_runtime.errors import BundleError, UsageError
from edge_runtime.prepare.bundle_draft import BundleDraft, Golden, check_target, named_reader
from edge_runtime.prepare.fuse_graph import fuse_graph
from edge_runtime.prepare.kept import kept_variant
from edge_runtime.prepare.parity import Parity, prove_parity
from edge_runtime.records.spec import Pixel

__all__ = ["FuseResult", "fuse_bundle"]

_TOLERANCE = 0.02


@dataclass(frozen=True, slots=True)
class FuseResult:
    """The new bundle, how like its source each new variant is, and in words what was done on the way."""

    bundle: Bundle
    parity: dict[str, Parity]
    notes: tuple[str, ...]


def fuse_bundle(
    source: Bundle,
    out_dir: Path,
    *,
    pixel: Pixel,
    read_image: ReadImage,
    variants: Sequence[str] = (),
    pictures: Sequence[Path] = (),
    keep: bool = False,
    overwrite: bool = False,
) -> FuseResult:
    """Make the bundle `out_dir` of a bundle's float32 variants (all that ONNX Runtime runs, or those named).

    Each new variant is called after its source, `fp32-416-bgr24`, and keeps its size and precision; task, labels,
    licence and thresholds are the source's. `keep`: the source's own variants stay in the bundle, after the new ones.
    pictures: where the parity is proved, and golden pictures of what has none; left out, the source's golden pictures.
    Accuracies are not carried over to new variants: they were measured of other pixels.

    Written aside, loaded, run, and put in place in one rename, as `import_model` does.

    Raises RefusedError (code "parity") where the new model does not say what the old one says, UsageError and
    BundleError for what cannot be fused, EdgeError (code "write_failed") when the disk refuses.
    """
    if pixel == "float32":
        raise UsageError("float32 is what the variants take already", remedy="name bgr24, rgba or nv12")
    check_target(out_dir, overwrite)
    read_image = named_reader(read_image)
    chosen = [_fusible(source, name, pixel) for name in variants or _float_variants(source)]
    files: dict[str, bytes] = {}
    tables: list[dict[str, Any]] = []
    golden: dict[str, Sequence[Path]] = {}
    parity: dict[str, Parity] = {}
    for table in chosen:
        made, parity[made["name"]], golden[made["name"]] = _fuse_variant(
            source, table, pixel, pictures, read_image, files
        )
        tables.append(made)
    if keep:
        tables += [kept_variant(source, table, files) for table in source.manifest.variant]
        doubled = {table["name"] for table in tables if [each["name"] for each in tables].count(table["name"]) > 1}
        if doubled:
            raise UsageError(f"has a variant {', '.join(sorted(doubled))} already", where=str(source.root))
    manifest = source.manifest
    draft = BundleDraft(
        files=files,
        labels=source.labels,
        bundle={**manifest.bundle.model_dump(), "labels": "labels.txt"},
        input=manifest.input.model_dump(exclude_none=True),
        output=manifest.output.model_dump(),
        variants=tables,
    )
    notes = [f"{name}: {each}" for name, each in parity.items()]
    bundle = draft.write(out_dir, Golden(golden, read_image, _TOLERANCE), None, notes)
    notes.append("the new variants state no accuracy: `prepare evaluate BUNDLE DATASET --record` measures it")
    return FuseResult(bundle, parity, tuple(notes))


def _float_variants(source: Bundle) -> list[str]:
    found = [name for name in source.variants_for("onnxruntime") if source.variant(name).pixel == "float32"]
    if not found:
        raise BundleError(
            "has no float32 variant with a file for onnxruntime, and parity is proved there",
            code="fuse_refused",
            where=str(source.root),
            remedy="fuse the bundle that it was made of",
        )
    return found


def _fusible(source: Bundle, name: str, pixel: Pixel) -> VariantTable:
    table = source.variant(name, "onnxruntime")
    if table.pixel != "float32":
        message = f"variant {table.name!r} takes {table.pixel} already"
        raise UsageError(message, where=str(source.root), remedy=f"name one of {', '.join(_float_variants(source))}")
    if pixel == "nv12" and any(side % 2 for side in table.size):
        message = f"variant {table.name!r} is {table.size[0]}x{table.size[1]}, and nv12 has one colour for 2 x 2 pixels"
        raise UsageError(message, where=str(source.root), remedy="take bgr24 or rgba, or a variant with even sides")
    return table


def _fuse_variant(
    source: Bundle,
    table: VariantTable,
    pixel: Pixel,
    pictures: Sequence[Path],
    read_image: ReadImage,
    files: dict[str, bytes],
) -> tuple[dict[str, Any], Parity, Sequence[Path]]:
    own = source.golden_inputs(table.name)
    shown = pictures or own
    if not shown:
        raise UsageError(
            f"variant {table.name!r} has no golden pictures to prove on that nothing changed",
            where=str(source.root),
            remedy="name some by --images",
        )
    name = f"{table.name}-{pixel}"
    plain = source.input_spec(table.name)
    fused = replace(plain, pixel=pixel)
    listed: dict[str, Any] = {}
    made: dict[str, tuple[str, bytes]] = {}
    worst: Parity | None = None
    for backend in BACKENDS:
        if table.name not in source.variants_for(backend):
            continue
        artefact = source.artefact(table.name, backend)
        if artefact.sha256 not in made:
            before = source.read_artefact(table.name, backend)
            after = fuse_graph(before, fused, str(artefact.path))
            parity = prove_parity(
                (before, plain), (after, fused), source.output_spec(), table.precision, shown, read_image,
                str(artefact.path),
            )  # fmt: skip
            worst = parity if worst is None or parity.deviation > worst.deviation else worst
            path = f"{name}.onnx" if not made else f"{name}-{backend}.onnx"
            made[artefact.sha256] = path, after
            files[path] = after
        path, data = made[artefact.sha256]
        listed[backend] = {"path": path, "sha256": hashlib.sha256(data).hexdigest()}
    assert worst is not None  # _fusible: there is a file for onnxruntime
    variant = {
        "name": name, "precision": table.precision, "size": list(table.size), "pixel": pixel, "files": listed,
    }  # fmt: skip
    return variant, worst, own or pictures
