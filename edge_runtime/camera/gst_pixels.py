"""Decoded pictures out of GStreamer's memory: rows copied once, by stride, colours as the stream itself says them."""

from __future__ import annotations

from typing import Any

from edge_runtime.camera.av_pixels import AvPixels, frame_of
from edge_runtime.camera.gst_library import Library
from edge_runtime.camera.gst_pipelines import PIXEL_FORMATS, UNSPECIFIED_MATRIX, matrix_of
from edge_runtime.errors import CameraError

_FULL_RANGE = 1
"""GST_VIDEO_COLOR_RANGE_0_255."""


class PixelReader:
    """Makes pixels of one pipeline's samples; sizes and formats may change from one to the next."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._info: tuple[Any, Any] | None = None

    def read(self, sample: Any, size: tuple[int, int] | None, *, jpeg: bool, labelled: bool) -> AvPixels:
        """`size`: the camera's own (px), where the sample was scaled. `labelled`: whether the encoded stream says what
        its colours are; what the decoder says then counts. Raises CameraError where the format cannot be read."""
        library, buffer, caps = self._library, sample.get_buffer(), sample.get_caps()
        if self._info is None or not self._info[0].is_equal(caps):
            info = library.GstVideo.VideoInfo.new_from_caps(caps)
            if info is None or info.finfo.name not in PIXEL_FORMATS:
                name = info.finfo.name if info is not None else caps.to_string()
                raise CameraError(
                    f"pictures in {name} cannot be read",
                    code="pixels_unreadable",
                    remedy="end the pipeline with videoconvert, without an appsink",
                    retryable=True,
                )
            self._info = caps, info
        info = self._info[1]
        meta = library.GstVideo.buffer_get_video_meta(buffer)
        layout = info if meta is None else meta
        count = info.finfo.n_planes
        strides, offsets = list(layout.stride)[:count], list(layout.offset)[:count]
        matrix, full = (UNSPECIFIED_MATRIX, True) if jpeg else self._colors(caps, labelled)
        with library.mapped(buffer) as data:
            planes = [(data[offset:], stride) for offset, stride in zip(offsets, strides, strict=True)]
            frame = frame_of(PIXEL_FORMATS[info.finfo.name], info.width, info.height, planes, full_range=full)
            del planes
        frame.colorspace = matrix
        return AvPixels(frame, size=size)

    def _colors(self, caps: Any, labelled: bool) -> tuple[int, bool]:
        """(FFmpeg's matrix, whether the range is full), as far as the stream itself says it.

        Where it says nothing, GStreamer fills in a matrix by the picture's size. Our way is FFmpeg's and the other
        backend's, see AvPixels.
        """
        text = caps.get_structure(0).get_string("colorimetry")
        if not text:
            return UNSPECIFIED_MATRIX, False
        colors = self._library.GstVideo.VideoColorimetry()
        colors.from_string(text)
        return matrix_of(int(colors.matrix)) if labelled else UNSPECIFIED_MATRIX, int(colors.range) == _FULL_RANGE
