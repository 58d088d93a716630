"""The intact clips that `mutants` damages: every codec, container and rate, encoded once a session."""

from __future__ import annotations

import functools
import io
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
from av.container import InputContainer
from av.video.frame import VideoFrame

from tests.camera.containers import TICKS_PER_S, Codec, Container, Sample, Track, read_record, write

REAL = Path(__file__).resolve().parents[2] / "media" / "vtest.mp4"
SIZE = (256, 192)
_PICTURES = 160


@dataclass(frozen=True, slots=True)
class Clip:
    """An intact clip, as samples and as the file that a muxer made of it."""

    track: Track
    samples: tuple[Sample, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class Source:
    """What is damaged: how it is encoded, and the container."""

    codec: Codec
    container: Container
    fps: int = 25
    first: int = 0
    count: int = 50
    size: tuple[int, int] = SIZE
    copied: bool = False
    declares_rate: bool = True
    real: Path = REAL

    @property
    def name(self) -> str:
        rate = "copied" if self.copied else f"{self.fps if self.declares_rate else 0}fps"
        clip = "" if self.real == REAL else f"-{self.real.stem}"
        return f"{self.codec}-{self.container}-{rate}{clip}"

    @property
    def suffix(self) -> str:
        return {"h264": "h264", "h265": "h265"}.get(self.codec, "mjpeg") if self.container == "raw" else self.container

    @property
    def has_times(self) -> bool:
        return self.container in ("mp4", "mov", "mkv", "ts")


SOURCES = (
    Source("h264", "mp4"),
    Source("h264", "mkv", first=10),
    Source("h264", "ts", first=20),
    Source("h264", "raw", first=30),
    Source("h265", "mp4", first=40),
    Source("h265", "mkv", first=50),
    Source("h265", "ts", first=60),
    Source("h265", "raw", first=70),
    Source("mjpeg", "avi", first=80, count=25),
    Source("mjpeg", "mov", first=90, count=25),
    Source("h264", "mp4", fps=18, first=100, count=40),
    Source("h264", "mkv", fps=20, first=110, count=40),
    Source("h264", "mp4", fps=120, first=15, count=60),
    Source("h265", "mp4", first=25, count=40, declares_rate=False),
    Source("mjpeg", "avi", first=35, count=20, declares_rate=False),
    Source("h264", "mp4", fps=10, count=16, copied=True),
)


def sources(clips: Sequence[Path] = ()) -> list[Source]:
    """All sources; `clips` are further real H.264 clips, each of which gives two more."""
    more = [
        source
        for clip in clips
        for source in (
            Source("h264", "mp4", fps=25, count=16, copied=True, real=clip),
            Source("h265", "mkv", fps=15, count=30, size=(192, 96), real=clip),
        )
    ]
    return [*SOURCES, *more]


def _reading(data: bytes) -> InputContainer:
    return av.open(io.BytesIO(data), "r")


@functools.cache
def clip_of(source: Source) -> Clip:
    """Made once a session."""
    with _reading(source.real.read_bytes() if source.copied else _encoded(source)) as container:
        stream = container.streams.video[0]
        record = bytes(stream.codec_context.extradata or b"")
        head, parameters = (b"", ()) if source.codec == "mjpeg" else read_record(source.codec, record)
        track = Track(source.codec, stream.width, stream.height, TICKS_PER_S // source.fps, parameters, head)
        assert stream.time_base is not None
        ticks = stream.time_base * TICKS_PER_S
        samples: list[Sample] = []
        packets = (packet for packet in container.demux(stream) if packet.size)
        for packet in itertools.islice(packets, source.count):
            nals = (bytes(packet),) if source.codec == "mjpeg" else _split(bytes(packet))
            pts, dts = packet.pts or 0, packet.dts or 0
            samples.append(Sample(nals, int(pts * ticks), int(dts * ticks), packet.is_keyframe))
    if source.container in ("ts", "raw"):
        samples = [replace(one, nals=parameters + one.nals) if one.key else one for one in samples]
    if not source.declares_rate:
        track = replace(track, interval=0)
        samples = [replace(one, pts=0, dts=0) for one in samples]
    return Clip(track, tuple(samples), _muxed(source, track, samples))


@functools.cache
def _pictures(real: Path) -> list[VideoFrame]:
    """The first of a clip, small."""
    with av.open(str(real)) as container:
        return [one.reformat(*SIZE, "yuv420p") for one in itertools.islice(container.decode(video=0), _PICTURES)]


def _split(data: bytes) -> tuple[bytes, ...]:
    nals: list[bytes] = []
    at = 0
    while at + 4 <= len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        nals.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    return tuple(nals)


def _encoded(source: Source) -> bytes:
    """The same bytes wherever the libraries are the same: one thread, and nothing of x264's that varies by itself."""
    h264 = {
        "preset": "veryfast",
        "g": "25",
        "bf": "2",
        "threads": "1",
        "crf": "26",
        "x264-params": "mbtree=0:aq-mode=0",
    }
    h265 = "keyint=25:bframes=2:pools=none:frame-threads=1:log-level=none:info=0"
    name, pix_fmt, options = {
        "h264": ("libx264", "yuv420p", h264),
        "h265": ("libx265", "yuv420p", {"preset": "ultrafast", "x265-params": h265}),
        "mjpeg": ("mjpeg", "yuvj420p", {"threads": "1", "qscale": "6"}),
    }[source.codec]
    out = io.BytesIO()
    kind = "mov" if source.codec == "mjpeg" else "mp4"
    with av.open(out, "w", format=kind) as container:
        stream: Any = container.add_stream(name, rate=source.fps, options=options)
        (stream.width, stream.height), stream.pix_fmt = source.size, pix_fmt
        frames = _pictures(source.real)[source.first : source.first + source.count]
        for number, frame in enumerate(frames):
            picture = frame.reformat(*source.size, pix_fmt)
            picture.pts, picture.time_base = number, Fraction(1, source.fps)
            picture.pict_type = 0
            container.mux(stream.encode(picture))
        container.mux(stream.encode(None))
    return out.getvalue()


def _muxed(source: Source, track: Track, samples: Sequence[Sample]) -> bytes:
    """FFmpeg's own file, where it makes one of this."""
    plain = write(source.container, track, samples)
    if source.container == "raw" or not source.declares_rate:
        return plain
    out = io.BytesIO()
    kind = {"mkv": "matroska", "ts": "mpegts"}.get(source.container, source.container)
    options = {"fflags": "+bitexact"}
    if source.container == "mp4" and source.fps > 25:  # in fragments: what is cut off can be read up to there
        options["movflags"] = "+frag_keyframe+empty_moov"
    with _reading(plain) as read, av.open(out, "w", format=kind, options=options) as made:
        stream = made.add_stream_from_template(read.streams.video[0])
        for sample, packet in zip(samples, read.demux(video=0), strict=False):
            packet.stream, packet.time_base = stream, Fraction(1, TICKS_PER_S)
            packet.pts, packet.dts, packet.duration = sample.pts, sample.dts, track.interval
            made.mux(packet)
    return out.getvalue()
