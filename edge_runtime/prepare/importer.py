"""`prepare import`: an ONNX model becomes a bundle that is proved to load, or nothing at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from edge_runtime.durable import sync_folder, write_atomic
from edge_runtime.engine.bundle import MANIFEST_NAME, Bundle, load_bundle
from edge_runtime.engine.onnxrt import load_engine, open_session, output_shapes
from edge_runtime.engine.probe import ReadImage, probe, record_golden
from edge_runtime.errors import BundleError, EdgeError, UsageError
from edge_runtime.prepare.families import FAMILIES, USUAL_NORMALISATIONS, Triple
from edge_runtime.prepare.manifest_text import manifest_text
from edge_runtime.prepare.onnx_file import OnnxFile, Precision, read_onnx
from edge_runtime.prepare.png import encode_png
from edge_runtime.records.spec import Color, InputSpec, Layout, Resize
from edge_runtime.vision.decode import suggest_layout

__all__ = ["ImportResult", "import_model"]

Size = tuple[int, int]


@dataclass(frozen=True, slots=True)
class ImportResult:
    """The new bundle, and in plain words what was assumed or changed on the way."""

    bundle: Bundle
    notes: tuple[str, ...]


def import_model(
    onnx_path: Path,
    out_dir: Path,
    *,
    labels: Path,
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
    read_image: ReadImage | None = None,
    tolerance: float = 0.02,
    overwrite: bool = False,
) -> ImportResult:
    """Make the bundle `out_dir` of an ONNX model: one variant per size, all of the same file.

    labels: a text file with a class name a line, or a JSON list. sizes: (width, height) in px; left out, the
    model's own fixed size. What is None is filled in: `layout` where the output shapes allow only one, the
    preprocessing by what is usual for that layout; every such choice is in the result's notes. pictures: made
    into golden pictures of each size through `read_image`, with the model's answers as golden outputs.

    The bundle is written aside, loaded, run, and only then put in place in one rename: there never is a half
    one. With `overwrite` an existing bundle is replaced (in two renames; it comes back if the second fails).

    Raises BundleError for a model that cannot be a bundle as described, UsageError for what the caller has to
    decide or correct, EdgeError (code "write_failed") when the disk refuses.
    """
    _check_target(out_dir, overwrite)
    if pictures and read_image is None:
        raise UsageError("golden pictures need a reader of pictures")
    notes: list[str] = []
    model = read_onnx(onnx_path)
    if model.joined:
        notes.append("the weights in the second file (external data) were joined into model.onnx")
    words = _read_labels(labels)
    sizes = _sizes(model, str(onnx_path), tuple(sizes), notes)
    layout = _layout(model, str(onnx_path), sizes[0], len(words), layout, notes)
    family = FAMILIES[layout]
    given = {"color": color, "resize": resize, "pad": pad, "scale": scale, "mean": mean, "std": std}
    table: dict[str, Any] = {"layout": "NCHW"}
    for key, value in given.items():
        usual = getattr(family, key)
        if value is None and usual is None:
            raise UsageError(
                f"{layout} models differ in their {key}, and a wrong one costs accuracy without an error",
                where=f"--{key}",
                remedy=f"say what the model was trained with; usual are {USUAL_NORMALISATIONS}",
            )
        table[key] = usual if value is None else value
    assumed = [f"{key} = {_told(table[key])}" for key, value in given.items() if value is None]
    if assumed:
        notes.append(f"taken as usual for {layout}: {', '.join(assumed)}")
    table["short_side"] = short_side
    if licence is None:
        notes.append("no licence was given: the bundle says 'not stated'")
    precision = precision or model.precision
    draft = _Draft(
        bundle={
            "name": name or out_dir.resolve().name,
            "version": version,
            "task": "classify" if layout == "classify" else "detect",
            "labels": "labels.txt",
            "licence": licence or "not stated",
        },
        input=table,
        output={
            "layout": layout,
            "score_threshold": score_threshold,
            "nms_iou": nms_iou,
            "max_detections": max_detections,
        },
        variants=[_variant(precision, size, model) for size in sizes],
    )
    try:
        bundle = _write(out_dir, model, words, draft, pictures, read_image, tolerance, notes)
    except OSError as error:
        raise EdgeError(
            f"the bundle could not be written: {error.strerror or error}",
            code="write_failed",
            where=str(out_dir),
            remedy="check free space and rights; nothing was left behind",
        ) from error
    if not pictures:
        notes.append("no golden pictures: engines of this bundle can't be proved after a build; give some pictures")
    return ImportResult(bundle, tuple(notes))


@dataclass(slots=True)
class _Draft:
    bundle: Mapping[str, Any]
    input: Mapping[str, Any]
    output: Mapping[str, Any]
    variants: list[dict[str, Any]]


def _told(value: Any) -> str:
    return "/".join(f"{item:g}" for item in value) if isinstance(value, tuple) else str(value)


def _check_target(out_dir: Path, overwrite: bool) -> None:
    if not out_dir.exists():
        if not out_dir.parent.is_dir():
            raise UsageError("there is no such folder", where=str(out_dir.parent), remedy="make it first")
        return
    if out_dir.is_dir() and not any(out_dir.iterdir()):
        return
    if not (out_dir / MANIFEST_NAME).is_file():
        raise UsageError("exists and is no bundle", where=str(out_dir), remedy="name a new folder")
    if not overwrite:
        raise UsageError("is a bundle already", where=str(out_dir), remedy="name a new folder, or pass --overwrite")


def _sizes(model: OnnxFile, where: str, sizes: tuple[Size, ...], notes: list[str]) -> tuple[Size, ...]:
    if sizes:
        return tuple(dict.fromkeys(sizes))
    inputs = open_session(model.data, where).get_inputs()
    shape = list(inputs[0].shape) if len(inputs) == 1 else []
    if len(shape) != 4:  # not for pictures: the check with any size says what is wrong
        return ((416, 416),)
    height, width = shape[2:]
    if isinstance(height, int) and isinstance(width, int):
        notes.append(f"size = {width}x{height}, the model's own")
        return ((width, height),)
    raise UsageError(
        "the model takes pictures of any size, so the size has to be chosen",
        where=where,
        remedy="pass --size WIDTHxHEIGHT, such as 416x416; larger is more accurate and slower",
    )


def _layout(model: OnnxFile, where: str, size: Size, classes: int, layout: Layout | None, notes: list[str]) -> Layout:
    spec = InputSpec(*size)
    shapes, _ = output_shapes(open_session(model.data, where), spec, where)
    if layout is not None:
        return layout  # load_engine judges it, with its own words
    found = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
    fits = suggest_layout(shapes, *size, classes=classes)
    if len(fits) == 1:
        notes.append(f"layout = {fits[0].layout}: the only known one that fits {found} with {classes} labels")
        return fits[0].layout
    if fits:
        raise UsageError(
            f"the outputs {found} could be of several layouts: {', '.join(fit.layout for fit in fits)}",
            code="layout_ambiguous",
            where=where,
            remedy="pass --layout with the one that the model was made with",
        )
    others = suggest_layout(shapes, *size)
    would = " or ".join(f"{fit.layout} with {fit.classes} labels" for fit in others)
    raise BundleError(
        f"the outputs {found} fit no known layout with {classes} labels",
        code="layout_mismatch",
        where=where,
        remedy=f"they would fit {would}" if would else f"known layouts are {', '.join(FAMILIES)}",
    )


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


def _write(
    out_dir: Path,
    model: OnnxFile,
    words: Sequence[str],
    draft: _Draft,
    pictures: Sequence[Path],
    read_image: ReadImage | None,
    tolerance: float,
    notes: list[str],
) -> Bundle:
    aside = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.", suffix=".new", dir=out_dir.parent))
    try:
        aside.chmod(0o755)
        write_atomic(aside / "model.onnx", model.data)
        write_atomic(aside / "labels.txt", "".join(f"{word}\n" for word in words).encode())
        _write_manifest(aside, draft)
        bundle = load_bundle(aside)
        for name in bundle.variants:
            engine = load_engine(bundle, name)
            if engine.allowed_batches is not None:
                notes.append(f"{name} runs batches of {engine.allowed_batches[0]} only: its batch axis is fixed")
            engine.close()
        if pictures:
            assert read_image is not None
            for variant in draft.variants:
                _add_golden(aside, bundle, variant, pictures, read_image, tolerance)
            _write_manifest(aside, draft)
            bundle = load_bundle(aside)
            for name in bundle.variants:  # proves that what was just written is read back as meant
                engine = load_engine(bundle, name)
                probe(engine, engine.open_lane(), bundle, name, read_image)
                engine.close()
        _put_in_place(aside, out_dir)
        return replace(bundle, root=out_dir)
    except BundleError as error:
        # The folder aside is gone when the operator reads this.
        hint = error.message.replace(f"{aside}{os.sep}", "")
        place = error.where.replace(str(aside), str(out_dir)) if error.where else None
        raise BundleError(hint, code=error.code, where=place, remedy=error.remedy) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write_manifest(folder: Path, draft: _Draft) -> None:
    listed = {"model.onnx", MANIFEST_NAME}
    files = {}
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder).as_posix()
        if path.is_file() and relative not in listed:
            files[relative] = hashlib.sha256(path.read_bytes()).hexdigest()
    text = manifest_text(draft.bundle, draft.input, draft.output, draft.variants, files)
    write_atomic(folder / MANIFEST_NAME, text.encode())


def _add_golden(
    folder: Path,
    bundle: Bundle,
    variant: dict[str, Any],
    pictures: Sequence[Path],
    read_image: ReadImage,
    tolerance: float,
) -> None:
    name = variant["name"]
    place = folder / "golden" / name
    place.mkdir(parents=True)
    made = []
    for number, picture in enumerate(pictures, start=1):
        path = place / f"{number:02d}-{picture.stem}.png"
        write_atomic(path, golden_picture(read_image, picture, bundle.input_spec(name)))
        made.append(path)
    sync_folder(place)
    engine = load_engine(bundle, name)
    try:
        write_atomic(folder / "golden" / f"{name}.npz", record_golden(engine, engine.open_lane(), made, read_image))
    finally:
        engine.close()
    variant["golden"] = {
        "inputs": f"golden/{name}/*.png",
        "outputs": f"golden/{name}.npz",
        "tolerance": tolerance,
    }


def golden_picture(read_image: ReadImage, picture: Path, spec: InputSpec) -> bytes:
    """A PNG of the picture as the model sees it before normalisation: preprocessing it again scales nothing.

    Its size is the model's input, or for a crop with a `short_side` the part around it. The last three bits of
    every value are levelled, which halves the file and leaves people people.
    """
    size = replace(spec, color="RGB", scale=1.0, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    if spec.short_side is not None:
        size = replace(size, width=max(spec.width, spec.short_side), height=max(spec.height, spec.short_side))
    plane = np.empty(size.shape, np.float32)
    read_image(picture).write_into(plane, size)
    pixels = np.clip(np.rint(plane), 0, 255).astype(np.uint8).transpose(1, 2, 0)
    pixels = pixels & np.uint8(0xF8) | np.uint8(0x04)
    return encode_png(pixels)


def _put_in_place(aside: Path, out_dir: Path) -> None:
    sync_folder(aside)
    old = aside.with_suffix(".old")
    replaced = out_dir.exists()
    if replaced:
        out_dir.rename(old)
    try:
        aside.rename(out_dir)
    except OSError:
        if replaced:
            old.rename(out_dir)
        raise
    sync_folder(out_dir.parent)
    if replaced:
        shutil.rmtree(old, ignore_errors=True)
