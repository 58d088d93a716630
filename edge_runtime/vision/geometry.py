"""Where a source image lies in a model's input, and the way back.

`plan` decides integer sizes and offsets once; whoever writes the pixels uses that Transform, and
`to_source` inverts the very same object. Nothing here recomputes a padding: formulas that do are off by
one where the padding is odd and shift every box.

Coordinates are px along edges: x = 0 is the left edge of the first pixel, x = width the right edge of
the last.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edge_runtime.records.frames import Float32Array, Transform
from edge_runtime.records.spec import InputSpec


def plan(src_width: int, src_height: int, spec: InputSpec) -> Transform:
    """Place a source of src_width x src_height px (each >= 1) in the input that `spec` declares.

    - `letterbox-center` (Ultralytics `LetterBox`): r = min(H/h, W/w), sides max(round(side * r), 1), the
      left and top padding round(d / 2 - 0.1), so an odd remainder goes right and below.
    - `letterbox-topleft` (YOLOX `preproc`): the same r, sides max(int(side * r), 1), at (0, 0). The int()
      truncates the float product as YOLOX does, so a side may end 1 px short.
    - `stretch`: each axis scaled on its own.
    - `crop` (torchvision `Resize` + `CenterCrop`): the short side becomes `spec.short_side`, the long
      side int(short_side * long / short); then the centre is cut out, which makes left and top <= 0.
      Where that would not cover the input, and where `short_side` is None, the scale is the smallest
      that does.

    A letterbox lies within the input, a crop covers it; resized sides are >= 1. For `nv12`, whose colours are one for
    2 x 2 px, the nearest even sides and offsets are taken. Raises ValueError for a side below 1, an odd side of an nv12
    input and an unknown `spec.resize`.
    """
    if src_width < 1 or src_height < 1:
        raise ValueError(f"a source of {src_width}x{src_height} px has no pixels")
    width, height = spec.width, spec.height
    if width < 1 or height < 1:
        raise ValueError(f"a model input of {width}x{height} px has no pixels")
    step = 2 if spec.pixel == "nv12" else 1
    if width % step or height % step:
        raise ValueError(f"an nv12 input of {width}x{height} px: both sides have to be even")
    left = top = 0
    if spec.resize == "letterbox-center":
        ratio = min(height / src_height, width / src_width)
        resized_width = max(step * round(src_width * ratio / step), step)
        resized_height = max(step * round(src_height * ratio / step), step)
        left = step * round((width - resized_width) / (2 * step) - 0.1)
        top = step * round((height - resized_height) / (2 * step) - 0.1)
    elif spec.resize == "letterbox-topleft":
        ratio = min(height / src_height, width / src_width)
        resized_width = max(step * int(src_width * ratio / step), step)
        resized_height = max(step * int(src_height * ratio / step), step)
    elif spec.resize == "stretch":
        resized_width, resized_height = width, height
    elif spec.resize == "crop":
        # rounding up where it is not even, so that it still covers
        resized_width, resized_height = (-(-side // step) * step for side in _covering(src_width, src_height, spec))
        left = -step * round((resized_width - width) / (2 * step))
        top = -step * round((resized_height - height) / (2 * step))
    else:
        raise ValueError(f"unknown resize {spec.resize!r}")
    return Transform(
        src_width=src_width,
        src_height=src_height,
        dst_width=width,
        dst_height=height,
        resized_width=resized_width,
        resized_height=resized_height,
        left=left,
        top=top,
    )


def _covering(src_width: int, src_height: int, spec: InputSpec) -> tuple[int, int]:
    """Sides of the whole source, scaled so that it covers the crop."""
    if spec.short_side is not None:
        short = spec.short_side
        # Integer division is int() of the exact quotient; the float one can land a hair below a whole number.
        if src_width <= src_height:
            sides = short, short * src_height // src_width
        else:
            sides = short * src_width // src_height, short
        if sides[0] >= spec.width and sides[1] >= spec.height:
            return sides
    ratio = max(spec.height / src_height, spec.width / src_width)
    return max(round(src_width * ratio), spec.width), max(round(src_height * ratio), spec.height)


def _scale_and_offset(transform: Transform, columns: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    if columns not in (2, 4):
        raise ValueError(f"points have 2 columns and boxes 4, not {columns}")
    times = columns // 2
    scale = (transform.resized_width / transform.src_width, transform.resized_height / transform.src_height)
    return np.array(scale * times), np.array((transform.left, transform.top) * times, dtype=np.float64)


def to_model(transform: Transform, points: NDArray[np.floating]) -> Float32Array:
    """Source px to model px: `source * resized / src + offset` per axis.

    points: [n, 2] (x, y) or [n, 4] (x1, y1, x2, y2), any float dtype. Returns a new float32 array of the
    same shape, not clipped. Raises ValueError for another number of columns.
    """
    scale, offset = _scale_and_offset(transform, points.shape[-1])
    return (points * scale + offset).astype(np.float32)


def to_source(transform: Transform, points: NDArray[np.floating]) -> Float32Array:
    """Model px to source px: the inverse of `to_model` through the same integers.

    points: [n, 2] (x, y) or [n, 4] (x1, y1, x2, y2), any float dtype. Returns a new float32 array of the
    same shape, not clipped (`clip_boxes` does that). Raises ValueError for another number of columns.
    """
    # In float64: a thin source scaled up a thousandfold loses whole px in float32. The few boxes of a
    # frame cost nothing.
    scale, offset = _scale_and_offset(transform, points.shape[-1])
    return ((points - offset) / scale).astype(np.float32)


def clip_boxes(boxes: NDArray[np.floating], width: int, height: int) -> Float32Array:
    """Clip boxes ([n, 4] x1 y1 x2 y2, px) to a picture of width x height px; NaN stays NaN.

    Returns a new float32 array. A box that lies outside comes back with no area.
    """
    limit = np.array((width, height, width, height), dtype=np.float32)
    clipped: Float32Array = np.minimum(np.maximum(boxes, np.float32(0)), limit).astype(np.float32)
    return clipped
