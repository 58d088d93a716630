"""A declared layout against the shapes that a model really has."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edge_runtime.errors import BundleError
from edge_runtime.records.spec import InputSpec, Layout, OutputSpec
from edge_runtime.vision.decode import LayoutFit, build_decoder, suggest_layout

Shapes = dict[str, tuple[int, ...]]

YOLOX: Shapes = {"output": (1, 3549, 85)}
NANODET: Shapes = {"output": (1, 2100, 112)}
CENTERNET: Shapes = {"heatmap": (1, 80, 104, 104), "ltrb": (1, 4, 104, 104)}
CLASSIFY: Shapes = {"logits": (1, 1000)}


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
    ],
)
def test_what_fits_is_built(layout: Layout, shapes: Shapes, side: int, classes: int) -> None:
    assert callable(build(layout, shapes, side, classes))
    assert LayoutFit(layout, classes) in suggest_layout(shapes, side, side)


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
    assert suggest_layout({"output0": (1, 84, 8400)}, 640, 640) == ()
