"""`prepare quantize`: INT8 variants of a bundle, searched on calibration pictures and judged once on others."""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from edge_runtime.durable import write_atomic
from edge_runtime.engine.bundle import Bundle
from edge_runtime.engine.manifest import VariantTable
from edge_runtime.engine.probe import ReadImage
from edge_runtime.errors import BundleError, RefusedError, UsageError
from edge_runtime.prepare.bundle_draft import check_target, trial_bundle
from edge_runtime.prepare.calibration import Calibration, CalibrationPicture
from edge_runtime.prepare.calibration_set import (
    FEATURES,
    FEW_PICTURES,
    WANTED_PICTURES,
    calibration_digest,
    features_of,
    gather,
)
from edge_runtime.prepare.compare import compare
from edge_runtime.prepare.evaluate import measure
from edge_runtime.prepare.gate import RESAMPLES, Accept, HeldOut, agreement_truth, judge
from edge_runtime.prepare.quant import Family
from edge_runtime.prepare.quant_check import check_symmetric
from edge_runtime.prepare.quant_graph import activations, float_model
from edge_runtime.prepare.quant_imitate import imitate_symmetric
from edge_runtime.prepare.quant_meter import ActivationMeter
from edge_runtime.prepare.quant_probe import Probe
from edge_runtime.prepare.quantize_draft import QuantizedDraft
from edge_runtime.prepare.quantize_look import Look
from edge_runtime.prepare.quantize_records import (
    Artefact,
    CalibrationFacts,
    MethodChoice,
    Outcome,
    Progress,
    QuantizeResult,
    Search,
    Searched,
)
from edge_runtime.prepare.report import render_report
from edge_runtime.prepare.samples import Dataset

__all__ = ["FAMILIES", "int8_name", "quantize_bundle"]

FAMILIES: tuple[Family, ...] = ("onnxruntime", "tensorrt")
_SAVED_EVERY = 25
"""Pictures after which what was seen is written to disk."""
_REPORT_RESAMPLES = 200


@dataclass(frozen=True, slots=True)
class _Candidate:
    table: VariantTable
    family: Family
    searched: Searched


