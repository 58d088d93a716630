"""The door to PyAV for pictures: a decoded frame that scales, converts and rotates itself into a model's input.

The scaler is swscale's bilinear straight to planar GBR at the resized size: one pass for size and colour, no full-
size RGB. In floats for a place of floats, in bytes for one of bytes (packed formats are put together from planes:
swscale's own packing halves the chroma resolution, and was off by up to 48 levels), in NV12 for one of NV12. Scaling
down, its triangle is as wide as the pixels it makes, so nothing aliases. Measured by `prepare evaluate` on 128 COCO
images, mAP of yolox_nano, nanodet_m, centernet 512/416/320: bilinear .336 .271 .343 .307 .276; area .337 .265 .342
.312 .274; bicubic .337 .270 .337 .311 .278. They cost the same (0.5 ms for 768x576 -> 416x312).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TypeVar

import av.error
import numpy as np
from av.sidedata.sidedata import SideDataContainer
from av.video.frame import VideoFrame
from av.video.reformatter import ColorRange, Colorspace, Interpolation, VideoReformatter
from numpy.typing import NDArray

from edge_runtime.camera.packed import write_nv12, write_packed
from edge_runtime.camera.place import (
    QUARTERS,
    UPRIGHT,
    Orientation,
    check_place,
    fill_borders,
    fill_picture,
    turned,
    windows,
)
from edge_runtime.camera.whole import kind_of, layout_of
from edge_runtime.errors import CameraError
from edge_runtime.records.frames import InputArray, PictureLayout, Transform
from edge_runtime.records.spec import InputSpec
from edge_runtime.vision.geometry import plan

SCALER = "swscale-bilinear"

_FORMATS = {"float32": "gbrpf32le", "bgr24": "gbrp", "rgba": "gbrp", "nv12": "nv12"}
_FORMAT = _FORMATS["float32"]
# swscale's SWS_ACCURATE_RND. Without it a picture that is not scaled takes a shortcut to bytes that leaves the last
# columns unwritten (FFmpeg 8.0 and 8.1, x86).
_ACCURATE = 0x40000
# swscale widens 8 bits to 16 by a shift and divides by 65535, so 255 comes out as 0.9961.
_UNIT = 65535.0 / 256.0
_PLANES = {"RGB": (2, 0, 1), "BGR": (1, 0, 2)}
_REFORMATTERS_PER_THREAD = 8
_MAX_RESIZED_PIXELS = 1 << 26
_SPC_UNSPECIFIED, _SPC_BT470BG, _SPC_SMPTE170M, _SPC_BT2020_NCL = 2, 5, 6, 9
_TAG_UNSPECIFIED = 2
_KNOWN_MATRICES = frozenset({0, 1, 2, 4, 6, 7, 8, 9})
_LIMITED_RANGE, _FULL_RANGE = 1, 2
# A display matrix turns by a quarter where its other terms are at most this share (about 6 degrees).
_SKEW = 0.1


class _Reformatters(threading.local):
    """swscale contexts of one thread: they aren't thread-safe, and rebuilding one costs more than a frame."""

    def __init__(self) -> None:
        self._of: OrderedDict[tuple[int, int, str, int, int, str], VideoReformatter] = OrderedDict()

    def get(self, frame: VideoFrame, width: int, height: int, pixel_format: str) -> VideoReformatter:
        key = (frame.width, frame.height, frame.format.name, width, height, pixel_format)
        reformatter = self._of.get(key)
        if reformatter is None:
            reformatter = self._of[key] = VideoReformatter()
            if len(self._of) > _REFORMATTERS_PER_THREAD:
                self._of.popitem(last=False)
        else:
            self._of.move_to_end(key)
        return reformatter


_reformatters = _Reformatters()
_Scalar = TypeVar("_Scalar", bound=np.generic)


