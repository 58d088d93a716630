"""Whether an ONNX with Q/DQ pairs is such as TensorRT takes: explicit, symmetric, with every pair whole.

TensorRT quantises by what the graph says. What it does not know it refuses when the plan is built, on the device, late:
zero points other than 0, biases that were quantised, operators of ONNX Runtime's own. So it is said here, in words.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from edge_runtime.prepare.quant_nodes import WEIGHTED, channel_axis

__all__ = ["check_symmetric"]

_LEAST_OPSET = 13
_PAIR = ("QuantizeLinear", "DequantizeLinear")
_OPERATORS = frozenset(("ConvInteger", "MatMulInteger", "DynamicQuantizeLinear"))


def check_symmetric(model: Any) -> list[str]:
    """What of an onnx.ModelProto TensorRT would not take as INT8, a sentence for each fault; empty where all is right.

    Zero points are stored, int8 and 0; scales stored, finite and above 0, one or one a channel: only weights have more,
    along their output channels. Biases are float. A QuantizeLinear is followed by DequantizeLinear of the same scale
    and by nothing else. Opset 13 or later, and the standard's operators with Q/DQ around, none that is integer itself.
    At least one pair is there.
    """
    graph = _Graph.of(model)
    return list(dict.fromkeys(_faults(model, graph)))


@dataclass(slots=True)
class _Graph:
    stored: dict[str, NDArray[Any]]
    kinds: dict[str, int]
    makers: dict[str, Any]
    takers: dict[str, list[Any]]
    outputs: set[str]

    @classmethod
    def of(cls, model: Any) -> _Graph:
        tensors = list(model.graph.initializer)
        takers: dict[str, list[Any]] = {}
        for node in model.graph.node:
            for name in dict.fromkeys(node.input):
                takers.setdefault(name, []).append(node)
        stored = {tensor.name: np.asarray(numpy_helper.to_array(tensor)) for tensor in tensors}
        kinds = {tensor.name: int(tensor.data_type) for tensor in tensors}
        for node in model.graph.node:
            if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
                stored[node.output[0]] = np.asarray(numpy_helper.to_array(node.attribute[0].t))
                kinds[node.output[0]] = int(node.attribute[0].t.data_type)
        return cls(
            stored,
            kinds,
            {name: node for node in model.graph.node for name in node.output},
            takers,
            {value.name for value in model.graph.output},
        )


def _faults(model: Any, graph: _Graph) -> Iterator[str]:
    opset = max((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=0)
    if opset < _LEAST_OPSET:
        yield f"the opset is {opset}: scales per channel need {_LEAST_OPSET}"
    pairs = 0
    for node in model.graph.node:
        if node.domain not in ("", "ai.onnx"):
            yield f"{_name(node)} is of {node.domain}, which TensorRT does not know"
        elif node.op_type.startswith("QLinear") or node.op_type in _OPERATORS:
            yield f"{_name(node)} computes in integers itself: Q/DQ around a float operator are wanted"
        elif node.op_type in _PAIR:
            pairs += 1
            yield from _parameters(node, graph)
            yield from _partner(node, graph)
        elif node.op_type in ("Conv", "ConvTranspose", "Gemm") and len(node.input) > 2:
            maker = graph.makers.get(node.input[2])
            if maker is not None and maker.op_type in _PAIR:
                yield f"the bias of {_name(node)} is quantised: it has to be float"
    if not pairs:
        yield "there is no Q/DQ pair: nothing is INT8"


def _parameters(node: Any, graph: _Graph) -> Iterator[str]:
    """Faults of a Q or DQ node's scale, zero point and axis."""
    scale = graph.stored.get(node.input[1])
    if scale is None:
        yield f"the scale of {_name(node)} is computed: it has to be stored"
        return
    if scale.dtype != np.float32:
        yield f"the scale of {_name(node)} is {scale.dtype}: float32 is wanted"
    if not (np.isfinite(scale).all() and (scale > 0).all()):
        yield f"a scale of {_name(node)} is not finite, or not above 0"
    zero_name = node.input[2] if len(node.input) > 2 else ""
    if not zero_name:
        yield f"{_name(node)} has no zero point, and without one it is of uint8: int8 is wanted"
    elif zero_name not in graph.stored:
        yield f"the zero point of {_name(node)} is computed: it has to be stored"
    else:
        zero = graph.stored[zero_name]
        if graph.kinds[zero_name] != TensorProto.INT8:
            word = TensorProto.DataType.Name(graph.kinds[zero_name]).lower()
            yield f"{_name(node)} is of {word}: int8 is wanted"
        if zero.any():
            yield f"a zero point of {_name(node)} is not 0: it is not symmetric"
        if zero.shape != scale.shape:
            yield f"{_name(node)} has zero points of shape {list(zero.shape)} for scales of {list(scale.shape)}"
    if scale.ndim > 1 or scale.size == 0:
        yield f"the scales of {_name(node)} are of shape {list(scale.shape)}: one, or a list by channel, is wanted"
    elif scale.ndim == 1:
        yield from _channels(node, scale, graph)


