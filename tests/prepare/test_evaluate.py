"""Accuracy through the code that runs in the field: figures that are known beforehand, real models, the commands."""

from __future__ import annotations

import argparse
import io
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.app.evaluate import read_image
from edge_runtime.bundled import bundled_engine
from edge_runtime.camera.av_pixels import SCALER
from edge_runtime.cli import prepare_evaluate as command
from edge_runtime.engine.bundle import Bundle, load_bundle
from edge_runtime.engine.onnxrt import OnnxRuntimeEngine, load_engine
from edge_runtime.errors import EdgeError, NotThereError, UsageError
from edge_runtime.prepare.datasets import open_dataset
from edge_runtime.prepare.evaluate import Evaluation, class_order, measure, predict
from edge_runtime.prepare.importer import import_model
from edge_runtime.prepare.metrics import AveragePrecision
from edge_runtime.prepare.samples import Dataset, Sample
from edge_runtime.records.frames import Detections, Pixels
from tests.engine.graphs import classifier, write_bundle
from tests.prepare.labelled import LABELS, coco_document, picture, write_coco

COLORS = {"red": (200, 10, 20), "green": (10, 200, 20), "blue": (10, 20, 200)}


@pytest.fixture
def colors(tmp_path: Path) -> Path:
    """Ten pictures, one of which has the wrong label: 9 of 10 for a model of mean colours."""
    root = tmp_path / "colors"
    for index in range(9):
        label = LABELS[index % 3]
        picture(root / label / f"{index}.png", COLORS[label])
    picture(root / "red" / "wrong.png", COLORS["blue"])
    return root


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return load_bundle(write_bundle(tmp_path / "tiny", classifier()))


@pytest.fixture
def engine(bundle: Bundle) -> Iterator[OnnxRuntimeEngine]:
    engine = load_engine(bundle)
    yield engine
    engine.close()


def open_colors(root: Path, labels: Sequence[str] = LABELS) -> Dataset:
    return open_dataset(root, labels, "classify", read_image=read_image)[0]


def evaluate(bundle: Bundle, dataset: Dataset, lanes: int = 2, variant: str = "auto", **options: Any) -> Evaluation:
    engine = load_engine(bundle, variant)
    try:
        return measure(dataset, predict(engine, bundle, dataset, read_image, scaler=SCALER, lanes=lanes, **options))
    finally:
        engine.close()


def test_a_classifier_of_known_accuracy(bundle: Bundle, colors: Path) -> None:
    done = evaluate(bundle, dataset := open_colors(colors))
    assert (done.metric, done.value) == ("top1", 0.9)
    said = done.predictions
    assert [int(output.class_ids[0]) for output in said.outputs] == [2, 2, 2, 1, 1, 1, 0, 0, 0, 2]
    assert len(said.inference_ms) == 10
    assert all(0 < each < 1000 for each in said.inference_ms)
    assert (said.digest, said.variant, said.backend, said.scaler) == (bundle.digest, "fp32", "onnxruntime", SCALER)
    assert said.engine == bundle.engine_digest("fp32", "onnxruntime")
    table = done.table()
    assert (table.data, table.data_sha256, table.images, table.value) == ("colors", dataset.sha256, 10, 0.9)


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_lanes_and_fixed_batches_change_nothing(bundle: Bundle, colors: Path, tmp_path: Path, batch: int) -> None:
    dataset = open_colors(colors)
    wanted = evaluate(bundle, dataset, lanes=1).predictions.outputs
    fixed = load_bundle(
        write_bundle(tmp_path / "fixed", classifier(shape=(batch, 3, 32, 32), outputs=[("y", (batch, 3))]))
    )
    told: list[tuple[int, int]] = []
    found = evaluate(fixed, dataset, lanes=3, progress=lambda done, of: told.append((done, of))).predictions
    for output, other in zip(found.outputs, wanted, strict=True):
        assert output.class_ids.tolist() == other.class_ids.tolist()
        assert output.scores == pytest.approx(other.scores)
    assert told[-1] == (10, 10)


