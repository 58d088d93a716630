"""INT8 graphs: the numbers of onnxruntime's own quantiser, its INT8 kernels, and nothing rounded that need not be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper
from onnxruntime.quantization import CalibrationMethod, QuantType
from onnxruntime.quantization.calibrate import TensorData, TensorsData
from onnxruntime.quantization.qdq_quantizer import QDQQuantizer

from edge_runtime.engine.onnxrt import open_session
from edge_runtime.engine.onnxrt_cache import SessionCache
from edge_runtime.errors import BundleError, UsageError
from edge_runtime.prepare.quant import Family, QuantPlan, TensorRange
from edge_runtime.prepare.quant_check import check_symmetric
from edge_runtime.prepare.quant_graph import (
    activations,
    float_model,
    operators_of,
    planned,
    quantisable,
    quantise,
)
from edge_runtime.prepare.quant_imitate import imitate_symmetric
from edge_runtime.prepare.quant_meter import ActivationMeter
from edge_runtime.prepare.quant_write import activation_parameters, quantised_weights
from edge_runtime.records.spec import InputSpec
from tests.engine.graphs import graph, node
from tests.prepare.test_quant_meter import Picture

SPEC = InputSpec(width=8, height=8)
SHAPE = ("batch", 3, 8, 8)


def weights(*shape: int, seed: int = 0, size: float = 0.3) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal(shape) * size).astype(np.float32)


def model(nodes: Sequence[Any], outputs: Sequence[tuple[str, Sequence[Any]]], **stored: Any) -> Any:
    return float_model(graph(nodes, outputs=outputs, shape=SHAPE, initializers=stored), "m.onnx")


def network() -> Any:
    return onnx.load_model_from_string(_network())


@cache
def _network() -> bytes:
    """Every operator that becomes INT8 on a CPU."""
    nodes = [
        node("Conv", ["x", "w1", "b1"], ["c1"], name="c1", pads=[1, 1, 1, 1]),
        node("Clip", ["c1", "zero", "six"], ["r1"], name="clip"),
        node("Conv", ["r1", "w2", "b2"], ["c2"], name="depthwise", pads=[1, 1, 1, 1], group=8),
        node("LeakyRelu", ["c2"], ["l2"], name="leaky", alpha=0.1),
        node("Conv", ["l2", "w3"], ["c3"], name="c3"),
        node("Sigmoid", ["c3"], ["s3"], name="sigmoid"),
        node("Mul", ["c3", "s3"], ["m3"], name="silu"),
        node("Add", ["m3", "r1"], ["a3"], name="skip"),
        node("Add", ["three", "a3"], ["a4"], name="shift"),
        node("MaxPool", ["a4"], ["p1"], name="maxpool", kernel_shape=[2, 2], strides=[2, 2]),
        node("AveragePool", ["a4"], ["p2"], name="avgpool", kernel_shape=[2, 2], strides=[2, 2]),
        node("Concat", ["p1", "p2"], ["k"], name="concat", axis=1),
        node("Split", ["k"], ["k1", "k2"], name="split", axis=1),
        node("Resize", ["k1", "", "scales"], ["up"], name="resize", mode="nearest"),
        node("Conv", ["up", "w4", "b4"], ["c4"], name="c4"),
        node("Relu", ["c4"], ["r4"], name="relu"),
        node("GlobalAveragePool", ["r4"], ["g"], name="mean"),
        node("Flatten", ["g"], ["f"], name="flatten"),
        node("Gemm", ["f", "w5", "b5"], ["d"], name="gemm", transB=1),
        node("MatMul", ["d", "w6"], ["y"], name="matmul"),
        node("Transpose", ["k2"], ["z"], name="turn", perm=[0, 2, 3, 1]),
    ]
    data: bytes = model(
        nodes,
        [("y", ("batch", 5)), ("z", ("batch", 4, 4, 8))],
        w1=weights(8, 3, 3, 3, seed=1, size=0.01), b1=weights(8, seed=2), w2=weights(8, 1, 3, 3, seed=3),
        b2=weights(8, seed=4), w3=weights(8, 8, 1, 1, seed=5), w4=weights(6, 8, 1, 1, seed=6), b4=weights(6, seed=7),
        w5=weights(4, 6, seed=8), b5=weights(4, seed=9), w6=weights(4, 5, seed=10), zero=np.float32(0),
        six=np.float32(6), three=np.float32(3), scales=np.array([1, 1, 2, 2], np.float32),
    ).SerializeToString()  # fmt: skip
    return data


def plan(made: Any, family: Family = "onnxruntime", *keep: str, **options: Any) -> QuantPlan:
    meter = ActivationMeter(made, activations(made), "m.onnx")
    meter.show([Picture(seed) for seed in range(4)], SPEC)
    ranges = meter.ranges("minmax", symmetric=family == "tensorrt")
    return QuantPlan(family, operators_of(family), frozenset(keep), ranges, "minmax", **{"weight_bits": 7, **options})


def run(made: Any, *, optimised: bool = True, seed: int = 9) -> list[NDArray[np.float32]]:
    """Not optimised: pairs are computed one by one, in floats."""
    given = {"x": Picture(seed).values[None]}
    if optimised:
        return list(open_session(made.SerializeToString(), "m.onnx").run(None, given))
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = ort.InferenceSession(made.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, given))


def sqnr_db(wanted: NDArray[np.float32], found: NDArray[np.float32]) -> float:
    noise = float(np.square(wanted - found).sum())
    return 10 * float(np.log10(np.square(wanted).sum() / noise)) if noise else float("inf")


def kernels(made: Any, tmp_path: Path) -> Counter[str]:
    """The operators that ONNX Runtime runs."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    ort.InferenceSession(made.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return Counter(each.op_type for each in onnx.load(options.optimized_model_filepath).graph.node)


