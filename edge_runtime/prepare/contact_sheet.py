"""A picture of pictures with what a model found in them: the check by eye of an import."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edge_runtime.prepare.png import encode_png
from edge_runtime.records.frames import Detections, Output, Pixels
from edge_runtime.records.spec import InputSpec
from edge_runtime.vision.draw import draw
from edge_runtime.vision.geometry import to_model

__all__ = ["MAX_PICTURES", "cell", "contact_sheet"]

MAX_PICTURES = 12
_CELL = InputSpec(480, 360, "RGB", "letterbox-center", pad=24)
_CELLS_A_ROW = 4
_GAP = 6
_GROUND = 255


def cell(picture: Pixels, outputs: Sequence[Output], labels: Sequence[str]) -> NDArray[np.uint8]:
    """[360, 480 * n, 3] uint8 RGB: the picture once for each of the n `outputs` (boxes in its own px), drawn in.

    Raises CameraError where the picture cannot be scaled.
    """
    plane = np.empty(_CELL.shape, np.float32)
    transform = picture.write_into(plane, _CELL)
    pixels = np.clip(np.rint(plane), 0, 255).astype(np.uint8).transpose(1, 2, 0)
    drawn = []
    for output in outputs:
        if isinstance(output, Detections):
            output = replace(output, boxes=to_model(transform, output.boxes))
        drawn.append(draw(pixels, output, labels))
    return np.concatenate(drawn, axis=1)


def contact_sheet(cells: Sequence[NDArray[np.uint8]]) -> bytes:
    """A PNG of cells of one size ([height, width, 3] uint8 RGB, at least one), row by row."""
    height, width, _ = cells[0].shape
    columns = min(max(1, _CELLS_A_ROW * _CELL.width // width), len(cells))
    rows = -(-len(cells) // columns)
    shape = (rows * (height + _GAP) - _GAP, columns * (width + _GAP) - _GAP, 3)
    sheet = np.full(shape, _GROUND, np.uint8)
    for place, picture in enumerate(cells):
        row, column = divmod(place, columns)
        top, left = row * (height + _GAP), column * (width + _GAP)
        sheet[top : top + height, left : left + width] = picture
    return encode_png(sheet)
