"""Which camera a URL means."""

from __future__ import annotations

import re

from edge_runtime.camera.media import AvCamera
from edge_runtime.camera.options import CameraOptions
from edge_runtime.camera.protocol import Camera
from edge_runtime.camera.synthetic import SyntheticCamera
from edge_runtime.clock import Clock
from edge_runtime.errors import CameraError
from edge_runtime.source_url import redact_url

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")


def open_camera(options: CameraOptions, *, clock: Clock | None = None) -> Camera:
    """The camera for `options.url`: `file:PATH` or a plain path (a video or a folder of images), http(s)://,
    `synthetic:`.

    Nothing is opened before the first `read`. `bundled:` names are for the caller to resolve. Raises
    CameraError for another kind of URL and for wrong `synthetic:` options.
    """
    url = options.url
    scheme = match.group(1).lower() if (match := _SCHEME.match(url)) else "file"
    if scheme == "synthetic":
        return SyntheticCamera(name=options.name, url=url, fps=options.fps, pace=options.pace, clock=clock)
    if scheme in ("file", "http", "https"):
        return AvCamera(options, clock=clock)
    raise CameraError(
        f"a camera cannot be opened at {redact_url(url)!r}: {scheme}: is not known",
        code="camera_unsupported",
        where=options.name,
        remedy="use file:PATH, http://, https:// or synthetic:",
    )
