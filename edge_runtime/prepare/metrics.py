"""Accuracy by the field's own measures: COCO's average precision for detectors, top-1 and top-5 for classifiers.

Average precision is pycocotools' (COCOeval, bbox): ten IoU thresholds from 0.5 to 0.95, precision at 101 recalls,
the mean over the classes that have a box; at most 100 detections of a class in a picture.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from edge_runtime.prepare.samples import Boxes, Dataset, Predictions
from edge_runtime.records.frames import Classification, Detections, Output

__all__ = [
    "AveragePrecision",
    "TopK",
    "average_precision",
    "class_names",
    "evaluated",
    "ranks_of_truth",
    "top_k",
    "xywh",
]

AT_50, AT_75 = 0, 5
"""Where the IoU thresholds 0.5 and 0.75 stand among the ten."""

_MAX_DETECTIONS = 100
_NOT_NAMED = int(np.iinfo(np.int64).max)


@dataclass(frozen=True, slots=True)
class AveragePrecision:
    """COCO's average precisions (0-1); None where there is no box to find.

    `mean_ap` is over the IoU thresholds 0.5 to 0.95, as are those by size and class; `boxes` counts the boxes to
    be found (crowds are not).
    """

    mean_ap: float | None
    ap50: float | None
    ap75: float | None
    ap_small: float | None
    ap_medium: float | None
    ap_large: float | None
    per_class: Mapping[str, float | None]
    boxes: int


@dataclass(frozen=True, slots=True)
class TopK:
    """Shares (0-1) of pictures whose class is the best one, or among the best five; `per_class`: top-1 of those
    classes that have a picture."""

    top1: float
    top5: float
    per_class: Mapping[str, float]


def average_precision(dataset: Dataset, predictions: Predictions) -> AveragePrecision:
    """How well a detector found the boxes of `dataset`, by pycocotools.

    Raises ValueError where the predictions are not of this dataset: another number of pictures, not detections,
    or a class that it doesn't have.
    """
    evaluation = evaluated(dataset, predictions)
    with contextlib.redirect_stdout(io.StringIO()):
        evaluation.accumulate()
    # [thresholds, recalls, classes, sizes], -1 where there is no box.
    table: NDArray[np.float64] = evaluation.eval["precision"][..., 0]
    per_class = {name: _mean(table[:, :, i, 0]) for i, name in enumerate(class_names(dataset.labels))}
    small, medium, large = (_mean(table[..., size]) for size in (1, 2, 3))
    return AveragePrecision(
        mean_ap=_mean(table[..., 0]),
        ap50=_mean(table[AT_50, ..., 0]),
        ap75=_mean(table[AT_75, ..., 0]),
        ap_small=small,
        ap_medium=medium,
        ap_large=large,
        per_class=per_class,
        boxes=sum(int((~_boxes(sample.truth).crowd).sum()) for sample in dataset.samples),
    )


def _mean(precision: NDArray[np.float64]) -> float | None:
    valid = precision[precision > -1]
    return float(valid.mean()) if valid.size else None


def top_k(dataset: Dataset, predictions: Predictions) -> TopK:
    """How often a classifier named the right class; an empty result (non-finite logits) is wrong.

    Raises ValueError where the predictions are not of this dataset: another number of pictures, not
    classifications, or a class that it doesn't have.
    """
    truths, ranks = ranks_of_truth(dataset, predictions)
    names = class_names(dataset.labels)
    return TopK(
        top1=float((ranks < 1).mean()),
        top5=float((ranks < 5).mean()),
        per_class={names[i]: float((ranks[truths == i] < 1).mean()) for i in np.unique(truths).tolist()},
    )


def ranks_of_truth(dataset: Dataset, predictions: Predictions) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Each picture's true class, and its place among the classes named: 0 for the best, the largest int64
    where it is not there.

    Both [pictures] int64. Raises as `top_k`.
    """
    _check(dataset, predictions, Classification)
    truths = np.zeros(len(dataset.samples), np.int64)
    ranks = np.full(len(dataset.samples), _NOT_NAMED, np.int64)
    for i, (sample, output) in enumerate(zip(dataset.samples, predictions.outputs, strict=True)):
        if isinstance(sample.truth, Boxes):
            raise ValueError(f"{sample.name} has boxes, and the predictions are classifications")
        truths[i] = sample.truth
        places = np.flatnonzero(output.class_ids == sample.truth)
        if places.size:
            ranks[i] = places[0]
    return truths, ranks


