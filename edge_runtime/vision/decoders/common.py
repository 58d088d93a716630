"""What the layouts share: how a misfit is told, places in a batch, grids, thresholds, class ids, the way back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.errors import EngineError
from edge_runtime.records.frames import Detections, Float32Array, Transform
from edge_runtime.vision.geometry import to_source
from edge_runtime.vision.nms import select

Shapes = Mapping[str, tuple[int, ...]]
"""Each output's shape for a batch of one, by output name."""

STRIDES = (8, 16, 32)
STRIDES_P6 = (8, 16, 32, 64)
STRIDES_P2 = (4, 8, 16, 32)
ANCHORS_PER_CELL = 3
"""Of the YOLO generations that have anchor boxes, v5 and v7."""


class LayoutMisfit(Exception):
    """Output shapes that a layout cannot have; the text says in plain words what is wrong and what would fit."""


def only_output(shapes: Shapes) -> tuple[str, tuple[int, ...]]:
    """Name and shape of the one output, whatever its name. Raises LayoutMisfit when there is not exactly one."""
    if len(shapes) != 1:
        raise LayoutMisfit(f"it has one output and the model has {len(shapes)}")
    return next(iter(shapes.items()))


def place(outputs: Mapping[str, NDArray[Any]], name: str, index: int, shape: tuple[int, ...]) -> NDArray[Any]:
    """The outputs of one place in the batch: a view, not a copy.

    `shape` is what the decoder was built for, without the batch. Raises EngineError (code
    "output_mismatch") when the output is missing, has another shape, or has no such place.
    """
    array = outputs.get(name)
    if array is None or array.shape[1:] != shape or not 0 <= index < array.shape[0]:
        found = "missing" if array is None else f"of shape {list(array.shape)}"
        wanted = ", ".join(map(str, shape))
        raise EngineError(
            f"output {name!r} is {found}; wanted [at least {index + 1}, {wanted}]",
            code="output_mismatch",
            remedy="the engine does not give what its bundle declares; build it again from the bundle's ONNX",
        )
    result: NDArray[Any] = array[index]
    return result


