"""The spool's file: sqlite in WAL mode.

Only the thread "spool" comes in here. A failing disk is a `SpoolFileError`, whatever sqlite calls it.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from edge_runtime.sqlite_file import SqliteFileError, foreign_errors, transaction
from edge_runtime.telemetry import spool_gaps as reasons
from edge_runtime.telemetry.spool_age import Stamp
from edge_runtime.telemetry.spool_gaps import Gap, GapBook
from edge_runtime.telemetry.spool_room import Evicted, Room
from edge_runtime.telemetry.spool_rows import (
    LaneChanges,
    LaneLimits,
    PreviousSession,
    SpoolRow,
    first_id,
    pack,
    row_id,
    seq_of,
    unpack,
)
from edge_runtime.telemetry.spool_schema import lane_numbers, prepare

log = logging.getLogger(__name__)

SLACK_BYTES = 64 << 10
"""By how much a file may pass its cap at most."""

_KEPT_REFUSED = 100
_LOAD_BYTES = 1 << 20
# With the rows of a commit come a few pages for the b-tree above them, gaps and counters.
_MARGIN_PAGES = 16
_QUICK_VACUUM_BYTES = 128 << 20


class SpoolFileError(SqliteFileError):
    """The spool's file cannot be used."""


@dataclass(slots=True)
class Written:
    """What a transaction came to: rows now on disk and the numbers that had to go, by lane; the gaps as noted."""

    rows: dict[str, int]
    gaps: GapBook
    evicted: dict[str, list[Evicted]] = field(default_factory=dict)


