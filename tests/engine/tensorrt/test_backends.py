"""What every backend does, seen from outside: the same suite over ONNX Runtime and TensorRT on its strict fakes."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from edge_runtime.engine.bundle import load_bundle
from edge_runtime.engine.protocol import Engine, InputBuffer, Lane
from edge_runtime.errors import BundleError, EngineError
from edge_runtime.prepare.fuse_graph import fuse_graph
from edge_runtime.records.spec import InputSpec, Pixel
from edge_runtime.vision.pixels import normalised
from tests.conftest import ROOT
from tests.engine.graphs import CLASSES, SIDE, classifier, data_dependent, graph, nan_classifier, node
from tests.engine.tensorrt.rigs import KINDS, TENSORRT, USUAL, Kind, Rig, fill


def kinds(*chosen: Kind) -> list[Any]:
    """As parameters; the unusual ones only with `full`."""
    return [
        pytest.param(kind, id=kind.name, marks=() if kind.name in USUAL else pytest.mark.full)
        for kind in chosen or KINDS
    ]


@pytest.fixture(params=kinds())
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    made = Rig(request.param, tmp_path)
    made.start()
    yield made
    made.stop()
    made.machine.check_empty()
    assert made.fatal == []


def run(lane: Lane, buffer: InputBuffer, count: int) -> dict[str, np.ndarray[Any, Any]]:
    lane.submit(buffer, count)
    return dict(lane.collect())


def many_outputs() -> bytes:
    """[b, 3, H, W] -> four outputs of EfficientNMS's layout: no boxes, and statistics in their places."""
    nodes = [
        node("ReduceMean", ["x"], ["mean"], axes=[2, 3]),
        node("ReduceMax", ["x"], ["det_scores"], axes=[2, 3], keepdims=0),
        node("ReduceMin", ["x"], ["det_classes"], axes=[2, 3], keepdims=0),
        node("ReduceMax", ["x"], ["most"], axes=[1, 2, 3], keepdims=0),
        node("Sub", ["most", "most"], ["zero"]),
        node("Unsqueeze", ["zero", "one"], ["num_dets"]),
        node("Concat", ["mean"] * 4, ["wide"], axis=2),
        node("Reshape", ["wide", "boxes"], ["det_boxes"]),
    ]
    outputs = [("num_dets", ("batch", 1)), ("det_boxes", ("batch", CLASSES, 4))]
    outputs += [("det_scores", ("batch", CLASSES)), ("det_classes", ("batch", CLASSES))]
    return graph(nodes, outputs=outputs, initializers={"one": [1], "boxes": [0, 0, 4]})


def test_what_an_engine_is(rig: Rig) -> None:
    engine: Engine = rig.load(classifier())
    info = engine.info
    assert info.backend == ("tensorrt" if rig.is_tensorrt else "onnxruntime")
    assert (info.variant, info.precision, dict(info.output_shapes)) == ("fp32", "fp32", {"y": (1, 3)})
    assert info.digest.startswith("sha256:")
    buffer = engine.allocate(4)
    assert buffer.array.shape == (4, 3, SIDE, SIDE)
    assert buffer.array.dtype == np.float32
    assert buffer.array.ctypes.data % 64 == 0
    assert buffer.array.flags.c_contiguous
    assert not buffer.array.any()
    engine.release(buffer)
    engine.close()


def test_batches_of_ten_two_ten_show_nothing_stale(rig: Rig) -> None:
    engine = rig.load(classifier())
    lane, buffers = engine.open_lane(), [engine.allocate(10), engine.allocate(10)]
    for seed, count in enumerate([10, 2, 10, 10, 10, 1, 7, 10, 3, 3, 3]):
        buffer = buffers[seed % 2]
        expected = fill(buffer.array, seed, count)
        result = run(lane, buffer, count)["y"]
        assert result.shape == (count, 3)
        np.testing.assert_allclose(result, expected, rtol=1e-5)
    engine.close()
    for buffer in buffers:
        engine.release(buffer)


