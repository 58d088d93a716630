"""The free space on the disk that the spool leaves to others."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

_MARGIN = 0.05


def free_bytes(folder: Path) -> int:
    """What is free on the folder's file system for who is not root. Raises OSError."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


class DiskReserve:
    """Whether the spool may grow: not while less than `reserve_bytes` is free, and then not before that and a
    little more is. `tell(code, message)` is told `spool_reserve` and `spool_reserve_over`."""

    def __init__(
        self, folder: Path, reserve_bytes: int, free: Callable[[Path], int], tell: Callable[[str, str], None]
    ) -> None:
        self._folder = folder
        self._reserve_bytes = reserve_bytes
        self._free = free
        self._tell = tell
        self.touched = False

    def may_grow(self) -> bool:
        """Ask anew. Raises nothing: where the free space cannot be told, writing will."""
        if self._reserve_bytes <= 0:
            return True
        try:
            free = self._free(self._folder)
        except OSError:
            return True
        wanted = self._reserve_bytes * (1 + _MARGIN) if self.touched else self._reserve_bytes
        touched = free < wanted
        if touched is not self.touched:
            self.touched = touched
            amounts = f"{free / 1e6:.0f} MB are free on the disk of {self._folder}"
            if touched:
                self._tell(
                    "spool_reserve",
                    f"only {amounts}, and {self._reserve_bytes / 1e6:.0f} MB are to stay so: new messages that wait"
                    " replace the oldest",
                )
            else:
                self._tell("spool_reserve_over", f"{amounts} again: messages that wait may take more")
        return not touched
