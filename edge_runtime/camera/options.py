"""How one camera is read: what a configuration says of it, as plain values that a child process can be sent, too."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from edge_runtime.camera.session import Pace

Transport = Literal["tcp", "udp"]
Backend = Literal["auto", "pyav", "gstreamer"]
Isolation = Literal["thread", "process"]

STALL_S = 5.0
"""A source that is silent for so long has stalled."""
OPEN_S = 10.0
"""A source that cannot be opened within this is not there."""


@dataclass(frozen=True, slots=True)
class CameraOptions:
    """`url` may hold credentials: this is for passing on, not for showing.

    `stall_s`: seconds of silence (or of data without an intact picture) after which the source has stalled.
    `ca_file`: certificates (PEM) that must have signed the camera's; None: any certificate is taken.
    """

    name: str
    url: str
    fps: float | None = None
    pace: Pace = "realtime"
    loop: bool = True
    transport: Transport = "tcp"
    stall_s: float = STALL_S
    open_s: float = OPEN_S
    backend: Backend = "auto"
    isolation: Isolation = "thread"
    ca_file: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON; `CameraOptions(**it)` is the same again."""
        return asdict(self)

    def __repr__(self) -> str:
        return f"CameraOptions({self.name!r})"
