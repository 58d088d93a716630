"""`prepare half`: a bundle with FP16 for TensorRT, or a refusal with numbers and nothing on disk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from edge_runtime.app.evaluate import read_image
from edge_runtime.app.halving import calibration_pictures
from edge_runtime.bundled import bundled_engine
from edge_runtime.camera.av_pixels import SCALER
from edge_runtime.cli.main import run
from edge_runtime.engine.bundle import Bundle, load_bundle
from edge_runtime.engine.onnxrt import load_engine
from edge_runtime.engine.probe import probe
from edge_runtime.errors import EXIT_DONE, EXIT_REFUSED, EXIT_USAGE, BundleError, EdgeError, RefusedError, UsageError
from edge_runtime.prepare.calibration import Calibration, CalibrationPicture
from edge_runtime.prepare.datasets import open_dataset
from edge_runtime.prepare.half import HalfResult, half_bundle
from edge_runtime.prepare.importer import import_model
from edge_runtime.prepare.png import encode_png
from tests.engine.graphs import classifier, graph, node, write_bundle
from tests.prepare.labelled import LABELS

PICTURES = 40


def colors_model(*, offset: float = 0.0, loud: float = 1.0) -> bytes:
    """Red, green or blue, whichever is the most. `offset` is added to what is compared; `loud`: how much larger than a
    pixel the tensor in the middle is."""
    eye = np.eye(3, dtype=np.float32)
    nodes = [
        node("Conv", ["x", "one"], ["a"], name="quiet"),
        node("Conv", ["a", "loud"], ["b"], name="loud"),
        node("Relu", ["b"], ["c"], name="passes"),
        node("Conv", ["c", "back"], ["d"], name="back"),
        node("GlobalAveragePool", ["d"], ["e"], name="mean"),
        node("Flatten", ["e"], ["f"], name="flat"),
        node("Gemm", ["f", "last", "offset"], ["y"], name="last"),
    ]
    scales = {"one": np.float32(1), "loud": np.float32(loud), "back": np.float32(1 / loud)}
    layers = {name: (eye * scale)[..., None, None] for name, scale in scales.items()}
    last = {"last": eye / np.float32(255), "offset": np.full(3, offset, np.float32)}
    return graph(nodes, initializers={**layers, **last})


def noisy(path: Path, index: int, spread: int = 40) -> Path:
    """A picture that is a little more of one colour than of the others."""
    rng = np.random.default_rng(index)
    pixels = np.clip(rng.normal(110, spread, (24, 24, 3)), 0, 255)
    pixels[..., index % 3] += 25
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode_png(np.clip(pixels, 0, 255).astype(np.uint8)))
    return path


@pytest.fixture(scope="module")
def street(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures to calibrate with."""
    root = tmp_path_factory.mktemp("calibration") / "street"
    for index in range(PICTURES):
        noisy(root / f"{index:02d}.png", index)
    return root


