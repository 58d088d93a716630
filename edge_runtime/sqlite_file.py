"""What the files of sqlite have in common: transactions that are whole, and whose fault an error is."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator

__all__ = ["SqliteFileError", "foreign_errors", "transaction"]


class SqliteFileError(Exception):
    """A file cannot be used. `corrupt`: its contents are at fault, and a fresh file is the way out; else the disk is
    (full, read-only, failing), and trying again later may help."""

    def __init__(self, message: str, *, corrupt: bool) -> None:
        super().__init__(message)
        self.corrupt = corrupt


@contextlib.contextmanager
def transaction(database: sqlite3.Connection) -> Iterator[None]:
    """All of it, or nothing. Raises what sqlite and the body raise."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):  # sqlite may have rolled back by itself
            database.execute("ROLLBACK")
        raise


@contextlib.contextmanager
def foreign_errors(kind: type[SqliteFileError], *contents: type[Exception]) -> Iterator[None]:
    """Whatever sqlite calls it becomes a `kind`; `contents` are further errors that speak of the file's contents."""
    damage: tuple[type[Exception], ...] = (sqlite3.Error, TypeError, ValueError, *contents)
    try:
        yield
    except sqlite3.OperationalError as error:
        # "no such table" and text that is no UTF-8 are the file's fault, all else operational is the disk's.
        # (The codes themselves come with Python 3.11.)
        words = str(error)
        corrupt = words.startswith(("no such", "Could not decode", "malformed"))
        raise kind(words, corrupt=corrupt) from error
    except damage as error:
        raise kind(str(error), corrupt=True) from error
    except OSError as error:
        raise kind(error.strerror or str(error), corrupt=False) from error
