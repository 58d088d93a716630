"""The journal's file: sqlite in WAL mode, where what was committed outlives a power cut.

A failing disk is a `JournalFileError`, whatever sqlite calls it. One thread at a time.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Collection, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Literal, get_args

from edge_runtime.control.commands import Door
from edge_runtime.durable import sync_folder
from edge_runtime.sqlite_file import SqliteFileError, foreign_errors, transaction

State = Literal["accepted", "begun", "finished"]
"""Accepted: will be obeyed, also after a restart. Begun: may have taken effect. Finished: there is a reply."""

_VERSION = 1
_SCHEMA = f"""
CREATE TABLE command (
    id TEXT PRIMARY KEY, place INTEGER NOT NULL, fingerprint BLOB NOT NULL, name TEXT NOT NULL, door TEXT NOT NULL,
    payload BLOB, state TEXT NOT NULL, boot TEXT NOT NULL, boots INTEGER NOT NULL, t_expires_ns INTEGER,
    t_forget_ns INTEGER NOT NULL, expires_utc REAL, forget_utc REAL, reply TEXT
) WITHOUT ROWID;
PRAGMA user_version = {_VERSION};
"""


# in the order of the fields of Row
_LOAD = (
    "SELECT id, place, fingerprint, name, door, payload, state, boot, boots, t_expires_ns, t_forget_ns, expires_utc,"
    " forget_utc, reply FROM command"
)
_PUT = "INSERT OR REPLACE INTO command VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"


class JournalFileError(SqliteFileError):
    """The journal's file cannot be used."""


@dataclass(frozen=True, slots=True)
class Row:
    """A command that was accepted, as the one numbered `place`.

    `t_expires_ns` and `t_forget_ns` are of the monotonic clock of `boot`; `boots` counts the boots over which nobody
    could tell the time. `expires_utc` and `forget_utc` are seconds of the epoch; None: never, or not known.
    `payload` is there as long as it may still have to be obeyed.
    """

    command_id: str
    place: int
    fingerprint: bytes
    name: str
    door: Door
    payload: bytes | None
    state: State
    boot: str
    boots: int
    t_expires_ns: int | None
    t_forget_ns: int
    expires_utc: float | None
    forget_utc: float | None
    reply: str | None


class JournalFile:
    """An open journal file. `fresh`: there was none. All methods raise JournalFileError."""

    def __init__(self, path: Path) -> None:
        with _ours():
            # for its owner alone: a command says what somebody wants done here
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._db = sqlite3.connect(path, timeout=1.0, isolation_level=None, check_same_thread=False)
        try:
            with _ours():
                self._prepare()
                if self.fresh:
                    sync_folder(path.parent)
        except BaseException:
            self.close()
            raise

    def _prepare(self) -> None:
        # one daemon holds the store; without the -shm file there is no mmap that a full disk turns into a SIGBUS
        self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
        self._db.execute("PRAGMA journal_mode = WAL")
        # commands are rare, and one that is obeyed twice after a power cut is what this is here to prevent
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute("PRAGMA wal_autocheckpoint = 100")
        self._db.execute("PRAGMA journal_size_limit = 1048576")
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        self.fresh = version == 0
        if version not in (0, _VERSION):
            raise JournalFileError(f"it is of version {version}, which this program does not know", corrupt=True)
        if self.fresh:
            with transaction(self._db):
                for statement in _SCHEMA.strip().removesuffix(";").split(";"):
                    self._db.execute(statement)

    def load(self) -> list[Row]:
        """All rows, in no order."""
        with _ours():
            rows = [Row(*found) for found in self._db.execute(_LOAD)]
        for row in rows:
            if row.state not in get_args(State) or row.door not in get_args(Door):
                raise JournalFileError(f"a row says {row.state!r} of {row.door!r}", corrupt=True)
        return rows

    def write(self, rows: Sequence[Row], gone: Collection[str]) -> None:
        """Put rows in, or in the place of those with their ids, and delete others: all of it on disk, or nothing."""
        with _ours(), transaction(self._db):
            self._db.executemany(_PUT, [astuple(row) for row in rows])
            self._db.executemany("DELETE FROM command WHERE id = ?", [(each,) for each in gone])
            # something is written even if no row changes: else a full disk would look as if it had room again
            self._db.execute(f"PRAGMA user_version = {_VERSION}")

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            self._db.close()


def _ours() -> contextlib.AbstractContextManager[None]:
    return foreign_errors(JournalFileError)