@pytest.fixture(scope="module")
def colors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Labelled pictures, others than those."""
    root = tmp_path_factory.mktemp("labelled") / "colors"
    for index in range(300):
        noisy(root / LABELS[index % 3] / f"{index:03d}.png", 3000 + index)
    return root


def bundle_of(root: Path, model: bytes, **tables: Any) -> Bundle:
    return load_bundle(write_bundle(root, model, **tables))


def halved(bundle: Bundle, out_dir: Path, street: Path, colors: Path | None = None, **options: Any) -> HalfResult:
    dataset = None
    if colors is not None:
        dataset, _ = open_dataset(colors, bundle.labels, "classify", read_image=read_image)
    return half_bundle(
        bundle,
        out_dir,
        pictures=calibration_pictures([str(street)]),
        read_image=read_image,
        scaler=SCALER,
        dataset=dataset,
        **{"resamples": 200, **options},
    )


def test_a_bundle_with_fp16(tmp_path: Path, street: Path, colors: Path) -> None:
    source = bundle_of(tmp_path / "tiny", colors_model(), bundle={"licence": "CC0-1.0", "version": "7"})
    result = halved(source, tmp_path / "out", street, colors, max_loss=0.02)
    bundle = load_bundle(tmp_path / "out")
    assert bundle == result.bundle
    assert (bundle.variants, bundle.labels) == (("fp16", "fp32"), LABELS)
    assert (bundle.manifest.bundle, bundle.manifest.input) == (source.manifest.bundle, source.manifest.input)
    assert (bundle.variants_for("tensorrt"), bundle.variants_for("onnxruntime")) == (("fp16",), ("fp32",))
    assert bundle.read_artefact("fp32", "onnxruntime") == source.read_artefact("fp32", "onnxruntime")
    assert bundle.variant("fp32") == source.variant("fp32")
    made = bundle.variant("fp16")
    assert (made.precision, made.size, made.pixel, made.golden) == ("fp16", (32, 32), "float32", None)
    assert any("no golden pictures" in note for note in result.notes)

    (variant,) = result.variants
    assert (variant.name, variant.source, variant.gate.verdict, variant.gate.basis) == (
        "fp16",
        "fp32",
        "accepted",
        "labels",
    )
    assert variant.gate.float_value > 0.9
    assert made.accuracy is not None
    assert (made.accuracy.metric, made.accuracy.images, made.accuracy.backend) == ("top1", 300, "onnxruntime")
    assert made.accuracy.value == pytest.approx(variant.gate.candidate, abs=1e-4)
    assert result.pictures == PICTURES

    model = onnx.load_model_from_string(bundle.read_artefact("fp16", "tensorrt"))
    stored = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    assert stored["one/fp16"] == stored["last/fp16"] == TensorProto.FLOAT16
    ends = [*model.graph.input, *model.graph.output]
    assert {value.type.tensor_type.elem_type for value in ends} == {TensorProto.FLOAT}


def test_the_same_pictures_give_the_same_bundle(tmp_path: Path, street: Path) -> None:
    source = bundle_of(tmp_path / "tiny", colors_model())
    results = [halved(source, tmp_path / name, street, accept="point") for name in ("one", "two")]
    assert results[0].bundle.digest == results[1].bundle.digest
    assert results[0].variants == results[1].variants


def test_one_loud_tensor_stays_in_float_and_the_answers_stay_right(tmp_path: Path, street: Path, colors: Path) -> None:
    source = bundle_of(tmp_path / "tiny", colors_model(loud=2000.0))
    (variant,) = halved(source, tmp_path / "out", street, colors, max_loss=0.02).variants
    reasons = {choice.name: choice.detail for choice in variant.plan.choices.values() if choice.detail is not None}
    assert set(reasons) == {"loud", "passes", "back"}
    assert variant.plan.half
    assert variant.gate.loss == 0.0


def test_golden_outputs_are_those_of_fp16(tmp_path: Path, street: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(colors_model(offset=3000.0))
    (tmp_path / "labels.txt").write_text("\n".join(LABELS))
    shown = [street / "00.png", street / "01.png"]
    source = import_model(
        tmp_path / "m.onnx", tmp_path / "float", labels=tmp_path / "labels.txt", layout="classify", sizes=[(32, 32)],
        pictures=shown, read_image=read_image, scale=1.0, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0), accept=True,
    ).bundle  # fmt: skip
    result = halved(source, tmp_path / "out", street, accept="point", max_loss=1.0)
    bundle = load_bundle(tmp_path / "out")
    assert bundle.variants == ("fp16-32", "fp32-32")
    golden = bundle.variant("fp16-32").golden
    assert golden is not None
    assert (golden.inputs, golden.outputs, golden.tolerance) == ("golden/fp32-32/*.png", "golden/fp16-32.npz", 0.02)
    listed = bundle.manifest.files
    assert listed is not None
    assert {"golden/fp16-32.npz", "golden/fp32-32.npz"} <= set(listed)
    with np.load(tmp_path / "out/golden/fp16-32.npz") as half, np.load(tmp_path / "out/golden/fp32-32.npz") as plain:
        assert half["pictures"].tolist() == plain["pictures"].tolist()
        assert set(half["value/y"].ravel().tolist()) == {3000.0}
        assert np.abs(plain["value/y"] - 3000.4).max() < 0.4
    assert result.variants[0].gate.basis == "agreement"
    assert any("judged without labels" in note for note in result.notes)
    assert any("30 pictures only" in note for note in result.notes)
    assert bundle.variant("fp16-32").accuracy is None


@pytest.mark.full
@pytest.mark.timeout(300)
def test_golden_outputs_hold_for_other_rounding(tmp_path: Path) -> None:
    """ONNX Runtime on the CPU rounds the weights of an FP16 model and little else: a device that rounds otherwise than
    the golden outputs were. Another model is still told from it."""
    source = load_bundle(bundled_engine("centernet"))
    pictures = [*calibration_pictures(["bundled:vtest"], every=40)]
    half_bundle(
        source, tmp_path / "out", pictures=pictures, read_image=read_image, scaler=SCALER, variants=["fp32-320"],
        accept="point", max_loss=0.05, resamples=100,
    )  # fmt: skip
    text = (tmp_path / "out/bundle.toml").read_text()
    for broken in (False, True):
        bundle = _for_onnxruntime(tmp_path / "out", text, broken=broken)
        engine = load_engine(bundle, "fp16-320")
        try:
            if broken:
                with pytest.raises(RefusedError, match="golden check failed"):
                    probe(engine, engine.open_lane(), bundle, "fp16-320", read_image)
            else:
                report = probe(engine, engine.open_lane(), bundle, "fp16-320", read_image)
                assert 0 < report.max_deviation < report.tolerance
                assert report.detections > 0
        finally:
            engine.close()


def _for_onnxruntime(root: Path, text: str, *, broken: bool) -> Bundle:
    """The FP16 variant listed for ONNX Runtime as well; `broken`: with one layer's channels in another order."""
    path = root / "fp16-320.onnx"
    if broken:
        model = onnx.load(path)
        largest = max(model.graph.initializer, key=lambda tensor: len(tensor.raw_data))
        turned = numpy_helper.to_array(largest)[::-1].copy()
        largest.CopyFrom(numpy_helper.from_array(turned, largest.name))
        onnx.save(model, path)
        old = text.partition('fp16-320.onnx", sha256 = "')[2][:64]
        text = text.replace(old, hashlib.sha256(path.read_bytes()).hexdigest())
    start = text.index('name = "fp16-320"')
    line = text[start:].partition("files.tensorrt = ")[2].partition("\n")[0]
    text = f"{text[:start]}files.onnxruntime = {line}\n{text[start:]}"
    (root / "bundle.toml").write_text(text)
    return load_bundle(root)