def test_all_that_is_planned_becomes_int8_kernels(tmp_path: Path) -> None:
    made = network()
    chosen = plan(made)
    names = planned(made, chosen)
    assert set(names) == {each.name for each in made.graph.node}
    found = kernels(quantise(made, chosen), tmp_path)
    assert found["QuantizeLinear"] == 1  # the picture
    assert found["DequantizeLinear"] == 2  # the outputs
    wanted = {
        "QLinearConv": 4, "QLinearLeakyRelu": 1, "QLinearSigmoid": 1, "QLinearMul": 1, "QLinearAdd": 2,
        "QLinearAveragePool": 1, "QLinearConcat": 1, "QLinearGlobalAveragePool": 1, "QGemm": 1, "QLinearMatMul": 1,
    }  # fmt: skip
    assert {kind: found[kind] for kind in wanted} == wanted
    assert not {"Conv", "Gemm", "MatMul", "Add", "Mul", "Sigmoid", "Clip", "Relu", "Concat"} & set(found)


@pytest.mark.parametrize("family", ["onnxruntime", "tensorrt"])
def test_it_still_says_what_the_model_says(family: Family) -> None:
    made = network()
    result = quantise(made, plan(made, family))
    wanted = run(made)
    if family == "tensorrt":
        found = run(onnx.load_model_from_string(imitate_symmetric(result.SerializeToString())))
    else:
        found = run(result)
    for one, other in zip(wanted, found, strict=True):
        assert sqnr_db(one, other) > 20
    for one, other in zip(run(result, optimised=False), found, strict=True):
        assert sqnr_db(one, other) > 30  # but for the rounding of kernels


@pytest.mark.parametrize("bits", [7, 8])
def test_numbers_are_those_of_onnxruntimes_quantiser(bits: int) -> None:
    nodes = [
        node("Conv", ["x", "w1", "b1"], ["c1"], name="c1"),
        node("Relu", ["c1"], ["r1"], name="relu"),
        node("Conv", ["r1", "w2", "b2"], ["c2"], name="c2"),
        node("Add", ["c2", "r1"], ["y"], name="add"),
    ]
    made = model(
        nodes, [("y", SHAPE)], w1=weights(3, 3, 1, 1, seed=1), b1=weights(3), w2=weights(3, 3, 1, 1, seed=2),
        b2=np.array([1e7, -2, 0], np.float32),
    )  # fmt: skip
    chosen = plan(made, weight_bits=bits)
    theirs = _theirs(made, chosen)
    for one, other in zip(run(quantise(made, chosen), optimised=False), run(theirs, optimised=False), strict=True):
        assert np.array_equal(one, other)


