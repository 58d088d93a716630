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
