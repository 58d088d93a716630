"""Q/DQ pairs and quantised constants written into a float32 graph: the rounding of INT8, tensor by tensor.

Numbers are those of onnxruntime's QDQQuantizer, and a test holds graphs of both against each other. It is not used
itself: it goes through Python once for every channel and through the whole graph once for every tensor, 1 to 4 s for a
model of 100 to 400 nodes against 0.3 s here, and a search writes hundreds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from edge_runtime.prepare.quant import Ranges, TensorRange
from edge_runtime.prepare.quant_nodes import CUTTING, MOVING, WEIGHTED, QuantNodes, channel_axis

__all__ = ["activation_parameters", "quantised_weights", "write_quantised"]

_LEAST_SCALE = float(np.finfo(np.float32).tiny)
_INT32 = np.iinfo(np.int32)


def activation_parameters(found: TensorRange, *, symmetric: bool) -> tuple[np.float32, Any]:
    """Scale and zero point of an activation: value = (q - zero) * scale. Symmetric: int8 of -127 to 127 and zero 0;
    else uint8. A range of nothing has the scale 1."""
    kind = np.int8 if symmetric else np.uint8
    low, high = float(np.float32(found.low)), float(np.float32(found.high))
    scale = max(-low, high) / 127 if symmetric else (high - low) / 255
    if scale < _LEAST_SCALE:
        return np.float32(1.0), kind(0)
    return np.float32(scale), kind(0) if symmetric else kind(np.clip(np.round(-low / scale), 0, 255))


def quantised_weights(
    weights: NDArray[np.float32], axis: int, bits: int, least: NDArray[np.float64] | None = None
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Weights of int8 and their scales [channels along `axis`]: value = q * scale. 8 bits are -127 to 127, 7 bits -64
    to 64: two products of those with U8 never pass int16. `least` [channels]: scales are no less. Channels of nothing
    have the scale 1."""
    top = 64 if bits == 7 else 127
    others = tuple(each for each in range(weights.ndim) if each != axis)
    scales = np.abs(weights).max(axis=others, initial=0.0).astype(np.float64) / top
    if least is not None:
        scales = np.maximum(scales, least)
    scales = np.where(scales < _LEAST_SCALE, 1.0, scales).astype(np.float32)
    along = [1] * weights.ndim
    along[axis] = -1
    rounded = np.round(weights / scales.reshape(along))
    return np.clip(rounded, -top, top).astype(np.int8), scales


@dataclass(frozen=True, slots=True)
class _Pair:
    """A tensor's Q/DQ: the names of scale, zero point and rounded tensor, and the scale."""

    scale_name: str
    zero_name: str
    rounded: str
    scale: np.float32


def write_quantised(nodes: QuantNodes, chosen: Collection[str], ranges: Ranges, *, symmetric: bool, bits: int) -> None:
    """Make the chosen nodes of `nodes.model` INT8, in place. `ranges` holds all their activations.

    Symmetric: pairs stand at the inputs of chosen nodes, weights keep their floats behind a pair, biases are float.
    Else also at their outputs; weights are stored as int8, biases as int32, other constants as uint8.
    """
    _Writer(nodes, frozenset(chosen), ranges, symmetric, bits).write()


