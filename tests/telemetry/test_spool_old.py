"""A file of the schema before this one becomes one of this, with all its rows."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest

from edge_runtime.telemetry import spool_schema
from edge_runtime.telemetry.spool_file import SpoolFile, SpoolFileError
from edge_runtime.telemetry.spool_floors import FloorFile, Floors
from tests.telemetry.spools import Opened

OLD = """
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


def old_file(store: Path, rows: int, *, closed: int = 1) -> None:
    with sqlite3.connect(store / "spool.sqlite") as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.executescript(OLD)
        db.execute("INSERT INTO session VALUES (1, 's0', 'b0', 'opened', '2026-03-01T11:00:00.000Z', ?)", (closed,))
        db.execute("INSERT INTO lane VALUES ('event', 3, 0, 0), ('telemetry', ?, 0, 0)", (rows + 10,))
        db.execute("INSERT INTO refused VALUES (1, 'telemetry', 1, 't', '1 no', 'refused', 'then')")
        db.execute("INSERT INTO message (lane, seq, topic, payload) VALUES ('event', 2, 't/e', ?)", (b"2 e",))
        db.executemany(
            "INSERT INTO message (lane, seq, topic, payload) VALUES ('telemetry', ?, 't/x', ?)",
            ((seq, b"%d %s" % (seq, b"x" * 900)) for seq in range(10, rows + 10)),
        )
    db.close()
    FloorFile(store / "spool.seq").write(Floors({"event": 1003, "telemetry": rows + 1010}, False))


def check(store: Path, rows: int, session: str = "s1") -> None:
    with Opened(store, session) as opened:
        assert opened.alarms == []
        assert opened.spool.lane("telemetry").waiting() == rows
        assert opened.seqs() == list(range(10, rows + 10))
        assert opened.read_all()[0].message.payload == b"10 " + b"x" * 900
        assert (opened.words("event"), opened.seqs("event")) == (["e"], [2])
        assert opened.gaps == []
        previous = opened.spool.previous
        assert previous is not None
        assert (previous.session, previous.clean, previous.last_utc) == ("s0", True, "2026-03-01T11:00:00.000Z")
        assert not previous.synced  # nobody noted that
        opened.put("new")
        opened.put("new", lane="event")
        opened.flush()
        assert opened.seqs()[-1] == rows + 10
        assert opened.seqs("event") == [2, 3]
        assert opened.close()
    with sqlite3.connect(store / "spool.sqlite") as db:
        assert db.execute("SELECT count(*) FROM refused").fetchone() == (1,)
        assert db.execute("SELECT count(*) FROM sqlite_master WHERE name LIKE 'old%'").fetchone() == (0,)
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    db.close()


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool_schema, "_STEP", 200)


def test_all_rows_of_an_old_file_are_there(tmp_path: Path) -> None:
    old_file(tmp_path, 450)
    before = (tmp_path / "spool.sqlite").stat().st_size
    check(tmp_path, 450)
    assert (tmp_path / "spool.sqlite").stat().st_size < 2 * before


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_a_kill_in_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """After so many steps the rest is not done, and the next start does it."""
    old_file(tmp_path, 450)
    real = spool_schema._move_rows
    done = []

    class Killed:
        """A connection that ends after so many transactions."""

        def __init__(self, db: sqlite3.Connection) -> None:
            self.db = db

        def execute(self, sql: str, *values: object) -> object:
            if sql.startswith("BEGIN"):
                done.append(sql)
                if len(done) > steps:
                    raise sqlite3.OperationalError("disk I/O error")
            return self.db.execute(sql, *values)  # type: ignore[arg-type]

        def executemany(self, sql: str, values: object) -> object:
            return self.db.executemany(sql, values)  # type: ignore[arg-type]

    monkeypatch.setattr(spool_schema, "_move_rows", lambda db: real(Killed(db)))  # type: ignore[arg-type]
    with pytest.raises(SpoolFileError):
        SpoolFile(tmp_path / "spool.sqlite", ())
    monkeypatch.setattr(spool_schema, "_move_rows", real)
    shutil.copytree(tmp_path, tmp_path / "later")
    check(tmp_path / "later", 450)


def test_an_old_file_after_a_power_cut(tmp_path: Path) -> None:
    old_file(tmp_path, 5, closed=0)
    with Opened(tmp_path) as opened:
        assert opened.seqs() == list(range(10, 15))
        opened.put("new")
        opened.flush()
        assert opened.seqs()[-1] == 1015
