"""Results drawn on a picture: for previews, golden pictures and the import's check by eye."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edge_runtime.records.frames import Classification, Output

_GOLDEN_RATIO = 0.618033988749895
_MARGIN = 2


def class_color(class_id: int) -> tuple[int, int, int]:
    """A class's colour, R G B 0-255, the same everywhere and far from its neighbours' in hue."""
    hue = (class_id * _GOLDEN_RATIO) % 1.0
    # Classes further on come round to similar hues: three steps of brightness tell those apart.
    value = (1.0, 0.8, 0.62)[class_id // 8 % 3]
    red, green, blue = colorsys.hsv_to_rgb(hue, 0.85, value)
    return round(red * 255), round(green * 255), round(blue * 255)


def draw(picture: NDArray[np.uint8], output: Output, labels: Sequence[str]) -> NDArray[np.uint8]:
    """A copy of the picture with boxes, labels and scores, or with a classifier's classes as a list.

    picture: [height, width, 3] uint8 RGB, any size and stride, not changed. The text keeps a legible
    size on small pictures and stays inside. A class id without a label is written as its number. Raises
    ValueError for another shape or dtype.
    """
    if picture.ndim != 3 or picture.shape[2] != 3 or picture.dtype != np.uint8:
        raise ValueError(f"wanted [height, width, 3] uint8 RGB, not {list(picture.shape)} {picture.dtype}")
    canvas = np.array(picture, order="C")
    size = _text_size(canvas)
    if isinstance(output, Classification):
        top = 0
        for class_id, score in zip(output.class_ids.tolist(), output.scores.tolist(), strict=True):
            top = _write(canvas, _caption(class_id, score, labels), (0, top), class_color(class_id), size)
        return canvas
    # The best is drawn last, so that it lies on top.
    drawn = list(zip(output.boxes.tolist(), output.class_ids.tolist(), output.scores.tolist(), strict=True))
    for box, class_id, score in reversed(drawn):
        _outline(canvas, box, class_color(class_id), size)
        corner = round(box[0]), round(box[1])
        _write(canvas, _caption(class_id, score, labels), corner, class_color(class_id), size, above=True)
    return canvas


def _caption(class_id: int, score: float, labels: Sequence[str]) -> str:
    label = labels[class_id] if 0 <= class_id < len(labels) else str(class_id)
    return f"{label} {score:.2f}"


def _text_size(canvas: NDArray[np.uint8]) -> float:
    """Scale of OpenCV's simplex font: 0.4 is the smallest that can be read."""
    shorter: int = min(canvas.shape[0], canvas.shape[1])
    return max(0.4, shorter / 1000)


def _outline(canvas: NDArray[np.uint8], box: Sequence[float], color: tuple[int, int, int], size: float) -> None:
    # cv2 is imported where it is used: it costs 17 MB, and a daemon without a preview never draws.
    import cv2

    left, top, right, bottom = (round(side) for side in box)
    # Box edges lie between pixels; the last pixel inside is one before the right and bottom edges.
    corner = max(right - 1, left), max(bottom - 1, top)
    cv2.rectangle(canvas, (left, top), corner, color, max(1, round(size * 2)))


def _write(
    canvas: NDArray[np.uint8],
    text: str,
    at: tuple[int, int],
    color: tuple[int, int, int],
    size: float,
    *,
    above: bool = False,
) -> int:
    """Text on a filled ground with its top-left at `at`, or bottom-left if `above` and there is room.

    Moved to stay inside the picture. Returns the row below it.
    """
    import cv2

    font, thickness = cv2.FONT_HERSHEY_SIMPLEX, max(1, round(size * 1.6))
    (text_width, text_height), baseline = cv2.getTextSize(text, font, size, thickness)
    width: int = text_width + 2 * _MARGIN
    height: int = text_height + baseline + 2 * _MARGIN
    left = max(0, min(at[0], canvas.shape[1] - width))
    wanted = at[1] - height if above and at[1] >= height else at[1]
    top: int = max(0, min(wanted, canvas.shape[0] - height))
    cv2.rectangle(canvas, (left, top), (left + width - 1, top + height - 1), color, cv2.FILLED)
    # Black or white, whichever stands out: by the ground's brightness as eyes weigh it.
    bright = 0.299 * color[0] + 0.587 * color[1] + 0.114 * color[2] > 128
    ink = (0, 0, 0) if bright else (255, 255, 255)
    base = (left + _MARGIN, top + _MARGIN + text_height)
    cv2.putText(canvas, text, base, font, size, ink, thickness, cv2.LINE_AA)
    return top + height
