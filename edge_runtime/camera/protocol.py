"""The Camera protocol. It permits an implementation in a child process: nothing here shares memory by need."""

from __future__ import annotations

from typing import Protocol

from edge_runtime.records.cameras import CameraStatus, SourceCounters
from edge_runtime.records.frames import Frame


class Camera(Protocol):
    """One source of frames. Owned and read by one thread; `stop`, `status` and `source` from any thread.

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

    def status(self) -> CameraStatus: ...

    def source(self) -> SourceCounters:
        """A copy of the counters."""
        ...
