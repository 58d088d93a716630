"""ONNX files as the exporters write them: their metadata and names around outputs made to order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from edge_runtime.camera.av import decode_image
from edge_runtime.prepare.png import encode_png
from edge_runtime.records.frames import Pixels
from tests.engine.graphs import graph, node

SIDE = 64
CELLS = 84
"""Cells of strides 8, 16 and 32 over 64 x 64 px."""

ULTRALYTICS = {
    "description": "Ultralytics YOLOv8n model trained on coco8.yaml",
    "author": "Ultralytics",
    "date": "2025-01-01T00:00:00.000000",
    "version": "8.3.40",
    "license": "AGPL-3.0 License (https://ultralytics.com/license)",
    "docs": "https://docs.ultralytics.com",
    "stride": "32",
    "task": "detect",
    "batch": "1",
    "imgsz": "[64, 64]",
    "names": "{0: 'person', 1: 'bicycle', 2: \"traffic light (it's red)\"}",
    "args": "{'batch': 1, 'half': False, 'dynamic': False, 'simplify': True, 'opset': None, 'nms': False}",
}

YOLOV8 = {"output0": np.zeros((7, CELLS), np.float32)}
YOLOX = {"output": np.zeros((CELLS, 8), np.float32)}


def read_image(path: Path) -> Pixels:
    return decode_image(path.read_bytes())


def answers(
    outputs: Mapping[str, NDArray[np.float32]], *, weight: float = 0.0, side: int = SIDE, dynamic: bool = False
) -> bytes:
    """A model that answers the same to every picture, plus the picture's mean value times `weight`."""
    nodes = [
        node("ReduceMean", ["x"], ["mean"], axes=[1, 2, 3], keepdims=0),
        node("Mul", ["mean", "weight"], ["level"]),
    ]
    initializers: dict[str, Any] = {"weight": np.float32(weight)}
    for name, value in outputs.items():
        initializers |= {f"{name}_is": value[None], f"{name}_axes": [-1, *([1] * value.ndim)]}
        nodes.append(node("Reshape", ["level", f"{name}_axes"], [f"{name}_level"]))
        nodes.append(node("Add", [f"{name}_level", f"{name}_is"], [name]))
    return graph(
        nodes,
        outputs=[(name, ("batch", *value.shape)) for name, value in outputs.items()],
        shape=("batch", 3, "height", "width") if dynamic else ("batch", 3, side, side),
        initializers=initializers,
    )


def tagged(model: bytes, metadata: Mapping[str, str] | None = None, *, image: str = "images") -> bytes:
    """The same with metadata_props, and its input called `image`."""
    made = onnx.load_model_from_string(model)
    helper.set_model_props(made, dict(metadata or {}))
    for entry in made.graph.node:
        entry.input[:] = [image if name == "x" else name for name in entry.input]
    made.graph.input[0].name = image
    data: bytes = made.SerializeToString()
    return data


def with_input(model: bytes, name: str, kind: int, shape: Sequence[int]) -> bytes:
    made = onnx.load_model_from_string(model)
    made.graph.input.append(helper.make_tensor_value_info(name, kind, list(shape)))
    data: bytes = made.SerializeToString()
    return data


def pictures(folder: Path, count: int) -> list[Path]:
    """Pictures of noise, each with a brightness of its own."""
    folder.mkdir(exist_ok=True)
    paths = []
    for index in range(count):
        noise = np.random.default_rng(index).integers(0, 64, (48, 64, 3))
        path = folder / f"{index:02d}.png"
        path.write_bytes(encode_png((noise + index * 190 // max(count - 1, 1)).astype(np.uint8)))
        paths.append(path)
    return paths


INT64 = TensorProto.INT64
