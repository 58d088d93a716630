"""`prepare fuse`: a bundle whose models take a picture's bytes, with the rest of preprocessing in their graph."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from edge_runtime.engine.bundle import Bundle
from edge_runtime.engine.manifest import BACKENDS, VariantTable
from edge_runtime.engine.probe import ReadImage
from edge_runtime.errors import BundleError, RefusedError, UsageError
from edge_runtime.prepare.bundle_draft import BundleDraft, Golden, check_target, named_reader
from edge_runtime.prepare.fuse_graph import fuse_graph
from edge_runtime.prepare.input_cost import REPEATS, InputCost, measure_inputs
from edge_runtime.prepare.kept import kept_variant
from edge_runtime.prepare.parity import Parity, prove_parity
from edge_runtime.records.frames import Pixels
from edge_runtime.records.spec import InputSpec, Pixel

__all__ = ["FuseResult", "float_variants", "fuse_bundle", "input_costs"]

_TOLERANCE = 0.02
_BYTES: tuple[Pixel, ...] = ("bgr24", "rgba", "nv12")


@dataclass(frozen=True, slots=True)
class FuseResult:
    """The new bundle, how like its source each new variant is, and in words what was done on the way. `costs`: by
    variant of the source what each format costs here, where that was measured."""

    bundle: Bundle
    parity: dict[str, Parity]
    notes: tuple[str, ...]
    costs: Mapping[str, tuple[InputCost, ...]] = field(default_factory=dict)


def fuse_bundle(
    source: Bundle,
    out_dir: Path,
    *,
    pixel: Pixel | Literal["auto"],
    read_image: ReadImage,
    variants: Sequence[str] = (),
    pictures: Sequence[Path] = (),
    frames: Sequence[Pixels] = (),
    keep: bool = False,
    overwrite: bool = False,
) -> FuseResult:
    """Make the bundle `out_dir` of a bundle's float32 variants (all that ONNX Runtime runs, or those named).

    Each new variant is called after its source, `fp32-416-bgr24`, and keeps its size and precision; task, labels,
    licence and thresholds are the source's. `keep`: the source's own variants stay in the bundle, after the new ones.
    pictures: where the parity is proved, and golden pictures of what has none; left out, the source's golden pictures.
    Accuracies are not carried over to new variants: they were measured of other pixels.

    pixel "auto": of each variant the format that costs the least CPU here on `frames`, such as the cameras give, is
    made, where it costs less than float32 beyond chance; the other variants stay as they are, in their places: a
    daemon takes the first one that it can.

    Written aside, loaded, run, and put in place in one rename, as `import_model` does.

    Raises RefusedError (code "parity") where the new model does not say what the old one says, (code "float_is_faster")
    where "auto" finds nothing that costs less, UsageError and BundleError for what cannot be fused, EdgeError (code
    "write_failed") when the disk refuses.
    """
    if pixel == "float32":
        raise UsageError("float32 is what the variants take already", remedy="name bgr24, rgba or nv12")
    check_target(out_dir, overwrite)
    read_image = named_reader(read_image)
    wanted = variants or float_variants(source)
    costs: dict[str, tuple[InputCost, ...]] = {}
    if pixel == "auto":
        costs = {name: input_costs(source, name, frames) for name in wanted}
        chosen = [(_fusible(source, name, best), best) for name in wanted if (best := _best(costs[name])) is not None]
        if not chosen:
            raise _nothing_faster(source, costs)
    else:
        chosen = [(_fusible(source, name, pixel), pixel) for name in wanted]
    files: dict[str, bytes] = {}
    tables: list[dict[str, Any]] = []
    golden: dict[str, Sequence[Path]] = {}
    parity: dict[str, Parity] = {}
    for table, taken in chosen:
        made, parity[made["name"]], golden[made["name"]] = _fuse_variant(
            source, table, taken, pictures, read_image, files
        )
        tables.append(made)
    some_are_float = len(chosen) < len(wanted)
    if keep or some_are_float:
        kept = [kept_variant(source, table, files) for table in source.manifest.variant]
        tables = _in_place(kept, tables, chosen) if some_are_float else tables + kept
        doubled = {table["name"] for table in tables if [each["name"] for each in tables].count(table["name"]) > 1}
        if doubled:
            raise UsageError(f"has a variant {', '.join(sorted(doubled))} already", where=str(source.root))
    draft = BundleDraft.like(source, files, tables)
    notes = [f"{name} {cost.pixel}: {cost}" for name, measured in costs.items() for cost in measured]
    notes += [f"{name}: {each}" for name, each in parity.items()]
    bundle = draft.write(out_dir, Golden(golden, read_image, _TOLERANCE), None, notes)
    notes.append("the new variants state no accuracy: `prepare evaluate BUNDLE DATASET --record` measures it")
    return FuseResult(bundle, parity, tuple(notes), costs)


def _in_place(
    kept: Sequence[dict[str, Any]], made: Sequence[dict[str, Any]], chosen: Sequence[tuple[VariantTable, Pixel]]
) -> list[dict[str, Any]]:
    """The source's variants, each new one before that which it was made of."""
    new = {table.name: each for (table, _), each in zip(chosen, made, strict=True)}
    return [each for table in kept for each in ([new[table["name"]], table] if table["name"] in new else [table])]


def input_costs(
    source: Bundle, name: str, frames: Sequence[Pixels], *, repeats: int = REPEATS
) -> tuple[InputCost, ...]:
    """What a float32 variant and every format that can be made of it cost here, as `measure_inputs` measures it.

    Raises UsageError and BundleError for what cannot be fused.
    """
    table = source.variant(name, "onnxruntime")
    where = str(source.artefact(table.name, "onnxruntime").path)
    model, plain = source.read_artefact(table.name, "onnxruntime"), source.input_spec(table.name)
    models: dict[Pixel, tuple[bytes, InputSpec]] = {"float32": (model, plain)}
    for pixel in _BYTES:
        if pixel != "nv12" or not any(side % 2 for side in table.size):
            _fusible(source, name, pixel)
            fused = replace(plain, pixel=pixel)
            models[pixel] = fuse_graph(model, fused, where), fused
    return measure_inputs(models, frames, where, repeats=repeats)


def _best(costs: Sequence[InputCost]) -> Pixel | None:
    """The format that costs the least, where that is no chance."""
    faster = [cost for cost in costs if cost.faster]
    return min(faster, key=lambda cost: cost.ratio).pixel if faster else None


def _nothing_faster(source: Bundle, costs: Mapping[str, Sequence[InputCost]]) -> RefusedError:
    told = "; ".join(
        f"{name}: "
        + ", ".join(f"{cost.pixel} {cost.ratio:.3f} ({cost.low:.3f} to {cost.high:.3f})" for cost in each[1:])
        for name, each in costs.items()
    )
    return RefusedError(
        f"float32 is as fast as bytes here, or faster: CPU of a frame, of float32's: {told}",
        code="float_is_faster",
        where=str(source.root),
        remedy="keep float32 on this machine; for a GPU name the format that its decoder gives",
    )


def float_variants(source: Bundle) -> list[str]:
    """The names of the variants that take float32 and run on ONNX Runtime. Raises BundleError where there is none."""
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
        raise UsageError(message, where=str(source.root), remedy=f"name one of {', '.join(float_variants(source))}")
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
