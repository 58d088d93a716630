"""From raw candidates to detections: reject, bound, suppress, limit.

The order is fixed, so that the same candidates give the same detections everywhere: invalid ones go
first (they must not take places in the bound), then all but the best `max_candidates` by score, then
non-maximum suppression within each class, then all but the best `max_detections`. Equal scores keep the
order of their index.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edge_runtime.records.frames import Detections, Float32Array
from edge_runtime.vision.geometry import clip_boxes

MAX_CANDIDATES = 1000
"""Candidates that enter suppression; it is quadratic in them. The rest is counted in `Detections.cut`."""

# Rows of the overlap matrix computed at once: bounds the temporaries to 1 MB each at MAX_CANDIDATES.
_BLOCK_ROWS = 256


def no_detections(*, cut: int = 0, invalid: int = 0) -> Detections:
    """Nothing found, typed: boxes [0, 4] float32, scores [0] float32, class_ids [0] int32."""
    return Detections(
        boxes=np.empty((0, 4), dtype=np.float32),
        scores=np.empty(0, dtype=np.float32),
        class_ids=np.empty(0, dtype=np.int32),
        cut=cut,
        invalid=invalid,
    )


def best_first(scores: Float32Array, limit: int) -> NDArray[np.intp]:
    """Indices of the `limit` highest of `scores` ([n] float32, finite), best first, ties by index."""
    count = scores.shape[0]
    if limit <= 0:
        return np.empty(0, dtype=np.intp)
    if count <= limit:
        return np.argsort(-scores, kind="stable")
    # Partition alone picks among equal scores by no rule; everything that ties with the last place is
    # sorted and cut by index.
    last = np.partition(scores, count - limit)[count - limit]
    near = np.flatnonzero(scores >= last)
    return near[np.argsort(-scores[near], kind="stable")[:limit]]


def suppress(boxes: Float32Array, class_ids: NDArray[np.int32], max_iou: float) -> NDArray[np.intp]:
    """Greedy non-maximum suppression within each class.

    boxes: [n, 4] x1 y1 x2 y2, finite, x2 > x1 and y2 > y1, best first; class_ids: [n]. A box goes when
    its intersection over union with a better kept one of its class is above `max_iou` (0-1). Returns the
    indices kept, ascending. Classes are kept apart by comparing them, not by shifting boxes: a shift
    breaks beyond its size, with negative coordinates and in low precision.
    """
    count = boxes.shape[0]
    if count < 2:
        return np.arange(count)
    x1, y1, x2, y2 = np.ascontiguousarray(boxes.T)
    area = (x2 - x1) * (y2 - y1)
    keep = np.ones(count, dtype=np.bool_)
    limit = np.float32(max_iou)
    for start in range(0, count, _BLOCK_ROWS):
        rows = slice(start, min(start + _BLOCK_ROWS, count))
        rest = slice(start, count)
        width = np.minimum(x2[rows, None], x2[rest])
        width -= np.maximum(x1[rows, None], x1[rest])
        np.maximum(width, np.float32(0), out=width)
        height = np.minimum(y2[rows, None], y2[rest])
        height -= np.maximum(y1[rows, None], y1[rest])
        np.maximum(height, np.float32(0), out=height)
        shared = np.multiply(width, height, out=width)
        union = np.subtract(area[rows, None] + area[rest], shared, out=height)
        union *= limit
        over = shared > union
        over &= class_ids[rows, None] == class_ids[rest]
        # A box overlaps itself; only rows with more than that can suppress anything.
        over.ravel()[:: count - start + 1] = False
        for row in np.flatnonzero(over.any(axis=1)).tolist():
            if keep[start + row]:
                hit = over[row]
                hit[: row + 1] = False
                keep[rest] &= ~hit
    return np.flatnonzero(keep)


def select(
    boxes: Float32Array,
    scores: Float32Array,
    class_ids: NDArray[np.int32],
    *,
    width: int,
    height: int,
    nms_iou: float | None,
    max_detections: int,
    max_candidates: int = MAX_CANDIDATES,
    invalid: int = 0,
) -> Detections:
    """The detections among candidates that have already passed the score threshold.

    boxes: [n, 4] x1 y1 x2 y2 in px of a picture of width x height px, not clipped; scores: [n], 0-1;
    class_ids: [n]. `nms_iou` None skips suppression. `invalid` is what the caller has rejected already.

    A candidate is invalid when its score or a coordinate is not finite, or when nothing of its box is
    inside the picture (negative and zero sizes included). What remains is clipped before suppression.
    Scores are returned no higher than 1. The arrays are new; no input is kept or changed.
    """
    count = scores.shape[0]
    if count == 0:
        return no_detections(invalid=invalid)
    clipped = clip_boxes(boxes, width, height)
    valid = (clipped[:, 2] > clipped[:, 0]) & (clipped[:, 3] > clipped[:, 1])
    # Clipping makes infinite coordinates finite, so the raw ones are looked at too.
    valid &= np.isfinite(boxes).all(axis=1)
    valid &= np.isfinite(scores)
    usable = np.flatnonzero(valid)
    invalid += count - usable.shape[0]
    if usable.shape[0] == 0:
        return no_detections(invalid=invalid)
    chosen = usable[best_first(scores[usable], max_candidates)]
    cut = usable.shape[0] - chosen.shape[0]
    if nms_iou is not None:
        chosen = chosen[suppress(clipped.take(chosen, axis=0), class_ids[chosen], nms_iou)]
    chosen = chosen[:max_detections]
    return Detections(
        boxes=clipped.take(chosen, axis=0),
        scores=np.minimum(scores[chosen], np.float32(1)),
        class_ids=class_ids[chosen].astype(np.int32, copy=False),
        cut=cut,
        invalid=invalid,
    )
