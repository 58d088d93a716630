"""A camera without a camera: numbered pictures at an exact rate, drawn where they are needed."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import parse_qsl

import numpy as np
from numpy.typing import NDArray

from edge_runtime.camera.packed import write_nv12, write_packed
from edge_runtime.camera.place import UPRIGHT, check_place, factors, fill_borders, windows
from edge_runtime.camera.session import Intake, Pace, Picture, Session
from edge_runtime.camera.source import SourceCamera
from edge_runtime.clock import Clock, SystemClock
from edge_runtime.errors import CameraError
from edge_runtime.records.frames import InputArray, Transform
from edge_runtime.records.spec import InputSpec
from edge_runtime.vision.geometry import plan
from edge_runtime.vision.pixels import yuv_of

_SCHEME = "synthetic:"
_NUMBER_BITS = 24
_CHECK_BITS = 8
_CELLS = _NUMBER_BITS + _CHECK_BITS
_STRIP = 8
_OFF, _ON = 32, 224


@dataclass(frozen=True, slots=True)
class SyntheticOptions:
    """Size in px, rate, and number of frames after which it ends (None: never)."""

    width: int = 768
    height: int = 576
    fps: float = 10.0
    frames: int | None = None


def parse_synthetic(url: str) -> SyntheticOptions:
    """`synthetic:` or `synthetic:?width=768&height=576&fps=10&frames=100`, each option optional.

    Raises CameraError with a remedy for an unknown option or an impossible value.
    """
    query = url.removeprefix(_SCHEME).removeprefix("?")
    known = "width, height, fps, frames"
    values: dict[str, float] = {}
    for key, text in parse_qsl(query, keep_blank_values=True) or ([(query, "")] if query else []):
        if key not in ("width", "height", "fps", "frames"):
            raise CameraError(f"unknown option {key!r} of a synthetic camera", remedy=f"options are {known}")
        try:
            values[key] = float(text) if key == "fps" else int(text)
        except ValueError:
            raise CameraError(f"{key}={text!r} is not a number", remedy=f"for example {key}=10") from None
    options = SyntheticOptions(
        width=int(values.get("width", 768)),
        height=int(values.get("height", 576)),
        fps=values.get("fps", 10.0),
        frames=int(values["frames"]) if "frames" in values else None,
    )
    for key, value, low, high in (
        ("width", options.width, 1, 16384),
        ("height", options.height, 1, 16384),
        ("fps", options.fps, 0.01, 1000),
        ("frames", 1 if options.frames is None else options.frames, 1, 1 << _NUMBER_BITS),
    ):
        if not low <= value <= high:
            raise CameraError(f"{key}={value} is out of range", remedy=f"give {key} from {low} to {high}")
    return options


@lru_cache(maxsize=64)
def _cell_of_column(width: int, src_width: int) -> NDArray[np.intp]:
    """For each column of a picture of `width` px, the cell of the number strip it shows."""
    columns = (np.arange(width) * 2 + 1) * src_width // (2 * width)
    return (columns * _CELLS // src_width).astype(np.intp)


def _cells(number: int) -> NDArray[np.bool_]:
    number %= 1 << _NUMBER_BITS
    word = number << _CHECK_BITS | (zlib.crc32(number.to_bytes(4, "big")) & ((1 << _CHECK_BITS) - 1))
    return np.array([word >> (_CELLS - 1 - cell) & 1 for cell in range(_CELLS)], np.bool_)


def _background(number: int) -> tuple[int, int, int]:
    return 64 + number * 7 % 128, 64 + number * 13 % 128, 64 + number * 29 % 128


def read_number(rgb: NDArray[np.generic]) -> int:
    """The number in a picture of at least 32 x 1 px: [height, width, 3], 0-255, also scaled or re-encoded.

    The upper eighth holds 24 bits and a check sum. Raises ValueError where they don't agree.
    """
    height, width = rgb.shape[:2]
    row = rgb[max(height // _STRIP, 1) // 2].astype(np.float32).mean(axis=-1)
    bits = [int(row[(2 * cell + 1) * width // (2 * _CELLS)] > (_OFF + _ON) / 2) for cell in range(_CELLS)]
    word = int("".join(map(str, bits)), 2)
    number = word >> _CHECK_BITS
    if word & ((1 << _CHECK_BITS) - 1) != zlib.crc32(number.to_bytes(4, "big")) & ((1 << _CHECK_BITS) - 1):
        raise ValueError("no synthetic number in this picture")
    return number


class SyntheticPixels:
    """Picture `number`: a strip of cells that spells the number over one colour that changes with it."""

    __slots__ = ("_height", "_number", "_width")

    def __init__(self, number: int, width: int, height: int) -> None:
        self._number = number
        self._width = width
        self._height = height

    @property
    def width(self) -> int:
        return self._width

    @property
    def height(self) -> int:
        return self._height

    def write_into(self, place: InputArray, spec: InputSpec) -> Transform:
        """Draw into `place` (of `spec.shape` and `spec.dtype`) as if scaled (nearest), normalised and padded by `spec`.

        Raises ValueError where `place` is not of the shape and dtype of `spec`.
        """
        check_place(place, spec)
        transform = plan(self._width, self._height, spec)
        if spec.pixel != "float32":
            self._write_bytes(place, spec, transform)
            return transform
        inside, (shown_rows, shown_columns) = windows(transform)
        fill_borders(place, inside, spec)
        strip_rows = max(transform.resized_height // _STRIP, 1)
        split = min(max(strip_rows - shown_rows.start, 0), shown_rows.stop - shown_rows.start)
        strip = _cells(self._number)[_cell_of_column(transform.resized_width, self._width)[shown_columns]]
        colour = _background(self._number)
        if spec.color == "BGR":
            colour = colour[::-1]
        for plane, value, (gain, offset) in zip(
            place, colour, factors(spec.scale, spec.mean, spec.std, 1.0), strict=True
        ):
            window = plane[inside]
            window[split:] = np.float32(value) * gain + offset
            window[:split] = np.where(strip, np.float32(_ON), np.float32(_OFF)) * gain + offset
        return transform

    def _write_bytes(self, place: InputArray, spec: InputSpec, transform: Transform) -> None:
        width, height = transform.resized_width, transform.resized_height
        inside, shown = windows(transform)
        rgb = self._drawn(width, height)
        if spec.pixel != "nv12":
            write_packed(place, [rgb[..., channel] for channel in range(3)], spec, inside, shown)
            return
        y, u, v = yuv_of(*_background(self._number))
        off, on = (yuv_of(level, level, level) for level in (_OFF, _ON))
        split = max(height // _STRIP, 1)
        luma = np.full((height, width), y, np.uint8)
        luma[:split] = np.where(rgb[0, :, 0] == _ON, on[0], off[0])
        chroma = np.empty((height // 2, width // 2, 2), np.uint8)
        chroma[:] = u, v
        chroma[: split // 2] = on[1:]
        write_nv12(place, luma, chroma, spec, inside, shown, UPRIGHT)

    def _drawn(self, width: int, height: int) -> NDArray[np.uint8]:
        """[height, width, 3] RGB, as if scaled to that size (nearest)."""
        rgb = np.empty((height, width, 3), np.uint8)
        rgb[:] = _background(self._number)
        strip = _cells(self._number)[_cell_of_column(width, self._width)]
        rgb[: max(height // _STRIP, 1)] = np.where(strip, _ON, _OFF).astype(np.uint8)[:, np.newaxis]
        return rgb

    def to_rgb(self) -> NDArray[np.uint8]:
        """A new [height, width, 3] uint8 RGB array."""
        return self._drawn(self._width, self._height)


class _SyntheticSession:
    def __init__(self, options: SyntheticOptions, clock: Clock) -> None:
        self._options = options
        self._clock = clock
        self.interval_ns = round(1e9 / options.fps)

    def pictures(self) -> Iterator[Picture]:
        options, number = self._options, 0
        while options.frames is None or number < options.frames:
            # From the number, not by adding up: the rate stays exact over days.
            pts_ns = round(number * 1e9 / options.fps)
            yield Picture(SyntheticPixels(number, options.width, options.height), pts_ns, self._clock.monotonic_ns())
            number += 1

    def close(self) -> None:
        pass


class SyntheticCamera(SourceCamera):
    """`synthetic:` as a camera; ends after `frames`, in state `stopped`. See SourceCamera for `fps` and `pace`.

    Raises CameraError for a `url` that `parse_synthetic` refuses.
    """

    def __init__(
        self,
        *,
        name: str,
        url: str = _SCHEME,
        fps: float | None = None,
        pace: Pace = "realtime",
        clock: Clock | None = None,
    ) -> None:
        options = parse_synthetic(url)
        clock = clock or SystemClock()

        def open_session(_: Intake) -> Session:
            return _SyntheticSession(options, clock)

        super().__init__(
            name, open_session, live=False, fps=fps, pace=pace, loop=False, clock=clock, end_reason="end of frames"
        )
