"""The layers with stored weights of a float model, and what they take, seen on pictures as patches.

A convolution is a product of its weights with patches of its input. Some hundred patches a picture, at places drawn
once, say what rounding of weights does to its output without running it.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from edge_runtime.engine.onnxrt import open_session
from edge_runtime.prepare.quant import QuantPlan
from edge_runtime.prepare.quant_graph import planned
from edge_runtime.prepare.quant_probe import Probe
from edge_runtime.prepare.quant_write import activation_parameters

__all__ = ["Layer", "Statistics", "layers", "replace_biases", "replace_weights", "see_layers", "with_layers_of"]

_PATCHES = 128
"""Of a picture, for each layer."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A Conv, or a Gemm or MatMul by a stored matrix. `weights`: [groups, outputs of a group, inputs of an output]."""

    name: str
    input: str
    stored: str
    bias: str | None
    weights: NDArray[np.float64]
    node: Any
    shape: tuple[int, ...]
    turned: bool

    def as_stored(self, weights: NDArray[np.float64]) -> NDArray[np.float32]:
        """Weights of the form of `weights` as the model stores them."""
        matrix = weights.reshape(-1, weights.shape[-1])
        return (matrix.T if self.turned else matrix.reshape(self.shape)).astype(np.float32)


@dataclass(slots=True)
class Statistics:
    """Of a layer's patches [groups, inputs]: `mean` in float, `rounded` the mean as INT8 has them, `covariance`
    [groups, inputs, inputs] of those."""

    mean: NDArray[np.float64]
    rounded: NDArray[np.float64]
    covariance: NDArray[np.float64]


def layers(model: Any, names: Sequence[str] | None = None) -> dict[str, Layer]:
    """By node's name, in graph order; those of `names`, where they are given."""
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    wanted = None if names is None else set(names)
    found: dict[str, Layer] = {}
    for node in model.graph.node:
        if wanted is not None and node.name not in wanted:
            continue
        if node.op_type not in ("Conv", "Gemm", "MatMul") or node.input[1] not in stored or node.input[0] in stored:
            continue
        value = numpy_helper.to_array(stored[node.input[1]]).astype(np.float64)
        bias = node.input[2] if len(node.input) > 2 and node.input[2] else None
        if node.op_type == "Conv":
            groups = _ints(node, "group", [1])[0]
            if _text(node, "auto_pad") not in ("", "NOTSET") or value.ndim != 4:
                continue
            form, turned = value.reshape(groups, value.shape[0] // groups, -1), False
        elif value.ndim == 2:
            turned = node.op_type == "MatMul" or not _ints(node, "transB", [0])[0]
            form = (value.T if turned else value)[None]
        else:
            continue
        found[node.name] = Layer(node.name, node.input[0], node.input[1], bias, form, node, value.shape, turned)
    return found


def see_layers(model: Any, plan: QuantPlan, probe: Probe, count: int, seed: int = 0) -> dict[str, Statistics]:
    """Statistics of the layers that the plan makes INT8, over at most `count` of the probe's pictures, at places that
    `seed` draws."""
    wanted = layers(model, planned(model, plan))
    made: Any = onnx.ModelProto()
    made.CopyFrom(model)
    inputs = {value.name for value in made.graph.input}
    answers = {value.name for value in made.graph.output}
    taken = dict.fromkeys(layer.input for layer in wanted.values())
    made.graph.output.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in taken if name not in inputs | answers
    )
    session = open_session(made.SerializeToString(), probe.where)
    (only,) = session.get_inputs()
    side = only.shape[0] if isinstance(only.shape[0], int) else 1
    names = [name for name in taken if name not in inputs]
    sums: dict[str, _Sums] = {name: _Sums() for name in wanted}
    for picture in probe.inputs(count):
        batch = np.ascontiguousarray(np.broadcast_to(picture[0], (max(side, 1), *picture.shape[1:])))
        seen = dict(zip(names, session.run(names, {only.name: batch}), strict=True)) if names else {}
        seen[only.name] = batch
        for name, layer in wanted.items():
            patches = _patches(layer, seen[layer.input], (seed, sums[name].pictures))
            found = plan.ranges[layer.input]
            scale, zero = activation_parameters(found, symmetric=plan.family == "tensorrt")
            limits = np.iinfo(zero.dtype)
            rounded = (np.clip(np.round(patches / scale) + zero, limits.min, limits.max) - zero) * np.float64(scale)
            sums[name].add(patches, rounded)
    return {name: each.finish() for name, each in sums.items() if each.count}


def replace_weights(model: Any, values: Mapping[str, NDArray[np.float32]]) -> Any:
    """A copy of the model in which layers' weights (by node) are others. Nodes that share weights get their own."""
    made: Any = onnx.ModelProto()
    made.CopyFrom(model)
    stored = {tensor.name: tensor for tensor in made.graph.initializer}
    for node in made.graph.node:
        if node.name in values:
            _store(made, stored, node, 1, values[node.name])
    return made


