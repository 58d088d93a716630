"""The golden check passes for the model that it was made with and fails for any other."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from edge_runtime.camera.av import decode_image
from edge_runtime.engine.bundle import load_bundle
from edge_runtime.engine.onnxrt import load_engine
from edge_runtime.engine.probe import ProbeReport, probe
from edge_runtime.errors import BundleError, RefusedError
from edge_runtime.prepare.importer import import_model
from edge_runtime.prepare.png import encode_png
from edge_runtime.records.frames import Pixels, Transform
from edge_runtime.records.spec import InputSpec
from tests.conftest import ROOT
from tests.engine.graphs import classifier, write_bundle
from tests.vision.chosen_heads import make_head
from tests.vision.test_engine_outputs import answering

SHIPPED = ROOT / "engines" / "centernet"
VARIANT = "fp32-320"


def read_image(path: Path) -> Pixels:
    return decode_image(path.read_bytes())


def run(root: Path, variant: str = VARIANT, reader: Any = read_image) -> ProbeReport:
    bundle = load_bundle(root)
    engine = load_engine(bundle, variant)
    try:
        return probe(engine, engine.open_lane(), bundle, variant, reader)
    finally:
        engine.close()


@pytest.mark.parametrize("variant", ["fp32-512", "fp32-416", "fp32-320"])
def test_the_shipped_bundle_passes(variant: str) -> None:
    report = run(SHIPPED, variant)
    assert report.pictures == 2
    assert report.max_deviation < report.tolerance / 10
    assert report.detections >= 10
    assert set(report.deviations) == {"input", "heatmap", "ltrb"}
    assert "2 golden pictures" in str(report)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SHIPPED, tmp_path / "centernet"))


def relist(root: Path, name: str) -> None:
    """Let the manifest vouch for a changed file."""
    manifest = (root / "bundle.toml").read_text()
    old = hashlib.sha256((SHIPPED / name).read_bytes()).hexdigest()
    new = hashlib.sha256((root / name).read_bytes()).hexdigest()
    (root / "bundle.toml").write_text(manifest.replace(old, new))


def perturb(root: Path, how: str) -> None:
    model = onnx.load(root / "model.onnx")
    weights = [tensor for tensor in model.graph.initializer if len(tensor.dims) == 4 and tensor.data_type == 1]
    tensor = weights[len(weights) // 2]
    values = numpy_helper.to_array(tensor).copy()
    if how == "scaled":
        values *= 1.1
    elif how == "swapped":
        values = values[::-1].copy()
    else:
        values[:] = 0
    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    onnx.save(model, root / "model.onnx")
    relist(root, "model.onnx")


@pytest.mark.parametrize("how", ["scaled", "swapped", "zeroed"])
def test_a_perturbed_model_fails_with_the_numbers(copy: Path, how: str) -> None:
    perturb(copy, how)
    with pytest.raises(RefusedError, match=r"golden check failed: output .* deviates by 0?\.?\d.*0\.02") as caught:
        run(copy)
    assert caught.value.code == "golden_mismatch"


def test_swapped_colours_are_told_from_a_wrong_model(copy: Path) -> None:
    manifest = copy / "bundle.toml"
    manifest.write_text(manifest.read_text().replace('color = "RGB"', 'color = "BGR"'))
    with pytest.raises(RefusedError, match="the preprocessed picture itself deviates"):
        run(copy)


def test_golden_outputs_of_another_size_or_none(copy: Path) -> None:
    shutil.copy(copy / "golden" / "fp32-416.npz", copy / "golden" / "fp32-320.npz")
    relist(copy, "golden/fp32-320.npz")
    with pytest.raises((RefusedError, BundleError)):
        run(copy)
    for damaged in (b"no npz", (SHIPPED / "golden" / "fp32-320.npz").read_bytes()[:5000]):
        shutil.copy(SHIPPED / "bundle.toml", copy / "bundle.toml")
        (copy / "golden" / "fp32-320.npz").write_bytes(damaged)
        relist(copy, "golden/fp32-320.npz")
        with pytest.raises(BundleError) as caught:
            run(copy)
        assert caught.value.code == "golden_invalid"


class NoisyPixels:
    """A reader whose decoder rounds otherwise: one level up or down."""

    def __init__(self, path: Path) -> None:
        self._inner = read_image(path)
        self.width, self.height = self._inner.width, self._inner.height

    def write_into(self, place: np.ndarray[Any, Any], spec: InputSpec) -> Transform:
        transform = self._inner.write_into(place, spec)
        place += np.random.default_rng(0).choice([-1.0, 0.0, 1.0], place.shape).astype(np.float32)
        return transform

    def to_rgb(self) -> np.ndarray[Any, Any]:
        return self._inner.to_rgb()


def test_rounding_elsewhere_is_tolerated_as_input(copy: Path) -> None:
    try:
        report = run(copy, reader=NoisyPixels)
    except RefusedError as error:
        assert "preprocessed" not in error.message  # noqa: PT017  only the model's own answer may be too far off
    else:
        assert 0 < report.deviations["input"] < 0.02


def test_a_bundle_without_golden_pictures_is_not_checked(tmp_path: Path) -> None:
    report = run(write_bundle(tmp_path / "tiny", classifier()), "fp32")
    assert report.pictures == 0
    assert "not checked" in str(report)


def test_rows_are_compared_by_what_they_mean(tmp_path: Path) -> None:
    """The same detections in another order, and other garbage behind them, are the same answer."""
    head = make_head("efficientnms", 96, 64, resize="stretch")
    for box, score, class_id in [((10, 12, 42, 40), 0.75, 2), ((50, 20, 80, 60), 0.5, 5)]:
        head.plant(box, score, class_id)
    (tmp_path / "said.onnx").write_bytes(answering(head.outputs))
    (tmp_path / "labels.txt").write_text("\n".join(head.output.labels))
    (tmp_path / "white.png").write_bytes(encode_png(np.full((64, 96, 3), 255, np.uint8)))
    bundle = import_model(
        tmp_path / "said.onnx",
        tmp_path / "bundle",
        labels=tmp_path / "labels.txt",
        layout=head.output.layout,
        sizes=[(96, 64)],
        color="RGB",
        resize="stretch",
        scale=1.0,
        mean=(251.0, 251.0, 251.0),  # golden pictures have levels of eight: white is 252, and comes out as 1
        std=(1.0, 1.0, 1.0),
        score_threshold=head.threshold,
        pictures=[tmp_path / "white.png"],
        read_image=read_image,
    ).bundle
    variant = bundle.variants[0]
    assert run(bundle.root, variant).detections == 2
    turned = {}
    for name, array in head.outputs.items():
        rows = array.copy()
        if array.ndim > 1 and array.shape[1] > 2:
            rows[:, :2] = array[:, 1::-1]
            rows[:, 5:] = 77 if rows.dtype.kind == "f" else 3
        turned[name] = rows
    model = answering(turned)
    manifest = (bundle.root / "bundle.toml").read_text()
    old = hashlib.sha256((bundle.root / "model.onnx").read_bytes()).hexdigest()
    (bundle.root / "model.onnx").write_bytes(model)
    (bundle.root / "bundle.toml").write_text(manifest.replace(old, hashlib.sha256(model).hexdigest()))
    assert run(bundle.root, variant).detections == 2
    # and a detection that is missing is missed
    fewer = {name: array.copy() for name, array in head.outputs.items()}
    for name, array in fewer.items():
        if "score" in name:
            array[:, 1] = 0
    broken = answering(fewer)
    (bundle.root / "model.onnx").write_bytes(broken)
    (bundle.root / "bundle.toml").write_text(manifest.replace(old, hashlib.sha256(broken).hexdigest()))
    with pytest.raises(RefusedError) as caught:
        run(bundle.root, variant)
    assert caught.value.code == "golden_mismatch"
