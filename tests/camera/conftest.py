"""No camera test leaves a file descriptor or a child process behind."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

_GRACE_S = 2.0


def open_descriptors() -> Counter[str]:
    """How many of each kind: socket, pipe, anon_inode..., and files by name."""
    kinds: Counter[str] = Counter()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:  # the one that lists the folder
            continue
        kinds[target.partition(":[")[0]] += 1
    return kinds


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """What a wider fixture opened before the test may stay."""
    descriptors, processes = open_descriptors(), children()
    yield
    end = time.monotonic() + _GRACE_S
    while True:
        left = {kind: count for kind, count in (open_descriptors() - descriptors).items() if kind != "/proc/self/fd"}
        born = children() - processes
        if not left and not born:
            return
        if time.monotonic() > end:
            pytest.fail(f"left after the test: descriptors {left}, processes {born}")
        time.sleep(0.01)
