"""The parts of a model that become INT8 or stay in float together, and how much of its work each does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from edge_runtime.engine.onnxrt import open_session
from edge_runtime.prepare.half_graph import taken_by
from edge_runtime.prepare.quant import QuantPlan
from edge_runtime.prepare.quant_graph import planned, quantisable
from edge_runtime.prepare.quant_layers import layers
from edge_runtime.prepare.quant_probe import Probe

__all__ = ["Block", "blocks", "int8_share", "last_blocks", "tail", "work_of"]

_WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul")


@dataclass(frozen=True, slots=True)
class Block:
    """A layer with weights and what follows it up to the next; `name` is the layer's. `share` (0-1): of the model's
    multiplications by weights."""

    name: str
    nodes: tuple[str, ...]
    share: float


def blocks(model: Any, family: str, work: dict[str, float]) -> tuple[Block, ...]:
    """The blocks of what could be INT8, in graph order, without `tail(model)`. `work`: as `work_of` says it."""
    able = set(quantisable(model, family)) - tail(model)
    owner: dict[str, str] = {}
    members: dict[str, list[str]] = {}
    places = {node.name: place for place, node in enumerate(model.graph.node)}
    for node in model.graph.node:
        if node.op_type in _WEIGHTED and node.name in able:
            mine = node.name
        else:
            # of what joins two blocks the later one has it
            before = [owner[name] for name in node.input if name in owner]
            mine = max(before, key=lambda name: places[name], default=node.name)
        owner.update(dict.fromkeys(node.output, mine))
        if node.name in able:
            members.setdefault(mine, []).append(node.name)
    total = sum(work.values()) or 1.0
    return tuple(Block(name, tuple(nodes), work.get(name, 0.0) / total) for name, nodes in members.items())


def tail(model: Any) -> frozenset[str]:
    """Nodes from which an output is reached without a layer with weights: boxes are decoded and joined with scores
    there, and one scale for both would round every score to 0."""
    makers = {name: node for node in model.graph.node for name in node.output}
    found: set[str] = set()
    waiting = [value.name for value in model.graph.output]
    while waiting:
        node = makers.get(waiting.pop())
        if node is None or node.name in found or node.op_type in _WEIGHTED:
            continue
        found.add(node.name)
        waiting += list(taken_by(node))
    return frozenset(found)


def last_blocks(model: Any, of: Sequence[Block]) -> frozenset[str]:
    """Names of the blocks whose layer is the last one with weights before an output."""
    makers = {name: node for node in model.graph.node for name in node.output}
    behind = {name for node in model.graph.node if node.name in tail(model) for name in taken_by(node)}
    behind |= {value.name for value in model.graph.output}
    last = {makers[name].name for name in behind if name in makers and makers[name].op_type in _WEIGHTED}
    return frozenset(block.name for block in of if block.name in last)


def work_of(model: Any, probe: Probe) -> dict[str, float]:
    """Multiplications of each layer with weights for one picture, by node's name."""
    known = layers(model)
    made = type(model)()
    made.CopyFrom(model)
    answers = {value.name for value in made.graph.output}
    names = [layer.node.output[0] for layer in known.values()]
    for name in names:
        if name not in answers:
            made.graph.output.add().name = name
    session = open_session(made.SerializeToString(), probe.where)
    (only,) = session.get_inputs()
    picture = next(iter(probe.inputs(1)))
    side = only.shape[0] if isinstance(only.shape[0], int) else 1
    results = session.run(names, {only.name: picture.repeat(max(side, 1), axis=0)})
    return {
        name: float(result[0].size * layer.weights.shape[2])
        for (name, layer), result in zip(known.items(), results, strict=True)
    }


def int8_share(model: Any, plan: QuantPlan, work: dict[str, float]) -> float:
    """Of the multiplications by weights, the share (0-1) in INT8."""
    names: Sequence[str] = planned(model, plan)
    return sum(work.get(name, 0.0) for name in names) / (sum(work.values()) or 1.0)
