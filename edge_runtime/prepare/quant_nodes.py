"""Which nodes of a float32 graph can be INT8, which of them a plan makes so, and what has to be right around them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import helper

from edge_runtime.errors import UsageError
from edge_runtime.prepare.half_graph import FloatGraph
from edge_runtime.prepare.quant import QuantPlan, Ranges, TensorRange

__all__ = ["CUTTING", "MOVING", "WEIGHTED", "QuantNodes", "channel_axis", "operators_of"]

WEIGHTED = frozenset(("Conv", "Gemm", "MatMul"))
MOVING = frozenset((
    "Flatten", "MaxPool", "Reshape", "Resize", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze",
))  # fmt: skip
"""Operators that make no new values, or only choose among them: their outputs keep the scale of their input."""
CUTTING = frozenset(("Clip", "Relu"))
"""Operators that a range does the work of, where it is that of what they make."""
_CPU = frozenset((
    "Add", "AveragePool", "Clip", "Concat", "Conv", "Gemm", "GlobalAveragePool", "LeakyRelu", "MatMul", "Mul", "Relu",
    "Sigmoid", *MOVING,
))  # fmt: skip
_TENSORRT = frozenset(("Conv", "Gemm", "MatMul"))


def operators_of(family: str) -> frozenset[str]:
    """The op types that can be INT8 in a family of artefacts: "onnxruntime", those of which its CPU provider (1.23 and
    later) makes INT8 kernels; "tensorrt", its layers with weights, around which it chooses for itself.

    Raises UsageError for another word.
    """
    if family == "onnxruntime":
        return _CPU
    if family == "tensorrt":
        return _TENSORRT
    raise UsageError(f"there is no family {family!r} of INT8 artefacts", remedy="name onnxruntime or tensorrt")


@dataclass(slots=True)
class QuantNodes:
    """A `float_model` and its tensors."""

    model: Any
    graph: FloatGraph

    @classmethod
    def of(cls, model: Any) -> QuantNodes:
        """Read an onnx.ModelProto whose nodes have names, each its own."""
        return cls(model, FloatGraph.of(model))

    def computed_floats(self, node: Any) -> Iterator[str]:
        """The float32 tensors that a node takes or makes and that are computed, not stored."""
        stored = self.graph.constants
        for name in (*self.graph.data(node), *self.graph.made(node)):
            if name not in stored:
                yield name

    def quantisable(self, family: str) -> tuple[str, ...]:
        """See `quant_graph.quantisable`."""
        kinds = operators_of(family)
        return tuple(node.name for node in self.model.graph.node if node.op_type in kinds and self._fits(node))

    def planned(self, plan: QuantPlan) -> tuple[str, ...]:
        """See `quant_graph.planned`."""
        able = set(self.quantisable(plan.family))
        found = [
            node
            for node in self.model.graph.node
            if node.name in able and node.op_type in plan.operators and node.name not in plan.keep_float
        ]
        if plan.family == "tensorrt":
            return tuple(node.name for node in found)
        makers: dict[str, str] = {}
        names: list[str] = []
        for node in found:  # the graph is in order: makers come before takers
            data = list(self.graph.data(node))
            if node.op_type in WEIGHTED or any(name in makers for name in data):
                if node.op_type in CUTTING and not self._left_out(node, makers):
                    continue
                names.append(node.name)
                makers.update(dict.fromkeys(node.output, node.op_type))
        return tuple(names)

    def saturating(self, ranges: Ranges, chosen: Collection[str]) -> dict[str, TensorRange]:
        """The ranges, those behind chosen Relus and Clips cut to their bounds, as they do the work of those nodes."""
        cut = dict(ranges)
        for node in self.model.graph.node:
            if node.name in chosen and node.op_type in CUTTING and node.output[0] in cut:
                low, high = self._bounds(node) or (-np.inf, np.inf)
                old = cut[node.output[0]]
                found = TensorRange(max(old.low, low), min(old.high, high))
                if found.low == found.high and np.isfinite(high - low):
                    found = TensorRange(low, high)  # nothing was seen of it, and something may come
                cut[node.output[0]] = found
        return cut

    def _left_out(self, node: Any, makers: Mapping[str, str]) -> bool:
        """Whether an INT8 node's range can do the work of a Relu or Clip: it has a range of its own, and nothing else
        takes what it makes."""
        name = node.input[0]
        kind = makers.get(name)
        sole = len(self.graph.takers.get(name, [])) == 1 and name not in self.graph.outputs
        return kind is not None and kind not in MOVING and kind not in CUTTING and sole

    def _bounds(self, node: Any) -> tuple[float, float] | None:
        """What a Relu or Clip cuts to; None where it is computed or leaves out zero."""
        if node.op_type == "Relu":
            return 0.0, float("inf")
        bounds = [-float("inf"), float("inf")]
        for place in (1, 2):
            if place < len(node.input) and node.input[place]:
                value = self.graph.weights.get(node.input[place])
                if value is None or value.size != 1:
                    return None
                bounds[place - 1] = float(value.reshape(()))
        return (bounds[0], bounds[1]) if bounds[0] <= 0 <= bounds[1] else None

    def _fits(self, node: Any) -> bool:
        kind, graph = node.op_type, self.graph
        if node.domain not in ("", "ai.onnx") or not list(graph.data(node)) or not list(graph.made(node)):
            return False
        if node.input[0] in graph.constants and kind not in ("Add", "Mul"):
            return False
        if any(name in graph.unknown for name in (*node.input, *node.output)):
            return False
        if kind in WEIGHTED or kind in ("Add", "Mul"):
            stored = [graph.weights[name] for name in node.input if name in graph.weights]
            if not all(value.size and np.isfinite(value).all() for value in stored):
                return False  # a mask of -inf, say, has no scale
        if kind in ("Conv", "Gemm"):
            weight = graph.weights.get(node.input[1])
            bias = graph.weights.get(node.input[2]) if len(node.input) > 2 and node.input[2] else None
            if weight is None or (bias is None and len(node.input) > 2 and node.input[2]):
                return False
            if bias is not None and bias.shape != (weight.shape[channel_axis(node, weight)],):
                return False
            return kind == "Conv" or _plain_gemm(node)
        if kind == "MatMul":
            weight = graph.weights.get(node.input[1])
            return node.input[1] not in graph.constants or (weight is not None and weight.ndim == 2)
        if kind in ("Add", "Mul"):
            return all(name in graph.floats for name in node.input) and not graph.constants.issuperset(node.input)
        if kind in CUTTING:
            return self._bounds(node) is not None
        if kind == "Concat":
            return not any(name in graph.constants for name in node.input)
        if kind == "MaxPool":
            return len(node.output) == 1
        if kind == "Resize":
            return bool(_attributes(node).get("mode", b"nearest") == b"nearest")
        return True


def channel_axis(node: Any, weights: NDArray[np.float32]) -> int:
    """The axis of output channels in the stored weights of a Conv, Gemm or MatMul."""
    if node.op_type == "Gemm":
        return 0 if _attributes(node).get("transB", 0) else 1
    return 0 if node.op_type == "Conv" else weights.ndim - 1


def _plain_gemm(node: Any) -> bool:
    given = _attributes(node)
    return bool(given.get("alpha", 1.0) == 1.0 and given.get("beta", 1.0) == 1.0 and not given.get("transA", 0))


def _attributes(node: Any) -> dict[str, Any]:
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
