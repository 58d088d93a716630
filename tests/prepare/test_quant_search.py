"""What makes INT8 better, what of a model stays in float, and how candidates are compared: on small made graphs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from edge_runtime.engine.onnxrt import open_session
from edge_runtime.errors import UsageError
from edge_runtime.prepare.latency import Latencies, measure_latency
from edge_runtime.prepare.metrics import average_precision
from edge_runtime.prepare.noise import Noise
from edge_runtime.prepare.quant import QuantPlan
from edge_runtime.prepare.quant_blocks import blocks, int8_share, last_blocks, tail, work_of
from edge_runtime.prepare.quant_graph import activations, float_model, operators_of, quantise
from edge_runtime.prepare.quant_improve import correct_biases, equalise, round_weights, see
from edge_runtime.prepare.quant_layers import layers, see_layers
from edge_runtime.prepare.quant_meter import ActivationMeter
from edge_runtime.prepare.quant_pareto import Point, choose, front
from edge_runtime.prepare.quant_probe import Probe
from edge_runtime.prepare.quant_recipe import fastest
from edge_runtime.prepare.quant_said import said
from edge_runtime.prepare.quant_search import SearchResult, search
from edge_runtime.prepare.quant_sense import sense
from edge_runtime.prepare.quick_ap import quick_map
from edge_runtime.records.frames import InputArray, Transform
from edge_runtime.records.spec import InputSpec, OutputSpec
from tests.prepare.made_up import boxes, dataset, detections, predictions
from tests.prepare.regular import yolo_sized

SPEC = InputSpec(16, 16, resize="stretch", scale=1 / 64)
CLASSES = 6
OUTPUT = OutputSpec("classify", tuple(f"class {index}" for index in range(CLASSES)))
PLAIN = QuantPlan("onnxruntime", operators_of("onnxruntime"), frozenset(), {}, "minmax", 8)


@dataclasses.dataclass
class Picture:
    """A picture made of a number: patches of colour whose neighbours go together."""

    seed: int
    width: int = 16
    height: int = 16

    def write_into(self, place: InputArray, spec: InputSpec) -> Transform:
        rng = np.random.default_rng(self.seed)
        coarse = rng.uniform(0, 255, (3, 4, 4)).repeat(4, axis=1).repeat(4, axis=2)
        place[:] = np.clip(coarse + rng.normal(0, 4, coarse.shape), 0, 255) * spec.scale
        return Transform(16, 16, 16, 16, 16, 16, 0, 0)

    def to_rgb(self) -> NDArray[np.uint8]:
        return np.zeros((16, 16, 3), np.uint8)


def made(nodes: Sequence[Any], stored: dict[str, NDArray[Any]], shape: Sequence[Any] = (1, CLASSES)) -> Any:
    graph = helper.make_graph(
        nodes,
        "made",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 16, 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, list(shape))],
        [numpy_helper.from_array(np.asarray(value, np.float32), name) for name, value in stored.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def classifier(spread: float = 1.0, seed: int = 0) -> Any:
    """Convolution, depthwise convolution, two more, mean, classes. `spread`: channels of the third layer's weights lie
    so many powers of two apart inside of each output, so that one scale does not suit them."""
    rng = np.random.default_rng(seed)
    wide = np.exp2(np.linspace(0, -spread, 8))
    stored = {
        "w1": rng.normal(0, 0.3, (8, 3, 3, 3)),
        "b1": rng.normal(0, 0.2, 8),
        "w2": rng.normal(0, 0.4, (8, 1, 3, 3)),
        "b2": rng.normal(0, 0.2, 8),
        "w3": rng.normal(0, 0.4, (12, 8, 1, 1)) * wide[:, None, None],
        "w4": rng.normal(0, 0.4, (12, 12, 1, 1)),
        "b4": rng.normal(0, 0.1, 12),
        "w5": rng.normal(0, 0.8, (CLASSES, 12)),
        "b5": np.zeros(CLASSES),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["a"], "one", pads=[1, 1, 1, 1], strides=[2, 2]),
        helper.make_node("Relu", ["a"], ["ar"], "cut"),
        helper.make_node("Conv", ["ar", "w2", "b2"], ["b"], "two", pads=[1, 1, 1, 1], group=8),
        helper.make_node("LeakyRelu", ["b"], ["bl"], "leak", alpha=0.1),
        helper.make_node("Conv", ["bl", "w3"], ["c"], "three"),
        helper.make_node("Conv", ["c", "w4", "b4"], ["d"], "four"),
        helper.make_node("GlobalAveragePool", ["d"], ["e"], "mean"),
        helper.make_node("Flatten", ["e"], ["f"], "flat"),
        helper.make_node("Gemm", ["f", "w5", "b5"], ["y"], "five", transB=1),
    ]
    return float_model(made(nodes, stored).SerializeToString(), "made")


def run(model: Any, picture: InputArray) -> NDArray[np.float32]:
    (answer,) = open_session(model.SerializeToString(), "made").run(None, {"x": picture})
    return np.asarray(answer)


def probe_of(model: Any, folder: Path, pictures: int = 24, most: int = 32) -> Probe:
    probe = Probe(model.SerializeToString(), SPEC, OUTPUT, folder, where="made", most=most)
    for seed in range(pictures):
        probe.show(Picture(seed))
    return probe


def metered(model: Any, pictures: int = 24) -> ActivationMeter:
    meter = ActivationMeter(model, activations(model), "made")
    meter.show((Picture(seed) for seed in range(pictures)), SPEC)
    return meter


def planned(model: Any, **changes: Any) -> QuantPlan:
    return dataclasses.replace(PLAIN, ranges=metered(model).ranges("minmax", symmetric=False), **changes)


def test_equal_channels_leave_the_answers_as_they_were(tmp_path: Path) -> None:
    model = classifier(spread=8)
    equal = equalise(model)
    before, after = layers(model), layers(equal)
    assert not np.array_equal(before["two"].weights, after["two"].weights)
    for seed in range(4):
        picture = np.zeros((1, *SPEC.shape), np.float32)
        Picture(seed).write_into(picture[0], SPEC)
        assert run(equal, picture) == pytest.approx(run(model, picture), rel=1e-5, abs=1e-5)
    # the given one stays as it is, and the same gives the same
    assert model.SerializeToString() == classifier(spread=8).SerializeToString()
    assert equal.SerializeToString() == equalise(model).SerializeToString()


def test_channels_behind_a_clip_or_with_another_taker_stay() -> None:
    rng = np.random.default_rng(0)
    stored: dict[str, Any] = {
        "w1": rng.normal(0, 1, (4, 3, 1, 1)),
        "w2": rng.normal(0, 1, (4, 4, 1, 1)),
        "low": 0.0,
        "high": 6.0,
    }
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["a"], "one"),
        helper.make_node("Clip", ["a", "low", "high"], ["b"], "clip"),
        helper.make_node("Conv", ["b", "w2"], ["y"], "two"),
    ]
    model = made(nodes, {key: np.asarray(value) for key, value in stored.items()}, [1, 4, 16, 16])
    assert equalise(model).SerializeToString() == model.SerializeToString()
    nodes[1] = helper.make_node("Relu", ["a"], ["b"], "relu")
    model = made(nodes, {"w1": stored["w1"], "w2": stored["w2"]}, [1, 4, 16, 16])
    assert equalise(model).SerializeToString() != model.SerializeToString()
    model.graph.output.append(helper.make_tensor_value_info("b", TensorProto.FLOAT, None))
    assert equalise(model).SerializeToString() == model.SerializeToString()


def test_biases_take_a_shift_away(tmp_path: Path) -> None:
    """Weights a little above a step of the grid, all rounded down, and inputs above 0: the mean output is too small."""
    weights = np.full((2, 3, 3, 3), 0.29)
    weights[:, 0, 0, 0] = 64.0
    model = made([helper.make_node("Conv", ["x", "w"], ["y"], "one")], {"w": weights}, [1, 2, 14, 14])
    probe = probe_of(model, tmp_path)
    plan = planned(model, weight_bits=7)
    better = correct_biases(model, plan, see(model, plan, probe))
    wanted, plain, found = (
        np.mean([run(each, picture) for picture in probe.inputs()], axis=(0, 1, 3, 4))
        for each in (model, quantise(model, plan), quantise(better, plan))
    )
    shift = np.abs(plain - wanted).min()
    assert shift > 5
    assert np.abs(found - wanted).max() < 0.1 * shift


def test_rounding_by_what_a_layer_takes_is_better_than_the_nearest(tmp_path: Path) -> None:
    model = classifier()
    probe, plan = probe_of(model, tmp_path), planned(model, weight_bits=7)
    seen = see_layers(model, plan, probe, 24)
    rounded = round_weights(model, plan, seen)
    for name in ("one", "four"):
        before, after = layers(model)[name].weights, layers(rounded)[name].weights
        steps = np.abs(before).max(axis=2, keepdims=True) / 64
        nearest = np.round(before / steps) * steps
        # on the grid, which is the same one
        assert np.abs(after).max(axis=2) == pytest.approx(np.abs(before).max(axis=2), rel=1e-6)
        assert np.abs(after / steps - np.round(after / steps)).max() < 1e-3
        errors = [
            float(np.einsum("goi,gij,goj->", each - before, seen[name].covariance, each - before))
            for each in (after, nearest)
        ]
        assert errors[0] < 0.6 * errors[1]
    assert (
        rounded.SerializeToString()
        == round_weights(model, plan, see_layers(model, plan, probe, 24)).SerializeToString()
    )


def test_blocks_are_a_layer_and_what_follows(tmp_path: Path) -> None:
    model = classifier()
    work = work_of(model, probe_of(model, tmp_path))
    assert work == {"one": 8 * 64 * 27, "two": 8 * 64 * 9, "three": 12 * 64 * 8, "four": 12 * 64 * 12, "five": 72}
    found = blocks(model, "onnxruntime", work)
    assert [block.name for block in found] == ["one", "two", "three", "four", "five"]
    assert found[1].nodes == ("two", "leak")
    assert sum(block.share for block in found) == pytest.approx(1)
    assert tail(model) == frozenset()
    assert last_blocks(model, found) == {"five"}
    plan = planned(model, keep_float=frozenset(("one", "cut")))
    assert int8_share(model, plan, work) == pytest.approx(1 - found[0].share)


@pytest.mark.parametrize("family", ["onnxruntime", "tensorrt"])
def test_the_search_keeps_the_sensitive_layer_in_float(tmp_path: Path, family: Any) -> None:
    """One layer takes a value of 4,000 beside what counts, on a range of which INT8 leaves nothing."""
    _, probe, result = _searched(tmp_path, family, measure=Timed(1.0, (1.0, 1.0, 1.0)))
    assert result.sensitivities[0][0] == "loud"
    chosen = result.chosen
    if family == "tensorrt":
        assert chosen is not None
        assert "loud" in chosen.plan.keep_float
        assert 0.3 < chosen.int8_share < 1
        assert result.model is not None
        assert probe.judge(result.model).loss == pytest.approx(chosen.loss, abs=1e-6)
        assert "device" in result.said
    everything = next(point for point in result.points if point.name == "everything")
    kept = [point for point in result.points if "loud" in point.plan.keep_float and point.loss < everything.loss / 2]
    assert kept
    assert everything.loss > 0.02
    # a second search judges nothing anew
    stored = (tmp_path / "judged.json").read_bytes()
    again = _searched(tmp_path, family, measure=Timed(1.0, (1.0, 1.0, 1.0)))[2]
    assert (tmp_path / "judged.json").read_bytes() == stored
    assert [(point.name, point.loss, point.plan) for point in again.points] == [
        (point.name, point.loss, point.plan) for point in result.points
    ]


def _searched(folder: Path, family: Any, **options: Any) -> tuple[Any, Probe, SearchResult]:
    model = loud_model()
    probe = probe_of(model, folder)
    given = {
        "search_loss": 0.01,
        "method": "minmax",
        "folder": folder,
        "weight_bits": 8,
        "min_agreement": 0.9,
        **options,
    }
    return model, probe, search(model, metered(model), family=family, probe=probe, **given)


class Timed:
    """Measures nothing: each model is as many times as fast as `speeds` say, the models of a call one after the other;
    the last call is that of the one that was chosen."""

    def __init__(self, many: float, afresh: tuple[float, float, float]) -> None:
        self.many = many
        self.afresh = afresh
        self.calls: list[tuple[int, int, int]] = []

    def __call__(
        self, models: Sequence[bytes], spec: InputSpec, *, where: str, rounds: int, limit_s: float, seed: int
    ) -> Latencies:
        self.calls.append((len(models), rounds, seed))
        low, speed, high = (self.many,) * 3 if rounds < 150 else self.afresh
        others = len(models) - 1
        times = (10.0, *(10.0 / speed for _ in range(others)))
        one = (1.0,)
        return Latencies(times, one + (speed,) * others, rounds, one + (low,) * others, one + (high,) * others)


def test_what_was_chosen_for_its_speed_is_measured_afresh(tmp_path: Path) -> None:
    timed = Timed(1.5, (1.1, 1.2, 1.3))
    _, _, result = _searched(tmp_path, "onnxruntime", measure=timed, search_loss=1.0, seed=7, min_agreement=0.0)
    assert result.chosen is not None
    assert (result.chosen.speed, result.chosen.speed_low, result.chosen.speed_high) == (1.2, 1.1, 1.3)
    assert result.chosen in result.points
    assert "1.20 (1.10 to 1.30) times as fast" in result.said
    assert timed.calls[-1] == (2, 150, 7)
    timed = Timed(1.5, (0.98, 1.05, 1.1))
    _, _, result = _searched(tmp_path, "onnxruntime", measure=timed, search_loss=1.0, min_agreement=0.0)
    assert (result.chosen, result.model) == (None, None)
    assert result.said.startswith(
        "nothing: keep float; the fastest within the allowed loss was measured afresh as 1.05"
    )


def test_what_the_validator_refuses_is_never_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_runtime.prepare.quant_judge.check_symmetric", lambda _: ["a zero point is 3"])
    _, _, result = _searched(tmp_path, "tensorrt")
    assert result.chosen is None
    assert all(point.problems == ("a zero point is 3",) for point in result.points)
    assert result.said == "nothing: keep float; the backend would not take any candidate: a zero point is 3"


@pytest.mark.full
@pytest.mark.parametrize("step", [2, 7, 12])
def test_a_search_that_was_cut_off_goes_on_to_the_same_end(tmp_path: Path, step: int) -> None:
    def end(result: SearchResult) -> Any:
        return result.points, result.chosen, result.model, result.sensitivities, result.improved, result.said

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    wanted = _searched(whole, "tensorrt", seed=3)[2]
    count = itertools.count(1)

    def stop(*_: Any) -> None:
        if next(count) == step:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _searched(parts, "tensorrt", seed=3, progress=stop)
    before = (parts / "judged.json").read_bytes()
    assert len(before) < len((whole / "judged.json").read_bytes())
    assert end(_searched(parts, "tensorrt", seed=3)[2]) == end(wanted)
    assert (parts / "judged.json").read_bytes() == (whole / "judged.json").read_bytes()


def test_other_seeds_see_other_patches(tmp_path: Path) -> None:
    model = classifier()
    probe, plan = probe_of(model, tmp_path, 4), planned(model)
    one, same, other = (see(model, plan, probe, seed)["one"].mean for seed in (0, 0, 1))
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)


def test_the_worst_is_found_by_halving_groups() -> None:
    harms = {f"b{place}": 0.001 for place in range(64)} | {"b13": 1.0, "b40": 0.5}
    calls: list[frozenset[str]] = []

    def harm_of(group: frozenset[str]) -> float:
        calls.append(group)
        return float(sum(harms[name] ** 2 for name in group) ** 0.5)

    found = sense(list(harms), harm_of, lambda: True)
    assert list(found)[:2] == ["b13", "b40"]
    assert found["b13"] == 1.0
    assert set(found) == set(harms)
    assert len(calls) < 24
    # what was not measured is taken for as bad as the worst, so that it is not trusted
    calls.clear()
    found = sense(list(harms), harm_of, lambda: len(calls) < 3)
    assert len(calls) == 3
    assert set(found) == set(harms)
    assert found["b63"] == max(found.values())
    assert sense([], harm_of, lambda: True) == {}


def test_of_what_chance_may_set_apart_the_first_is_taken() -> None:
    one = (1.0,)
    found = Latencies((1.0,) * 4, (1.0, 1.3, 1.35, 1.1), 20, one * 4, (1.0, 1.36, 1.4, 1.2))
    assert fastest(found, ["all", "some", "few"]) == "all"
    found = Latencies((1.0,) * 4, (1.0, 1.3, 1.35, 1.1), 20, one * 4, (1.0, 1.32, 1.4, 1.2))
    assert fastest(found, ["all", "some", "few"]) == "some"


def test_a_refusal_names_what_refused() -> None:
    def point(loss: float, agreement: float = 1.0, share: float = 0.5, **speed: Any) -> Point:
        return Point("p", PLAIN, loss, agreement, 0.0, 20.0, 1, share, **speed)

    def told(*points: Point, family: Any = "onnxruntime", agreement: float = 0.9) -> str:
        return said(family, points, None, None, 0.01, agreement, 0.05)

    timed = {"latency_ms": 9.0, "float_ms": 10.0, "speed": 1.1, "speed_low": 1.0, "speed_high": 1.2}
    assert "loses 3.0% at 1.10 (1.00 to 1.20) times the speed" in told(point(0.03, **timed))
    assert "same first class in 80.0%" in told(point(0.0, 0.8))
    assert "loses" not in told(point(0.0, 0.8))
    assert "only 2% of the multiplications" in told(point(0.0, share=0.02))
    slow = {**timed, "speed": 0.9, "speed_low": 0.8, "speed_high": 0.95}
    assert "the fastest within the allowed loss is 0.90 (0.80 to 0.95)" in told(point(0.0, **slow))
    # what was not measured has no speed
    assert "times" not in told(point(0.03), family="tensorrt")
    assert "no candidate" in told()


def loud_model() -> Any:
    """The classifier, whose fourth layer takes a channel of 4,000 times the others', and does not look at it."""
    model = classifier()
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    weights = {node.name: (node.input[1], stored[node.input[1]].copy()) for node in model.graph.node if node.name in
               ("three", "four")}  # fmt: skip
    weights["three"][1][0] *= 4000
    weights["four"][1][:, 0] = 0
    for tensor in model.graph.initializer:
        for name, value in weights.values():
            if tensor.name == name:
                tensor.CopyFrom(numpy_helper.from_array(value, name))
    for node in model.graph.node:
        if node.name == "four":
            node.name = "loud"
    return model


