"""Every kind of fault that TensorRT would find in an INT8 graph, planted into one that is right."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from edge_runtime.prepare.quant_check import check_symmetric
from edge_runtime.prepare.quant_graph import float_model, quantise
from tests.engine.graphs import graph, node
from tests.prepare.test_quant_graph import network, plan

SHAPE = ("batch", 3, 8, 8)


def right() -> Any:
    return onnx.load_model_from_string(_right())


@cache
def _right() -> bytes:
    """Conv, ReduceMean, Gemm (weights [in, out]) and MatMul in symmetric INT8."""
    rng = np.random.default_rng(1)
    nodes = [
        node("Conv", ["x", "w1", "b1"], ["c"], name="conv"),
        node("ReduceMean", ["c"], ["m"], name="mean", axes=[2, 3], keepdims=0),
        node("Gemm", ["m", "w2", "b2"], ["g"], name="gemm"),
        node("MatMul", ["g", "w3"], ["y"], name="matmul"),
    ]
    stored = {
        "w1": rng.standard_normal((5, 3, 1, 1)), "b1": np.ones(5), "w2": rng.standard_normal((5, 4)),
        "b2": np.ones(4), "w3": rng.standard_normal((4, 2)),
    }  # fmt: skip
    values = {name: value.astype(np.float32) for name, value in stored.items()}
    data = graph(nodes, outputs=[("y", ("batch", 2))], shape=SHAPE, initializers=values)
    made = float_model(data, "m.onnx")
    result: bytes = quantise(made, plan(made, "tensorrt", weight_bits=8)).SerializeToString()
    return result


def find(made: Any, kind: str, start: str) -> Any:
    return next(each for each in made.graph.node if each.op_type == kind and each.name.startswith(start))


def store(made: Any, name: str, value: Any) -> None:
    kept = [tensor for tensor in made.graph.initializer if tensor.name != name]
    del made.graph.initializer[:]
    made.graph.initializer.extend([*kept, numpy_helper.from_array(np.asarray(value), name)])


def stored(made: Any, name: str) -> Any:
    return next(numpy_helper.to_array(tensor).copy() for tensor in made.graph.initializer if tensor.name == name)


def change(name: str, value: Any) -> Callable[[Any], None]:
    return lambda made: store(made, name, value(stored(made, name)) if callable(value) else value)


def old_opset(made: Any) -> None:
    made.opset_import[0].version = 12


def contrib(made: Any) -> None:
    made.graph.node.append(helper.make_node("QuantizeLinear", ["a"], ["b"], name="odd", domain="com.microsoft"))


def integer(made: Any) -> None:
    made.graph.node.append(helper.make_node("QLinearConv", ["a"], ["b"], name="odd"))


def integer_matmul(made: Any) -> None:
    made.graph.node.append(helper.make_node("MatMulInteger", ["a", "c"], ["b"], name="odd"))


def computed(place: int) -> Callable[[Any], None]:
    def plant(made: Any) -> None:
        find(made, "QuantizeLinear", "x/").input[place] = "x"

    return plant


def no_zero(made: Any) -> None:
    del find(made, "QuantizeLinear", "x/").input[2]


def bias_pair(made: Any) -> None:
    store(made, "q", np.ones(5, np.int32))
    store(made, "qs", np.float32(1))
    store(made, "qz", np.int32(0))
    made.graph.node.insert(0, helper.make_node("DequantizeLinear", ["q", "qs", "qz"], ["bias"], name="bias"))
    find(made, "Conv", "conv").input[2] = "bias"


def float_bias_pair(made: Any) -> None:
    """A bias rounded to int8 by a pair that is otherwise whole."""
    store(made, "qs", np.float32(1))
    store(made, "qz", np.int8(0))
    made.graph.node.insert(0, helper.make_node("QuantizeLinear", ["b1", "qs", "qz"], ["bq"], name="bq"))
    made.graph.node.insert(1, helper.make_node("DequantizeLinear", ["bq", "qs", "qz"], ["bias"], name="bias"))
    find(made, "Conv", "conv").input[2] = "bias"


def axis(start: str, value: int) -> Callable[[Any], None]:
    def plant(made: Any) -> None:
        for kind in ("QuantizeLinear", "DequantizeLinear"):
            find(made, kind, f"{start}/weight").attribute[0].i = value
        size = stored(made, {"conv": "w1", "gemm": "w2", "matmul": "w3"}[start]).shape[value]
        store(made, f"{start}/weight/scale", np.full(size, 0.5, np.float32))
        store(made, f"{start}/weight/zero", np.zeros(size, np.int8))

    return plant


def other_behind(made: Any) -> None:
    pair = find(made, "QuantizeLinear", "x/")
    made.graph.node.append(helper.make_node("Cast", [pair.output[0]], ["odd"], name="odd", to=1))


def output_of_q(made: Any) -> None:
    pair = find(made, "QuantizeLinear", "x/")
    made.graph.output.append(helper.make_tensor_value_info(pair.output[0], onnx.TensorProto.INT8, None))


def no_dq(made: Any) -> None:
    pair, other = find(made, "QuantizeLinear", "x/"), find(made, "DequantizeLinear", "x/")
    made.graph.node.remove(other)
    find(made, "Conv", "conv").input[0] = pair.input[0]


def two_scales(made: Any) -> None:
    store(made, "another", np.float32(0.25))
    find(made, "DequantizeLinear", "x/").input[1] = "another"


def dq_of_input(made: Any) -> None:
    find(made, "DequantizeLinear", "x/").input[0] = "x"


def dq_behind_relu(made: Any) -> None:
    made.graph.node.append(helper.make_node("Relu", ["x"], ["odd"], name="relu"))
    find(made, "DequantizeLinear", "x/").input[0] = "odd"


def dq_of_int32(made: Any) -> None:
    store(made, "whole", np.ones((1, 3, 8, 8), np.int32))
    find(made, "DequantizeLinear", "x/").input[0] = "whole"


def no_pairs(made: Any) -> None:
    kept = [each for each in made.graph.node if not each.op_type.endswith("Linear")]
    del made.graph.node[:]
    made.graph.node.extend(kept)


def channels_of_computed(made: Any) -> None:
    store(made, "x/scale", np.full(3, 0.5, np.float32))
    store(made, "x/zero", np.zeros(3, np.int8))


FAULTS: dict[str, tuple[Callable[[Any], None], str]] = {
    "opset": (old_opset, "the opset is 12"),
    "contrib": (contrib, "is of com.microsoft"),
    "integer": (integer, "QLinearConv 'odd' computes in integers itself"),
    "integer product": (integer_matmul, "MatMulInteger 'odd' computes in integers itself"),
    "computed scale": (computed(1), "scale of QuantizeLinear .* is computed"),
    "computed zero": (computed(2), "zero point of QuantizeLinear .* is computed"),
    "no zero": (no_zero, "has no zero point"),
    "double scale": (change("x/scale", np.float64(1)), "is float64: float32"),
    "scale 0": (change("x/scale", np.float32(0)), "not above 0"),
    "negative scale": (change("x/scale", np.float32(-1)), "not above 0"),
    "scale nan": (change("x/scale", np.float32("nan")), "not finite"),
    "endless scale": (change("conv/weight/scale", lambda old: old * np.float32(np.inf)), "not finite"),
    "uint8": (change("x/zero", np.uint8(0)), "is of uint8"),
    "zero point": (change("x/zero", np.int8(-128)), "is not 0"),
    "one zero point": (change("conv/weight/zero", np.array([0, 0, 1, 0, 0], np.int8)), "is not 0"),
    "shape of zeros": (change("conv/weight/zero", np.int8(0)), "zero points of shape"),
    "planes of scales": (change("x/scale", np.ones((2, 2), np.float32)), r"of shape \[2, 2\]"),
    "too many scales": (change("conv/weight/scale", np.ones(7, np.float32)), "7 scales along axis 0"),
    "channels of an activation": (channels_of_computed, "what it rounds is computed"),
    "axis of conv": (axis("conv", 1), "output channels of Conv 'conv' are along 0"),
    "axis of gemm": (axis("gemm", 0), "output channels of Gemm 'gemm' are along 1"),
    "axis of matmul": (axis("matmul", 0), "output channels of MatMul 'matmul' are along 1"),
    "int32 bias": (bias_pair, "the bias of Conv 'conv' is quantised"),
    "int8 bias": (float_bias_pair, "the bias of Conv 'conv' is quantised"),
    "cast behind q": (other_behind, "is taken by Cast 'odd'"),
    "output of q": (output_of_q, "makes an output of the model"),
    "no dq": (no_dq, "followed by no DequantizeLinear"),
    "two scales": (two_scales, "has another scale than"),
    "dq of the input": (dq_of_input, "comes from no QuantizeLinear"),
    "dq behind relu": (dq_behind_relu, "stands behind Relu 'relu'"),
    "dq of int32": (dq_of_int32, "stored int32"),
    "nothing": (no_pairs, "nothing is INT8"),
}


def test_what_is_right_has_no_faults() -> None:
    assert check_symmetric(right()) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_said(fault: str) -> None:
    made = right()
    plant, words = FAULTS[fault]
    plant(made)
    assert re.search(words, "\n".join(check_symmetric(made)))


def test_the_artefact_for_the_cpu_is_none_for_tensorrt() -> None:
    made = network()
    found = "\n".join(check_symmetric(quantise(made, plan(made))))
    assert "is of uint8: int8 is wanted" in found
    assert "is quantised: it has to be float" in found


def test_constants_as_nodes_are_read_too() -> None:
    made = right()
    scale = stored(made, "x/scale")
    tensor = numpy_helper.from_array(scale, "value")
    made.graph.node.insert(0, helper.make_node("Constant", [], ["x/scale"], value=tensor, name="constant"))
    kept = [each for each in made.graph.initializer if each.name != "x/scale"]
    del made.graph.initializer[:]
    made.graph.initializer.extend(kept)
    assert check_symmetric(made) == []
