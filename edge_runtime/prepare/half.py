"""`prepare half`: models in FP16 where that is safe, made for TensorRT and judged before they may be used."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from edge_runtime.engine.bundle import Bundle
from edge_runtime.engine.manifest import Backend, VariantTable
from edge_runtime.engine.onnxrt import OnnxRuntimeEngine, load_engine, open_session
from edge_runtime.engine.probe import ReadImage, record_golden
from edge_runtime.engine.session_check import output_shapes
from edge_runtime.errors import BundleError, RefusedError, UsageError
from edge_runtime.prepare.bundle_draft import BundleDraft, check_target, trial_bundle
from edge_runtime.prepare.calibration import Calibration, CalibrationPicture
from edge_runtime.prepare.evaluate import measure, predict
from edge_runtime.prepare.gate import RESAMPLES, Accept, Gate, HeldOut, agreement_truth, judge
from edge_runtime.prepare.graph import optimise_artefact
from edge_runtime.prepare.half_graph import FloatGraph, imitate_half, write_half
from edge_runtime.prepare.half_plan import HalfPlan, plan_half
from edge_runtime.prepare.kept import kept_variant
from edge_runtime.prepare.onnx_file import read_precision
from edge_runtime.prepare.ranges import RangeMeter
from edge_runtime.prepare.samples import Dataset, Predictions

__all__ = ["HalfResult", "HalfVariant", "half_bundle"]

Progress = Callable[[str, int, int], None]
"""Called with what is going on, how many pictures are done, and of how many (0: not known)."""

_TOLERANCE = 0.02
_FEW_PICTURES = 32


@dataclass(frozen=True, slots=True)
class HalfVariant:
    """A new variant, what it was made of, what of it is FP16, and what it loses."""

    name: str
    source: str
    plan: HalfPlan
    gate: Gate


@dataclass(frozen=True, slots=True)
class HalfResult:
    """The new bundle, its new variants, how many pictures ranges were seen on, and in words what was done."""

    bundle: Bundle
    variants: tuple[HalfVariant, ...]
    pictures: int
    notes: tuple[str, ...]


@dataclass(slots=True)
class _Model:
    """One file of the source, for all variants that have it."""

    where: str
    graph: FloatGraph
    meter: RangeMeter
    tables: list[VariantTable]


def half_bundle(
    source: Bundle,
    out_dir: Path,
    *,
    pictures: Iterable[CalibrationPicture],
    read_image: ReadImage,
    scaler: str,
    dataset: Dataset | None = None,
    max_loss: float = 0.01,
    accept: Accept = "bound",
    variants: Sequence[str] = (),
    overwrite: bool = False,
    lanes: int = 1,
    seed: int = 0,
    resamples: int = RESAMPLES,
    progress: Progress = lambda *_: None,
) -> HalfResult:
    """Make the bundle `out_dir`: the source's variants, and before each of them, `fp16-SIZE` made of it for TensorRT.

    All variants of float32 weights, or those named, that have a file for onnxruntime. pictures: such as those of the
    field, taken one after the other and not kept. dataset: labelled pictures, none of which is among these; it
    is measured once, on float and FP16. Left out, every fourth of the pictures is held back instead, and what the float
    model says of it is taken for right. `lanes`: threads that measure.

    FP16 is imitated on the CPU (half_graph.py says how), so that golden outputs and accuracy are the imitation's: a
    device may round otherwise between, and `tolerance` allows for it.

    Raises RefusedError where a variant loses more than `max_loss` (relative; codes "loses_too_much", "not_enough_data")
    or has nothing that could be FP16 ("nothing_to_gain"); UsageError and BundleError for what cannot be made FP16;
    EdgeError (code "write_failed") when the disk refuses. Nothing is written then.
    """
    check_target(out_dir, overwrite)
    tables = [_convertible(source, name) for name in variants or _float_variants(source)]
    notes: list[str] = []
    models = _models(source, tables, read_image, notes)
    calibration = Calibration(pictures, hold_back=dataset is None)
    _see_ranges(models, source, calibration, progress)
    truth = None
    if dataset is None:
        dataset, read_image = calibration.held_back(source, read_image)
        notes.append(
            f"judged without labels, by the float model's own answers on {len(dataset.samples)} pictures that were "
            "held back; --evaluate with labelled ones says what it costs"
        )
    else:
        digests = [_digest(sample.path.read_bytes()) for sample in dataset.samples]
        truth = HeldOut(dataset, calibration.digests, digests).take()
    if calibration.shown < _FEW_PICTURES:
        notes.append(f"ranges were seen on {calibration.shown} pictures only: {_FEW_PICTURES} or more are wanted")
    files: dict[str, bytes] = {}
    made: dict[str, tuple[dict[str, Any], HalfVariant]] = {}
    for model in models.values():
        plan = plan_half(model.graph, model.meter.largest())
        if not plan.half:
            raise _nothing(plan, model.where)
        half, imitation = write_half(model.graph, plan.half), imitate_half(model.graph, plan.half)
        path = f"{_half_name(model.tables[0].name)}.onnx"
        files[path] = half
        for table in model.tables:
            output_shapes(open_session(half, path), source.input_spec(table.name), path)
            with tempfile.TemporaryDirectory(prefix="edge-runtime-half-") as folder:
                trial = trial_bundle(source, table, _half_name(table.name), "fp16", imitation, Path(folder) / "trial")
                entry = {
                    "name": _half_name(table.name),
                    "precision": "fp16",
                    "size": list(table.size),
                    "pixel": table.pixel,
                    "files": {"tensorrt": {"path": path, "sha256": _digest(half)}},
                }
                engine = load_engine(trial)
                try:
                    _add_golden(source, table, engine, read_image, entry, files, notes)
                    said = _predictions(engine, trial, dataset, read_image, scaler, lanes, progress)
                finally:
                    engine.close()
            before = _float_predictions(source, table, dataset, read_image, scaler, lanes, progress)
            right = truth or agreement_truth(dataset, before, source.output_spec().score_threshold)
            gate = judge(
                right,
                before,
                said,
                max_loss=max_loss,
                accept=accept,
                basis="agreement" if truth is None else "labels",
                seed=seed,
                resamples=resamples,
            )
            gate.check(f"{source.root} {entry['name']}")
            if truth is not None:
                entry["accuracy"] = measure(truth, said).table().model_dump(exclude_none=True)
            made[table.name] = entry, HalfVariant(str(entry["name"]), table.name, plan, gate)
    bundle = _write(source, out_dir, files, made, notes)
    return HalfResult(bundle, tuple(variant for _, variant in made.values()), calibration.shown, tuple(notes))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _half_name(name: str) -> str:
    return f"fp16-{name.removeprefix('fp32-')}" if name != "fp32" else "fp16"


def _float_variants(source: Bundle) -> list[str]:
    found = [name for name in source.variants_for("onnxruntime") if source.variant(name).precision == "fp32"]
    if not found:
        raise BundleError(
            "has no fp32 variant with a file for onnxruntime, and ranges and losses are seen there",
            code="half_refused",
            where=str(source.root),
            remedy="take the bundle that it was made of",
        )
    return found


def _convertible(source: Bundle, name: str) -> VariantTable:
    table = source.variant(name, "onnxruntime")
    if table.precision != "fp32":
        message = f"variant {table.name!r} is {table.precision} already"
        raise UsageError(message, where=str(source.root), remedy=f"name one of {', '.join(_float_variants(source))}")
    if _half_name(table.name) in source.variants:
        message = f"has a variant {_half_name(table.name)!r} already"
        raise UsageError(message, where=str(source.root), remedy="take the bundle that it was made of")
    return table


def _models(
    source: Bundle, tables: Sequence[VariantTable], read_image: ReadImage, notes: list[str]
) -> dict[str, _Model]:
    """By the sha256 of the file that TensorRT would load, else ONNX Runtime."""
    shared: dict[str, tuple[Backend, list[VariantTable]]] = {}
    for table in tables:
        backend: Backend = "tensorrt" if table.name in source.variants_for("tensorrt") else "onnxruntime"
        shared.setdefault(source.artefact(table.name, backend).sha256, (backend, []))[1].append(table)
    models: dict[str, _Model] = {}
    for digest, (backend, sharing) in shared.items():
        name = sharing[0].name
        where = str(source.artefact(name, backend).path)
        given: Any = onnx.load_model_from_string(source.read_artefact(name, backend))
        if (precision := read_precision(given)) != "fp32":
            raise BundleError(
                f"computes in {precision}, and the variant {name!r} says fp32",
                code="half_refused",
                where=where,
                remedy="take the model in float32 that it was made of",
            )
        optimised = optimise_artefact(source, sharing, backend, read_image, code="half_refused")
        notes += [f"{_half_name(name)}: {note}" for note in optimised.notes]
        graph = FloatGraph.of(onnx.load_model_from_string(optimised.data))
        models[digest] = _Model(where, graph, RangeMeter(graph, where), sharing)
    return models


def _see_ranges(models: Mapping[str, _Model], source: Bundle, calibration: Calibration, progress: Progress) -> None:
    """Show the pictures to every model at every size. Raises UsageError where there are too few."""
    for picture in calibration:
        pixels = picture.read()
        for model in models.values():
            for table in model.tables:
                model.meter.show((pixels,), source.input_spec(table.name))
        progress("calibrating", calibration.shown, 0)
    calibration.check()


def _nothing(plan: HalfPlan, where: str) -> RefusedError:
    reasons = "; ".join(f"{count.total()} nodes: it {why}" for why, count in plan.reasons().items())
    return RefusedError(
        f"no node of the model may compute in FP16 ({reasons})",
        code="nothing_to_gain",
        where=where,
        remedy="use it in fp32",
    )


def _add_golden(
    source: Bundle,
    table: VariantTable,
    engine: OnnxRuntimeEngine,
    read_image: ReadImage,
    entry: dict[str, Any],
    files: dict[str, bytes],
    notes: list[str],
) -> None:
    pictures = source.golden_inputs(table.name)
    if table.golden is None or not pictures:
        notes.append(f"{table.name} has no golden pictures, so that plans of {entry['name']} cannot be proved")
        return
    outputs = f"golden/{entry['name']}.npz"
    files[outputs] = record_golden(engine, engine.open_lane(), pictures, read_image)
    tolerance = max(table.golden.tolerance, _TOLERANCE)
    entry["golden"] = {"inputs": table.golden.inputs, "outputs": outputs, "tolerance": tolerance}


def _predictions(
    engine: OnnxRuntimeEngine,
    bundle: Bundle,
    dataset: Dataset,
    read_image: ReadImage,
    scaler: str,
    lanes: int,
    progress: Progress,
) -> Predictions:
    def show(done: int, of: int) -> None:
        progress(engine.info.variant, done, of)

    return predict(engine, bundle, dataset, read_image, scaler=scaler, lanes=lanes, progress=show)


def _float_predictions(
    source: Bundle,
    table: VariantTable,
    dataset: Dataset,
    read_image: ReadImage,
    scaler: str,
    lanes: int,
    progress: Progress,
) -> Predictions:
    engine = load_engine(source, table.name)
    try:
        return _predictions(engine, source, dataset, read_image, scaler, lanes, progress)
    finally:
        engine.close()


def _write(
    source: Bundle,
    out_dir: Path,
    files: dict[str, bytes],
    made: Mapping[str, tuple[dict[str, Any], HalfVariant]],
    notes: list[str],
) -> Bundle:
    tables: list[dict[str, Any]] = []
    for table in source.manifest.variant:
        if table.name in made:
            tables.append(made[table.name][0])
        tables.append(kept_variant(source, table, files))
    draft = BundleDraft.like(source, files, tables)
    return draft.write(out_dir, None, None, notes)
