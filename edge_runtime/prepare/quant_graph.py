"""An ONNX graph of float32 with some of its nodes made INT8: Q/DQ pairs, which a backend turns into INT8 kernels.

What a pair is worth is the backend's matter. ONNX Runtime's CPU provider needs one at every input *and* the output of a
node to compute it in INT8, and takes biases of int32; TensorRT wants pairs at the inputs of its layers with weights,
symmetric, and biases in float. So there are two families of artefacts (quant.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

from edge_runtime.errors import BundleError, UsageError
from edge_runtime.prepare.graph import optimise
from edge_runtime.prepare.half_graph import taken_by
from edge_runtime.prepare.onnx_file import read_precision
from edge_runtime.prepare.quant import QuantPlan, Ranges
from edge_runtime.prepare.quant_nodes import QuantNodes, operators_of
from edge_runtime.prepare.quant_write import write_quantised

__all__ = ["activations", "float_model", "operators_of", "planned", "quantisable", "quantise"]


def float_model(data: bytes, where: str) -> Any:
    """The onnx.ModelProto of a serialised float32 model, made ready by `graph.optimise`: constants computed and
    normalisation folded into the layers before it, opset 13 or later, each node with a name of its own.

    Raises BundleError (code "quantise_refused") where it is not of float32 or cannot be simplified or converted.
    """
    model: Any = onnx.load_model_from_string(optimise(data, where, code="quantise_refused").data)
    if (precision := read_precision(model)) != "fp32":
        raise BundleError(
            f"computes in {precision} already",
            code="quantise_refused",
            where=where,
            remedy="take the model in float32 that it was made of",
        )
    return model


def quantisable(model: Any, family: str) -> tuple[str, ...]:
    """The names of the nodes of a `float_model` that could be INT8 in an artefact of this family, in graph order.

    Those of `operators_of(family)` whose weights, biases, bounds and axes are such as the kernels take.
    """
    return QuantNodes.of(model).quantisable(family)


def activations(model: Any) -> tuple[str, ...]:
    """The float32 tensors whose ranges `quantise` may ask for, in graph order: all that is taken or made by nodes which
    can be INT8 in either family, without what is stored."""
    nodes = QuantNodes.of(model)
    wanted = {*nodes.quantisable("onnxruntime"), *nodes.quantisable("tensorrt")}
    return tuple(
        dict.fromkeys(name for node in model.graph.node if node.name in wanted for name in nodes.computed_floats(node))
    )


def planned(model: Any, plan: QuantPlan) -> tuple[str, ...]:
    """The names of the nodes that `quantise` makes INT8, in graph order.

    Those of the plan, without what would only cost: an operation with no weights none of whose inputs comes from an
    INT8 node, and a Relu or Clip whose maker stays in float.
    """
    return QuantNodes.of(model).planned(plan)


def quantise(model: Any, plan: QuantPlan) -> Any:
    """A `float_model` with what is planned made INT8; the model that is given stays as it is.

    Scales of weights are per output channel and symmetric. Activations are U8 with zero points (family
    "onnxruntime") or symmetric S8 ("tensorrt"). The same plan gives the same bytes.

    Raises UsageError (code "range_missing") where the plan lacks the range of a tensor, or one is not finite or without
    zero; (code "plan_unknown") where it names nodes that the model does not have.
    """
    made: Any = onnx.ModelProto()
    made.CopyFrom(model)
    nodes = QuantNodes.of(made)
    unknown = sorted(plan.keep_float - {node.name for node in made.graph.node})
    if unknown:
        raise UsageError(f"the plan names nodes that are not there: {', '.join(unknown[:5])}", code="plan_unknown")
    chosen = nodes.planned(plan)
    if not chosen:
        return made
    ranges = nodes.saturating(plan.ranges, frozenset(chosen))
    _check_ranges(nodes, frozenset(chosen), ranges)
    write_quantised(nodes, chosen, ranges, symmetric=plan.family == "tensorrt", bits=plan.weight_bits)
    _drop_unused(made)
    return made


def _drop_unused(model: Any) -> None:
    used = {name for node in model.graph.node for name in taken_by(node)}
    used |= {value.name for value in model.graph.output}
    tensors = [tensor for tensor in model.graph.initializer if tensor.name in used]
    del model.graph.initializer[:]
    model.graph.initializer.extend(tensors)
    del model.graph.value_info[:]  # tensors changed; readers infer them
    onnx.checker.check_model(model)


def _check_ranges(nodes: QuantNodes, chosen: frozenset[str], ranges: Ranges) -> None:
    for node in nodes.model.graph.node:
        if node.name not in chosen:
            continue
        for tensor in nodes.computed_floats(node):
            found = ranges.get(tensor)
            fault = None
            if found is None:
                fault = "has no range"
            elif not (np.isfinite(found.low) and np.isfinite(found.high) and found.low <= 0 <= found.high):
                fault = f"has the range {found.low:g} to {found.high:g}, which is not finite or without zero"
            if fault is not None:
                message = f"tensor {tensor!r} of {node.op_type} {node.name!r} {fault}"
                raise UsageError(message, code="range_missing", remedy="calibrate anew with this very model")
