"""The door to PyAV for streams: files and network streams in, intact pictures out. Pixels are in `av_pixels`."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import av
import av.error
from av.codec.context import CodecContext
from av.container import InputContainer
from av.packet import Packet
from av.video.codeccontext import VideoCodecContext
from av.video.stream import VideoStream

from edge_runtime.camera.av_pixels import AvPixels, reason_of
from edge_runtime.camera.pacing import nominal_interval_ns
from edge_runtime.camera.source import STALLED, Intake, Picture
from edge_runtime.clock import Clock
from edge_runtime.errors import CameraError

log = logging.getLogger(__name__)

# A title in another encoding must not keep a clip from being opened. PyAV 19 is lenient and has no such argument.
_OPEN_OPTIONS: dict[str, Any] = {"metadata_errors": "replace"} if int(av.__version__.split(".")[0]) < 19 else {}
# A stream whose key frames are never marked (intra refresh) is taken as it comes after this many.
_KEY_PATIENCE_PACKETS = 300
_PACKET_TIMES = 64


def _single_threaded(context: CodecContext) -> None:
    """FFmpeg must start no threads beside ours: cameras and lanes already share the cores."""
    context.thread_type = "NONE"
    context.thread_count = 1


class ContainerSession:
    """A Session on a file or network stream.

    `timeouts_s` (open, read) makes it live; a file has none. Raises CameraError where it cannot be opened.
    """

    def __init__(
        self, target: str, intake: Intake, clock: Clock, timeouts_s: tuple[float, float] | None, options: dict[str, str]
    ) -> None:
        self._intake = intake
        self._ledger = intake.ledger
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
            raise CameraError(f"cannot open: {reason_of(error)}", retryable=True) from None
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
                    log.warning("a file ends early: %s", reason_of(error))
                    self._ledger.count(corrupt=1)
                    return
                if was_silent or isinstance(error, av.error.ExitError):
                    raise self._stalled() from None
                raise CameraError(f"reading failed: {reason_of(error)}", retryable=True) from None
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
        raise CameraError(f"damaged picture: {reason_of(error)}", code="image_unreadable") from error
    if not frames or frames[0].is_corrupt:
        raise CameraError("damaged picture", code="image_unreadable")
    return AvPixels(frames[0])
