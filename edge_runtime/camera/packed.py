"""A scaled picture of bytes into its place in the batch, for models whose preprocessing is in the graph. numpy only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edge_runtime.camera.place import Orientation, Window, borders, turned
from edge_runtime.records.frames import InputArray
from edge_runtime.records.spec import InputSpec
from edge_runtime.vision.pixels import ORDER, yuv_of

Bytes = NDArray[np.uint8]


def write_packed(place: InputArray, planes: Sequence[Bytes], spec: InputSpec, inside: Window, shown: Window) -> None:
    """Red, green and blue ([h, w] each, upright) into a bgr24 or rgba place, padded; alpha is 255."""
    for border in borders(place.shape[:2], inside):
        place[border] = spec.pad
    window = place[inside]
    for channel, plane in zip(ORDER[spec.pixel]["RGB"], planes, strict=True):
        window[..., channel] = plane[shown]
    if spec.pixel == "rgba":
        place[..., 3] = 255


def write_nv12(
    place: InputArray,
    luma: Bytes,
    chroma: Bytes,
    spec: InputSpec,
    inside: Window,
    shown: Window,
    orientation: Orientation,
) -> None:
    """Brightness [h, w] and colours [h / 2, w / 2, 2] as they lie in memory into an nv12 place, upright and padded.

    Raises ValueError where a side of the windows is odd: colours would lie half a sample off.
    """
    if any(edge % 2 for part in (*inside, *shown) for edge in (part.start, part.stop)):
        raise ValueError(f"{inside} of an nv12 place is no window of whole colour samples")
    y, u, v = yuv_of(spec.pad, spec.pad, spec.pad)
    rows, colours = split_nv12(place, spec)
    half_inside, half_shown = half(inside), half(shown)
    for border in borders(rows.shape, inside):
        rows[border] = y
    for border in borders(colours.shape[:2], half_inside):
        colours[border] = (u, v)
    rows[inside] = turned(luma, orientation)[shown]
    colours[half_inside] = turned(chroma, orientation)[half_shown]


def split_nv12(place: InputArray, spec: InputSpec) -> tuple[Bytes, Bytes]:
    """Views of an nv12 place: brightness [H, W] and colours [H / 2, W / 2, 2]."""
    return place[: spec.height], place[spec.height :].reshape(spec.height // 2, spec.width // 2, 2)


def half(window: Window) -> Window:
    """The colour samples of a window with even edges."""
    rows, columns = window
    return slice(rows.start // 2, rows.stop // 2), slice(columns.start // 2, columns.stop // 2)
