"""What an ONNX file says of itself: its metadata and names, as the common exporters write them.

Ultralytics' exporter writes `description`, `author`, `version`, `stride`, `task`, `imgsz`, `names` and more
into metadata_props, the values as Python literals; YOLOv5's own wrote only `stride` and `names`. YOLOX's and
NanoDet's write no metadata and can be told by the names of inputs and outputs; torchvision's, timm's and
Hugging Face's write nothing that tells the preprocessing. Whatever is read here was written by a stranger: it
is bounded, never evaluated as code, and ignored with a note where it is not what that exporter writes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edge_runtime.errors import BundleError
from edge_runtime.prepare.families import FAMILIES
from edge_runtime.prepare.onnx_file import OnnxFile
from edge_runtime.records.spec import Layout

__all__ = ["Stated", "read_literal", "read_stated", "refuse_unreadable"]

_MAX_LITERAL = 256 * 1024
_MAX_LABELS = 100_000
_MAX_WORD = 200
_STRINGS = re.compile(r"""'(?:[^'\\\n]|\\.)*'?|"(?:[^"\\\n]|\\.)*"?""")
_PLAIN = re.compile(r"[\[\]{}(),:\s]|\b(?:None|True|False)\b|-?\d+(?:\.\d+)?")
# What follows a value directly would be a call or an index: no literal has that, and chains of them nest deeply.
_CHAINED = re.compile(r"[\w)\]}]\s*[(\[{]")


@dataclass(frozen=True, slots=True)
class Stated:
    """What the file tells, each None (or empty) where it tells nothing.

    exporter: who wrote it; `layouts`: what that exporter writes, the likeliest first, and `certain` whether the
    metadata says so in words; `usual`: the exporter's own preprocessing where it differs from the layout's;
    `size`: (width, height) px; `notes`: what was ignored, and why.
    """

    exporter: str | None = None
    layouts: tuple[Layout, ...] = ()
    certain: bool = False
    usual: Mapping[str, Any] = field(default_factory=dict)
    labels: tuple[str, ...] | None = None
    size: tuple[int, int] | None = None
    licence: str | None = None
    notes: tuple[str, ...] = ()


def refuse_unreadable(model: OnnxFile, where: str) -> None:
    """Refuse what no setting could make readable, with how to export it otherwise. Raises BundleError."""

    def refuse(message: str, remedy: str, code: str = "model_unsupported") -> BundleError:
        return BundleError(message, code=code, where=where, remedy=remedy)

    for operator in sorted(model.operators):
        if operator.endswith("_TRT"):
            raise refuse(
                f"uses {operator}, a TensorRT plugin that ONNX Runtime does not have, so it can't be proved here",
                "export it without NMS in the graph: NMS is done by this program. The layout efficientnms is for "
                "graphs that build the same outputs from standard operators",
            )
    names = [port.name for port in model.inputs]
    if "orig_target_sizes" in names:
        raise refuse(
            f"has a second input, orig_target_sizes ({', '.join(names)}): RT-DETR's exporter scales the boxes inside",
            "export the network without its postprocessor (logits and boxes), or with Ultralytics or Hugging Face",
        )
    if "image_shape" in names or "im_shape" in names:
        raise refuse(
            f"has the inputs {', '.join(names)}: PaddleDetection's exporter scales the boxes inside",
            "export it with export.exclude_post_process=True, the picture being the only input",
        )
    if len(model.inputs) != 1:
        return  # the engine's own check has the words
    (picture,) = model.inputs
    if picture.kind == "UINT8":
        raise refuse(
            "takes uint8 pixels, so its preprocessing is inside, and a model without is wanted",
            "export it without the preprocessing steps; `prepare fuse` puts them in, as the bundle declares them",
            "input_mismatch",
        )
    if picture.kind == "FLOAT16":
        raise refuse(
            "takes a float16 input, and this version gives float32",
            "export it in full precision, or keep its inputs and outputs float32 (onnxconverter-common: "
            "keep_io_types=True)",
            "input_mismatch",
        )
    if len(picture.shape) == 4 and picture.shape[3] == 3 and picture.shape[1] != 3:
        raise refuse(
            f"takes pictures in the order NHWC ({picture.name}), as TensorFlow has them, and this version gives NCHW",
            f"convert it with `tf2onnx --inputs-as-nchw {picture.name}`",
            "input_mismatch",
        )


def read_stated(model: OnnxFile, where: str) -> Stated:
    """What the file says of itself. Raises BundleError for a model that by its own word has another task."""
    metadata = model.metadata
    notes: list[str] = []
    if metadata.get("author") == "Ultralytics" or ("task" in metadata and "stride" in metadata):
        return _ultralytics(metadata, where, notes)
    labels = _labels(metadata, notes)
    if "stride" in metadata and "names" in metadata:
        return Stated("YOLOv5's export.py", ("yolov5",), labels=labels, notes=tuple(notes))
    layouts, exporter = _by_names(model)
    return Stated(exporter, layouts, labels=labels, notes=tuple(notes))


