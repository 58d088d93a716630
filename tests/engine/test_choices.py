"""Which bundle a reload chose outlives the daemon, and a damaged file does not end it."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from edge_runtime.engine.choices import Choices
from tests.engine.stores import FailingFiles, choice, refused


def test_choices_are_kept(tmp_path: Path) -> None:
    choices = Choices(tmp_path / "choices.json")
    assert choices.load() == {}
    choices.remove("a")
    assert not (tmp_path / "choices.json").exists()
    for model, number in (("b", 1), ("a", 2), ("b", 3)):
        choices.save(choice(model, f"sha256:{number:064}"))
    assert Choices(tmp_path / "choices.json").load() == {
        "a": choice("a", f"sha256:{2:064}"),
        "b": choice("b", f"sha256:{3:064}"),
    }
    choices.remove("a")
    choices.remove("a")
    assert list(choices.load()) == ["b"]
    assert choices.trouble is None


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"\xff", b"[]", b"{}", b'{"schema": "edge.choices/2", "choices": []}',
     b'{"schema": "edge.choices/1", "choices": [{"model": "a", "bundle": "/etc", "variant": "v", "t_utc": ""}]}'],
)  # fmt: skip
def test_damaged_choices_are_put_aside_and_told(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "choices.json"
    path.write_bytes(data)
    (tmp_path / ".choices.json.0.new").write_bytes(b"left by a kill")
    choices = Choices(path)
    assert choices.load() == {}
    assert choices.trouble is not None
    assert "choices.json.damaged" in choices.trouble
    assert [each.name for each in tmp_path.iterdir()] == ["choices.json.damaged"]
    assert (tmp_path / "choices.json.damaged").read_bytes() == data
    choices.save(choice("a", "sha256:" + "1" * 64))
    again = Choices(path)
    assert list(again.load()) == ["a"]
    assert again.trouble is None


def test_choices_on_a_disk_that_fails(tmp_path: Path) -> None:
    path = tmp_path / "choices.json"
    path.write_bytes(b"{")
    choices = Choices(path, files=FailingFiles(1, errno.EROFS))
    assert choices.load() == {}
    assert "cannot be put aside" in (choices.trouble or "")
    path.unlink()
    path.mkdir()
    assert choices.load() == {}
    assert "cannot be read" in (choices.trouble or "")
    # written anew, it would forget what was chosen for other models
    assert refused(lambda: choices.save(choice("b", "sha256:" + "2" * 64))).code == "store_unreadable"
    assert refused(lambda: choices.remove("b")).code == "store_unreadable"
    path.rmdir()
    old = choice("a", "sha256:" + "1" * 64)
    choices.save(old)
    for at in range(1, 4):
        failing = Choices(path, files=FailingFiles(at, errno.ENOSPC))
        assert refused(lambda f=failing: f.save(choice("a", "sha256:" + "2" * 64))).code == "store_write_failed"  # type: ignore[misc]
        assert failing.load() == {"a": old}
    assert [each.name for each in tmp_path.iterdir()] == ["choices.json"]
