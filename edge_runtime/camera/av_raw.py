"""The door to PyAV for pictures that go from process to process: taken apart, and put together again in place.

The parts are wrapped into a frame by FFmpeg's rawvideo decoder. It copies nothing, and it is the way to a frame that
says where its chroma samples lie and whether it is interlaced: swscale heeds both, and PyAV can set neither.
"""

from __future__ import annotations

import functools
from typing import Any

import av.error
import numpy as np
from av.codec.context import CodecContext
from av.packet import Packet
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame
from av.video.reformatter import Interpolation, VideoReformatter

from edge_runtime.camera.av_pixels import AvPixels
from edge_runtime.camera.place import UPRIGHT, Orientation
from edge_runtime.camera.shared_frames import PIXEL_FORMATS, Bytes, PictureForm
from edge_runtime.errors import CameraError
from edge_runtime.records.frames import Pixels

SITINGS = ("unspecified", "left", "center", "topleft", "top", "bottomleft", "bottom")
"""FFmpeg's names of AVCHROMA_LOC_..., by number."""
_LIKELY = (1, 2, 3, 4, 5, 6, 0)
_TRIAL_PX = (16, 32)
_KNOWN_AFTER_PICTURES = 100
_MOST_KNOWN = 64


def _context(form: PictureForm) -> VideoCodecContext:
    context: VideoCodecContext = CodecContext.create("rawvideo", "r")  # type: ignore[assignment]
    context.thread_type = "NONE"
    context.thread_count = 1
    context.width, context.height, context.pix_fmt = form.width, form.height, form.pixel_format
    context.options = {
        "chroma_sample_location": SITINGS[form.siting],
        "field_order": "tt" if form.interlaced else "progressive",
    }
    return context


def _wrap(context: VideoCodecContext, form: PictureForm, data: Bytes) -> VideoFrame:
    packet: Packet[Any] = Packet(data)  # type: ignore[arg-type]
    (frame,) = context.decode(packet)
    frame.colorspace = form.matrix
    frame.color_range = form.range
    return frame


class SharedPixels(AvPixels):
    """An AvPixels of a frame that does not say itself how it becomes upright."""

    __slots__ = ("_siting",)

    def __init__(self, frame: VideoFrame, form: PictureForm) -> None:
        # Not through AvPixels: it would look for a display matrix, with tags that were set right by the other side.
        self._frame = frame
        self._orientation = UPRIGHT if not any(form.turn) else Orientation(*form.turn)
        self._size = form.shown or self._orientation.sides(form.width, form.height)
        self._siting = form.siting

    def _chroma_siting(self) -> int:
        return self._siting


class Assembler:
    """Makes pixels of a form and its bytes, on one thread."""

    def __init__(self) -> None:
        self._form: PictureForm | None = None
        self._context: VideoCodecContext | None = None

    def assemble(self, form: PictureForm, data: Bytes) -> SharedPixels:
        """Pixels that are `data` (of `form.size_bytes`) and keep it; nothing is copied.

        Raises CameraError where FFmpeg refuses the form.
        """
        try:
            if self._context is None or form != self._form:
                self._context, self._form = _context(form), form
            return SharedPixels(_wrap(self._context, form, data), form)
        except (av.error.FFmpegError, ValueError, MemoryError) as error:
            self._context = None
            raise CameraError(f"a picture of {form.width} x {form.height} px cannot be put together: {error}") from None