def _theirs(made: Any, chosen: QuantPlan) -> Any:
    data = {
        name: TensorData(lowest=np.float32(each.low), highest=np.float32(each.high))
        for name, each in chosen.ranges.items()
    }
    copy: Any = onnx.ModelProto()
    copy.CopyFrom(made)
    quantizer = QDQQuantizer(
        copy, True, chosen.weight_bits == 7, QuantType.QInt8, QuantType.QUInt8,
        TensorsData(CalibrationMethod.MinMax, data), [], [], ["Conv", "Relu", "Add"], {},
    )  # fmt: skip
    result: Any = quantizer.quantize_model()
    return result


@pytest.mark.parametrize("family", ["onnxruntime", "tensorrt"])
def test_the_same_plan_gives_the_same_bytes_and_the_model_stays(family: Family) -> None:
    made = network()
    before = made.SerializeToString(deterministic=True)
    chosen = plan(made, family)
    one, other = (quantise(made, chosen).SerializeToString(deterministic=True) for _ in range(2))
    assert one == other
    assert made.SerializeToString(deterministic=True) == before
    assert onnx.load_model_from_string(one).SerializeToString(deterministic=True) == one


def test_for_tensorrt_it_is_symmetric() -> None:
    made = network()
    result = quantise(made, plan(made, "tensorrt"))
    assert check_symmetric(result) == []
    found = Counter(each.op_type for each in result.graph.node)
    assert found["QuantizeLinear"] == found["DequantizeLinear"]
    assert {"Clip", "Relu"} <= set(found)
    assert check_symmetric(quantise(made, plan(made))) != []


def test_what_is_kept_in_float_takes_and_gives_floats() -> None:
    nodes = [
        node("Conv", ["x", "w"], ["a"], name="kept"),
        node("Conv", ["a", "w"], ["b"], name="int8"),
        node("Mul", ["a", "a"], ["c"], name="square"),
        node("Conv", ["c", "w"], ["d"], name="last"),
    ]
    made = model(nodes, [("b", SHAPE), ("d", SHAPE)], w=weights(3, 3, 1, 1))
    chosen = plan(made, "onnxruntime", "kept", "square", "last")
    assert planned(made, chosen) == ("int8",)
    result = quantise(made, chosen)
    before, after = run(made), run(result)
    assert np.array_equal(before[1], after[1])  # the weights and `a` are not rounded for it
    assert not np.array_equal(before[0], after[0])
    assert sqnr_db(before[0], after[0]) > 25


def test_what_would_only_cost_is_left_out() -> None:
    made = network()
    chosen = plan(made, "onnxruntime", "c1")
    names = planned(made, chosen)
    assert "clip" not in names  # its maker is in float
    assert {"depthwise", "leaky", "skip"} <= set(names)
    nothing = plan(made, "onnxruntime", "c1", "depthwise", "c3", "c4", "gemm", "matmul")
    assert planned(made, nothing) == ()
    assert quantise(made, nothing).SerializeToString() == made.SerializeToString()


def test_a_relu_that_others_need_the_input_of_stays() -> None:
    nodes = [
        node("Conv", ["x", "w"], ["a"], name="conv"),
        node("Relu", ["a"], ["r"], name="relu"),
        node("Add", ["a", "r"], ["y"], name="add"),
    ]
    made = model(nodes, [("y", SHAPE)], w=weights(3, 3, 1, 1))
    chosen = plan(made)
    assert planned(made, chosen) == ("conv", "add")
    assert sqnr_db(run(made)[0], run(quantise(made, chosen))[0]) > 30


