"""What commands and the governor may do to configured cameras."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

from edge_runtime.camera.protocol import Camera
from edge_runtime.errors import EdgeError


class CameraSwitch:
    """Pauses, resumes and caps cameras by name, and remembers the caps: a command's and the governor's. Any thread.

    `find` gives the camera of a name, None where there is none; `configured` the rates from the configuration
    (frames per second, None: the source's own), which caps can only lower. `full_pace`: cameras without a rate.
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
        self._limits: dict[str, float] = {}
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
        self._set(self._caps, name, fps, camera)

    def limit(self, name: str, fps: float | None) -> None:
        """The governor's own cap, frames per second, 0: none; None lifts it. At full pace, too: there it makes the
        source wait. Raises EdgeError `unknown_camera`."""
        if self._limits.get(name) != fps:
            self._set(self._limits, name, fps, self._camera(name))

    def wanted(self) -> dict[str, float | None]:
        """The rate that people want of every camera now, frames per second; None: the source's own."""
        with self._lock:
            return {name: _lowest(rate, self._caps.get(name)) for name, rate in self._configured.items()}

    def in_force(self) -> dict[str, float | None]:
        """The rate that every camera is held to now, frames per second; None: to none but the source's own."""
        with self._lock:
            return {
                name: _lowest(rate, self._caps.get(name), self._limits.get(name))
                for name, rate in self._configured.items()
            }

    def _set(self, caps: dict[str, float], name: str, fps: float | None, camera: Camera) -> None:
        with self._lock:
            if fps is None:
                caps.pop(name, None)
            else:
                caps[name] = fps
            camera.set_cap(_lowest(self._caps.get(name), self._limits.get(name)))

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


def _lowest(*rates: float | None) -> float | None:
    return min((rate for rate in rates if rate is not None), default=None)