def quantize_bundle(
    source: Bundle,
    out_dir: Path,
    *,
    pictures: Iterable[CalibrationPicture],
    pictures_key: str,
    read_image: ReadImage,
    scaler: str,
    search: Search,
    cpu: str,
    work: Path,
    dataset: Dataset | None = None,
    max_loss: float = 0.01,
    search_loss: float | None = None,
    accept: Accept = "bound",
    method: MethodChoice = "auto",
    families: Sequence[Family] = FAMILIES,
    variants: Sequence[str] = (),
    minutes: float | None = None,
    overwrite: bool = False,
    lanes: int = 1,
    seed: int = 0,
    resamples: int = RESAMPLES,
    progress: Progress = lambda *_: None,
) -> QuantizeResult:
    """Make the bundle `out_dir`: the source's variants, and for each, `int8-SIZE` for ONNX Runtime before it where it
    is faster here, and `int8-trt-SIZE` for TensorRT behind it.

    All variants of float32 weights, or those named, that have a file for onnxruntime. `pictures`: to calibrate with,
    taken one after the other; `pictures_key`: what they are taken of. `dataset`: labelled pictures, none of which is
    among these; it is looked at once, when every choice is made. Left out, every fourth of the pictures is held back
    instead, and what the float model says of it is taken for right.

    `search` sees calibration pictures alone, for `minutes` at most for each artefact, and may lose `search_loss` there
    against the float model's own answers (relative; left out: `max_loss`). `cpu`: the processor that speeds
    are measured on. `work`: a folder for what an interrupted run has done, and which the next one with the same
    arguments goes on from; the caller removes it.

    An artefact that the gate refuses is not written, nor one that brings nothing. With none left there is no bundle,
    `out_dir` is as it was, and the report lies beside it as `NAME.quantize.html`.

    Raises UsageError and BundleError for what cannot be quantised; EdgeError (code "write_failed") when the disk
    refuses.
    """
    check_target(out_dir, overwrite)
    tables = _convertible(source, tuple(dict.fromkeys(variants)) or _float_variants(source), families)
    notes: list[str] = []
    gathered = _gathered(pictures, work, pictures_key, read_image, progress)
    calibration = Calibration(gathered, hold_back=dataset is None)
    shown = list(calibration)
    calibration.check()
    held_out = None if dataset is None else HeldOut(dataset, calibration.digests, _digests(dataset))
    if len(shown) < FEW_PICTURES:
        low, high = WANTED_PICTURES
        notes.append(f"calibrated with {len(shown)} pictures only: {low} to {high} varied ones are wanted")
    candidates: list[_Candidate] = []
    features: NDArray[np.float64] = np.zeros((0, len(FEATURES)))
    for table in tables:
        where = str(source.artefact(table.name, "onnxruntime").path)
        model = float_model(source.read_artefact(table.name, "onnxruntime"), where)
        folder = work / table.name
        folder.mkdir(parents=True, exist_ok=True)
        spec, output = source.input_spec(table.name), source.output_spec()
        meter = ActivationMeter(model, activations(model), where)
        probe = Probe(model.SerializeToString(), spec, output, folder, where=where, lanes=lanes, seed=seed)
        features = _see(shown, meter, probe, folder / "seen.npz", table.name, progress)
        for family in families:
            (folder / family).mkdir(exist_ok=True)
            searched = search(
                model, meter, family=family, probe=probe,
                search_loss=max_loss if search_loss is None else search_loss, method=method, minutes=minutes,
                folder=folder / family, seed=seed, progress=progress,
            )  # fmt: skip
            if family == "tensorrt" and searched.model is not None:
                _check_symmetric(searched.model, int8_name(table.name, family))
            notes += [f"{int8_name(table.name, family)}: {note}" for note in searched.notes]
            candidates.append(_Candidate(table, family, searched))

    if held_out is None:
        data, read_image = calibration.held_back(source, read_image)
        if any(each.searched.model is not None for each in candidates):
            notes.append(
                f"judged without labels, by the float model's own answers on {len(data.samples)} pictures that were "
                "held back (frames of one clip are alike and prove little); --evaluate with labelled ones says what it "
                "costs"
            )
    else:
        data = held_out.take()
    draft = QuantizedDraft(source, out_dir, read_image, notes)
    look = Look(source, data, read_image, scaler, lanes, progress)
    artefacts = tuple(
        _judged(each, look, draft, labelled=dataset is not None, max_loss=max_loss, accept=accept, seed=seed,
                resamples=resamples)
        for each in candidates
    )  # fmt: skip
    facts = CalibrationFacts(
        calibration_digest(picture.sha256 or "" for picture in shown), len(shown), look.unlike(shown, features)
    )
    if facts.unlike:
        notes.append(
            f"the calibration pictures look unlike those that were judged by: {', '.join(map(str, facts.unlike))}; "
            "calibrate with pictures such as the cameras will see"
        )
    page = render_report(source, artefacts, facts, data, cpu, notes)
    if not any(each.outcome == "accepted" for each in artefacts):
        report = out_dir.with_name(f"{out_dir.name}.quantize.html")
        write_atomic(report, page)
        return QuantizeResult(None, artefacts, facts, report, tuple(notes))
    bundle, report = draft.write(artefacts, facts, page, cpu)
    return QuantizeResult(bundle, artefacts, facts, report, tuple(notes))


def int8_name(name: str, family: Family) -> str:
    """How an INT8 variant made of the variant `name` is called: `int8-416` of `fp32-416`, and `int8-trt-416`."""
    head = "int8" if family == "onnxruntime" else "int8-trt"
    return head if name == "fp32" else f"{head}-{name.removeprefix('fp32-')}"


def _float_variants(source: Bundle) -> list[str]:
    found = [name for name in source.variants_for("onnxruntime") if source.variant(name).precision == "fp32"]
    if not found:
        raise BundleError(
            "has no fp32 variant with a file for onnxruntime, and ranges and losses are seen there",
            code="quantise_refused",
            where=str(source.root),
            remedy="take the bundle that it was made of",
        )
    return found


