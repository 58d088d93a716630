"""YOLOv8, v9, v11 and v12: [b, 4 + C, N], decoded by the model: N cells of strides 8, 16 and 32.

Also the P6 models (stride 64 too) and the P2 models (stride 4 too). Rows: centre x, centre y, width, height
in model px, then the class scores (already sigmoid); there is no objectness. One class per cell, the best
(Ultralytics `non_max_suppression` without `multi_label`); NMS is ours.
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

_BOX_ROWS = 4


def classes(shapes: common.Shapes, width: int, height: int) -> int:
    """How many classes outputs of these shapes have. Raises LayoutMisfit when they are not YOLOv8's."""
    _, shape = common.only_output(shapes)
    cells, cells_p6, cells_p2 = (
        common.anchor_count(width, height, strides)
        for strides in (common.STRIDES, common.STRIDES_P6, common.STRIDES_P2)
    )
    if len(shape) != 3 or shape[1] <= _BOX_ROWS or shape[2] not in (cells, cells_p6, cells_p2):
        raise common.LayoutMisfit(
            f"its output is [1, 4 + classes, {cells}] for an input of {width}x{height} (strides 8, 16, 32; "
            f"{cells_p6} with stride 64 too, {cells_p2} with stride 4 too), and the model's is {list(shape)}"
        )
    return shape[1] - _BOX_ROWS


class Yolov8Decoder:
    """Decodes one place of a batch. Holds only constants: safe from several threads at once."""

    def __init__(self, output: OutputSpec, spec: InputSpec, shapes: common.Shapes) -> None:  # noqa: ARG002
        self._name, shape = common.only_output(shapes)
        self._shape = shape[1:]
        self._threshold = np.float32(output.score_threshold)
        self._nms_iou = output.nms_iou
        self._max_detections = output.max_detections

    def __call__(self, outputs: Mapping[str, NDArray[Any]], index: int, transform: Transform) -> Detections:
        columns = common.place(outputs, self._name, index, self._shape)
        with np.errstate(over="ignore", invalid="ignore"):
            # A maximum down the columns reads every score once, along memory, and writes one row; comparing
            # all scores writes and scans as many booleans again, at 1.4 times the cost.
            tops = columns[_BOX_ROWS:].max(axis=0)
            cells, scores, invalid = common.candidates(tops, self._threshold)
            if cells.shape[0] == 0:
                return no_detections(invalid=invalid)
            raw = columns.take(cells, axis=1)
            return common.detections(
                transform,
                common.corners(raw[:_BOX_ROWS].T.astype(np.float32)),
                scores,
                raw[_BOX_ROWS:].argmax(axis=0),
                nms_iou=self._nms_iou,
                max_detections=self._max_detections,
                invalid=invalid,
            )