class Disassembler:
    """Takes pixels apart, on one thread."""

    def __init__(self) -> None:
        self._key: object = None
        self._siting = 0
        self._pictures = 0

    def take_apart(self, pixels: Pixels) -> tuple[PictureForm, list[Bytes]]:
        """The form of a picture, and its planes: [rows, bytes a row or more], still the decoder's memory.

        What is no AvPixels, or of a format that is not handed over, comes as RGB. Raises CameraError where it cannot.
        """
        frame = pixels.frame if isinstance(pixels, AvPixels) else None
        if frame is None or frame.format.name not in PIXEL_FORMATS or any(p.line_size <= 0 for p in frame.planes):
            rgb = pixels.to_rgb()
            return PictureForm("rgb24", rgb.shape[1], rgb.shape[0]), [rgb.reshape(rgb.shape[0], -1)]
        assert isinstance(pixels, AvPixels)
        turn = pixels.orientation
        form = PictureForm(
            pixel_format=frame.format.name,
            width=frame.width,
            height=frame.height,
            matrix=int(frame.colorspace),
            range=int(frame.color_range),
            siting=self._siting_of(frame),
            interlaced=bool(frame.interlaced_frame),
            turn=(turn.transposed, turn.flip_rows, turn.flip_columns),
            shown=(pixels.width, pixels.height),
        )
        return form, [np.frombuffer(memoryview(p), np.uint8).reshape(-1, p.line_size) for p in frame.planes]

    def _siting_of(self, frame: VideoFrame) -> int:
        """Looked for when a picture is not like the last one, and now and then."""
        key = (frame.format.name, frame.width, frame.height, int(frame.colorspace), bool(frame.interlaced_frame))
        if key != self._key or self._pictures >= _KNOWN_AFTER_PICTURES:
            self._siting, self._key, self._pictures = siting_of(frame), key, 0
        self._pictures += 1
        return self._siting


def known_siting(frame: VideoFrame) -> int:
    """As siting_of, which is asked once in a while for frames of a kind: it takes about 1.5 ms. Any thread.

    Two cameras that differ in nothing but the siting may be given each other's: that is half a pixel of colour.
    """
    key = (
        frame.format.name,
        frame.width,
        frame.height,
        int(frame.colorspace),
        int(frame.color_range),
        bool(frame.interlaced_frame),
    )
    siting, pictures = _known.get(key, (0, 0))
    if not pictures:
        siting, pictures = siting_of(frame), _KNOWN_AFTER_PICTURES
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
    _known[key] = siting, pictures - 1
    return siting


_known: dict[tuple[str, int, int, int, int, bool], tuple[int, int]] = {}


def siting_of(frame: VideoFrame) -> int:
    """Where the chroma samples of `frame` lie, AVCHROMA_LOC_... by number, as far as swscale makes a difference.

    PyAV does not tell. But scaling copies what a frame says of itself, so a small one that says the same is filled with
    a known pattern, converted, and compared with frames that are made to say each of the possible values.
    """
    forms = PIXEL_FORMATS[frame.format.name]
    if all(shift_x == shift_y == 0 for _, shift_x, shift_y in forms):
        return 0
    side = next(side for side in _TRIAL_PX if (side, side) != (frame.width, frame.height))
    name, interlaced = frame.format.name, bool(frame.interlaced_frame)
    trial = _scaled(frame, side, name)
    form = PictureForm(name, side, side, int(trial.colorspace), int(trial.color_range), 0, interlaced)
    pattern, start = _pattern(form), 0
    for (rows, row_bytes), plane in zip(form.planes(), trial.planes, strict=True):
        end = start + rows * row_bytes
        lines: Bytes = np.frombuffer(memoryview(plane), np.uint8).reshape(-1, plane.line_size)
        lines[:rows, :row_bytes] = pattern[start:end].reshape(rows, row_bytes)
        start = end
    seen = _colours(trial, side)
    for siting in _LIKELY:
        if _expected(name, side, form.matrix, form.range, interlaced, siting) == seen:
            return siting
    return 0


def _pattern(form: PictureForm) -> Bytes:
    """Colours near grey of any depth, so that nothing is clipped."""
    pattern = np.random.default_rng(0).integers(112, 144, form.size_bytes, np.uint8)
    if form.pixel_format.endswith("le"):
        upper = 128 if form.pixel_format[0] == "p" else {"10le": 2, "12le": 8}[form.pixel_format[-4:]]
        pattern[1::2] = upper
    return pattern


@functools.lru_cache(maxsize=64)
def _expected(name: str, side: int, matrix: int, colour_range: int, interlaced: bool, siting: int) -> bytes:
    form = PictureForm(name, side, side, matrix, colour_range, siting, interlaced)
    return _colours(_wrap(_context(form), form, _pattern(form)), side)


def _colours(frame: VideoFrame, side: int) -> bytes:
    return b"".join(bytes(plane) for plane in _scaled(frame, side, "gbrpf32le").planes)


def _scaled(frame: VideoFrame, side: int, pixel_format: str) -> VideoFrame:
    return VideoReformatter().reformat(frame, side, side, pixel_format, interpolation=Interpolation.BILINEAR, threads=1)
