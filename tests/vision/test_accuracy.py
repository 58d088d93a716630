"""The decoders against real models on real images: what they reach, and that it is what they should.

The pictures come in as the daemon's do (PyAV, swscale bilinear), by a few lines of this file's own.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import av.logging
import numpy as np
import pytest
from numpy.typing import NDArray

from edge_runtime.records.frames import Classification, Detections, Float32Array, Transform
from edge_runtime.records.spec import InputSpec, OutputSpec
from edge_runtime.vision.decode import build_decoder, suggest_layout
from edge_runtime.vision.geometry import plan

pytestmark = [pytest.mark.assets, pytest.mark.timeout(300)]


@dataclass(frozen=True)
class Model:
    file: str
    input: InputSpec
    nms_iou: float
    mean_ap: float
    """Least mAP over all 128 images."""
    mean_ap_of_24: float
    """Least mAP over the first 24: a few images read differently, so the floor is this sample's own."""


MODELS = {
    "yolox": Model("yolox_nano_416.onnx", InputSpec(416, 416, "BGR", "letterbox-topleft"), 0.65, 0.335, 0.41),
    "nanodet": Model(
        "nanodet_m_320.onnx",
        InputSpec(320, 320, "BGR", "stretch", mean=(103.53, 116.28, 123.675), std=(57.375, 57.12, 58.395)),
        0.6,
        0.268,
        0.34,
    ),
    "centernet": Model("mb3_centernet.onnx", InputSpec(512, 512), 0.6, 0.333, 0.37),
}
LITE0 = InputSpec(224, 224, resize="crop", mean=(127.0, 127.0, 127.0), std=(128.0, 128.0, 128.0), short_side=256)


def load(path: Path, spec: InputSpec) -> tuple[Float32Array, Transform]:
    """[1, 3, H, W] float32 and where the picture lies in it."""
    av.logging.set_level(None)
    with av.open(str(path)) as container:
        frame = next(container.decode(video=0))
    t = plan(frame.width, frame.height, spec)
    scaled = frame.reformat(t.resized_width, t.resized_height, "gbrp", interpolation="BILINEAR")
    green, blue, red = (
        np.frombuffer(memoryview(plane), np.uint8).reshape(plane.height, plane.line_size)[:, : plane.width]
        for plane in scaled.planes
    )
    canvas = np.full(spec.shape, spec.pad, dtype=np.float32)
    planes = (red, green, blue) if spec.color == "RGB" else (blue, green, red)
    for channel, plane in zip(canvas, planes, strict=True):
        shown = plane[max(-t.top, 0) :, max(-t.left, 0) :][: spec.height, : spec.width]
        channel[max(t.top, 0) :, max(t.left, 0) :][: shown.shape[0], : shown.shape[1]] = shown
    mean, std = (np.array(values, dtype=np.float32).reshape(3, 1, 1) for values in (spec.mean, spec.std))
    return ((canvas * np.float32(spec.scale) - mean) / std)[None], t


class Session:
    """A model on one thread, as a CPU lane runs it."""

    def __init__(self, path: Path) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self._input = self._session.get_inputs()[0].name
        self._outputs = [output.name for output in self._session.get_outputs()]

    def run(self, batch: Float32Array) -> dict[str, NDArray[Any]]:
        return dict(zip(self._outputs, self._session.run(None, {self._input: batch}), strict=True))


def shapes_of(outputs: Mapping[str, NDArray[Any]]) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in outputs.items()}


def mean_ap(truth: Path, image_ids: Sequence[int], results: list[dict[str, object]]) -> float:
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO(str(truth))
        evaluation = COCOeval(coco, coco.loadRes(results), "bbox")
        evaluation.params.imgIds = list(image_ids)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return float(evaluation.stats[0])


def evaluate(assets: Path, layout: str, count: int) -> float:
    model = MODELS[layout]
    session = Session(assets / "models" / model.file)
    labels = tuple((assets / "models/coco_80_names.txt").read_text().splitlines()[:80])
    truth = assets / "eval/coco_val128/instances_val128.json"
    content = json.loads(truth.read_text())
    categories = sorted(category["id"] for category in content["categories"])
    images = content["images"][:count]
    decoder = None
    results: list[dict[str, object]] = []
    for image in images:
        batch, transform = load(assets / "eval/coco_val128/images" / image["file_name"], model.input)
        outputs = session.run(batch)
        if decoder is None:
            shapes = shapes_of(outputs)
            (fit,) = suggest_layout(shapes, model.input.width, model.input.height, classes=80)
            assert fit.layout == layout
            decoder = build_decoder(OutputSpec(fit.layout, labels, 0.01, model.nms_iou), model.input, shapes)
        found = decoder(outputs, 0, transform)
        assert isinstance(found, Detections)
        rows = zip(found.boxes.tolist(), found.scores.tolist(), found.class_ids.tolist(), strict=True)
        for (x1, y1, x2, y2), score, class_id in rows:
            box = [x1, y1, x2 - x1, y2 - y1]
            results.append({"image_id": image["id"], "category_id": categories[class_id], "bbox": box, "score": score})
    return mean_ap(truth, [image["id"] for image in images], results)


@pytest.mark.parametrize("layout", MODELS)
def test_detectors_on_a_sample(assets: Path, layout: str) -> None:
    reached = evaluate(assets, layout, 24)
    print(f"{layout}: mAP {reached:.4f} over 24 images")
    assert reached >= MODELS[layout].mean_ap_of_24


@pytest.mark.full
@pytest.mark.parametrize("layout", MODELS)
def test_detectors_on_all_images(assets: Path, layout: str) -> None:
    reached = evaluate(assets, layout, 128)
    print(f"{layout}: mAP {reached:.4f} over 128 images")
    assert reached >= MODELS[layout].mean_ap


def test_the_classifier(assets: Path) -> None:
    session = Session(assets / "models/efficientnet_lite0.onnx")
    labels = tuple(map(str, range(1000)))
    decoder = build_decoder(OutputSpec("classify", labels), LITE0, {"logits": (1, 1000)})
    first = among_five = count = 0
    for path in sorted((assets / "eval/imagenet_100").glob("*.jpg")):
        batch, transform = load(path, LITE0)
        found = decoder(session.run(batch), 0, transform)
        assert isinstance(found, Classification)
        wanted = int(path.name[:3])
        first += int(found.class_ids[0]) == wanted
        among_five += wanted in found.class_ids.tolist()
        count += 1
    print(f"efficientnet_lite0: top-1 {first}, top-5 {among_five} of {count}")
    assert count == 100
    assert first >= 89
    assert among_five >= 98
