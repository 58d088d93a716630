"""Stores under test: bundles in a tar, a disk that fails, and errors to look at."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest

from edge_runtime.durable import RealFiles
from edge_runtime.engine.archive import tar_bundle
from edge_runtime.engine.bundle import Bundle, load_bundle
from edge_runtime.engine.choices import Choice
from edge_runtime.engine.store import BundleStore
from edge_runtime.errors import EdgeError
from tests.engine.graphs import classifier, write_bundle


def refused(call: Callable[[], object]) -> EdgeError:
    with pytest.raises(EdgeError) as caught:
        call()
    return caught.value


def nothing_aside(store: BundleStore) -> bool:
    return not list(store.root.glob(".*"))


def by_upload(store: BundleStore, source: Path) -> Bundle:
    with store.open_upload() as coming:
        for piece in tar_bundle(load_bundle(source)):
            coming.write(piece)
        return coming.finish()


def with_golden(root: Path) -> Path:
    """The bundle with golden files, each listed, and one file that is none of its own."""
    (root / "golden" / "deep").mkdir(parents=True)
    files = {"labels.txt": (root / "labels.txt").read_bytes()}
    for name in ("golden/deep/b.png", "golden/deep/a.png", "golden/fp32.npz"):
        (root / name).write_bytes(name.encode())
        files[name] = name.encode()
    golden = {"inputs": "golden/deep/*.png", "outputs": "golden/fp32.npz", "tolerance": 0.01}
    listed = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    write_bundle(root, classifier(), bundle={"name": root.name}, variant={"golden": golden}, files=listed)
    (root / "README").write_text("not ours")
    return root


def tar_of(*entries: tuple[tarfile.TarInfo | str, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as tar:
        for entry, data in entries:
            if isinstance(entry, str):
                entry = tarfile.TarInfo(entry)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def contents(source: Path) -> list[tuple[tarfile.TarInfo | str, bytes]]:
    files = sorted(each for each in source.rglob("*") if each.is_file())
    return [(each.relative_to(source).as_posix(), each.read_bytes()) for each in files]


def choice(model: str, bundle: Bundle | str) -> Choice:
    digest = bundle if isinstance(bundle, str) else bundle.digest
    return Choice(model, digest, "fp32", "2026-01-01T00:00:00.000Z")


class FailingFiles(RealFiles):
    """The real disk, whose change number `at` fails; unsynced, to be quick."""

    def __init__(self, at: int, code: int) -> None:
        self._left = at
        self._code = code

    def _count(self) -> None:
        self._left -= 1
        if self._left == 0:
            raise OSError(self._code, os.strerror(self._code))

    def create(self, path: Path, mode: int) -> IO[bytes]:
        self._count()
        return super().create(path, mode)

    def sync(self, stream: IO[bytes]) -> None:
        self._count()
        stream.flush()

    def sync_folder(self, path: Path) -> None:
        self._count()

    def rename(self, old: Path, new: Path) -> None:
        self._count()
        super().rename(old, new)

    def unlink(self, path: Path) -> None:
        self._count()
        super().unlink(path)

    def mkdir(self, path: Path, mode: int) -> None:
        self._count()
        super().mkdir(path, mode)

    def rmdir(self, path: Path) -> None:
        self._count()
        super().rmdir(path)

    def chmod(self, path: Path, mode: int) -> None:
        self._count()
        super().chmod(path, mode)
