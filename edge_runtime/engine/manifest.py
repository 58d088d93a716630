"""bundle.toml: what a model bundle says of itself, and every way in which it can say it wrongly."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, Field, StringConstraints, ValidationError
from pydantic_core import ErrorDetails

from edge_runtime.engine.manifest_prepared import GateTable, PreparedTable, SpeedTable
from edge_runtime.engine.manifest_values import FileTable, Finite, Name, Positive, Sha256, Side, Table, Text, Unit
from edge_runtime.errors import BundleError, ConfigError, ConfigProblem
from edge_runtime.records.spec import Color, Layout, Pixel, Resize, Task
from edge_runtime.toml_source import KeyPath, TomlSource, parse_toml

Backend = Literal["onnxruntime", "tensorrt"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)

# Words that the bundle format has and this version does not read yet: refused with that word, not as typos.
_NOT_YET: Mapping[str, tuple[str, ...]] = {
    "input.layout": ("NHWC",),
}
# Names of models for which people look, and what to write for their outputs: layouts are called after the first
# model that had them.
_READ_AS: Mapping[str, Mapping[str, str]] = {
    "variant.pixel": {
        **dict.fromkeys(
            ("uint8", "rgb24", "bgra", "bgrx", "rgbx"),
            'bytes are "bgr24", "rgba" or "nv12": `edge-runtime prepare fuse` makes a model that takes one of them',
        ),
        **dict.fromkeys(("i420", "yuv420p"), 'of the formats with one colour for 2 x 2 pixels it reads "nv12"'),
    },
    "output.layout": {
        "yolov7": '"yolov5" reads it',
        **dict.fromkeys(("yolov9", "yolov11", "yolov12", "yolo11", "yolo12"), '"yolov8" reads it'),
        **dict.fromkeys(
            ("yolov26", "yolo26"), '"yolov10" reads its end-to-end output [1, K, 6], "yolov8" its output [1, 4 + C, N]'
        ),
    },
}


class BundleTable(Table):
    """`[bundle]`: who it is. `labels` is a text file with one class name a line, in class order."""

    name: Name
    version: Text
    task: Task
    labels: Text
    licence: Text


class InputTable(Table):
    """`[input]`: how a picture becomes the input; see records.spec.InputSpec."""

    layout: Literal["NCHW"] = "NCHW"
    color: Color
    resize: Resize
    pad: Annotated[int, Field(ge=0, le=255)] = 114
    scale: Positive = 1.0
    mean: tuple[Finite, Finite, Finite] = (0.0, 0.0, 0.0)
    std: tuple[Positive, Positive, Positive] = (1.0, 1.0, 1.0)
    short_side: Side | None = None


class OutputTable(Table):
    """`[output]`: how the outputs are read; see records.spec.OutputSpec."""

    layout: Layout
    score_threshold: Unit = 0.3
    nms_iou: Unit = 0.6
    max_detections: Annotated[int, Field(ge=1, le=100_000)] = 300


class SignatureTable(Table):
    """Who vouches for a plan: `key` is the first 16 hex digits of the sha256 of the public key, `value` the signature
    in base64. What it is of, and whether it is right, engine/signing.py says."""

    key: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
    value: Annotated[str, StringConstraints(min_length=1, max_length=1024)]


class PlanTable(Table):
    """A TensorRT plan that was built elsewhere, its sidecar, and for what: used only on a device just like that, and
    only where it is signed by a key that the device knows or the bundle's origin is trusted, since a plan is native
    code. Others build their own from `tensorrt`."""

    path: Text
    sha256: Sha256
    sidecar: FileTable
    tensorrt: Text
    compute_capability: Text
    device: Text
    signature: Annotated[tuple[SignatureTable, ...], Field(max_length=16)] = ()


class FilesTable(Table):
    """Which artefact each backend loads; at least one."""

    onnxruntime: FileTable | None = None
    tensorrt: FileTable | None = None
    tensorrt_plan: tuple[PlanTable, ...] = ()


class GoldenTable(Table):
    """Pictures (a glob) and what the model answers to them (an npz), for the golden check; see engine/probe.py.

    `tolerance` is the largest deviation, as a share of each output's own largest magnitude.
    """

    inputs: Text
    outputs: Text
    tolerance: Positive


class AccuracyTable(Table):
    """A measured accuracy, and on what and how it was measured."""

    metric: Literal["mAP", "top1"]
    value: Unit
    data: Text
    data_sha256: Sha256 | None = None
    images: Annotated[int, Field(ge=1)]
    scaler: Text | None = None
    backend: Backend


class VariantTable(Table):
    """`[[variant]]`: one artefact set of one input size; `size` is [width, height] in px.

    `pixel`: what the model takes; anything but float32 has its preprocessing in the graph, see records.spec.InputSpec.
    `prepared`: for a variant that was made of another one by calibration, how and by what it was accepted.
    """

    name: Name
    precision: Literal["fp32", "fp16", "int8"]
    size: tuple[Side, Side]
    pixel: Pixel = "float32"
    files: FilesTable
    golden: GoldenTable | None = None
    accuracy: AccuracyTable | None = None
    prepared: PreparedTable | None = None


class Manifest(Table):
    """A whole bundle.toml.

    `files`: the sha256 of every file that no variant's `files` lists (labels, golden pictures and outputs), by
    its path in the bundle, so that the digest of bundle.toml stands for all of it. Optional; what is listed is
    verified, and when the table is there, every file the manifest names has to be in it.
    """

    bundle: BundleTable
    input: InputTable
    output: OutputTable
    variant: Annotated[tuple[VariantTable, ...], Field(min_length=1)]
    files: dict[str, Sha256] | None = None


def parse_manifest(text: str, file: str) -> tuple[Manifest, TomlSource]:
    """Parse and validate the text of a bundle.toml; `file` is its name in messages.

    Raises BundleError naming every problem found, each with line and key.
    """
    try:
        source = parse_toml(text, file)
    except ConfigError as error:
        raise BundleError(error.message, code="manifest_invalid") from None
    try:
        # Validated as JSON values are: arrays for tuples, an int where a float is wanted, nothing looser.
        manifest = Manifest.model_validate(_tuples(source.data))
    except ValidationError as error:
        raise _invalid([_problem(source, details) for details in error.errors()]) from None
    problems = list(_contradictions(manifest, source))
    if problems:
        raise _invalid(problems)
    return manifest, source


def _invalid(problems: list[ConfigProblem]) -> BundleError:
    return BundleError("\n".join(str(problem) for problem in problems), code="manifest_invalid")


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _problem(source: TomlSource, details: ErrorDetails) -> ConfigProblem:
    path: KeyPath = tuple(details["loc"])
    kind = details["type"]
    last = path[-1] if path else ""
    if kind == "extra_forbidden":
        known = _keys_at(path[:-1])
        near = difflib.get_close_matches(str(last), known, n=1, cutoff=0.6)
        remedy = f"did you mean {near[0]!r}?" if near else f"known keys here are {', '.join(known)}"
        return source.problem(path, "there is no such key", remedy)
    if kind == "missing":
        return source.problem(path, "is missing", _example(path))
    given = details.get("input")
    if kind == "literal_error":
        return _literal_problem(source, path, details, given)
    if kind == "string_pattern_mismatch":
        if str(last).endswith("sha256") or path[0] == "files":
            return source.problem(path, f"{_show(given)} is not 64 hex digits in lower case", _example(("sha256",)))
        if "signature" in path:
            return source.problem(path, f"{_show(given)} is not 16 hex digits in lower case", None)
        remedy = "letters, digits, '.', '_' and '-', beginning with a letter or digit"
        return source.problem(path, f"{_show(given)} is not a name", remedy)
    message = details["msg"][:1].lower() + details["msg"][1:]
    return source.problem(path, f"{message}, and it is {_show(given)}", None)


def _literal_problem(source: TomlSource, path: KeyPath, details: ErrorDetails, given: Any) -> ConfigProblem:
    plain = ".".join(part for part in path if isinstance(part, str))
    words = list(_words(plain))
    known = ", ".join(words) or str(details.get("ctx", {}).get("expected", ""))
    if given in _NOT_YET.get(plain, ()):
        return source.problem(path, f"{_show(given)} is not built yet in this version", f"it reads {known}")
    if isinstance(given, str) and (remedy := _READ_AS.get(plain, {}).get(given)):
        return source.problem(path, f"{_show(given)} is not one of the known words", remedy)
    lower = {word.lower(): word for word in words}
    near = [lower[word] for word in difflib.get_close_matches(str(given).lower(), lower, n=1, cutoff=0.6)]
    remedy = f"did you mean {near[0]!r}? known are {known}" if near else f"known are {known}"
    return source.problem(path, f"{_show(given)} is not one of the known words", remedy)


def _words(plain: str) -> tuple[str, ...]:
    choices: Mapping[str, Any] = {
        "bundle.task": Task,
        "input.layout": Literal["NCHW"],
        "input.color": Color,
        "input.resize": Resize,
        "output.layout": Layout,
        "variant.pixel": Pixel,
        "variant.precision": Literal["fp32", "fp16", "int8"],
        "variant.accuracy.metric": Literal["mAP", "top1"],
        "variant.accuracy.backend": Backend,
        "variant.prepared.method": Literal["minmax", "entropy", "percentile", "mse"],
        "variant.prepared.gate.basis": Literal["labels", "agreement"],
        "variant.prepared.gate.metric": Literal["mAP", "top1"],
        "variant.prepared.gate.accept": Literal["bound", "point"],
    }
    return tuple(get_args(choices[plain])) if plain in choices else ()


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _keys_at(path: KeyPath) -> list[str]:
    """The keys that the table at `path` may have."""
    tables: Mapping[str, type[BaseModel]] = {
        "": Manifest,
        "bundle": BundleTable,
        "input": InputTable,
        "output": OutputTable,
        "variant": VariantTable,
        "variant.files": FilesTable,
        "variant.files.onnxruntime": FileTable,
        "variant.files.tensorrt": FileTable,
        "variant.files.tensorrt_plan": PlanTable,
        "variant.files.tensorrt_plan.sidecar": FileTable,
        "variant.files.tensorrt_plan.signature": SignatureTable,
        "variant.golden": GoldenTable,
        "variant.accuracy": AccuracyTable,
        "variant.prepared": PreparedTable,
        "variant.prepared.gate": GateTable,
        "variant.prepared.speed": SpeedTable,
        "variant.prepared.report": FileTable,
    }
    table = tables.get(".".join(part for part in path if isinstance(part, str)))
    return sorted(table.model_fields) if table is not None else []


def _example(path: KeyPath) -> str | None:
    examples = {
        "bundle": "[bundle] with name, version, task, labels and licence",
        "input": "[input] with color and resize",
        "output": '[output] with layout = "..."',
        "variant": "at least one [[variant]] with name, precision, size and files",
        "size": "size = [width, height] in px",
        "files": 'files.onnxruntime = {path = "model.onnx", sha256 = "..."}',
        "sha256": "what `sha256sum` prints for the file",
        "color": '"RGB" or "BGR": a wrong one costs accuracy without an error',
        "labels": "a text file with one class name a line",
        "licence": "the licence of the weights, as an SPDX word or a sentence",
    }
    found = examples.get(str(path[-1])) if path else None
    return f"wanted is {found}" if found else None


def _contradictions(manifest: Manifest, source: TomlSource) -> Iterator[ConfigProblem]:
    """What each key allows by itself and no manifest may say at once."""
    if (manifest.bundle.task == "classify") != (manifest.output.layout == "classify"):
        message = f"task {manifest.bundle.task!r} does not go with the output layout {manifest.output.layout!r}"
        yield source.problem(
            ("bundle", "task"), message, 'classify goes with layout "classify", detect with the others'
        )
    if manifest.input.short_side is not None and manifest.input.resize != "crop":
        yield source.problem(("input", "short_side"), 'only goes with resize = "crop"', "remove it")
    names: dict[str, int] = {}
    for index, variant in enumerate(manifest.variant):
        at: KeyPath = ("variant", index)
        if variant.name == "auto":
            yield source.problem((*at, "name"), '"auto" is no name for a variant', "it means the first variant")
        if variant.name in names:
            yield source.problem((*at, "name"), f"{variant.name!r} is also variant {names[variant.name] + 1}", None)
        names.setdefault(variant.name, index)
        if variant.pixel == "nv12" and any(side % 2 for side in variant.size):
            message = f"is {variant.size[0]}x{variant.size[1]}, and nv12 has one colour for 2 x 2 pixels"
            yield source.problem((*at, "size"), message, "make both sides even, or use bgr24 or rgba")
        files = variant.files
        if files.onnxruntime is None and files.tensorrt is None:
            yield source.problem((*at, "files"), "lists no file", _example(("files",)))
        if files.tensorrt_plan and files.tensorrt is None:
            message = "there is no files.tensorrt that these plans were built from"
            yield source.problem((*at, "files", "tensorrt_plan"), message, "list the ONNX: others build from it")
        short = manifest.input.short_side
        if short is not None and short < max(variant.size):
            message = f"is {short} px, and the crop of variant {variant.name!r} is {variant.size[0]}x{variant.size[1]}"
            yield source.problem(("input", "short_side"), message, "make it at least as large as the crop")
        golden = variant.golden
        report = variant.prepared and variant.prepared.report
        for key, path in [
            ("files.onnxruntime", files.onnxruntime and files.onnxruntime.path),
            ("files.tensorrt", files.tensorrt and files.tensorrt.path),
            ("golden.inputs", golden and golden.inputs),
            ("golden.outputs", golden and golden.outputs),
            ("prepared.report", report and report.path),
            *(("files.tensorrt_plan", path) for plan in files.tensorrt_plan for path in (plan.path, plan.sidecar.path)),
        ]:
            if path and (reason := escape(path)):
                yield source.problem((*at, *key.split(".")), f"{path!r} {reason}", _INSIDE)
        if report and (manifest.files or {}).get(report.path) != report.sha256:
            message = f"{report.path!r} is not listed under [files] with this sha256"
            yield source.problem((*at, "prepared", "report"), message, "the bundle's digest is to stand for it too")
    if reason := escape(manifest.bundle.labels):
        yield source.problem(("bundle", "labels"), f"{manifest.bundle.labels!r} {reason}", _INSIDE)
    for path in manifest.files or {}:
        if reason := escape(path):
            yield source.problem(("files", path), f"{path!r} {reason}", _INSIDE)


_INSIDE = "all files of a bundle lie in its own folder; name them relative to bundle.toml"


def escape(path: str) -> str | None:
    """Why a path in a manifest can not name a file of the bundle, or None. Symlinks are judged on disk, later."""
    parts = PurePosixPath(path)
    if parts.is_absolute():
        return "is an absolute path"
    if ".." in parts.parts:
        return "leads out of the bundle's folder"
    if "\\" in path or "\0" in path:
        return "holds a character that no path in a bundle may have"
    return None
