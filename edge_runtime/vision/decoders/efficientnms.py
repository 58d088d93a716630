"""A graph that ends in the EfficientNMS plugin: counted boxes, scores and class ids, suppressed already.

num_dets [b, 1]: how many rows of this place are valid, the rest holds anything; det_boxes [b, K, 4]: x1 y1 x2
y2 in model px; det_scores [b, K]; det_classes [b, K] (TensorRT's efficientNMSPlugin with corner boxes). They
are told apart by name, these or the plugin's own `num_detections`, `detection_boxes`, `detection_scores` and
`detection_classes`: their order differs between the model and what is built from it. `nms_iou` does not apply;
the plugin has its own, and its own score threshold.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.records.frames import Detections, Transform
from edge_runtime.records.spec import InputSpec, OutputSpec
from edge_runtime.vision.decoders import common

_NAMES = (
    ("num_dets", "num_detections"),
    ("det_boxes", "detection_boxes"),
    ("det_scores", "detection_scores"),
    ("det_classes", "detection_classes"),
)


def _names(shapes: common.Shapes) -> tuple[str, str, str, str]:
    """The names of the count, the boxes, the scores and the class ids."""
    found = [name for names in _NAMES for name in names if name in shapes]
    if len(found) != 4 or len(shapes) != 4:
        raise common.LayoutMisfit(
            "it has four outputs, num_dets, det_boxes, det_scores and det_classes (or num_detections, "
            f"detection_boxes, detection_scores and detection_classes), and the model has {', '.join(shapes) or 'none'}"
        )
    count, boxes, scores, class_ids = found
    return count, boxes, scores, class_ids


def classes(shapes: common.Shapes, width: int, height: int) -> None:  # noqa: ARG001  every layout's signature
    """Any number of classes: the shapes do not say. Raises LayoutMisfit when they are not EfficientNMS's."""
    names = _names(shapes)
    count, boxes, scores, class_ids = (shapes[name] for name in names)
    rows = boxes[1:2]
    if count[1:] != (1,) or len(rows) != 1 or boxes[2:] != (4,) or scores[1:] != rows or class_ids[1:] != rows:
        found = ", ".join(f"{name} {list(shapes[name])}" for name in names)
        raise common.LayoutMisfit(f"its outputs are [1, 1], [1, boxes, 4], [1, boxes] and [1, boxes], not {found}")


class EfficientNmsDecoder:
    """Decodes one place of a batch. Holds only constants: safe from several threads at once.

    A count that is below 0, above K or no whole number is itself counted as one invalid, and as many rows are
    read as it can mean.
    """

    def __init__(self, output: OutputSpec, spec: InputSpec, shapes: common.Shapes) -> None:  # noqa: ARG002
        self._names = _names(shapes)
        self._shapes = tuple(shapes[name][1:] for name in self._names)
        self._classes = len(output.labels)
        self._threshold = np.float32(output.score_threshold)
        self._max_detections = output.max_detections

    def __call__(self, outputs: Mapping[str, NDArray[Any]], index: int, transform: Transform) -> Detections:
        (count,), boxes, scores, class_values = (
            common.place(outputs, name, index, shape) for name, shape in zip(self._names, self._shapes, strict=True)
        )
        rows = min(max(int(count), 0), boxes.shape[0]) if np.isfinite(count) else 0
        with np.errstate(over="ignore", invalid="ignore"):
            picked, found, class_ids, invalid = common.labelled_candidates(
                scores[:rows], class_values[:rows], self._threshold, self._classes
            )
            return common.detections(
                transform,
                boxes[picked].astype(np.float32, copy=False),
                found,
                class_ids,
                nms_iou=None,
                max_detections=self._max_detections,
                invalid=invalid + int(rows != count),
            )
