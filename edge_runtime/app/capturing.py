"""`prepare capture`: a clip, pictures or a camera, and the selection of what is kept, wired up."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Generator
from contextlib import closing
from datetime import datetime, timezone
from pathlib import Path

from edge_runtime.app.camera_set import open_source
from edge_runtime.app.evaluate import read_image
from edge_runtime.app.halving import calibration_pictures
from edge_runtime.bundled import SCHEME
from edge_runtime.camera.open import open_camera
from edge_runtime.camera.options import CameraOptions
from edge_runtime.camera.protocol import Camera
from edge_runtime.config import load_config
from edge_runtime.errors import CameraError, UsageError
from edge_runtime.prepare.capture import CaptureResult, Seen, capture
from edge_runtime.source_url import redact_url

__all__ = ["FPS", "OPEN_S", "capture_source", "configured_camera", "live_pictures"]

FPS = 2.0
"""Of a live camera: neighbours show the same, and whoever else reads it needs the processor."""
OPEN_S = 30.0
"""A camera that has given no picture for so long is not waited for any longer."""
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")


def capture_source(
    source: str,
    out_dir: Path,
    *,
    config: Path | None = None,
    count: int,
    max_bytes: int,
    every: int = 1,
    fps: float = FPS,
    within_s: float | None = None,
    open_s: float = OPEN_S,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> CaptureResult:
    """Keep unlike pictures of a source in `out_dir`, as `prepare.capture.capture` does.

    source: a clip, a folder of pictures, `bundled:NAME`, or a camera's URL; with `config` the name of a camera in that
    file, which is opened beside the daemon that may run with it. `every`: of files, every so many frames. Of a live
    camera `fps` frames a second are looked at for `within_s` seconds, or until there are `count` pictures.

    Raises UsageError, CameraError (`open_s` s without a picture from a camera), EdgeError.
    """
    named, camera = source, None
    if config is not None:
        named, camera = configured_camera(source, config, fps)
    elif (match := _SCHEME.match(source)) and match[1] != "file" and not source.startswith(SCHEME):
        named = redact_url(source)
        camera = open_camera(CameraOptions(name="capture", url=source, fps=fps, loop=False))
    if camera is None:
        path = source.removeprefix("file:")
        seen: Generator[Seen, None, None] = (
            Seen(each.read(), number * every) for number, each in enumerate(calibration_pictures([path], every))
        )
    else:
        seen = live_pictures(camera, named, within_s, open_s)
    with closing(seen):  # or an exception would hold the camera and its timer for as long as somebody holds that
        return capture(
            seen,
            out_dir,
            source=named,
            count=count,
            max_bytes=max_bytes,
            read_image=read_image,
            until_full=camera is not None and within_s is None,
            progress=progress,
        )


def configured_camera(name: str, config: Path, fps: float) -> tuple[str, Camera]:
    """How a camera of a configuration is called in messages, and the camera, `fps` frames a second of it. Nothing is
    opened before its first `read`. Raises UsageError (none of that name) and ConfigError."""
    cameras = {each.name: each for each in load_config(config).cameras}
    if name not in cameras:
        remedy = f"there is {', '.join(sorted(cameras))}" if cameras else "it names none"
        raise UsageError(f"has no camera {name!r}", where=str(config), remedy=remedy)
    return f"camera {name}", open_source(cameras[name].model_copy(update={"fps": fps, "loop": False}))


def live_pictures(camera: Camera, named: str, within_s: float | None, open_s: float) -> Generator[Seen, None, None]:
    """A camera's pictures for `within_s` seconds from the first one on, or as long as it brings any; in the end the
    camera is closed. Raises CameraError where none comes within `open_s`."""
    timer = _stopping(camera, open_s)
    number = 0
    try:
        while (frame := camera.read()) is not None:
            if number == 0:
                _end(timer)
                if within_s is not None:
                    timer = _stopping(camera, within_s)
            yield Seen(frame.pixels, number, datetime.now(timezone.utc))
            number += 1
        if number == 0:
            raise CameraError(
                f"gave no picture within {open_s:g} s: {camera.status().reason or 'it said nothing'}",
                where=named,
                remedy="look at its address and its cable; a device of this machine that the daemon reads cannot be "
                "read twice: pause the camera there meanwhile",
                retryable=True,
            )
    finally:
        _end(timer)
        camera.stop()
        camera.close()


def _stopping(camera: Camera, within_s: float) -> threading.Timer:
    timer = threading.Timer(within_s, camera.stop)
    timer.name = "capture"
    timer.start()
    return timer


def _end(timer: threading.Timer) -> None:
    timer.cancel()
    timer.join()