def test_time_bounds_the_search_and_what_was_not_tried_is_said(tmp_path: Path) -> None:
    clock = itertools.count(step=40)
    _, _, result = _searched(tmp_path, "tensorrt", minutes=1, clock=lambda: float(next(clock)))
    assert any("sensitivities" in each for each in result.not_tried)
    assert any("weights" in each for each in result.not_tried)
    # of every block it is known nevertheless how sensitive it is, alone or in a group
    assert {name for name, _ in result.sensitivities} == {"one", "two", "three", "loud", "five"}
    assert result.points


def test_a_probe_keeps_some_of_many_and_says_the_same_again(tmp_path: Path) -> None:
    model = classifier()
    probe = probe_of(model, tmp_path, pictures=50, most=8)
    assert (probe.seen, probe.pictures) == (50, 7)
    wanted = np.zeros(SPEC.shape, np.float32)
    for place, picture in enumerate(probe.inputs()):
        Picture(place * 8).write_into(wanted, SPEC)
        assert np.array_equal(picture[0], wanted)
    same = probe.judge(model.SerializeToString(), agreement=True)
    assert (same.loss, same.agreement, same.distance, dict(same.sqnr_db)) == (0.0, 1.0, 0.0, {"y": 200.0})
    other = tmp_path / "other"
    other.mkdir()
    assert probe_of(model, other, pictures=50, most=8).digest() == probe.digest()
    assert probe_of(classifier(seed=1), other, pictures=50, most=8).digest() != probe.digest()
    nothing = Probe(model.SerializeToString(), SPEC, OUTPUT, other, where="made")
    with pytest.raises(UsageError):
        nothing.judge(model.SerializeToString())


