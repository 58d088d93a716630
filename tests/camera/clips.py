"""Clips that the tests encode: numbered pictures, so that order and count can be read back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

from edge_runtime.backoff import Backoff
from edge_runtime.camera.media import AvCamera
from edge_runtime.camera.options import CameraOptions
from edge_runtime.camera.synthetic import SyntheticPixels
from edge_runtime.clock import Clock

WIDTH, HEIGHT = 192, 96


def numbered(count: int, width: int = WIDTH, height: int = HEIGHT) -> list[NDArray[np.uint8]]:
    """RGB pictures that `read_number` understands."""
    return [SyntheticPixels(number, width, height).to_rgb() for number in range(count)]


def textured(count: int, width: int = 320, height: int = 240) -> list[NDArray[np.uint8]]:
    """RGB pictures that move over a fixed pattern: what goes missing in one shows in all that are decoded from it."""
    rng = np.random.default_rng(3)
    pattern = rng.integers(64, 192, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8).repeat(8, 0).repeat(8, 1)
    pictures = []
    for number in range(count):
        picture = np.roll(pattern[:height, :width], number, axis=1)
        left = number * 5 % (width - width // 4)
        picture[height // 4 : height // 2, left : left + width // 4] = (200, number * 9 % 256, 30)
        pictures.append(picture)
    return pictures


def encode(
    path: Path,
    pictures: Iterable[NDArray[np.uint8]],
    *,
    rate: int = 25,
    codec: str = "libx264",
    pix_fmt: str = "yuv420p",
    options: dict[str, str] | None = None,
    times_ms: Sequence[int] | None = None,
) -> Path:
    """Encode RGB pictures; `times_ms` are the presentation times, else a steady `rate`."""
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream(codec, rate=rate, options=options or {})
        stream.pix_fmt = pix_fmt
        time_base = Fraction(1, rate) if times_ms is None else Fraction(1, 1000)
        stream.codec_context.time_base = time_base
        for index, rgb in enumerate(pictures):
            if index == 0:
                stream.height, stream.width = rgb.shape[:2]
            frame = av.VideoFrame.from_ndarray(rgb, "rgb24").reformat(format=pix_fmt)
            frame.pts = index if times_ms is None else times_ms[index]
            frame.time_base = time_base
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def repeated(source: Path, target: Path, times: int) -> Path:
    """The same packets again and again, their times going on. `source` ends before a key frame."""
    with av.open(str(target), "w") as out:
        stream: Any = None
        start = 0
        for _ in range(times):
            with av.open(str(source)) as container:
                video = container.streams.video[0]
                stream = stream or out.add_stream_from_template(video)
                end = start
                for packet in container.demux(video):
                    if packet.size and packet.pts is not None and packet.dts is not None:
                        packet.pts, packet.dts = packet.pts + start, packet.dts + start
                        end = max(end, packet.pts + (packet.duration or 0))
                        packet.stream = stream
                        out.mux(packet)
                start = end
    return target


def image(rgb: NDArray[np.uint8], codec: str = "png", pix_fmt: str = "rgb24") -> bytes:
    """One encoded picture; PNG keeps every level."""
    context: Any = av.CodecContext.create(codec, "w")
    context.height, context.width = rgb.shape[:2]
    context.pix_fmt = pix_fmt
    context.time_base = Fraction(1, 25)
    frame = av.VideoFrame.from_ndarray(rgb, "rgb24").reformat(format=pix_fmt)
    frame.pts = 0
    return b"".join(bytes(packet) for packet in [*context.encode(frame), *context.encode(None)])


def sound(path: Path) -> Path:
    """A file with audio and nothing else."""
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("aac", rate=16000)
        stream.layout = "mono"
        for index in range(20):
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
            frame.sample_rate = 16000
            frame.pts = index * 1024
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def av_camera(*, clock: Clock | None = None, backoff: Backoff | None = None, **options: Any) -> AvCamera:
    """A camera of the PyAV backend; `options` are those of CameraOptions."""
    return AvCamera(CameraOptions(**options), clock=clock, backoff=backoff)
