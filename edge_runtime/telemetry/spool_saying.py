"""When a gap becomes an event, and what the log says of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from edge_runtime.telemetry.spool_gaps import Gap, GapBook
from edge_runtime.telemetry.spool_lane import Make, SpoolLane

log = logging.getLogger(__name__)

_EVERY_S = 1.0
_READING_S = 5.0
_HELD_S = 60.0
_LOG_EVERY_S = 60.0

GapMessage = Callable[[Gap], "tuple[str, Make]"]
"""Topic and contents of the event that says a gap."""


class GapSayer:
    """When a pending gap becomes an event: while somebody reads, and of one lane and reason not before what was
    said last has arrived, and at most about once a second. So a month without a broker ends in one record."""

    def __init__(self, lane: SpoolLane | None, message: GapMessage | None) -> None:
        self._lane = lane
        self._message = message
        self._last_ns: dict[tuple[str, str], int] = {}
        self._held_ns: int | None = None

    def hold(self) -> None:
        """An event that said a gap was refused. Another would be, too: wait for another session of reading."""
        self._held_ns = time.monotonic_ns()

    def due(self, book: GapBook) -> list[Gap]:
        """What is to be said now."""
        if not book.pending or self._lane is None or self._message is None:
            return []
        if self._lane.waiting() >= self._lane.limits.max_rows:
            return []  # it would push out another event, and that were a gap again
        now_ns = time.monotonic_ns()
        read_ns, since_ns = self._lane.read_at()
        if read_ns is None or now_ns - read_ns > _READING_S * 1e9:
            return []
        if self._held_ns is not None and since_ns < self._held_ns + _HELD_S * 1e9:
            return []
        self._held_ns = None
        open_ones = {(gap.lane, gap.reason) for seq, gap in book.said.items() if not self._lane.is_done(seq)}
        due = []
        for gap in book.pending:
            key = (gap.lane, gap.reason)
            last_ns = self._last_ns.get(key)
            if key not in open_ones and (last_ns is None or now_ns - last_ns >= _EVERY_S * 1e9):
                due.append(gap)
        return due

    def say(self, book: GapBook, t_s: int) -> None:
        """Make events of what is due, in the lane, and note so in the book."""
        for gap in self.due(book):
            assert self._lane is not None
            assert self._message is not None
            try:
                topic, make = self._message(gap)
                seq = self._lane.add_row(topic, make, t_s)
            except Exception:
                log.exception("spool: a gap cannot be said: %s", gap)
                self.hold()
                return
            book.say(gap, seq)
            self._last_ns[gap.lane, gap.reason] = time.monotonic_ns()


class LossLog:
    """Says in the log what is lost: at once, and then once a minute for each lane and reason."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], int] = {}
        self._last_ns: dict[tuple[str, str], int] = {}

    def note(self, lane: str, lost: int, upto: int, reason: str) -> None:
        """So many are lost, none of them above `upto`."""
        key = (lane, reason)
        count = self._counts[key] = self._counts.get(key, 0) + lost
        now_ns = time.monotonic_ns()
        last_ns = self._last_ns.get(key)
        if last_ns is None or now_ns - last_ns >= _LOG_EVERY_S * 1e9:
            log.warning("spool: lane %s lost %d messages, up to %d: %s", lane, count, upto, reason)
            self._counts[key] = 0
            self._last_ns[key] = now_ns
