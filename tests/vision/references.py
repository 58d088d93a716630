"""Slow, plain references, written from the layouts' descriptions and apart from the decoders: loops and float64."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edge_runtime.records.frames import Transform


class Candidate(NamedTuple):
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
        if not all(math.isfinite(value) for value in (*candidate.box, candidate.score)):
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
