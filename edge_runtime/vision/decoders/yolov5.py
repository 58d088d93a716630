"""YOLOv5 and YOLOv7: [b, N, 5 + C], decoded by the model: N is 3 anchors per cell of strides 8, 16 and 32.

The larger P6 models have stride 64 too. Columns: centre x, centre y, width, height in model px, objectness,
class scores, all activated. Score objectness * class score, one class per row, the best (Ultralytics
YOLOv5 `non_max_suppression` without `multi_label`); NMS is ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.records.frames import Detections, Transform
from edge_runtime.records.spec import InputSpec, OutputSpec
from edge_runtime.vision.decoders import common

_BOX_COLUMNS = 5


def classes(shapes: common.Shapes, width: int, height: int) -> int:
    """How many classes outputs of these shapes have. Raises LayoutMisfit when they are not YOLOv5's."""
    _, shape = common.only_output(shapes)
    rows, rows_p6 = (
        common.ANCHORS_PER_CELL * common.anchor_count(width, height, strides)
        for strides in (common.STRIDES, common.STRIDES_P6)
    )
    if len(shape) != 3 or shape[1] not in (rows, rows_p6) or shape[2] <= _BOX_COLUMNS:
        raise common.LayoutMisfit(
            f"its output is [1, {rows}, 5 + classes] for an input of {width}x{height} (3 anchors a cell, strides "
            f"8, 16, 32; with stride 64 too it has {rows_p6} rows), and the model's is {list(shape)}"
        )
    return shape[2] - _BOX_COLUMNS


class Yolov5Decoder:
    """Decodes one place of a batch. Holds only constants: safe from several threads at once."""

    def __init__(self, output: OutputSpec, spec: InputSpec, shapes: common.Shapes) -> None:  # noqa: ARG002
        self._name, shape = common.only_output(shapes)
        self._shape = shape[1:]
        self._threshold = np.float32(output.score_threshold)
        self._nms_iou = output.nms_iou
        self._max_detections = output.max_detections

    def __call__(self, outputs: Mapping[str, NDArray[Any]], index: int, transform: Transform) -> Detections:
        cells = common.place(outputs, self._name, index, self._shape)
        with np.errstate(over="ignore", invalid="ignore"):
            _, raw, scores, best, invalid = common.objectness_candidates(cells, self._threshold)
            return common.detections(
                transform,
                common.corners(raw),
                scores,
                best,
                nms_iou=self._nms_iou,
                max_detections=self._max_detections,
                invalid=invalid,
            )
