"""RT-DETR: K queries, each a box (centre x, centre y, width, height as shares of the model's input) and scores.

Three forms, as the exporters write them:

- one output [b, K, 4 + C]: box, class scores already sigmoid (Ultralytics);
- one output [b, K, 6]: box, score, class id, for any number of labels but two. With two labels this shape is
  read as 4 + C; the layout `rtdetr-topk` says the other;
- two outputs, boxes [b, K, 4] and logits [b, K, C], to which the sigmoid is applied here (Hugging Face, where
  they are called `pred_boxes` and `logits`). The boxes are the one with 4 columns; where both have 4, these
  names settle it.

The best pairs of query and class are taken, so that a query may stand for several classes (RT-DETR
`RTDETRPostProcessor` with `use_focal_loss`). `nms_iou` does not apply.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.records.frames import Decoder, Detections, Float32Array, Transform
from edge_runtime.records.spec import InputSpec, OutputSpec
from edge_runtime.vision.decoders import common, rtdetr_topk
from edge_runtime.vision.nms import no_detections

_BOX_COLUMNS = 4


def _names(shapes: common.Shapes) -> tuple[str, str]:
    """The names of the boxes and of the logits."""
    with_four = [name for name, shape in shapes.items() if shape[2:] == (_BOX_COLUMNS,)]
    if len(with_four) == 2 and shapes.keys() == {"pred_boxes", "logits"}:
        return "pred_boxes", "logits"
    if len(with_four) != 1:
        raise common.LayoutMisfit(
            f"exactly one of its two outputs, the boxes, is [1, queries, 4], and {len(with_four)} of the model's "
            "are; outputs named 'pred_boxes' and 'logits' would settle which is which"
        )
    (boxes,) = with_four
    (logits,) = (name for name in shapes if name != boxes)
    return boxes, logits


def classes(shapes: common.Shapes, width: int, height: int) -> int | None:
    """How many classes outputs of these shapes have; None where the shape does not say.

    Raises LayoutMisfit when they are not RT-DETR's.
    """
    if len(shapes) == 2:
        boxes, logits = _names(shapes)
        box_shape, logit_shape = shapes[boxes], shapes[logits]
        if len(logit_shape) != 3 or logit_shape[1] != box_shape[1] or min(logit_shape) < 1:
            raise common.LayoutMisfit(
                f"its logits are [1, {box_shape[1]}, classes] beside boxes {list(box_shape)}, "
                f"and the model's {logits!r} is {list(logit_shape)}"
            )
        return logit_shape[2]
    if len(shapes) != 1:
        raise common.LayoutMisfit(f"it has one output, or boxes and logits, and the model has {len(shapes)} outputs")
    _, shape = common.only_output(shapes)
    if len(shape) != 3 or shape[1] < 1 or shape[2] <= _BOX_COLUMNS:
        raise common.LayoutMisfit(f"its output is [1, queries, 4 + classes], and the model's is {list(shape)}")
    common.refuse_grid(shape, width, height)
    return None if shape[2] == rtdetr_topk.COLUMNS else shape[2] - _BOX_COLUMNS


def decoder(output: OutputSpec, spec: InputSpec, shapes: common.Shapes) -> Decoder:
    """The decoder for the form that these shapes and the number of labels say."""
    if len(shapes) == 2:
        return LogitsDecoder(output, spec, shapes)
    _, shape = common.only_output(shapes)
    if shape[2] != _BOX_COLUMNS + len(output.labels):
        return rtdetr_topk.RtdetrTopkDecoder(output, spec, shapes)
    return ScoresDecoder(output, spec, shapes)


class ScoresDecoder:
    """Decodes one place of [b, K, 4 + C]. Holds only constants: safe from several threads at once."""

    def __init__(self, output: OutputSpec, spec: InputSpec, shapes: common.Shapes) -> None:
        self._name, shape = common.only_output(shapes)
        self._shape = shape[1:]
        self._size = rtdetr_topk.size_of(spec)
        self._threshold = np.float32(output.score_threshold)
        self._max_detections = output.max_detections

    def __call__(self, outputs: Mapping[str, NDArray[Any]], index: int, transform: Transform) -> Detections:
        rows = common.place(outputs, self._name, index, self._shape)
        with np.errstate(over="ignore", invalid="ignore"):
            hits = common.above(rows[:, _BOX_COLUMNS:], self._threshold)
            queries, class_ids = np.divmod(hits, self._shape[1] - _BOX_COLUMNS)
            picked, scores, invalid = common.candidates(rows[queries, class_ids + _BOX_COLUMNS], self._threshold)
            boxes = rows[queries[picked], 0:_BOX_COLUMNS].astype(np.float32, copy=False)
            return common.detections(
                transform,
                common.corners(boxes * self._size),
                scores,
                class_ids[picked],
                nms_iou=None,
                max_detections=self._max_detections,
                invalid=invalid,
            )


class LogitsDecoder:
    """Decodes one place of boxes and logits. Holds only constants: safe from several threads at once.

    A logit that is NaN or +inf counts as invalid although its sigmoid would be finite; -inf is a score of 0.
    """

    def __init__(self, output: OutputSpec, spec: InputSpec, shapes: common.Shapes) -> None:
        self._boxes, self._logits = _names(shapes)
        self._box_shape, self._logit_shape = shapes[self._boxes][1:], shapes[self._logits][1:]
        self._size = rtdetr_topk.size_of(spec)
        self._threshold = np.float32(output.score_threshold)
        self._least_logit = _logit_below(output.score_threshold)
        self._max_detections = output.max_detections

    def __call__(self, outputs: Mapping[str, NDArray[Any]], index: int, transform: Transform) -> Detections:
        boxes = common.place(outputs, self._boxes, index, self._box_shape)
        logits = common.place(outputs, self._logits, index, self._logit_shape)
        with np.errstate(over="ignore", invalid="ignore"):
            # The exponential is taken of the few that can be above the threshold, not of all.
            hits, values, invalid = common.candidates(logits, self._least_logit)
            scores: Float32Array = np.reciprocal(np.exp(-values) + np.float32(1))
            picked = common.above(scores, self._threshold)
            if picked.shape[0] == 0:
                return no_detections(invalid=invalid)
            queries, class_ids = np.divmod(hits[picked], self._logit_shape[1])
            return common.detections(
                transform,
                common.corners(boxes[queries].astype(np.float32, copy=False) * self._size),
                scores[picked],
                class_ids,
                nms_iou=None,
                max_detections=self._max_detections,
                invalid=invalid,
            )


def _logit_below(score: float) -> np.float32:
    """A logit whose sigmoid is certainly not above `score` (0-1), by more than float32 rounds."""
    share = min(score, 1.0) - 1e-6
    logit: np.float32 = np.float32(math.log(share / (1 - share)) if share > 0 else -math.inf)
    return logit