def _reformat(frame: VideoFrame, width: int, height: int, pixel_format: str) -> VideoFrame:
    flags = int(Interpolation.BILINEAR)
    if pixel_format == "gbrp" and (frame.width, frame.height) == (width, height):
        flags |= _ACCURATE
    told = pixel_format == "nv12"  # all others are RGB, which has one matrix and range only
    try:
        return _reformatters.get(frame, width, height, pixel_format).reformat(
            frame,
            width,
            height,
            pixel_format,
            dst_colorspace=Colorspace.ITU601 if told else None,
            dst_color_range=ColorRange.MPEG if told else None,
            interpolation=flags,
            threads=1,
        )
    except (av.error.FFmpegError, ValueError, MemoryError) as error:
        raise CameraError(
            f"a picture of {frame.width} x {frame.height} px in {frame.format.name} cannot be scaled to "
            f"{width} x {height}: {reason_of(error)}",
            code="pixels_unreadable",
            remedy="let the camera send H.264, H.265 or MJPEG in 8 bits",
        ) from error


def scale(frame: VideoFrame, spec: InputSpec, transform: Transform, orientation: Orientation = UPRIGHT) -> VideoFrame:
    """First half of `AvPixels.write_into`: `frame` at the resized size of `transform`, as planar GBR or NV12.

    `frame` and `orientation` are an AvPixels'; `transform` is the upright picture's, what is returned lies as `frame`
    does. Raises CameraError where swscale refuses the format or size.
    """
    if transform.resized_width * transform.resized_height > _MAX_RESIZED_PIXELS:
        raise CameraError(
            f"{frame.width} x {frame.height} px scaled for {spec.resize} would be {transform.resized_width} x "
            f"{transform.resized_height} px",
            code="pixels_unreadable",
            remedy="use a letterbox or stretch for a picture of this shape",
        )
    width, height = orientation.sides(transform.resized_width, transform.resized_height)
    return _reformat(frame, width, height, _FORMATS[spec.pixel])


