"""What stands between a camera's reading loop and what it reads: sessions, and what they may ask."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from edge_runtime.camera.ledger import Ledger
from edge_runtime.clock import Clock
from edge_runtime.errors import CameraError
from edge_runtime.records.frames import Pixels
from edge_runtime.records.spec import InputSpec

Pace = Literal["realtime", "max"]

STALLED = "camera_stalled"
"""Code of the CameraError of a source that is connected and silent, or sends nothing that can be decoded."""
REFUSED = "camera_refused"
"""Code of the CameraError of a source that refuses the user or the password."""
INTERRUPTED = "camera_interrupted"
"""Code of the CameraError with which `arrived` ends a session's reading since the camera is to stop or to pause."""


@dataclass(frozen=True, slots=True)
class Picture:
    """An intact picture as a session gives it.

    `pts_ns` is the source's own presentation time, to be distrusted; `t_packet_ns` the monotonic time at
    which its packet left the demuxer. `skipped`: packets before it, since the last picture, that were not decoded.
    """

    pixels: Pixels
    pts_ns: int | None
    t_packet_ns: int
    skipped: int = 0


class Session(Protocol):
    """One opened source, from open to end or fault."""

    @property
    def interval_ns(self) -> int | None:
        """The nominal frame interval, None where the source declares nothing believable."""
        ...

    def pictures(self) -> Iterator[Picture]:
        """Intact pictures until the source ends. Raises CameraError; `code` STALLED after a read time-out.

        A live session calls Intake.arrived for every packet, whether or not it is decoded.
        """
        ...

    def close(self) -> None: ...


class Intake(Protocol):
    """What a session may ask of the camera that it reads for. On the reading thread."""

    @property
    def ledger(self) -> Ledger: ...

    @property
    def inputs(self) -> Sequence[InputSpec]:
        """What models will make of the pictures; empty: not known."""
        ...

    def early(self, pts_ns: int | None, t_packet_ns: int, skipped: int = 0) -> tuple[int, int]:
        """(ns by which a picture of these times is too early to be kept by the cap, the cap's step in ns).

        (0, step): it would be kept, as far as anybody can tell; a step of 0: everything is. `skipped`: what its
        Picture would say. Changes nothing, but waits where a file would be read far ahead of its pace, and while it is
        to pause. Raises CameraError (INTERRUPTED) where it is to stop meanwhile.
        """
        ...

    def arrived(self) -> None:
        """A packet came, which a picture may or may not come of.

        Raises CameraError where reading on makes no sense: the camera is to stop or to pause (INTERRUPTED), or the
        source has long sent nothing that can be decoded (STALLED).
        """
        ...


class Alone:
    """The Intake of a session without a camera: keeps everything, and waits `within_s` (None: for ever)."""

    inputs: Sequence[InputSpec] = ()

    def __init__(self, clock: Clock, within_s: float | None = None) -> None:
        self.ledger = Ledger(clock)
        self._clock = clock
        self._within_s = within_s
        self._t_start_ns = clock.monotonic_ns()

    def arrived(self) -> None:
        if self._within_s is not None and self._clock.monotonic_ns() - self._t_start_ns > self._within_s * 1e9:
            corrupt, pre_key, _ = self.ledger.damage()
            raise CameraError(
                f"data comes, but within {self._within_s:g} s no picture in it could be decoded: "
                f"{corrupt} corrupt, {pre_key} before a key frame",
                code=STALLED,
                retryable=True,
            )

    def early(self, pts_ns: int | None, t_packet_ns: int, skipped: int = 0) -> tuple[int, int]:  # noqa: ARG002
        return 0, 0
