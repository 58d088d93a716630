"""What the layouts share: how a misfit is told, places in a batch, anchor grids, thresholds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.errors import EngineError
from edge_runtime.records.frames import Float32Array

Shapes = Mapping[str, tuple[int, ...]]
"""Each output's shape for a batch of one, by output name."""

STRIDES = (8, 16, 32)


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


def anchor_count(width: int, height: int) -> int:
    """Cells of the grids of strides 8, 16 and 32 over an input of width x height px."""
    return sum(-(-height // stride) * -(-width // stride) for stride in STRIDES)


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
