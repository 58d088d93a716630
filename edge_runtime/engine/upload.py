"""A bundle that comes into the store as a tar, piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO

from edge_runtime.engine.archive import unpack_tar
from edge_runtime.engine.bundle import Bundle
from edge_runtime.engine.store_disk import StoreDisk
from edge_runtime.errors import EdgeError

MAX_UPLOAD_BYTES = 4 * 1024**3


class Upload:
    """`write` the tar of a bundle, then `finish`. Whatever else happens, nothing is left of it.

    `place` verifies what lies in a folder aside and makes it a bundle of the store; it tells whether that is new.
    For one thread at a time, as a context manager: leaving it without `finish` is `abort`.
    """

    def __init__(self, disk: StoreDisk, place: Callable[[Path], tuple[Bundle, bool]]) -> None:
        """Raises EdgeError: code "store_full" or "store_write_failed"."""
        self._disk = disk
        self._place = place
        with disk.changing():
            self._tar = disk.new_name()
            try:
                self._stream: IO[bytes] | None = disk.files.create(self._tar, 0o600)
            except OSError:
                disk.drop(self._tar)
                raise
        self._received_bytes = 0
        self.new = False
        """After `finish`: whether the store did not have this bundle before."""

    def write(self, chunk: bytes) -> None:
        """The next bytes of the tar.

        Raises EdgeError: code "upload_too_large" beyond MAX_UPLOAD_BYTES, "store_full", "store_write_failed". Then
        the upload has ended.
        """
        with self._all_or_nothing() as stream:
            self._received_bytes += len(chunk)
            if self._received_bytes > MAX_UPLOAD_BYTES:
                raise EdgeError(
                    f"a bundle may have {MAX_UPLOAD_BYTES} bytes", code="upload_too_large", remedy="send less"
                )
            self._disk.check_space(len(chunk))
            stream.write(chunk)

    def finish(self) -> Bundle:
        """Unpack what came, verify it and put it into the store. What the manifest does not list is left out.

        Raises BundleError for what is no bundle (code "upload_invalid" where the tar itself is wrong), EdgeError
        as `write`.
        """
        with self._all_or_nothing() as stream:
            stream.close()
            with self._disk.folder() as aside:
                unpack_tar(
                    self._tar,
                    lambda name, size_bytes, content: self._disk.write(aside / name, size_bytes, content),
                    limit=MAX_UPLOAD_BYTES,
                )
                bundle, self.new = self._place(aside)
        self.abort()
        return bundle

    def abort(self) -> None:
        """Forget what came. Idempotent, and without effect after `finish`."""
        stream, self._stream = self._stream, None
        if stream is not None:
            with suppress(OSError):  # it may hold bytes for a disk that is full
                stream.close()
            self._disk.drop(self._tar)

    def __enter__(self) -> Upload:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    @contextmanager
    def _all_or_nothing(self) -> Iterator[IO[bytes]]:
        if self._stream is None:
            raise EdgeError("this upload has ended", code="upload_ended", remedy="begin another one")
        try:
            with self._disk.changing():
                yield self._stream
        except BaseException:
            self.abort()
            raise
