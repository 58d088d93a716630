"""A file is the old one or the new one, whole; and the model of a power cut that shows it finds what it should."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge_runtime.durable import Files, SaveFile, remove_tree, sweep_aside, write_atomic
from tests.crash import CrashDisk, Tree, lay_out

EVERYTHING = 100_000


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


def test_a_read_only_tree_is_removed_and_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "precious").touch()
    (tmp_path / "tree" / "inner").mkdir(parents=True)
    (tmp_path / "tree" / "inner" / "file").touch(0o444)
    (tmp_path / "tree" / "link").symlink_to(tmp_path / "other")
    (tmp_path / "tree" / "inner").chmod(0o555)
    (tmp_path / "tree").chmod(0o555)
    remove_tree(tmp_path / "tree")
    assert [each.name for each in tmp_path.rglob("*")] == ["other", "precious"]


def states(folder: Path, change: Callable[[Files], object], at_most: int = EVERYTHING) -> list[tuple[int, Tree]]:
    disk = CrashDisk(folder)
    change(disk)
    return list(disk.states(at_most=at_most, seed=1))


def test_o4_after_a_power_cut_it_is_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    """At every operation, whatever survives; and once it has returned, the new one."""
    (tmp_path / "state").write_bytes(b"one")
    disk = CrashDisk(tmp_path)
    write_atomic(tmp_path / "state", b"two", files=disk)
    found = list(disk.states(at_most=EVERYTHING, seed=1))
    assert {tree["state"] for _, tree in found} == {b"one", b"two"}
    assert {tree["state"] for begun, tree in found if begun == len(disk.trace)} == {b"two"}
    # what it leaves aside is swept at the next start
    assert any(len(tree) > 1 for _, tree in found)
    for number, (_, tree) in enumerate(found):
        root = tmp_path / str(number)
        lay_out(tree, root)
        sweep_aside(root / "state")
        assert [each.name for each in root.iterdir()] == ["state"]


def write(files: Files, path: Path, data: bytes, *, sync: bool) -> None:
    with files.create(path, 0o644) as stream:
        stream.write(data)
        if sync:
            files.sync(stream)


def test_the_model_finds_the_empty_file_of_a_rename_before_its_sync(tmp_path: Path) -> None:
    (tmp_path / "state").write_bytes(b"one")

    def rename_first(files: Files) -> None:
        write(files, tmp_path / "new", b"two!", sync=False)
        files.rename(tmp_path / "new", tmp_path / "state")
        files.sync_folder(tmp_path)

    found = {tree.get("state") for _, tree in states(tmp_path, rename_first)}
    assert found == {b"one", b"", b"tw", b"\0\0\0\0", b"\xa5\xa5\xa5\xa5", b"two!"}


def test_the_model_finds_the_lost_rename_of_a_folder_that_was_not_synced(tmp_path: Path) -> None:
    (tmp_path / "state").write_bytes(b"one")

    def forget_the_folder(files: Files) -> None:
        write(files, tmp_path / "new", b"two", sync=True)
        files.rename(tmp_path / "new", tmp_path / "state")

    found = states(tmp_path, forget_the_folder)
    last = max(begun for begun, _ in found)
    assert {tree["state"] for begun, tree in found if begun == last} == {b"one", b"two"}


def test_the_model_finds_the_hollow_folder_that_was_renamed_before_its_names_were_synced(tmp_path: Path) -> None:
    def make(files: Files, *, seal: bool) -> None:
        files.mkdir(tmp_path / "aside", 0o755)
        write(files, tmp_path / "aside" / "a", b"a", sync=True)
        write(files, tmp_path / "aside" / "b", b"b", sync=True)
        if seal:
            files.sync_folder(tmp_path / "aside")
        files.rename(tmp_path / "aside", tmp_path / "place")
        files.sync_folder(tmp_path)

    whole = {"a": b"a", "b": b"b"}
    hollow = [tree["place"] for _, tree in states(tmp_path, lambda files: make(files, seal=False)) if "place" in tree]
    assert {} in hollow
    assert {"b": b"b"} in hollow
    remove_tree(tmp_path / "place")
    sealed = [tree["place"] for _, tree in states(tmp_path, lambda files: make(files, seal=True)) if "place" in tree]
    assert sealed
    assert all(each == whole for each in sealed)


def test_the_model_finds_what_was_removed_and_comes_back(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "a").write_bytes(b"a")
    found = states(tmp_path, lambda files: remove_tree(tmp_path / "old", files=files))
    assert [tree for begun, tree in found if begun == max(begun for begun, _ in found)] == [
        {"old": {"a": b"a"}},
        {},
        {"old": {}},
        {},
    ]


def test_the_model_reorders_writes(tmp_path: Path) -> None:
    def two(files: Files) -> None:
        with files.create(tmp_path / "log", 0o644) as stream:
            stream.write(b"ab")
            stream.flush()
            stream.write(b"cd")
        files.sync_folder(tmp_path)

    found = {tree["log"] for _, tree in states(tmp_path, two) if "log" in tree}
    assert {b"", b"a", b"ab", b"abc", b"abcd", b"\0\0cd", b"a\0cd", b"\xa5\xa5cd"} <= found


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=st.lists(st.tuples(st.sampled_from("abc"), st.binary(max_size=9), st.booleans()), max_size=5))
def test_the_model_keeps_what_is_synced_and_what_is_done(
    tmp_path_factory: pytest.TempPathFactory, operations: list[tuple[str, bytes, bool]]
) -> None:
    """What was saved with syncs is in every later state, and with nothing lost a state is what is really there."""
    folder = tmp_path_factory.mktemp("disk")
    disk = CrashDisk(folder)
    saved: dict[str, tuple[int, bytes]] = {}
    for name, data, durable in operations:
        if durable:
            write_atomic(folder / name, data, files=disk)
            saved[name] = (len(disk.trace), data)
        else:
            write(disk, folder / f"{len(disk.trace)}.{name}", data, sync=False)
    found = list(disk.states(at_most=40, seed=3))
    really = {each.name: each.read_bytes() for each in folder.iterdir()}
    assert really in [tree for begun, tree in found if begun == len(disk.trace)]
    for name, (since, data) in saved.items():
        assert all(tree[name] == data for begun, tree in found if begun >= since)
