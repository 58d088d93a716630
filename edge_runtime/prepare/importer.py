"""`prepare import`: an ONNX model becomes a bundle that is proved to load, or nothing at all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_runtime.durable import write_atomic
from edge_runtime.engine.bundle import Bundle
from edge_runtime.engine.onnxrt import OnnxRuntimeEngine, open_session
from edge_runtime.engine.probe import ReadImage
from edge_runtime.engine.session_check import output_shapes
from edge_runtime.errors import BundleError, RefusedError, UsageError
from edge_runtime.prepare.bundle_draft import BundleDraft, Golden, check_target, named_reader
from edge_runtime.prepare.contact_sheet import MAX_PICTURES, cell, contact_sheet
from edge_runtime.prepare.exporters import Stated, read_stated, refuse_unreadable
from edge_runtime.prepare.families import Triple
from edge_runtime.prepare.onnx_file import OnnxFile, Precision, read_onnx, without_softmax
from edge_runtime.prepare.sanity import LEAST_TO_COMPARE, SanityReport, alternatives, run_sanity
from edge_runtime.prepare.suggest import (
    Ask,
    Setting,
    caution,
    input_settings,
    layout_setting,
    reasons,
    settle,
    size_setting,
)
from edge_runtime.records.spec import Color, InputSpec, Layout, Resize

__all__ = ["ImportResult", "import_model"]

Size = tuple[int, int]
_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
_MOST_PICTURES = 64


@dataclass(frozen=True, slots=True)
class ImportResult:
    """The new bundle; every setting with its source; in plain words what was taken or changed on the way.

    `sanity` and `sheet` (the contact sheet's file) are None where no pictures were given for them.
    """

    bundle: Bundle
    notes: tuple[str, ...]
    settings: tuple[Setting, ...]
    sanity: SanityReport | None = None
    sheet: Path | None = None


def import_model(
    onnx_path: Path,
    out_dir: Path,
    *,
    labels: Path | None = None,
    name: str | None = None,
    version: str = "1",
    layout: Layout | None = None,
    sizes: Sequence[Size] = (),
    color: Color | None = None,
    resize: Resize | None = None,
    pad: int | None = None,
    scale: float | None = None,
    mean: Triple | None = None,
    std: Triple | None = None,
    short_side: int | None = None,
    score_threshold: float = 0.3,
    nms_iou: float = 0.6,
    max_detections: int = 300,
    precision: Precision | None = None,
    licence: str | None = None,
    pictures: Sequence[Path] = (),
    images: Sequence[Path] = (),
    sheet: Path | None = None,
    read_image: ReadImage | None = None,
    tolerance: float = 0.02,
    ask: Ask | None = None,
    accept: bool = False,
    force: bool = False,
    overwrite: bool = False,
) -> ImportResult:
    """Make the bundle `out_dir` of an ONNX model: one variant per size, all of the same file.

    labels: a text file with a class name a line, or a JSON list; left out, the metadata's. sizes: (width, height)
    in px; left out, the model's own. What is None is suggested from the file and the layout's convention, and
    settled as `suggest.py` says: through `ask`, or by `accept` for what has a suggestion. pictures: made into
    golden pictures of each size through `read_image`, with the model's answers as golden outputs.

    images: pictures for the sanity run of the first size (`sanity.py`) and for the contact sheet, a PNG written
    to `sheet` (default: `out_dir` with .import.png added) before anything is refused. `force`: what the run
    finds wrong becomes a note.

    The bundle is written aside, loaded, run, and only then put in place in one rename: there never is a half
    one. With `overwrite` an existing bundle is replaced (in two renames; it comes back if the second fails).

    Raises BundleError for a model that cannot be a bundle as described, UsageError for what the caller has to
    decide or correct (code "settings_open" where settings have to be said), RefusedError (code "sanity") where
    the sanity run says no, EdgeError (code "write_failed") when the disk refuses.
    """
    check_target(out_dir, overwrite)
    if (pictures or images) and read_image is None:
        raise UsageError("pictures need a reader of pictures")
    notes: list[str] = []
    images = _listed(images, notes)
    sheet = sheet or out_dir.with_name(f"{out_dir.name}.import.png")
    if images and not sheet.parent.is_dir():
        raise UsageError("there is no such folder", where=str(sheet.parent), remedy="make it first")
    where = str(onnx_path)
    model = read_onnx(onnx_path)
    if model.joined:
        notes.append("the weights in the second file (external data) were joined into model.onnx")
    refuse_unreadable(model, where)
    stated = read_stated(model, where)
    notes += stated.notes
    words, labels_setting = _labels(labels, stated, where, notes)
    (size,) = settle([size_setting(model, stated, tuple(sizes))], ask, accept, where)
    shapes, _ = output_shapes(open_session(model.data, where), InputSpec(*size.value[0]), where)
    first = layout_setting(shapes, size.value[0], len(words), stated, layout, where)
    agreed = not first.open
    if ask is not None or first.source is None:  # all else depends on it
        (first,) = settle([first], ask, accept, where)
    given = {"color": color, "resize": resize, "pad": pad, "scale": scale, "mean": mean, "std": std}
    rest = input_settings(first, agreed, stated, {**given, "short_side": short_side})
    chosen, *rest = settle([first, *rest], ask, accept, where)
    settings = (size, chosen, *rest, labels_setting)
    notes += _taken(settings, chosen.value)
    if note := caution(chosen.value, rest):
        notes.append(note)
    if chosen.value == "classify" and (bare := without_softmax(model)) is not None:
        model = bare
        notes.append("the softmax at the end was taken out of model.onnx: scores are computed from its logits")
    licence = licence or stated.licence
    if licence is None:
        notes.append("no licence was given: the bundle says 'not stated'")
    draft = BundleDraft(
        files={"model.onnx": model.data},
        labels=words,
        bundle={
            "name": name or out_dir.resolve().name,
            "version": version,
            "task": "classify" if chosen.value == "classify" else "detect",
            "labels": "labels.txt",
            "licence": licence or "not stated",
        },
        input={"layout": "NCHW", **{one.key: one.value for one in rest}},
        output={
            "layout": chosen.value,
            "score_threshold": score_threshold,
            "nms_iou": nms_iou,
            "max_detections": max_detections,
        },
        variants=[_variant(precision or model.precision, one, model) for one in size.value],
    )
    check = None
    if images:
        assert read_image is not None
        check = _Check(images, named_reader(read_image), sheet, force, notes)
    golden = None
    if pictures and read_image is not None:
        named = [variant["name"] for variant in draft.variants]
        golden = Golden(dict.fromkeys(named, pictures), named_reader(read_image), tolerance)
    bundle = draft.write(out_dir, golden, check, notes)
    if not pictures:
        notes.append("no golden pictures: engines of this bundle can't be proved after a build; give some pictures")
    if check is None:
        notes.append("no pictures were looked at: a wrong colour order or scale would not show; give some by --images")
        return ImportResult(bundle, tuple(notes), settings)
    return ImportResult(bundle, tuple(notes), settings, check.report, sheet)


def _taken(settings: Sequence[Setting], layout: Layout) -> list[str]:
    """What was not given, one line for each reason."""
    taken = [one for one in settings if one.source not in (None, "given") and one.value is not None]
    told_of = reasons(taken)
    return [
        f"{reason.replace('usual', f'usual for {layout}', 1)}: {', '.join(values)}"
        for reason, values in told_of.items()
    ]


def _listed(paths: Sequence[Path], notes: list[str]) -> list[Path]:
    """The pictures that files and folders name, in order; of very many, some spread evenly."""
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            found.append(path)
            continue
        inside = sorted(file for file in path.iterdir() if file.suffix.lower() in _SUFFIXES)
        if not inside:
            raise UsageError("holds no pictures", where=str(path), remedy=f"wanted are files {', '.join(_SUFFIXES)}")
        found += inside
    if len(found) > _MOST_PICTURES:
        notes.append(f"{_MOST_PICTURES} of {len(found)} pictures are looked at, spread evenly")
        found = [found[index * len(found) // _MOST_PICTURES] for index in range(_MOST_PICTURES)]
    return found


def _labels(path: Path | None, stated: Stated, where: str, notes: list[str]) -> tuple[tuple[str, ...], Setting]:
    if path is None:
        if stated.labels is None:
            raise UsageError(
                "the file does not name its classes", code="settings_open", where=where, remedy="pass --labels FILE"
            )
        return stated.labels, Setting("labels", f"{len(stated.labels)} names", "stated", "the metadata")
    words = _read_labels(path)
    if stated.labels is not None and len(stated.labels) != len(words):
        raise BundleError(
            f"names {len(words)} classes, and the model's metadata {len(stated.labels)}",
            code="labels_contradict",
            where=str(path),
            remedy="name the model's own labels, or leave --labels out",
        )
    if stated.labels is not None and stated.labels != words:
        place = next(index for index, (one, other) in enumerate(zip(words, stated.labels, strict=True)) if one != other)
        notes.append(f"class {place} is {words[place]!r} by {path} and {stated.labels[place]!r} by the metadata")
    return words, Setting("labels", str(path), "given", "given")


class _Check:
    """The sanity run and the contact sheet over an engine that is not in place yet."""

    def __init__(
        self, images: Sequence[Path], read_image: ReadImage, sheet: Path, force: bool, notes: list[str]
    ) -> None:
        self._images = images
        self._read_image = read_image
        self._sheet = sheet
        self._force = force
        self._notes = notes
        self.report: SanityReport | None = None

    def __call__(self, engine: OnnxRuntimeEngine) -> None:
        """Raises RefusedError (code "sanity") with the figures."""
        info = engine.info
        trials = alternatives(info.input, info.output, info.output_shapes)
        self.report = report = run_sanity(engine, self._images, self._read_image, trials)
        beside = report.better or report.leads
        self._draw(report, beside, info.output.labels)
        told_of = f"beside each picture as chosen, with {beside}: {self._sheet}" if beside else f"see {self._sheet}"
        if report.problems and not self._force:
            better = f"pass {report.better}; " if report.better else ""
            raise RefusedError(
                f"the sanity run over {report.pictures} pictures says no: {'; '.join(report.problems)}",
                code="sanity",
                remedy=f"{better}{told_of}; --force imports it as it is",
            )
        self._notes += [f"forced in spite of the sanity run: {problem}" for problem in report.problems]
        if report.leads:
            self._notes.append(
                f"{report.leads} may be better: evidence {report.evidence(report.leads):.2f} against "
                f"{report.evidence():.2f}, not enough to be sure; give more pictures"
            )
        if report.pictures < len(self._images):
            self._notes.append(f"{report.pictures} of {len(self._images)} pictures were run in {report.seconds:.0f} s")
        if report.pictures < LEAST_TO_COMPARE:
            self._notes.append(f"fewer than {LEAST_TO_COMPARE} pictures: other settings were not compared")
        found = sum(len(one.output) for one in report.seen[""])
        self._notes.append(f"sanity run: {report.pictures} pictures, {found} results; {told_of}")

    def _draw(self, report: SanityReport, beside: str | None, labels: Sequence[str]) -> None:
        cells = []
        for place, path in enumerate(self._images[: min(MAX_PICTURES, report.pictures)]):
            outputs = [report.seen[flags][place].output for flags in ("", beside) if flags is not None]
            cells.append(cell(self._read_image(path), outputs, labels))
        write_atomic(self._sheet, contact_sheet(cells))


def _read_labels(path: Path) -> tuple[str, ...]:
    try:
        text = path.read_text("utf-8-sig")
        words = json.loads(text) if path.suffix == ".json" else text.splitlines()
    except OSError as error:
        raise BundleError(
            f"cannot be read: {error.strerror}", code="labels_invalid", where=str(path), remedy="name the labels' file"
        ) from None
    except ValueError as error:  # no UTF-8, no JSON
        raise BundleError(
            f"is no list of labels: {error}", code="labels_invalid", where=str(path), remedy="write one name a line"
        ) from None
    while isinstance(words, list) and words and words[-1] == "":
        words.pop()
    if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
        raise BundleError(
            "names no classes", code="labels_invalid", where=str(path), remedy="write one name a line, or a JSON list"
        )
    return tuple(" ".join(word.split()) for word in words)


def _variant(precision: Precision, size: Size, model: OnnxFile) -> dict[str, Any]:
    width, height = size
    side = str(width) if width == height else f"{width}x{height}"
    file = {"path": "model.onnx", "sha256": hashlib.sha256(model.data).hexdigest()}
    return {
        "name": f"{precision}-{side}",
        "precision": precision,
        "size": [width, height],
        "pixel": "float32",
        "files": {"onnxruntime": file, "tensorrt": file},
    }