def replace_biases(model: Any, values: Mapping[str, NDArray[np.float32]]) -> Any:
    """A copy of the model in which layers' biases (by node) are others, or are there at all."""
    made: Any = onnx.ModelProto()
    made.CopyFrom(model)
    stored = {tensor.name: tensor for tensor in made.graph.initializer}
    for node in made.graph.node:
        if node.name in values:
            _store(made, stored, node, 2, values[node.name])
    return made


def with_layers_of(model: Any, other: Any, names: Collection[str]) -> Any:
    """A copy of `model` in which the named nodes have the weights and biases of `other`, a model of the same nodes:
    what was corrected for INT8 is wrong in a layer that stays in float."""
    taken = {name: layer for name, layer in layers(other).items() if name in set(names)}
    values = {tensor.name: tensor for tensor in other.graph.initializer}
    biases = {
        name: numpy_helper.to_array(values[layer.bias])
        for name, layer in taken.items()
        if layer.bias is not None and layer.bias in values
    }
    return replace_biases(
        replace_weights(model, {name: layer.as_stored(layer.weights) for name, layer in taken.items()}), biases
    )


def _store(model: Any, stored: dict[str, Any], node: Any, place: int, value: NDArray[np.float32]) -> None:
    name = node.input[place] if place < len(node.input) else ""
    users = sum(list(each.input).count(name) for each in model.graph.node)
    if not name or users > 1:
        name = f"{node.name}/{'weights' if place == 1 else 'bias'}/own"
        while name in stored:
            name += "_"
        while len(node.input) <= place:
            node.input.append("")
        node.input[place] = name
        stored[name] = model.graph.initializer.add()
    stored[name].CopyFrom(numpy_helper.from_array(np.ascontiguousarray(value), name))


@dataclass(slots=True)
class _Sums:
    pictures: int = 0
    count: int = 0
    mean: Any = 0.0
    rounded: Any = 0.0
    products: Any = 0.0

    def add(self, patches: NDArray[np.float64], rounded: NDArray[np.float64]) -> None:
        """[groups, n, inputs] each."""
        self.pictures += 1
        self.count += patches.shape[1]
        self.mean = self.mean + patches.sum(axis=1)
        self.rounded = self.rounded + rounded.sum(axis=1)
        single = rounded.astype(np.float32)
        self.products = self.products + (single.transpose(0, 2, 1) @ single).astype(np.float64)

    def finish(self) -> Statistics:
        mean, rounded = self.mean / self.count, self.rounded / self.count
        covariance = self.products / self.count - rounded[:, :, None] * rounded[:, None, :]
        return Statistics(mean, rounded, covariance)


def _patches(layer: Layer, value: NDArray[Any], drawn_by: tuple[int, int]) -> NDArray[np.float64]:
    """[groups, n, inputs] of the first place in the batch, at places drawn by the layer's name."""
    rng = np.random.default_rng((zlib.crc32(layer.name.encode()), *drawn_by))
    node = layer.node
    if node.op_type != "Conv":
        rows = value[:1].reshape(-1, layer.weights.shape[-1]).astype(np.float64)
        return np.asarray(rows[rng.permutation(len(rows))[:_PATCHES]][None], np.float64)
    sides = _ints(node, "kernel_shape", list(layer.shape[2:]))
    steps, gaps = _ints(node, "strides", [1, 1]), _ints(node, "dilations", [1, 1])
    top, left, bottom, right = _ints(node, "pads", [0, 0, 0, 0])
    padded = np.pad(value[0].astype(np.float64), ((0, 0), (top, bottom), (left, right)))
    reach = tuple((side - 1) * gap + 1 for side, gap in zip(sides, gaps, strict=True))
    windows = np.lib.stride_tricks.sliding_window_view(padded, reach, axis=(1, 2))  # type: ignore[call-overload]
    windows = windows[:, :: steps[0], :: steps[1]]
    drawn = rng.integers(0, windows.shape[1] * windows.shape[2], _PATCHES)
    rows, columns = drawn // windows.shape[2], drawn % windows.shape[2]
    picked = windows[:, rows, columns, :: gaps[0], :: gaps[1]]
    groups = layer.weights.shape[0]
    grouped = picked.reshape(groups, -1, _PATCHES, sides[0], sides[1]).transpose(0, 2, 1, 3, 4)
    return np.asarray(grouped.reshape(groups, _PATCHES, -1), np.float64)


def _ints(node: Any, name: str, default: list[int]) -> list[int]:
    for attribute in node.attribute:
        if attribute.name == name:
            value = helper.get_attribute_value(attribute)
            return list(value) if isinstance(value, (list, tuple)) else [value]
    return default


def _text(node: Any, name: str) -> str:
    for attribute in node.attribute:
        if attribute.name == name:
            return str(helper.get_attribute_value(attribute).decode())
    return ""
