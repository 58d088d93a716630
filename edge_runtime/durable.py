"""Files that are either the old ones or the new ones, whole, whatever happens and whenever the power goes."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from types import TracebackType
from typing import IO, Protocol

__all__ = ["REAL", "Files", "RealFiles", "SaveFile", "remove_tree", "sweep_aside", "sync_folder", "write_atomic"]


class Files(Protocol):
    """Every kind of change to a disk, so that tests can record them and cut the power between any two.

    What is written lasts only after `sync` of its file, and a name (new, renamed, removed) only after
    `sync_folder` of its folder; until then each may be there or not, in any combination. Reading is no change
    and goes past this. All methods raise OSError.
    """

    def create(self, path: Path, mode: int) -> IO[bytes]:
        """A new file with these permission bits, open for writing. FileExistsError if the name is taken."""
        ...

    def sync(self, stream: IO[bytes]) -> None:
        """Make what was written to the stream durable."""
        ...

    def sync_folder(self, path: Path) -> None:
        """Make a folder's names durable."""
        ...

    def rename(self, old: Path, new: Path) -> None:
        """Give a file or folder another name in the same folder, in one step; a file `new` is replaced."""
        ...

    def unlink(self, path: Path) -> None:
        """Remove a file."""
        ...

    def mkdir(self, path: Path, mode: int) -> None:
        """Make a folder. FileExistsError if the name is taken."""
        ...

    def rmdir(self, path: Path) -> None:
        """Remove an empty folder."""
        ...

    def chmod(self, path: Path, mode: int) -> None:
        """Set the permission bits of a file or folder."""
        ...


class RealFiles:
    """The disk of this machine."""

    def create(self, path: Path, mode: int) -> IO[bytes]:
        stream = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")
        try:
            os.fchmod(stream.fileno(), mode)  # open's own mode is subject to the umask
        except OSError:
            stream.close()
            path.unlink()
            raise
        return stream

    def sync(self, stream: IO[bytes]) -> None:
        stream.flush()
        os.fsync(stream.fileno())

    def sync_folder(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        old.replace(new)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def mkdir(self, path: Path, mode: int) -> None:
        path.mkdir(mode)

    def rmdir(self, path: Path) -> None:
        path.rmdir()

    def chmod(self, path: Path, mode: int) -> None:
        path.chmod(mode)


REAL: Files = RealFiles()


class SaveFile:
    """A context manager to write a file anew: `with SaveFile(path) as stream: stream.write(...)`.

    The bytes go into a temporary file beside it; on success that is fsynced, put in the place of `path` in
    one step, and the folder is fsynced. On an exception, or a kill at any instant, `path` is what it was.
    `mode` are the permission bits of the new file. Raises OSError (no space, read-only, no folder).
    """

    def __init__(self, path: Path, *, mode: int = 0o644, files: Files = REAL) -> None:
        self.path = path
        self._mode = mode
        self._files = files
        self._stream: IO[bytes] | None = None
        # In the same folder, since a rename is atomic only within one file system.
        self._aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}.new")

    def __enter__(self) -> IO[bytes]:
        self._stream = self._files.create(self._aside, self._mode)
        return self._stream

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._stream is not None
        placed = False
        try:
            if kind is None:
                self._files.sync(self._stream)
                self._stream.close()
                self._files.rename(self._aside, self.path)
                placed = True
        finally:
            if not placed:
                # the error that brought us here is the one to tell
                with contextlib.suppress(OSError):
                    self._stream.close()
                with contextlib.suppress(OSError):
                    self._files.unlink(self._aside)
        if placed:
            self._files.sync_folder(self.path.parent)


def write_atomic(path: Path, data: bytes, *, mode: int = 0o644, files: Files = REAL) -> None:
    """Put `data` in the place of the file `path`: afterwards it is on disk; on failure the old file stays.

    Raises OSError.
    """
    with SaveFile(path, mode=mode, files=files) as stream:
        stream.write(data)


def sweep_aside(path: Path, *, files: Files = REAL) -> None:
    """Remove what a kill or a power cut left beside `path` while it was being saved. Raises OSError.

    Only for a start, when nobody is saving it.
    """
    for left in path.parent.glob(f".{path.name}.*.new"):
        files.unlink(left)


def sync_folder(path: Path) -> None:
    """Make a folder's entries (new names, renames, removals) durable. Raises OSError."""
    REAL.sync_folder(path)


def remove_tree(path: Path, *, files: Files = REAL) -> None:
    """Remove a file, or a folder with all that is in it, read-only or not; links are not followed. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        files.chmod(path, 0o700)
        for each in sorted(path.iterdir()):
            remove_tree(each, files=files)
        files.rmdir(path)
    else:
        files.unlink(path)


def put_aside(path: Path, *, files: Files = REAL) -> str:
    """Rename a damaged file to `NAME.damaged`, in the place of an earlier one. In words, what became of it; raises
    nothing."""
    aside = path.with_name(f"{path.name}.damaged")
    try:
        files.rename(path, aside)
        files.sync_folder(path.parent)
    except OSError as error:
        return f", and cannot be put aside: {error.strerror}"
    return f"; kept as {aside.name}"
