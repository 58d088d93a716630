"""Bundles on disk by digest: each whole and unchanged under its own name, or not there."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from edge_runtime.durable import REAL, Files, remove_tree
from edge_runtime.engine.archive import manifest_files, require_listed
from edge_runtime.engine.bundle import Bundle, load_bundle
from edge_runtime.engine.store_disk import StoreDisk, unreadable
from edge_runtime.engine.upload import Upload
from edge_runtime.errors import BundleError, EdgeError

__all__ = ["RESERVE_BYTES", "BundleStore"]

RESERVE_BYTES = 64 * 1024 * 1024
"""Stays free for what else the daemon writes: its spool, its state."""

_DIGEST = re.compile(r"sha256:(?P<hex>[0-9a-f]{64})")
_HEX = re.compile(r"[0-9a-f]{64}")
_AGAIN = "put it in again: edge-runtime reload MODEL BUNDLE"


class BundleStore:
    """The folder `root`, with each bundle in a folder named by the 64 hex digits of its digest.

    A folder of that name holds what its manifest lists and nothing else, is read-only (files 0444, folders
    0555), was verified, and is on disk with all that is in it before it gets the name; it loses the name in one
    step too. What is being made or removed has names of its own, which `sweep` clears at the next start.

    `reserve_bytes` are left free on the disk. Any thread may call; changes wait for one another, and readers for
    nobody. For one process at a time.
    """

    def __init__(
        self,
        root: Path,
        *,
        files: Files = REAL,
        reserve_bytes: int = RESERVE_BYTES,
        statvfs: Callable[[Path], os.statvfs_result] = os.statvfs,
    ) -> None:
        self.root = root
        self._disk = StoreDisk(root, files, reserve_bytes, statvfs)
        self._changes = threading.Lock()

    def add(self, source: Path) -> Bundle:
        """Copy the bundle in the folder `source` into the store; one that is there and intact is left as it is.

        Raises BundleError for one that is no bundle, and EdgeError (code "store_full", retryable; or
        "store_write_failed"). Then nothing is left behind.
        """
        bundle = require_listed(load_bundle(source))
        present = self._intact(bundle.digest)
        if present is not None:
            return present
        with self._disk.changing(), self._disk.folder() as aside:
            for name in manifest_files(bundle):
                with (bundle.root / name).open("rb") as stream:
                    self._disk.write(aside / name, os.fstat(stream.fileno()).st_size, stream)
            return self._place(aside)[0]

    def open_upload(self) -> Upload:
        """A bundle that comes in as a tar, piece by piece. Raises EdgeError as `add` does."""
        return Upload(self._disk, self._place)

    def open(self, digest: str) -> Bundle:
        """The bundle of this digest ("sha256:..."), verified anew.

        Raises BundleError: code "not_in_store", or "digest_mismatch" when it is damaged; EdgeError (code
        "store_unreadable").
        """
        match = _DIGEST.fullmatch(digest)
        place = self.root / match["hex"] if match else None
        if place is None or not os.path.lexists(place):
            raise BundleError(
                f"the store has no bundle {digest[:100]!r}",
                code="not_in_store",
                where=str(self.root),
                remedy=f"it has {', '.join(self.digests()) or 'none'}; {_AGAIN}",
            )
        try:
            bundle = require_listed(load_bundle(place))
        except BundleError as error:
            raise _damaged(place, str(error)) from error
        except OSError as error:
            raise unreadable(place, error) from error
        if bundle.digest != digest:
            raise _damaged(place, f"its bundle.toml is that of {bundle.digest}")
        return bundle

    def digests(self) -> tuple[str, ...]:
        """What is there, unverified, sorted. Raises EdgeError (code "store_unreadable")."""
        return tuple(f"sha256:{each.name}" for each in self._disk.entries() if _HEX.fullmatch(each.name))

    def collect(self, keep: Collection[str]) -> tuple[str, ...]:
        """Remove every bundle whose digest is not in `keep`; returns theirs. Afterwards that is on disk.

        Raises EdgeError (code "store_write_failed", "store_unreadable"): then some may be gone, and none is half
        there.
        """
        with self._changes, self._disk.changing():
            gone = tuple(digest for digest in self.digests() if digest not in keep)
            aside = [self._disk.set_aside(self.root / digest.removeprefix("sha256:")) for digest in gone]
            if aside:
                self._disk.files.sync_folder(self.root)
            for each in aside:
                remove_tree(each, files=self._disk.files)
            return gone

    def sweep(self) -> tuple[str, ...]:
        """Remove what an earlier run left half made or half removed; returns its names. For the start.

        Raises EdgeError (code "store_write_failed", "store_unreadable").
        """
        with self._changes, self._disk.changing():
            left = self._disk.leftovers()
            for each in left:
                remove_tree(each, files=self._disk.files)
            return tuple(each.name for each in left)

    def size_bytes(self) -> int:
        """The bytes of all files in the store, half made ones too. Raises EdgeError (code "store_unreadable")."""
        return sum(_size_bytes(each) for each in self._disk.entries())

    def _intact(self, digest: str) -> Bundle | None:
        try:
            return self.open(digest)
        except EdgeError:
            return None

    def _place(self, aside: Path) -> tuple[Bundle, bool]:
        """Verify what lies aside, take away what does not belong to it, and give it its name.

        Returns the bundle and whether it is new here. Raises BundleError, OSError.
        """
        try:
            bundle = require_listed(load_bundle(aside))
        except BundleError as error:
            # where it lies means nothing to whoever sent it
            message, where = (str(text or "").replace(f"{aside}{os.sep}", "") for text in (error.message, error.where))
            raise BundleError(
                message, code=error.code, where=where.replace(str(aside), "") or None, remedy=error.remedy
            ) from error
        wanted = {aside / name for name in manifest_files(bundle)}
        wanted |= {folder for path in wanted for folder in path.parents}
        for path in sorted(aside.rglob("*"), reverse=True):
            if path not in wanted:
                remove_tree(path, files=self._disk.files)
        self._disk.seal(aside)
        place = self.root / bundle.digest.removeprefix("sha256:")
        with self._changes:
            present = self._intact(bundle.digest)
            if present is not None:
                return present, False
            self._disk.put_in_place(aside, place)
        return replace(bundle, root=place), True


def _damaged(place: Path, why: str) -> BundleError:
    return BundleError(
        f"the bundle in the store is damaged: {why}", code="digest_mismatch", where=str(place), remedy=_AGAIN
    )


def _size_bytes(path: Path) -> int:
    try:
        if path.is_dir() and not path.is_symlink():
            return sum(_size_bytes(each) for each in path.iterdir())
        return path.lstat().st_size
    except FileNotFoundError:  # removed meanwhile
        return 0