class SpoolFile:
    """An open spool file. Made by `SpoolFile(path, lanes)`; raises SpoolFileError.

    Opening reads counters, not rows: it takes as long with a backlog as without. So damage in the middle shows
    only when a row there is read or written; then too it is a SpoolFileError. `max_bytes`: what the file may take;
    it is above that by SLACK_BYTES at most. Beside it the WAL takes 1 MiB and what one `write` writes.
    """

    def __init__(self, path: Path, lanes: Sequence[LaneLimits], max_bytes: int | None = None) -> None:
        self.path = path
        with _ours():
            # cached_statements: all of ours stay prepared. The time-out is for somebody who copies the file.
            self._db = sqlite3.connect(path, timeout=1.0, isolation_level=None, cached_statements=64)
        try:
            with _ours():
                self._set_up()
                prepare(self._db)
                with self._transaction():
                    self._numbers = lane_numbers(self._db, [lane.name for lane in lanes])
                self._room = Room(self._db, {self._numbers[lane.name]: lane for lane in lanes})
                self._set_cap(max_bytes)
                self.next_seq = {name: self._count("next_seq", name) for name in self._numbers}
                self.rows = {name: self._count("rows", name) for name in self._numbers}
                self.last = self._last()
                self.previous = self._previous()
                self.fresh = self.previous is None
                """No session has begun in it: it says nothing of the numbers that were used."""
        except BaseException:
            self._db.close()
            raise

    def _set_up(self) -> None:
        # Small pages: a commit writes whole ones, and there are two or three in most. Before WAL, or not at all.
        self._db.execute("PRAGMA page_size = 1024")
        # Exclusive: one daemon holds the store anyway, and without the shared -shm file there is no mmap that
        # a full disk could turn into a SIGBUS.
        self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
        self._db.execute("PRAGMA journal_mode = WAL")
        # NORMAL: a kill loses nothing that was committed; a power cut may lose the last commits (which the
        # kernel had not written back) but corrupts nothing, and numbers are not used again (spool_floors). For
        # telemetry that beats an fsync, with its wear and its stalls on a cheap flash, at every commit.
        self._db.execute("PRAGMA synchronous = NORMAL")
        # Deleted rows need not be overwritten with zeros, which some builds of sqlite do.
        self._db.execute("PRAGMA secure_delete = OFF")
        self._db.execute("PRAGMA wal_autocheckpoint = 1000")
        self._db.execute("PRAGMA journal_size_limit = 1048576")

    def _set_cap(self, max_bytes: int | None) -> None:
        self._page_bytes = int(self._db.execute("PRAGMA page_size").fetchone()[0])
        self._most_pages = None if max_bytes is None else max(1, max_bytes // self._page_bytes)
        if self._most_pages is not None:
            # sqlite itself keeps a file as large as it is, if it is larger
            self._db.execute(f"PRAGMA max_page_count = {self._most_pages + SLACK_BYTES // self._page_bytes}")

    def _count(self, column: str, lane: str) -> int:
        row = self._db.execute("SELECT next_seq, rows FROM lane WHERE number = ?", (self._numbers[lane],)).fetchone()
        return int(row[("next_seq", "rows").index(column)])

    def _last(self) -> Stamp:
        row = self._db.execute("SELECT t_s, t_utc, synced FROM lane ORDER BY t_s DESC, t_utc DESC LIMIT 1").fetchone()
        return Stamp(int(row[0]), str(row[1]), bool(row[2]))

    def _previous(self) -> PreviousSession | None:
        row = self._db.execute("SELECT session, boot, closed, t_open_utc FROM session").fetchone()
        if row is None:
            return None
        last = {name: count - 1 for name, count in self.next_seq.items() if count > 0}
        return PreviousSession(row[0], row[1], bool(row[2]), last, row[3], self.last.t_utc, self.last.synced)

    def gaps(self) -> GapBook:
        """The gaps that no consumer knows of yet. Raises SpoolFileError."""
        book = GapBook()
        with _ours():
            for said_seq, *gap in self._db.execute(
                "SELECT said_seq, lane, from_seq, to_seq, count, reason, detail FROM gap ORDER BY id"
            ):
                if said_seq is None:
                    book.add(Gap(*gap))
                else:
                    book.said[said_seq] = Gap(*gap)
        book.changed = False
        return book

    def first(self, lane: str) -> int | None:
        """The oldest number of a lane that waits; None: nothing does. Raises SpoolFileError."""
        number = self._numbers[lane]
        with _ours():
            row = self._db.execute(
                "SELECT min(id) FROM message WHERE id >= ? AND id < ?", (first_id(number), first_id(number + 1))
            ).fetchone()
        return None if row[0] is None else seq_of(row[0])

    def holds(self, lane: str, seq: int) -> bool:
        """Whether this row waits. Raises SpoolFileError."""
        with _ours():
            found = self._db.execute("SELECT 1 FROM message WHERE id = ?", (row_id(self._numbers[lane], seq),))
            return found.fetchone() is not None

    def begin(self, session: str, boot: str, next_seq: Mapping[str, int], gaps: GapBook, stamp: Stamp) -> None:
        """Note that this session has the file open, and that its numbers start at `next_seq`. Raises SpoolFileError."""
        with _ours():
            # On disk before a number is used: else the file would say, after a power cut, that the session before
            # this one was the last, and ended cleanly.
            self._db.execute("PRAGMA synchronous = FULL")
            with self._transaction():
                self._db.execute("INSERT OR REPLACE INTO session VALUES (1, ?, ?, ?, 0)", (session, boot, stamp.t_utc))
                for name, seq in next_seq.items():
                    self._db.execute("UPDATE lane SET next_seq = ? WHERE number = ?", (seq, self._numbers[name]))
                self._write_stamp(stamp)
                self._write_gaps(gaps)
            self._db.execute("PRAGMA synchronous = NORMAL")

    def write(
        self,
        changes: Mapping[str, LaneChanges],
        gaps: GapBook,
        stamp: Stamp,
        *,
        grow: bool = True,
        margin: int = _MARGIN_PAGES,
    ) -> Written:
        """All of it in one transaction, or nothing. Without `grow`, old rows make room rather than that the file
        grows. `margin`: pages that must stay free beside what the rows need. Raises SpoolFileError."""
        try:
            return self._write(changes, gaps.copy(), stamp, grow=grow, margin=margin)
        except SpoolFileError as error:
            # what was estimated did not do: that is our cap and not the disk
            if "full" not in str(error) or not self._near_cap() or margin > 64 * _MARGIN_PAGES:
                raise
        return self.write(changes, gaps, stamp, grow=grow, margin=8 * margin)

    def _near_cap(self) -> bool:
        with _ours():
            pages, free = self._room.pages()
        return self._most_pages is not None and pages - free + 2048 > self._most_pages

    def _write(
        self, changes: Mapping[str, LaneChanges], gaps: GapBook, stamp: Stamp, *, grow: bool, margin: int
    ) -> Written:
        evicted: dict[int, list[Evicted]] = {number: [] for number in self._numbers.values()}
        rows: list[tuple[int, int, int, str, bytes]] = []
        with _ours(), self._transaction():
            for name, change in changes.items():
                number = self._numbers[name]
                for seq, reason in change.refused:
                    self._set_aside(name, seq, reason, stamp.t_utc)
                gone = [*change.deleted, *(seq for seq, _ in change.refused)]
                self._db.executemany("DELETE FROM message WHERE id = ?", ((row_id(number, seq),) for seq in gone))
                for row in change.added:
                    packed = _packed(row)
                    if self._fits(packed[2]):
                        rows.append((row_id(number, row.seq), row.t_s, *packed))
                    else:
                        evicted[number].append(Evicted([row.seq], reasons.FULL))
            for number, found in self._make_room([len(row[4]) + len(row[3]) for row in rows], grow, margin).items():
                evicted[number] += found
            self._db.executemany("INSERT INTO message VALUES (?, ?, ?, ?, ?)", rows)
            for name, change in changes.items():
                number = self._numbers[name]
                evicted[number] += self._room.trim(number) + self._room.age(number, stamp.t_s)
                self._db.execute("UPDATE lane SET next_seq = ? WHERE number = ?", (change.next_seq, number))
            by_name = {name: evicted[number] for name, number in self._numbers.items()}
            for name, found in by_name.items():
                for each in found:
                    gaps.lost(name, each.seqs, each.reason)
                    if name == reasons.SAID_IN:
                        gaps.unsay(each.seqs)
            if gaps.changed:
                self._write_gaps(gaps)
            self._write_stamp(stamp)
            counts = {name: self._count("rows", name) for name in self._numbers}
        gaps.changed = False
        return Written(counts, gaps, by_name)

    def _fits(self, packed: bytes) -> bool:
        """Whether the file can ever hold it: a row that takes more than half of it would push out all others."""
        return self._most_pages is None or len(packed) <= self._most_pages * self._page_bytes // 2

    def _make_room(self, sizes: Sequence[int], grow: bool, margin: int) -> dict[int, list[Evicted]]:
        if not sizes and grow and self._most_pages is None:
            return {}
        needed = self._room.pages_for(sizes) + margin
        made: dict[int, list[Evicted]] = {}
        if not grow and sizes:
            made = self._room.make(needed, self._room.pages()[0], reasons.DISK_RESERVE, may_pass=True)
        if self._most_pages is not None:
            for number, found in self._room.make(needed, self._most_pages, reasons.FULL, may_pass=False).items():
                made.setdefault(number, []).extend(found)
        return made

    def _write_stamp(self, stamp: Stamp) -> None:
        self._db.execute("UPDATE lane SET t_s = ?, t_utc = ?, synced = ?", (stamp.t_s, stamp.t_utc, stamp.synced))

    def _write_gaps(self, gaps: GapBook) -> None:
        self._db.execute("DELETE FROM gap")
        notes = [(None, gap) for gap in gaps.pending] + [(seq, gap) for seq, gap in gaps.said.items()]
        self._db.executemany(
            "INSERT INTO gap (said_seq, lane, from_seq, to_seq, count, reason, detail) VALUES (?, ?, ?, ?, ?, ?, ?)",
            ((seq, gap.lane, gap.from_seq, gap.to_seq, gap.count, gap.reason, gap.detail) for seq, gap in notes),
        )

    def _set_aside(self, lane: str, seq: int, reason: str, t_utc: str) -> None:
        found = self._db.execute(
            "SELECT form, topic, payload FROM message WHERE id = ?", (row_id(self._numbers[lane], seq),)
        ).fetchone()
        if found is None:
            return
        form, topic, packed = found
        self._db.execute(
            "INSERT INTO refused (lane, seq, topic, payload, reason, t_utc) VALUES (?, ?, ?, ?, ?, ?)",
            (lane, seq, topic, unpack(form, packed), reason, t_utc),
        )
        self._db.execute("DELETE FROM refused WHERE id <= (SELECT max(id) FROM refused) - ?", (_KEPT_REFUSED,))

    def outlived(self, t_s: int) -> bool:
        """Whether a lane's oldest row is too old at `t_s`. Raises SpoolFileError."""
        with _ours():
            return any(self._room.outlived(number, t_s) is not None for number in self._numbers.values())

    def shrink(self, next_seq: Mapping[str, int], gaps: GapBook, stamp: Stamp) -> Written | None:
        """Bring a file that is larger than its cap below it, if that is quick; None: it is not larger.

        `next_seq` is what `begin` was told. Raises SpoolFileError.
        """
        with _ours():
            pages, _ = self._room.pages()
        page_bytes = self._page_bytes
        if self._most_pages is None or pages <= self._most_pages + SLACK_BYTES // page_bytes:
            return None
        written = self.write({name: LaneChanges(seq) for name, seq in next_seq.items()}, gaps, stamp)
        with _ours():
            pages, free = self._room.pages()
        if (pages - free) * page_bytes > _QUICK_VACUUM_BYTES:
            why = "to make it smaller would take too long"
        else:
            try:
                with _ours():
                    self._db.execute("VACUUM")
                    self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                self._set_cap(self._most_pages * page_bytes)
                return written
            except SpoolFileError as error:
                if error.corrupt:
                    raise
                why = str(error)
        log.warning(
            "spool: %s is larger than it may be now, %d MiB, and stays so: %s", self.path, pages * page_bytes >> 20, why
        )
        return written

    def load(self, lane: str, after: int, limit: int) -> tuple[list[SpoolRow], bool]:
        """The oldest rows above `after`: at most `limit`, and about 1 MiB but always one. True: there are no more.

        Raises SpoolFileError.
        """
        rows: list[SpoolRow] = []
        size = 0
        number = self._numbers[lane]
        with _ours():
            cursor = self._db.execute(
                "SELECT id, topic, form, payload, t_s FROM message WHERE id > ? AND id < ? ORDER BY id LIMIT ?",
                (first_id(number) + after, first_id(number + 1), limit),
            )
            for found_id, topic, form, packed, t_s in cursor:
                rows.append(SpoolRow(seq_of(found_id), topic, unpack(form, packed), t_s))
                size += len(rows[-1].payload)
                if size >= _LOAD_BYTES:
                    cursor.close()
                    return rows, False
        return rows, len(rows) < limit

    def rescue(self, lane: str, max_rows: int, max_bytes: int) -> list[SpoolRow]:
        """What can still be read of a damaged file, from both ends up to the damage. Raises nothing."""
        rows: dict[int, SpoolRow] = {}
        size = 0
        number = self._numbers[lane]
        for select in (
            "SELECT id, topic, form, payload, t_s FROM message WHERE id >= ? AND id < ? ORDER BY id",
            "SELECT id, topic, form, payload, t_s FROM message WHERE id >= ? AND id < ? ORDER BY id DESC",
        ):
            with contextlib.suppress(SpoolFileError), _ours():
                for found_id, topic, form, packed, t_s in self._db.execute(
                    select, (first_id(number), first_id(number + 1))
                ):
                    row = SpoolRow(seq_of(found_id), topic, unpack(form, packed), t_s)
                    size += row.size_bytes
                    if row.seq in rows or len(rows) >= max_rows or size > max_bytes:
                        break
                    rows[row.seq] = row
        return list(rows.values())

    def close(self, *, clean: bool, stamp: Stamp | None = None) -> None:
        """Close; with `clean`, note first that nothing is missing. Raises SpoolFileError if that note failed."""
        try:
            if clean:
                with _ours(), self._transaction():
                    self._db.execute("UPDATE session SET closed = 1")
                    if stamp is not None:
                        self._write_stamp(stamp)
        finally:
            with contextlib.suppress(sqlite3.Error):
                self._db.close()

    def _transaction(self) -> contextlib.AbstractContextManager[None]:
        return transaction(self._db)


def _packed(row: SpoolRow) -> tuple[int, str, bytes]:
    form, packed = pack(row.payload)
    return form, row.topic, packed


def _ours() -> contextlib.AbstractContextManager[None]:
    return foreign_errors(SpoolFileError, zlib.error)
