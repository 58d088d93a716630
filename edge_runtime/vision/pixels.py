"""What the pixel formats of a model's input mean, in numbers.

A graph with fused preprocessing does what `normalised` does; whoever fills a place without a picture does it here. nv12
is BT.601 in limited range, whatever the camera sends: 16-235 for brightness, 16-240 around 128 for colour.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edge_runtime.records.frames import BT601_WEIGHTS, Float32Array, InputArray
from edge_runtime.records.spec import Color, InputSpec

LUMA_WEIGHTS = {"RGB": (0.299, 0.587, 0.114), "BGR": (0.114, 0.587, 0.299)}
LUMA_BLACK, LUMA_RANGE, CHROMA_GREY, CHROMA_RANGE = 16.0, 219.0, 128.0, 224.0
ORDER = {"bgr24": {"BGR": (0, 1, 2), "RGB": (2, 1, 0)}, "rgba": {"BGR": (2, 1, 0), "RGB": (0, 1, 2)}}
"""Where a model's channels, in the order of its `color`, lie in a packed pixel."""


def to_colours(
    color: Color, weights: tuple[float, float] = BT601_WEIGHTS, *, full_range: bool = False
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """([3, 3], [3]) with `pixel = matrix @ (Y, U, V) + offset`: nv12's values to 0-255, in the order of `color`.

    For cameras' own pictures: `weights` of red and blue in the brightness, and whether it goes from 0 to 255.
    """
    kr, kb = weights
    kg = 1 - kr - kb
    black, luma, chroma = (0.0, 1.0, 1.0) if full_range else (LUMA_BLACK, 255.0 / LUMA_RANGE, 255.0 / CHROMA_RANGE)
    red = (luma, 0.0, 2 * (1 - kr) * chroma)
    green = (luma, -2 * (1 - kb) * kb / kg * chroma, -2 * (1 - kr) * kr / kg * chroma)
    blue = (luma, 2 * (1 - kb) * chroma, 0.0)
    matrix = np.array((red, green, blue) if color == "RGB" else (blue, green, red))
    return matrix, -matrix @ np.array((black, CHROMA_GREY, CHROMA_GREY))


def yuv_of(red: float, green: float, blue: float) -> tuple[int, int, int]:
    """nv12's (Y, U, V) of a colour, 0-255 each."""
    kr, kg, kb = LUMA_WEIGHTS["RGB"]
    luma = kr * red + kg * green + kb * blue
    u, v = (blue - luma) / (2 - 2 * kb), (red - luma) / (2 - 2 * kr)
    levels = (
        LUMA_BLACK + luma * LUMA_RANGE / 255,
        CHROMA_GREY + u * CHROMA_RANGE / 255,
        CHROMA_GREY + v * CHROMA_RANGE / 255,
    )
    y, u, v = (min(max(round(level), 0), 255) for level in levels)
    return int(y), int(u), int(v)


def factors(spec: InputSpec) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """([3], [3]) with `normalised = pixel * gain + offset`, per channel in the order of `spec.color`."""
    std = np.asarray(spec.std, np.float64)
    return spec.scale / std, -np.asarray(spec.mean, np.float64) / std


def fill_level(array: InputArray, spec: InputSpec, level: float) -> None:
    """Fill places ([..., *spec.shape] of `spec.dtype`) with grey of `level` (0-255), as preprocessing would."""
    if spec.pixel == "float32":
        gain, offset = factors(spec)
        array[:] = (level * gain + offset).astype(np.float32)[:, None, None]
    elif spec.pixel == "nv12":
        y, u, _ = yuv_of(level, level, level)
        array[..., : spec.height, :] = y
        array[..., spec.height :, :] = u
    else:
        array[:] = round(level)
        if spec.pixel == "rgba":
            array[..., 3] = 255


def normalised(place: InputArray, spec: InputSpec) -> Float32Array:
    """[3, H, W] float32: what the graph makes of a place of `spec`, for its first layer; computed in float64.

    For nv12, U and V are scaled up as `upsampled` says, and the colours they give are clipped to 0-255.
    """
    if spec.pixel == "float32":
        return np.array(place, np.float32)
    if spec.pixel == "nv12":
        chroma = place[spec.height :].reshape(spec.height // 2, spec.width // 2, 2)
        planes = [place[: spec.height].astype(np.float64), *(upsampled(chroma[..., index]) for index in (0, 1))]
        matrix, shift = to_colours(spec.color)
        colours = np.clip(np.tensordot(matrix, np.stack(planes), axes=1) + shift[:, None, None], 0, 255)
    else:
        order = list(ORDER[spec.pixel][spec.color])
        colours = place[..., order].transpose(2, 0, 1).astype(np.float64)
    gain, offset = factors(spec)
    result: Float32Array = (colours * gain[:, None, None] + offset[:, None, None]).astype(np.float32)
    return result


def upsampled(chroma: NDArray[np.uint8]) -> NDArray[np.float64]:
    """[2 h, 2 w] of one colour plane [h, w]: linear between samples, which lie on every other column and midway between
    two rows (MPEG-2's siting, FFmpeg's reading where nothing is said)."""
    values = chroma.astype(np.float64)
    right = np.concatenate((values[:, 1:], values[:, -1:]), axis=1)
    wide = np.empty((values.shape[0], 2 * values.shape[1]))
    wide[:, ::2], wide[:, 1::2] = values, (values + right) / 2
    above, below = np.concatenate((wide[:1], wide[:-1])), np.concatenate((wide[1:], wide[-1:]))
    result = np.empty((2 * wide.shape[0], wide.shape[1]))
    result[::2], result[1::2] = 0.75 * wide + 0.25 * above, 0.75 * wide + 0.25 * below
    return result
