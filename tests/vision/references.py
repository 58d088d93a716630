"""Slow, plain references, written from the layouts' descriptions and apart from the decoders: loops and float64."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edge_runtime.records.frames import Transform


class Candidate(NamedTuple):
    """One of class -1 has no class and is invalid."""

    box: tuple[float, float, float, float]
    score: float
    class_id: int


def overlaps_more(a: tuple[float, ...], b: tuple[float, ...], limit: float) -> bool:
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    if width <= 0 or height <= 0:
        return False
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - width * height
    # The product as float32 rounds it: the tests' boxes have whole coordinates, so only this can tip.
    return width * height > float(np.float32(limit) * np.float32(union))


def select(
    candidates: list[Candidate],
    width: int,
    height: int,
    nms_iou: float | None,
    max_detections: int,
    max_candidates: int = 1000,
) -> tuple[list[Candidate], int, int]:
    """Detections best first, how many were cut, how many were invalid."""
    usable = []
    for candidate in candidates:
        x1, y1, x2, y2 = candidate.box
        if not all(math.isfinite(value) for value in (*candidate.box, candidate.score)) or candidate.class_id < 0:
            continue
        x1, x2 = min(max(x1, 0), width), min(max(x2, 0), width)
        y1, y2 = min(max(y1, 0), height), min(max(y2, 0), height)
        if x2 > x1 and y2 > y1:
            usable.append(candidate._replace(box=(x1, y1, x2, y2)))
    invalid = len(candidates) - len(usable)
    usable.sort(key=lambda candidate: -candidate.score)
    cut = max(0, len(usable) - max_candidates)
    kept: list[Candidate] = []
    for candidate in usable[:max_candidates]:
        if nms_iou is None or not any(
            other.class_id == candidate.class_id and overlaps_more(other.box, candidate.box, nms_iou) for other in kept
        ):
            kept.append(candidate)
    return kept[:max_detections], cut, invalid


def into_source(transform: Transform, box: tuple[float, float, float, float]) -> tuple[float, float, float, float]:
    across = transform.src_width / transform.resized_width
    down = transform.src_height / transform.resized_height
    x1, y1, x2, y2 = box
    return (
        (x1 - transform.left) * across,
        (y1 - transform.top) * down,
        (x2 - transform.left) * across,
        (y2 - transform.top) * down,
    )


def cells(width: int, height: int) -> list[tuple[int, int, int]]:
    """(column, row, stride) in the order of the anchors."""
    return [
        (column, row, stride)
        for stride in (8, 16, 32)
        for row in range(math.ceil(height / stride))
        for column in range(math.ceil(width / stride))
    ]


def yolox(head: NDArray[Any], width: int, height: int, threshold: float) -> list[Candidate]:
    found = []
    for (column, row, stride), line in zip(cells(width, height), head.tolist(), strict=True):
        products = [float(np.float32(line[4]) * np.float32(score)) for score in line[5:]]
        best = max(range(len(products)), key=lambda k: line[5 + k])
        if products[best] > threshold:
            x, y = (line[0] + column) * stride, (line[1] + row) * stride
            w, h = math.exp(line[2]) * stride, math.exp(line[3]) * stride
            found.append(Candidate((x - w / 2, y - h / 2, x + w / 2, y + h / 2), products[best], best))
    return found


def nanodet(head: NDArray[Any], classes: int, width: int, height: int, threshold: float) -> list[Candidate]:
    found = []
    for (column, row, stride), line in zip(cells(width, height), head.tolist(), strict=True):
        best = max(range(classes), key=lambda k: line[k])
        if line[best] > threshold:
            sides = []
            for side in range(4):
                bins = line[classes + 8 * side : classes + 8 * side + 8]
                weights = [math.exp(value) for value in bins]
                sides.append(stride * sum(k * weight for k, weight in enumerate(weights)) / sum(weights))
            x, y = (column + 0.5) * stride, (row + 0.5) * stride
            box = (x - sides[0], y - sides[1], x + sides[2], y + sides[3])
            found.append(Candidate(box, line[best], best))
    return found


def centernet(heat: NDArray[Any], ltrb: NDArray[Any], threshold: float) -> list[Candidate]:
    found = []
    for class_id in range(heat.shape[0]):
        for y in range(heat.shape[1]):
            for x in range(heat.shape[2]):
                score = float(heat[class_id, y, x])
                if score > threshold:
                    left, top, right, bottom = (float(value) for value in ltrb[:, y, x])
                    box = (4 * x - left, 4 * y - top, 4 * x + right, 4 * y + bottom)
                    found.append(Candidate(box, score, class_id))
    return found


def above(score: float, threshold: float) -> bool:
    """What is not a number is let through, to be counted."""
    return not score <= float(np.float32(threshold))


def best_of(scores: list[float]) -> int:
    """The first of the highest; one that is not a number is before all others."""
    for place, score in enumerate(scores):
        if math.isnan(score):
            return place
    return scores.index(max(scores))


def xywh2xyxy(box: list[float]) -> tuple[float, float, float, float]:
    x, y, w, h = box
    return x - w / 2, y - h / 2, x + w / 2, y + h / 2


def yolov5(rows: NDArray[Any], threshold: float) -> list[Candidate]:
    """Ultralytics YOLOv5 `non_max_suppression` up to the suppression, without `multi_label`."""
    found = []
    for line in rows.tolist():
        if not above(line[4], threshold):
            continue
        best = best_of(line[5:])
        score = line[4] * line[5 + best]
        if above(score, threshold):
            found.append(Candidate(xywh2xyxy(line[:4]), score, best))
    return found


def yolov8(columns: NDArray[Any], threshold: float) -> list[Candidate]:
    """Ultralytics YOLOv8 `non_max_suppression` up to the suppression, without `multi_label`."""
    found = []
    for line in columns.T.tolist():
        best = best_of(line[4:])
        if above(line[4 + best], threshold):
            found.append(Candidate(xywh2xyxy(line[:4]), line[4 + best], best))
    return found


def known_class(value: float, classes: int) -> int:
    return int(value) if value in range(classes) else -1


def yolov10(rows: NDArray[Any], classes: int, threshold: float) -> list[Candidate]:
    """Ultralytics `non_max_suppression` for `prediction.shape[-1] == 6`: the threshold and nothing more."""
    return [
        Candidate((x1, y1, x2, y2), score, known_class(class_value, classes))
        for x1, y1, x2, y2, score, class_value in rows.tolist()
        if above(score, threshold)
    ]


def scaled(box: list[float], width: int, height: int) -> tuple[float, float, float, float]:
    x1, y1, x2, y2 = xywh2xyxy(box)
    return x1 * width, y1 * height, x2 * width, y2 * height


def rtdetr_rows(rows: NDArray[Any], classes: int, width: int, height: int, threshold: float) -> list[Candidate]:
    return [
        Candidate(scaled(line[:4], width, height), line[4], known_class(line[5], classes))
        for line in rows.tolist()
        if above(line[4], threshold)
    ]


def rtdetr(
    boxes: NDArray[Any], scores: list[list[float]], width: int, height: int, threshold: float
) -> list[Candidate]:
    """Every pair of query and class."""
    return [
        Candidate(scaled(box, width, height), score, class_id)
        for box, line in zip(boxes.tolist(), scores, strict=True)
        for class_id, score in enumerate(line)
        if above(score, threshold)
    ]


def rtdetr_postprocessor(
    boxes: NDArray[Any], scores: list[list[float]], width: int, height: int, top: int
) -> list[Candidate]:
    """RT-DETR `RTDETRPostProcessor.forward` with `use_focal_loss`: the best of the flattened scores, then the boxes."""
    classes = len(scores[0])
    flat = [score for line in scores for score in line]
    order = sorted(range(len(flat)), key=lambda k: -flat[k])[:top]
    return [Candidate(scaled(boxes[k // classes].tolist(), width, height), flat[k], k % classes) for k in order]


def sigmoids(logits: NDArray[Any]) -> list[list[float]]:
    """A logit that is NaN or +inf has no score."""
    return [
        [math.nan if math.isnan(x) or x == math.inf else 0.0 if x < -700 else 1 / (1 + math.exp(-x)) for x in line]
        for line in logits.tolist()
    ]


def efficientnms(place: dict[str, NDArray[Any]], classes: int, threshold: float) -> list[Candidate]:
    """The rows that count, by the plugin's README; a count that is out of range is itself one invalid candidate."""
    count, rows = int(place["num_dets"][0]), place["det_boxes"].shape[0]
    found = [] if 0 <= count <= rows else [Candidate((0, 0, 0, 0), 0, -1)]
    for k in range(min(max(count, 0), rows)):
        x1, y1, x2, y2 = place["det_boxes"][k].tolist()
        score = float(place["det_scores"][k])
        if above(score, threshold):
            found.append(Candidate((x1, y1, x2, y2), score, known_class(int(place["det_classes"][k]), classes)))
    return found