def test_classes_in_another_order(colors: Path, tmp_path: Path) -> None:
    other = load_bundle(
        write_bundle(tmp_path / "other", classifier(), labels=("blue", "green", "red"), input={"color": "BGR"})
    )
    dataset = open_colors(colors)
    order, notes = class_order(other.labels, dataset)
    assert order is not None
    assert (order.tolist(), notes) == ([2, 1, 0], ())
    assert evaluate(other, dataset, classes=order).value == 0.9
    assert class_order(LABELS, dataset) == (None, ())
    with pytest.raises(UsageError, match="one model has 3 labels and the other 2"):
        class_order(("red", "blue"), dataset)


def test_a_picture_that_cannot_be_read_is_an_error(engine: OnnxRuntimeEngine, bundle: Bundle, colors: Path) -> None:
    dataset = open_colors(colors)
    bad = colors / "green" / "4.png"
    for spoil, words in ((lambda: bad.write_bytes(bad.read_bytes()[:50]), "damaged"), (bad.unlink, "cannot be read")):
        spoil()
        with pytest.raises(UsageError, match=words) as caught:
            predict(engine, bundle, dataset, read_image, scaler=SCALER, lanes=2)
        assert (caught.value.code, caught.value.where) == ("picture_unreadable", str(bad))


def test_an_interrupt_ends_the_lanes_and_frees_their_buffers(
    engine: OnnxRuntimeEngine, bundle: Bundle, colors: Path
) -> None:
    seen: list[Path] = []

    def read(path: Path) -> Pixels:
        seen.append(path)
        return read_image(path)

    def interrupt(done: int, of: int) -> None:
        raise KeyboardInterrupt

    dataset = open_colors(colors)
    many = Dataset(dataset.root, dataset.kind, dataset.labels, dataset.samples * 1000, dataset.sha256)
    with pytest.raises(KeyboardInterrupt):
        predict(engine, bundle, many, read, scaler=SCALER, lanes=2, progress=interrupt)
    assert len(seen) < 5000


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Bundle]:
    """Pictures with a detector's own boxes above 0.3 as their annotations, in COCO's form, and the detector."""
    bundle = load_bundle(bundled_engine("centernet"))
    root = tmp_path_factory.mktemp("found")
    engine = load_engine(bundle, "fp32-320")
    rows = {}
    size = (0, 0)
    for path in bundle.golden_inputs("fp32-416"):
        (root / "images").mkdir(exist_ok=True)
        (root / "images" / path.name).write_bytes(path.read_bytes())
        pixels = read_image(path)
        size = (pixels.width, pixels.height)
        blank = Dataset(root, "", bundle.labels, (Sample(path.name, path, 0),), "")
        (output,) = predict(engine, bundle, blank, read_image, scaler=SCALER, score_threshold=0.3).outputs
        assert isinstance(output, Detections)
        rows[path.name] = [
            (class_id, *box[:2], box[2] - box[0], box[3] - box[1])
            for class_id, box in zip(output.class_ids.tolist(), output.boxes.tolist(), strict=True)
        ]
    engine.close()
    document = coco_document(rows, dict(enumerate(bundle.labels)), size)
    (root / "instances_val.json").write_text(json.dumps(document))
    assert len(document["annotations"]) > 8
    return root, bundle


def test_a_detector_finds_what_it_found(found: tuple[Path, Bundle]) -> None:
    root, bundle = found
    dataset, _ = open_dataset(root, bundle.labels, "detect", read_image=read_image)
    engine = load_engine(bundle, "fp32-320")
    said = predict(engine, bundle, dataset, read_image, scaler=SCALER, lanes=2)
    assert engine.info.output.score_threshold == 0.3
    assert all(0.01 < float(output.scores.min()) < 0.3 and len(output) <= 100 for output in said.outputs)
    done = measure(dataset, said)
    engine.close()
    assert isinstance(done.accuracy, AveragePrecision)
    assert done.metric == "mAP"
    assert [done.value, done.accuracy.ap50] == pytest.approx([1, 1])
    # at a higher threshold some of the boxes are no longer found
    assert 0.2 < evaluate(bundle, dataset, variant="fp32-320", score_threshold=0.5).value < 0.9


