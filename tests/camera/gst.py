"""For tests of the GStreamer backend: whether it can run here, its cameras, and threads that libraries keep."""

from __future__ import annotations

import functools
import os
import random
import sys
from pathlib import Path
from typing import Any

from edge_runtime.backoff import Backoff
from edge_runtime.camera.gstreamer import GstCamera, unavailable
from edge_runtime.camera.options import CameraOptions


def gst_missing() -> str | None:
    """Why the backend cannot run here, for `pytest.mark.skipif`.

    In CI its tests fail instead, but on Pythons for which the distribution has no `gi`.
    """
    if os.environ.get("CI") == "true" and sys.version_info[:2] == (3, 11):
        return None
    return unavailable()


def gst_camera(name: str, url: str, *, seed: int = 0, chain: Any = None, **options: Any) -> GstCamera:
    """A camera of this backend with short time-outs and back-off."""
    options = {"stall_s": 2.0, "open_s": 4.0, **options}
    backoff = Backoff(base_s=0.05, limit_s=0.2, rng=random.Random(seed))
    return GstCamera(CameraOptions(name, url, backend="gstreamer", **options), chain=chain, backoff=backoff)


@functools.cache
def warm_up() -> None:
    """Have GLib start what it never ends (a worker thread with its event descriptors)."""
    camera = gst_camera("warm-up", "rtsp://127.0.0.1:9/", open_s=0.5)
    camera._backoff = Backoff(base_s=60.0, limit_s=60.0, jitter=False)
    stopper = _when_down(camera)
    assert camera.read() is None
    stopper.join()
    camera.close()


def _when_down(camera: GstCamera) -> Any:
    import threading

    from tests.awaiting import wait_until

    def stop() -> None:
        wait_until(lambda: camera.status().state == "down", 10, "a refusal")
        camera.stop()

    thread = threading.Thread(target=stop)
    thread.start()
    return thread


def tasks() -> int:
    """Threads of this process, GStreamer's too."""
    return len(list(Path("/proc/self/task").iterdir()))