def test_a_relu_of_an_output_leaves_the_output_as_it_is() -> None:
    nodes = [
        node("Conv", ["x", "w"], ["a"], name="conv"),
        node("Relu", ["a"], ["y"], name="relu"),
        node("Conv", ["y", "w"], ["z"], name="last"),
    ]
    made = model(nodes, [("a", SHAPE), ("y", SHAPE), ("z", SHAPE)], w=weights(3, 3, 1, 1))
    chosen = plan(made)
    assert planned(made, chosen) == ("conv", "last")
    result = quantise(made, chosen)
    assert [value.name for value in result.graph.output] == ["a", "y", "z"]
    for one, other in zip(run(made), run(result), strict=True):
        assert sqnr_db(one, other) > 25


@pytest.mark.parametrize(
    ("low", "high", "symmetric", "scale", "zero"),
    [
        (0.0, 255.0, False, 1.0, 0),
        (-100.0, 155.0, False, 1.0, 100),
        (-100.75, 154.25, False, 1.0, 101),
        (-0.5, 254.5, False, 1.0, 0),  # half to even, as QuantizeLinear rounds
        (-1.5, 253.5, False, 1.0, 2),
        (-255.0, 0.0, False, 1.0, 255),
        (-127.0, 127.0, True, 1.0, 0),
        (-254.0, 3.0, True, 2.0, 0),
        (0.0, 0.0, False, 1.0, 0),
        (0.0, 1e-44, True, 1.0, 0),
    ],
)
def test_scales_and_zero_points(low: float, high: float, symmetric: bool, scale: float, zero: int) -> None:
    found = activation_parameters(TensorRange(low, high), symmetric=symmetric)
    assert found == (np.float32(scale), zero)
    assert [np.asarray(each).dtype for each in found] == ["float32", "int8" if symmetric else "uint8"]


def test_biases_are_rounded_by_the_scale_of_the_sum() -> None:
    """int32, half to even: 255 / 255 before, 1 / 64 of the weights."""
    made = model(
        [node("Conv", ["x", "w", "b"], ["y"], name="c")], [("y", SHAPE)], w=np.ones((3, 3, 1, 1), np.float32),
        b=np.array([0.5, 1.5, -2.6], np.float32) / 64,
    )  # fmt: skip
    ranges = {"x": TensorRange(0.0, 255.0), "y": TensorRange(0.0, 255.0)}
    chosen = QuantPlan("onnxruntime", operators_of("onnxruntime"), frozenset(), ranges, "minmax", 7)
    stored = {each.name: numpy_helper.to_array(each) for each in quantise(made, chosen).graph.initializer}
    assert stored["c/bias/quantised"].dtype == np.int32
    assert stored["c/bias/quantised"].tolist() == [0, 2, -3]
    assert stored["c/bias/scale"].tolist() == [1 / 64] * 3


def test_a_range_never_passes_the_clip_that_it_stands_for() -> None:
    made = network()
    chosen = plan(made)
    wide = replace(chosen, ranges={**chosen.ranges, "r1": TensorRange(-4.0, 60.0)})
    exact = replace(chosen, ranges={**chosen.ranges, "r1": TensorRange(0.0, 6.0)})
    assert quantise(made, wide).SerializeToString() == quantise(made, exact).SerializeToString()


@pytest.mark.parametrize(("last", "bound"), [(6.0, 6.0), (None, np.inf)])
def test_a_clip_of_which_nothing_was_seen_still_cuts(last: float | None, bound: float) -> None:
    nodes = [
        node("Conv", ["x", "w", "b"], ["a"], name="conv"),
        node("Clip", ["a", "zero", "" if last is None else "last"], ["y"], name="clip"),
    ]
    made = model(
        nodes, [("y", SHAPE)], w=np.full((3, 3, 1, 1), 2, np.float32), b=np.full(3, -1500, np.float32),
        zero=np.float32(0), **({} if last is None else {"last": np.float32(last)}),
    )  # fmt: skip
    chosen = plan(made)
    assert (chosen.ranges["y"], planned(made, chosen)) == (TensorRange(0.0, 0.0), ("conv", "clip"))
    session = open_session(quantise(made, chosen).SerializeToString(), "m.onnx")
    (found,) = session.run(None, {"x": np.full((1, 3, 8, 8), 2000, np.float32)})
    assert 0 <= found.min() <= found.max() <= bound
    assert found.max() > 5  # 255 in all colours is more than what was seen