def test_the_loss_of_a_classifier_is_what_its_probabilities_say(tmp_path: Path) -> None:
    model = classifier()
    turned = onnx.ModelProto()
    turned.CopyFrom(model)
    for node in turned.graph.node:
        if node.name == "five":
            for tensor in turned.graph.initializer:
                if tensor.name == node.input[1]:
                    tensor.CopyFrom(numpy_helper.from_array(-numpy_helper.to_array(tensor), tensor.name))
    said = probe_of(model, tmp_path).judge(turned.SerializeToString(), agreement=True)
    assert said.loss > 0.5
    assert said.agreement == 0.0
    assert said.sqnr_db["y"] == pytest.approx(-6.02, abs=0.1)


scores = st.integers(0, 20)
drawn = st.lists(st.tuples(scores, scores, scores), min_size=1, max_size=12)


def points(rows: Sequence[tuple[int, int, int]]) -> Iterator[Point]:
    for index, (loss, speed, size) in enumerate(rows):
        yield Point(str(index), PLAIN, loss / 100, 1.0, 0.0, 20.0, size, 0.5, speed=speed / 10)


@settings(max_examples=50, deadline=None)
@given(drawn)
def test_the_front_holds_what_no_other_beats(rows: Sequence[tuple[int, int, int]]) -> None:
    tried = list(points(rows))
    kept = front(tried)
    assert all(point in tried for point in kept)
    for one in tried:
        beaten = [
            other
            for other in kept
            if other.loss <= one.loss and other.benefit >= one.benefit and other.size_bytes <= one.size_bytes
        ]
        assert beaten
        if one in kept:
            assert all((each.loss, each.benefit, each.size_bytes) == (one.loss, one.benefit, one.size_bytes)
                       for each in beaten)  # fmt: skip
    assert front(tried[::-1]) == kept


