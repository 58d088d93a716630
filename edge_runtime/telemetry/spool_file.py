"""The spool's file: sqlite in WAL mode.

Only the thread "spool" comes in here. A failing disk is a `SpoolFileError`, whatever sqlite calls it.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROW_OVERHEAD_BYTES = 64
"""What a row takes on disk beside its topic and payload, roughly. The triggers below have it too."""

_VERSION = 1
_KEPT_CORRUPT = 3
_KEPT_REFUSED = 100
_LOAD_BYTES = 1 << 20
_EVICT_STEP = 256

_SCHEMA = """
CREATE TABLE lane (
    name TEXT PRIMARY KEY, next_seq INTEGER NOT NULL, rows INTEGER NOT NULL, bytes INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE message (
    id INTEGER PRIMARY KEY, lane TEXT NOT NULL, seq INTEGER NOT NULL, topic TEXT NOT NULL, payload BLOB NOT NULL,
    UNIQUE (lane, seq)
);
CREATE TABLE refused (
    id INTEGER PRIMARY KEY, lane TEXT NOT NULL, seq INTEGER NOT NULL, topic TEXT NOT NULL, payload BLOB NOT NULL,
    reason TEXT NOT NULL, t_utc TEXT NOT NULL
);
CREATE TABLE session (
    id INTEGER PRIMARY KEY CHECK (id = 1), session TEXT NOT NULL, boot TEXT NOT NULL, t_open_utc TEXT NOT NULL,
    t_commit_utc TEXT NOT NULL, closed INTEGER NOT NULL
);
CREATE TRIGGER counted AFTER INSERT ON message BEGIN
    UPDATE lane SET rows = rows + 1,
        bytes = bytes + 64 + length(CAST(new.topic AS BLOB)) + length(new.payload)
    WHERE name = new.lane;
END;
CREATE TRIGGER uncounted AFTER DELETE ON message BEGIN
    UPDATE lane SET rows = rows - 1,
        bytes = bytes - 64 - length(CAST(old.topic AS BLOB)) - length(old.payload)
    WHERE name = old.lane;
END;
PRAGMA user_version = 1;
"""


class SpoolFileError(Exception):
    """The file cannot be used. `corrupt`: its contents are at fault, and a fresh file is the way out; else the
    disk is (full, read-only, failing), and trying again later may help."""

    def __init__(self, message: str, *, corrupt: bool) -> None:
        super().__init__(message)
        self.corrupt = corrupt


@dataclass(frozen=True, slots=True)
class LaneLimits:
    """A lane and what it may hold, 1 or more each. When a limit is passed, the oldest rows go."""

    name: str
    max_rows: int
    max_bytes: int


@dataclass(frozen=True, slots=True)
class SpoolRow:
    """A message with its number; `payload` contains that number already."""

    seq: int
    topic: str
    payload: bytes

    @property
    def size_bytes(self) -> int:
        return ROW_OVERHEAD_BYTES + len(self.topic.encode()) + len(self.payload)


@dataclass(frozen=True, slots=True)
class PreviousSession:
    """The start before this one. `clean`: it closed the spool. `last_seq`: the last number per lane, without the
    lanes that never had one. `last_utc`: its last commit, by its own wall clock."""

    session: str
    boot: str
    clean: bool
    last_seq: Mapping[str, int]
    t_open_utc: str
    last_utc: str


@dataclass(slots=True)
class LaneChanges:
    """What one transaction does to one lane."""

    next_seq: int
    added: Sequence[SpoolRow] = ()
    deleted: Sequence[int] = ()
    refused: Sequence[tuple[int, str]] = ()


@dataclass(slots=True)
class LaneWritten:
    """What it came to: rows now on disk, and the numbers that had to go for lack of room."""

    rows: int
    evicted: list[int] = field(default_factory=list)


class SpoolFile:
    """An open spool file. Made by `SpoolFile(path, lanes)`; raises SpoolFileError.

    Opening reads counters, not rows: it takes as long with a backlog as without. So damage in the middle shows
    only when a row there is read or written; then too it is a SpoolFileError.
    """

    def __init__(self, path: Path, lanes: Sequence[LaneLimits]) -> None:
        self.path = path
        self._limits = {lane.name: lane for lane in lanes}
        self.fresh = False
        with _ours():
            # cached_statements: all of ours stay prepared. The time-out is for somebody who copies the file.
            self._db = sqlite3.connect(path, timeout=1.0, isolation_level=None, cached_statements=64)
        try:
            with _ours():
                self._prepare()
                self.next_seq = {name: self._count("next_seq", name) for name in self._limits}
                self.rows = {name: self._count("rows", name) for name in self._limits}
                self.previous = self._previous()
        except BaseException:
            self._db.close()
            raise

    def _prepare(self) -> None:
        # Exclusive: one daemon holds the store anyway, and without the shared -shm file there is no mmap that
        # a full disk could turn into a SIGBUS.
        self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
        self._db.execute("PRAGMA journal_mode = WAL")
        # NORMAL: a kill loses nothing that was committed; a power cut may lose the last commits (which the
        # kernel had not written back) but corrupts nothing, and numbers are not used again (spool_floors). For
        # telemetry that beats an fsync, with its wear and its stalls on a cheap flash, at every commit.
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute("PRAGMA journal_size_limit = 4194304")
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version not in (0, _VERSION):
            raise SpoolFileError(f"it is of version {version}, which this program does not know", corrupt=True)
        with self._transaction():
            self.fresh = version == 0
            if self.fresh:
                for statement in _statements(_SCHEMA):
                    self._db.execute(statement)
            for name in self._limits:
                self._db.execute("INSERT OR IGNORE INTO lane VALUES (?, 0, 0, 0)", (name,))

    def _count(self, column: str, lane: str) -> int:
        rows = self._db.execute("SELECT next_seq, rows, bytes FROM lane WHERE name = ?", (lane,)).fetchone()
        return int(rows[("next_seq", "rows", "bytes").index(column)])

    def _previous(self) -> PreviousSession | None:
        row = self._db.execute("SELECT session, boot, closed, t_open_utc, t_commit_utc FROM session").fetchone()
        if row is None:
            return None
        last = {name: count - 1 for name, count in self.next_seq.items() if count > 0}
        return PreviousSession(row[0], row[1], bool(row[2]), last, row[3], row[4])

    def begin(self, session: str, boot: str, t_utc: str, next_seq: Mapping[str, int]) -> None:
        """Note that this session has the file open, and that its numbers start at `next_seq`."""
        with _ours(), self._transaction():
            self._db.execute("INSERT OR REPLACE INTO session VALUES (1, ?, ?, ?, ?, 0)", (session, boot, t_utc, t_utc))
            for name, seq in next_seq.items():
                self._db.execute("UPDATE lane SET next_seq = ? WHERE name = ?", (seq, name))

    def write(self, changes: Mapping[str, LaneChanges], t_utc: str) -> dict[str, LaneWritten]:
        """All of it in one transaction, or nothing. Raises SpoolFileError."""
        written = {}
        with _ours(), self._transaction():
            for name, change in changes.items():
                for seq, reason in change.refused:
                    self._set_aside(name, seq, reason, t_utc)
                gone = [*change.deleted, *(seq for seq, _ in change.refused)]
                self._db.executemany("DELETE FROM message WHERE lane = ? AND seq = ?", ((name, seq) for seq in gone))
                self._db.executemany(
                    "INSERT INTO message (lane, seq, topic, payload) VALUES (?, ?, ?, ?)",
                    ((name, row.seq, row.topic, row.payload) for row in change.added),
                )
                self._db.execute("UPDATE lane SET next_seq = ? WHERE name = ?", (change.next_seq, name))
                evicted = self._evict(self._limits[name])
                written[name] = LaneWritten(self._count("rows", name), evicted)
            self._db.execute("UPDATE session SET t_commit_utc = ?", (t_utc,))
        return written

    def _set_aside(self, lane: str, seq: int, reason: str, t_utc: str) -> None:
        self._db.execute(
            "INSERT INTO refused (lane, seq, topic, payload, reason, t_utc)"
            " SELECT lane, seq, topic, payload, ?, ? FROM message WHERE lane = ? AND seq = ?",
            (reason, t_utc, lane, seq),
        )
        self._db.execute("DELETE FROM refused WHERE id <= (SELECT max(id) FROM refused) - ?", (_KEPT_REFUSED,))

    def _evict(self, limits: LaneLimits) -> list[int]:
        evicted: list[int] = []
        over_rows = self._count("rows", limits.name) - limits.max_rows
        over_bytes = self._count("bytes", limits.name) - limits.max_bytes
        while over_rows > 0 or over_bytes > 0:
            oldest = self._db.execute(
                "SELECT seq, length(CAST(topic AS BLOB)) + length(payload) FROM message WHERE lane = ?"
                " ORDER BY seq LIMIT ?",
                (limits.name, _EVICT_STEP),
            ).fetchall()
            if not oldest:
                raise SpoolFileError(f"lane {limits.name} counts rows that are not there", corrupt=True)
            count = 0
            for seq, size in oldest:
                if over_rows <= 0 and over_bytes <= 0:
                    break
                evicted.append(seq)
                over_rows, over_bytes, count = over_rows - 1, over_bytes - size - ROW_OVERHEAD_BYTES, count + 1
            self._db.execute("DELETE FROM message WHERE lane = ? AND seq <= ?", (limits.name, oldest[count - 1][0]))
        return evicted

    def load(self, lane: str, after: int, limit: int) -> tuple[list[SpoolRow], bool]:
        """The oldest rows above `after`: at most `limit`, and about 1 MiB but always one. True: there are no more.

        Raises SpoolFileError.
        """
        rows: list[SpoolRow] = []
        size = 0
        with _ours():
            cursor = self._db.execute(
                "SELECT seq, topic, payload FROM message WHERE lane = ? AND seq > ? ORDER BY seq LIMIT ?",
                (lane, after, limit),
            )
            for seq, topic, payload in cursor:
                rows.append(SpoolRow(seq, topic, bytes(payload)))
                size += len(payload)
                if size >= _LOAD_BYTES:
                    cursor.close()
                    return rows, False
        return rows, len(rows) < limit

    def rescue(self, lane: str, max_rows: int, max_bytes: int) -> list[SpoolRow]:
        """What can still be read of a damaged file, from both ends up to the damage. Raises nothing."""
        rows: dict[int, SpoolRow] = {}
        size = 0
        for select in (
            "SELECT seq, topic, payload FROM message WHERE lane = ? ORDER BY seq",
            "SELECT seq, topic, payload FROM message WHERE lane = ? ORDER BY seq DESC",
        ):
            with contextlib.suppress(SpoolFileError), _ours():
                for seq, topic, payload in self._db.execute(select, (lane,)):
                    row = SpoolRow(seq, topic, bytes(payload))
                    size += row.size_bytes
                    if seq in rows or len(rows) >= max_rows or size > max_bytes:
                        break
                    rows[seq] = row
        return list(rows.values())

    def close(self, *, clean: bool, t_utc: str = "") -> None:
        """Close; with `clean`, note first that nothing is missing. Raises SpoolFileError if that note failed."""
        try:
            if clean:
                with _ours(), self._transaction():
                    self._db.execute("UPDATE session SET closed = 1, t_commit_utc = ?", (t_utc,))
        finally:
            with contextlib.suppress(sqlite3.Error):
                self._db.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):  # sqlite may have rolled back by itself
                self._db.execute("ROLLBACK")
            raise


def _statements(script: str) -> Iterator[str]:
    """`executescript` would commit by itself; a schema made by halves must not be left behind."""
    text = ""
    for line in script.splitlines(keepends=True):
        text += line
        if sqlite3.complete_statement(text):
            yield text
            text = ""


@contextlib.contextmanager
def _ours() -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        # "no such table" and text that is no UTF-8 are the file's fault, all else operational is the disk's.
        # (The codes themselves come with Python 3.11.)
        words = str(error)
        corrupt = words.startswith(("no such", "Could not decode", "malformed"))
        raise SpoolFileError(words, corrupt=corrupt) from error
    except (sqlite3.Error, TypeError, ValueError) as error:
        raise SpoolFileError(str(error), corrupt=True) from error
    except OSError as error:
        raise SpoolFileError(str(error), corrupt=False) from error


def set_aside(path: Path) -> Path:
    """Rename a spool file to the first free `<name>.corrupt-<n>`, its WAL with it; the newest three are kept.

    Raises OSError.
    """
    numbers = sorted(
        int(found.name.rpartition("-")[2])
        for found in path.parent.glob(f"{path.name}.corrupt-*")
        if found.name.rpartition("-")[2].isdecimal()
    )
    number = numbers[-1] + 1 if numbers else 1
    aside = path.with_name(f"{path.name}.corrupt-{number}")
    # The WAL first: if we end in between, a main file without it is what a fresh start can live with.
    for suffix in ("-wal", "-shm", ""):
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(aside.with_name(aside.name + suffix))
    for old in numbers[: max(0, len(numbers) + 1 - _KEPT_CORRUPT)]:
        for suffix in ("-wal", "-shm", ""):
            path.with_name(f"{path.name}.corrupt-{old}{suffix}").unlink(missing_ok=True)
    return aside
