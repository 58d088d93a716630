"""The schema of the spool's file, and how a file of the schema before becomes one of this."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping

from edge_runtime.telemetry.spool_rows import first_id

VERSION = 2
_OLD_VERSION = 1
_STEP = 2000

# `id` of a message: the lane's number and the row's, so that there is one b-tree and no index; what changes with
# every commit stands in `lane`, in one page. `said_seq`: the event that says the gap; null: none does yet.
_SCHEMA = """
CREATE TABLE lane (
    number INTEGER PRIMARY KEY, name TEXT NOT NULL, next_seq INTEGER NOT NULL, rows INTEGER NOT NULL,
    bytes INTEGER NOT NULL, t_s INTEGER NOT NULL, t_utc TEXT NOT NULL, synced INTEGER NOT NULL
);
CREATE TABLE message (
    id INTEGER PRIMARY KEY, t_s INTEGER NOT NULL, form INTEGER NOT NULL, topic TEXT NOT NULL, payload BLOB NOT NULL
);
CREATE TABLE gap (
    id INTEGER PRIMARY KEY, said_seq INTEGER, lane TEXT NOT NULL, from_seq INTEGER NOT NULL, to_seq INTEGER NOT NULL,
    count INTEGER, reason TEXT NOT NULL, detail TEXT
);
CREATE TABLE IF NOT EXISTS refused (
    id INTEGER PRIMARY KEY, lane TEXT NOT NULL, seq INTEGER NOT NULL, topic TEXT NOT NULL, payload BLOB NOT NULL,
    reason TEXT NOT NULL, t_utc TEXT NOT NULL
);
CREATE TABLE session (
    id INTEGER PRIMARY KEY CHECK (id = 1), session TEXT NOT NULL, boot TEXT NOT NULL, t_open_utc TEXT NOT NULL,
    closed INTEGER NOT NULL
);
CREATE TRIGGER counted AFTER INSERT ON message BEGIN
    UPDATE lane SET rows = rows + 1,
        bytes = bytes + 64 + length(CAST(new.topic AS BLOB)) + length(new.payload)
    WHERE number = new.id >> 48;
END;
CREATE TRIGGER uncounted AFTER DELETE ON message BEGIN
    UPDATE lane SET rows = rows - 1,
        bytes = bytes - 64 - length(CAST(old.topic AS BLOB)) - length(old.payload)
    WHERE number = old.id >> 48;
END;
PRAGMA user_version = 2;
"""


class UnknownVersion(ValueError):
    """The file was made by a program that this one does not know."""


def prepare(db: sqlite3.Connection) -> None:
    """Bring the file to this schema. sqlite's errors are passed on, and a kill in the middle does no harm. Raises
    UnknownVersion."""
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version not in (0, _OLD_VERSION, VERSION):
        raise UnknownVersion(f"it is of version {version}, which this program does not know")
    if version != VERSION:
        db.execute("BEGIN IMMEDIATE")
        if version == _OLD_VERSION:
            for name in ("lane", "message", "session"):
                db.execute(f"ALTER TABLE {name} RENAME TO old_{name}")
            db.execute("DROP TRIGGER counted")
            db.execute("DROP TRIGGER uncounted")
        for statement in _statements(_SCHEMA):
            db.execute(statement)
        if version == _OLD_VERSION:
            _move_counters(db)
        db.execute("COMMIT")
    if db.execute("SELECT 1 FROM sqlite_master WHERE name = 'old_message'").fetchone():
        _move_rows(db)


def lane_numbers(db: sqlite3.Connection, names: list[str]) -> Mapping[str, int]:
    """The number of each lane in the file; a new lane gets one. Within a transaction."""
    numbers = {str(name): int(number) for name, number in db.execute("SELECT name, number FROM lane")}
    for name in names:
        if name not in numbers:
            numbers[name] = max(numbers.values(), default=-1) + 1
            db.execute("INSERT INTO lane VALUES (?, ?, 0, 0, 0, 0, '', 0)", (numbers[name], name))
    return {name: numbers[name] for name in names}


def _move_counters(db: sqlite3.Connection) -> None:
    old = db.execute("SELECT session, boot, t_open_utc, t_commit_utc, closed FROM old_session").fetchone()
    t_utc = ""
    if old is not None:
        t_utc = old[3]
        db.execute("INSERT INTO session VALUES (1, ?, ?, ?, ?)", (old[0], old[1], old[2], old[4]))
    lanes = db.execute("SELECT name, next_seq FROM old_lane ORDER BY name").fetchall()
    for number, (name, next_seq) in enumerate(lanes):
        db.execute("INSERT INTO lane VALUES (?, ?, ?, 0, 0, 0, ?, 0)", (number, name, next_seq, t_utc))


def _move_rows(db: sqlite3.Connection) -> None:
    """In steps, so that the file does not grow to twice its size."""
    numbers = {str(name): int(number) for name, number in db.execute("SELECT name, number FROM lane")}
    while True:
        db.execute("BEGIN IMMEDIATE")
        rows = db.execute("SELECT id, lane, seq, topic, payload FROM old_message ORDER BY id LIMIT ?", (_STEP,))
        found = rows.fetchall()
        db.executemany(
            "INSERT INTO message VALUES (?, 0, 0, ?, ?)",
            ((first_id(numbers[lane]) | seq, topic, payload) for _, lane, seq, topic, payload in found),
        )
        if found:
            db.execute("DELETE FROM old_message WHERE id <= ?", (found[-1][0],))
        else:
            for name in ("lane", "message", "session"):
                db.execute(f"DROP TABLE old_{name}")
        db.execute("COMMIT")
        if not found:
            return


def _statements(script: str) -> Iterator[str]:
    """`executescript` would commit by itself; a schema made by halves must not be left behind."""
    text = ""
    for line in script.splitlines(keepends=True):
        text += line
        if sqlite3.complete_statement(text):
            yield text
            text = ""