@pytest.mark.parametrize("value", [-np.inf, np.nan])
@pytest.mark.parametrize("kind", ["Add", "Mul"])
def test_a_constant_without_a_scale_stays_in_float(kind: str, value: float) -> None:
    nodes = [
        node("Conv", ["x", "w"], ["a"], name="conv"),
        node("Sigmoid", ["a"], ["s"], name="sigmoid"),
        node(kind, ["s", "mask"], ["m"], name="masked"),
        node("Conv", ["m", "v", "b"], ["y"], name="last"),
    ]
    mask = np.array([0, value, 1], np.float32)
    made = model(
        nodes, [("y", SHAPE)], w=weights(3, 3, 1, 1), v=weights(3, 3, 1, 1, seed=1), b=mask,
        mask=mask.reshape(1, 3, 1, 1),
    )  # fmt: skip
    assert quantisable(made, "onnxruntime") == ("conv", "sigmoid")
    assert quantisable(made, "tensorrt") == ("conv",)


@pytest.mark.parametrize("family", ["onnxruntime", "tensorrt"])
def test_a_session_of_what_was_optimised_before_says_the_same(tmp_path: Path, family: Family) -> None:
    made = network()
    data = quantise(made, plan(made, family)).SerializeToString()
    given = {"x": Picture(9).values[None]}
    wanted = open_session(data, "m.onnx").run(None, given)
    for _ in range(2):  # as it is kept, and as it is found
        found = open_session(data, "m.onnx", SessionCache(tmp_path / "s")).run(None, given)
        for one, other in zip(wanted, found, strict=True):
            np.testing.assert_array_equal(one, other)
    assert len(list((tmp_path / "s").iterdir())) == 1


def test_boxes_and_scores_keep_scales_of_their_own_up_to_a_float_concat() -> None:
    nodes = [
        node("Conv", ["x", "boxes"], ["b"], name="boxes"),
        node("Conv", ["x", "scores"], ["s0"], name="scores"),
        node("Sigmoid", ["s0"], ["s"], name="sigmoid"),
        node("Concat", ["b", "s"], ["y"], name="concat", axis=1),
    ]
    made = model(
        nodes, [("y", ("batch", 6, 8, 8))], boxes=np.abs(weights(3, 3, 1, 1, size=2)),
        scores=weights(3, 3, 1, 1, size=0.01),
    )  # fmt: skip
    wanted = run(made)[0][:, 3:]
    (kept,) = run(quantise(made, plan(made, "onnxruntime", "concat")))
    assert np.abs(kept[:, 3:] - wanted).max() < 0.02
    (joined,) = run(quantise(made, plan(made)))
    assert np.abs(joined[:, 3:] - wanted).max() > 0.2  # one scale for both: what the plan is to avoid


@pytest.mark.parametrize(
    "each",
    [
        node("Conv", ["x", "c"], ["y"], name="n"),
        node("Clip", ["x", "low"], ["y"], name="n"),
        node("Resize", ["x", "", "scales"], ["y"], name="n", mode="linear"),
        node("Gemm", ["flat", "square"], ["y"], name="n", alpha=0.5),
        node("Exp", ["x"], ["y"], name="n"),
        node("Add", ["whole", "whole"], ["y"], name="n"),
    ],
    ids=lambda each: each.op_type,
)
def test_what_no_kernel_takes_is_not_quantisable(each: Any) -> None:
    before = [
        node("Conv", ["x", "w"], ["c0"], name="before"),
        node("ReduceMean", ["c0"], ["c"], name="mean", axes=[0], keepdims=1),
        node("ReduceMean", ["x"], ["flat"], name="flatten", axes=[2, 3], keepdims=0),
        node("Cast", ["x"], ["whole"], name="cast", to=onnx.TensorProto.INT64),
    ]
    stored = {
        "w": weights(3, 3, 8, 8), "low": np.float32(1), "scales": np.array([1, 1, 2, 2], np.float32),
        "square": weights(3, 3),
    }  # fmt: skip
    data = graph([*before, each], outputs=[("y", ())], shape=SHAPE, initializers=stored)
    made = onnx.load_model_from_string(data)
    del made.graph.output[0].type.tensor_type.shape.dim[:]
    made.graph.output[0].type.tensor_type.ClearField("shape")
    assert "n" not in quantisable(made, "onnxruntime")
    assert "n" not in quantisable(made, "tensorrt")


