"""A disk whose power goes: every state that a power cut between any two operations may leave."""

from __future__ import annotations

import io
import itertools
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

Tree = dict[str, Any]
"""A folder's names: bytes for a file, another Tree for a folder."""

Key = tuple[tuple[str, Any], ...]

FATES = ("missing", "whole", "half", "zeros", "garbage")
"""What may have become of a write that nobody synced."""


@dataclass(frozen=True)
class Write:
    """Bytes of file `inode`."""

    inode: int
    offset: int
    data: bytes

    def survivors(self) -> Sequence[bytes]:
        return (b"", self.data, self.data[: len(self.data) // 2], bytes(len(self.data)), b"\xa5" * len(self.data))


@dataclass(frozen=True)
class Names:
    """Names of folder `inode` that change in one step: each to a file or folder, or to None for nothing."""

    inode: int
    changes: tuple[tuple[str, int | None], ...]


@dataclass(frozen=True)
class Sync:
    """All that was done to `inode` before this is there for good."""

    inode: int


Pending = Write | Names


class CrashDisk:
    """`Files` over the folder `root`: does everything there for real, but for syncing, and keeps a record of it.

    What is in `root` at the beginning counts as durable. Permissions are not modelled. A rename takes place
    within a folder, as a whole or not at all; everything else that was not synced survives or not, each
    for itself and in any order.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self.trace: list[Write | Names | Sync] = []
        self._contents: dict[int, bytes] = {}
        self._folders: dict[int, dict[str, int]] = {}
        self._next = itertools.count()
        self._top = self._scan(root)
        self._now = {inode: dict(names) for inode, names in self._folders.items()}

    def _scan(self, path: Path) -> int:
        inode = next(self._next)
        if path.is_dir():
            self._folders[inode] = {each.name: self._scan(each) for each in path.iterdir()}
        else:
            self._contents[inode] = path.read_bytes()
        return inode

    # --- Files

    def create(self, path: Path, mode: int) -> IO[bytes]:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        inode = next(self._next)
        self._rename_all(path.parent, (path.name, inode))
        return io.BufferedWriter(_Recorded(descriptor, inode, self.trace))

    def sync(self, stream: IO[bytes]) -> None:
        stream.flush()
        raw = getattr(stream, "raw", None)
        assert isinstance(raw, _Recorded)
        self.trace.append(Sync(raw.inode))

    def sync_folder(self, path: Path) -> None:
        assert path.is_dir()
        self.trace.append(Sync(self._inode(path)))

    def rename(self, old: Path, new: Path) -> None:
        assert old.parent == new.parent, "the model knows renames within a folder only"
        inode = self._inode(old)
        old.replace(new)
        self._rename_all(old.parent, (old.name, None), (new.name, inode))

    def unlink(self, path: Path) -> None:
        path.unlink()
        self._rename_all(path.parent, (path.name, None))

    def mkdir(self, path: Path, mode: int) -> None:
        path.mkdir(mode)
        inode = next(self._next)
        self._folders[inode] = {}
        self._now[inode] = {}
        self._rename_all(path.parent, (path.name, inode))

    def rmdir(self, path: Path) -> None:
        path.rmdir()
        self._rename_all(path.parent, (path.name, None))

    def chmod(self, path: Path, mode: int) -> None:
        path.chmod(mode)

    def _inode(self, path: Path) -> int:
        inode = self._top
        for part in path.relative_to(self._root).parts:
            inode = self._now[inode][part]
        return inode

    def _rename_all(self, folder: Path, *changes: tuple[str, int | None]) -> None:
        inode = self._inode(folder)
        _change(self._now[inode], changes)
        self.trace.append(Names(inode, changes))

    # --- the power goes

    def states(self, *, at_most: int, seed: int) -> Iterator[tuple[int, Tree]]:
        """(operations begun, what is on disk), for every prefix of the record.

        All combinations where they are at most `at_most`; else none and all of what is pending, each operation
        alone lost and alone kept, and as many random combinations as `at_most` allows.
        """
        chance = random.Random(seed)
        contents = dict(self._contents)
        folders = {inode: dict(names) for inode, names in self._folders.items()}
        pending: list[Pending] = []
        for begun in range(len(self.trace) + 1):
            for fates in _combinations(pending, at_most, chance):
                yield begun, self._tree(contents, folders, pending, fates)
            if begun == len(self.trace):
                return
            operation = self.trace[begun]
            if isinstance(operation, Sync):
                for done in (each for each in pending if each.inode == operation.inode):
                    _apply(contents, folders, done, 1)
                pending = [each for each in pending if each.inode != operation.inode]
            else:
                pending.append(operation)

    def _tree(
        self,
        contents: Mapping[int, bytes],
        folders: Mapping[int, Mapping[str, int]],
        pending: Sequence[Pending],
        fates: Sequence[int],
    ) -> Tree:
        left = dict(contents)
        names = {inode: dict(entries) for inode, entries in folders.items()}
        for operation, fate in zip(pending, fates, strict=True):
            if fate:
                _apply(left, names, operation, fate)

        def folder(inode: int) -> Tree:
            return {
                name: folder(each) if each in names else left.get(each, b"")
                for name, each in sorted(names[inode].items())
            }

        return folder(self._top)


class _Recorded(io.FileIO):
    def __init__(self, descriptor: int, inode: int, trace: list[Write | Names | Sync]) -> None:
        super().__init__(descriptor, "wb")
        self.inode = inode
        self._trace = trace
        self._at = 0

    def write(self, data: Any, /) -> int:
        done = super().write(data)
        assert done is not None
        self._trace.append(Write(self.inode, self._at, bytes(data[:done])))
        self._at += done
        return done


def _combinations(pending: Sequence[Pending], at_most: int, chance: random.Random) -> Iterator[Sequence[int]]:
    """For each pending operation a number: 0 it is lost, 1 it is there, more: torn, as in FATES."""
    counts = [len(FATES) if isinstance(each, Write) else 2 for each in pending]
    total = 1
    for count in counts:
        total *= count
    if total <= at_most:
        yield from itertools.product(*(range(count) for count in counts))
        return
    chosen = {(0,) * len(counts), (1,) * len(counts)}
    for index, count in enumerate(counts):
        chosen.update(
            (*(rest,) * index, fate, *(rest,) * (len(counts) - index - 1)) for rest in (0, 1) for fate in range(count)
        )
    while len(chosen) < at_most:
        chosen.add(tuple(chance.randrange(count) for count in counts))
    yield from sorted(chosen)


def _apply(contents: dict[int, bytes], folders: dict[int, dict[str, int]], operation: Pending, fate: int) -> None:
    if isinstance(operation, Names):
        _change(folders[operation.inode], operation.changes)
        return
    data = operation.survivors()[fate]
    before = contents.get(operation.inode, b"").ljust(operation.offset, b"\0")
    contents[operation.inode] = before[: operation.offset] + data + before[operation.offset + len(data) :]


def _change(names: dict[str, int], changes: Sequence[tuple[str, int | None]]) -> None:
    for name, inode in changes:
        if inode is None:
            names.pop(name, None)
        else:
            names[name] = inode


def lay_out(tree: Tree, root: Path) -> None:
    """Make the new folder `root` with what is in the tree."""
    root.mkdir()
    for name, each in tree.items():
        if isinstance(each, dict):
            lay_out(each, root / name)
        else:
            (root / name).write_bytes(each)


def frozen(tree: Tree) -> Key:
    """The tree as a key of a dict."""
    return tuple((name, frozen(each) if isinstance(each, dict) else each) for name, each in tree.items())
