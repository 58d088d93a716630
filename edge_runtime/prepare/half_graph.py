"""An ONNX graph of float32 with some of its nodes made FP16: written for TensorRT, or imitated in float32.

In a strongly typed TensorRT network precision is what the graph says: a node of FP16 takes FP16, gives FP16, and casts
stand where it meets the rest. Inputs and outputs stay float32. A tensor keeps its name in float32; `NAME/fp16` is the
same tensor in FP16, cast once however many nodes take it.

ONNX Runtime's CPU provider has no FP16 convolution. It computes such a node in float32 and takes out the casts to FP16
and back that meet: on it the FP16 graph rounds its weights and hardly anything else, and a tensor beyond FP16's range
passes as if nothing were wrong. The imitation is a graph of float32 nodes with the weights rounded and every tensor
that is FP16 on the GPU rounded by a pair of casts, which ONNX Runtime does leave alone. Sums inside of a node are
float32 there; a GPU may sum in another order, and where it sums in FP16, more coarsely.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

__all__ = ["SUFFIX", "FloatGraph", "imitate_half", "taken_by", "write_half"]

SUFFIX = "/fp16"
_NOT_THE_DATA = {"Resize": (1, 2, 3)}
"""Inputs that stay float32 or integers in a node whose data is FP16: regions, scales and sizes."""


@dataclass(slots=True)
class FloatGraph:
    """A model and what is known of its tensors.

    `weights`: float32 weights by name; `floats`: every tensor of float32; `unknown`: tensors whose type cannot be told;
    `makers`: tensor -> index of the node that makes it; `takers`: tensor -> the indices of the nodes that take it.
    """

    model: Any
    weights: dict[str, NDArray[np.float32]]
    floats: set[str]
    unknown: set[str]
    makers: dict[str, int]
    takers: dict[str, list[int]]

    @classmethod
    def of(cls, model: Any) -> FloatGraph:
        """Read an onnx.ModelProto, whose types are inferred by onnx."""
        graph = onnx.shape_inference.infer_shapes(model).graph
        weights = {
            tensor.name: np.asarray(numpy_helper.to_array(tensor), np.float32)
            for tensor in model.graph.initializer
            if tensor.data_type == TensorProto.FLOAT
        }
        types = {
            value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.value_info, *graph.output)
        }
        types.update({tensor.name: tensor.data_type for tensor in model.graph.initializer})
        makers: dict[str, int] = {}
        takers: dict[str, list[int]] = {}
        unknown: set[str] = set()
        for index, node in enumerate(model.graph.node):
            for name in node.output:
                makers[name] = index
                if name and not types.get(name):
                    unknown.add(name)
            for name in dict.fromkeys(taken_by(node)):
                takers.setdefault(name, []).append(index)
        floats = {name for name, kind in types.items() if kind == TensorProto.FLOAT}
        return cls(model, weights, floats, unknown, makers, takers)

    @property
    def nodes(self) -> Any:
        return self.model.graph.node

    @property
    def constants(self) -> set[str]:
        """The names of all tensors that are stored in the model."""
        return {tensor.name for tensor in self.model.graph.initializer}

    @property
    def inputs(self) -> list[str]:
        """The graph's inputs of float32, without weights."""
        names = [value.name for value in self.model.graph.input]
        stored = self.constants
        return [name for name in names if name in self.floats and name not in stored]

    @property
    def outputs(self) -> list[str]:
        return [value.name for value in self.model.graph.output]

    def data(self, node: Any) -> Iterator[str]:
        """The float32 inputs of a node that follow its precision, weights among them."""
        for place, name in enumerate(node.input):
            if name in self.floats and place not in _NOT_THE_DATA.get(node.op_type, ()):
                yield name

    def made(self, node: Any) -> Iterator[str]:
        """The float32 outputs of a node."""
        yield from (name for name in node.output if name in self.floats)


def taken_by(node: Any) -> Iterator[str]:
    """All that a node takes: its inputs, and what graphs inside of it take from without."""
    yield from (name for name in node.input if name)
    yield from _captured(node)


def _captured(node: Any) -> Iterator[str]:
    """The names that graphs inside of a node (If, Loop, Scan) take from without, and perhaps some of their own."""
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            for inner in graph.node:
                yield from inner.input
                yield from _captured(inner)
            yield from (value.name for value in graph.output)


def write_half(graph: FloatGraph, half: Collection[int]) -> bytes:
    """The model with the nodes of these indices in FP16, deterministically: for TensorRT, and valid ONNX."""
    return _rewrite(graph, half, imitated=False)


