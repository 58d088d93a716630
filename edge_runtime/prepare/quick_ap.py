"""COCO's mAP of detections against boxes without crowds, fast enough to be asked for every candidate of a search.

pycocotools looks at every class in every picture. Here only classes that a picture has a box of are matched; all other
detections are wrong at once. The figures are the same (a test holds them together).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edge_runtime.prepare.evidence import overlap
from edge_runtime.prepare.samples import Boxes
from edge_runtime.records.frames import Detections

__all__ = ["quick_map"]

_THRESHOLDS = np.linspace(0.5, 0.95, 10)
_RECALLS = np.linspace(0.0, 1.0, 101)


def quick_map(truths: Sequence[Boxes], said: Sequence[Detections]) -> float:
    """Mean over ten IoU thresholds from 0.5 to 0.95 and the classes that have a box (0-1); 0 where none has.

    `said[i]` belongs to `truths[i]`, best score first. `crowd` and `area` of the truth are not looked at.
    """
    positives: dict[int, int] = {}
    scores: dict[int, list[NDArray[np.float32]]] = {}
    hits: dict[int, list[NDArray[np.bool_]]] = {}
    for truth, found in zip(truths, said, strict=True):
        for class_id, count in zip(*np.unique(truth.class_ids, return_counts=True), strict=True):
            positives[int(class_id)] = positives.get(int(class_id), 0) + int(count)
        there = set(truth.class_ids.tolist())
        for class_id in np.unique(found.class_ids).tolist():
            rows = np.flatnonzero(found.class_ids == class_id)
            hit: NDArray[np.bool_] = np.zeros((len(_THRESHOLDS), len(rows)), np.bool_)
            if class_id in there:
                hit = _greedy(overlap(found.boxes[rows], truth.boxes[truth.class_ids == class_id]))
            scores.setdefault(class_id, []).append(found.scores[rows])
            hits.setdefault(class_id, []).append(hit)
    if not positives:
        return 0.0
    values = [
        _precision(np.concatenate(scores[class_id]), np.concatenate(hits[class_id], axis=1), count)
        if class_id in scores
        else 0.0
        for class_id, count in sorted(positives.items())
    ]
    return float(np.mean(values))


def _greedy(ious: NDArray[np.float64]) -> NDArray[np.bool_]:
    """[thresholds, detections]: which detections meet a box that no better one has taken.

    `ious`: [detections, boxes].
    """
    hit = np.zeros((len(_THRESHOLDS), ious.shape[0]), np.bool_)
    near = np.flatnonzero(ious.max(axis=1) >= _THRESHOLDS[0])
    free = np.ones((len(_THRESHOLDS), ious.shape[1]), np.bool_)
    places = np.arange(len(_THRESHOLDS))
    for row in near.tolist():
        open_ious = np.where(free, ious[row][None], -1.0)
        # of equal ones COCO takes the last
        best = open_ious.shape[1] - 1 - open_ious[:, ::-1].argmax(axis=1)
        met = open_ious[places, best] >= np.minimum(_THRESHOLDS, 1 - 1e-10)
        hit[:, row] = met
        free[places[met], best[met]] = False
    return hit


def _precision(scores: NDArray[np.float32], hits: NDArray[np.bool_], positives: int) -> float:
    """Mean over the thresholds of the precision at 101 recalls, as COCO interpolates it."""
    order = np.argsort(-scores, kind="stable")
    right = np.cumsum(hits[:, order], axis=1)
    precision = right / np.arange(1, right.shape[1] + 1)
    precision = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
    total = 0.0
    for row in range(len(_THRESHOLDS)):
        places = np.searchsorted(right[row] / positives, _RECALLS, side="left")
        total += float(precision[row][places[places < right.shape[1]]].sum()) / len(_RECALLS)
    return total / len(_THRESHOLDS)