def anchor_count(width: int, height: int, strides: tuple[int, ...] = STRIDES) -> int:
    """Cells of the grids of these strides over an input of width x height px."""
    return sum(-(-height // stride) * -(-width // stride) for stride in strides)


def anchor_grid(width: int, height: int) -> Float32Array:
    """[N, 3] float32: column, row and stride (px) of every cell, stride by stride, row by row."""
    grids = []
    for stride in STRIDES:
        rows, columns = -(-height // stride), -(-width // stride)
        y, x = np.mgrid[0:rows, 0:columns]
        grids.append(np.stack((x.ravel(), y.ravel(), np.full(rows * columns, stride)), axis=1))
    grid: Float32Array = np.concatenate(grids).astype(np.float32)
    return grid


def anchors_misfit(shape: tuple[int, ...], columns: str, width: int, height: int) -> LayoutMisfit:
    """Why `shape` is no [1, N, columns] over the grids of a width x height px input."""
    wanted = anchor_count(width, height)
    return LayoutMisfit(
        f"its output is [1, {wanted}, {columns}] for an input of {width}x{height} "
        f"(strides 8, 16, 32), and the model's is {list(shape)}"
    )


def refuse_grid(shape: tuple[int, ...], width: int, height: int) -> None:
    """Raises LayoutMisfit where `shape`, of an output whose rows are chosen boxes, is that of a grid.

    Any number of rows is possible there, so that every undecoded head would fit too: a YOLOX of one class is
    as wide as a row of box, score and class.
    """
    cells = {anchor_count(width, height, strides) for strides in (STRIDES, STRIDES_P6, STRIDES_P2)}
    cells |= {ANCHORS_PER_CELL * count for count in cells}
    for axis in shape[1:]:
        if axis in cells:
            raise LayoutMisfit(
                f"its rows are boxes that are chosen already, and {axis} is the number of a grid's cells "
                f"for an input of {width}x{height}: the model's output {list(shape)} is still to be decoded"
            )


def above(values: NDArray[Any], threshold: np.float32) -> NDArray[np.intp]:
    """Flat indices of what is above the threshold or not a number.

    NaN is let through on purpose: a model whose outputs have gone bad must show in the `invalid` counter
    instead of finding nothing in silence.
    """
    return np.flatnonzero(~(values <= threshold))


def candidates(scores: NDArray[Any], threshold: np.float32) -> tuple[NDArray[np.intp], Float32Array, int]:
    """Flat indices and float32 scores of what is above the threshold, and how many were not finite.

    Those that are not finite are dropped here, before anyone decodes a box for them.
    """
    indices = above(scores, threshold)
    picked = scores.ravel()[indices].astype(np.float32, copy=False)
    finite = np.isfinite(picked)
    if finite.all():
        return indices, picked, 0
    good = np.flatnonzero(finite)
    return indices[good], picked[good], indices.shape[0] - good.shape[0]


def objectness_candidates(
    cells: NDArray[Any], threshold: np.float32
) -> tuple[NDArray[np.intp], Float32Array, Float32Array, NDArray[np.intp], int]:
    """The rows of a head of objectness and class scores whose product is above the threshold.

    cells: [n, 5 + C], column 4 the objectness, the class scores behind it, all activated. The best class of
    each row, as YOLOX and Ultralytics YOLOv5 take it. Returns the rows' indices, the rows as float32, their
    scores, their class ids, and how many were not finite and are left out.
    """
    # Class scores are at most 1, so a cell whose objectness is not above the threshold is out: one column
    # is read instead of all of them.
    rows = above(cells[:, 4], threshold)
    raw: Float32Array = cells.take(rows, axis=0).astype(np.float32, copy=False)
    best = raw[:, 5:].argmax(axis=1)
    picked, scores, invalid = candidates(raw[:, 4] * raw[np.arange(rows.shape[0]), best + 5], threshold)
    return rows[picked], raw[picked], scores, best[picked], invalid


def labelled_candidates(
    scores: NDArray[Any], class_values: NDArray[Any], threshold: np.float32, classes: int
) -> tuple[NDArray[np.intp], Float32Array, NDArray[np.int32], int]:
    """The rows above the threshold of an output that says each row's class: [n] scores, [n] class ids.

    Returns the rows' indices, their scores, their class ids, and how many were left out because the score is
    not finite or the class is no whole number from 0 to `classes` - 1.
    """
    rows, picked, invalid = candidates(scores, threshold)
    values = class_values[rows]
    known = np.flatnonzero((values >= 0) & (values < classes) & (values == np.floor(values)))
    invalid += rows.shape[0] - known.shape[0]
    return rows[known], picked[known], values[known].astype(np.int32), invalid


def corners(boxes: Float32Array) -> Float32Array:
    """[n, 4] centre x, centre y, width, height to x1 y1 x2 y2 (Ultralytics `xywh2xyxy`)."""
    half = boxes[:, 2:4] * np.float32(0.5)
    return np.concatenate((boxes[:, 0:2] - half, boxes[:, 0:2] + half), axis=1)


def detections(
    transform: Transform,
    boxes: Float32Array,
    scores: Float32Array,
    class_ids: NDArray[np.integer],
    *,
    nms_iou: float | None,
    max_detections: int,
    invalid: int,
) -> Detections:
    """Candidates in model px ([n, 4] x1 y1 x2 y2) to what was found in the source, by `nms.select`."""
    return select(
        to_source(transform, boxes),
        scores,
        class_ids.astype(np.int32, copy=False),
        width=transform.src_width,
        height=transform.src_height,
        nms_iou=nms_iou,
        max_detections=max_detections,
        invalid=invalid,
    )
