"""The store: the daemon's folder. One daemon at a time holds it."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from pathlib import Path
from types import TracebackType

from edge_runtime.errors import UsageError

log = logging.getLogger(__name__)


BROKEN_DISK = frozenset({errno.EROFS, errno.ENOSPC, errno.EIO, errno.EDQUOT})
"""A disk in trouble: the daemon runs on without it. Anything else is a store that is configured wrongly."""


class StoreLock:
    """Holds the store for this process (flock); the kernel lets go of it however the process ends.

    `trouble`: why the store cannot be written to, None when it can.
    """

    def __init__(self, store: Path) -> None:
        self.store = store
        self.trouble: str | None = None
        self._fd: int | None = None

    def __enter__(self) -> StoreLock:
        """Raises UsageError where the store cannot be used as configured, or another daemon holds it."""
        try:
            self.store.mkdir(mode=0o750, parents=True, exist_ok=True)
            self._fd = os.open(self.store / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        except OSError as error:
            if error.errno not in BROKEN_DISK:
                raise UsageError(
                    f"the store cannot be used: {error.strerror}",
                    code="store_unusable",
                    where=str(self.store),
                    remedy="make it a folder that this user may write, or set [device] store to another one",
                ) from error
            self.trouble = f"the store {self.store} cannot be written: {error.strerror}"
            log.error("%s; going on without it", self.trouble)
            self._fd = self._open_as_it_is()
        if self._fd is not None:
            self._lock(self._fd)
        return self

    def _open_as_it_is(self) -> int | None:
        """The lock of an earlier start can be held on a disk that takes no writes."""
        try:
            return os.open(self.store / "lock", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None

    def _lock(self, fd: int) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            self._fd = None
            raise UsageError(
                "another edge-runtime holds this store",
                code="store_held",
                where=str(self.store),
                remedy="stop it, or set [device] store to another folder",
            ) from error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
