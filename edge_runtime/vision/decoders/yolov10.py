"""YOLOv10 and the end-to-end head of YOLO26: [b, K, 6], at most K boxes that the model has chosen itself.

Columns: x1, y1, x2, y2 in model px, score, class id. Rows of score 0 are padding. `nms_iou` does not apply
(Ultralytics `non_max_suppression` takes such outputs by the threshold alone).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.records.frames import Detections, Float32Array, Transform
from edge_runtime.records.spec import InputSpec, OutputSpec
from edge_runtime.vision.decoders import common

COLUMNS = 6


def classes(shapes: common.Shapes, width: int, height: int) -> None:
    """Any number of classes: the shape does not say. Raises LayoutMisfit when it is not YOLOv10's."""
    _, shape = common.only_output(shapes)
    if len(shape) != 3 or shape[1] < 1 or shape[2] != COLUMNS:
        raise common.LayoutMisfit(f"its output is [1, boxes, 6], and the model's is {list(shape)}")
    common.refuse_grid(shape, width, height)


class RowsDecoder:
    """Decodes one place of a batch. Holds only constants: safe from several threads at once.

    A layout of such rows says in `boxes` how its first four columns ([n, 4] float32) become corners in model px.
    """

    def __init__(self, output: OutputSpec, spec: InputSpec, shapes: common.Shapes) -> None:  # noqa: ARG002
        self._name, shape = common.only_output(shapes)
        self._shape = shape[1:]
        self._classes = len(output.labels)
        self._threshold = np.float32(output.score_threshold)
        self._max_detections = output.max_detections

    def __call__(self, outputs: Mapping[str, NDArray[Any]], index: int, transform: Transform) -> Detections:
        rows = common.place(outputs, self._name, index, self._shape)
        with np.errstate(over="ignore", invalid="ignore"):
            picked, scores, class_ids, invalid = common.labelled_candidates(
                rows[:, 4], rows[:, 5], self._threshold, self._classes
            )
            return common.detections(
                transform,
                self.boxes(rows[picked, 0:4].astype(np.float32, copy=False)),
                scores,
                class_ids,
                nms_iou=None,
                max_detections=self._max_detections,
                invalid=invalid,
            )

    def boxes(self, columns: Float32Array) -> Float32Array:
        """These are corners already."""
        return columns
