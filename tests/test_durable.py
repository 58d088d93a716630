"""A file is the old one or the new one, whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edge_runtime.durable import SaveFile, write_atomic


def test_write_and_replace(tmp_path: Path) -> None:
    path = tmp_path / "state"
    write_atomic(path, b"one")
    write_atomic(path, b"two", mode=0o600)
    assert path.read_bytes() == b"two"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_in_between_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "state"
    write_atomic(path, b"one")

    def write_half() -> None:
        with SaveFile(path) as stream:
            stream.write(b"tw")
            raise RuntimeError("halfway")

    with pytest.raises(RuntimeError, match="halfway"):
        write_half()
    assert path.read_bytes() == b"one"
    assert list(tmp_path.iterdir()) == [path]


def test_the_order_is_file_then_name_then_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    real_fsync, real_replace = os.fsync, Path.replace

    def fsync(descriptor: int) -> None:
        seen.append("folder" if Path(f"/proc/self/fd/{descriptor}").resolve().is_dir() else "file")
        real_fsync(descriptor)

    def replace(self: Path, target: Path) -> Path:
        seen.append("replace")
        return real_replace(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    write_atomic(tmp_path / "state", b"one")
    assert seen == ["file", "replace", "folder"]


def test_no_space_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(tmp_path / "state", b"one")
    assert not list(tmp_path.iterdir())
