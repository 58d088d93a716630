"""A graph made ready: what is folded, dropped, raised and named, that it answers the same, and what is refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxslim
import pytest

from edge_runtime.app.evaluate import read_image
from edge_runtime.engine.bundle import Bundle, load_bundle
from edge_runtime.engine.onnxrt import open_session
from edge_runtime.errors import EXIT_REFUSED, BundleError, RefusedError
from edge_runtime.prepare.graph import LEAST_OPSET, dead_outputs, optimise, optimise_artefact
from edge_runtime.prepare.noise import Noise
from edge_runtime.records.spec import InputSpec, OutputSpec, Pixel
from tests.engine.graphs import CLASSES, SIDE, classifier, graph, node, write_bundle

RNG = np.random.default_rng(3)
NORM = {
    "scale": RNG.uniform(0.5, 2, CLASSES),
    "shift": RNG.normal(0, 1, CLASSES),
    "mean": RNG.normal(0, 1, CLASSES),
    "variance": RNG.uniform(0.5, 2, CLASSES),
}


def normed(**more: Any) -> bytes:
    """A convolution, its batch normalisation and a mean; a constant that is computed from two."""
    nodes = [
        node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        node("BatchNormalization", ["c", *NORM], ["n"]),
        node("Add", ["one", "two"], ["three"]),
        node("Mul", ["n", "three"], ["m"]),
        node("Identity", ["m"], ["i"]),
        node("ReduceMean", ["i"], ["y"], axes=[2, 3], keepdims=0),
    ]
    weights = {"w": RNG.normal(0, 1, (CLASSES, 3, 3, 3)), "one": np.float32(1), "two": np.float32(0.5)}
    return graph(nodes, initializers={**weights, **NORM}, **more)


def detector() -> bytes:
    """CenterNet's outputs, and two that are none of its: one made of a layer of its own."""
    nodes = [
        node("AveragePool", ["x"], ["p"], kernel_shape=[4, 4], strides=[4, 4]),
        node("Sigmoid", ["p"], ["heatmap"]),
        node("Conv", ["p", "w"], ["d"]),
        node("Relu", ["d"], ["ltrb"]),
        node("Conv", ["p", "v"], ["debug"]),
        node("Neg", ["p"], ["also"]),
    ]
    side = SIDE // 4
    outputs = [("debug", ("batch", 2, side, side)), ("heatmap", ("batch", 3, side, side))]
    outputs += [("ltrb", ("batch", 4, side, side)), ("also", ("batch", 3, side, side))]
    weights = {"w": RNG.normal(0, 1, (4, 3, 1, 1)), "v": RNG.normal(0, 1, (2, 3, 1, 1))}
    return graph(nodes, outputs=outputs, initializers=weights)


def says(model: bytes, batch: Any) -> dict[str, Any]:
    session = open_session(model, "model")
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, {session.get_inputs()[0].name: batch}), strict=True))


@pytest.mark.parametrize(("opset", "ir"), [(11, 3), (12, 6), (13, 8)])
def test_what_need_not_be_computed_is_gone_and_the_answer_is_the_same(opset: int, ir: int) -> None:
    before = normed(opset=opset, ir=ir)
    made = optimise(before, "model")
    model = onnx.load_model_from_string(made.data)
    assert Counter(each.op_type for each in model.graph.node) == {"Conv": 1, "Mul": 1, "ReduceMean": 1}
    names = [each.name for each in model.graph.node]
    assert all(names)
    assert len(set(names)) == len(names)
    assert model.opset_import[0].version == max(opset, LEAST_OPSET)
    assert [value.name for value in model.graph.input] == ["x"]
    onnx.checker.check_model(model, full_check=True)
    told = "; ".join(made.notes)
    assert "3 of 6 nodes were computed beforehand or folded: 1 Add, 1 BatchNormalization, 1 Identity" in told
    assert (f"raised from {opset} to {LEAST_OPSET}" in told) == (opset < LEAST_OPSET)
    batch = RNG.normal(0, 1, (2, 3, SIDE, SIDE)).astype(np.float32)
    np.testing.assert_allclose(says(made.data, batch)["y"], says(before, batch)["y"], rtol=1e-4, atol=1e-5)


def test_the_same_bytes_come_out_and_stay_as_they_are() -> None:
    before = normed()
    one = optimise(before, "model")
    assert optimise(before, "model").data == one.data
    again = optimise(one.data, "model")
    assert (again.data, again.notes) == (one.data, ())


