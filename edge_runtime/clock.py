"""Time. Everything that is measured uses the monotonic clock; wall time appears only at the edges."""

from __future__ import annotations

import time
from datetime import datetime, timezone
from typing import Protocol


class Clock(Protocol):
    """A source of time that tests and simulators can replace."""

    def monotonic_ns(self) -> int:
        """Nanoseconds of a clock that never jumps."""
        ...

    def utc(self) -> datetime:
        """Wall time, timezone-aware, UTC."""
        ...


class SystemClock:
    """The clocks of this machine."""

    def monotonic_ns(self) -> int:
        return time.monotonic_ns()

    def utc(self) -> datetime:
        return datetime.now(timezone.utc)


def utc_text(moment: datetime) -> str:
    """ISO 8601 with milliseconds and a `Z`, as every payload writes it."""
    return moment.astimezone(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03d}Z"
