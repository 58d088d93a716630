"""Engines that take the bytes of a picture: their buffers, their refusals, and what became of them everywhere else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto

from edge_runtime.app.models import choose_batch, run_cpu_s
from edge_runtime.app.proof_child import _paint
from edge_runtime.camera.av import decode_image
from edge_runtime.engine.bundle import load_bundle
from edge_runtime.engine.onnxrt import OnnxRuntimeEngine, load_engine
from edge_runtime.engine.protocol import InputBuffer
from edge_runtime.engine.slot import Resident
from edge_runtime.errors import BundleError, EngineError
from edge_runtime.pipeline.cache import ExactCache
from edge_runtime.pipeline.ledger import Ledger
from edge_runtime.prepare.fuse_graph import fuse_graph
from edge_runtime.prepare.png import encode_png
from edge_runtime.records.frames import Float32Array
from edge_runtime.records.spec import InputSpec, Pixel
from edge_runtime.vision.decode import build_decoder
from edge_runtime.vision.geometry import plan
from edge_runtime.vision.pixels import normalised
from tests.engine.graphs import SIDE, classifier, graph, node, write_bundle

PIXELS: list[Pixel] = ["bgr24", "rgba", "nv12"]
INPUT = {"scale": 0.5, "mean": [1.0, 2.0, 3.0], "std": [2.0, 1.0, 4.0]}


def spec_of(pixel: Pixel) -> InputSpec:
    return InputSpec(SIDE, SIDE, resize="stretch", scale=0.5, mean=(1.0, 2.0, 3.0), std=(2.0, 1.0, 4.0), pixel=pixel)


def engine_of(root: Path, pixel: Pixel, batch: object = "batch") -> OnnxRuntimeEngine:
    outputs = [("y", (batch, 3))]
    model = fuse_graph(classifier(shape=(batch, 3, SIDE, SIDE), outputs=outputs), spec_of(pixel), "tiny")
    return load_engine(load_bundle(write_bundle(root / "b", model, input=INPUT, variant={"pixel": pixel})))


def fill(buffer: InputBuffer, spec: InputSpec, seed: int, count: int) -> list[Float32Array]:
    """Noise in the first places, other noise in the rest; what the model has to say to each."""
    buffer.array[:] = np.random.default_rng(seed).integers(0, 256, buffer.array.shape, np.uint8)
    return [
        normalised(place, spec).mean(axis=(1, 2), dtype=np.float64).astype(np.float32) for place in buffer.array[:count]
    ]


@pytest.mark.parametrize("pixel", PIXELS)
def test_batches_of_ten_two_ten_show_nothing_stale(tmp_path: Path, pixel: Pixel) -> None:
    engine = engine_of(tmp_path, pixel)
    spec = engine.info.input
    assert spec == spec_of(pixel)
    lane, buffers = engine.open_lane(), [engine.allocate(10), engine.allocate(10)]
    for buffer in buffers:
        assert buffer.array.shape == (10, *spec.shape)
        assert buffer.array.dtype == np.uint8
        assert buffer.array.ctypes.data % 64 == 0
    for seed, count in enumerate([10, 2, 10, 1, 7, 10, 3]):
        wanted = fill(buffers[seed % 2], spec, seed, count)
        lane.submit(buffers[seed % 2], count)
        np.testing.assert_allclose(lane.collect()["y"], wanted, rtol=1e-4, atol=1e-3)
    engine.close()


@pytest.mark.parametrize("pixel", PIXELS)
def test_a_fixed_batch_stays_fixed(tmp_path: Path, pixel: Pixel) -> None:
    engine = engine_of(tmp_path, pixel, 4)
    assert engine.allowed_batches == (4,)
    lane, buffer = engine.open_lane(), engine.allocate(4)
    wanted = fill(buffer, engine.info.input, 1, 4)
    lane.submit(buffer, 4)
    np.testing.assert_allclose(lane.collect()["y"], wanted, rtol=1e-4, atol=1e-3)
    engine.close()


def test_a_buffer_of_floats_is_refused(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, "bgr24")
    for shape, dtype in (((1, SIDE, SIDE, 3), np.float32), ((1, 3, SIDE, SIDE), np.uint8)):
        with pytest.raises(EngineError, match="not one of this engine's"):
            engine.open_lane().submit(InputBuffer(0, np.zeros(shape, dtype)), 1)
    engine.close()


@pytest.mark.parametrize(
    ("model", "pixel", "words"),
    [
        (classifier(), "bgr24", r"x float32 .*one uint8 input \[batch, 32, 32, 3\] for bgr24"),
        (fuse_graph(classifier(), spec_of("nv12"), "x"), "rgba", r"\[batch, 32, 32, 4\] for rgba"),
        (fuse_graph(classifier(), spec_of("rgba"), "x"), "bgr24", r"\[batch, 32, 32, 3\] for bgr24"),
        (fuse_graph(classifier(), spec_of("rgba"), "x"), "float32", "or say with pixel = "),
        (
            fuse_graph(classifier(), InputSpec(64, 64, pixel="nv12"), "x"),
            "nv12",
            r"takes fused/nv12 uint8 \[batch, 96, 64\]",
        ),
    ],
)
def test_a_model_of_other_pixels_is_refused(tmp_path: Path, model: bytes, pixel: Pixel, words: str) -> None:
    root = write_bundle(tmp_path / "b", model, variant={"pixel": pixel})
    with pytest.raises(BundleError, match=words) as caught:
        load_engine(load_bundle(root))
    assert caught.value.code == "input_mismatch"
    assert caught.value.remedy


def test_the_models_own_bytes_are_no_pixels(tmp_path: Path) -> None:
    model = graph(
        [
            node("Cast", ["x"], ["f"], to=TensorProto.FLOAT),
            node("ReduceMean", ["f"], ["y"], axes=[2, 3], keepdims=0),
        ],
        kind=TensorProto.UINT8,
    )
    with pytest.raises(BundleError, match="for bgr24 is needed"):
        load_engine(load_bundle(write_bundle(tmp_path / "b", model, variant={"pixel": "bgr24"})))


@pytest.mark.parametrize("pixel", PIXELS)
def test_what_is_measured_and_proved_runs_on_bytes(tmp_path: Path, pixel: Pixel) -> None:
    engine = engine_of(tmp_path, pixel)
    info = engine.info
    decoder = build_decoder(info.output, info.input, info.output_shapes)
    resident = Resident(engine, decoder, lanes=1, places=2, buffers=2)
    assert run_cpu_s(resident) > 0
    assert choose_batch(engine, "auto", 4) in (1, 2, 4)
    place = resident.free[0].array[0]
    for picture, level in (("the black picture", 0.0), ("the white picture", 255.0)):
        _paint(place, picture, (0, 0), info.input)
        wanted = (level * 0.5 - np.array([1.0, 2.0, 3.0])) / [2.0, 1.0, 4.0]
        np.testing.assert_allclose(normalised(place, info.input).mean(axis=(1, 2)), wanted, atol=0.02)
    _paint(place, "noise", (0, 0), info.input)
    noise = place.copy()
    _paint(place, "more noise", (0, 0), info.input)
    assert (noise != place).mean() > 0.9
    resident.close()


def test_the_exact_cache_tells_bytes_apart(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, "bgr24")
    info = engine.info
    resident = Resident(
        engine, build_decoder(info.output, info.input, info.output_shapes), lanes=1, places=1, buffers=1
    )
    cache, transform = ExactCache(), plan(SIDE, SIDE, info.input)
    stream = Ledger().open_stream("gate", "tiny", lambda _: None)
    place = resident.free[0].array[0]
    pixels = decode_image(encode_png(np.full((SIDE, SIDE, 3), 90, np.uint8)))
    pixels.write_into(place, info.input)
    first = cache.look(stream, 0, place, transform, resident)
    assert first.memo is not None
    resident.lanes[0].submit(resident.free[0], 1)
    first.memo.keep(resident.decoder(resident.lanes[0].collect(), 0, transform))
    assert cache.look(stream, 1, place, transform, resident).outcome == "hit"
    place[0, 0, 0] ^= 1
    assert cache.look(stream, 2, place, transform, resident).outcome == "miss"
    resident.close()
