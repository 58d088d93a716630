"""What commands may do to configured cameras."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

from edge_runtime.camera.protocol import Camera
from edge_runtime.errors import EdgeError


class CameraSwitch:
    """Pauses, resumes and caps cameras by name, and remembers the caps. Any thread.

    `find` gives the camera of a name, None where there is none; `configured` the rates from the configuration
    (frames per second, None: the source's own), which a cap can only lower. `full_pace`: cameras without a rate.
    """

    def __init__(
        self,
        find: Callable[[str], Camera | None],
        configured: dict[str, float | None],
        full_pace: Collection[str] = (),
    ) -> None:
        self._find = find
        self._configured = configured
        self._full_pace = full_pace
        self._caps: dict[str, float] = {}
        self._lock = threading.Lock()

    def pause(self, name: str) -> None:
        self._camera(name).pause()

    def resume(self, name: str) -> None:
        self._camera(name).resume()

    def cap(self, name: str, fps: float | None) -> None:
        camera = self._camera(name)
        if fps is not None and name in self._full_pace:
            raise EdgeError(
                f'camera {name!r} plays with pace = "max": as fast as its model, a cap has no meaning',
                code="full_pace",
                where="args.fps",
                remedy='set pace = "realtime"',
            )
        with self._lock:
            if fps is None:
                self._caps.pop(name, None)
            else:
                self._caps[name] = fps
            camera.set_cap(fps)

    def wanted(self) -> dict[str, float | None]:
        """The rate wanted of every camera now, frames per second; None: the source's own."""
        with self._lock:
            wanted = dict(self._configured)
            for name, cap in self._caps.items():
                rate = wanted.get(name)
                wanted[name] = cap if rate is None else min(rate, cap)
            return wanted

    def _camera(self, name: str) -> Camera:
        camera = self._find(name)
        if camera is None:
            raise EdgeError(
                f"there is no camera {name!r}",
                code="unknown_camera",
                where="args.name",
                remedy=f"configured: {', '.join(sorted(self._configured)) or 'none'}",
            )
        return camera