def test_the_same_batch_again_and_again_is_read_anew(rig: Rig) -> None:
    """What a captured graph, or an address that was set once, could get wrong."""
    engine = rig.load(classifier())
    lane, buffers = engine.open_lane(), [engine.allocate(2) for _ in range(3)]
    for seed in range(12):
        buffer = buffers[seed % 3 if seed > 5 else 0]
        expected = fill(buffer.array, seed, 2)
        np.testing.assert_allclose(run(lane, buffer, 2)["y"], expected, rtol=1e-5)
    for buffer in buffers:
        engine.release(buffer)
    engine.close()


def test_outputs_go_by_name(rig: Rig) -> None:
    for _ in range(4):
        engine = rig.load(many_outputs(), layout="efficientnms")
        lane, buffer = engine.open_lane(), engine.allocate(2)
        buffer.array[:] = np.random.default_rng(5).uniform(0, 255, buffer.array.shape)
        results = run(lane, buffer, 2)
        pictures = buffer.array
        assert set(results) == {"num_dets", "det_boxes", "det_scores", "det_classes"}
        np.testing.assert_array_equal(results["det_scores"], pictures.max(axis=(2, 3)))
        np.testing.assert_array_equal(results["det_classes"], pictures.min(axis=(2, 3)))
        np.testing.assert_array_equal(results["num_dets"], [[0.0], [0.0]])
        boxes = np.repeat(pictures.mean(axis=(2, 3))[:, :, None], 4, axis=2)
        np.testing.assert_allclose(results["det_boxes"], boxes, rtol=1e-4)
        engine.release(buffer)
        engine.close()


@pytest.mark.parametrize("rig", [pytest.param(kind, id=kind.name) for kind in KINDS], indirect=True)
def test_two_lanes_interleaved(rig: Rig) -> None:
    engine = rig.load(classifier())
    lanes, buffers = [engine.open_lane(), engine.open_lane()], [engine.allocate(3), engine.allocate(3)]
    for turn in range(8):
        expected = [fill(buffer.array, 10 * turn + place, 3 - place) for place, buffer in enumerate(buffers)]
        for lane, buffer, each in zip(lanes, buffers, expected, strict=True):
            lane.submit(buffer, len(each))
        order = [0, 1] if turn % 2 else [1, 0]
        for place in order:
            np.testing.assert_allclose(lanes[place].collect()["y"], expected[place], rtol=1e-5)
    for buffer in buffers:
        engine.release(buffer)
    engine.close()


def test_results_stay_until_the_lanes_next_run(rig: Rig) -> None:
    engine = rig.load(classifier())
    lane, other, buffer = engine.open_lane(), engine.open_lane(), engine.allocate(2)
    expected = fill(buffer.array, 1, 2)
    kept = run(lane, buffer, 2)["y"]
    fill(buffer.array, 2, 2)
    run(other, buffer, 2)
    np.testing.assert_allclose(kept, expected, rtol=1e-5)
    engine.release(buffer)
    engine.close()
    np.testing.assert_allclose(kept, expected, rtol=1e-5)  # and their memory as long as somebody looks at it
    del kept