def _convertible(source: Bundle, names: Sequence[str], families: Sequence[Family]) -> list[VariantTable]:
    tables: list[VariantTable] = []
    taken = set(source.variants)
    for name in names:
        table = source.variant(name, "onnxruntime")
        if table.precision != "fp32":
            message = f"variant {table.name!r} is {table.precision} already"
            raise UsageError(
                message, where=str(source.root), remedy=f"name one of {', '.join(_float_variants(source))}"
            )
        for made in (int8_name(table.name, family) for family in families):
            if made in source.variants:
                remedy = "take the bundle that it was made of"
                raise UsageError(f"has a variant {made!r} already", where=str(source.root), remedy=remedy)
            if made in taken:
                remedy = "quantise one of them after the other, by --variant, or rename one"
                raise UsageError(f"two variants would be made as {made!r}", where=str(source.root), remedy=remedy)
            taken.add(made)
        tables.append(table)
    return tables


def _gathered(
    pictures: Iterable[CalibrationPicture], work: Path, key: str, read_image: ReadImage, progress: Progress
) -> list[CalibrationPicture]:
    found = []
    for picture in gather(pictures, work / "pictures", key=key, read_image=read_image):
        found.append(picture)
        progress("gathering", len(found), 0)
    return found


def _digests(dataset: Dataset) -> list[str]:
    return [hashlib.sha256(sample.path.read_bytes()).hexdigest() for sample in dataset.samples]


def _see(
    shown: Sequence[CalibrationPicture],
    meter: ActivationMeter,
    probe: Probe,
    state: Path,
    variant: str,
    progress: Progress,
) -> NDArray[np.float64]:
    """Show every picture to meter and probe, the meter only those that it did not see in an earlier run; what the
    pictures look like, [pictures, features]."""
    names = [f"{picture.name} {picture.sha256}" for picture in shown]
    known = 0
    # what is damaged or of other pictures is seen again
    with contextlib.suppress(UsageError):
        known = meter.restore(state, names, (probe.spec,))
    features = np.zeros((len(shown), len(FEATURES)))
    for index, picture in enumerate(shown):
        pixels = picture.read()
        features[index] = features_of(pixels)
        probe.show(pixels)
        if index >= known:
            meter.show((pixels,), probe.spec)
            if meter.pictures % _SAVED_EVERY == 0 or meter.pictures == len(shown):
                meter.save(state, names[: meter.pictures])
        progress(f"calibrating {variant}", index + 1, len(shown))
    return features


def _judged(
    candidate: _Candidate,
    look: Look,
    draft: QuantizedDraft,
    *,
    labelled: bool,
    max_loss: float,
    accept: Accept,
    seed: int,
    resamples: int,
) -> Artefact:
    table, searched = candidate.table, candidate.searched
    name = int8_name(table.name, candidate.family)
    if searched.model is None:
        return Artefact(name, table.name, candidate.family, "nothing to gain", searched, None, None)
    before = look.of_float(table.name)
    with tempfile.TemporaryDirectory(prefix="edge-runtime-int8-") as folder:
        run = imitate_symmetric(searched.model) if candidate.family == "tensorrt" else searched.model
        trial = trial_bundle(draft.source, table, name, "int8", run, Path(folder) / "trial")
        said = look.say(trial, name)
        right = (
            look.data if labelled else agreement_truth(look.data, before, draft.source.output_spec().score_threshold)
        )
        gate = judge(
            right, before, said, max_loss=max_loss, accept=accept, basis="labels" if labelled else "agreement",
            seed=seed, resamples=resamples,
        )  # fmt: skip
        if gate.passed:
            accuracy: dict[str, Any] | None = None
            if labelled:
                accuracy = measure(look.data, said).table().model_dump(exclude_none=True)
            draft.add(table, name, candidate.family, searched.model, accuracy, trial)
    comparison = compare(right, before, said, seed=seed, resamples=min(resamples, _REPORT_RESAMPLES))
    outcome: Outcome = "accepted" if gate.passed else "refused"
    return Artefact(name, table.name, candidate.family, outcome, searched, gate, comparison)


def _check_symmetric(model: bytes, name: str) -> None:
    if problems := check_symmetric(onnx.load_model_from_string(model)):
        raise RefusedError(
            f"TensorRT would not take it: {'; '.join(problems[:5])}",
            code="not_symmetric",
            where=name,
            remedy="report the model",
        )