def test_a_candidate_that_loses_is_refused_and_nothing_is_left(tmp_path: Path, street: Path, colors: Path) -> None:
    """Beside 3000 FP16 has steps of 2, and what is compared differs by less."""
    source = bundle_of(tmp_path / "tiny", colors_model(offset=3000.0))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(RefusedError, match=r"top1 1\.0000 -> 0\.3333, a loss of") as caught:
        halved(source, tmp_path / "out", street, colors)
    assert (caught.value.code, caught.value.exit_code) == ("loses_too_much", EXIT_REFUSED)
    assert sorted(tmp_path.iterdir()) == before


def mean_model() -> bytes:
    return classifier()


@pytest.mark.parametrize(
    ("model", "tables", "code", "words"),
    [
        (mean_model, {}, "nothing_to_gain", "sums over many values"),
        (colors_model, {"variant": {"precision": "fp16"}}, "half_refused", "has no fp32 variant"),
    ],
)
def test_what_cannot_be_fp16(
    tmp_path: Path, street: Path, model: Any, tables: dict[str, Any], code: str, words: str
) -> None:
    with pytest.raises(EdgeError, match=words) as caught:
        halved(bundle_of(tmp_path / "tiny", model(), **tables), tmp_path / "out", street)
    assert caught.value.code == code
    assert not (tmp_path / "out").exists()


def test_a_model_that_is_fp16_already(tmp_path: Path, street: Path) -> None:
    source = bundle_of(tmp_path / "tiny", colors_model())
    halved(source, tmp_path / "out", street, accept="point")
    model = load_bundle(tmp_path / "out").read_artefact("fp16", "tensorrt")
    with pytest.raises(BundleError, match="computes in fp16, and the variant 'fp32' says fp32"):
        halved(bundle_of(tmp_path / "again", model), tmp_path / "other", street)
    with pytest.raises(UsageError, match="has a variant 'fp16' already"):
        halved(load_bundle(tmp_path / "out"), tmp_path / "other", street)


def test_calibration_pictures_are_not_judged_by(tmp_path: Path, colors: Path) -> None:
    source = bundle_of(tmp_path / "tiny", colors_model())
    with pytest.raises(UsageError, match="100 of its 300 pictures were calibrated with") as caught:
        halved(source, tmp_path / "out", colors / "red", colors)
    assert caught.value.code == "not_held_out"


def test_every_fourth_picture_is_held_back(street: Path) -> None:
    calibration = Calibration(calibration_pictures([str(street)]), hold_back=True)
    shown = [picture.name for picture in calibration]
    assert (calibration.shown, len(shown), len(calibration.digests)) == (30, 30, 30)
    data, read = calibration.held_back(load_bundle(bundled_engine("centernet")), read_image)
    assert [sample.path.name for sample in data.samples] == [f"{index:02d}.png" for index in range(3, PICTURES, 4)]
    assert not {sample.name for sample in data.samples} & set(shown)
    assert read(data.samples[0].path).width == 24
    few = Calibration(calibration_pictures([str(street / "00.png")]), hold_back=True)
    assert len(list(few)) == 1
    with pytest.raises(UsageError, match="1 pictures are too few"):
        few.check()


def test_frames_of_a_clip_are_let_go_of() -> None:
    """Those held back stay, up to a bound."""

    def frames() -> Iterator[CalibrationPicture]:
        for index in range(600):
            yield CalibrationPicture(f"clip#{index}", lambda: read_image(Path("never")))

    calibration = Calibration(frames(), hold_back=True)
    assert len(list(calibration)) == 600 - 64