@settings(max_examples=50, deadline=None)
@given(drawn, scores)
def test_the_fastest_within_the_loss_is_taken(rows: Sequence[tuple[int, int, int]], most: int) -> None:
    tried = list(points(rows))
    good = [point for point in tried if point.loss <= most / 100 and point.benefit > 1]
    chosen = choose(tried, most / 100)
    if not good:
        assert chosen is None
    else:
        assert chosen in good
        assert chosen is not None
        assert chosen.benefit == max(point.benefit for point in good)
    assert choose(tried, most / 100, min_agreement=1.1) is None


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000))
def test_quick_map_is_cocos(seed: int) -> None:
    rng = np.random.default_rng(seed)
    truths, said = [], []
    for _ in range(5):
        corners = rng.uniform(0, 60, (rng.integers(0, 5), 2))
        rows = np.concatenate([corners, corners + rng.uniform(10, 40, corners.shape)], axis=1)
        ids = rng.integers(0, 3, len(rows))
        truths.append(boxes(rows, ids))
        again = np.concatenate([rows, rows]) + rng.normal(0, 2, (2 * len(rows), 4))
        said.append(detections(again, rng.uniform(0.02, 1, len(again)), np.concatenate([ids, ids[::-1]])))
    if not any(len(truth.boxes) for truth in truths):
        assert quick_map(truths, said) == 0.0
        return
    wanted = average_precision(dataset(truths), predictions(said)).mean_ap
    assert quick_map(truths, said) == pytest.approx(wanted, abs=1e-6)


