"""A folder for what a long command has done, so that the same command goes on after an interruption."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edge_runtime.durable import write_atomic
from edge_runtime.errors import UsageError

__all__ = ["work_in"]

_MARK = "run.json"
_LOCK = "lock"


@contextmanager
def work_in(folder: Path, key: str) -> Iterator[None]:
    """Make the folder, or go on in it, and hold it (flock): two runs in one folder would undo each other's files.

    `key`: what the run is of. Raises UsageError, code "work_taken", for a folder of another run, one of a run that
    still goes on, and one that holds anything else; those are left as they are.
    """
    try:
        _check(folder, key)
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"cannot be used: {reason}", code="work_taken", where=str(folder)) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(
                "another run works in it", code="work_taken", where=str(folder), remedy="wait for it, or stop it"
            ) from None
        if not (folder / _MARK).is_file():
            write_atomic(folder / _MARK, json.dumps({"key": key}).encode())
        yield
    finally:
        os.close(descriptor)


def _check(folder: Path, key: str) -> None:
    mark = folder / _MARK
    if mark.is_file():
        if json.loads(mark.read_bytes()) != {"key": key}:
            raise UsageError(
                "holds the work of another run, of other pictures or with other options",
                code="work_taken",
                where=str(folder),
                remedy="name another by --work, or remove it",
            )
    elif folder.exists() and (not folder.is_dir() or any(each.name != _LOCK for each in folder.iterdir())):
        raise UsageError("exists and is no work folder", code="work_taken", where=str(folder), remedy="name another")
