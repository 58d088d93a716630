"""Which camera a URL means."""

from __future__ import annotations

import logging
import re

from edge_runtime.camera.media import AvCamera
from edge_runtime.camera.options import CameraOptions
from edge_runtime.camera.protocol import Camera
from edge_runtime.camera.streams import kind_of
from edge_runtime.camera.synthetic import SyntheticCamera
from edge_runtime.clock import Clock
from edge_runtime.errors import CameraError
from edge_runtime.source_url import redact_url

log = logging.getLogger(__name__)

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_GSTREAMER_ONLY = ("csi", "gst")


def open_camera(options: CameraOptions, *, clock: Clock | None = None) -> Camera:
    """The camera for `options.url`: `file:PATH` or a plain path (a video or a folder of images), rtsp(s)://,
    http(s)://, `v4l2:`, `csi:`, `gst:`, `synthetic:`.

    Nothing is opened before the first `read`. `bundled:` names are for the caller to resolve. Raises
    CameraError for another kind of URL and for wrong `synthetic:` options.
    """
    url = options.url
    scheme = match.group(1).lower() if (match := _SCHEME.match(url)) else "file"
    kind = kind_of(url)
    if scheme == "synthetic":
        synthetic = SyntheticCamera(name=options.name, url=url, fps=options.fps, pace=options.pace, clock=clock)
        if options.isolation == "thread":
            return synthetic
    elif kind is None and scheme not in _GSTREAMER_ONLY:
        raise CameraError(
            f"a camera cannot be opened at {redact_url(url)!r}: {scheme}: is not known",
            code="camera_unsupported",
            where=options.name,
            remedy="use rtsp://, http://, file:PATH, v4l2:, csi:, gst: or synthetic:",
        )
    # The backend's modules are imported when they are needed: GStreamer's `gi` may not be installed.
    if options.isolation == "process":
        from edge_runtime.camera.isolated import IsolatedCamera

        return IsolatedCamera(options, clock=clock)
    if kind is None or options.backend == "gstreamer":
        from edge_runtime.camera.gstreamer import GstCamera

        return GstCamera(options, clock=clock)
    if options.backend == "auto" and kind != "file":
        from edge_runtime.camera.gst_pipelines import JETSON, plan_for
        from edge_runtime.camera.gstreamer import GstCamera, hardware_decoder, have_element

        if (decoder := hardware_decoder()) is not None:
            try:
                plan_for(options, JETSON, have_element)
            except CameraError as error:
                log.warning("camera %s: read by PyAV, not decoded by %s: %s", options.name, decoder, error)
            else:
                return GstCamera(options, clock=clock)
    return AvCamera(options, clock=clock)
