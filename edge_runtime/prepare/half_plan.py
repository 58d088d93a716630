"""Which nodes of a graph may compute in FP16, and why the others may not.

FP16 has 11 significant bits, ends at 65504 and loses bits below 6.1e-5. So a node stays in float32

- where one of its tensors came within a factor of `MARGIN` of that end on the calibration pictures,
- where its weights do not fit, or lose more than rounding takes from any weight,
- where it sums over many values, normalises, or is steep (softmax, exponentials, roots, divisions by what is computed):
  its result may be in range and what lies between not,
- behind the last layers with weights: there boxes are decoded and joined with scores. A coordinate of 600 px has steps
  of half a pixel in FP16,
- before the first one: pixels are made ready there, and it costs next to nothing,
- where no layer with weights is beside it: casts would cost more than it gains.

What is not in `_HALF` is not known to be right in FP16, and stays in float32 as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.prepare.half_graph import FloatGraph, taken_by

__all__ = ["LIMIT", "MARGIN", "Choice", "HalfPlan", "plan_half"]

LARGEST = float(np.finfo(np.float16).max)
SMALLEST = float(np.finfo(np.float16).smallest_normal)
MARGIN = 4.0
"""Other pictures may go beyond those of the calibration."""
LIMIT = LARGEST / MARGIN
_ROUNDING = 1e-3
"""Relative error of a weight tensor (by its norm): rounding alone gives 2 to 3e-4."""

_WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_MOVING = (
    "Concat", "DepthToSpace", "Expand", "Flatten", "Gather", "Identity", "Pad", "Reshape", "Resize", "Slice",
    "SpaceToDepth", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze", "Where",
)  # fmt: skip
_STEADY = (
    "Abs", "Add", "Celu", "Clip", "Div", "Elu", "GlobalMaxPool", "HardSigmoid", "HardSwish", "LeakyRelu", "Max",
    "MaxPool", "Min", "Mish", "Mul", "Neg", "PRelu", "Relu", "Selu", "Sigmoid", "Sub", "Tanh",
)  # fmt: skip
_HALF = frozenset((*_WEIGHTED, *_MOVING, *_STEADY))
_SUMS = frozenset((
    "AveragePool", "BatchNormalization", "CumSum", "Einsum", "GlobalAveragePool", "GlobalLpPool", "GroupNormalization",
    "InstanceNormalization", "LayerNormalization", "LpNormalization", "LpPool", "LRN", "MeanVarianceNormalization",
    "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMean", "ReduceProd", "ReduceSum",
    "ReduceSumSquare", "RMSNormalization",
))  # fmt: skip
_STEEP = frozenset((
    "Erf", "Exp", "Gelu", "Log", "LogSoftmax", "Pow", "Reciprocal", "Softmax", "Softplus", "Softsign", "Sqrt",
))  # fmt: skip
_ADDED = ("Add", "Sub", "Min", "Max", "Clip", "Where", "Concat", "Pad")
"""Operators whose stored operand stands beside their data, and does not multiply it."""

SUMS = "sums over many values or normalises"
STEEP = "is steep: exponentials, softmax, roots"
DIVIDES = "divides by what is computed"
BEHIND = "stands behind the last layers with weights, where boxes are decoded and joined with scores"
BEFORE = "stands before the first layer with weights, where pixels are made ready"
ALONE = "has no layer with weights beside it that computes in FP16"
UNKNOWN = "is not known to be right in FP16"
UNTYPED = "has a tensor whose type cannot be told"
TOO_LARGE = "reaches beyond FP16's range"
WEIGHTS_TOO_LARGE = "has weights beyond FP16's range"
WEIGHTS_TOO_SMALL = "has weights that lose too much in FP16"


@dataclass(frozen=True, slots=True)
class Choice:
    """A node: `why` it stays in float32, None where it becomes FP16. `detail`: figures, where there are some.

    `largest`: the largest magnitude of its tensors on the calibration pictures.
    """

    name: str
    operator: str
    why: str | None
    detail: str | None
    largest: float


@dataclass(frozen=True, slots=True)
class HalfPlan:
    """One choice for each node that computes with float32, by the node's index in the graph.

    `weights`: float32 weights that become FP16; `subnormal` of them lose bits and `lost` become 0 there.
    """

    choices: Mapping[int, Choice]
    weights: int
    subnormal: int
    lost: int

    @property
    def half(self) -> frozenset[int]:
        return frozenset(index for index, choice in self.choices.items() if choice.why is None)

    def reasons(self) -> dict[str, Counter[str]]:
        """Why nodes stay in float32 -> how many of each operator."""
        found: dict[str, Counter[str]] = {}
        for choice in self.choices.values():
            if choice.why is not None:
                found.setdefault(choice.why, Counter())[choice.operator] += 1
        return found


def plan_half(graph: FloatGraph, largest: Mapping[str, float]) -> HalfPlan:
    """What may be FP16 by the rules above. `largest`: by tensor, as a RangeMeter says it."""
    before, behind = _before(graph), _behind(graph)
    choices: dict[int, Choice] = {}
    for index, node in enumerate(graph.nodes):
        tensors = [*graph.data(node), *graph.made(node)]
        if not tensors or node.op_type == "Cast" or not list(graph.made(node)):
            continue  # nothing of it is float32, or it changes types: it has no precision of its own
        top = max((largest[name] for name in tensors if name in largest), default=0.0)
        why, detail = _why(graph, node, index, before, behind, largest)
        choices[index] = Choice(node.name or node.output[0], node.op_type, why, detail, top)
    alone = _alone(graph, {index for index, choice in choices.items() if choice.why is None})
    for index in alone:
        old = choices[index]
        choices[index] = Choice(old.name, old.operator, ALONE, None, old.largest)
    half = {index for index, choice in choices.items() if choice.why is None}
    stored = dict.fromkeys(name for index in sorted(half) for name in graph.data(graph.nodes[index]))
    values = [graph.weights[name] for name in stored if name in graph.weights]
    return HalfPlan(
        dict(sorted(choices.items())),
        weights=sum(value.size for value in values),
        subnormal=sum(int(((value != 0) & (np.abs(value) < SMALLEST)).sum()) for value in values),
        lost=sum(int(((value != 0) & (_rounded(value) == 0)).sum()) for value in values),
    )


def _why(
    graph: FloatGraph, node: Any, index: int, before: set[int], behind: set[int], largest: Mapping[str, float]
) -> tuple[str | None, str | None]:
    """Why a node stays in float32, and figures; (None, None) where it need not."""
    kind = node.op_type
    if any(name in graph.unknown for name in (*node.input, *node.output)):
        return UNTYPED, None
    if kind in _SUMS:
        return SUMS, None
    if kind in _STEEP:
        return STEEP, None
    if kind not in _HALF or node.domain not in ("", "ai.onnx"):
        return UNKNOWN, None
    if kind == "Div" and node.input[1] not in graph.weights:
        return DIVIDES, None
    if index in behind:
        return BEHIND, None
    if index in before:
        return BEFORE, None
    for name in (*graph.data(node), *graph.made(node)):
        if name in graph.weights:
            continue
        if not largest.get(name, np.inf) < LIMIT:
            return TOO_LARGE, f"{name} reaches {largest.get(name, np.inf):.4g}"
    return _weights_why(graph, node, largest)


def _weights_why(graph: FloatGraph, node: Any, largest: Mapping[str, float]) -> tuple[str | None, str | None]:
    reach = max((largest.get(name, 0.0) for name in graph.made(node)), default=0.0)
    for place, name in enumerate(node.input):
        value = graph.weights.get(name)
        if value is None or value.size == 0 or name not in set(graph.data(node)):
            continue
        top = float(np.abs(value).max())
        if not top <= LARGEST:
            return WEIGHTS_TOO_LARGE, f"{name} reaches {top:.4g}"
        rounded = _rounded(value)
        error = (value.astype(np.float64) - rounded).ravel()
        beside = node.op_type in _ADDED or (node.op_type in ("Conv", "ConvTranspose", "Gemm") and place == 2)
        if beside:
            # what is added is judged by what it is added to
            if np.abs(error).max() > 2 * _ROUNDING * max(reach, SMALLEST):
                return WEIGHTS_TOO_SMALL, f"{name} is off by {np.abs(error).max():.2g}"
            if node.op_type in _ADDED and ((value != 0) & (rounded == 0)).any():
                return WEIGHTS_TOO_SMALL, f"{name} becomes 0"
        elif (norm := float(np.linalg.norm(value.astype(np.float64).ravel()))) > 0:
            share = float(np.linalg.norm(error)) / norm
            if share > _ROUNDING:
                small = int(((value != 0) & (np.abs(value) < SMALLEST)).sum())
                return WEIGHTS_TOO_SMALL, f"{name} is off by {share:.2g}, {small} of {value.size} are subnormal"
    return None, None


def _rounded(value: NDArray[np.float32]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):
        return value.astype(np.float16).astype(np.float32)


def _before(graph: FloatGraph) -> set[int]:
    """Nodes that a picture passes before any layer with weights."""
    found: set[int] = set()
    stored = graph.constants
    starts = [value.name for value in graph.model.graph.input if value.name not in stored]
    waiting = [index for name in starts for index in graph.takers.get(name, [])]
    while waiting:
        index = waiting.pop()
        if index in found or _layer(graph, graph.nodes[index]):
            continue
        found.add(index)
        waiting += [taker for name in graph.nodes[index].output for taker in graph.takers.get(name, [])]
    # what takes anything from behind a layer as well (a picture added again later) is not before it
    reached: set[int] = set()
    waiting = [index for index, node in enumerate(graph.nodes) if _layer(graph, node)]
    while waiting:
        index = waiting.pop()
        if index not in reached:
            reached.add(index)
            waiting += [taker for name in graph.nodes[index].output for taker in graph.takers.get(name, [])]
    return found - reached


def _behind(graph: FloatGraph) -> set[int]:
    """Nodes from which an output is reached without passing a layer with weights."""
    found: set[int] = set()
    waiting = [graph.makers[name] for name in graph.outputs if name in graph.makers]
    while waiting:
        index = waiting.pop()
        node = graph.nodes[index]
        if index in found or (_layer(graph, node) and not _expectation(graph, node)):
            continue
        found.add(index)
        waiting += [graph.makers[name] for name in taken_by(node) if name in graph.makers]
    return found


def _layer(graph: FloatGraph, node: Any) -> bool:
    """A layer with stored weights; a product of two computed tensors (attention) is none."""
    return node.op_type in _WEIGHTED and any(name in graph.weights for name in node.input[:2])


def _expectation(graph: FloatGraph, node: Any) -> bool:
    """A layer straight behind a softmax: the mean side of a box over a distribution (DFL), which is decoding."""
    name = node.input[0]
    while (index := graph.makers.get(name)) is not None:
        before = graph.nodes[index]
        if before.op_type == "Softmax":
            return True
        if before.op_type not in ("Transpose", "Reshape", "Squeeze", "Unsqueeze", "Identity", "Flatten"):
            return False
        name = before.input[0]
    return False


def _alone(graph: FloatGraph, half: set[int]) -> set[int]:
    """Of the nodes in `half`, those in groups that hang together by their tensors and have no layer with weights."""
    left, found = set(half), set()
    while left:
        group: set[int] = set()
        waiting = [min(left)]
        while waiting:
            index = waiting.pop()
            if index in group or index not in half:
                continue
            group.add(index)
            waiting += _neighbours(graph, graph.nodes[index])
        left -= group
        if not any(graph.nodes[index].op_type in _WEIGHTED for index in group):
            found |= group
    return found


def _neighbours(graph: FloatGraph, node: Any) -> Iterable[int]:
    for name in graph.data(node):
        if name in graph.makers:
            yield graph.makers[name]
    for name in graph.made(node):
        yield from graph.takers.get(name, [])