def test_lanes_on_threads(rig: Rig) -> None:
    engine = rig.load(classifier())
    wrong: list[str] = []

    def work(lane: Lane, buffer: InputBuffer, seed: int) -> None:
        for turn in range(25):
            expected = fill(buffer.array, seed * 1000 + turn, 1 + turn % 3)
            if not np.allclose(run(lane, buffer, len(expected))["y"], expected, rtol=1e-5):
                wrong.append(f"{seed}/{turn}")

    buffers = [engine.allocate(3) for _ in range(3)]
    threads = [
        threading.Thread(target=work, args=(engine.open_lane(), buffer, seed)) for seed, buffer in enumerate(buffers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert wrong == []
    for buffer in buffers:
        engine.release(buffer)
    engine.close()


def test_buffers_are_given_back(rig: Rig) -> None:
    engine = rig.load(classifier())
    lane = engine.open_lane()
    before = rig.machine.live()
    for seed in range(40):
        buffer = engine.allocate(1)
        expected = fill(buffer.array, seed, 1)
        np.testing.assert_allclose(run(lane, buffer, 1)["y"], expected, rtol=1e-5)
        engine.release(buffer)
        del buffer
    run_off(rig)
    after = rig.machine.live()
    assert after.get("host", 0) <= before.get("host", 0) + 1  # the outputs' own, made by the first run
    engine.close()


def run_off(rig: Rig) -> None:
    """Let the owner do what it was asked to."""
    if rig.owner is not None:
        rig.owner.call(lambda: None)


def test_a_buffer_that_somebody_still_writes_into(rig: Rig) -> None:
    """A writer may be late: the memory is there until it lets go, whatever became of buffer and engine."""
    engine = rig.load(classifier())
    buffer = engine.allocate(2)
    place = buffer.array[1]
    engine.release(buffer)
    engine.close()
    place[:] = 7.0
    assert (place == 7.0).all()
    del place, buffer


def test_a_fixed_batch(rig: Rig) -> None:
    engine = rig.load(classifier(shape=(4, 3, SIDE, SIDE), outputs=[("y", (4, 3))]), batches=(4,))
    assert engine.allowed_batches == (4,)
    assert dict(engine.info.output_shapes) == {"y": (1, 3)}
    lane, buffer = engine.open_lane(), engine.allocate(4)
    for seed in range(4):
        expected = fill(buffer.array, seed, 4)
        np.testing.assert_allclose(run(lane, buffer, 4)["y"], expected, rtol=1e-5)
    with pytest.raises(EngineError, match="batches of 4") as caught:
        lane.submit(buffer, 1)
    assert caught.value.code == "batch"
    engine.release(buffer)
    engine.close()


def test_a_partial_batch_is_padded_and_cut(rig: Rig) -> None:
    """As the pipeline does where an engine takes certain sizes only: the padding is never seen (cases 11 and 13)."""
    engine = rig.load(classifier(), batches=(1, 4, 8))
    sizes = engine.allowed_batches or (1, 4, 8)
    lane, buffer = engine.open_lane(), engine.allocate(8)
    for seed, count in enumerate([1, 3, 8, 2, 5, 1]):
        expected = fill(buffer.array, seed, count)
        size = next(each for each in sizes if each >= count)
        result = run(lane, buffer, size)["y"][:count]
        np.testing.assert_allclose(result, expected, rtol=1e-5)
    if engine.allowed_batches is not None:
        with pytest.raises(EngineError, match="1, 4, 8"):
            lane.submit(buffer, 3)
    engine.release(buffer)
    engine.close()


def test_outputs_whose_shape_depends_on_the_picture(rig: Rig) -> None:
    engine = rig.load(data_dependent(), labels=[str(n) for n in range(128)])
    lane, other, buffer = engine.open_lane(), engine.open_lane(), engine.allocate(2)
    for largest in (5, 128, 9, 9, 300, 3, 200):
        buffer.array[:] = largest
        result = run(lane, buffer, 2)["y"]
        assert result.shape == (2, largest)
        assert (result == largest).all()
        np.testing.assert_array_equal(run(other, buffer, 1)["y"], result[:1])
    engine.release(buffer)
    engine.close()


def test_calls_out_of_order(rig: Rig) -> None:
    engine = rig.load(classifier())
    lane, buffer = engine.open_lane(), engine.allocate(2)
    with pytest.raises(EngineError, match="nothing was submitted"):
        lane.collect()
    for count in (0, 3, -1):
        with pytest.raises(EngineError, match="cannot be run"):
            lane.submit(buffer, count)
    with pytest.raises(EngineError, match="not one of this engine's"):
        lane.submit(InputBuffer(0, np.zeros((1, 3, 8, 8), np.float32)), 1)
    with pytest.raises(EngineError, match="cannot be made"):
        engine.allocate(0)
    lane.submit(buffer, 1)
    with pytest.raises(EngineError, match="second run"):
        lane.submit(buffer, 1)
    lane.collect()
    engine.close()
    engine.close()
    for call in (lambda: lane.submit(buffer, 1), engine.open_lane, lambda: engine.allocate(1)):
        with pytest.raises(EngineError, match="closed") as caught:
            call()
        assert caught.value.code == "engine_closed"
    engine.release(buffer)


@pytest.mark.parametrize("rig", kinds(*TENSORRT), indirect=True)
def test_a_buffer_that_was_given_back_is_not_run(rig: Rig) -> None:
    engine = rig.load(classifier())
    lane, buffer = engine.open_lane(), engine.allocate(2)
    run(lane, buffer, 2)
    engine.release(buffer)
    with pytest.raises(EngineError) as caught:
        lane.submit(buffer, 1)
    assert caught.value.code == "buffer"
    engine.close()


@pytest.mark.parametrize("state", ["unused", "submitted", "collected", "running", "stopped"])
def test_closing_in_every_state(rig: Rig, state: str) -> None:
    engine = rig.load(classifier())
    if state == "unused":
        engine.close()
        return
    lanes, buffer = [engine.open_lane(), engine.open_lane()], engine.allocate(2)
    expected = fill(buffer.array, 3, 2)
    for lane in lanes:
        run(lane, buffer, 2)
    if state == "submitted":
        for lane in lanes:
            lane.submit(buffer, 2)
        engine.close()  # what runs on the GPU ends first
        assert [outcome(lane, expected) for lane in lanes] == ["right" if rig.is_tensorrt else "engine_closed"] * 2
    elif state == "running":
        codes: list[str] = []
        threads = [threading.Thread(target=forever, args=(lane, buffer, expected, codes)) for lane in lanes]
        for thread in threads:
            thread.start()
        engine.close()
        for thread in threads:
            thread.join(20)
        assert codes == ["engine_closed"] * 2
    elif state == "stopped":  # nobody closed the engine: the owner does, before it ends
        engine.release(buffer)
        rig.stop()
        engine.close()
        return
    engine.close()
    engine.release(buffer)


def outcome(lane: Lane, expected: np.ndarray[Any, Any]) -> str:
    """What became of a run that was submitted."""
    try:
        result = lane.collect()["y"]
    except EngineError as error:
        return error.code
    return "right" if np.allclose(result, expected, rtol=1e-5) else "wrong"


def forever(lane: Lane, buffer: InputBuffer, expected: np.ndarray[Any, Any], codes: list[str]) -> None:
    """Run until it fails, and say how."""
    became = "right"
    try:
        while became == "right":
            lane.submit(buffer, 2)
            became = outcome(lane, expected)
    except EngineError as error:
        became = error.code
    codes.append(became)


def uint8_input() -> bytes:
    nodes = [
        node("Cast", ["x"], ["f"], to=TensorProto.FLOAT),
        node("ReduceMean", ["f"], ["y"], axes=[2, 3], keepdims=0),
    ]
    return graph(nodes, kind=TensorProto.UINT8)


REFUSED: dict[str, tuple[bytes, dict[str, Any], str, str]] = {
    "nan": (nan_classifier(), {}, "non_finite", "NaN"),
    "size": (classifier(shape=("b", 3, 64, 64)), {"size": (32, 32)}, "input_mismatch", "64"),
    "dtype": (uint8_input(), {}, "input_mismatch", "float32"),
    "batch axis": (
        graph([node("ReduceMean", ["x"], ["y"], axes=[0, 2, 3], keepdims=0)], outputs=[("y", (3,))]),
        {},
        "output_mismatch",
        "batch",
    ),
    "layout": (classifier(), {"layout": "yolox"}, "layout_mismatch", ""),
    "labels": (classifier(), {"labels": ["one", "two"]}, "layout_mismatch", ""),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_a_load_that_fails_leaves_nothing(rig: Rig, fault: str) -> None:
    model, options, code, words = REFUSED[fault]
    before = rig.machine.live()
    for _ in range(3):
        with pytest.raises((BundleError, EngineError)) as caught:
            rig.load(model, batches=(2, 3), **options)
        error = caught.value
        assert (error.code, words in str(error), bool(error.where), bool(error.remedy)) == (code, True, True, True)
        del caught, error
    run_off(rig)
    assert rig.machine.live() == before
    rig.machine.check()


@pytest.mark.parametrize("rig", kinds(*TENSORRT), indirect=True)
def test_answers_are_those_of_onnx_runtime(rig: Rig) -> None:
    bundle = load_bundle(ROOT / "engines" / "centernet")
    reference = Rig(Kind("onnxruntime"), rig.root).load_bundle(bundle, "fp32-320")
    engine = rig.load_bundle(bundle, "fp32-320", batches=(1, 2))
    results = []
    for each in (reference, engine):
        lane, buffer = each.open_lane(), each.allocate(2)
        fill(buffer.array, 9, 2)
        results.append({name: value.copy() for name, value in run(lane, buffer, 2).items()})
        each.release(buffer)
        each.close()
    assert set(results[0]) == set(results[1])
    for name, value in results[0].items():
        np.testing.assert_allclose(results[1][name], value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pixel", ["bgr24", "rgba", "nv12"])
def test_bytes_of_a_picture(rig: Rig, pixel: Pixel) -> None:
    """Variants with preprocessing in the graph: batches of all sizes, with rubbish in the places behind."""
    spec = InputSpec(SIDE, SIDE, resize="stretch", scale=0.5, mean=(1.0, 2.0, 3.0), std=(2.0, 1.0, 4.0), pixel=pixel)
    table = {"scale": 0.5, "mean": [1.0, 2.0, 3.0], "std": [2.0, 1.0, 4.0]}
    engine = rig.load(fuse_graph(classifier(), spec, "tiny"), input=table, variant={"pixel": pixel})
    assert engine.info.input == spec
    assert dict(engine.info.output_shapes) == {"y": (1, 3)}
    lanes, buffers = [engine.open_lane(), engine.open_lane()], [engine.allocate(10), engine.allocate(10)]
    for buffer in buffers:
        assert buffer.array.shape == (10, *spec.shape)
        assert buffer.array.dtype == np.uint8
        assert not buffer.array.any()
    for seed, count in enumerate([10, 2, 10, 1, 1, 1, 7]):
        buffer, lane = buffers[seed % 2], lanes[seed % 3 % 2]
        buffer.array[:] = np.random.default_rng(seed).integers(0, 256, buffer.array.shape, np.uint8)
        wanted = [normalised(place, spec).mean(axis=(1, 2), dtype=np.float64) for place in buffer.array[:count]]
        np.testing.assert_allclose(run(lane, buffer, count)["y"], wanted, rtol=1e-4, atol=1e-3)
    for buffer in buffers:
        engine.release(buffer)
    engine.close()


@pytest.mark.parametrize(
    ("made", "declared", "words"),
    [("nv12", "rgba", "4]"), ("rgba", "bgr24", "3]"), ("rgba", "float32", "FLOAT|float32")],
)
def test_bytes_of_another_kind_are_refused(rig: Rig, made: Pixel, declared: Pixel, words: str) -> None:
    model = fuse_graph(classifier(), InputSpec(SIDE, SIDE, resize="stretch", pixel=made), "tiny")
    with pytest.raises(BundleError) as caught:
        rig.load(model, variant={"pixel": declared})
    assert caught.value.code == "input_mismatch"
    assert re.search(words, str(caught.value))
    assert caught.value.remedy
    del caught


def reload(rig: Rig, times: int) -> None:
    bundle = rig.bundle(classifier())
    seen = []
    for seed in range(times):
        engine = rig.load_bundle(bundle)
        lanes, buffer = [engine.open_lane(), engine.open_lane()], engine.allocate(4)
        for lane in lanes:
            expected = fill(buffer.array, seed, 4)
            np.testing.assert_allclose(run(lane, buffer, 4)["y"], expected, rtol=1e-5)
        engine.close()
        engine.release(buffer)
        del engine, lanes, buffer, lane
        run_off(rig)
        seen.append((rig.machine.used_bytes(), tuple(sorted(rig.machine.live().items()))))
    assert len(set(seen)) == 1, seen


def test_ten_reloads_leave_nothing(rig: Rig) -> None:
    reload(rig, 10)


@pytest.mark.full
def test_two_hundred_reloads_leave_nothing(rig: Rig) -> None:
    reload(rig, 200)
