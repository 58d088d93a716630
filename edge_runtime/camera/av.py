"""The door to PyAV: files, folders of images and network streams in, pictures out.

The scaler is swscale's bilinear straight to planar float GBR at the resized size: one pass for size and colour,
no full-size RGB. Scaling down, its triangle is as wide as the pixels it makes, so nothing aliases. Measured by
`prepare evaluate` on 128 COCO images, mAP of yolox_nano, nanodet_m, centernet 512/416/320: bilinear .336 .271
.343 .307 .276; area .337 .265 .342 .312 .274; bicubic .337 .270 .337 .311 .278. They cost the same (0.5 ms for
768x576 -> 416x312).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import av
import av.error
import numpy as np
from av.codec.context import CodecContext
from av.container import InputContainer
from av.packet import Packet
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame
from av.video.reformatter import Interpolation, VideoReformatter
from av.video.stream import VideoStream
from numpy.typing import NDArray

from edge_runtime.camera.pacing import nominal_interval_ns
from edge_runtime.camera.place import check_place, fill_borders, fill_picture, windows
from edge_runtime.camera.source import STALLED, Ledger, Picture
from edge_runtime.clock import Clock
from edge_runtime.errors import CameraError
from edge_runtime.records.frames import Float32Array, Transform
from edge_runtime.records.spec import InputSpec
from edge_runtime.vision.geometry import plan

log = logging.getLogger(__name__)

SCALER = "swscale-bilinear"

_FORMAT = "gbrpf32le"
# swscale widens 8 bits to 16 by a shift and divides by 65535, so 255 comes out as 0.9961.
_UNIT = 65535.0 / 256.0
_PLANES = {"RGB": (2, 0, 1), "BGR": (1, 0, 2)}
_REFORMATTERS_PER_THREAD = 8
# A title in another encoding must not keep a clip from being opened. PyAV 19 is lenient and has no such argument.
_OPEN_OPTIONS: dict[str, Any] = {"metadata_errors": "replace"} if int(av.__version__.split(".")[0]) < 19 else {}
_MAX_RESIZED_PIXELS = 1 << 26
_SPC_UNSPECIFIED, _SPC_BT470BG, _SPC_SMPTE170M, _SPC_BT2020_NCL = 2, 5, 6, 9
_TAG_UNSPECIFIED = 2
_KNOWN_MATRICES = frozenset({0, 1, 2, 4, 6, 7, 8, 9})

# A stream whose key frames are never marked (intra refresh) is taken as it comes after this many.
_KEY_PATIENCE_PACKETS = 300
_PACKET_TIMES = 64


class _Reformatters(threading.local):
    """swscale contexts of one thread: they aren't thread-safe, and rebuilding one costs more than a frame."""

    def __init__(self) -> None:
        self._of: OrderedDict[tuple[int, int, str, int, int], VideoReformatter] = OrderedDict()

    def get(self, frame: VideoFrame, width: int, height: int) -> VideoReformatter:
        key = (frame.width, frame.height, frame.format.name, width, height)
        reformatter = self._of.get(key)
        if reformatter is None:
            reformatter = self._of[key] = VideoReformatter()
            if len(self._of) > _REFORMATTERS_PER_THREAD:
                self._of.popitem(last=False)
        else:
            self._of.move_to_end(key)
        return reformatter


_reformatters = _Reformatters()


def _reformat(frame: VideoFrame, width: int, height: int, pixel_format: str) -> VideoFrame:
    try:
        return _reformatters.get(frame, width, height).reformat(
            frame, width, height, pixel_format, interpolation=Interpolation.BILINEAR, threads=1
        )
    except (av.error.FFmpegError, ValueError, MemoryError) as error:
        raise CameraError(
            f"a picture of {frame.width} x {frame.height} px in {frame.format.name} cannot be scaled to "
            f"{width} x {height}: {_reason(error)}",
            code="pixels_unreadable",
            remedy="let the camera send H.264, H.265 or MJPEG in 8 bits",
        ) from error


def scale(frame: VideoFrame, spec: InputSpec, transform: Transform) -> VideoFrame:
    """First half of `AvPixels.write_into`: `frame` at the resized size of `transform`, as planar float GBR.

    `frame` is one that an AvPixels holds. Raises CameraError where swscale refuses the format or size.
    """
    if transform.resized_width * transform.resized_height > _MAX_RESIZED_PIXELS:
        raise CameraError(
            f"{frame.width} x {frame.height} px scaled for {spec.resize} would be {transform.resized_width} x "
            f"{transform.resized_height} px",
            code="pixels_unreadable",
            remedy="use a letterbox or stretch for a picture of this shape",
        )
    return _reformat(frame, transform.resized_width, transform.resized_height, _FORMAT)