def _ultralytics(metadata: Mapping[str, str], where: str, notes: list[str]) -> Stated:
    task = metadata.get("task", "detect")
    if task not in ("detect", "classify"):
        raise BundleError(
            f"is a model of the task {_shown(task)} by its metadata, and this version reads detect and classify",
            code="model_unsupported",
            where=where,
            remedy="export a detector or a classifier",
        )
    about = metadata.get("description", "").lower()
    arguments = _literal(metadata, "args", dict, notes) or {}
    usual: dict[str, Any] = dict(FAMILIES["yolov8"].usual())
    layouts: tuple[Layout, ...]
    if task == "classify":
        layouts = ("classify",)
        usual["resize"] = "crop"
    elif arguments.get("nms") is True or metadata.get("end2end") == "True":
        layouts = ("yolov10",)
    elif "rtdetr" in about or "rt-detr" in about:
        layouts = ("rtdetr",)
        usual["resize"] = "stretch"
    else:
        layouts = ("yolov8", "yolov10")
    licence = _clean(metadata.get("license", ""))
    return Stated(
        exporter="Ultralytics",
        layouts=layouts,
        certain=True,
        usual=usual,
        labels=_labels(metadata, notes),
        size=_size(metadata, notes),
        licence=licence or None,
        notes=tuple(notes),
    )


def _by_names(model: OnnxFile) -> tuple[tuple[Layout, ...], str | None]:
    """Layouts by the names that exporters without metadata give. They are hints: names are free."""
    inputs = {port.name for port in model.inputs}
    outputs = {port.name for port in model.outputs}
    if {"num_dets", "num_detections"} & outputs:
        return ("efficientnms",), "an exporter of EfficientNMS graphs"
    if outputs == {"logits", "pred_boxes"}:
        return ("rtdetr",), "Hugging Face"
    if inputs == {"pixel_values"} and outputs == {"logits"}:
        return ("classify",), "Hugging Face"
    if inputs == {"images"} and outputs == {"output"}:
        return ("yolox",), "YOLOX's export_onnx.py"
    if inputs <= {"data", "input.1"} and outputs == {"output"}:
        return ("nanodet",), "NanoDet's export_onnx.py"
    return (), None


def read_literal(text: str) -> Any:
    """A Python literal of names, numbers, lists, tuples and mappings. Raises ValueError for anything else.

    `ast.literal_eval` runs no code, but deeply nested text can exhaust the parser's stack: so the text is
    bounded and looked through first (brackets alone nest, and the tokenizer stops at 200 of them).
    """
    if len(text) > _MAX_LITERAL:
        raise ValueError(f"it is {len(text)} characters long")
    bare = _STRINGS.sub("0", text)
    if _CHAINED.search(bare) or _PLAIN.sub("", bare):
        raise ValueError("it is no plain literal")
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise ValueError("it is no plain literal") from None


def _literal(metadata: Mapping[str, str], key: str, kind: type | tuple[type, ...], notes: list[str]) -> Any:
    if key not in metadata:
        return None
    try:
        value = read_literal(metadata[key])
    except ValueError as error:
        notes.append(f"the metadata's {key} were ignored: {error}")
        return None
    if not isinstance(value, kind):
        notes.append(f"the metadata's {key} were ignored: {type(value).__name__} is not what exporters write there")
        return None
    return value


def _labels(metadata: Mapping[str, str], notes: list[str]) -> tuple[str, ...] | None:
    names = _literal(metadata, "names", (dict, list, tuple), notes)
    if names is None:
        return None
    # Numbered from 0 without a gap, or the class ids would mean other words.
    if isinstance(names, dict):
        numbered = set(names) == set(range(len(names)))
        names = [names[index] for index in range(len(names))] if numbered else []
    if not 0 < len(names) <= _MAX_LABELS or not all(isinstance(name, str) for name in names):
        notes.append("the metadata's names were ignored: they are no list of class names, numbered from 0")
        return None
    return tuple(_clean(name) or str(index) for index, name in enumerate(names))


def _size(metadata: Mapping[str, str], notes: list[str]) -> tuple[int, int] | None:
    """`imgsz` is [height, width]."""
    sides = _literal(metadata, "imgsz", (list, tuple, int), notes)
    if sides is None:
        return None
    if isinstance(sides, int):
        sides = [sides]
    if len(sides) not in (1, 2) or not all(type(side) is int and 1 <= side <= 16384 for side in sides):
        notes.append(f"the metadata's imgsz was ignored: {_shown(metadata['imgsz'])} is no size")
        return None
    return sides[-1], sides[0]


def _clean(text: str) -> str:
    """One line of bounded length without control characters: it is shown on terminals."""
    return " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * _MAX_WORD]).split())[:_MAX_WORD]


def _shown(text: str) -> str:
    return repr(_clean(text)[:60])
