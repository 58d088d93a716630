"""The ONNX Runtime engine: right answers for every batch, plain refusals, memory that stays."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from onnx import TensorProto, helper

from edge_runtime.engine.bundle import load_bundle
from edge_runtime.engine.onnxrt import OnnxRuntimeEngine, load_engine
from edge_runtime.engine.protocol import Engine, InputBuffer, Lane
from edge_runtime.errors import BundleError, EngineError
from tests.conftest import ROOT
from tests.engine.graphs import SIDE, classifier, data_dependent, graph, nan_classifier, node, write_bundle


def engine_of(tmp_path: Path, model: bytes, **options: Any) -> OnnxRuntimeEngine:
    return load_engine(load_bundle(write_bundle(tmp_path / "bundle", model, **options)))


def refused(tmp_path: Path, model: bytes, **options: Any) -> BundleError:
    with pytest.raises(BundleError) as caught:
        engine_of(tmp_path, model, **options)
    assert caught.value.where is not None
    assert caught.value.where.endswith("model.onnx")
    assert caught.value.remedy
    return caught.value


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[OnnxRuntimeEngine]:
    made = engine_of(tmp_path, classifier())
    yield made
    made.close()


def fill(buffer: InputBuffer, seed: int, count: int) -> np.ndarray[Any, Any]:
    """Random pictures in the first places, poison in the others; returns what each place has to give."""
    buffer.array[:] = np.nan
    buffer.array[:count] = np.random.default_rng(seed).uniform(0, 255, buffer.array[:count].shape)
    return np.asarray(buffer.array[:count].astype(np.float64).mean(axis=(2, 3)))


def test_implements_the_contract(engine: OnnxRuntimeEngine) -> None:
    plain: Engine = engine
    lane: Lane = plain.open_lane()
    buffer = plain.allocate(4)
    assert buffer.array.shape == (4, 3, SIDE, SIDE)
    assert buffer.array.dtype == np.float32
    assert buffer.array.ctypes.data % 64 == 0
    assert plain.allowed_batches is None
    assert plain.info.output_shapes == {"y": (1, 3)}
    assert (plain.info.backend, plain.info.variant, plain.info.precision) == ("onnxruntime", "fp32", "fp32")
    assert plain.info.digest.startswith("sha256:")
    expected = fill(buffer, 1, 2)
    lane.submit(buffer, 2)
    np.testing.assert_allclose(lane.collect()["y"], expected, rtol=1e-5)
    plain.release(buffer)


def test_batches_of_ten_two_ten_show_nothing_stale(engine: OnnxRuntimeEngine) -> None:
    lane, buffers = engine.open_lane(), [engine.allocate(10), engine.allocate(10)]
    for seed, count in enumerate([10, 2, 10, 1, 7, 10, 3]):
        buffer = buffers[seed % 2]
        expected = fill(buffer, seed, count)
        lane.submit(buffer, count)
        result = lane.collect()["y"]
        assert result.shape == (count, 3)
        np.testing.assert_allclose(result, expected, rtol=1e-5)


def test_nothing_is_allocated_for_a_frame(engine: OnnxRuntimeEngine) -> None:
    lane, buffer = engine.open_lane(), engine.allocate(2)
    addresses = set()
    for _ in range(5):
        lane.submit(buffer, 2)
        addresses.add(lane.collect()["y"].ctypes.data)
    assert len(addresses) == 1


def test_released_buffers_are_forgotten(engine: OnnxRuntimeEngine) -> None:
    lane = engine.open_lane()
    for seed in range(100):
        buffer = engine.allocate(1)
        expected = fill(buffer, seed, 1)
        lane.submit(buffer, 1)
        np.testing.assert_allclose(lane.collect()["y"], expected, rtol=1e-5)
        engine.release(buffer)
    assert not lane._bound


def test_a_fixed_batch(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, classifier(shape=(4, 3, SIDE, SIDE), outputs=[("y", (4, 3))]))
    assert engine.allowed_batches == (4,)
    assert engine.info.output_shapes == {"y": (1, 3)}
    lane, buffer = engine.open_lane(), engine.allocate(4)
    expected = fill(buffer, 1, 4)
    lane.submit(buffer, 4)
    np.testing.assert_allclose(lane.collect()["y"], expected, rtol=1e-5)
    with pytest.raises(EngineError, match="batches of 4"):
        lane.submit(buffer, 1)


def test_outputs_whose_shape_depends_on_the_picture(tmp_path: Path) -> None:
    # The warm-up's grey gives 128 values.
    engine = engine_of(tmp_path, data_dependent(), labels=[str(n) for n in range(128)])
    lane, buffer = engine.open_lane(), engine.allocate(2)
    for largest in (5, 128, 9, 9, 3):
        buffer.array[:] = largest
        lane.submit(buffer, 2)
        assert lane.collect()["y"].shape == (2, largest)
    assert not engine.outputs_fixed


def test_concurrent_lanes(engine: OnnxRuntimeEngine) -> None:
    wrong: list[str] = []

    def run(lane: Lane, buffer: InputBuffer, seed: int) -> None:
        for turn in range(50):
            expected = fill(buffer, seed * 1000 + turn, 1 + turn % 3)
            lane.submit(buffer, len(expected))
            if not np.allclose(lane.collect()["y"], expected, rtol=1e-5):
                wrong.append(f"{seed}/{turn}")

    threads = [
        threading.Thread(target=run, args=(engine.open_lane(), engine.allocate(3), seed), name=f"lane-{seed}")
        for seed in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong


def test_calls_out_of_order(engine: OnnxRuntimeEngine) -> None:
    lane, buffer = engine.open_lane(), engine.allocate(2)
    with pytest.raises(EngineError, match="nothing was submitted"):
        lane.collect()
    for count in (0, 3, -1):
        with pytest.raises(EngineError, match="cannot be run"):
            lane.submit(buffer, count)
    foreign = InputBuffer(0, np.zeros((1, 3, 8, 8), np.float32))
    with pytest.raises(EngineError, match="not one of this engine's"):
        lane.submit(foreign, 1)
    lane.submit(buffer, 1)
    with pytest.raises(EngineError, match="second run"):
        lane.submit(buffer, 1)
    engine.close()
    engine.close()
    for call in (lane.collect, lambda: lane.submit(buffer, 1), engine.open_lane, lambda: engine.allocate(1)):
        with pytest.raises(EngineError, match="closed"):
            call()
    engine.release(buffer)


def test_closing_under_a_running_lane(tmp_path: Path) -> None:
    for turn in range(5):
        engine = engine_of(tmp_path / str(turn), classifier())
        lane, buffer = engine.open_lane(), engine.allocate(1)
        codes: list[str] = []

        def run(lane: Lane = lane, buffer: InputBuffer = buffer, codes: list[str] = codes) -> None:
            try:
                while True:
                    lane.submit(buffer, 1)
                    lane.collect()
            except EngineError as error:
                codes.append(error.code)

        thread = threading.Thread(target=run)
        thread.start()
        engine.close()
        thread.join(10)
        assert codes == ["engine_closed"]


def test_foreign_files(tmp_path: Path) -> None:
    for number, (data, words) in enumerate(
        [
            (b"\xff\xd8\xff\xe0 a picture", "a JPEG picture"),
            (b"<!DOCTYPE html><html>Sign in</html>", "a web page"),
            (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
            (b"PK\x03\x04 archive/data.pkl", "zip archive"),
            (b"ftrt a plan", "TensorRT plan"),
            (bytes(5000), "only zeros"),
            (classifier()[:-20], "damaged, cut off"),
            (b"just some words that are no model", "damaged, cut off"),
        ]
    ):
        error = refused(tmp_path / str(number), data)
        assert error.code == "model_invalid"
        assert words in str(error)


def external_model() -> bytes:
    weight = helper.make_tensor("w", TensorProto.FLOAT, [1], [1.0])
    weight.ClearField("float_data")
    weight.data_location = TensorProto.EXTERNAL
    entry = weight.external_data.add()
    entry.key, entry.value = "location", "w.bin"
    nodes = [node("ReduceMean", ["x"], ["m"], axes=[2, 3], keepdims=0), node("Mul", ["m", "w"], ["y"])]
    return graph(nodes, initializers={"w": weight})


def test_external_data_is_refused_even_where_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert refused(tmp_path, external_model()).code == "model_external_data"
    np.ones(1, np.float32).tofile(tmp_path / "w.bin")
    np.ones(1, np.float32).tofile(tmp_path / "bundle" / "w.bin")
    error = refused(tmp_path, external_model())
    assert error.code == "model_external_data"
    assert "prepare import" in str(error.remedy)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (classifier(opset=99), "ONNX opset 99"),
        (classifier(ir=99), "ONNX IR version 99"),
        (graph([node("Frobnicate", ["x"], ["y"])]), "the operator Frobnicate"),
        (graph([node("NMS_TRT", ["x"], ["y"], domain="trt")], domains=["trt"]), "the operator trt:NMS_TRT"),
    ],
    ids=["opset", "ir", "operator", "domain"],
)
def test_unsupported_models(tmp_path: Path, model: bytes, words: str) -> None:
    error = refused(tmp_path, model)
    assert error.code == "model_unsupported"
    assert words in str(error)


def second_input() -> bytes:
    size = helper.make_tensor_value_info("im_size", TensorProto.FLOAT, [1, 2])
    return classifier(more_inputs=[size])


@pytest.mark.parametrize(
    ("model", "size", "words"),
    [
        (second_input(), (32, 32), "has 2 inputs (x float32 [batch, 3, 32, 32], im_size float32 [1, 2])"),
        (graph([node("Identity", ["x"], ["y"])], shape=("b", 3), outputs=[("y", ("b", 3))]), (32, 32), "2 axes"),
        (classifier(shape=("b", 1, 32, 32)), (32, 32), "1 channels"),
        (classifier(shape=("b", 32, 32, 3)), (32, 32), "NHWC"),
        (classifier(shape=("b", 3, 416, 416)), (512, 512), "size = [416, 416]"),
        (
            graph(
                [
                    node("Cast", ["x"], ["f"], to=TensorProto.FLOAT),
                    node("ReduceMean", ["f"], ["y"], axes=[2, 3], keepdims=0),
                ],
                kind=TensorProto.UINT8,
            ),
            (32, 32),
            "x uint8 [batch, 3, 32, 32]",
        ),
    ],
    ids=["inputs", "rank", "channels", "nhwc", "size", "dtype"],
)
def test_inputs_that_do_not_fit(tmp_path: Path, model: bytes, size: tuple[int, int], words: str) -> None:
    error = refused(tmp_path, model, size=size)
    assert error.code == "input_mismatch"
    assert words in str(error)


def test_a_size_that_the_network_cannot_take(tmp_path: Path) -> None:
    model = (ROOT / "engines" / "centernet" / "model.onnx").read_bytes()
    error = refused(tmp_path, model, layout="centernet", size=(500, 500), labels=[str(n) for n in range(80)])
    assert error.code == "input_mismatch"
    assert "picture of 500x500" in error.message
    assert "480x480 or 512x512" in str(error.remedy)


def test_nan_is_refused_at_warm_up(tmp_path: Path) -> None:
    error = refused(tmp_path, nan_classifier())
    assert error.code == "non_finite"
    assert "NaN" in error.message


def test_an_output_without_a_batch_axis_is_refused(tmp_path: Path) -> None:
    model = graph([node("ReduceMean", ["x"], ["y"], axes=[0, 2, 3], keepdims=0)], outputs=[("y", (3,))])
    assert refused(tmp_path, model).code == "output_mismatch"


def test_a_layout_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    assert refused(tmp_path, classifier(), layout="yolox").code == "layout_mismatch"
    assert refused(tmp_path, classifier(), labels=["one", "two"]).code == "layout_mismatch"


def test_real_batches_equal_single_runs() -> None:
    engine = load_engine(load_bundle(ROOT / "engines" / "centernet"), "fp32-320")
    lane, buffer, single = engine.open_lane(), engine.allocate(3), engine.allocate(1)
    fill(buffer, 3, 3)
    alone = []
    for place in range(3):
        single.array[0] = buffer.array[place]
        lane.submit(single, 1)
        alone.append({name: value[0].copy() for name, value in lane.collect().items()})
    for count in (3, 1, 2, 3):
        lane.submit(buffer, count)
        outputs = lane.collect()
        for place in range(count):
            for name, value in outputs.items():
                np.testing.assert_allclose(value[place], alone[place][name], rtol=1e-3, atol=1e-3)
    engine.close()


def test_loading_and_closing_leaves_nothing_behind() -> None:
    bundle = load_bundle(ROOT / "engines" / "centernet")
    sizes = []
    for _ in range(25):
        engine = load_engine(bundle, "fp32-320")
        lane, buffer = engine.open_lane(), engine.allocate(1)
        lane.submit(buffer, 1)
        lane.collect()
        engine.close()
        del lane, buffer, engine
        sizes.append(psutil.Process().memory_info().rss / 2**20)
    assert max(sizes[15:]) - max(sizes[3:8]) < 8, sizes


def test_nothing_is_collected_for_the_makers_of_the_library(tmp_path: Path) -> None:
    """1.32 writes .ses and a database of its own as soon as it is imported."""
    folders = {name: tmp_path / name.lower() for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME")}
    for folder in folders.values():
        folder.mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    program = (
        "import sys; from pathlib import Path; from edge_runtime.engine.bundle import load_bundle; "
        "from edge_runtime.engine.onnxrt import load_engine; load_engine(load_bundle(Path(sys.argv[1]))).close()"
    )
    bundle = write_bundle(tmp_path / "tiny", classifier())
    subprocess.run(
        [sys.executable, "-c", program, str(bundle)],
        env=environment | {name: str(folder) for name, folder in folders.items()},
        check=True,
        timeout=60,
    )
    assert [path for folder in folders.values() for path in folder.rglob("*")] == []