def convert(scaled: VideoFrame, place: Float32Array, spec: InputSpec, transform: Transform) -> None:
    """Second half of `AvPixels.write_into`: what `scale` returned into `place`, normalised and padded.

    `place` is [3, H, W] float32 of `spec`; every element is written. Raises ValueError for another place.
    """
    check_place(place, spec)
    inside, shown = windows(transform)
    planes = [_plane(scaled, index) for index in _PLANES[spec.color]]
    fill_borders(place, inside, spec)
    fill_picture(place, planes, _UNIT, spec, inside, shown)


def _plane(frame: VideoFrame, index: int) -> NDArray[np.float32]:
    """A view of one plane, [height, width]; lines may be longer than the picture is wide."""
    plane = frame.planes[index]
    lines = np.frombuffer(memoryview(plane), np.float32).reshape(-1, plane.line_size // 4)
    return lines[: frame.height, : frame.width]


class AvPixels:
    """A decoded frame that puts itself into a model's input.

    Matrix and range are the frame's own; where it says nothing, BT.601 and limited range (full for `yuvj`
    and grey), which is FFmpeg's reading and what OpenCV gives. Rotation metadata is not applied.
    """

    __slots__ = ("_frame",)

    def __init__(self, frame: VideoFrame) -> None:
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

    @property
    def width(self) -> int:
        return self._frame.width

    @property
    def height(self) -> int:
        return self._frame.height

    @property
    def frame(self) -> VideoFrame:
        """The frame as decoded, for `scale`."""
        return self._frame

    def write_into(self, place: Float32Array, spec: InputSpec) -> Transform:
        """Scale, convert, normalise and pad into `place` ([3, H, W] float32, may hold old content).

        Every element of `place` is written; returns `plan(width, height, spec)`, which was applied. May be
        called from several threads at once, on the same pixels too. Raises CameraError where the format
        cannot be read, ValueError where `place` is not of the shape of `spec`.
        """
        check_place(place, spec)
        transform = plan(self._frame.width, self._frame.height, spec)
        convert(scale(self._frame, spec, transform), place, spec, transform)
        return transform

    def to_rgb(self) -> NDArray[np.uint8]:
        """A new [height, width, 3] uint8 RGB array. Raises CameraError where the format cannot be read."""
        # Through the same planar floats as the model's input. swscale's packed RGB halves the chroma
        # resolution, and its unscaled yuv420p to 8-bit GBR leaves the last width % 16 columns unwritten
        # (FFmpeg 8.0 and 8.1, x86).
        planar = _reformat(self._frame, self._frame.width, self._frame.height, _FORMAT)
        rgb = np.empty((planar.height, planar.width, 3), np.uint8)
        for channel, index in enumerate(_PLANES["RGB"]):
            levels = _plane(planar, index) * np.float32(_UNIT)
            levels += np.float32(0.5)
            np.minimum(levels, np.float32(255), out=levels)
            rgb[:, :, channel] = levels
        return rgb


def _reason(error: BaseException) -> str:
    """FFmpeg's own word for an error, never its address."""
    if isinstance(error, av.error.FFmpegError):
        return error.strerror or type(error).__name__
    return str(error) or type(error).__name__


def _single_threaded(context: CodecContext) -> None:
    """FFmpeg must start no threads beside ours: cameras and lanes already share the cores."""
    context.thread_type = "NONE"
    context.thread_count = 1


class ContainerSession:
    """A Session on a file or network stream.

    `timeouts_s` (open, read) makes it live; a file has none. Raises CameraError where it cannot be opened.
    """

    def __init__(
        self, target: str, ledger: Ledger, clock: Clock, timeouts_s: tuple[float, float] | None, options: dict[str, str]
    ) -> None:
        self._ledger = ledger
        self._clock = clock
        self._read_timeout_s = timeouts_s[1] if timeouts_s else None
        live = timeouts_s is not None
        opened_s = time.monotonic()
        try:
            # Files get no time-out: PyAV's callback takes the GIL on every block that is read.
            self._container: InputContainer = av.open(
                target, mode="r", options=options, timeout=timeouts_s, **_OPEN_OPTIONS
            )
        except (av.error.FFmpegError, OSError, ValueError) as error:
            if timeouts_s and time.monotonic() - opened_s >= timeouts_s[0]:
                raise CameraError(f"no answer within {timeouts_s[0]:g} s", retryable=True) from None
            # Not chained: FFmpeg's error carries the address with its password.
            raise CameraError(f"cannot open: {_reason(error)}", retryable=True) from None
        try:
            self._stream = self._video_stream(live)
        except CameraError:
            self._container.close()
            raise
        self._intra_only = self._stream.codec_context.codec.intra_only
        self.interval_ns = nominal_interval_ns(
            next((float(r) for r in (self._stream.average_rate, self._stream.guessed_rate) if r), None)
        )

    @property
    def codec(self) -> str:
        """FFmpeg's name of the decoder."""
        return self._stream.codec_context.name

    @property
    def frames(self) -> int | None:
        """Number of frames that the container declares, None where it doesn't."""
        return self._stream.frames or None

    def close(self) -> None:
        self._container.close()

    def _video_stream(self, live: bool) -> VideoStream:
        videos = [s for s in self._container.streams.video if not s.disposition & s.disposition.attached_pic]
        if not videos:
            raise CameraError("holds no video stream", code="no_video", remedy="name a video", retryable=live)
        stream = videos[0]
        if stream.codec_context is None:
            raise CameraError("no decoder for its video stream", code="no_decoder", retryable=live)
        for other in self._container.streams:
            if other.index != stream.index:
                other.discard = av.stream.Discard.all
        _single_threaded(stream.codec_context)
        return stream

    def pictures(self) -> Iterator[Picture]:
        """Intact pictures in presentation order; the rest is counted. Raises CameraError."""
        time_base = self._stream.time_base or Fraction(1, 1)
        left: dict[int, int] = {}
        started, damaged, waited = self._intra_only, False, 0
        for packet in self._packets():
            t_packet_ns = self._clock.monotonic_ns()
            if packet.size:
                if not started and not packet.is_keyframe and waited < _KEY_PATIENCE_PACKETS:
                    waited += 1
                    self._ledger.count(pre_key=1)
                    continue
                started = True
                if packet.pts is not None:
                    left[packet.pts] = t_packet_ns
                    if len(left) > _PACKET_TIMES:
                        del left[next(iter(left))]
            try:
                frames = packet.decode()
            except (av.error.FFmpegError, MemoryError):
                self._ledger.count(corrupt=1)
                damaged, waited = not self._intra_only, 0
                continue
            for frame in frames:
                if frame.is_corrupt:
                    damaged, waited = not self._intra_only, 0
                    self._ledger.count(corrupt=1)
                    continue
                if damaged and not frame.key_frame and waited < _KEY_PATIENCE_PACKETS:
                    # It is decoded from a damaged picture: FFmpeg doesn't say so, but it smears.
                    waited += 1
                    self._ledger.count(corrupt=1)
                    continue
                damaged = False
                pts_ns = None if frame.pts is None else _ns(frame.pts, frame.time_base or time_base)
                t_left_ns = t_packet_ns if frame.pts is None else left.pop(frame.pts, t_packet_ns)
                yield Picture(AvPixels(frame), pts_ns, t_left_ns)

    def _packets(self) -> Iterator[Packet[VideoStream]]:
        """Packets to the end, an empty one last. Raises CameraError; a file's read error ends it instead."""
        packets = self._container.demux(self._stream)
        silent = False
        while True:
            # Demuxers hand out what they hold when a read is interrupted, and only then the error, or turn
            # it into the end of the stream: the wait before counts too.
            was_silent, asked_s = silent, time.monotonic()
            try:
                packet = next(packets, None)
            except av.error.FFmpegError as error:
                if self._read_timeout_s is None:
                    log.warning("a file ends early: %s", _reason(error))
                    self._ledger.count(corrupt=1)
                    return
                if was_silent or isinstance(error, av.error.ExitError):
                    raise self._stalled() from None
                raise CameraError(f"reading failed: {_reason(error)}", retryable=True) from None
            if packet is None:
                return
            silent = self._read_timeout_s is not None and time.monotonic() - asked_s >= self._read_timeout_s
            if not packet.size and (silent or was_silent):
                raise self._stalled()
            yield packet

    def _stalled(self) -> CameraError:
        return CameraError(f"no data for {self._read_timeout_s or 0:g} s", code=STALLED, retryable=True)


def _ns(pts: int, time_base: Fraction) -> int:
    return pts * time_base.numerator * 1_000_000_000 // time_base.denominator


def decode_image(data: bytes) -> AvPixels:
    """The picture in a JPEG, PNG, BMP or WebP file's content. Raises CameraError where it is none, or damaged."""
    if data[:3] == b"\xff\xd8\xff":
        codec = "mjpeg"
    elif data[:8] == b"\x89PNG\r\n\x1a\n":
        codec = "png"
    elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        codec = "webp"
    elif data[:2] == b"BM":
        codec = "bmp"
    else:
        raise CameraError("is no JPEG, PNG, BMP or WebP picture", code="image_unreadable")
    context: VideoCodecContext = CodecContext.create(codec, "r")  # type: ignore[assignment]
    _single_threaded(context)
    # A cut-off JPEG would otherwise come out with its lower part grey and no flag.
    context.options = {"err_detect": "explode"}
    try:
        frames = [*context.decode(Packet(data)), *context.decode(None)]
    except (av.error.FFmpegError, MemoryError) as error:
        raise CameraError(f"damaged picture: {_reason(error)}", code="image_unreadable") from error
    if not frames or frames[0].is_corrupt:
        raise CameraError("damaged picture", code="image_unreadable")
    return AvPixels(frames[0])