def _channels(node: Any, scale: NDArray[Any], graph: _Graph) -> Iterator[str]:
    """Faults of scales per channel: only of weights, and along their output channels."""
    source = node.input[0]
    if node.op_type == "DequantizeLinear" and (pair := graph.makers.get(source)) is not None:
        source = pair.input[0]
    weights = graph.stored.get(source)
    if weights is None:
        if scale.size > 1:
            yield f"{_name(node)} has scales per channel, and what it rounds is computed: one scale is wanted"
        return
    axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 1)
    axis += weights.ndim if axis < 0 else 0
    if not 0 <= axis < weights.ndim or weights.shape[axis] != scale.size:
        yield (
            f"{_name(node)} has {scale.size} scales along axis {axis} of weights of shape {list(weights.shape)}: "
            "as many as channels are wanted"
        )
        return
    for taker in _takers_behind(node, graph):
        if taker.op_type not in WEIGHTED and taker.op_type != "ConvTranspose":
            continue
        wanted = 1 if taker.op_type == "ConvTranspose" else channel_axis(taker, weights)
        if axis != wanted:
            yield f"{_name(node)} has scales along axis {axis}: output channels of {_name(taker)} are along {wanted}"


def _takers_behind(node: Any, graph: _Graph) -> Iterator[Any]:
    """The nodes that take what a Q or DQ makes, behind the pair."""
    for taker in graph.takers.get(node.output[0], []):
        if node.op_type == "QuantizeLinear" and taker.op_type == "DequantizeLinear":
            yield from graph.takers.get(taker.output[0], [])
        elif node.op_type == "DequantizeLinear":
            yield taker


def _partner(node: Any, graph: _Graph) -> Iterator[str]:
    """Faults of a pair: a Q without its DQ or with anything else behind it, a DQ of two scales."""
    if node.op_type == "QuantizeLinear":
        takers = graph.takers.get(node.output[0], [])
        others = [taker for taker in takers if taker.op_type != "DequantizeLinear"]
        if others:
            yield f"{_name(node)} is taken by {_name(others[0])}: only a DequantizeLinear may stand behind it"
        if node.output[0] in graph.outputs:
            yield f"{_name(node)} makes an output of the model: outputs are float"
        elif not takers:
            yield f"{_name(node)} is followed by no DequantizeLinear"
        return
    maker = graph.makers.get(node.input[0])
    if maker is None or maker.op_type == "Constant":
        kind = graph.kinds.get(node.input[0])
        if kind == TensorProto.INT32:
            yield f"{_name(node)} makes floats of stored int32: biases have to be float"
        elif kind != TensorProto.INT8:
            yield f"{_name(node)} takes what is no int8 and comes from no QuantizeLinear"
    elif maker.op_type != "QuantizeLinear":
        yield f"{_name(node)} stands behind {_name(maker)}, not behind a QuantizeLinear"
    elif not _alike(maker.input[1], node.input[1], graph):
        yield f"{_name(node)} has another scale than {_name(maker)} before it"


def _alike(one: str, other: str, graph: _Graph) -> bool:
    if one == other:
        return True
    values = graph.stored.get(one), graph.stored.get(other)
    return values[0] is not None and values[1] is not None and np.array_equal(values[0], values[1])


def _name(node: Any) -> str:
    return f"{node.op_type} {node.name or node.output[0]!r}"
