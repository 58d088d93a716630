"""A bundle as a stream: what belongs to it, and the tar in which it travels."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, cast

from edge_runtime.engine.bundle import MANIFEST_NAME, Bundle, artefacts_of
from edge_runtime.engine.manifest import escape
from edge_runtime.errors import BundleError

MAX_MEMBERS = 10_000
MAX_NAME_BYTES = 1024
_MAX_PART_BYTES = 255  # of the usual file systems
_MAX_HEADERS = 100  # of the whole archive
CHUNK_BYTES = 64 * 1024


def manifest_files(bundle: Bundle) -> tuple[PurePosixPath, ...]:
    """Every file of a bundle, relative to its folder: bundle.toml first, the others by name.

    Raises BundleError where golden pictures are missing.
    """
    manifest = bundle.manifest
    names = {manifest.bundle.labels, *(manifest.files or {}), *_artefacts(bundle)}
    for variant in manifest.variant:
        if variant.golden is not None:
            names.update(path.relative_to(bundle.root).as_posix() for path in bundle.golden_inputs(variant.name))
            names.add(variant.golden.outputs)
    first = PurePosixPath(MANIFEST_NAME)
    return (first, *sorted({PurePosixPath(name) for name in names} - {first}))


def require_listed(bundle: Bundle) -> Bundle:
    """The bundle, if its manifest has the sha256 of every file, so that its digest stands for all of it.

    Raises BundleError (code "manifest_invalid") otherwise.
    """
    hashed = {PurePosixPath(name) for name in bundle.manifest.files or {}}
    hashed.update(PurePosixPath(name) for name in _artefacts(bundle))
    for name in manifest_files(bundle)[1:]:
        if name not in hashed:
            raise BundleError(
                f"{name.as_posix()!r} is used by the bundle but not listed under [files]",
                code="manifest_invalid",
                where=str(bundle.root / MANIFEST_NAME),
                remedy="add it with its sha256: a bundle that is stored or sent is known by its digest alone",
            )
    return bundle


def _artefacts(bundle: Bundle) -> Iterator[str]:
    for variant in bundle.manifest.variant:
        yield from (file.path for file in artefacts_of(variant))


def bundle_bytes(bundle: Bundle) -> int:
    """The size of all of a bundle's files. Raises BundleError, OSError."""
    return sum((bundle.root / name).stat().st_size for name in manifest_files(bundle))


def tar_bundle(bundle: Bundle) -> Iterator[bytes]:
    """The bundle as a tar (POSIX.1-2001, "pax"), in pieces of at most 64 KiB; the same bundle gives the same bytes.

    Raises BundleError for a file that changes meanwhile, OSError for one that cannot be read.
    """
    for name in manifest_files(bundle):
        with (bundle.root / name).open("rb") as stream:
            entry = tarfile.TarInfo(name.as_posix())
            entry.size = left = os.fstat(stream.fileno()).st_size
            yield entry.tobuf(tarfile.PAX_FORMAT)
            while left:
                piece = stream.read(min(CHUNK_BYTES, left))
                if not piece:
                    raise BundleError(
                        "became shorter while it was read",
                        code="digest_mismatch",
                        where=str(bundle.root / name),
                        remedy="leave the bundle alone while it is sent",
                    )
                left -= len(piece)
                yield piece
        yield bytes(-entry.size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)


def unpack_tar(path: Path, write: Callable[[PurePosixPath, int, IO[bytes]], None], *, limit: int) -> None:
    """Give every file in a tar on disk to `write`: its name, size in bytes, and a stream of its content.

    Folders are passed over, since the files' names say them. At most MAX_MEMBERS entries of `limit` bytes in all.

    Raises BundleError (code "upload_invalid") for what is no plain tar, and for a link, a device, a name that
    leads out, that stands twice or that no file can have. Memory is bounded whatever the tar says.
    """
    with path.open("rb") as raw:
        seen: set[PurePosixPath] = set()
        folders: set[PurePosixPath] = set()
        total = count = 0
        try:
            with tarfile.open(fileobj=cast("IO[bytes]", _Reader(raw)), mode="r:") as tar:
                while (entry := tar.next()) is not None:
                    tar.members.clear()  # type: ignore[attr-defined]  # it would keep them all, with whatever their headers hold
                    count += 1
                    total += entry.size
                    if entry.size < 0 or total > limit or count > MAX_MEMBERS or len(tar.pax_headers) > _MAX_HEADERS:
                        raise _invalid(f"holds more than {MAX_MEMBERS} entries of {limit} bytes in all")
                    if entry.isdir():
                        continue
                    name = _name(entry)
                    if name in seen or name in folders or not seen.isdisjoint(name.parents):
                        raise _invalid("stands twice, or is a file and a folder", entry.name)
                    seen.add(name)
                    folders.update(name.parents)
                    stream = tar.extractfile(entry)
                    assert stream is not None  # only links and devices have none
                    write(name, entry.size, stream)
        except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
            raise _invalid(f"cannot be read: {error}") from error


def _name(entry: tarfile.TarInfo) -> PurePosixPath:
    """Raises BundleError for what is no plain file with a usable name."""
    if entry.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or entry.issparse():
        raise _invalid("is a link, a device or another thing that is no plain file", entry.name)
    reason = escape(entry.name)
    if reason is not None:
        raise _invalid(reason, entry.name)
    name = PurePosixPath(entry.name)
    if not name.parts:
        raise _invalid("is no name of a file", entry.name)
    if len(entry.name.encode()) > MAX_NAME_BYTES or any(len(part.encode()) > _MAX_PART_BYTES for part in name.parts):
        raise _invalid("is longer than a name may be", entry.name[:100])
    return name


def _invalid(what: str, name: str | None = None) -> BundleError:
    return BundleError(
        f"the tar {what}" if name is None else f"in the tar {name!r} {what}",
        code="upload_invalid",
        remedy="send the files of one bundle, as `edge-runtime reload MODEL BUNDLE` does",
    )


class _Reader:
    """A file for tarfile that never gives more than a chunk: a header may claim to be gigabytes long."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._size = os.fstat(raw.fileno()).st_size

    def read(self, size: int) -> bytes:
        if not 0 <= size <= CHUNK_BYTES:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return self._raw.read(size)

    def tell(self) -> int:
        return self._raw.tell()

    def seek(self, position: int) -> int:
        if not 0 <= position <= self._size:
            raise tarfile.ReadError("it ends early")
        return self._raw.seek(position)
