"""An ONNX file read for a bundle: in one piece, and what can be told of it without running it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import onnx
from onnx.external_data_helper import uses_external_data

from edge_runtime.engine.modelfile import foreign_model
from edge_runtime.errors import BundleError

Precision = Literal["fp32", "fp16", "int8"]


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output as declared: `kind` is ONNX's word (FLOAT, UINT8, ...), unknown dimensions are None."""

    name: str
    kind: str
    shape: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class OnnxFile:
    """`data`: the whole model in one piece, the file's own bytes where it was so already (`joined` false).

    `metadata`: the file's metadata_props, as any stranger may have written them. `inputs` are without the
    weights; `operators` the kinds of all nodes; `producer` and `graph` the names that the exporter gave.
    """

    data: bytes
    joined: bool
    precision: Precision
    opset: int
    producer: str
    graph: str
    metadata: Mapping[str, str]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    operators: frozenset[str]


def read_onnx(path: Path) -> OnnxFile:
    """Read an ONNX file; weights in a second file (external data) are joined into it.

    Raises BundleError for a file that is missing, empty, foreign or damaged, and for missing external data.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BundleError(
            f"cannot be read: {error.strerror}", code="file_missing", where=str(path), remedy="name the ONNX file"
        ) from None
    if (refusal := foreign_model(data, str(path))) is not None:
        raise refusal
    try:
        model: Any = onnx.load_model_from_string(data)
        nodes = list(model.graph.node)
    except Exception:  # noqa: BLE001  protobuf's DecodeError, whichever protobuf it is
        model = None
    if model is None or not nodes:
        raise BundleError(
            "is damaged, cut off or no ONNX model at all",
            code="model_invalid",
            where=str(path),
            remedy="export or copy the model again",
        )
    joined = any(uses_external_data(tensor) for tensor in model.graph.initializer)
    if joined:
        data = _join(model, path)
    opset = max((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=0)
    weights = {tensor.name for tensor in model.graph.initializer}
    return OnnxFile(
        data=data,
        joined=joined,
        precision=read_precision(model),
        opset=opset,
        producer=model.producer_name,
        graph=model.graph.name,
        metadata={entry.key: entry.value for entry in model.metadata_props},
        inputs=tuple(_port(value) for value in model.graph.input if value.name not in weights),
        outputs=tuple(_port(value) for value in model.graph.output),
        operators=frozenset(node.op_type for node in nodes),
    )


def _port(value: Any) -> Port:
    tensor = value.type.tensor_type
    shape = tuple(dim.dim_value if dim.HasField("dim_value") else None for dim in tensor.shape.dim)
    return Port(value.name, onnx.TensorProto.DataType.Name(tensor.elem_type), shape)


def without_softmax(model: OnnxFile) -> OnnxFile | None:
    """The same classifier up to its logits, where its only output comes straight from a softmax; else None."""
    made: Any = onnx.load_model_from_string(model.data)
    if len(made.graph.output) != 1:
        return None
    (output,) = made.graph.output
    last = next((node for node in made.graph.node if output.name in node.output), None)
    if last is None or last.op_type != "Softmax" or len(output.type.tensor_type.shape.dim) != 2:
        return None
    output.name = last.input[0]
    made.graph.node.remove(last)
    return replace(model, data=made.SerializeToString(), outputs=(_port(output),))


def _join(model: Any, path: Path) -> bytes:
    try:
        onnx.load_external_data_for_model(model, str(path.parent))
        for tensor in model.graph.initializer:
            tensor.ClearField("external_data")
            tensor.data_location = onnx.TensorProto.DEFAULT
        joined: bytes = model.SerializeToString()
    except Exception as error:  # noqa: BLE001  onnx's checks, OSError, or protobuf's limit of 2 GiB
        reason = " ".join(str(error).split())[:200]
        raise BundleError(
            f"its weights lie in a second file (ONNX external data), and that cannot be joined: {reason}",
            code="model_external_data",
            where=str(path),
            remedy="put the file with the weights beside it, under the name it was exported with",
        ) from None
    return joined


def read_precision(model: Any) -> Precision:
    """What an onnx.ModelProto computes in, by its operators and weights."""
    kinds = {node.op_type for node in model.graph.node}
    if any(kind.startswith("QLinear") or kind in ("QuantizeLinear", "ConvInteger") for kind in kinds):
        return "int8"
    half = onnx.TensorProto.FLOAT16
    halves = {tensor.name for tensor in model.graph.initializer if tensor.data_type == half}
    # Weights only stored as halves and cast before use still compute in fp32.
    computed = any(
        node.op_type in ("Conv", "MatMul", "Gemm") and halves.intersection(node.input) for node in model.graph.node
    )
    return "fp16" if computed else "fp32"
