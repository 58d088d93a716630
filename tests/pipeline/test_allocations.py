"""What a frame allocates on its way, once everything runs: no buffer of a picture's size is made per frame."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.app.models import open_bundle
from edge_runtime.bundled import bundled_media
from edge_runtime.camera import av_pixels as av_door
from edge_runtime.camera.open import open_camera
from edge_runtime.camera.options import CameraOptions
from edge_runtime.engine.onnxrt import load_engine
from edge_runtime.records.spec import InputSpec, OutputSpec
from edge_runtime.vision.decode import build_decoder
from edge_runtime.vision.geometry import plan


def peak_of(action: Callable[[], object]) -> int:
    """Most memory that Python and numpy held at once beyond what they held before, bytes."""
    for _ in range(3):
        action()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        action()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def test_no_stage_makes_an_array_of_a_pictures_size() -> None:
    engine = load_engine(open_bundle("bundled:centernet"), "fp32-320")
    info = engine.info
    lane, buffer = engine.open_lane(), engine.allocate(1)
    decoder = build_decoder(info.output, info.input, info.output_shapes)
    camera = open_camera(CameraOptions(name="clip", url=f"file:{bundled_media('vtest')}", pace="max"))
    frame = camera.read()
    assert frame is not None
    assert isinstance(frame.pixels, av_door.AvPixels)
    transform = plan(frame.pixels.width, frame.pixels.height, info.input)
    picture = frame.pixels.frame
    scaled = av_door.scale(picture, info.input, transform)

    def infer() -> object:
        lane.submit(buffer, 1)
        return lane.collect()

    place = buffer.array[0]
    outputs = {name: np.array(array) for name, array in lane_outputs(infer).items()}
    peaks = {
        "scale": peak_of(lambda: av_door.scale(picture, info.input, transform)),
        "convert": peak_of(lambda: av_door.convert(scaled, place, info.input, transform)),
        "infer": peak_of(infer),
        "post": peak_of(lambda: decoder(outputs, 0, transform)),
    }
    camera.stop()
    camera.close()
    engine.close()
    # swscale's own frame comes from libav's pool: PyAV offers no way to give it one of ours
    assert peaks["scale"] < 8_000
    assert peaks["convert"] < 8_000
    assert peaks["infer"] < 8_000
    assert peaks["post"] < 100_000


def lane_outputs(infer: Callable[[], object]) -> dict[str, NDArray[Any]]:
    found = infer()
    assert isinstance(found, dict)
    return found


def test_yolox_too() -> None:
    spec = InputSpec(416, 416, color="BGR", resize="letterbox-topleft")
    labels = tuple(f"c{index}" for index in range(80))
    decoder = build_decoder(OutputSpec("yolox", labels), spec, {"output": (1, 3549, 85)})
    outputs = {"output": np.zeros((1, 3549, 85), np.float32)}
    transform = plan(768, 576, spec)
    assert peak_of(lambda: decoder(outputs, 0, transform)) < 100_000
