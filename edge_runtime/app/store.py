"""The store: the daemon's folder. One daemon at a time holds it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType

from edge_runtime.errors import UsageError


class StoreLock:
    """Holds the store for this process (flock); the kernel lets go of it however the process ends."""

    def __init__(self, store: Path) -> None:
        self.store = store
        self._fd: int | None = None

    def __enter__(self) -> StoreLock:
        """Raises UsageError where the store cannot be used, or another daemon holds it."""
        remedy = "make it a folder that this user may write, or set [device] store to another one"
        try:
            self.store.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.store / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        except OSError as error:
            raise UsageError(
                f"the store cannot be used: {error.strerror}",
                code="store_unusable",
                where=str(self.store),
                remedy=remedy,
            ) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._fd)
            self._fd = None
            raise UsageError(
                "another edge-runtime holds this store",
                code="store_held",
                where=str(self.store),
                remedy="stop it, or set [device] store to another folder",
            ) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
