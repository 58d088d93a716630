"""The kernel of letterbox.cu from Python: its launch, and the same in numpy, which says what is right."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from edge_runtime.engine.tensorrt.cuda import Cuda, Kernel, Stream
from edge_runtime.errors import EngineError
from edge_runtime.records.frames import (
    BT601_WEIGHTS,
    LEFT_SITING,
    InputArray,
    PictureKind,
    PictureLayout,
    Transform,
)
from edge_runtime.records.spec import InputSpec
from edge_runtime.vision.geometry import plan
from edge_runtime.vision.pixels import LUMA_BLACK, factors, to_colours

SOURCE = Path(__file__).with_name("letterbox.cu")
NAME = "letterbox"
BLOCK = (32, 8)
KINDS = "PiPiiiiPiiiiiiifffiffffffffffffiiff"
"""Of the kernel's arguments, in order, in the letters of `struct`: an address, an int, a float."""
_MIN_SUPPORT = 1.0
_SOURCES: Mapping[PictureKind, int] = {"bgr24": 0, "rgba": 1, "nv12": 2, "yuv420p": 2}
_PLACES = {"float32": 0, "bgr24": 1, "rgba": 2}

Values: TypeAlias = tuple[int | float, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """A picture on the GPU: width x height px; rows are `pitch` bytes apart. The colours of nv12 and yuv420p begin at
    `chroma`, U and V `chroma_next` bytes apart; of others that is 0. What else they are: see PictureLayout."""

    kind: PictureKind
    width: int
    height: int
    address: int
    pitch: int
    chroma: int = 0
    chroma_pitch: int = 0
    chroma_next: int = 1
    weights: tuple[float, float] = BT601_WEIGHTS
    full_range: bool = False
    siting: tuple[float, float] = LEFT_SITING


def source_of(layout: PictureLayout, address: int) -> Source:
    """A picture that lies so at an address of the GPU's."""
    (rows, pitch), *colours = layout.planes
    chroma, chroma_pitch, chroma_next = 0, 0, 1
    if colours:
        chroma, chroma_pitch = address + rows * pitch, colours[0][1]
    if len(colours) > 1:
        chroma_next = colours[0][0] * chroma_pitch
    return Source(
        kind=layout.kind,
        width=layout.width,
        height=layout.height,
        address=address,
        pitch=pitch,
        chroma=chroma,
        chroma_pitch=chroma_pitch,
        chroma_next=chroma_next,
        weights=layout.weights,
        full_range=layout.full_range,
        siting=layout.siting,
    )


class LetterboxKernel:
    """Loaded on the thread "gpu", and used there alone. `image`: what nvrtc.kernel_image gives. Raises CudaError."""

    def __init__(self, cuda: Cuda, image: bytes) -> None:
        self._cuda = cuda
        self._kernel: Kernel = cuda.load_kernel(image, NAME)

    def enqueue(
        self,
        source: Source,
        place: int,
        spec: InputSpec,
        stream: Stream,
        transform: Transform | None = None,
        *,
        smooth: bool = True,
    ) -> None:
        """Enqueue one picture into the place of `spec` at an address of the GPU's memory.

        `transform`: how it is to lie there, None for what `plan` says of its size. `smooth`: means over all pixels that
        one of the place covers, as the cameras' scaler does; else plain bilinear.
        Raises EngineError (code "letterbox_unsupported") for a place of nv12, CudaError.
        """
        transform = transform or plan(source.width, source.height, spec)
        values = arguments(source, place, spec, transform, smooth=smooth)
        width, height = spec.width, spec.height
        grid = (-(-width // BLOCK[0]), -(-height // BLOCK[1]))
        self._cuda.run_kernel(self._kernel, grid, BLOCK, stream, KINDS, values)

    def close(self) -> None:
        """Idempotent. Nothing may run it any more."""
        self._cuda.free_kernel(self._kernel)


def arguments(source: Source, place: int, spec: InputSpec, transform: Transform, *, smooth: bool) -> Values:
    """The kernel's arguments, in the order of KINDS. Raises EngineError (code "letterbox_unsupported")."""
    require_supported(spec)
    support_x, support_y = supports(source.width, source.height, transform, smooth=smooth)
    gain, offset = factors(spec)
    matrix, _ = to_colours("RGB", source.weights, full_range=source.full_range)
    return (
        source.address,
        source.pitch,
        source.chroma,
        source.chroma_pitch,
        _SOURCES[source.kind],
        source.width,
        source.height,
        place,
        _PLACES[spec.pixel],
        spec.width,
        spec.height,
        transform.left,
        transform.top,
        transform.resized_width,
        transform.resized_height,
        support_x,
        support_y,
        float(spec.pad),
        int(spec.color == "RGB"),
        *map(float, gain),
        *map(float, offset),
        0.0 if source.full_range else LUMA_BLACK,
        float(matrix[0, 0]),
        float(matrix[0, 2]),
        float(matrix[1, 1]),
        float(matrix[1, 2]),
        float(matrix[2, 1]),
        2 if source.kind == "nv12" else 1,
        source.chroma_next,
        *source.siting,
    )


def require_supported(spec: InputSpec) -> None:
    """Raises EngineError (code "letterbox_unsupported") where the kernel does not make such places."""
    if spec.pixel not in _PLACES:
        raise EngineError(
            f"a place of {spec.pixel} is not made on the GPU",
            code="letterbox_unsupported",
            remedy="use a variant that takes float32, bgr24 or rgba",
        )


def supports(width: int, height: int, transform: Transform, *, smooth: bool) -> tuple[float, float]:
    """The triangle's half-widths, across and down, in px of a source of width x height px."""
    if not smooth:
        return _MIN_SUPPORT, _MIN_SUPPORT
    return (
        max(_MIN_SUPPORT, width / transform.resized_width),
        max(_MIN_SUPPORT, height / transform.resized_height),
    )


def reference(
    picture: NDArray[np.uint8],
    layout: PictureLayout,
    spec: InputSpec,
    *,
    smooth: bool = True,
    transform: Transform | None = None,
) -> InputArray:
    """What the kernel has to make of a picture ([layout.nbytes]), in float64: a place of `spec`, padded.

    `transform` and `smooth`: see LetterboxKernel.enqueue. Raises EngineError as `arguments`.
    """
    require_supported(spec)
    height, width = layout.height, layout.width
    transform = transform or plan(width, height, spec)
    support_x, support_y = supports(width, height, transform, smooth=smooth)
    planes = _planes(picture, layout)
    centres_x = (np.arange(transform.resized_width) + 0.5) * width / transform.resized_width - 0.5
    centres_y = (np.arange(transform.resized_height) + 0.5) * height / transform.resized_height - 0.5

    def scaled(
        plane: NDArray[np.uint8], x: NDArray[np.float64], y: NDArray[np.float64], sx: float, sy: float
    ) -> Planes:
        down, across = _weights(y, sy, plane.shape[0]), _weights(x, sx, plane.shape[1])
        return np.stack([down @ plane[..., each].astype(np.float64) @ across.T for each in range(plane.shape[2])])

    if layout.kind in ("nv12", "yuv420p"):
        luma = scaled(planes[0][..., None], centres_x, centres_y, support_x, support_y)
        half_x, half_y = max(_MIN_SUPPORT, support_x / 2), max(_MIN_SUPPORT, support_y / 2)
        across, below = layout.siting
        chroma = scaled(planes[1], (centres_x - across) / 2, (centres_y - below) / 2, half_x, half_y)
        matrix, shift = to_colours("RGB", layout.weights, full_range=layout.full_range)
        colours = np.tensordot(matrix, np.concatenate((luma, chroma)), axes=1) + shift[:, None, None]
        colours = np.clip(colours, 0, 255)
    else:
        found = scaled(planes[0], centres_x, centres_y, support_x, support_y)
        colours = found[:3] if layout.kind == "rgba" else found[2::-1]
    whole = np.full((3, spec.height, spec.width), float(spec.pad))
    inside = [
        (max(0, offset), min(side, offset + resized), max(0, -offset))
        for offset, resized, side in (
            (transform.top, transform.resized_height, spec.height),
            (transform.left, transform.resized_width, spec.width),
        )
    ]
    (top, bottom, cut_y), (left, right, cut_x) = inside
    whole[:, top:bottom, left:right] = colours[:, cut_y : cut_y + bottom - top, cut_x : cut_x + right - left]
    return _placed(whole, spec)


Planes: TypeAlias = NDArray[np.float64]


def _planes(picture: NDArray[np.uint8], layout: PictureLayout) -> list[NDArray[np.uint8]]:
    """[h, w, 3 or 4], or [h, w] of brightness and [h / 2, w / 2, 2] of colours."""
    start, planes = 0, []
    for rows, row_bytes in layout.planes:
        planes.append(picture[start : start + rows * row_bytes].reshape(rows, row_bytes))
        start += rows * row_bytes
    if layout.kind == "yuv420p":
        return [planes[0], np.stack(planes[1:], axis=-1)]
    if layout.kind == "nv12":
        return [planes[0], planes[1].reshape(planes[1].shape[0], -1, 2)]
    return [planes[0].reshape(layout.height, layout.width, -1)]


def _weights(centres: NDArray[np.float64], support: float, size: int) -> NDArray[np.float64]:
    """[len(centres), size]: of each source pixel in each of the place's, the edge's own for all that lie beyond it."""
    reach = int(np.ceil(support)) + 1
    taps = np.floor(centres).astype(np.int64)[:, None] + np.arange(-reach, reach + 1)
    found = np.maximum(0.0, 1.0 - np.abs(taps - centres[:, None]) / support)
    found /= found.sum(axis=1, keepdims=True)
    result = np.zeros((len(centres), size))
    np.add.at(result, (np.arange(len(centres))[:, None], np.clip(taps, 0, size - 1)), found)
    return result


def _placed(colours: Planes, spec: InputSpec) -> InputArray:
    """[3, h, w] of red, green and blue, 0-255, as a place holds it."""
    if spec.pixel == "float32":
        gain, offset = factors(spec)
        ordered = colours if spec.color == "RGB" else colours[::-1]
        return np.asarray((ordered * gain[:, None, None] + offset[:, None, None]).astype(np.float32))
    ordered = colours if spec.pixel == "rgba" else colours[::-1]
    packed = np.floor(np.clip(ordered, 0, 255) + 0.5).astype(np.uint8).transpose(1, 2, 0)
    if spec.pixel == "rgba":
        alpha = np.full((spec.height, spec.width, 1), 255, np.uint8)
        packed = np.concatenate((packed, alpha), axis=2)
    return np.ascontiguousarray(packed)