class _Writer:
    def __init__(self, nodes: QuantNodes, chosen: frozenset[str], ranges: Ranges, symmetric: bool, bits: int) -> None:
        self._model = nodes.model
        self._graph = nodes.graph
        self._chosen = chosen
        self._ranges = ranges
        self._symmetric = symmetric
        self._bits = bits
        self._outputs = set(nodes.graph.outputs)
        self._taken = {*nodes.graph.constants, *nodes.graph.makers, *nodes.graph.inputs}
        self._pairs: dict[str, _Pair] = {}
        self._tensors: list[Any] = []

    def write(self) -> None:
        graph = self._graph
        kept = list(self._without_cuts())
        wanted = {
            name for node in kept if node.name in self._chosen for name in graph.data(node) if name not in graph.weights
        }
        computed = {name for node in kept if self._computes(node) for name in graph.made(node)}
        rounded_for_all = (wanted if self._symmetric else set()) | computed
        made: list[Any] = []
        for name in graph.inputs:
            if name in wanted:
                made += self._pair_behind(name, name, f"{name}/rounded", None)
        for node in kept:
            shared = self._pairs.get(node.input[0]) if self._computes(node) and node.op_type in MOVING else None
            data = set(graph.data(node))
            constants = self._constants(node) if node.name in self._chosen else ([], {})
            made += constants[0]
            for place, name in enumerate(node.input):
                if place in constants[1]:
                    node.input[place] = constants[1][place]
                elif name in self._pairs and (name in rounded_for_all or (node.name in self._chosen and name in data)):
                    node.input[place] = self._pairs[name].rounded
            made.append(node)
            for place, name in enumerate(node.output):
                if name in computed and name in self._outputs:
                    node.output[place] = raw = self._new(f"{name}/unrounded")
                    made += self._pair_behind(name, raw, name, shared)
                elif name in computed or name in wanted:
                    made += self._pair_behind(name, name, f"{name}/rounded", shared)
        del self._model.graph.node[:]
        self._model.graph.node.extend(made)
        self._model.graph.initializer.extend(self._tensors)

    def _computes(self, node: Any) -> bool:
        """Whether the node's output is rounded for its own sake."""
        return not self._symmetric and node.name in self._chosen

    def _without_cuts(self) -> Iterator[Any]:
        """The nodes without chosen Relus and Clips: their makers make what they made, and its range does their work."""
        cuts = {node.name: node for node in self._model.graph.node if node.op_type in CUTTING and self._computes(node)}
        renamed = {node.input[0]: node.output[0] for node in cuts.values()}
        for node in self._model.graph.node:
            if node.name in cuts:
                continue
            made = type(node)()
            made.CopyFrom(node)
            for place, name in enumerate(made.output):
                made.output[place] = renamed.get(name, name)
            yield made

    def _pair_behind(self, name: str, source: str, rounded: str, shared: _Pair | None) -> list[Any]:
        """The Q/DQ nodes from `source` to `rounded`; `name` is what the range of the tensor goes by."""
        if shared is None:
            scale, zero = activation_parameters(self._ranges[name], symmetric=self._symmetric)
            scale_name, zero_name = self._store(f"{name}/scale", scale), self._store(f"{name}/zero", zero)
        else:
            scale, scale_name, zero_name = shared.scale, shared.scale_name, shared.zero_name
        rounded = rounded if rounded == name else self._new(rounded)
        self._pairs[name] = _Pair(scale_name, zero_name, rounded, scale)
        middle = self._new(f"{name}/quantised")
        return [
            _linear("QuantizeLinear", source, scale_name, zero_name, middle),
            _linear("DequantizeLinear", middle, scale_name, zero_name, rounded),
        ]

    def _constants(self, node: Any) -> tuple[list[Any], dict[int, str]]:
        """The nodes that make a chosen node's stored tensors, and by the place of an input, what it takes of them."""
        if node.op_type in WEIGHTED:
            return self._weights(node)
        made, places = [], {}
        data = set(self._graph.data(node))
        for place, name in enumerate(node.input):
            if name not in data or name not in self._graph.weights:
                continue
            value = self._graph.weights[name]
            found = TensorRange(min(float(value.min()), 0.0), max(float(value.max()), 0.0))
            scale, zero = activation_parameters(found, symmetric=self._symmetric)
            limits = (-127, 127) if self._symmetric else (0, 255)
            rounded = np.clip(np.round(value / scale) + np.float32(zero), *limits).astype(zero.dtype)
            places[place] = self._new(f"{node.name}/{place}/rounded")
            stored = [self._store(f"{node.name}/{place}/{what}", each) for what, each in
                      (("quantised", rounded), ("scale", scale), ("zero", zero))]  # fmt: skip
            made.append(_linear("DequantizeLinear", stored[0], stored[1], stored[2], places[place]))
        return made, places

    def _weights(self, node: Any) -> tuple[list[Any], dict[int, str]]:
        weights = self._graph.weights.get(node.input[1])
        if weights is None:
            return [], {}  # a product of two computed tensors
        axis = channel_axis(node, weights)
        bias = self._graph.weights.get(node.input[2]) if len(node.input) > 2 and node.op_type != "MatMul" else None
        scale_before = np.float64(self._pairs[node.input[0]].scale)
        least = None
        if bias is not None and not self._symmetric:
            least = np.abs(bias.astype(np.float64)) * 1.0001 / (_INT32.max * scale_before)
        rounded, scales = quantised_weights(weights, axis, self._bits, least)
        stem = f"{node.name}/weight"
        scale_name = self._store(f"{stem}/scale", scales)
        zero_name = self._store(f"{stem}/zero", np.zeros(scales.size, np.int8))
        places = {1: self._new(f"{stem}/rounded")}
        if self._symmetric:
            middle = self._new(f"{stem}/quantised")
            return [
                _linear("QuantizeLinear", node.input[1], scale_name, zero_name, middle, axis),
                _linear("DequantizeLinear", middle, scale_name, zero_name, places[1], axis),
            ], places
        stored = self._store(f"{stem}/quantised", rounded)
        made = [_linear("DequantizeLinear", stored, scale_name, zero_name, places[1], axis)]
        if bias is not None:
            both = (np.float32(scale_before) * scales).astype(np.float32)
            both = np.where(both < _LEAST_SCALE, np.float32(1.0), both)
            values = np.clip(np.round(bias.astype(np.float64) / both), _INT32.min, _INT32.max).astype(np.int32)
            stem = f"{node.name}/bias"
            stored = self._store(f"{stem}/quantised", values)
            scale_name = self._store(f"{stem}/scale", both)
            zero_name = self._store(f"{stem}/zero", np.zeros(both.size, np.int32))
            places[2] = self._new(f"{stem}/rounded")
            made.append(_linear("DequantizeLinear", stored, scale_name, zero_name, places[2], 0))
        return made, places

    def _store(self, name: str, value: Any) -> str:
        name = self._new(name)
        self._tensors.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def _new(self, name: str) -> str:
        while name in self._taken:
            name += "_"
        self._taken.add(name)
        return name


def _linear(kind: str, source: str, scale: str, zero: str, target: str, axis: int | None = None) -> Any:
    given = {} if axis is None else {"axis": axis}
    return helper.make_node(kind, [source, scale, zero], [target], name=f"{target}/{kind}", **given)
