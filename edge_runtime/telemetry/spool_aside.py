"""Damaged spool files are kept beside the spool, for whoever wants to look into them."""

from __future__ import annotations

import contextlib
from pathlib import Path

_KEPT_CORRUPT = 3


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
    # The WAL last: if we end in between, sqlite deletes one without a main file. A main file without its WAL may
    # be sound, and older: its numbers would be used again.
    for suffix in ("", "-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(aside.with_name(aside.name + suffix))
    for old in numbers[: max(0, len(numbers) + 1 - _KEPT_CORRUPT)]:
        for suffix in ("-wal", "-shm", ""):
            path.with_name(f"{path.name}.corrupt-{old}{suffix}").unlink(missing_ok=True)
    return aside
