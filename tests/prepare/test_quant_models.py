"""INT8 of real models and of one as large as YOLOv8n: what is kept of the answers, on calibration pictures alone.

No held-out picture is opened here, and nothing depends on how fast this machine is.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from edge_runtime.app.evaluate import read_image
from edge_runtime.engine.onnxrt import open_session
from edge_runtime.prepare.quant import Family, QuantPlan
from edge_runtime.prepare.quant_blocks import tail
from edge_runtime.prepare.quant_check import check_symmetric
from edge_runtime.prepare.quant_graph import activations, float_model, operators_of, quantise
from edge_runtime.prepare.quant_imitate import imitate_symmetric
from edge_runtime.prepare.quant_meter import ActivationMeter
from edge_runtime.prepare.quant_probe import Probe
from edge_runtime.prepare.quant_search import search
from edge_runtime.records.spec import InputSpec, OutputSpec
from tests.prepare.regular import yolo_sized

pytestmark = [pytest.mark.full, pytest.mark.assets, pytest.mark.timeout(3600)]
REGULAR = InputSpec(416, 416, "RGB", "letterbox-center", scale=1 / 255)


@dataclass(frozen=True)
class Real:
    """`naive_loses`: the least that everything in INT8 loses on calibration pictures, far more than may be lost."""

    file: str
    spec: InputSpec
    layout: Any
    naive_loses: float
    nms_iou: float = 0.6


MODELS = (
    Real(
        "nanodet_m_320",
        InputSpec(320, 320, "BGR", "stretch", mean=(103.53, 116.28, 123.675), std=(57.375, 57.12, 58.395)),
        "nanodet",
        0.05,
    ),
    Real(
        "efficientnet_lite0",
        InputSpec(224, 224, "RGB", "crop", mean=(127.0,) * 3, std=(128.0,) * 3, short_side=256),
        "classify",
        0.0,
    ),
    Real("mb3_centernet", InputSpec(416, 416, "RGB", "letterbox-center"), "centernet", 0.2),
    Real("yolox_nano_416", InputSpec(416, 416, "BGR", "letterbox-topleft"), "yolox", 0.2, 0.65),
)


@pytest.fixture(scope="module")
def pictures(assets: Path) -> Sequence[Path]:
    return sorted((assets / "calib/coco_train128").glob("*.jpg"))


@pytest.mark.parametrize("family", ["onnxruntime", "tensorrt"])
@pytest.mark.parametrize("real", MODELS, ids=lambda real: real.file)
def test_what_a_search_takes_keeps_the_answers(
    real: Real, family: Family, assets: Path, pictures: Sequence[Path], tmp_path: Path
) -> None:
    labels = _labels(assets, real.layout)
    output = OutputSpec(real.layout, labels, nms_iou=real.nms_iou)
    model = float_model((assets / "models" / f"{real.file}.onnx").read_bytes(), real.file)
    meter = ActivationMeter(model, activations(model), real.file)
    probe = Probe(model.SerializeToString(), real.spec, output, tmp_path, where=real.file)
    for path in pictures[:48]:
        pixels = read_image(path)
        meter.show((pixels,), real.spec)
        probe.show(pixels)
    result = search(
        model, meter, family=family, probe=probe, search_loss=0.03, folder=tmp_path, method="mse", minutes=2.0
    )
    everything = next(point for point in result.points if point.name == "everything")
    assert everything.loss >= real.naive_loses
    assert everything.int8_share > 0.95
    losses = dict(result.sensitivities)
    assert len(losses) > 40
    assert list(losses.values()) == sorted(losses.values(), reverse=True)
    if everything.loss > 0.03:
        # what stays in float brings the answers nearer
        kept = [point for point in result.points if point.int8_share < 0.95]
        assert min(point.loss for point in kept) < everything.loss
        assert result.chosen is None or result.chosen is not everything
    if result.chosen is None:
        assert result.said.startswith("nothing: keep float; ")
        return
    assert result.model is not None
    assert result.chosen.loss <= 0.03
    said = probe.judge(imitate_symmetric(result.model) if family == "tensorrt" else result.model, agreement=True)
    assert said.loss == pytest.approx(result.chosen.loss, abs=1e-9)
    if real.layout == "classify":
        assert said.agreement is not None
        assert said.agreement >= 0.97
    if family == "tensorrt":
        assert check_symmetric(onnx.load_model_from_string(result.model)) == []


@pytest.mark.parametrize("family", ["onnxruntime", "tensorrt"])
def test_a_model_of_regular_convolutions_keeps_20_db(family: Family, pictures: Sequence[Path]) -> None:
    """Everything in INT8 but the decoding, with ranges of 16 pictures; heard on 8 others."""
    model = float_model(yolo_sized().SerializeToString(), "regular")
    meter = ActivationMeter(model, activations(model), "regular")
    meter.show((read_image(path) for path in pictures[:16]), REGULAR)
    ranges = meter.ranges("minmax", symmetric=family == "tensorrt")
    plan = QuantPlan(family, operators_of(family), tail(model), ranges, "minmax", 7 if family == "onnxruntime" else 8)
    made = quantise(model, plan)
    if family == "tensorrt":
        assert check_symmetric(made) == []
    data = made.SerializeToString()
    sessions = [
        open_session(each, "regular")
        for each in (model.SerializeToString(), imitate_symmetric(data) if family == "tensorrt" else data)
    ]
    wanted, found = (
        np.stack([session.run(None, {"images": _input(path)})[0][0] for path in pictures[16:24]])
        for session in sessions
    )
    for rows in (slice(0, 4), slice(4, None)):  # boxes, scores
        noise = np.square(wanted[:, rows] - found[:, rows]).sum()
        assert 10 * np.log10(np.square(wanted[:, rows]).sum() / noise) >= 20


def _input(path: Path) -> NDArray[np.float32]:
    batch = np.zeros((1, *REGULAR.shape), np.float32)
    read_image(path).write_into(batch[0], REGULAR)
    return batch


def _labels(assets: Path, layout: str) -> tuple[str, ...]:
    if layout != "classify":
        return tuple((assets / "models/coco_80_names.txt").read_text().split("\n")[:80])
    names = json.loads((assets / "models/imagenet_1000_names.json").read_text())
    return tuple(names.values() if isinstance(names, dict) else names)
