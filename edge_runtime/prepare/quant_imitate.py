"""An artefact for TensorRT as a CPU without VNNI may judge it.

ONNX Runtime makes INT8 kernels of Q/DQ pairs, and without VNNI those add pairs of products in 16 bits, where S8 by S8
saturates: efficientnet_lite0 answered at 0.7 dB by them, and at 15.4 dB as the graph says, which is what TensorRT
computes. Without a pair at its input no node becomes such a kernel: rounded weights, rounded activations, sums in
float32. Weights keep their pairs: stored as they are rounded, they would be arranged for faster kernels (1.4 to 2
times), which sum in another order, and at a border between two steps another sum is another step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

__all__ = ["imitate_symmetric"]

_LEAST = "imitate/least"


def imitate_symmetric(data: bytes) -> bytes:
    """The serialised model with a step that changes nothing behind every DequantizeLinear of a computed tensor: it
    answers as the model itself does where nothing is optimised."""
    model: Any = onnx.load_model_from_string(data)
    stored = {tensor.name for tensor in model.graph.initializer}
    made_by = {name: node for node in model.graph.node for name in node.output}
    answers = {value.name for value in model.graph.output}
    nodes: list[Any] = []
    for node in model.graph.node:
        nodes.append(node)
        pair = made_by.get(node.input[0]) if node.op_type == "DequantizeLinear" else None
        if pair is None or pair.input[0] in stored or node.output[0] in answers:
            continue
        name = node.output[0]
        node.output[0] = f"{name}/dequantized"
        # the largest of it and the least float is it, which no optimiser knows
        nodes.append(helper.make_node("Max", [node.output[0], _LEAST], [name], name=f"{name}/imitate"))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    least = np.array(np.finfo(np.float32).min, np.float32)
    model.graph.initializer.append(numpy_helper.from_array(least, _LEAST))
    result: bytes = model.SerializeToString(deterministic=True)
    return result