def test_seven_bits_never_overflow_a_pair_and_eight_are_as_fine_as_they_can() -> None:
    values = weights(6, 3, 3, 3, seed=4)
    values[2] = 0
    for bits, top in ((7, 64), (8, 127)):
        rounded, scales = quantised_weights(values, 0, bits)
        assert np.abs(rounded).max(axis=(1, 2, 3)).tolist() == [top, top, 0, top, top, top]
        assert np.iinfo(np.int16).max >= 255 * 2 * 64
        assert np.abs(rounded * scales.reshape(-1, 1, 1, 1) - values).max() <= scales.max() / 2 * 1.0001


def test_rounded_weights_stay_what_they_are() -> None:
    """A search may round weights by itself: they are found again exactly."""
    rounded, scales = quantised_weights(weights(6, 3, 3, 3, seed=4), 0, 8)
    again, _ = quantised_weights((rounded * scales.reshape(-1, 1, 1, 1)).astype(np.float32), 0, 8)
    assert np.array_equal(rounded, again)


def test_a_bias_beyond_int32_widens_the_scale_of_its_weights() -> None:
    made = model(
        [node("Conv", ["x", "w", "b"], ["y"], name="c")],
        [("y", SHAPE)],
        w=np.full((3, 3, 1, 1), 1e-12, np.float32),
        b=np.array([5.0, -3.0, 0.0], np.float32),
    )
    found = run(quantise(made, plan(made)), optimised=False)[0]
    assert np.abs(found - run(made)[0]).max() < 0.05


@pytest.mark.parametrize("fault", ["missing", "endless", "without zero"])
def test_a_plan_without_right_ranges_is_refused(fault: str) -> None:
    made = network()
    chosen = plan(made)
    ranges = dict(chosen.ranges)
    if fault == "missing":
        del ranges["c2"]
    else:
        ranges["c2"] = TensorRange(0.0, float("inf")) if fault == "endless" else TensorRange(1.0, 2.0)
    with pytest.raises(UsageError) as caught:
        quantise(made, replace(chosen, ranges=ranges))
    assert caught.value.code == "range_missing"
    assert "c2" in caught.value.message


def test_a_plan_for_another_model_is_refused() -> None:
    made = network()
    with pytest.raises(UsageError) as caught:
        quantise(made, plan(made, "onnxruntime", "elsewhere"))
    assert caught.value.code == "plan_unknown"


def test_a_model_of_int8_is_refused() -> None:
    made = network()
    with pytest.raises(BundleError) as caught:
        float_model(quantise(made, plan(made)).SerializeToString(), "m.onnx")
    assert caught.value.code == "quantise_refused"


def test_names_that_are_taken_are_gone_round() -> None:
    nodes = [
        node("Conv", ["x", "w"], ["x/rounded"], name="c"),
        node("Conv", ["x/rounded", "w"], ["c/weight/scale"], name="d"),
        node("Relu", ["c/weight/scale"], ["y"], name="r"),
    ]
    made = model(nodes, [("y", SHAPE)], w=weights(3, 3, 1, 1))
    assert sqnr_db(run(made)[0], run(quantise(made, plan(made)))[0]) > 25


def test_stored_tensors_of_a_quantised_graph_are_small() -> None:
    made = network()
    kinds = Counter(
        str(numpy_helper.to_array(tensor).dtype)
        for tensor in quantise(made, plan(made)).graph.initializer
        if len(tensor.dims) > 1
    )
    assert set(kinds) == {"int8"}