def imitate_half(graph: FloatGraph, half: Collection[int]) -> bytes:
    """The model in float32 that rounds where `write_half` has FP16."""
    return _rewrite(graph, half, imitated=True)


def _rewrite(graph: FloatGraph, half: Collection[int], *, imitated: bool) -> bytes:
    made: Any = onnx.ModelProto()
    made.CopyFrom(graph.model)
    rewriter = _Rewriter(graph, frozenset(half), imitated)
    nodes = list(rewriter.nodes())
    del made.graph.node[:]
    made.graph.node.extend(nodes)
    used = {name for node in nodes for name in taken_by(node)} | set(graph.outputs)
    inputs = [value for value in made.graph.input if value.name not in graph.constants]
    del made.graph.input[:]
    made.graph.input.extend(inputs)
    made.ir_version = max(made.ir_version, 4)  # before that, weights had to be inputs too
    tensors = [tensor for tensor in made.graph.initializer if tensor.name in used]
    tensors += rewriter.tensors
    del made.graph.initializer[:]
    made.graph.initializer.extend(tensors)
    del made.graph.value_info[:]  # types changed; readers infer them
    onnx.checker.check_model(made)
    data: bytes = made.SerializeToString(deterministic=True)
    return data


class _Rewriter:
    def __init__(self, graph: FloatGraph, half: frozenset[int], imitated: bool) -> None:
        self._graph = graph
        self._half = half
        self._imitated = imitated
        self._written: set[str] = set()
        self.tensors: list[Any] = []

    def nodes(self) -> Iterator[Any]:
        graph = self._graph
        for name in graph.inputs:
            yield from self._casts(name, by_half=False)
        for index, node in enumerate(graph.nodes):
            made: Any = onnx.NodeProto()
            made.CopyFrom(node)
            if index not in self._half:
                yield made
            else:
                yield self._halved(made)
            for name in graph.made(node):
                yield from self._casts(name, by_half=index in self._half)

    def _halved(self, made: Any) -> Any:
        graph = self._graph
        wanted = set(graph.data(made))
        for place, name in enumerate(made.input):
            if name not in wanted or place in _NOT_THE_DATA.get(made.op_type, ()):
                continue
            made.input[place] = f"{name}{SUFFIX}"
            if name in graph.weights and name not in self._written:
                self._written.add(name)
                rounded = graph.weights[name].astype(np.float16)
                value = rounded.astype(np.float32) if self._imitated else rounded
                self.tensors.append(numpy_helper.from_array(value, f"{name}{SUFFIX}"))
        for place, name in enumerate(made.output):
            if name in graph.floats:
                made.output[place] = f"{name}/unrounded" if self._imitated else f"{name}{SUFFIX}"
        return made

    def _casts(self, name: str, *, by_half: bool) -> Iterator[Any]:
        """What stands behind a float32 tensor's maker: the same in the other precision, where somebody takes it."""
        graph = self._graph
        takers = graph.takers.get(name, [])
        half = any(index in self._half and name in graph.data(graph.nodes[index]) for index in takers)
        plain = name in graph.outputs or any(
            index not in self._half or name in _set_aside(graph.nodes[index]) for index in takers
        )
        if self._imitated:
            if by_half:
                yield from _rounded(f"{name}/unrounded", f"{name}{SUFFIX}", name)
                if plain:
                    yield helper.make_node("Identity", [f"{name}{SUFFIX}"], [name], name=f"{name}/float")
            elif half:
                yield from _rounded(name, f"{name}{SUFFIX}", name)
        elif by_half and plain:
            yield helper.make_node("Cast", [f"{name}{SUFFIX}"], [name], name=f"{name}/float", to=TensorProto.FLOAT)
        elif half and not by_half:
            target = f"{name}{SUFFIX}"
            yield helper.make_node("Cast", [name], [target], name=target, to=TensorProto.FLOAT16)


def _set_aside(node: Any) -> list[str]:
    return [node.input[place] for place in _NOT_THE_DATA.get(node.op_type, ()) if place < len(node.input)]


def _rounded(source: str, target: str, name: str) -> Iterator[Any]:
    middle = f"{name}/rounded"
    yield helper.make_node("Cast", [source], [middle], name=f"{name}/to_fp16", to=TensorProto.FLOAT16)
    yield helper.make_node("Cast", [middle], [target], name=f"{name}/to_fp32", to=TensorProto.FLOAT)
