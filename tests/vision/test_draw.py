from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_runtime.records.frames import Classification, Detections
from edge_runtime.vision.draw import class_color, draw
from edge_runtime.vision.nms import no_detections

LABELS = ("person", "bicycle", "car")


def detections(*boxes: tuple[float, float, float, float]) -> Detections:
    n = len(boxes)
    return Detections(
        np.array(boxes, dtype=np.float32).reshape(-1, 4),
        np.linspace(0.9, 0.5, n, dtype=np.float32),
        np.arange(n, dtype=np.int32),
    )


def test_a_box_lies_on_its_edges_in_its_colour() -> None:
    picture = np.full((200, 300, 3), 90, dtype=np.uint8)
    drawn = draw(picture, detections((40, 60, 240, 180)), LABELS)
    for x, y in ((40, 100), (239, 100), (100, 60), (200, 179)):
        assert tuple(drawn[y, x]) == class_color(0)
    for x, y in ((39, 100), (240, 100), (280, 59), (100, 180), (140, 120)):
        assert tuple(drawn[y, x]) == (90, 90, 90)
    # The label stands above, on a ground of the same colour.
    assert (drawn[50:60, 40:80] == class_color(0)).all(axis=-1).sum() > 100
    assert (picture == 90).all()


def test_text_can_be_read_on_a_small_picture_and_stays_inside() -> None:
    picture = np.zeros((48, 120, 3), dtype=np.uint8)
    drawn = draw(picture, detections((100, 2, 119, 20)), LABELS)
    ground = np.argwhere((drawn == class_color(0)).all(axis=-1))
    # Moved left, so that all of it is inside, and at least 10 px high.
    assert ground[:, 1].min() < 60
    assert np.ptp(ground[:, 0]) >= 10


@pytest.mark.parametrize("shape", [(1, 1, 3), (3, 500, 3), (500, 3, 3), (1080, 1920, 3)])
def test_any_size_of_picture_and_box(shape: tuple[int, int, int]) -> None:
    picture = np.zeros(shape, dtype=np.uint8)
    h, w = shape[:2]
    drawn = draw(picture, detections((0, 0, w, h), (w - 0.2, h - 0.2, w, h), (0, 0, 0.1, 0.1)), LABELS)
    assert drawn.shape == shape
    assert drawn.dtype == np.uint8
    assert drawn.any()


def test_a_view_is_drawn_on_as_a_copy() -> None:
    base = np.zeros((100, 200, 3), dtype=np.uint8)
    drawn = draw(base[:, ::-1], detections((10, 30, 50, 60)), LABELS)
    assert drawn.any()
    assert not base.any()
    assert not draw(base, no_detections(), LABELS).any()


def test_classes_are_listed_best_first() -> None:
    output = Classification(np.array([0.8, 0.1], np.float32), np.array([1, 99], np.int32))
    drawn = draw(np.zeros((60, 200, 3), dtype=np.uint8), output, LABELS)
    rows = [np.argwhere((drawn == class_color(k)).all(axis=-1))[:, 0] for k in (1, 99)]
    assert rows[0].max() < rows[1].min()


def test_colours_of_neighbouring_classes_differ() -> None:
    colors = np.array([class_color(k) for k in range(80)], dtype=int)
    assert len({tuple(color) for color in colors.tolist()}) == 80
    assert (np.abs(np.diff(colors, axis=0)).sum(axis=1) > 100).all()


@pytest.mark.parametrize("picture", [np.zeros((5, 5), np.uint8), np.zeros((5, 5, 4), np.uint8), np.zeros((5, 5, 3))])
def test_what_is_no_rgb_picture_is_refused(picture: NDArray[np.uint8]) -> None:
    with pytest.raises(ValueError, match="RGB"):
        draw(picture, no_detections(), LABELS)


def test_opencv_is_not_imported_before_something_is_drawn() -> None:
    code = "import sys, edge_runtime.vision.draw, edge_runtime.vision.decode; sys.exit('cv2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
