"""Which nodes become FP16, and what the graphs compute then."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from edge_runtime.engine.onnxrt import open_session
from edge_runtime.errors import BundleError
from edge_runtime.prepare import half_plan
from edge_runtime.prepare.half_graph import FloatGraph, imitate_half, write_half
from edge_runtime.prepare.half_plan import HalfPlan, plan_half
from edge_runtime.prepare.heavy import build_heavy_model
from edge_runtime.prepare.ranges import RangeMeter
from edge_runtime.records.frames import Float32Array, Transform
from edge_runtime.records.spec import InputSpec
from tests.engine.graphs import graph, node

SPEC = InputSpec(width=8, height=8)
PLANES = [("y", ("batch", 3, 8, 8))]


def weights(channels_out: int, channels_in: int, value: float = 0.5) -> NDArray[np.float32]:
    """1 x 1 convolution weights with no two alike, about `value`."""
    rng = np.random.default_rng(channels_out * 31 + channels_in)
    return (value * rng.uniform(0.5, 1.5, (channels_out, channels_in, 1, 1))).astype(np.float32)


def float_graph(nodes: Sequence[Any], outputs: Sequence[Any] = PLANES, **initializers: Any) -> FloatGraph:
    data = graph(nodes, outputs=outputs, shape=("batch", 3, 8, 8), initializers=initializers)
    return FloatGraph.of(onnx.load_model_from_string(data))


def planned(made: FloatGraph, scale: float = 1.0) -> HalfPlan:
    meter = RangeMeter(made, "m.onnx")
    meter.show([Picture(seed, scale) for seed in range(3)], SPEC)
    return plan_half(made, meter.largest())


def why(plan: HalfPlan) -> dict[str, str | None]:
    return {choice.name: choice.why for choice in plan.choices.values()}


class Picture:
    """Noise of 0 to 255 times `scale`."""

    width = height = 8

    def __init__(self, seed: int, scale: float = 1.0, fill: float | None = None) -> None:
        self.values = np.random.default_rng(seed).uniform(0, 255, (3, 8, 8)).astype(np.float32) * np.float32(scale)
        if fill is not None:
            self.values[1, 2, 3] = fill

    def write_into(self, place: Any, spec: InputSpec) -> Transform:
        place[...] = self.values
        return Transform(8, 8, 8, 8, 8, 8, 0, 0)

    def to_rgb(self) -> NDArray[np.uint8]:
        raise NotImplementedError


def layered(middle: Sequence[Any], last: str, **initializers: Any) -> FloatGraph:
    """A convolution c1 -> `middle`, from tensor c1 to tensor `last` -> a convolution c2."""
    nodes = [
        node("Conv", ["x", "w1"], ["c1"], name="c1"),
        *middle,
        node("Conv", [last, "w2"], ["y"], name="c2"),
    ]
    return float_graph(nodes, w1=weights(3, 3), w2=weights(3, 3), **initializers)


@pytest.mark.parametrize(
    ("middle", "reason"),
    [
        ([node("Relu", ["c1"], ["m"], name="n")], None),
        ([node("Sigmoid", ["c1"], ["m"], name="n")], None),
        ([node("MaxPool", ["c1"], ["m"], name="n", kernel_shape=[3, 3], pads=[1, 1, 1, 1])], None),
        ([node("Resize", ["c1", "", "four"], ["m"], name="n", mode="nearest")], None),
        ([node("Mul", ["c1", "some"], ["m"], name="n")], None),
        ([node("Div", ["c1", "some"], ["m"], name="n")], None),
        ([node("AveragePool", ["c1"], ["m"], name="n", kernel_shape=[2, 2])], half_plan.SUMS),
        ([node("ReduceMean", ["c1"], ["m"], name="n", axes=[2, 3])], half_plan.SUMS),
        ([node("InstanceNormalization", ["c1", "three", "three"], ["m"], name="n")], half_plan.SUMS),
        ([node("Softmax", ["c1"], ["m"], name="n", axis=1)], half_plan.STEEP),
        ([node("Div", ["c1", "c1"], ["m"], name="n")], half_plan.DIVIDES),
        ([node("ThresholdedRelu", ["c1"], ["m"], name="n")], half_plan.UNKNOWN),
        ([node("Mul", ["c1", "large"], ["m"], name="n")], half_plan.TOO_LARGE),
        ([node("Clip", ["c1", "", "endless"], ["m"], name="n")], half_plan.WEIGHTS_TOO_LARGE),
        ([node("Mul", ["c1", "small"], ["m"], name="n")], half_plan.WEIGHTS_TOO_SMALL),
        ([node("Add", ["c1", "epsilon"], ["m"], name="n")], half_plan.WEIGHTS_TOO_SMALL),
    ],
    ids=lambda value: value[0].op_type if isinstance(value, list) else None,
)
def test_why_a_node_stays_in_float(middle: list[Any], reason: str | None) -> None:
    constants = {
        "four": np.array([1, 1, 4, 4], np.float32),
        "three": np.ones(3, np.float32),
        "some": np.float32(1.7),
        "large": np.float32(40.0),
        "endless": np.float32(3.4e38),
        "small": np.float32(3.3e-7),
        "epsilon": np.float32(1e-9),
    }
    used = {name: constants[name] for each in middle for name in each.input if name in constants}
    plan = planned(layered(middle, "m", **used))
    assert why(plan)["n"] == reason
    assert why(plan)["c1"] is None


def test_a_tensor_beyond_the_range_keeps_all_that_touch_it_in_float() -> None:
    nodes = [
        node("Conv", ["x", "w1"], ["a"], name="quiet"),
        node("Conv", ["a", "loud"], ["b"], name="makes"),
        node("Relu", ["b"], ["c"], name="passes"),
        node("Conv", ["c", "small"], ["d"], name="takes"),
        node("Conv", ["d", "w2"], ["y"], name="last"),
    ]
    made = float_graph(nodes, w1=weights(3, 3), loud=weights(3, 3, 100.0), small=weights(3, 3, 0.002), w2=weights(3, 3))
    plan = planned(made)
    assert why(plan) == {
        "quiet": None,
        "makes": half_plan.TOO_LARGE,
        "passes": half_plan.TOO_LARGE,
        "takes": half_plan.TOO_LARGE,
        "last": None,
    }
    detail = next(choice.detail for choice in plan.choices.values() if choice.name == "makes")
    assert detail is not None
    assert detail.startswith("b reaches ")

    picture = Picture(9).values[None]
    wanted = run(made.model.SerializeToString(), picture)["y"]
    right = run(imitate_half(made, plan.half), picture)["y"]
    assert np.abs(right - wanted).max() < 2e-3 * np.abs(wanted).max()
    # All of it in FP16, as a converter without ranges has it, is not finite: and the CPU would not have shown it.
    naive = frozenset(range(len(nodes)))
    assert not np.isfinite(run(imitate_half(made, naive), picture)["y"]).all()
    assert np.isfinite(run(write_half(made, naive), picture)["y"]).all()
    with np.errstate(over="ignore", invalid="ignore"):
        (true,) = ReferenceEvaluator(onnx.load_model_from_string(write_half(made, naive))).run(None, {"x": picture})
    assert not np.isfinite(true).all()


def run(model: bytes, picture: Float32Array) -> dict[str, NDArray[Any]]:
    session = open_session(model, "m.onnx")
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, {session.get_inputs()[0].name: picture}), strict=True))


def test_the_margin_is_for_other_pictures() -> None:
    made = layered([node("Relu", ["c1"], ["m"], name="n")], "m")
    top = planned(made).choices[0].largest
    assert why(planned(made, scale=0.95 * half_plan.LIMIT / top))["c1"] is None
    assert why(planned(made, scale=1.05 * half_plan.LIMIT / top))["c1"] == half_plan.TOO_LARGE


def test_pixels_boxes_and_what_stands_alone_stay_in_float() -> None:
    nodes = [
        node("Mul", ["x", "unit"], ["p"], name="pixels"),
        node("Conv", ["p", "w1"], ["a"], name="first"),
        node("ReduceMean", ["a"], ["s"], name="mean", axes=[2, 3]),
        node("Relu", ["s"], ["r"], name="between"),
        node("Softmax", ["r"], ["t"], name="soft", axis=1),
        node("Mul", ["a", "t"], ["b"], name="gated"),
        node("Conv", ["b", "w2"], ["c"], name="last"),
        node("Mul", ["c", "stride"], ["d"], name="boxes"),
        node("Sigmoid", ["c"], ["e"], name="scores"),
        node("Concat", ["d", "e"], ["y"], name="joined", axis=1),
    ]
    made = float_graph(
        nodes,
        [("y", ("batch", 6, 8, 8))],
        unit=np.float32(1 / 255),
        w1=weights(3, 3),
        w2=weights(3, 3),
        stride=np.float32(8),
    )
    assert why(planned(made)) == {
        "pixels": half_plan.BEFORE,
        "first": None,
        "mean": half_plan.SUMS,
        "between": half_plan.ALONE,
        "soft": half_plan.STEEP,
        "gated": None,
        "last": None,
        "boxes": half_plan.BEHIND,
        "scores": half_plan.BEHIND,
        "joined": half_plan.BEHIND,
    }


def test_the_mean_over_a_distribution_is_decoding() -> None:
    nodes = [
        node("Conv", ["x", "w1"], ["a"], name="first"),
        node("Softmax", ["a"], ["b"], name="distribution", axis=1),
        node("Transpose", ["b"], ["c"], name="turned", perm=[0, 1, 3, 2]),
        node("Conv", ["c", "bins"], ["y"], name="mean"),
    ]
    made = float_graph(
        nodes, [("y", ("batch", 1, 8, 8))], w1=weights(3, 3), bins=np.arange(3, dtype=np.float32).reshape(1, 3, 1, 1)
    )
    found = why(planned(made))
    assert (found["mean"], found["turned"], found["first"]) == (half_plan.BEHIND, half_plan.BEHIND, None)


def test_weights_are_counted() -> None:
    values = np.ones((3, 3, 1, 1), np.float32)
    values[0, 0] = 1e-5
    values[1, 1] = 1e-9
    made = float_graph([node("Conv", ["x", "w"], ["y"], name="only")], w=values)
    plan = planned(made)
    assert (plan.half, plan.weights, plan.subnormal, plan.lost) == (frozenset({0}), 9, 2, 1)


def everything() -> FloatGraph:
    """Shared weights, an output that is taken as well, a Resize, a graph within a node, casts both ways."""
    inner = helper.make_graph(
        [node("Abs", ["b"], ["inner"])], "then", [], [helper.make_tensor_value_info("inner", TensorProto.FLOAT, None)]
    )
    other = helper.make_graph(
        [node("Neg", ["b"], ["outer"])], "else", [], [helper.make_tensor_value_info("outer", TensorProto.FLOAT, None)]
    )
    nodes = [
        node("Conv", ["x", "w"], ["a"], name="first"),
        node("Mul", ["a", "half"], ["b"], name="scaled"),
        node("ReduceMean", ["b"], ["m"], name="mean", axes=[2, 3]),
        node("Mul", ["m", "half"], ["n"], name="shares"),
        node("Softmax", ["n"], ["s"], name="soft", axis=1),
        node("Resize", ["b", "", "scales"], ["l"], name="larger", mode="nearest"),
        node("Mul", ["l", "s"], ["g"], name="gated"),
        node("Conv", ["g", "w"], ["y"], name="last"),
        node("ReduceMax", ["x"], ["most"], name="most", keepdims=0),
        node("Cast", ["most"], ["truth"], name="asked", to=TensorProto.BOOL),
        node("If", ["truth"], ["i"], name="branch", then_branch=inner, else_branch=other),
        node("Conv", ["i", "w"], ["z"], name="after"),
    ]
    return float_graph(
        nodes,
        [("y", ("batch", 3, 16, 16)), ("a", ("batch", 3, 8, 8)), ("z", ("batch", 3, 8, 8))],
        w=weights(3, 3),
        half=np.array([0.5], np.float32),
        scales=np.array([1, 1, 2, 2], np.float32),
    )


def test_what_is_written_is_typed_through_and_keeps_its_ends() -> None:
    made = everything()
    plan = planned(made)
    half = [name for name, reason in why(plan).items() if reason is None]
    assert half == ["first", "scaled", "larger", "gated", "last", "after"]
    data = write_half(made, plan.half)
    assert data == write_half(everything(), plan.half)
    model = onnx.shape_inference.infer_shapes(
        onnx.load_model_from_string(data), check_type=True, strict_mode=True, data_prop=True
    )
    types = {value.name: value.type.tensor_type.elem_type for value in (*model.graph.value_info, *model.graph.output)}
    assert {value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output)} == {1}
    assert {types[name] for name in ("b/fp16", "l/fp16", "g/fp16", "s/fp16")} == {TensorProto.FLOAT16}
    assert {types[name] for name in ("b", "m", "s", "a")} == {TensorProto.FLOAT}
    stored = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    assert stored == {"half": 1, "scales": 1, "w/fp16": 10, "half/fp16": 10}
    casts = [each.output[0] for each in model.graph.node if each.op_type == "Cast"]
    assert len(casts) == len(set(casts))
    assert run(data, Picture(5).values[None])["z"].shape == (1, 3, 8, 8)


def test_the_imitation_rounds_as_fp16_does() -> None:
    made = everything()
    plan = planned(made)
    model = onnx.load_model_from_string(write_half(made, plan.half))
    picture = Picture(6).values[None]
    names = [value.name for value in model.graph.output]
    wanted = dict(zip(names, ReferenceEvaluator(model).run(None, {"x": picture}), strict=True))
    found = run(imitate_half(made, plan.half), picture)
    plain = run(made.model.SerializeToString(), picture)
    for name in names:
        scale = np.abs(wanted[name]).max()
        # numpy sums in FP16 where the imitation sums in float32
        assert np.abs(found[name] - wanted[name]).max() < 3e-3 * scale
        assert np.abs(found[name] - plain[name]).max() > 1e-5 * scale
    halves = found["a"].astype(np.float16).astype(np.float32)
    assert np.array_equal(found["a"], halves)


def test_ranges_are_seen_picture_by_picture_and_nothing_is_kept() -> None:
    made = layered([node("Relu", ["c1"], ["m"], name="n")], "m")
    meter = RangeMeter(made, "m.onnx")
    alive: list[weakref.ref[Picture]] = []
    most = 0

    def pictures() -> Iterator[Picture]:
        nonlocal most
        for seed in range(200):
            gc.collect(0)
            most = max(most, sum(ref() is not None for ref in alive))
            picture = Picture(seed)
            alive.append(weakref.ref(picture))
            yield picture
            del picture

    meter.show(pictures(), SPEC)
    assert meter.pictures == 200
    assert most <= 1
    largest = meter.largest()
    every = np.stack([Picture(seed).values for seed in range(200)])
    assert largest["x"] == pytest.approx(np.abs(every).max())
    assert largest["c1"] == pytest.approx(run_all(made, every)["c1"], rel=1e-5)
    assert set(largest) == {"x", "c1", "m", "y"}


def run_all(made: FloatGraph, pictures: Float32Array) -> dict[str, float]:
    found = np.einsum("oi,nihw->nohw", made.weights["w1"][..., 0, 0], pictures)
    return {"c1": float(np.abs(found).max())}


def test_what_is_not_finite() -> None:
    masked = [node("Div", ["c1", "zero"], ["m"], name="n"), node("Clip", ["m", "", "six"], ["o"], name="clipped")]
    plan = planned(layered(masked, "o", zero=np.float32(0), six=np.float32(6)))
    assert why(plan)["n"] == half_plan.TOO_LARGE
    made = layered([node("Relu", ["c1"], ["m"], name="n")], "m")
    for value in (np.inf, np.nan):
        meter = RangeMeter(made, "m.onnx")
        with pytest.raises(BundleError, match="answers picture 2 of the calibration with values that are not finite"):
            meter.show([Picture(0), Picture(1, fill=value), Picture(2)], SPEC)


def test_a_fixed_batch(tmp_path: Any) -> None:
    nodes = [node("Conv", ["x", "w"], ["y"], name="only")]
    data = graph(nodes, outputs=[("y", (4, 3, 8, 8))], shape=(4, 3, 8, 8), initializers={"w": weights(3, 3)})
    meter = RangeMeter(FloatGraph.of(onnx.load_model_from_string(data)), "m.onnx")
    meter.show([Picture(0)], SPEC)
    assert meter.largest()["x"] == pytest.approx(Picture(0).values.max())

    build_heavy_model(tmp_path / "heavy.onnx", blocks=1)
    made = FloatGraph.of(onnx.load(tmp_path / "heavy.onnx"))
    plan = plan_half(made, dict.fromkeys(RangeMeter(made, "m.onnx").names, 1.0))
    assert sum(choice.why is None for choice in plan.choices.values()) >= 8
