"""The Camera protocol. It permits an implementation in a child process: nothing here shares memory by need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from edge_runtime.records.cameras import CameraEffort, CameraStatus, SourceCounters
from edge_runtime.records.frames import Frame
from edge_runtime.records.spec import InputSpec


class Camera(Protocol):
    """One source of frames. Owned and read by one thread; everything but `read` and `close` from any thread.

    A camera keeps itself alive: it opens, paces, skips what is not wanted, reconnects with back-off and
    tells its state. An operational fault is a state with a reason, never an exception out of `read`.
    """

    @property
    def name(self) -> str: ...

    def read(self) -> Frame | None:
        """Block until the next wanted frame; None when the source has ended or `stop` was called."""
        ...

    def stop(self) -> None:
        """Make `read` return None soon (within its read time-out at worst). Idempotent."""
        ...

    def close(self) -> None:
        """Release everything; called by the reading thread after the last `read`."""
        ...

    def pause(self) -> None:
        """Bring no frames until `resume`: `read` waits, a live source is let go of. Idempotent."""
        ...

    def resume(self) -> None:
        """Go on. Idempotent."""
        ...

    def set_cap(self, fps: float | None) -> None:
        """At most `fps` frames per second, below what is configured; None lifts it."""
        ...

    def set_base(self, fps: float | None) -> None:
        """Another configured rate, frames per second; None: the source's own."""
        ...

    def expect(self, inputs: Sequence[InputSpec]) -> None:
        """What models will make of the pictures, now and until the next call. A backend that scales in hardware may
        bring pictures no larger than these need; `Pixels.width` and `height` stay the camera's own."""
        ...

    def status(self) -> CameraStatus: ...

    def source(self) -> SourceCounters:
        """A copy of the counters."""
        ...

    def effort(self) -> CameraEffort:
        """What decoding has cost so far."""
        ...
