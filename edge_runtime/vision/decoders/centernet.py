"""CenterNet: a heat map of peaks and, per cell, the distances to the box's four sides.

heatmap [b, C, H/4, W/4]: sigmoid, zero except at 3x3 peaks; ltrb [b, 4, H/4, W/4] in model px. The cell
(x, y) stands for the box (4x - l, 4y - t, 4x + r, 4y + b). The peaks are the model's own suppression, so
`nms_iou` does not apply.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.records.frames import Detections, Transform
from edge_runtime.records.spec import InputSpec, OutputSpec
from edge_runtime.vision.decoders import common
from edge_runtime.vision.nms import no_detections

_STRIDE = 4


def _names(shapes: common.Shapes) -> tuple[str, str]:
    """The names of the heat map and of the distances: by name, else by which one has 4 channels."""
    if "heatmap" in shapes and "ltrb" in shapes:
        return "heatmap", "ltrb"
    if len(shapes) != 2:
        raise common.LayoutMisfit(f"it has a heat map and an ltrb output, and the model has {len(shapes)} outputs")
    with_four = [name for name, shape in shapes.items() if len(shape) == 4 and shape[1] == 4]
    if len(with_four) != 1:
        raise common.LayoutMisfit(
            f"exactly one output, ltrb, has 4 channels, and {len(with_four)} of the model's have; "
            "outputs named 'heatmap' and 'ltrb' would settle which is which"
        )
    (ltrb,) = with_four
    (heatmap,) = (name for name in shapes if name != ltrb)
    return heatmap, ltrb


def classes(shapes: common.Shapes, width: int, height: int) -> int:
    """How many classes outputs of these shapes have. Raises LayoutMisfit when they are not CenterNet's."""
    heatmap, ltrb = _names(shapes)
    rows, columns = -(-height // _STRIDE), -(-width // _STRIDE)
    heat_shape, ltrb_shape = shapes[heatmap], shapes[ltrb]
    if len(heat_shape) != 4 or heat_shape[1] < 1 or heat_shape[2:] != (rows, columns):
        raise common.LayoutMisfit(
            f"its heat map is [1, classes, {rows}, {columns}] for an input of {width}x{height}, "
            f"and the model's {heatmap!r} is {list(heat_shape)}"
        )
    if ltrb_shape[1:] != (4, rows, columns):
        raise common.LayoutMisfit(
            f"its ltrb is [1, 4, {rows}, {columns}] for an input of {width}x{height}, "
            f"and the model's {ltrb!r} is {list(ltrb_shape)}"
        )
    return heat_shape[1]


class CenternetDecoder:
    """Decodes one place of a batch. Holds only constants: safe from several threads at once."""

    def __init__(self, output: OutputSpec, spec: InputSpec, shapes: common.Shapes) -> None:  # noqa: ARG002
        self._heatmap, self._ltrb = _names(shapes)
        self._heat_shape = shapes[self._heatmap][1:]
        self._ltrb_shape = shapes[self._ltrb][1:]
        self._threshold = np.float32(output.score_threshold)
        self._max_detections = output.max_detections

    def __call__(self, outputs: Mapping[str, NDArray[Any]], index: int, transform: Transform) -> Detections:
        heat = common.place(outputs, self._heatmap, index, self._heat_shape).reshape(self._heat_shape[0], -1)
        ltrb = common.place(outputs, self._ltrb, index, self._ltrb_shape).reshape(4, -1)
        with np.errstate(over="ignore", invalid="ignore"):
            # A maximum per class reads the heat map once and writes nothing; a comparison over all of it
            # writes and scans as many booleans again, at three times the cost. Most classes are absent.
            present = common.above(heat.max(axis=1), self._threshold)
            if present.shape[0] == 0:
                return no_detections()
            hits, scores, invalid = common.candidates(heat[present], self._threshold)
            which, cells = np.divmod(hits, heat.shape[1])
            y, x = np.divmod(cells, self._heat_shape[2])
            left, top, right, bottom = ltrb[:, cells].astype(np.float32, copy=False)
            boxes = np.empty((cells.shape[0], 4), dtype=np.float32)
            boxes[:, 0] = x * _STRIDE - left
            boxes[:, 1] = y * _STRIDE - top
            boxes[:, 2] = x * _STRIDE + right
            boxes[:, 3] = y * _STRIDE + bottom
            return common.detections(
                transform,
                boxes,
                scores,
                present[which],
                nms_iou=None,
                max_detections=self._max_detections,
                invalid=invalid,
            )
