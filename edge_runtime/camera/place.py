"""A scaled picture into its place in the batch: normalise, order the channels, pad. numpy only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from edge_runtime.records.frames import Float32Array, InputArray, Transform
from edge_runtime.records.spec import InputSpec

Plane = NDArray[np.float32] | NDArray[np.uint8]
Window = tuple[slice, slice]
_Scalar = TypeVar("_Scalar", bound=np.generic)


class Orientation(NamedTuple):
    """How a picture as it lies in memory becomes upright: rows and columns exchanged first, then flipped."""

    transposed: bool = False
    flip_rows: bool = False
    flip_columns: bool = False

    def sides(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) of a picture in memory that is so large upright, or the other way round."""
        return (height, width) if self.transposed else (width, height)


UPRIGHT = Orientation()
QUARTERS = (UPRIGHT, Orientation(True, False, True), Orientation(False, True, True), Orientation(True, True, False))
"""Turns by so many quarters clockwise."""


def turned(plane: NDArray[_Scalar], orientation: Orientation) -> NDArray[_Scalar]:
    """A view of `plane` [rows, columns, ...], upright."""
    if orientation == UPRIGHT:
        return plane
    if orientation.transposed:
        plane = plane.swapaxes(0, 1)
    return plane[:: -1 if orientation.flip_rows else 1, :: -1 if orientation.flip_columns else 1]


def check_place(place: InputArray, spec: InputSpec) -> None:
    """Raises ValueError where `place` has not the shape and dtype that `spec` declares."""
    if place.shape != spec.shape or place.dtype != spec.dtype:
        raise ValueError(f"place is {place.dtype} {place.shape}, the model's input is {spec.dtype} {spec.shape}")


def windows(transform: Transform) -> tuple[Window, Window]:
    """(rows, columns) of the place that the picture covers, and those of the resized picture that it shows."""
    x0, y0 = max(transform.left, 0), max(transform.top, 0)
    x1 = min(transform.left + transform.resized_width, transform.dst_width)
    y1 = min(transform.top + transform.resized_height, transform.dst_height)
    inside = (slice(y0, y1), slice(x0, x1))
    shown = (slice(y0 - transform.top, y1 - transform.top), slice(x0 - transform.left, x1 - transform.left))
    return inside, shown


@lru_cache(maxsize=32)
def factors(
    scale: float, mean: tuple[float, float, float], std: tuple[float, float, float], unit: float
) -> tuple[tuple[np.float32, np.float32], ...]:
    """Per channel (gain, offset) with `normalised = value * gain + offset`; a pixel is `value * unit`, 0-255."""
    return tuple((np.float32(unit * scale / s), np.float32(-m / s)) for m, s in zip(mean, std, strict=True))


def borders(shape: tuple[int, ...], inside: Window) -> Iterator[Window]:
    """What lies around the window in a plane of `shape` (height, width): up to four windows, none twice."""
    rows, columns = inside
    height, width = shape
    everything = slice(0, width)
    for border in (
        (slice(0, rows.start), everything),
        (slice(rows.stop, height), everything),
        (rows, slice(0, columns.start)),
        (rows, slice(columns.stop, width)),
    ):
        if all(part.start < part.stop for part in border):
            yield border


def fill_borders(place: Float32Array, inside: Window, spec: InputSpec) -> None:
    """Write the pad value into everything of a float32 `place` outside the window, and only there."""
    around = tuple(borders(place.shape[1:], inside))
    if not around:
        return
    for plane, (gain, offset) in zip(place, factors(spec.scale, spec.mean, spec.std, 1.0), strict=True):
        for border in around:
            plane[border] = np.float32(spec.pad) * gain + offset


def fill_picture(
    place: Float32Array, planes: Sequence[Plane], unit: float, spec: InputSpec, inside: Window, shown: Window
) -> None:
    """Normalise `planes` ([h, w] each, channel order of `spec.color`, a pixel is `value * unit`) into the window.

    One pass per plane, two where a mean is subtracted.
    """
    for target, plane, (gain, offset) in zip(
        place, planes, factors(spec.scale, spec.mean, spec.std, unit), strict=True
    ):
        window = target[inside]
        np.multiply(plane[shown], gain, out=window, dtype=np.float32)
        if offset != 0.0:
            window += offset
