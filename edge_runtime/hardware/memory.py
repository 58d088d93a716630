"""What memory is free, and what a process holds: from /proc and the control groups, below an injected root.

On a Jetson the CPU and the GPU share one memory: what is free here is free for both, and what an engine takes on
the GPU is missing here. Swap (zram on a Jetson) is not counted: an engine in it is as good as none.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD, _M_ARENA_MAX = -3, -1, -8
"""malloc.h"""
_PICTURE_BYTES = 1 << 20
"""Larger than this is a picture or a buffer for some, and not what a model or the interpreter is made of."""


def available_bytes(root: Path = _ROOT) -> int | None:
    """Memory in bytes that this process can still take without pushing anybody out; None where nothing tells.

    The least of MemAvailable (/proc/meminfo) and the headroom of each control group on this process's path:
    limit - usage + inactive file pages, which the kernel drops first. Version 2 (memory.max, memory.high) and
    version 1. A value that cannot be read limits nothing.
    """
    found = [] if (system := _field(root / "proc/meminfo", "MemAvailable:")) is None else [system * 1024]
    for group in _groups(root):
        limits = [_number(group / name) for name in ("memory.max", "memory.high", "memory.limit_in_bytes")]
        used = _number(group / "memory.current")
        if used is None:
            used = _number(group / "memory.usage_in_bytes")
        limit = min((limit for limit in limits if limit is not None), default=None)
        if limit is None or used is None:
            continue
        droppable = _field(group / "memory.stat", "total_inactive_file")  # version 1: of the group and those below
        if droppable is None:
            droppable = _field(group / "memory.stat", "inactive_file")
        found.append(limit - used + (droppable or 0))
    return max(min(found), 0) if found else None


def resident_bytes(pid: int | None = None, root: Path = _ROOT) -> int | None:
    """Resident memory of a process (default: this one) in bytes; None where it cannot be read or has ended."""
    try:
        pages = (_process(pid, root) / "statm").read_text(encoding="ascii").split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return None


def peak_resident_bytes(pid: int | None = None, root: Path = _ROOT) -> int | None:
    """The most that a process (default: this one) ever had resident, in bytes; None where it cannot be read.

    Not getrusage(2), whose maximum a program inherits from the one that started it.
    """
    peak = _field(_process(pid, root) / "status", "VmHWM:")
    return None if peak is None else peak * 1024


def use_one_arena() -> None:
    """Let all threads allocate from one heap, and pictures outside of it (mallopt(3)), where the C library is glibc.

    A heap for each thread keeps what engines leave behind when they are loaded on one thread and closed on another:
    over 200 exchanges resident memory wandered between 175 and 202 MB with them, and stayed at 174 MB with one.
    Inference does not allocate, so nothing waits for it.

    glibc moves the size from which on it maps memory up to that of whatever it has unmapped, and so it soon takes the
    pictures that each frame allocates from the heap. What is small and stays comes to lie between them, and the heap
    grows by holes: with yolox_nano at 416 px and one camera, 37 of its 91 MB were free after 8 s. With the size fixed
    the peak is 150 MB, not 185. The pages of a picture are new each time, which costs what MEASURED.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none, and one heap
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, _PICTURE_BYTES)
        # with it goes the automatic one, twice that size; 128 KiB would have the heap's end come and go
        mallopt(_M_TRIM_THRESHOLD, 2 * _PICTURE_BYTES)


def _process(pid: int | None, root: Path) -> Path:
    return root / "proc" / ("self" if pid is None else str(pid))


def _groups(root: Path) -> Iterator[Path]:
    """The memory control groups that this process is in, innermost first, as far as they can be seen from here."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return
    mounted = root / "sys/fs/cgroup"
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        top = mounted / "memory" if controllers else mounted
        # seen from inside a container the path may be the host's: its folders are not here, the mount's own is
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            yield top.joinpath(*parts[:depth])


def _number(file: Path) -> int | None:
    """The number in a file; None for "max", and where there is none."""
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _field(file: Path, name: str) -> int | None:
    """The first number after `name` at the start of a line."""
    try:
        text = file.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    found = re.search(rf"^{re.escape(name)}\s+(\d+)", text, re.MULTILINE)
    return None if found is None else int(found[1])
