"""Whether a camera's picture still shows what another one showed: brightness in cells, against the camera's own noise.

Luma (0-255 levels) is averaged over cells of 8 x 8 px of the model's input, one every 4 px: noise of single pixels is
an eighth there, and whatever a model could find crosses some cell's border when it moves. A picture is compared with
the one that an answer came from and not with the one before, so that slow changes add up.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.records.frames import Float32Array, InputArray, Transform
from edge_runtime.records.spec import InputSpec
from edge_runtime.vision.pixels import LUMA_BLACK, LUMA_RANGE, LUMA_WEIGHTS, ORDER

TILE_PX = 4
"""Cells are 2 x 2 tiles, and overlap."""

FLOOR, CEILING = 3.0, 5.0
"""Least and most levels by which a cell may differ, whatever the noise. With less, every key frame of a codec would
count as movement; with more, a far pedestrian's step would not: 2 px of one who stands out by 25 levels are 6."""
NOISE_FACTOR = 4.0
"""How far the loudest of some thousand cells is off, in 90th percentiles of them all: 2.9 was seen, some to spare."""
FLICKER = 0.04
"""Lamps and exposure change the brightness of a whole picture by this much, and the scene stays the same."""
DARK = 16.0

_PICTURES = 32
_PICTURES_NEEDED = 8


def luma_grid(place: InputArray, spec: InputSpec, transform: Transform) -> Float32Array:
    """Mean luma, 0-255, of each cell of the picture in `place` (as `spec` declares it), without its padding.

    Where a side is no multiple of TILE_PX, its last tile covers a part of the one before; a side of one tile is a cell.
    """
    top, left = max(0, transform.top), max(0, transform.left)
    bottom = min(transform.dst_height, transform.top + transform.resized_height)
    right = min(transform.dst_width, transform.left + transform.resized_width)
    pixels = min(TILE_PX, bottom - top) * min(TILE_PX, right - left)
    offset = 0.0
    if spec.pixel == "nv12":
        luma = _tile_sums(place[top:bottom, left:right], axis=0) * np.float32(255 / LUMA_RANGE / pixels)
        offset = -LUMA_BLACK * 255 / LUMA_RANGE
    elif spec.pixel == "float32":
        rows = _tile_sums(place[:, top:bottom, left:right], axis=1)
        luma = np.zeros(rows.shape[1:], np.float32)
        for sums, weight, mean, std in zip(rows, LUMA_WEIGHTS[spec.color], spec.mean, spec.std, strict=True):
            luma += sums * np.float32(weight * std / spec.scale / pixels)
            offset += weight * mean / spec.scale
    else:
        rows = _tile_sums(place[top:bottom, left:right], axis=0)
        luma = np.zeros(rows.shape[:2], np.float32)
        for channel, weight in zip(ORDER[spec.pixel]["RGB"], LUMA_WEIGHTS["RGB"], strict=True):
            luma += rows[..., channel] * np.float32(weight / pixels)
    tiles = _tile_sums(luma, axis=1) + np.float32(offset)
    cells: Float32Array = _pairs(_pairs(tiles).T).T
    return cells


def _tile_sums(values: InputArray, axis: int) -> NDArray[Any]:
    """The sums over each tile's part of an axis: of floats in float32, of bytes in uint16."""
    lines = np.moveaxis(values, axis, 0)
    step = min(TILE_PX, len(lines))
    end = len(lines) // step * step
    sums: NDArray[Any] = lines[:end:step].astype(np.uint16 if values.dtype == np.uint8 else np.float32)
    for index in range(1, step):  # several times as fast as a sum over an axis of four
        sums += lines[index:end:step]
    if end < len(lines):
        sums = np.concatenate([sums, lines[-step:].sum(axis=0, dtype=sums.dtype)[np.newaxis]])
    return np.moveaxis(sums, 0, axis)


def _pairs(tiles: Float32Array) -> Float32Array:
    """[n, m] to [n - 1, m]: means of neighbours; one alone stays."""
    return tiles if len(tiles) < 2 else (tiles[:-1] + tiles[1:]) * np.float32(0.5)


def cell_noise(before: Float32Array, after: Float32Array) -> float:
    """By how many levels cells differ from one picture to the next where nothing moves: the 90th percentile, beyond
    what all have in common. Too high where movement fills more than a tenth of the picture."""
    change = (after - before)[::2, ::2].ravel()  # these cover the picture and do not overlap
    change -= _median(change)
    return _quantile(np.abs(change), 0.9)


class CameraNoise:
    """A camera's noise, learned while it runs, from the quietest quarter of the last pictures. One thread at a time."""

    __slots__ = ("_levels", "_newest")

    def __init__(self) -> None:
        self._newest: Float32Array | None = None
        self._levels: deque[float] = deque(maxlen=_PICTURES)

    def observe(self, grid: Float32Array) -> float:
        """Take in the newest picture; returns the levels by which a cell may differ, FLOOR to CEILING."""
        if self._newest is not None and self._newest.shape != grid.shape:
            self._levels.clear()
        elif self._newest is not None:
            self._levels.append(cell_noise(self._newest, grid))
        self._newest = grid
        if len(self._levels) < _PICTURES_NEEDED:
            return FLOOR
        noise = sorted(self._levels)[len(self._levels) // 4]
        return min(max(FLOOR, NOISE_FACTOR * noise), CEILING)


def is_still(grid: Float32Array, reference: Float32Array, levels: float) -> bool:
    """Whether no cell differs by more than `levels`, but for a common change of brightness within FLICKER.

    False for grids of different shapes and where a value is no number.
    """
    if grid.shape != reference.shape:
        return False
    worst = np.abs(grid - reference).max()
    if worst <= levels:
        return True
    if not worst <= levels + FLICKER * 255:
        return False
    some, others = grid[::2, ::2], reference[::2, ::2]
    lit = others >= DARK
    if not lit.any():
        return False
    gain = _median(some[lit] / others[lit])
    if not abs(gain - 1) <= FLICKER:
        return False
    # what is overexposed does not change with the light, and some cells do in part
    lit_anew = reference * np.float32(gain)
    above, below = grid - np.maximum(reference, lit_anew), np.minimum(reference, lit_anew) - grid
    return bool(np.maximum(above, below).max() <= levels)


def _quantile(values: Float32Array, share: float) -> float:
    index = int((values.size - 1) * share)
    return float(np.partition(values, index)[index])


def _median(values: Float32Array) -> float:
    return _quantile(values, 0.5)
