"""Files that are either the old ones or the new ones, whole, whatever happens and whenever the power goes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from types import TracebackType
from typing import IO

__all__ = ["SaveFile", "sync_folder", "write_atomic"]


class SaveFile:
    """A context manager to write a file anew: `with SaveFile(path) as stream: stream.write(...)`.

    The bytes go into a temporary file beside it; on success that is fsynced, put in the place of `path` in
    one step, and the folder is fsynced. On an exception, or a kill at any instant, `path` is what it was.
    `mode` are the permission bits of the new file. Raises OSError (no space, read-only, no folder).
    """

    def __init__(self, path: Path, *, mode: int = 0o644) -> None:
        self.path = path
        self._mode = mode
        self._stream: IO[bytes] | None = None
        self._aside: Path | None = None

    def __enter__(self) -> IO[bytes]:
        # In the same folder, since a rename is atomic only within one file system.
        descriptor, name = tempfile.mkstemp(prefix=f".{self.path.name}.", suffix=".new", dir=self.path.parent)
        self._aside = Path(name)
        self._stream = os.fdopen(descriptor, "wb")
        return self._stream

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._stream is not None
        assert self._aside is not None
        try:
            if kind is None:
                self._stream.flush()
                os.fchmod(self._stream.fileno(), self._mode)
                os.fsync(self._stream.fileno())
                self._stream.close()
                self._aside.replace(self.path)
        finally:
            if not self._stream.closed:
                try:
                    self._stream.close()
                except OSError:
                    pass  # the error that brought us here is the one to tell
            self._aside.unlink(missing_ok=True)
        if kind is None:
            sync_folder(self.path.parent)


def write_atomic(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Put `data` in the place of the file `path`: afterwards it is on disk; on failure the old file stays.

    Raises OSError.
    """
    with SaveFile(path, mode=mode) as stream:
        stream.write(data)


def sync_folder(path: Path) -> None:
    """Make a folder's entries (new names, renames, removals) durable. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