def class_names(labels: tuple[str, ...]) -> list[str]:
    """A name of its own for each class: where two have the same label (ImageNet has two cranes), with the class id."""
    return [label if labels.count(label) == 1 else f"{label} #{i}" for i, label in enumerate(labels)]


def evaluated(dataset: Dataset, predictions: Predictions) -> COCOeval:
    """pycocotools' COCOeval after `evaluate`: image ids count from 1 in the order of the samples, category ids from 0.

    Raises as `average_precision`.
    """
    _check(dataset, predictions, Detections)
    truths: list[dict[str, Any]] = []
    found: list[dict[str, Any]] = []
    for image_id, (sample, output) in enumerate(zip(dataset.samples, predictions.outputs, strict=True), 1):
        boxes = _boxes(sample.truth)
        for box, class_id, crowd, area in zip(
            xywh(boxes.boxes), boxes.class_ids.tolist(), boxes.crowd.tolist(), boxes.area.tolist(), strict=True
        ):
            row = {"image_id": image_id, "category_id": class_id, "bbox": box}
            # Ids count from 1: to COCOeval, 0 is no match.
            truths.append({**row, "id": len(truths) + 1, "area": area, "iscrowd": int(crowd)})
        if isinstance(output, Detections):
            for box, class_id, score in zip(
                xywh(output.boxes), output.class_ids.tolist(), output.scores.tolist(), strict=True
            ):
                row = {"image_id": image_id, "category_id": class_id, "bbox": box}
                found.append({**row, "id": len(found) + 1, "area": box[2] * box[3], "score": score})
    with contextlib.redirect_stdout(io.StringIO()):
        evaluation = COCOeval(_coco(dataset, truths), _coco(dataset, found), "bbox")
        evaluation.params.maxDets = [_MAX_DETECTIONS]
        evaluation.evaluate()
    return evaluation


def _coco(dataset: Dataset, annotations: list[dict[str, Any]]) -> COCO:
    coco = COCO()
    coco.dataset = {
        "images": [{"id": i} for i in range(1, len(dataset.samples) + 1)],
        "categories": [{"id": i, "name": label} for i, label in enumerate(dataset.labels)],
        "annotations": annotations,
    }
    coco.createIndex()
    return coco


def xywh(boxes: NDArray[np.float32]) -> list[list[float]]:
    """x1 y1 x2 y2 as COCO writes boxes: x1 y1 width height."""
    wide = boxes.astype(np.float64)
    wide[:, 2:] -= wide[:, :2]
    rows: list[list[float]] = wide.tolist()
    return rows


def _boxes(truth: Boxes | int) -> Boxes:
    if isinstance(truth, Boxes):
        return truth
    raise ValueError("the pictures have a class each and no boxes, and the predictions are detections")


def _check(dataset: Dataset, predictions: Predictions, kind: type[Output]) -> None:
    if not dataset.samples:
        raise ValueError(f"{dataset.name} has no pictures")
    if len(predictions.outputs) != len(dataset.samples):
        raise ValueError(
            f"{len(predictions.outputs)} results for the {len(dataset.samples)} pictures of {dataset.name}"
        )
    for sample, output in zip(dataset.samples, predictions.outputs, strict=True):
        truth = sample.truth.class_ids if isinstance(sample.truth, Boxes) else np.array([sample.truth])
        if not isinstance(output, kind):
            raise ValueError(f"{sample.name}: a {type(output).__name__}, where {kind.__name__} was asked for")
        for class_ids in (truth, output.class_ids):
            if class_ids.size and not 0 <= class_ids.min() <= class_ids.max() < len(dataset.labels):
                raise ValueError(f"{sample.name}: a class outside of the {len(dataset.labels)} of {dataset.name}")
