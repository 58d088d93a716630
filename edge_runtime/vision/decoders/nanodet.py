"""NanoDet-m: [b, N, C + 32], class scores (already sigmoid) and four distances over strides 8, 16 and 32.

Each distance (left, top, right, bottom, in strides) is a distribution over 8 bins, the expectation of
whose softmax is the value (Generalized Focal Loss; `reg_max` 7, which all NanoDet-m models have). A
cell's centre is (i + 0.5) * stride, as in NanoDet's own `get_single_level_center_point`; the form with
- 0.5 that is also in use counts from pixel centres, half a px off our edges (AP .2685 against .2707 on
128 COCO images). One class per cell, the best; NMS is ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.records.frames import Detections, Float32Array, Transform
from edge_runtime.records.spec import InputSpec, OutputSpec
from edge_runtime.vision.decoders import common
from edge_runtime.vision.nms import no_detections

_BINS = 8
_BOX_COLUMNS = 4 * _BINS
_BIN_VALUES = np.arange(_BINS, dtype=np.float32)


def classes(shapes: common.Shapes, width: int, height: int) -> int:
    """How many classes outputs of these shapes have. Raises LayoutMisfit when they are not NanoDet-m's."""
    _, shape = common.only_output(shapes)
    if len(shape) != 3 or shape[1] != common.anchor_count(width, height) or shape[2] <= _BOX_COLUMNS:
        raise common.anchors_misfit(shape, f"classes + {_BOX_COLUMNS}", width, height)
    return shape[2] - _BOX_COLUMNS


def _expected(bins: Float32Array) -> Float32Array:
    """[n, 4, 8] logits to [n, 4] distances, in strides."""
    weights = np.exp(bins - bins.max(axis=2, keepdims=True))
    distances: Float32Array = (weights @ _BIN_VALUES) / weights.sum(axis=2)
    return distances


class NanodetDecoder:
    """Decodes one place of a batch. Holds only constants: safe from several threads at once."""

    def __init__(self, output: OutputSpec, spec: InputSpec, shapes: common.Shapes) -> None:
        self._name, shape = common.only_output(shapes)
        self._shape = shape[1:]
        self._classes = shape[2] - _BOX_COLUMNS
        grid = common.anchor_grid(spec.width, spec.height)
        self._stride = grid[:, 2:]
        self._centre = (grid[:, 0:2] + np.float32(0.5)) * self._stride
        self._threshold = np.float32(output.score_threshold)
        self._nms_iou = output.nms_iou
        self._max_detections = output.max_detections

    def __call__(self, outputs: Mapping[str, NDArray[Any]], index: int, transform: Transform) -> Detections:
        cells = common.place(outputs, self._name, index, self._shape)
        with np.errstate(over="ignore", invalid="ignore"):
            # One comparison over all scores and a look at the few hits costs half of a maximum per cell.
            hits = common.above(cells[:, : self._classes], self._threshold)
            if hits.shape[0] == 0:
                return no_detections()
            rows = hits // self._classes
            first = np.ones(rows.shape[0], dtype=np.bool_)
            np.not_equal(rows[1:], rows[:-1], out=first[1:])
            rows = rows[first]
            raw = cells.take(rows, axis=0).astype(np.float32, copy=False)
            best = raw[:, : self._classes].argmax(axis=1)
            tops = raw[np.arange(rows.shape[0]), best]
            picked, scores, invalid = common.candidates(tops, self._threshold)
            raw, best, rows = raw[picked], best[picked], rows[picked]
            distances = _expected(raw[:, self._classes :].reshape(-1, 4, _BINS)) * self._stride[rows]
            centre = self._centre[rows]
            boxes = np.concatenate((centre - distances[:, 0:2], centre + distances[:, 2:4]), axis=1)
            return common.detections(
                transform,
                boxes,
                scores,
                best,
                nms_iou=self._nms_iou,
                max_detections=self._max_detections,
                invalid=invalid,
            )