def convert(
    scaled: VideoFrame, place: InputArray, spec: InputSpec, transform: Transform, orientation: Orientation = UPRIGHT
) -> None:
    """Second half of `AvPixels.write_into`: what `scale` returned for the same `spec` into `place`, upright and padded.

    `place` is of the shape and dtype of `spec`; every element is written. Raises ValueError for another place.
    """
    check_place(place, spec)
    inside, shown = windows(transform)
    if spec.pixel == "nv12":
        luma, chroma = _plane(scaled, 0, np.uint8), _plane(scaled, 1, np.uint8)
        chroma = chroma[:, : scaled.width].reshape(scaled.height // 2, scaled.width // 2, 2)
        write_nv12(place, luma, chroma, spec, inside, shown, orientation)
    elif spec.pixel == "float32":
        planes = [turned(_plane(scaled, index, np.float32), orientation) for index in _PLANES[spec.color]]
        fill_borders(place, inside, spec)
        fill_picture(place, planes, _UNIT, spec, inside, shown)
    else:
        colours = [turned(_plane(scaled, index, np.uint8), orientation) for index in _PLANES["RGB"]]
        write_packed(place, colours, spec, inside, shown)


def _plane(frame: VideoFrame, index: int, dtype: type[_Scalar]) -> NDArray[_Scalar]:
    """A view of one plane, [its height, frame's width]; lines may be longer than the picture is wide."""
    plane = frame.planes[index]
    lines = np.frombuffer(memoryview(plane), dtype).reshape(-1, plane.line_size // np.dtype(dtype).itemsize)
    return lines[: plane.height, : frame.width]


def orientation_of(frame: VideoFrame) -> Orientation | None:
    """What the frame's display matrix asks for, None where it turns by something else than quarters."""
    try:
        # Not `frame.side_data`: frame and container would hold each other, and every picture live until the collector.
        data = SideDataContainer(frame).get("DISPLAYMATRIX")  # type: ignore[call-arg]  # the stubs lack it
    except ValueError:  # another kind of side data, which PyAV doesn't know
        return {0: UPRIGHT, 90: QUARTERS[3], -90: QUARTERS[1], 180: QUARTERS[2], -180: QUARTERS[2]}.get(frame.rotation)
    if data is None:
        return UPRIGHT
    # Row vector times matrix: x' = a x + c y, y' = b x + d y, in 16.16 fixed point.
    a, b, _, c, d = (int(term) for term in np.frombuffer(data, np.int32)[:5])
    straight, crossed = min(abs(a), abs(d)), min(abs(b), abs(c))
    if max(abs(b), abs(c)) <= straight * _SKEW:  # zeros included: a matrix of nothing says nothing
        return Orientation(False, d < 0, a < 0)
    if max(abs(a), abs(d)) <= crossed * _SKEW:
        return Orientation(True, b < 0, c < 0)
    return None


class AvPixels:
    """A decoded frame that puts itself into a model's input, upright.

    `size` is the camera's own (width, height) in px, upright, where a decoder in hardware has scaled `frame` already.
    Matrix and range are the frame's own; where it says nothing, BT.601 and limited range (full for `yuvj`
    and grey), which is FFmpeg's reading and what OpenCV gives. Rotation metadata (a display matrix of quarter turns
    and flips) is applied: width, height and every transform are the upright picture's.
    """

    __slots__ = ("_frame", "_orientation", "_size")

    def __init__(self, frame: VideoFrame, size: tuple[int, int] | None = None) -> None:
        # PyAV's reformat writes these tags for the time of its call and puts them back. Set once to what
        # it would write, concurrent calls change nothing under each other. swscale also refuses reserved
        # transfer tags that it does not need (PyAV 17.1).
        frame.color_trc = _TAG_UNSPECIFIED
        frame.color_primaries = _TAG_UNSPECIFIED
        matrix = int(frame.colorspace)
        if matrix == _SPC_BT470BG:
            frame.colorspace = _SPC_SMPTE170M
        elif matrix not in _KNOWN_MATRICES:
            frame.colorspace = _SPC_BT2020_NCL if matrix == _SPC_BT2020_NCL + 1 else _SPC_UNSPECIFIED
        self._frame = frame
        self._orientation = orientation_of(frame)
        self._size = size or (self._orientation or UPRIGHT).sides(frame.width, frame.height)

    @property
    def width(self) -> int:
        return self._size[0]

    @property
    def height(self) -> int:
        return self._size[1]

    @property
    def frame(self) -> VideoFrame:
        """The frame as decoded, for `scale`."""
        return self._frame

    @property
    def orientation(self) -> Orientation:
        """How `frame` becomes upright. Raises CameraError where it would take more than quarter turns and flips."""
        if self._orientation is None:
            raise CameraError(
                f"the stream asks for its picture to be turned by {-self._frame.rotation} degrees",
                code="pixels_unreadable",
                remedy="let the camera turn by 0, 90, 180 or 270 degrees",
            )
        return self._orientation

    def write_into(self, place: InputArray, spec: InputSpec) -> Transform:
        """Scale, convert and pad into `place` (of `spec.shape` and `spec.dtype`, may hold old content), and normalise
        where it is float32.

        Every element of `place` is written; returns `plan(width, height, spec)`, which was applied. May be
        called from several threads at once, on the same pixels too. Raises CameraError where the format
        cannot be read, ValueError where `place` is not of the shape and dtype of `spec`.
        """
        check_place(place, spec)
        transform = plan(self.width, self.height, spec)
        orientation = self.orientation
        convert(scale(self._frame, spec, transform, orientation), place, spec, transform, orientation)
        return transform

    def layout(self) -> PictureLayout | None:
        """How `copy_whole` leaves the frame: bgr24, rgba, nv12 or 8-bit yuv420p; None for any other, and where it does
        not lie upright. It may be smaller than `width` x `height`: see `size`."""
        frame = self._frame
        name = frame.format.name
        kind = kind_of(name, interlaced=bool(frame.interlaced_frame))
        if kind is None or self._orientation != UPRIGHT or any(plane.line_size <= 0 for plane in frame.planes):
            return None
        return layout_of(
            kind,
            name,
            frame.width,
            frame.height,
            matrix=int(frame.colorspace),
            colour_range=int(frame.color_range),
            siting=0 if kind in ("bgr24", "rgba") else self._chroma_siting(),
        )

    def copy_whole(self, target: NDArray[np.uint8]) -> None:
        """Copy the frame's planes into `target` ([layout().nbytes] uint8), one after the other and rows without gaps.

        May be called from several threads at once. Raises CameraError where there is no layout.
        """
        layout = self.layout()
        if layout is None:
            raise CameraError(f"a picture in {self._frame.format.name} is not copied whole", code="pixels_unreadable")
        start = 0
        for index, (rows, row_bytes) in enumerate(layout.planes):
            plane = self._frame.planes[index]
            lines = np.frombuffer(memoryview(plane), np.uint8).reshape(-1, plane.line_size)
            end = start + rows * row_bytes
            target[start:end].reshape(rows, row_bytes)[:] = lines[:rows, :row_bytes]
            start = end

    def _chroma_siting(self) -> int:
        """AVCHROMA_LOC_... by number."""
        from edge_runtime.camera.av_raw import known_siting  # it imports this module

        return known_siting(self._frame)

    def to_rgb(self) -> NDArray[np.uint8]:
        """A new [height, width, 3] uint8 RGB array. Raises CameraError where the format cannot be read."""
        # Through the same planar floats as the model's input. swscale's packed RGB halves the chroma
        # resolution, and its unscaled yuv420p to 8-bit GBR leaves the last width % 16 columns unwritten
        # (FFmpeg 8.0 and 8.1, x86).
        width, height = self._size
        planar = _reformat(self._frame, *self.orientation.sides(width, height), _FORMAT)
        rgb = np.empty((height, width, 3), np.uint8)
        for channel, index in enumerate(_PLANES["RGB"]):
            levels = turned(_plane(planar, index, np.float32), self.orientation) * np.float32(_UNIT)
            levels += np.float32(0.5)
            np.minimum(levels, np.float32(255), out=levels)
            rgb[:, :, channel] = levels
        return rgb


def reason_of(error: BaseException) -> str:
    """FFmpeg's own word for an error, or the system's, never its address."""
    if isinstance(error, (av.error.FFmpegError, OSError)):
        return error.strerror or type(error).__name__
    return str(error) or type(error).__name__


def frame_of(
    pixel_format: str, width: int, height: int, planes: Sequence[tuple[memoryview, int]], *, full_range: bool = False
) -> VideoFrame:
    """A frame of its own with the content of `planes`: (bytes, bytes from row to row) each, as another decoder left it.

    `pixel_format` is FFmpeg's name (nv12, yuv420p, rgba, gray ...), 8 bits a sample. Rows are copied once, by stride.
    Raises CameraError where a plane is too short for the size.
    """
    frame = VideoFrame(width, height, pixel_format)
    if len(planes) < len(frame.planes):
        raise CameraError(f"{pixel_format} of {len(frame.planes)} planes came with {len(planes)}")
    for plane, (data, stride) in zip(frame.planes, planes, strict=False):
        rows, used = plane.height, min(plane.line_size, stride)
        if stride <= 0 or len(data) < stride * (rows - 1) + used:
            raise CameraError(f"a plane of {len(data)} bytes is too short for {rows} rows of {stride}")
        target = np.frombuffer(memoryview(plane), np.uint8).reshape(-1, plane.line_size)
        source = np.frombuffer(data, np.uint8)
        target[: rows - 1, :used] = source[: stride * (rows - 1)].reshape(rows - 1, stride)[:, :used]
        target[rows - 1, :used] = source[stride * (rows - 1) :][:used]
    frame.color_range = _FULL_RANGE if full_range else _LIMITED_RANGE
    return frame
