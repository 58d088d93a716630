"""`prepare import` makes a bundle that loads, says what it assumed, and never leaves half of one."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from edge_runtime.camera.av import decode_image
from edge_runtime.cli import prepare as command
from edge_runtime.engine.bundle import load_bundle
from edge_runtime.engine.onnxrt import load_engine
from edge_runtime.engine.probe import probe
from edge_runtime.errors import BundleError, UsageError
from edge_runtime.prepare import bundle_draft
from edge_runtime.prepare.importer import import_model
from edge_runtime.prepare.manifest_text import manifest_text
from edge_runtime.prepare.png import encode_png
from edge_runtime.records.frames import Pixels
from edge_runtime.toml_source import parse_toml
from tests.engine.graphs import SIDE, classifier, graph, nan_classifier, node

USUAL: dict[str, Any] = {"layout": "classify", "mean": (0.0, 0.0, 0.0), "std": (255.0, 255.0, 255.0)}


def read_image(path: Path) -> Pixels:
    return decode_image(path.read_bytes())


@pytest.fixture
def labels(tmp_path: Path) -> Path:
    path = tmp_path / "labels.txt"
    path.write_text("red\ngreen\nblue\n")
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.onnx"
    path.write_bytes(classifier(shape=("batch", 3, "height", "width")))
    return path


def picture(path: Path, width: int = 64, height: int = 48) -> Path:
    pixels = np.random.default_rng(1).integers(0, 256, (height, width, 3), np.uint8)
    path.write_bytes(encode_png(pixels))
    return path


@pytest.mark.assets
@pytest.mark.parametrize(
    ("file", "layout", "size", "color", "resize"),
    [
        ("yolox_nano_416", "yolox", (416, 416), "BGR", "letterbox-topleft"),
        ("nanodet_m_320", "nanodet", (320, 320), "BGR", "stretch"),
        ("mb3_centernet", "centernet", (416, 416), "RGB", "letterbox-center"),
    ],
)
def test_real_detectors(
    assets: Path, tmp_path: Path, file: str, layout: str, size: tuple[int, int], color: str, resize: str
) -> None:
    path = assets / "models" / f"{file}.onnx"
    result = import_model(
        path,
        tmp_path / "out",
        labels=assets / "models" / "coco_80_names.txt",
        sizes=[size] if layout == "centernet" else [],
        accept=True,
    )
    table = result.bundle.manifest
    assert (table.output.layout, table.input.color, table.input.resize) == (layout, color, resize)
    assert table.variant[0].size == size
    assert load_bundle(tmp_path / "out").digest == result.bundle.digest
    assert (tmp_path / "out" / "model.onnx").read_bytes() == path.read_bytes()
    notes = "\n".join(result.notes)
    assert f"layout = {layout}" in notes
    assert f"color = {color}" in notes
    assert ("batches of 1 only" in notes) == (layout == "nanodet")


@pytest.mark.assets
def test_a_real_classifier_with_golden_pictures(assets: Path, tmp_path: Path) -> None:
    result = import_model(
        assets / "models" / "efficientnet_lite0.onnx",
        tmp_path / "lite0",
        labels=assets / "models" / "imagenet_1000_names.json",
        layout="classify",
        mean=(127.0, 127.0, 127.0),
        std=(128.0, 128.0, 128.0),
        short_side=256,
        pictures=sorted((assets / "eval" / "imagenet_100").glob("*.jpg"))[:2],
        read_image=read_image,
        licence="Apache-2.0",
    )
    bundle = result.bundle
    assert bundle.manifest.bundle.task == "classify"
    assert len(bundle.labels) == 1000
    engine = load_engine(bundle)
    report = probe(engine, engine.open_lane(), bundle, "auto", read_image)
    assert (report.pictures, report.detections) == (2, 2)
    assert report.max_deviation < 1e-4
    engine.close()


def test_sizes_become_variants(model: Path, labels: Path, tmp_path: Path) -> None:
    result = import_model(model, tmp_path / "out", labels=labels, sizes=[(64, 64), (64, 32), (64, 64)], **USUAL)
    assert result.bundle.variants == ("fp32-64", "fp32-64x32")


def test_golden_pictures_scale_nothing(model: Path, labels: Path, tmp_path: Path) -> None:
    result = import_model(
        model,
        tmp_path / "out",
        labels=labels,
        sizes=[(32, 32), (48, 32)],
        pictures=[picture(tmp_path / "a.png"), picture(tmp_path / "b.png", 31, 57)],
        read_image=read_image,
        **USUAL,
    )
    for name in result.bundle.variants:
        spec = result.bundle.input_spec(name)
        for path in result.bundle.golden_inputs(name):
            assert (read_image(path).width, read_image(path).height) == (spec.width, spec.height)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sizes": []}, "takes pictures of any size"),
        ({"mean": None}, "differ in their mean"),
        ({"layout": "yolox"}, "declared as 'yolox'"),
        ({"score_threshold": 3.0}, "output.score_threshold"),
        ({"pad": 300}, "input.pad"),
        ({"name": "a/b"}, "is not a name"),
    ],
)
def test_refusals_leave_nothing_behind(
    model: Path, labels: Path, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    before = sorted(tmp_path.iterdir())
    arguments: dict[str, Any] = {"sizes": [(32, 32)], **USUAL, **change}
    with pytest.raises((BundleError, UsageError)) as caught:
        import_model(model, tmp_path / "out", labels=labels, **arguments)
    assert words in str(caught.value)
    assert ".new" not in str(caught.value)
    assert sorted(tmp_path.iterdir()) == before


def test_models_that_are_none(labels: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    for data, words in (
        (b"", "empty"),
        (b"\xff\xd8\xff picture", "a JPEG picture"),
        (classifier()[:-9], "damaged"),
        (nan_classifier(), "NaN"),
    ):
        path.write_bytes(data)
        with pytest.raises(BundleError, match=words):
            import_model(path, tmp_path / "out", labels=labels, **USUAL)
    with pytest.raises(BundleError, match="cannot be read"):
        import_model(tmp_path / "nowhere.onnx", tmp_path / "out", labels=labels)


def test_a_layout_is_suggested_or_refused(tmp_path: Path, labels: Path) -> None:
    path = tmp_path / "odd.onnx"
    path.write_bytes(graph([node("Identity", ["x"], ["y"])], outputs=[("y", ("batch", 3, SIDE, SIDE))]))
    with pytest.raises(BundleError, match="fit no known layout with 3 labels"):
        import_model(path, tmp_path / "out", labels=labels)
    path.write_bytes(classifier())
    labels.write_text("one\ntwo\n")
    with pytest.raises(BundleError, match="would fit classify with 3 labels"):
        import_model(path, tmp_path / "out", labels=labels)


def test_external_data_is_joined(tmp_path: Path, labels: Path) -> None:
    nodes = [node("ReduceMean", ["x"], ["m"], axes=[2, 3], keepdims=0), node("Mul", ["m", "w"], ["y"])]
    data = graph(nodes, initializers={"w": np.arange(3, dtype=np.float32)})
    path = tmp_path / "m.onnx"
    onnx.save_model(
        onnx.load_model_from_string(data), path, save_as_external_data=True, location="w.bin", size_threshold=0
    )
    result = import_model(path, tmp_path / "out", labels=labels, **USUAL)
    assert "joined" in result.notes[0]
    engine = load_engine(result.bundle)
    lane, buffer = engine.open_lane(), engine.allocate(1)
    buffer.array[:] = 2
    lane.submit(buffer, 1)
    assert lane.collect()["y"].tolist() == [[0, 2, 4]]
    engine.close()
    (tmp_path / "w.bin").unlink()
    with pytest.raises(BundleError) as caught:
        import_model(path, tmp_path / "again", labels=labels, **USUAL)
    assert caught.value.code == "model_external_data"


def test_overwrite(model: Path, labels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    first = import_model(model, out, labels=labels, sizes=[(32, 32)], **USUAL).bundle
    with pytest.raises(UsageError, match="--overwrite"):
        import_model(model, out, labels=labels, sizes=[(64, 64)], **USUAL)
    monkeypatch.setattr(bundle_draft, "load_engine", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        import_model(model, out, labels=labels, sizes=[(64, 64)], overwrite=True, **USUAL)
    assert load_bundle(out).digest == first.digest
    monkeypatch.undo()
    second = import_model(model, out, labels=labels, sizes=[(64, 64)], overwrite=True, **USUAL).bundle
    assert load_bundle(out).digest == second.digest != first.digest
    assert sorted(path.name for path in tmp_path.iterdir()) == ["labels.txt", "out", "tiny.onnx"]
    other = tmp_path / "mine"
    other.mkdir()
    (other / "thesis.txt").write_text("precious")
    with pytest.raises(UsageError, match="is no bundle"):
        import_model(model, other, labels=labels, sizes=[(64, 64)], overwrite=True, **USUAL)


def test_the_same_import_gives_the_same_digest(model: Path, labels: Path, tmp_path: Path) -> None:
    shot = picture(tmp_path / "a.png")
    digests = {
        import_model(
            model,
            tmp_path / f"out-{turn}",
            name="same",
            labels=labels,
            sizes=[(32, 32)],
            pictures=[shot],
            read_image=read_image,
            **USUAL,
        ).bundle.digest
        for turn in range(2)
    }
    assert len(digests) == 1


def test_a_manifest_is_read_as_it_was_written() -> None:
    odd = 'quote " backslash \\ tab \t umlaut ü delete \x7f newline \n end'
    text = manifest_text(
        {"name": odd},
        {"mean": (0.5, 1e-9, 3.0), "pad": None},
        {"on": True},
        [{"files": {"x": {"path": odd}}}],
        {odd: "1"},
    )
    data = parse_toml(text, "bundle.toml").data
    assert data["bundle"]["name"] == odd
    assert data["input"] == {"mean": [0.5, 1e-9, 3.0]}
    assert data["files"] == {odd: "1"}
    assert data["variant"][0]["files"]["x"]["path"] == odd


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(["import", *arguments])


def test_the_command(model: Path, labels: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    usual = [
        "--labels",
        str(labels),
        "--layout",
        "classify",
        "--mean",
        "0",
        "0",
        "0",
        "--std",
        "1",
        "1",
        "1",
        "--size",
        "64x32",
        "--size",
        "32",
    ]
    assert command.run(parse(str(model), str(tmp_path / "out"), "--json", *usual)) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert captured.err == ""
    assert document["variants"] == ["fp32-64x32", "fp32-32"]
    assert document["digest"] == load_bundle(tmp_path / "out").digest
    assert any("licence" in note for note in document["notes"])

    assert command.run(parse(str(model), str(tmp_path / "two"), *usual)) == 0
    captured = capsys.readouterr()
    assert "two: two sha256:" in captured.out
    assert "note: usual for classify (torchvision's" in captured.err
    with pytest.raises(SystemExit):
        parse(str(model), "out", "--labels", "x", "--size", "12y3")
