"""A camera's state and what its source delivered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CameraState = Literal["starting", "up", "paused", "stalled", "down", "stopped"]

STOPPED_ON_REQUEST = "stopped on request"
"""The reason of a camera that ended because it was told to."""


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
    `skipped_codec`, `corrupt` and `pre_key` are packets or pictures that never came out of the decoder intact.
    """

    decoded: int = 0
    skipped_rate: int = 0
    skipped_codec: int = 0
    corrupt: int = 0
    pre_key: int = 0
    duplicate: int = 0


@dataclass(frozen=True, slots=True)
class CameraView:
    """A camera's state and cumulative source counters, and the models that see it."""

    name: str
    models: tuple[str, ...]
    status: CameraStatus
    source: SourceCounters