def test_pictures_of_another_size_than_annotated(found: tuple[Path, Bundle], tmp_path: Path) -> None:
    _, bundle = found
    file = write_coco(tmp_path, coco_document({"a.png": [(0, 1, 1, 20, 20)]}, {0: "person"}))
    dataset, _ = open_dataset(file, bundle.labels, "detect", read_image=read_image)
    picture(tmp_path / "images" / "a.png", width=30, height=40)
    with pytest.raises(UsageError, match="is 30x40 px, and its boxes are for 40x30"):
        evaluate(bundle, dataset)


def test_nothing_to_be_found(found: tuple[Path, Bundle], tmp_path: Path) -> None:
    _, bundle = found
    document = coco_document({"a.png": [(0, 1, 1, 20, 20)]}, {0: "person"})
    document["annotations"][0]["iscrowd"] = 1
    dataset, _ = open_dataset(write_coco(tmp_path, document), bundle.labels, "detect", read_image=read_image)
    with pytest.raises(UsageError, match="none of these 1 pictures has a box to be found"):
        evaluate(bundle, dataset)


def parse(add: Callable[[argparse.ArgumentParser], None], *arguments: str | Path) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add(parser)
    return parser.parse_args([str(argument) for argument in arguments])


def run_evaluate(*arguments: str | Path) -> int:
    return command.run_evaluate(parse(command.add_evaluate, *arguments))


def run_compare(*arguments: str | Path) -> int:
    return command.run_compare(parse(command.add_compare, *arguments))


