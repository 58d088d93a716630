"""Preprocessing written into an ONNX graph in front of its first layer: it then takes bytes, and scales nothing.

What the new nodes compute is `vision.pixels.normalised`. The first of them is a cast to float, which is all that
TensorRT does with uint8. Where every consumer of the input is a convolution with known weights, the order of the
channels and the scale go into those weights, and a mean as well where no padding is in its way; what is left becomes
nodes of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from edge_runtime.errors import BundleError
from edge_runtime.records.spec import InputSpec
from edge_runtime.vision.pixels import LUMA_RANGE, ORDER, factors, to_colours

__all__ = ["fuse_graph"]

_OPSET = 11
"""The first one whose Resize says where samples lie."""
_PREFIX = "fused/"
Floats = NDArray[np.float64]


def fuse_graph(model: bytes, spec: InputSpec, where: str) -> bytes:
    """`model`, an ONNX file in one piece that takes float32 NCHW as `spec` normalises it, made to take `spec.pixel`.

    The new input has the shape [batch, *spec.shape] with the model's own batch axis, free or fixed; height and width
    are those of `spec`. Raises BundleError (code "fuse_refused") where the graph cannot be changed so.
    """
    made: Any = onnx.load_model_from_string(model)
    opset = max((entry.version for entry in made.opset_import if entry.domain in ("", "ai.onnx")), default=0)
    if opset < _OPSET:
        raise _refuse(
            f"is of opset {opset}, and {_OPSET} or later is needed", where, "export it with opset 13 or later"
        )
    weights = {tensor.name for tensor in made.graph.initializer}
    inputs = [value for value in made.graph.input if value.name not in weights]
    if len(inputs) != 1:
        raise _refuse(
            f"has {len(inputs)} inputs, and the picture alone is wanted", where, "export it without the others"
        )
    (picture,) = inputs
    tensor = picture.type.tensor_type
    dims = list(tensor.shape.dim)
    if tensor.elem_type != TensorProto.FLOAT or len(dims) != 4:
        kind = TensorProto.DataType.Name(tensor.elem_type)
        message = f"takes {kind} with {len(dims)} axes, and float32 [batch, 3, height, width] is wanted"
        raise _refuse(message, where, "fuse the float32 variant that it was made of")
    if any(value.name == picture.name for value in made.graph.output):
        raise _refuse("gives its input back as an output", where, "export it without that output")
    taken = {name for node in made.graph.node for name in (*node.input, *node.output)} | weights
    if any(name.startswith(_PREFIX) for name in taken):
        raise _refuse("has its preprocessing inside already", where, "fuse the float32 variant that it was made of")
    front = _Front(batch=dims[0])
    front.build(made.graph, picture.name, spec)
    made.ir_version = max(made.ir_version, 4)  # before that, weights had to be inputs too
    picture.name = f"{_PREFIX}{spec.pixel}"
    picture.type.CopyFrom(helper.make_tensor_type_proto(TensorProto.UINT8, ["batch", *spec.shape]))
    picture.type.tensor_type.shape.dim[0].CopyFrom(dims[0])
    nodes = [*front.nodes, *made.graph.node]
    del made.graph.node[:]
    made.graph.node.extend(nodes)
    made.graph.initializer.extend(front.tensors)
    try:
        onnx.checker.check_model(made)
    except onnx.checker.ValidationError as error:
        reason = " ".join(str(error).split())[:200]
        raise _refuse(f"would be no valid ONNX with preprocessing inside: {reason}", where, "export it again") from None
    data: bytes = made.SerializeToString()
    return data


def _refuse(message: str, where: str, remedy: str) -> BundleError:
    return BundleError(message, code="fuse_refused", where=where, remedy=remedy)


@dataclass(slots=True)
class _Front:
    """The nodes and weights that are put in front."""

    batch: Any
    nodes: list[Any] = field(default_factory=list)
    tensors: list[Any] = field(default_factory=list)

    def build(self, graph: Any, name: str, spec: InputSpec) -> None:
        """Nodes from the input of bytes to the tensor `name`, changing the weights behind it where that is exact."""
        gain, offset = factors(spec)
        convolutions = _convolutions(graph, name)
        if spec.pixel == "nv12":
            colours, order, channels = self._colours(spec), (0, 1, 2), 3
        else:
            floats = self._node("Cast", [f"{_PREFIX}{spec.pixel}"], "float", to=TensorProto.FLOAT)
            colours = self._node("Transpose", [floats], "planes", perm=[0, 3, 1, 2])
            order, channels = ORDER[spec.pixel][spec.color], spec.shape[-1]
        if convolutions:
            folded = all(_unpadded(node) for node in _consumers(graph, name))
            for number, (node, weight) in enumerate(convolutions):
                self._fold(graph, node, weight, number, (gain, offset if folded else 0 * offset), order, channels)
            if not folded and offset.any():
                # before the scale, which is in the weights; the padding is still that of a normalised picture
                shift = np.zeros(channels)
                shift[list(order)] = offset / gain
                colours = self._node("Add", [colours, self._tensor("shift", shift[None, :, None, None])], "shifted")
        else:
            if order != tuple(range(channels)):
                wanted = self._tensor("order", np.array(order, np.int64))
                colours = self._node("Gather", [colours, wanted], "ordered", axis=1)
            if (gain != 1).any():
                colours = self._node("Mul", [colours, self._tensor("gain", gain[None, :, None, None])], "scaled")
            if offset.any():
                colours = self._node(
                    "Add", [colours, self._tensor("offset", offset[None, :, None, None])], "normalised"
                )
        self.nodes[-1].output[0] = name

    def _colours(self, spec: InputSpec) -> str:
        """nv12's brightness and colours to [batch, 3, H, W], 0-255 in the order of `spec.color`.

        The matrix is applied to the colours before they are scaled up: a quarter of the work, and the same.
        """
        height, width = spec.height, spec.width
        matrix, shift = to_colours(spec.color)
        floats = self._node("Cast", [f"{_PREFIX}nv12"], "float", to=TensorProto.FLOAT)
        rows = self._slice(floats, 0, height, "rows")
        luma = self._node("Reshape", [rows, self._shape("luma_shape", (0, 1, height, width))], "luma")
        luma = self._node("Mul", [luma, self._tensor("luma_gain", np.array(255.0 / LUMA_RANGE))], "brightness")
        pairs = self._slice(floats, height, height * 3 // 2, "pairs")
        samples = self._shape("chroma_shape", (0, height // 2, width // 2, 2))
        chroma = self._node("Reshape", [pairs, samples], "samples")
        chroma = self._node("Transpose", [chroma], "chroma", perm=[0, 3, 1, 2])
        weight, bias = self._tensor("matrix", matrix[:, 1:, None, None]), self._tensor("matrix_shift", shift)
        chroma = self._node("Conv", [chroma, weight, bias], "tint", kernel_shape=[1, 1])
        # the samples lie on every other column, and midway between two rows
        for axis, mode in ((3, "asymmetric"), (2, "half_pixel")):
            scales = np.ones(4)
            scales[axis] = 2
            names = [chroma, self._tensor(f"roi_{axis}", np.zeros(0)), self._tensor(f"scales_{axis}", scales)]
            chroma = self._node("Resize", names, f"tint_{axis}", mode="linear", coordinate_transformation_mode=mode)
        colours = self._node("Add", [chroma, luma], "colours")
        bounds = [self._tensor("black", np.array(0.0)), self._tensor("white", np.array(255.0))]
        return self._node("Clip", [colours, *bounds], "clipped")

    def _fold(
        self,
        graph: Any,
        node: Any,
        weight: Floats,
        number: int,
        normalise: tuple[Floats, Floats],
        order: Sequence[int],
        channels: int,
    ) -> None:
        """Give a convolution weights [O, channels, ...] that do the order and the scale, and a bias with the mean."""
        gain, offset = normalise
        wider = np.zeros((weight.shape[0], channels, *weight.shape[2:]))
        wider[:, list(order)] = weight * gain[None, :, None, None]
        inputs = list(node.input)
        inputs[1] = self._tensor(f"weight_{number}", wider)
        if offset.any():
            bias = (weight * offset[None, :, None, None]).sum(axis=(1, 2, 3))
            if len(inputs) > 2 and inputs[2]:
                before = _constant(graph, inputs[2])
                assert before is not None  # _convolutions leaves others out
                bias = bias + before
            inputs[2:] = [self._tensor(f"bias_{number}", bias)]
        node.input[:] = inputs

    def _node(self, kind: str, inputs: Iterable[str], output: str, **attributes: Any) -> str:
        name = f"{_PREFIX}{output}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], name=name, **attributes))
        return name

    def _tensor(self, name: str, value: NDArray[Any]) -> str:
        full = f"{_PREFIX}{name}"
        kind = np.int64 if value.dtype.kind == "i" else np.float32
        self.tensors.append(numpy_helper.from_array(np.ascontiguousarray(value, kind).reshape(value.shape), full))
        return full

    def _shape(self, name: str, sides: tuple[int, ...]) -> str:
        return self._tensor(name, np.array(sides, np.int64))

    def _slice(self, source: str, start: int, end: int, output: str) -> str:
        bounds = [
            self._shape(f"{output}_{word}", (side,)) for word, side in (("from", start), ("to", end), ("axis", 1))
        ]
        return self._node("Slice", [source, *bounds], output)


def _consumers(graph: Any, name: str) -> list[Any]:
    return [node for node in graph.node if name in node.input]


def _convolutions(graph: Any, name: str) -> list[tuple[Any, Floats]]:
    """The convolutions behind the tensor, with their weights in float64; none where anything else looks at it too."""
    found = []
    for node in graph.node:
        inner = [attribute for attribute in node.attribute if attribute.type in (onnx.AttributeProto.GRAPH,)]
        if any(name in each.input for attribute in inner for each in attribute.g.node):
            return []
    for node in _consumers(graph, name):
        if node.op_type != "Conv" or node.domain not in ("", "ai.onnx") or list(node.input).count(name) != 1:
            return []
        weight = _constant(graph, node.input[1])
        groups = next((attribute.i for attribute in node.attribute if attribute.name == "group"), 1)
        biased = len(node.input) > 2 and node.input[2]
        if weight is None or weight.ndim != 4 or weight.shape[1] != 3 or groups != 1 or node.input[0] != name:
            return []
        if biased and _constant(graph, node.input[2]) is None:
            return []
        found.append((node, weight))
    return found


def _unpadded(node: Any) -> bool:
    attributes = {attribute.name: attribute for attribute in node.attribute}
    automatic = attributes["auto_pad"].s if "auto_pad" in attributes else b"NOTSET"
    if automatic in (b"NOTSET", b""):
        return "pads" not in attributes or not any(attributes["pads"].ints)
    return bool(automatic == b"VALID")


def _constant(graph: Any, name: str) -> Floats | None:
    """A weight's values, also where it is kept as halves and cast; None where it is computed otherwise."""
    for tensor in graph.initializer:
        if tensor.name == name:
            return np.asarray(numpy_helper.to_array(tensor), np.float64)
    for node in graph.node:
        if name not in node.output:
            continue
        attributes = {attribute.name: attribute for attribute in node.attribute}
        if node.op_type == "Constant" and "value" in attributes:
            return np.asarray(numpy_helper.to_array(attributes["value"].t), np.float64)
        if node.op_type == "Cast" and attributes["to"].i == TensorProto.FLOAT:
            return _constant(graph, node.input[0])
    return None