def test_models_are_measured_in_turns() -> None:
    clock = itertools.count()
    model = classifier().SerializeToString()
    found = measure_latency([model, model], SPEC, where="made", rounds=6, limit_s=1e9, clock=lambda: float(next(clock)))
    assert (found.median_ms, found.speed, found.rounds) == ((1000.0, 1000.0), (1.0, 1.0), 6)
    assert (found.low, found.high) == ((1.0, 1.0), (1.0, 1.0))
    ticks = iter([0, *itertools.accumulate([0, 2, 0, 1, 0, 1, 0, 2] * 2 + [0, 4, 0, 1])])
    found = measure_latency([model, model], SPEC, where="made", rounds=5, limit_s=1e9, clock=lambda: float(next(ticks)))
    assert found.speed[1] == 2.0
    assert found.low[1] <= 2.0 <= found.high[1]
    early = measure_latency([model], SPEC, where="made", limit_s=0.0, clock=lambda: float(next(clock)))
    assert early.rounds == 5
    with pytest.raises(ValueError, match="no models"):
        measure_latency([], SPEC, where="made")


def test_a_model_of_regular_convolutions_keeps_its_signal() -> None:
    """A slice of the model that test_quant_models.py measures whole."""
    model = float_model(yolo_sized(32, 3).SerializeToString(), "regular")
    meter = ActivationMeter(model, activations(model), "regular")
    spec = InputSpec(32, 32, resize="stretch", scale=1 / 255)
    meter.show([Noise(seed) for seed in range(4)], spec)
    plan = QuantPlan(
        "onnxruntime", operators_of("onnxruntime"), tail(model), meter.ranges("minmax", symmetric=False), "minmax", 7
    )
    picture = np.zeros((1, *spec.shape), np.float32)
    Noise(9).write_into(picture[0], spec)
    made = quantise(model, plan)
    wanted, found = (
        open_session(each.SerializeToString(), "regular").run(None, {"images": picture})[0] for each in (model, made)
    )
    assert 10 * np.log10(np.square(wanted).sum() / np.square(wanted - found).sum()) >= 20
