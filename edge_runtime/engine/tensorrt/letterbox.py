"""The kernel of letterbox.cu from Python: its launch, and the same in numpy, which says what is right.

Nothing on a frame's way uses it yet: cameras write scaled pixels into the batch themselves, on the CPU. `device-check`
measures whether it would pay to give the GPU the whole picture instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edge_runtime.engine.tensorrt.cuda import Cuda, Kernel, Stream
from edge_runtime.errors import EngineError
from edge_runtime.records.frames import InputArray, Transform
from edge_runtime.records.spec import InputSpec
from edge_runtime.vision.geometry import plan
from edge_runtime.vision.pixels import LUMA_BLACK, factors, to_colours

SOURCE = Path(__file__).with_name("letterbox.cu")
NAME = "letterbox"
BLOCK = (32, 8)
KINDS = "PiPiiiiPiiiiiiifffiffffffffffff"
"""Of the kernel's arguments, in order, in the letters of `struct`: an address, an int, a float."""
_MIN_SUPPORT = 1.0
_SOURCES = {"bgr24": 0, "rgba": 1, "nv12": 2}
_PLACES = {"float32": 0, "bgr24": 1, "rgba": 2}

SourceKind: TypeAlias = Literal["bgr24", "rgba", "nv12"]
Values: TypeAlias = tuple[int | float, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """A picture on the GPU: width x height px; rows are `pitch` bytes apart. nv12 has its colours in a second plane, at
    `chroma`; of others that is 0."""

    kind: SourceKind
    width: int
    height: int
    address: int
    pitch: int
    chroma: int = 0
    chroma_pitch: int = 0


class LetterboxKernel:
    """Loaded on the thread "gpu", and used there alone. `image`: what nvrtc.kernel_image gives. Raises CudaError."""

    def __init__(self, cuda: Cuda, image: bytes) -> None:
        self._cuda = cuda
        self._kernel: Kernel = cuda.load_kernel(image, NAME)

    def enqueue(self, source: Source, place: int, spec: InputSpec, stream: Stream, *, smooth: bool = True) -> Transform:
        """Enqueue one picture into the place of `spec` at an address of the GPU's memory.

        `smooth`: means over all pixels that one of the place covers, as the cameras' scaler does; else plain bilinear.
        Raises EngineError (code "letterbox_unsupported") for a place of nv12, CudaError.
        """
        transform = plan(source.width, source.height, spec)
        values = arguments(source, place, spec, transform, smooth=smooth)
        width, height = spec.width, spec.height
        grid = (-(-width // BLOCK[0]), -(-height // BLOCK[1]))
        self._cuda.run_kernel(self._kernel, grid, BLOCK, stream, KINDS, values)
        return transform

    def close(self) -> None:
        """Idempotent."""
        self._cuda.free_kernel(self._kernel)


def arguments(source: Source, place: int, spec: InputSpec, transform: Transform, *, smooth: bool) -> Values:
    """The kernel's arguments, in the order of KINDS. Raises EngineError (code "letterbox_unsupported")."""
    if spec.pixel not in _PLACES:
        raise EngineError(
            f"a place of {spec.pixel} is not made on the GPU",
            code="letterbox_unsupported",
            remedy="use a variant that takes float32, bgr24 or rgba",
        )
    support_x, support_y = supports(transform, smooth=smooth)
    gain, offset = factors(spec)
    matrix, _ = to_colours("RGB")
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
        LUMA_BLACK,
        float(matrix[0, 0]),
        float(matrix[0, 2]),
        float(matrix[1, 1]),
        float(matrix[1, 2]),
        float(matrix[2, 1]),
    )


def supports(transform: Transform, *, smooth: bool) -> tuple[float, float]:
    """The triangle's half-widths in source px, across and down."""
    if not smooth:
        return _MIN_SUPPORT, _MIN_SUPPORT
    return (
        max(_MIN_SUPPORT, transform.src_width / transform.resized_width),
        max(_MIN_SUPPORT, transform.src_height / transform.resized_height),
    )


def reference(planes: tuple[NDArray[np.uint8], ...], kind: SourceKind, spec: InputSpec, *, smooth: bool) -> InputArray:
    """What the kernel has to make of a picture, in float64: a place of `spec`, padded.

    `planes`: one of [h, w, 3 or 4], or of nv12 two, [h, w] and [h / 2, w / 2, 2]. Raises EngineError as `arguments`.
    """
    height, width = planes[0].shape[:2]
    transform = plan(width, height, spec)
    arguments(Source(kind, width, height, 0, 0), 0, spec, transform, smooth=smooth)
    support_x, support_y = supports(transform, smooth=smooth)
    centres_x = (np.arange(transform.resized_width) + 0.5) * width / transform.resized_width - 0.5
    centres_y = (np.arange(transform.resized_height) + 0.5) * height / transform.resized_height - 0.5

    def scaled(
        plane: NDArray[np.uint8], x: NDArray[np.float64], y: NDArray[np.float64], sx: float, sy: float
    ) -> Planes:
        down, across = _weights(y, sy, plane.shape[0]), _weights(x, sx, plane.shape[1])
        return np.stack([down @ plane[..., each].astype(np.float64) @ across.T for each in range(plane.shape[2])])

    if kind == "nv12":
        luma = scaled(planes[0][..., None], centres_x, centres_y, support_x, support_y)
        half_x, half_y = max(_MIN_SUPPORT, support_x / 2), max(_MIN_SUPPORT, support_y / 2)
        chroma = scaled(planes[1], centres_x / 2, (centres_y - 0.5) / 2, half_x, half_y)
        matrix, shift = to_colours("RGB")
        colours = np.tensordot(matrix, np.concatenate((luma, chroma)), axes=1) + shift[:, None, None]
        colours = np.clip(colours, 0, 255)
    else:
        found = scaled(planes[0], centres_x, centres_y, support_x, support_y)
        colours = found[:3] if kind == "rgba" else found[2::-1]
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
