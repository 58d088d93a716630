"""How old a row is, whatever the wall clock says: in seconds of a timeline of the spool's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from edge_runtime.clock import Clock, utc_text

_LONGEST_DOWNTIME_S = 10 * 365 * 86_400


@dataclass(frozen=True, slots=True)
class Stamp:
    """A moment: seconds of the timeline, the wall clock, and whether that could be trusted."""

    t_s: int
    t_utc: str
    synced: bool


class Timeline:
    """Counts the seconds in which the spool was open, by the monotonic clock, and those in between by the wall
    clock where that was synchronised at both ends. It never goes back: a clock of 1970, or one that jumps by years,
    makes nothing old. Time that cannot be known does not count, so rows are kept rather longer than too short."""

    def __init__(self, clock: Clock, synced: Callable[[], bool]) -> None:
        self._clock = clock
        self._synced = synced
        self._start_ns = clock.monotonic_ns()
        self._base_s = 0.0

    def now(self) -> Stamp:
        return Stamp(self.now_s(), utc_text(self._clock.utc()), self._synced())

    def now_s(self) -> int:
        """Seconds, 0 or more."""
        return int(self._base_s + max(0, self._clock.monotonic_ns() - self._start_ns) / 1e9)

    def go_on(self, last: Stamp) -> int:
        """Go on after `last`, which a file of an earlier session says. Returns by how many seconds now is later
        than it was before this call."""
        before_s = self.now_s()
        down_s = self._since(last.t_utc) if last.synced and self._synced() else 0.0
        # what this session has counted so far lies within that downtime
        self._base_s += last.t_s + max(0.0, down_s - before_s)
        return self.now_s() - before_s

    def _since(self, t_utc: str) -> float:
        try:
            then = datetime.fromisoformat(t_utc.replace("Z", "+00:00"))
        except ValueError:
            return 0.0
        down_s = (self._clock.utc() - then).total_seconds()
        return down_s if 0 < down_s < _LONGEST_DOWNTIME_S else 0.0
