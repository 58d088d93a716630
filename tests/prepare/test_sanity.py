"""The sanity run: dead, raw, stray and constant outputs are refused, wrong settings too, and right ones pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_runtime.engine.bundle import load_bundle
from edge_runtime.engine.onnxrt import load_engine
from edge_runtime.errors import RefusedError
from edge_runtime.prepare.contact_sheet import cell, contact_sheet
from edge_runtime.prepare.evidence import Seen, agreement
from edge_runtime.prepare.importer import import_model
from edge_runtime.prepare.sanity import SanityReport, alternatives, better, run_sanity
from edge_runtime.records.frames import Classification, Detections
from edge_runtime.records.spec import InputSpec, OutputSpec
from tests.engine.graphs import CLASSES, classifier, graph, nan_classifier, node, write_bundle
from tests.prepare.exports import answers, pictures, read_image

Outputs = dict[str, NDArray[np.float32]]
GRID = 8


def detector(
    score: float, sides: tuple[float, float, float, float] = (4, 4, 4, 4), cells: int = 12, *, weight: float = 0.0
) -> bytes:
    """A centernet over 32 x 32 px that finds boxes of `score` in that many cells, whatever it sees."""
    heatmap, ltrb = np.zeros((CLASSES, GRID, GRID), np.float32), np.zeros((4, GRID, GRID), np.float32)
    heatmap.reshape(-1)[:cells] = score
    ltrb[:] = np.array(sides, np.float32)[:, None, None]
    return answers({"heatmap": heatmap, "ltrb": ltrb}, weight=weight, side=32)


def run(tmp_path: Path, model: bytes, layout: str = "centernet", count: int = 4) -> SanityReport:
    engine = load_engine(load_bundle(write_bundle(tmp_path / "bundle", model, layout=layout)))
    trials = alternatives(engine.info.input, engine.info.output, engine.info.output_shapes)
    try:
        return run_sanity(engine, pictures(tmp_path / "pictures", count), read_image, trials)
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (detector(0.01), "nothing is found on any of 4 pictures"),
        (detector(3.5), "scores are above 1 on 4 of 4 pictures"),
        (detector(0.9), "outputs are the same whatever the picture (4 different ones)"),
        (detector(0.9, weight=1e-4), "boxes are the same whatever the picture"),
        (detector(0.9, (999, 0, -900, 0)), "boxes are off the picture, empty or not finite"),
        (detector(0.9, (0.2, 0.2, 0.2, 0.2)), "boxes are less than 1 px"),
        (detector(0.9, (99, 99, 99, 99)), "boxes are the whole picture"),
    ],
)
def test_faults_of_detectors(tmp_path: Path, model: bytes, words: str) -> None:
    report = run(tmp_path, model)
    assert any(words in problem for problem in report.problems), report.problems


def test_outputs_that_overflow_on_pictures_only(tmp_path: Path) -> None:
    mean = node("ReduceMean", ["x"], ["m"], axes=[2, 3], keepdims=0)
    over = [mean, node("Sub", ["m", "grey"], ["d"]), node("Sqrt", ["d"], ["y"])]
    report = run(tmp_path, graph(over, initializers={"grey": np.float32(100)}), "classify")
    assert any("not finite" in problem for problem in report.problems)
    assert nan_classifier()  # one that fails on grey is refused before


def test_faults_of_classifiers(tmp_path: Path) -> None:
    mean = node("ReduceMean", ["x"], ["m"], axes=[2, 3], keepdims=0)
    softmax = graph([mean, node("Softmax", ["m"], ["y"], axis=1)])
    assert "probabilities already" in run(tmp_path / "a", softmax, "classify").problems[0]
    flat = graph([mean, node("Mul", ["m", "little"], ["y"])], initializers={"little": np.float32(1e-5)})
    problems = run(tmp_path / "b", flat, "classify").problems
    assert any("no class stands out on 4 of 4 pictures" in problem for problem in problems)


@pytest.fixture(autouse=True)
def folders(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()


def test_few_and_like_pictures_are_not_judged_as_many(tmp_path: Path) -> None:
    assert not any("same" in problem for problem in run(tmp_path / "a", detector(0.9), count=2).problems)
    assert run(tmp_path / "b", classifier(), "classify", count=3).better is None


def seen(agreed: float, total: float) -> Seen:
    nothing = Detections(np.empty((0, 4), np.float32), np.empty(0, np.float32), np.empty(0, np.int32))
    return Seen(nothing, agreed, total)


def test_better_is_clear_and_never_mutual() -> None:
    rng = np.random.default_rng(0)
    right = [seen(total * 0.8, total) for total in rng.uniform(0, 5, 16)]
    worse = [seen(one.agreed * 0.7, one.total) for one in right]
    junk = [seen(one.agreed, one.total * 4) for one in right]
    noisy = [seen(one.agreed * factor, one.total) for one, factor in zip(right, rng.uniform(0.9, 1.1, 16), strict=True)]
    empty = [seen(0, 0)] * 16
    for other in (worse, junk, empty):
        assert better(other, right)
        assert not better(right, other)
    assert not better(right, noisy)
    assert not better(noisy, right)
    assert not better(empty, empty)
    assert not better(right, right)


def test_agreement_of_a_picture_and_its_mirror_image() -> None:
    boxes = np.array([[10, 10, 30, 40], [60, 10, 90, 40]], np.float32)
    found = Detections(boxes, np.array([0.9, 0.5], np.float32), np.array([1, 2], np.int32))
    mirrored = boxes.copy()
    mirrored[:, [0, 2]] = 100 - boxes[:, [2, 0]]
    both = agreement(found, replace(found, boxes=mirrored), 100)
    assert both.agreed == pytest.approx(both.total) == pytest.approx(both.evidence) == pytest.approx(1.4)
    assert agreement(found, found, 100).agreed == 0
    other = replace(found, boxes=mirrored, class_ids=np.array([1, 3], np.int32))
    assert agreement(found, other, 100).evidence == pytest.approx(0.9 - 0.25)
    one, two = (Classification(np.array([p], np.float32), np.array([4], np.int32)) for p in (0.8, 0.6))
    assert agreement(one, two, 100).agreed == pytest.approx(0.6)
    assert agreement(one, replace(two, class_ids=np.array([5], np.int32)), 100).agreed == 0


def test_alternatives_differ_in_one_thing() -> None:
    shapes = {"output": (1, 84, 85)}
    spec, labels = InputSpec(64, 64, "BGR", "letterbox-topleft"), tuple(map(str, range(80)))
    flags = [trial.flags for trial in alternatives(spec, OutputSpec("yolox", labels), shapes)]
    assert flags[0] == "--color RGB"
    assert "--scale 1/255 --mean 0 0 0 --std 1 1 1" in flags
    assert "--scale 1 --mean 103.53 116.28 123.675 --std 57.375 57.12 58.395" in flags
    assert not any("--scale 1 --mean 0 0 0" in word for word in flags)
    near = replace(spec, color="RGB", mean=(127.0,) * 3, std=(128.0,) * 3)
    assert not any("127.5" in trial.flags for trial in alternatives(near, OutputSpec("yolox", labels), shapes))


def test_the_sheet_is_a_picture_of_all_cells(tmp_path: Path) -> None:
    path = pictures(tmp_path / "pictures", 1)[0]
    found = Detections(np.array([[4, 4, 40, 40]], np.float32), np.array([0.5], np.float32), np.array([0], np.int32))
    pair = cell(read_image(path), [found, found], ["thing"])
    assert pair.shape == (360, 960, 3)
    (tmp_path / "sheet.png").write_bytes(contact_sheet([pair] * 5))
    sheet = read_image(tmp_path / "sheet.png")
    assert (sheet.width, sheet.height) == (2 * 960 + 6, 3 * 360 + 12)


TORCHVISION: dict[str, Any] = {
    "scale": 1.0, "mean": (123.675, 116.28, 103.53), "std": (58.395, 57.12, 57.375)
}  # fmt: skip
RIGHT: dict[str, tuple[str, dict[str, Any]]] = {
    "yolox_nano_416": ("coco_80_names.txt", {"layout": "yolox"}),
    "nanodet_m_320": ("coco_80_names.txt", {"layout": "nanodet"}),
    "mb3_centernet": ("coco_80_names.txt", {"layout": "centernet", "sizes": [(320, 320)]}),
    "efficientnet_lite0": (
        "imagenet_1000_names.json",
        {"layout": "classify", "mean": (127.0,) * 3, "std": (128.0,) * 3, "short_side": 256},
    ),
}
Importer = Callable[..., Any]


@pytest.fixture
def importing(assets: Path, tmp_path: Path) -> Importer:
    def run_import(model: str, count: int = 8, first: int = 0, **changes: Any) -> Any:
        words, settings = RIGHT[model]
        folder = "imagenet_100" if model == "efficientnet_lite0" else "coco_val128/images"
        images = sorted((assets / "eval" / folder).glob("*.jpg"))[first : first + count]
        arguments = {**settings, "images": images, "read_image": read_image, "overwrite": True, **changes}
        path = assets / "models" / f"{model}.onnx"
        return import_model(path, tmp_path / "out", labels=assets / "models" / words, **arguments)

    return run_import


@pytest.mark.assets
@pytest.mark.parametrize("model", RIGHT)
def test_right_settings_pass(importing: Importer, tmp_path: Path, model: str) -> None:
    result = importing(model)
    assert result.sanity.problems == []
    assert result.sanity.pictures == 8
    assert result.sheet == tmp_path / "out.import.png"
    assert read_image(result.sheet).width > 480


@pytest.mark.assets
@pytest.mark.parametrize(
    ("model", "change"),
    [
        ("yolox_nano_416", {"scale": 1 / 255}),
        ("yolox_nano_416", TORCHVISION),
        ("nanodet_m_320", {"mean": (0.0,) * 3, "std": (1.0,) * 3}),
        ("mb3_centernet", {"scale": 1 / 255}),
        ("efficientnet_lite0", {"mean": (0.0,) * 3, "std": (1.0,) * 3}),
    ],
)
def test_wrong_settings_are_refused_with_the_better_ones(
    importing: Importer, tmp_path: Path, model: str, change: dict[str, Any]
) -> None:
    with pytest.raises(RefusedError) as caught:
        importing(model, count=8 if model == "nanodet_m_320" else 4, **change)
    assert caught.value.exit_code == 3
    assert "pass --scale 1 --mean" in str(caught.value.remedy)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["out.import.png"]
    assert not (tmp_path / "out").exists()


@pytest.mark.assets
def test_force_imports_and_says_so(importing: Importer) -> None:
    result = importing("yolox_nano_416", count=4, scale=1 / 255, force=True)
    assert any("forced in spite of the sanity run: nothing is found" in note for note in result.notes)
    assert result.sanity.better is not None


@pytest.mark.assets
@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", RIGHT)
def test_no_false_alarm_on_any_eight_pictures_and_colour_shows_on_many(importing: Importer, model: str) -> None:
    every = 100 if model == "efficientnet_lite0" else 128
    for first in range(0, every - 7, 8):
        assert importing(model, first=first).sanity.problems == []
    color = "BGR" if model in ("mb3_centernet", "efficientnet_lite0") else "RGB"
    with pytest.raises(RefusedError, match="--color"):
        importing(model, count=64, color=color)