def test_clips_and_pictures(street: Path, tmp_path: Path) -> None:
    found = list(calibration_pictures(["bundled:vtest"], every=200))
    assert [picture.name for picture in found] == [f"bundled:vtest#{index}" for index in (0, 200, 400, 600)]
    assert (found[1].read().width, found[1].sha256) == (768, None)
    one = list(calibration_pictures([str(street / "05.png"), str(street)]))
    assert len(one) == PICTURES + 1
    assert one[0].sha256 == one[6].sha256 == hashlib.sha256((street / "05.png").read_bytes()).hexdigest()
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (tmp_path / "text.mp4").write_text("no clip")
    for name, words in (("empty", "holds no pictures"), ("none", "does not exist"), ("text.mp4", "text.mp4")):
        with pytest.raises(UsageError, match=words):
            list(calibration_pictures([str(tmp_path / name)]))
    with pytest.raises(UsageError) as caught:
        next(calibration_pictures([str(tmp_path / "broken.png")])).read()
    assert caught.value.code == "picture_unreadable"


def command(*arguments: object) -> int:
    return run(["prepare", "half", *map(str, arguments)])


def test_the_command(tmp_path: Path, street: Path, colors: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle_of(tmp_path / "tiny", colors_model(loud=2000.0))
    usual = (tmp_path / "tiny", tmp_path / "out", "--calibrate", street)
    assert command(*usual, "--evaluate", colors, "--max-loss", "0.02", "--resamples", "200", "--json") == EXIT_DONE
    document = json.loads(capsys.readouterr().out)
    assert document["variants"] == ["fp16", "fp32"]
    (made,) = document["made"]
    assert (made["gate"]["passed"], made["gate"]["max_loss"], made["half"]) == (True, 0.02, 3)
    assert {each["name"]: each["operator"] for each in made["float32"]} == {
        "loud": "Conv",
        "passes": "Relu",
        "back": "Conv",
        "mean": "GlobalAveragePool",
    }
    assert command(*usual) == EXIT_USAGE
    assert "is a bundle already" in capsys.readouterr().err
    assert command(*usual, "--overwrite", "--accept", "point") == EXIT_DONE
    out = capsys.readouterr().out
    assert "accepted: top1 against the float model's own answers" in out
    assert "nodes in FP16" in out
    assert "loud (Conv): b reaches" in out
    assert command(*usual, "--overwrite") == EXIT_REFUSED
    assert "not enough data" in capsys.readouterr().err
    assert load_bundle(tmp_path / "out").variants == ("fp16", "fp32")


REAL: Sequence[tuple[str, dict[str, Any], int]] = [
    ("yolox_nano_416", {"layout": "yolox"}, 300),
    ("nanodet_m_320", {"layout": "nanodet"}, 180),
]


@pytest.mark.full
@pytest.mark.assets
@pytest.mark.timeout(900)
def test_the_bundled_detector(tmp_path: Path, assets: Path) -> None:
    """What docs/models.md says of it: at 416 px it loses less than 1 %, with its nine means in float32."""
    out = tmp_path / "out"
    arguments = ["--calibrate", assets / "calib/coco_train128", "--evaluate", assets / "eval/coco_val128"]
    assert command("bundled:centernet", out, *arguments, "--variant", "fp32-416") == EXIT_DONE
    bundle = load_bundle(out)
    accuracy = bundle.variant("fp16-416").accuracy
    assert accuracy is not None
    assert accuracy.value >= 0.303
    before = sum(tensor.ByteSize() for tensor in _tensors(bundle, "fp32-416"))
    assert sum(tensor.ByteSize() for tensor in _tensors(bundle, "fp16-416")) < 0.52 * before


def _tensors(bundle: Bundle, variant: str) -> Any:
    return onnx.load_model_from_string(bundle.read_artefact(variant, "tensorrt")).graph.initializer


@pytest.mark.full
@pytest.mark.assets
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "options", "least"), REAL)
def test_other_detectors(
    tmp_path: Path, assets: Path, name: str, options: dict[str, Any], least: int, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = assets / "models/coco_80_names.txt"
    import_model(assets / "models" / f"{name}.onnx", tmp_path / "float", labels=labels, accept=True, **options)
    arguments = ["--calibrate", assets / "calib/coco_train128", "--evaluate", assets / "eval/coco_val128", "--json"]
    assert command(tmp_path / "float", tmp_path / "out", *arguments) == EXIT_DONE
    (made,) = json.loads(capsys.readouterr().out)["made"]
    assert made["half"] > least
    assert made["gate"]["high"] <= 0.01
