"""A declared layout against the shapes that a model really has."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edge_runtime.errors import BundleError
from edge_runtime.records.frames import Detections
from edge_runtime.records.spec import InputSpec, Layout, OutputSpec
from edge_runtime.vision.decode import LayoutFit, build_decoder, suggest_layout
from edge_runtime.vision.geometry import plan

Shapes = dict[str, tuple[int, ...]]

YOLOX: Shapes = {"output": (1, 3549, 85)}
NANODET: Shapes = {"output": (1, 2100, 112)}
CENTERNET: Shapes = {"heatmap": (1, 80, 104, 104), "ltrb": (1, 4, 104, 104)}
CLASSIFY: Shapes = {"logits": (1, 1000)}
YOLOV5: Shapes = {"output": (1, 25200, 85)}
YOLOV8: Shapes = {"output0": (1, 84, 8400)}
ROWS: Shapes = {"output0": (1, 300, 6)}
RTDETR: Shapes = {"output0": (1, 300, 84)}
LOGITS: Shapes = {"logits": (1, 300, 80), "pred_boxes": (1, 300, 4)}
EFFICIENTNMS: Shapes = {
    "det_boxes": (1, 100, 4),
    "det_classes": (1, 100),
    "det_scores": (1, 100),
    "num_dets": (1, 1),
}
PLUGIN: Shapes = {
    "num_detections": (1, 1),
    "detection_boxes": (1, 100, 4),
    "detection_scores": (1, 100),
    "detection_classes": (1, 100),
}


def build(layout: Layout, shapes: Shapes, side: int = 416, classes: int = 80, height: int | None = None) -> object:
    labels = tuple(map(str, range(classes)))
    return build_decoder(OutputSpec(layout, labels), InputSpec(side, height or side), shapes)


@pytest.mark.parametrize(
    ("layout", "shapes", "side", "classes"),
    [
        ("yolox", YOLOX, 416, 80),
        ("yolox", {"any name": (1, 3549, 6)}, 416, 1),
        ("nanodet", NANODET, 320, 80),
        ("centernet", CENTERNET, 416, 80),
        ("centernet", {"b": (1, 4, 104, 104), "a": (1, 80, 104, 104)}, 416, 80),
        # The names settle it where both have four channels.
        ("centernet", {"ltrb": (1, 4, 104, 104), "heatmap": (1, 4, 104, 104)}, 416, 4),
        ("classify", CLASSIFY, 224, 1000),
        ("yolov5", YOLOV5, 640, 80),
        ("yolov5", {"output": (1, 102000, 6)}, 1280, 1),  # P6
        ("yolov8", YOLOV8, 640, 80),
        ("yolov8", {"o": (1, 5, 34000)}, 1280, 1),  # P6
        ("yolov8", {"o": (1, 14, 34000)}, 640, 10),  # P2
        ("rtdetr", RTDETR, 640, 80),
        ("rtdetr", {"output0": (1, 300, 5)}, 640, 1),
        ("rtdetr", LOGITS, 640, 80),
        ("rtdetr", {"dets": (1, 300, 4), "labels": (1, 300, 91)}, 640, 91),
        ("rtdetr", {"logits": (1, 300, 4), "pred_boxes": (1, 300, 4)}, 640, 4),
    ],
)
def test_what_fits_is_built(layout: Layout, shapes: Shapes, side: int, classes: int) -> None:
    assert callable(build(layout, shapes, side, classes))
    assert LayoutFit(layout, classes) in suggest_layout(shapes, side, side)
    assert suggest_layout(shapes, side, side, classes=classes) == (LayoutFit(layout, classes),)


@pytest.mark.parametrize(
    ("layout", "shapes"),
    [
        ("yolov10", ROWS),
        ("yolov10", {"any name": (1, 1, 6)}),
        ("rtdetr", ROWS),
        ("rtdetr-topk", ROWS),
        ("efficientnms", EFFICIENTNMS),
        ("efficientnms", PLUGIN),
    ],
)
@pytest.mark.parametrize("classes", [1, 2, 80])
def test_shapes_that_do_not_say_how_many_classes_take_any_number(layout: Layout, shapes: Shapes, classes: int) -> None:
    assert callable(build(layout, shapes, 640, classes))
    assert LayoutFit(layout, None) in suggest_layout(shapes, 640, 640)
    assert LayoutFit(layout, None) in suggest_layout(shapes, 640, 640, classes=classes)


def test_six_columns_and_two_labels_are_read_as_the_declared_layout_says() -> None:
    """Two queries over a 64x64 input: as box and two scores, or as box, score and class."""
    rows = np.array([[[0.5, 0.5, 0.25, 0.25, 0.75, 1.0], [0.25, 0.25, 0.25, 0.25, 0.1, 0.0]]], dtype=np.float32)
    transform = plan(64, 64, InputSpec(64, 64))
    found = {}
    for layout in ("rtdetr", "rtdetr-topk"):
        decoder = build_decoder(OutputSpec(layout, ("a", "b")), InputSpec(64, 64), {"o": (1, 2, 6)})
        result = decoder({"o": rows}, 0, transform)
        found[layout] = (result.class_ids.tolist(), result.scores.tolist())
    assert found["rtdetr"] == ([1, 0], [1.0, 0.75])
    assert found["rtdetr-topk"] == ([1], [0.75])


@pytest.mark.parametrize("swapped", [False, True])
def test_boxes_and_logits_of_four_classes_go_by_name(swapped: bool) -> None:
    boxes = np.full((1, 1, 4), 0.5, dtype=np.float32)
    logits = np.array([[[-9, -9, 3, -9]]], dtype=np.float32)
    outputs = {"logits": logits, "pred_boxes": boxes} if swapped else {"pred_boxes": boxes, "logits": logits}
    shapes = {name: array.shape for name, array in outputs.items()}
    decoder = build_decoder(OutputSpec("rtdetr", ("a", "b", "c", "d")), InputSpec(64, 64), shapes)
    found = decoder(outputs, 0, plan(64, 64, InputSpec(64, 64)))
    assert isinstance(found, Detections)
    assert (found.class_ids.tolist(), found.boxes.tolist()) == ([2], [[16, 16, 48, 48]])


def test_an_input_need_be_neither_square_nor_a_multiple_of_32() -> None:
    build("yolox", {"o": (1, 80 * 48 + 40 * 24 + 20 * 12, 85)}, 640, 80, 384)
    build("yolox", {"o": (1, 13 * 13 + 7 * 7 + 4 * 4, 85)}, 100, 80)


@pytest.mark.parametrize(
    ("layout", "shapes", "side", "classes", "words"),
    [
        ("yolox", YOLOX, 416, 79, ["80 classes", "79 labels"]),
        ("yolox", YOLOX, 640, 80, ["[1, 8400, 5 + classes]", "640x640", "[1, 3549, 85]"]),
        ("yolox", {"output": (1, 85, 3549)}, 416, 80, ["[1, 3549, 5 + classes]", "[1, 85, 3549]"]),
        ("yolox", {"output": (3549, 85)}, 416, 80, ["[3549, 85]"]),
        ("yolox", {"output": (1, 3549, 5)}, 416, 80, ["[1, 3549, 5]"]),
        ("yolox", CENTERNET, 416, 80, ["one output", "has 2", "heatmap [1, 80, 104, 104]", "'centernet' with 80"]),
        ("yolox", {}, 416, 80, ["has 0", "no outputs", "fit no layout"]),
        ("nanodet", NANODET, 320, 81, ["80 classes", "81 labels", "'nanodet' with 80 labels"]),
        ("nanodet", NANODET, 416, 80, ["[1, 3549, classes + 32]", "[1, 2100, 112]"]),
        ("nanodet", {"output": (1, 2100, 32)}, 320, 80, ["[1, 2100, 32]"]),
        ("centernet", CENTERNET, 512, 80, ["[1, classes, 128, 128]", "512x512"]),
        ("centernet", CENTERNET, 416, 20, ["80 classes", "20 labels"]),
        ("centernet", {"heatmap": (1, 80, 104, 104), "ltrb": (1, 5, 104, 104)}, 416, 80, ["[1, 4, 104, 104]"]),
        ("centernet", {"a": (1, 4, 104, 104), "b": (1, 4, 104, 104)}, 416, 4, ["exactly one output", "2 of"]),
        ("centernet", {"a": (1, 80, 104, 104), "b": (1, 2, 104, 104)}, 416, 80, ["exactly one output", "0 of"]),
        ("centernet", YOLOX, 416, 80, ["has 1 outputs", "'yolox' with 80 labels"]),
        ("yolov5", YOLOV5, 640, 79, ["80 classes", "79 labels", "'yolov5' with 80 labels"]),
        ("yolov5", YOLOV5, 416, 80, ["[1, 10647, 5 + classes]", "416x416", "[1, 25200, 85]"]),
        ("yolov5", YOLOV8, 640, 80, ["[1, 84, 8400]", "'yolov8' with 80 labels"]),
        ("yolov5", YOLOX, 416, 80, ["[1, 3549, 85]", "'yolox' with 80 labels"]),
        ("yolov8", YOLOV8, 640, 20, ["80 classes", "20 labels"]),
        ("yolov8", {"output0": (1, 8400, 84)}, 640, 80, ["[1, 4 + classes, 8400]", "[1, 8400, 84]"]),
        ("yolov8", {"output0": (1, 4, 8400)}, 640, 80, ["[1, 4, 8400]"]),
        ("yolov8", ROWS, 640, 80, ["'yolov10' with any number of labels or 'rtdetr'"]),
        ("yolov10", {"output0": (1, 300, 38)}, 640, 80, ["[1, boxes, 6]", "[1, 300, 38]"]),
        ("yolov10", {"output0": (300, 6)}, 640, 80, ["[300, 6]"]),
        ("yolov10", {"output": (1, 3549, 6)}, 416, 1, ["3549 is the number of a grid's cells", "'yolox' with 1"]),
        ("rtdetr", YOLOV5, 640, 81, ["25200 is the number of a grid's cells", "'yolov5' with 80 labels"]),
        ("rtdetr", YOLOV8, 640, 80, ["8400 is the number of a grid's cells", "'yolov8' with 80 labels"]),
        ("rtdetr", RTDETR, 640, 79, ["80 classes", "79 labels"]),
        ("rtdetr", {"output0": (1, 300, 4)}, 640, 80, ["[1, queries, 4 + classes]", "[1, 300, 4]"]),
        ("rtdetr", LOGITS, 640, 81, ["80 classes", "81 labels"]),
        ("rtdetr", {"logits": (1, 100, 80), "pred_boxes": (1, 300, 4)}, 640, 80, ["[1, 300, classes]", "100"]),
        ("rtdetr", {"a": (1, 300, 4), "b": (1, 300, 4)}, 640, 4, ["exactly one", "'pred_boxes'", "2 of"]),
        ("rtdetr", EFFICIENTNMS, 640, 80, ["has 4 outputs", "'efficientnms' with any number of labels"]),
        ("rtdetr-topk", RTDETR, 640, 80, ["[1, boxes, 6]", "'rtdetr' with 80 labels"]),
        ("rtdetr-topk", {"output": (1, 3549, 6)}, 416, 1, ["3549 is the number of a grid's cells"]),
        ("efficientnms", {**EFFICIENTNMS, "det_boxes": (1, 50, 4)}, 640, 80, ["[1, boxes, 4]", "det_boxes [1, 50, 4]"]),
        ("efficientnms", {**EFFICIENTNMS, "num_dets": (1,)}, 640, 80, ["[1, 1]", "num_dets [1]"]),
        ("efficientnms", {**EFFICIENTNMS, "det_boxes": (1,)}, 640, 80, ["det_boxes [1]"]),
        ("efficientnms", {f"{k}": (1, 9) for k in range(4)}, 640, 80, ["num_dets", "num_detections", "0, 1, 2, 3"]),
        ("efficientnms", {**EFFICIENTNMS, "more": (1,)}, 640, 80, ["four outputs", "more"]),
        ("efficientnms", {}, 640, 80, ["the model has none"]),
        ("classify", CLASSIFY, 224, 999, ["1000 classes", "999 labels"]),
        ("classify", {"logits": (1, 1000, 1, 1)}, 224, 1000, ["[1, classes]", "[1, 1000, 1, 1]"]),
        ("classify", YOLOX, 416, 80, ["[1, 3549, 85]", "'yolox' with 80 labels"]),
    ],
)
def test_what_does_not_fit_is_refused_in_plain_words(
    layout: Layout, shapes: Shapes, side: int, classes: int, words: list[str]
) -> None:
    with pytest.raises(BundleError) as caught:
        build(layout, shapes, side, classes)
    error = caught.value
    assert error.code == "layout_mismatch"
    assert error.remedy
    for word in [repr(layout), "found:", *words]:
        assert word in str(error)


def test_a_layout_that_is_not_known_is_refused() -> None:
    output = replace(OutputSpec("yolox", ("a",)), layout="yolov99")  # type: ignore[arg-type]
    with pytest.raises(BundleError, match=r"no such layout.*centernet") as caught:
        build_decoder(output, InputSpec(416, 416), YOLOX)
    assert caught.value.code == "layout_mismatch"


def test_suggestions_name_all_that_could_be_and_labels_narrow_them() -> None:
    both = suggest_layout(NANODET, 320, 320)
    assert both == (LayoutFit("yolox", 107), LayoutFit("nanodet", 80))
    assert suggest_layout(NANODET, 320, 320, classes=80) == (LayoutFit("nanodet", 80),)
    assert suggest_layout({"output0": (1, 84, 8401)}, 640, 640, classes=80) == ()
    assert [fit.layout for fit in suggest_layout(ROWS, 640, 640)] == ["yolov10", "rtdetr", "rtdetr-topk"]
    # A head that is still to be decoded is not taken for rows of chosen boxes.
    assert suggest_layout({"output": (1, 3549, 6)}, 416, 416) == (LayoutFit("yolox", 1),)
