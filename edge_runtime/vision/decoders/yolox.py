"""YOLOX: [b, N, 5 + C], an undecoded grid over strides 8, 16 and 32.

Columns: x, y, log w, log h, objectness, class scores (the last two already sigmoid). Centre
(v + grid) * stride, size exp(v) * stride, score objectness * class score (YOLOX `demo_postprocess`). One
class per cell, the best, as YOLOX's own `postprocess` takes it; NMS is ours.
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

_BOX_COLUMNS = 5


def classes(shapes: common.Shapes, width: int, height: int) -> int:
    """How many classes outputs of these shapes have. Raises LayoutMisfit when they are not YOLOX's."""
    _, shape = common.only_output(shapes)
    if len(shape) != 3 or shape[1] != common.anchor_count(width, height) or shape[2] <= _BOX_COLUMNS:
        raise common.anchors_misfit(shape, "5 + classes", width, height)
    return shape[2] - _BOX_COLUMNS


class YoloxDecoder:
    """Decodes one place of a batch. Holds only constants: safe from several threads at once."""

    def __init__(self, output: OutputSpec, spec: InputSpec, shapes: common.Shapes) -> None:
        self._name, shape = common.only_output(shapes)
        self._shape = shape[1:]
        self._grid = common.anchor_grid(spec.width, spec.height)
        self._threshold = np.float32(output.score_threshold)
        self._nms_iou = output.nms_iou
        self._max_detections = output.max_detections

    def __call__(self, outputs: Mapping[str, NDArray[Any]], index: int, transform: Transform) -> Detections:
        cells = common.place(outputs, self._name, index, self._shape)
        with np.errstate(over="ignore", invalid="ignore"):
            rows, raw, scores, best, invalid = common.objectness_candidates(cells, self._threshold)
            if rows.shape[0] == 0:
                return no_detections(invalid=invalid)
            grid = self._grid[rows]
            stride = grid[:, 2:]
            centre = (raw[:, 0:2] + grid[:, 0:2]) * stride
            half = np.exp(raw[:, 2:4]) * stride * np.float32(0.5)
            return common.detections(
                transform,
                np.concatenate((centre - half, centre + half), axis=1),
                scores,
                best,
                nms_iou=self._nms_iou,
                max_detections=self._max_detections,
                invalid=invalid,
            )
