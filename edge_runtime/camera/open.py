"""Which camera a URL means."""

from __future__ import annotations

import re

from edge_runtime.camera.media import AvCamera
from edge_runtime.camera.protocol import Camera
from edge_runtime.camera.source import Pace
from edge_runtime.camera.synthetic import SyntheticCamera
from edge_runtime.clock import Clock
from edge_runtime.errors import CameraError
from edge_runtime.source_url import redact_url

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")


def open_camera(
    *,
    name: str,
    url: str,
    fps: float | None = None,
    pace: Pace = "realtime",
    loop: bool = True,
    clock: Clock | None = None,
    open_timeout_s: float = 10.0,
    read_timeout_s: float = 10.0,
) -> Camera:
    """The camera for `url`: `file:PATH` or a plain path (a video or a folder of images), http(s)://, `synthetic:`.

    Nothing is opened before the first `read`. `bundled:` names are for the caller to resolve. Raises
    CameraError for another kind of URL and for wrong `synthetic:` options.
    """
    scheme = match.group(1).lower() if (match := _SCHEME.match(url)) else "file"
    if scheme == "synthetic":
        return SyntheticCamera(name=name, url=url, fps=fps, pace=pace, clock=clock)
    if scheme in ("file", "http", "https"):
        return AvCamera(
            name=name,
            url=url,
            fps=fps,
            pace=pace,
            loop=loop,
            clock=clock,
            open_timeout_s=open_timeout_s,
            read_timeout_s=read_timeout_s,
        )
    raise CameraError(
        f"a camera cannot be opened at {redact_url(url)!r}: {scheme}: is not known",
        code="camera_unsupported",
        where=name,
        remedy="use file:PATH, http://, https:// or synthetic:",
    )
