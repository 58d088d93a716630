"""Tiny ONNX graphs and bundles around them: each fault of a model in a few nodes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from edge_runtime.prepare.manifest_text import manifest_text

SIDE = 32
CLASSES = 3


def graph(
    nodes: Sequence[Any],
    *,
    outputs: Sequence[tuple[str, Sequence[Any]]] = (("y", ("batch", CLASSES)),),
    shape: Sequence[Any] = ("batch", 3, SIDE, SIDE),
    kind: int = TensorProto.FLOAT,
    initializers: Mapping[str, Any] | None = None,
    more_inputs: Sequence[Any] = (),
    opset: int = 13,
    ir: int = 8,
    domains: Sequence[str] = (),
) -> bytes:
    """A serialised model with the input `x`."""
    tensors = [
        value if isinstance(value, TensorProto) else _tensor(name, np.asarray(value))
        for name, value in (initializers or {}).items()
    ]
    made = helper.make_graph(
        list(nodes),
        "tiny",
        [helper.make_tensor_value_info("x", kind, list(shape)), *more_inputs],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, list(dims)) for name, dims in outputs],
        tensors,
    )
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in domains)]
    data: bytes = helper.make_model(made, opset_imports=imports, ir_version=ir).SerializeToString()
    return data


def _tensor(name: str, value: Any) -> Any:
    return numpy_helper.from_array(value.astype(np.int64 if value.dtype.kind == "i" else np.float32), name)


def node(kind: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> Any:
    return helper.make_node(kind, list(inputs), list(outputs), **attributes)


def classifier(**options: Any) -> bytes:
    """[b, 3, H, W] -> [b, 3]: the mean of each channel."""
    mean = node("ReduceMean", ["x"], ["y"], axes=[2, 3], keepdims=0)
    return graph([mean], **options)


def nan_classifier() -> bytes:
    """log of a negative number."""
    nodes = [
        node("ReduceMean", ["x"], ["m"], axes=[2, 3], keepdims=0),
        node("Abs", ["m"], ["a"]),
        node("Neg", ["a"], ["n"]),
        node("Log", ["n"], ["y"]),
    ]
    return graph(nodes)


def data_dependent() -> bytes:
    """[b, 3, H, W] -> [b, k] where k is the picture's largest value: no shape known before the run."""
    nodes = [
        node("ReduceMax", ["x"], ["m"], keepdims=0),
        node("Cast", ["m"], ["i"], to=TensorProto.INT64),
        node("Unsqueeze", ["i", "zero"], ["k"]),
        node("Reshape", ["x", "flat"], ["f"]),
        node("TopK", ["f", "k"], ["y", "index"], axis=1),
    ]
    return graph(nodes, outputs=[("y", ("batch", "k"))], initializers={"zero": [0], "flat": [0, -1]})


def write_bundle(
    root: Path,
    model: bytes,
    *,
    layout: str = "classify",
    size: tuple[int, int] = (SIDE, SIDE),
    labels: Sequence[str] = ("red", "green", "blue"),
    **tables: Any,
) -> Path:
    """A bundle of one variant `fp32`; `tables` are changes to its tables: `input={"pad": 0}`."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "model.onnx").write_bytes(model)
    (root / "labels.txt").write_text("".join(f"{word}\n" for word in labels))
    task = "classify" if layout == "classify" else "detect"
    bundle = {"name": "tiny", "version": "1", "task": task, "labels": "labels.txt", "licence": "test"}
    file = {"path": "model.onnx", "sha256": hashlib.sha256(model).hexdigest()}
    variant = {"name": "fp32", "precision": "fp32", "size": list(size), "files": {"onnxruntime": file}}
    text = manifest_text(
        {**bundle, **tables.get("bundle", {})},
        {"color": "RGB", "resize": "stretch", **tables.get("input", {})},
        {"layout": layout, **tables.get("output", {})},
        [{**variant, **tables.get("variant", {})}],
        tables.get("files", {"labels.txt": hashlib.sha256((root / "labels.txt").read_bytes()).hexdigest()}),
    )
    (root / "bundle.toml").write_text(text)
    return root
