"""A camera's state and what its source delivered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CameraState = Literal["starting", "up", "paused", "stalled", "down", "stopped"]

STOPPED_ON_REQUEST = "stopped on request"
"""The reason of a camera that ended because it was told to."""

REMOVED = "removed"
"""The reason of one that is no longer there, and of which something is still in flight or not reported."""


@dataclass(frozen=True, slots=True)
class CameraStatus:
    """`reason` is a sentence without credentials, None when up; `since_ns` is monotonic."""

    state: CameraState
    reason: str | None
    since_ns: int


@dataclass(slots=True)
class SourceCounters:
    """What never became a captured frame, counted since the camera was made.

    `decoded` counts every picture the decoder gave; captured = decoded - skipped_rate - duplicate.
    `skipped_codec` counts packets that were not given to the decoder since the cap has no use for their pictures;
    `corrupt` and `pre_key` are packets or pictures that never came out of the decoder intact.
    """

    decoded: int = 0
    skipped_rate: int = 0
    skipped_codec: int = 0
    corrupt: int = 0
    pre_key: int = 0
    duplicate: int = 0


@dataclass(frozen=True, slots=True)
class CameraEffort:
    """What a camera's decoding cost since it was made.

    `decode_cpu_ns`: CPU time of decoding, on the thread or in the process that does it. `saved_cpu_ns`: an estimate of
    what the packets in `skipped_codec` would have cost. `opened`: how often the source was opened. `backend`: what
    reads it (pyav, gstreamer), with what decodes in brackets where that is hardware; None before it was opened.
    """

    decode_cpu_ns: int = 0
    saved_cpu_ns: int = 0
    opened: int = 0
    backend: str | None = None


@dataclass(frozen=True, slots=True)
class CameraView:
    """A camera's state, cumulative source counters and effort, and the models that see it.

    `serial`: no other camera of this process has it, also none that had the same name before.
    """

    name: str
    models: tuple[str, ...]
    status: CameraStatus
    source: SourceCounters
    effort: CameraEffort = CameraEffort()
    serial: int = 0
