"""The store's disk: what is being made or removed lies aside, and room is kept for others."""

from __future__ import annotations

import errno
import logging
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from edge_runtime.durable import Files, remove_tree
from edge_runtime.engine.archive import CHUNK_BYTES
from edge_runtime.errors import EdgeError

log = logging.getLogger(__name__)

_NEW, _OLD = ".new-", ".old-"


class StoreDisk:
    """The folder `root`, on a disk of which `reserve_bytes` stay free.

    Names that begin with `.new-` and `.old-` are this class's own. Methods raise OSError unless they say otherwise.
    """

    def __init__(
        self, root: Path, files: Files, reserve_bytes: int, statvfs: Callable[[Path], os.statvfs_result]
    ) -> None:
        self.root = root
        self.files = files
        self._reserve_bytes = reserve_bytes
        self._statvfs = statvfs
        self._in_hand: set[Path] = set()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """The disk's errors become ours. Raises EdgeError (code "store_write_failed")."""
        try:
            yield
        except OSError as error:
            raise EdgeError(
                f"the store cannot be written: {error.strerror or error}",
                code="store_write_failed",
                where=str(self.root),
                remedy="look at the disk (df, dmesg); what was begun is undone",
                retryable=error.errno in (errno.ENOSPC, errno.EDQUOT),
            ) from error

    def entries(self) -> list[Path]:
        """What lies in the folder, by name; nothing where it is missing. Raises EdgeError ("store_unreadable")."""
        try:
            return sorted(self.root.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise unreadable(self.root, error) from error

    def leftovers(self) -> list[Path]:
        """What lies aside and nobody works on. Raises as `entries`."""
        return [each for each in self.entries() if each.name.startswith((_NEW, _OLD)) and each not in self._in_hand]

    def new_name(self) -> Path:
        """A name aside that nothing has yet, until `drop`. Raises EdgeError (code "store_full")."""
        if not self.root.is_dir():
            with suppress(FileExistsError):
                self.files.mkdir(self.root, 0o755)
            self.files.sync_folder(self.root.parent)
        self.check_space(0)
        aside = self.root / f"{_NEW}{secrets.token_hex(8)}"
        self._in_hand.add(aside)
        return aside

    def set_aside(self, place: Path) -> Path:
        """Take the name from what has it, in one step; returns the new one, for `drop`."""
        aside = self.root / f"{_OLD}{secrets.token_hex(8)}"
        self.files.rename(place, aside)
        return aside

    def drop(self, aside: Path) -> None:
        """Remove what lies aside, if anything. Raises nothing: what cannot be removed waits for the next start."""
        try:
            if os.path.lexists(aside):
                remove_tree(aside, files=self.files)
        except OSError as error:
            log.warning("%s is left until the next start: %s", aside, error.strerror)
        self._in_hand.discard(aside)

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """An empty folder aside; at the end what is left of it is dropped. Raises EdgeError (code "store_full")."""
        aside = self.new_name()
        try:
            self.files.mkdir(aside, 0o755)
            yield aside
        finally:
            self.drop(aside)

    def check_space(self, size_bytes: int) -> None:
        """Raises EdgeError (code "store_full") when `size_bytes` more would leave less than the reserve."""
        disk = self._statvfs(self.root)
        free_bytes = disk.f_bavail * disk.f_frsize
        if free_bytes - size_bytes < self._reserve_bytes:
            more = f", and {size_bytes / 1e6:.1f} MB more are to be written" if size_bytes else ""
            raise EdgeError(
                f"the disk has {free_bytes / 1e6:.1f} MB free, and keeps {self._reserve_bytes / 1e6:.1f}{more}",
                code="store_full",
                where=str(self.root),
                remedy="free some space on that disk, then try again",
                retryable=True,
            )

    def write(self, path: Path, size_bytes: int, source: IO[bytes]) -> None:
        """Make the read-only file `path`, and the folders it needs, of what `source` has; its bytes are on disk.

        Raises EdgeError (code "store_full").
        """
        self.check_space(size_bytes)
        for folder in reversed(path.parents):
            if folder.is_relative_to(self.root) and not folder.is_dir():
                self.files.mkdir(folder, 0o755)
        with self.files.create(path, 0o444) as stream:
            while piece := source.read(CHUNK_BYTES):
                stream.write(piece)
            self.files.sync(stream)

    def seal(self, folder: Path) -> None:
        """Make a folder and all folders in it read-only, and their names durable."""
        for each in sorted((each for each in folder.rglob("*") if each.is_dir()), reverse=True):
            self._seal_one(each)
        self._seal_one(folder)

    def _seal_one(self, folder: Path) -> None:
        self.files.chmod(folder, 0o555)
        self.files.sync_folder(folder)

    def put_in_place(self, aside: Path, place: Path) -> None:
        """Give what lies aside its own name, for good; what has that name is removed."""
        old = self.set_aside(place) if os.path.lexists(place) else None
        self.files.rename(aside, place)
        try:
            self.files.sync_folder(self.root)
        except OSError:
            self.files.rename(place, aside)  # nobody knows whether it would last
            raise
        if old is not None:
            self.drop(old)


def unreadable(path: Path, error: OSError) -> EdgeError:
    return EdgeError(
        f"the store cannot be read: {error.strerror or error}",
        code="store_unreadable",
        where=str(path),
        remedy="check owner and rights, and the disk (dmesg)",
    )