def test_the_command_as_json(bundle: Bundle, colors: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture(colors / "loose" / "x.png").unlink()
    assert run_evaluate(bundle.root, colors, "--json") == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert err == ""
    assert (document["metric"], document["value"], document["top5"]) == ("top1", 0.9, 1.0)
    assert document["per_class"] == {"red": 0.75, "green": 1.0, "blue": 1.0}
    assert (document["images"], document["scaler"], document["recorded"]) == (10, SCALER, None)
    assert document["digest"] == bundle.digest
    assert document["notes"] == ["1 folders hold no picture"]
    assert set(document["inference_ms"]) == {"mean", "p50", "p99"}


def test_the_command_for_people(found: tuple[Path, Bundle], capsys: pytest.CaptureFixture[str]) -> None:
    root, _ = found
    assert run_evaluate("bundled:centernet", root, "--variant", "fp32-320", "--per-class", "--images", "1") == 0
    out, err = capsys.readouterr()
    assert out.startswith("centernet fp32-320\n  mAP ")
    for words in ("AP50", "AP75", "AP small", "ms a picture", f"({'coco'}), 1 pictures", SCALER, "sha256", "person"):
        assert words in out
    assert "note: a sample of 1 of 2 pictures, drawn with seed 0\n" in err


def test_all_variants_are_recorded(bundle: Bundle, colors: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = bundle.root / "bundle.toml"
    head, table, variant = file.read_text().partition("[[variant]]\n")
    file.write_text(head + table + variant + "\n" + table + variant.replace('"fp32"', '"again"', 1))
    before = load_bundle(bundle.root)
    assert run_evaluate(bundle.root, colors, "--variant", "all", "--record", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["metric"] == "top1"
    assert [each["variant"] for each in document["variants"]] == ["fp32", "again"]
    assert {each["digest"] for each in document["variants"]} == {before.digest}
    after = load_bundle(bundle.root)
    assert document["variants"][-1]["recorded"] == {"bundle": str(bundle.root), "digest": after.digest}
    assert [each.accuracy and each.accuracy.value for each in after.manifest.variant] == [0.9, 0.9]
    assert run_evaluate(bundle.root, colors, "--record") == 0
    assert "recorded     the bundle's digest is now sha256:" in capsys.readouterr().out


def test_what_cannot_be_recorded_is_not_measured(
    bundle: Bundle, colors: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = bundle.root.rename(tmp_path / bundle.digest.removeprefix("sha256:"))
    (colors / "green" / "4.png").write_bytes(b"would fail if it were read")
    with pytest.raises(UsageError, match="belongs to a store"):
        run_evaluate(place, colors, "--record")
    with pytest.raises(UsageError, match="what comes with the product"):
        run_evaluate("bundled:centernet", colors, "--record")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--score-threshold", "2"], "is no number from 0 to 1"),
        (["--score-threshold", "nan"], "is no number from 0 to 1"),
        (["--images", "0"], "is no whole number"),
    ],
)
def test_arguments_that_are_refused(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run_evaluate("bundle", "data", *arguments)
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


def test_without_the_extra(bundle: Bundle, colors: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = [name for name in sys.modules if name.startswith(("edge_runtime.app.evaluate", "edge_runtime.prepare."))]
    for name in ours:
        monkeypatch.delitem(sys.modules, name)
    import edge_runtime.app

    monkeypatch.delattr(edge_runtime.app, "evaluate")
    for name in ("pycocotools", "pycocotools.coco", "tomlkit"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(NotThereError, match=r"pip install 'edge-runtime\[prepare\]'") as caught:
        run_evaluate(bundle.root, colors)
    assert caught.value.exit_code == 4


def test_compare_refuses_a_loss(
    bundle: Bundle, colors: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    swapped = write_bundle(tmp_path / "swapped", classifier(), input={"color": "BGR"})
    common = ("--resamples", "100", "--max-loss", "0.05")
    assert run_compare(bundle.root, f"{swapped}@fp32", colors, *common) == 3
    out = capsys.readouterr().out
    assert "refused: top1 falls by 0.5000, and it may fall by 0.05; the interval" in out
    assert run_compare(f"{swapped}@auto", bundle.root, colors, *common, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["difference"] == pytest.approx(0.5)
    assert document["gate"]["passed"]
    assert document["gate"]["interval_wider_than_limit"]
    assert document["gate"]["verdict"].startswith("passed: top1 rises by 0.5000")
    assert run_compare(bundle.root, bundle.root, colors, *common, "--images", "6") == 0
    assert "passed: top1 falls by 0.0000, and it may fall by 0.05\n" in capsys.readouterr().out


def test_compare_refuses_other_tasks(bundle: Bundle, colors: Path) -> None:
    with pytest.raises(EdgeError, match="one model's task is classify and the other's is detect"):
        run_compare(bundle.root, "bundled:centernet", colors)


def test_an_at_sign_in_a_path(tmp_path: Path, bundle: Bundle, colors: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = bundle.root.rename(tmp_path / "model@home")
    assert run_compare(place, f"{place}@fp32", colors, "--resamples", "100") == 0


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("terminal", [True, False])
def test_progress(terminal: bool) -> None:
    stream = Terminal() if terminal else io.StringIO()
    now_s = 100.0
    progress = command.Progress(stream, lambda: now_s)
    for done in range(101):
        progress.show("model fp32", done, 100)
        now_s += 0.25
    progress.clear()
    text = stream.getvalue()
    if terminal:
        assert text.startswith("\r\x1b[Kmodel fp32: 1 of 100 pictures, 25 s left\r\x1b[K")
        assert text.endswith("100 of 100 pictures, 0 s left\r\x1b[K")
        assert "\n" not in text
    else:
        assert text == ("model fp32: 40 of 100 pictures, 15 s left\nmodel fp32: 80 of 100 pictures, 5 s left\n")


def test_ctrl_c(bundle: Bundle, tmp_path: Path) -> None:
    """Through a real terminal: as soon as progress is seen, SIGINT; nothing is left in its way, and the code is 130."""
    root = tmp_path / "many"
    first = picture(root / "red" / "00000.png", (9, 8, 7), 1600, 1200)
    for index in range(1, 5000):
        (root / "red" / f"{index:05}.png").hardlink_to(first)
    ours, theirs = pty.openpty()
    arguments = ["prepare", "evaluate", bundle.root, root, "--json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "edge_runtime", *map(str, arguments)], stdout=subprocess.PIPE, stderr=theirs
    )
    os.close(theirs)
    shown = b""
    try:
        while b"tiny fp32: " not in shown:
            shown += os.read(ours, 4096)
        process.send_signal(signal.SIGINT)
        started_s = time.monotonic()
        out, _ = process.communicate(timeout=30)
        assert time.monotonic() - started_s < 5
        assert (process.returncode, out) == (130, b"")
        assert b"Traceback" not in shown
    finally:
        process.kill()
        process.wait()
        os.close(ours)


DETECTORS: dict[str, dict[str, Any]] = {
    "yolox_nano_416": {"layout": "yolox", "color": "BGR", "resize": "letterbox-topleft", "nms_iou": 0.65},
    "nanodet_m_320": {
        "layout": "nanodet",
        "color": "BGR",
        "resize": "stretch",
        "mean": (103.53, 116.28, 123.675),
        "std": (57.375, 57.12, 58.395),
    },
    "mb3_centernet": {"layout": "centernet", "color": "RGB", "resize": "letterbox-center", "sizes": [(512, 512)]},
}


def detector(assets: Path, root: Path, name: str) -> Bundle:
    labels = assets / "models" / "coco_80_names.txt"
    return import_model(assets / "models" / f"{name}.onnx", root / name, labels=labels, **DETECTORS[name]).bundle


@pytest.mark.assets
@pytest.mark.parametrize(("name", "floor"), [("yolox_nano_416", 0.3), ("nanodet_m_320", 0.24), ("mb3_centernet", 0.35)])
def test_detectors_on_a_sample(assets: Path, tmp_path: Path, name: str, floor: float) -> None:
    bundle = detector(assets, tmp_path, name)
    data = assets / "eval" / "coco_val128"
    dataset, _ = open_dataset(data, bundle.labels, "detect", read_image=read_image, images=24)
    done = evaluate(bundle, dataset)
    print(f"{name}: mAP {done.value:.4f} over 24 pictures")
    assert done.value >= floor
    yolo, _ = open_dataset(data / "labels", bundle.labels, "detect", read_image=read_image, images=24)
    assert [sample.name for sample in yolo.samples] == [sample.name for sample in dataset.samples]
    again = measure(yolo, done.predictions)
    # by size they differ: YOLO's labels know the area of the box only, COCO's that of the outline
    assert again.value == pytest.approx(done.value, abs=1e-4)


@pytest.mark.assets
@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "floor"), [("yolox_nano_416", 0.335), ("nanodet_m_320", 0.268), ("mb3_centernet", 0.333)]
)
def test_detectors_on_all_pictures(assets: Path, tmp_path: Path, name: str, floor: float) -> None:
    bundle = detector(assets, tmp_path, name)
    data = assets / "eval" / "coco_val128"
    dataset, _ = open_dataset(data, bundle.labels, "detect", read_image=read_image)
    done = evaluate(bundle, dataset)
    print(f"{name}: mAP {done.value:.4f} over 128 pictures")
    assert done.value >= floor


@pytest.mark.assets
def test_a_real_classifier(assets: Path, tmp_path: Path) -> None:
    bundle = import_model(
        assets / "models" / "efficientnet_lite0.onnx",
        tmp_path / "lite0",
        labels=assets / "models" / "imagenet_1000_names.json",
        layout="classify",
        mean=(127.0, 127.0, 127.0),
        std=(128.0, 128.0, 128.0),
        short_side=256,
    ).bundle
    done = evaluate(bundle, open_colors(assets / "eval" / "imagenet_100", bundle.labels))
    print(f"efficientnet_lite0: top-1 {done.value}")
    assert len(done.dataset.samples) == 100
    assert done.value >= 0.89
