"""Which rows make room for others. Within a transaction of the spool's file; sqlite's errors are passed on."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edge_runtime.telemetry import spool_gaps as reasons
from edge_runtime.telemetry.spool_rows import ROW_OVERHEAD_BYTES, LaneLimits, first_id, seq_of

KEPT_BYTES = 1 << 20
"""What a lane may hold though the disk's reserve is touched, and what it keeps when another needs room."""

_STEP = 256
# More goes than has to, so that not every commit of a full lane touches the oldest page too.
_SLACK = 1000


@dataclass(frozen=True, slots=True)
class Evicted:
    """Numbers that had to go, and why (a word of `spool_gaps`)."""

    seqs: list[int]
    reason: str


class CountsWrong(ValueError):
    """The counters of a lane do not fit its rows."""


class Room:
    """Evicts the oldest rows of lanes: `lanes` by their number in the file, what may go last first."""

    def __init__(self, db: sqlite3.Connection, lanes: Mapping[int, LaneLimits]) -> None:
        self._db = db
        self._lanes = lanes
        self._page_bytes = int(db.execute("PRAGMA page_size").fetchone()[0])

    def pages(self) -> tuple[int, int]:
        """Pages of the file, and how many of them are free."""
        (count,) = self._db.execute("PRAGMA page_count").fetchone()
        (free,) = self._db.execute("PRAGMA freelist_count").fetchone()
        return count, free

    def pages_for(self, sizes: Sequence[int]) -> int:
        """Pages that rows of these sizes need at most."""
        usable = self._page_bytes - 35
        large = [size for size in sizes if size > usable // 4]
        small = sum(size + ROW_OVERHEAD_BYTES for size in sizes if size <= usable // 4)
        # a page holds at least a quarter of itself before the next is begun; a large row has pages of its own
        return 2 * (small // usable + 1) + sum(size // (self._page_bytes - 4) + 2 for size in large)

    def make(self, needed: int, most: int, reason: str, *, may_pass: bool) -> dict[int, list[Evicted]]:
        """Evict until `needed` more pages fit into `most`. Each lane keeps KEPT_BYTES; with `may_pass` the file
        grows rather than that a lane has less."""
        evicted: dict[int, list[Evicted]] = {}
        slack = 0
        while True:
            count, free = self.pages()
            if count - free + needed + slack <= most:
                return evicted
            slack = most // _SLACK
            lane = self._victim(may_pass=may_pass)
            if lane is None:
                return evicted
            seqs = self._evict_bytes(lane, (count - free + needed + slack - most) * self._page_bytes)
            evicted.setdefault(lane, []).append(Evicted(seqs, reason))

    def _victim(self, *, may_pass: bool) -> int | None:
        held = {number: self._counts(number) for number in self._lanes}
        for number in reversed(list(self._lanes)):
            if held[number][1] > KEPT_BYTES:
                return number
        if may_pass:
            return None
        number = max(held, key=lambda number: held[number][1])
        return number if held[number][0] else None

    def trim(self, lane: int) -> list[Evicted]:
        """Evict what is above the lane's limits of rows and bytes."""
        limits = self._lanes[lane]
        rows, size = self._counts(lane)
        over_rows, over_bytes = rows - limits.max_rows, size - limits.max_bytes
        if over_rows <= 0 and over_bytes <= 0:
            return []
        seqs = self._evict(
            lane,
            rows=over_rows + limits.max_rows // _SLACK if over_rows > 0 else 0,
            size=over_bytes + limits.max_bytes // _SLACK if over_bytes > 0 else 0,
        )
        return [Evicted(seqs, reasons.FULL)]

    def outlived(self, lane: int, t_s: int) -> int | None:
        """Where the lane's oldest row is too old at `t_s`: before when a row must have been put to be so."""
        most_s = self._lanes[lane].max_age_s
        if most_s is None:
            return None
        oldest = self._oldest(lane, 1)
        return int(t_s - most_s) if oldest and oldest[0][2] < int(t_s - most_s - most_s / _SLACK) else None

    def age(self, lane: int, t_s: int) -> list[Evicted]:
        """Evict what the lane has held for too long at `t_s`."""
        before_s = self.outlived(lane, t_s)
        if before_s is None:
            return []
        seqs: list[int] = []
        while True:
            oldest = self._oldest(lane, _STEP)
            old = [seq for seq, _, row_t_s in oldest if row_t_s < before_s]
            self._delete_to(lane, old)
            seqs += old
            if len(old) < _STEP:
                return [Evicted(seqs, reasons.AGE)]

    def _evict_bytes(self, lane: int, size: int) -> list[int]:
        _, held = self._counts(lane)
        return self._evict(lane, rows=1, size=min(size, max(1, held - KEPT_BYTES)))

    def _evict(self, lane: int, *, rows: int, size: int) -> list[int]:
        seqs: list[int] = []
        while rows > 0 or size > 0:
            oldest = self._oldest(lane, _STEP)
            if not oldest:
                raise CountsWrong(f"lane {self._lanes[lane].name} counts rows that are not there")
            batch = []
            for seq, row_bytes, _ in oldest:
                if rows <= 0 and size <= 0:
                    break
                batch.append(seq)
                rows, size = rows - 1, size - row_bytes
            self._delete_to(lane, batch)
            seqs += batch
        return seqs

    def _oldest(self, lane: int, limit: int) -> list[tuple[int, int, int]]:
        found = self._db.execute(
            "SELECT id, ? + length(CAST(topic AS BLOB)) + length(payload), t_s FROM message"
            " WHERE id >= ? AND id < ? ORDER BY id LIMIT ?",
            (ROW_OVERHEAD_BYTES, first_id(lane), first_id(lane + 1), limit),
        )
        return [(seq_of(found_id), int(size), int(t_s)) for found_id, size, t_s in found]

    def _delete_to(self, lane: int, seqs: Sequence[int]) -> None:
        if seqs:
            self._db.execute(
                "DELETE FROM message WHERE id >= ? AND id <= ?", (first_id(lane), first_id(lane) | max(seqs))
            )

    def _counts(self, lane: int) -> tuple[int, int]:
        rows, size = self._db.execute("SELECT rows, bytes FROM lane WHERE number = ?", (lane,)).fetchone()
        return int(rows), int(size)
