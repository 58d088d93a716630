"""The door to PyAV for streams: files and network streams in, intact pictures out. Pixels are in `av_pixels`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import av
import av.error
from av.codec.context import CodecContext
from av.container import InputContainer
from av.packet import Packet
from av.video.codeccontext import VideoCodecContext
from av.video.stream import VideoStream

from edge_runtime.camera.av_decoding import Decoding, losses, watch_for_losses
from edge_runtime.camera.av_pixels import AvPixels, reason_of
from edge_runtime.camera.pacing import nominal_interval_ns
from edge_runtime.camera.session import STALLED, Intake, Picture
from edge_runtime.camera.streams import Stream
from edge_runtime.clock import Clock
from edge_runtime.errors import CameraError

log = logging.getLogger(__name__)

# A title in another encoding must not keep a clip from being opened. PyAV 19 is lenient and has no such argument.
_OPEN_OPTIONS: dict[str, Any] = {"metadata_errors": "replace"} if int(av.__version__.split(".")[0]) < 19 else {}
_MAX_PIXELS = 1 << 26


def _single_threaded(context: CodecContext) -> None:
    """FFmpeg must start no threads beside ours: cameras and lanes already share the cores."""
    context.thread_type = "NONE"
    context.thread_count = 1


def _opened(stream: Stream) -> InputContainer:
    """Raises CameraError."""
    if stream.kind == "rtsp":
        watch_for_losses()
    started_s = time.monotonic()
    container: InputContainer | None = None
    number, word = None, ""
    try:
        # Files get no time-out: PyAV's callback takes the GIL on every block that is read.
        container = av.open(
            stream.target,
            mode="r",
            format=stream.format,
            options=stream.options,
            timeout=stream.timeouts_s,
            **_OPEN_OPTIONS,
        )
    except (av.error.FFmpegError, OSError, ValueError, MemoryError) as error:
        number, word = getattr(error, "errno", None), reason_of(error)
    if stream.timeouts_s and time.monotonic() - started_s >= stream.timeouts_s[0]:
        # FFmpeg may call it a success: whatever the description said is then all that is known.
        if container is not None:
            container.close()
        raise stream.no_answer()
    if container is not None:
        return container
    # Out here, so that FFmpeg's error, which carries the address with its password, is not its context. Never in a
    # variable: error, traceback and frame would hold each other, with all that is decoded, until the collector comes.
    raise stream.fault(number, word)


class ContainerSession:
    """A Session on a file or network stream.

    Raises CameraError where it cannot be opened. An open cannot be ended from outside: PyAV looks at nothing but its
    time-outs, and twice at the one for opening: once for the connection and once for learning what comes.
    """

    def __init__(self, stream: Stream, intake: Intake, clock: Clock, tell: Callable[[str], None] = log.warning) -> None:
        self._intake = intake
        self._tell = tell
        self._ledger = intake.ledger
        self._clock = clock
        self._read_timeout_s = stream.timeouts_s[1] if stream.timeouts_s else None
        self._container = _opened(stream)
        try:
            self._stream = self._video_stream(stream.live)
        except CameraError:
            self._container.close()
            raise
        # HLS comes a segment at a time, a recording on a server as fast as the network allows.
        self.in_bursts = stream.live and (
            self._container.format.name == "hls" or (stream.kind == "http" and bool(self._container.duration))
        )
        rates = (self._stream.average_rate, self._stream.guessed_rate)
        # Without times in the stream FFmpeg says 25 for MJPEG over HTTP, whatever comes.
        said = self._container.format.name != "mpjpeg"
        self.interval_ns = nominal_interval_ns(next((float(rate) for rate in rates if rate and said), None))

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
        context = stream.codec_context
        _single_threaded(context)
        # A damaged header may claim any size. A JPEG that breaks off comes out grey below, without a flag, otherwise.
        context.options = {"max_pixels": str(_MAX_PIXELS)} | (
            {"err_detect": "explode"} if context.name == "mjpeg" else {}
        )
        return stream

    def pictures(self) -> Iterator[Picture]:
        """Intact pictures in presentation order; the rest is counted. Raises CameraError."""
        decoding = Decoding(self._stream, self._intake, live=self._read_timeout_s is not None)
        seen = losses()
        try:
            for packet in self._packets():
                if (lost := losses()) != seen:
                    # In this packet or the next, which may be a key frame: FFmpeg reads ahead by one.
                    seen = lost
                    decoding.lose()
                yield from decoding.feed(packet, self._clock.monotonic_ns())
        finally:
            decoding.settle()

    def _packets(self) -> Iterator[Packet[VideoStream]]:
        """Packets to the end, an empty one last. Raises CameraError; a file's read error ends it instead."""
        packets = self._container.demux(self._stream)
        silent = False
        while True:
            # Demuxers hand out what they hold when a read is interrupted, and only then the error, or turn
            # it into the end of the stream: the wait before counts too.
            was_silent, asked_s = silent, time.monotonic()
            failed: str | None = None
            try:
                packet = next(packets, None)
            except IndexError:
                # A packet of a stream that was not there when it was opened (TS): PyAV knows none of that number.
                self._intake.arrived()
                packets = self._container.demux(self._stream)
                continue
            except av.error.FFmpegError as error:
                if self._read_timeout_s is None:
                    self._tell(f"a file ends early: {reason_of(error)}")
                    self._ledger.count(corrupt=1)
                    return
                silent = was_silent or isinstance(error, av.error.ExitError)
                failed = reason_of(error)
            # Out here and in no variable, as above.
            if failed is not None:
                raise self._stalled() if silent else CameraError(f"reading failed: {failed}", retryable=True)
            if packet is None:
                return
            silent = self._read_timeout_s is not None and time.monotonic() - asked_s >= self._read_timeout_s
            if not packet.size and (silent or was_silent):
                raise self._stalled()
            if packet.size:
                self._intake.arrived()
            yield packet

    def _stalled(self) -> CameraError:
        return CameraError(f"no data for {self._read_timeout_s or 0:g} s", code=STALLED, retryable=True)


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