def test_names_that_others_have_are_not_taken() -> None:
    nodes = [
        node("Relu", ["x"], ["a"], name="ReduceMean_2"),
        node("Sigmoid", ["a"], ["b"], name="twice"),
        node("ReduceMean", ["b"], ["y"], axes=[2, 3], keepdims=0, name="twice"),
    ]
    model = onnx.load_model_from_string(optimise(graph(nodes), "model").data)
    assert [each.name for each in model.graph.node] == ["ReduceMean_2", "twice", "ReduceMean_2_"]


def test_outputs_that_the_layout_does_not_read_are_dropped(tmp_path: Path) -> None:
    root = write_bundle(tmp_path / "b", detector(), layout="centernet")
    bundle = load_bundle(root)
    made = optimise_artefact(bundle, bundle.manifest.variant, "onnxruntime", read_image)
    model = onnx.load_model_from_string(made.data)
    assert [value.name for value in model.graph.output] == ["heatmap", "ltrb"]
    assert "v" not in {tensor.name for tensor in model.graph.initializer}
    assert "Neg" not in {each.op_type for each in model.graph.node}
    assert any("left out: debug, also" in note for note in made.notes)
    assert made.parity is not None
    assert made.parity.deviation < 1e-5
    before = says(bundle.read_artefact("auto", "onnxruntime"), grey := np.full((1, 3, SIDE, SIDE), 9, np.float32))
    for name, value in says(made.data, grey).items():
        np.testing.assert_allclose(value, before[name], rtol=1e-5)


@pytest.mark.parametrize("data", [classifier(), normed()])
def test_an_only_output_is_never_dead(data: bytes) -> None:
    output = OutputSpec("classify", ("red", "green", "blue"), 0.3, 0.6, 300)
    assert dead_outputs(data, InputSpec(SIDE, SIDE), output, "model") == ()


def test_what_cannot_be_made_ready_is_refused_with_the_reason() -> None:
    with pytest.raises(BundleError, match="cannot be simplified") as caught:
        optimise(b"no model", "some.onnx", code="half_refused")
    assert (caught.value.code, caught.value.where) == ("half_refused", "some.onnx")
    assert caught.value.remedy
    scan = [node("Scan", ["x"], ["u"]), node("ReduceMean", ["u"], ["y"], axes=[2, 3], keepdims=0)]
    with pytest.raises(BundleError, match="is of opset 8 and cannot be raised to 13") as caught:
        optimise(graph(scan, opset=8, ir=3), "some.onnx")
    assert caught.value.code == "graph_refused"


def test_an_old_operator_is_replaced() -> None:
    nodes = [node("Upsample", ["x", "scales"], ["u"]), node("ReduceMean", ["u"], ["y"], axes=[2, 3], keepdims=0)]
    old = graph(nodes, initializers={"scales": np.array([1.0, 1.0, 2.0, 2.0])}, opset=9, ir=4)
    made = optimise(old, "some.onnx")
    batch = np.random.default_rng(1).normal(0, 1, (1, 3, SIDE, SIDE)).astype(np.float32)
    np.testing.assert_allclose(says(made.data, batch)["y"], says(old, batch)["y"], rtol=1e-4, atol=1e-6)


def test_a_model_that_says_something_else_afterwards_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folding that is wrong by a little, as a bug of a library would be."""
    bundle: Bundle = load_bundle(write_bundle(tmp_path / "b", normed()))
    slim = onnxslim.slim

    def wrong(model: Any) -> Any:
        made = slim(model)
        for tensor in made.graph.initializer:
            if tensor.data_type == onnx.TensorProto.FLOAT and len(tensor.dims) == 4:
                values = onnx.numpy_helper.to_array(tensor) * np.float32(1.01)
                tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
        return made

    monkeypatch.setattr(onnxslim, "slim", wrong)
    with pytest.raises(RefusedError, match="the optimised model does not say what the model says") as caught:
        optimise_artefact(bundle, bundle.manifest.variant, "onnxruntime", read_image)
    assert (caught.value.code, caught.value.exit_code) == ("parity", EXIT_REFUSED)


def test_noise_is_the_same_each_time_and_fills_every_format() -> None:
    pixels: tuple[Pixel, ...] = ("float32", "bgr24", "rgba", "nv12")
    for pixel in pixels:
        spec = InputSpec(8, 6, scale=1 / 255, mean=(0.5, 0.5, 0.5), pixel=pixel)
        one, other = (np.zeros(spec.shape, spec.dtype) for _ in range(2))
        Noise(1).write_into(one, spec)
        Noise(1).write_into(other, spec)
        np.testing.assert_array_equal(one, other)
        Noise(2).write_into(other, spec)
        assert (one != other).any()
        assert len(np.unique(one)) > 20
    assert Noise(1).to_rgb().shape == (Noise(1).height, Noise(1).width, 3)
