"""What memory is free, and what a process holds: from /proc and the control groups, below an injected root.

On a Jetson the CPU and the GPU share one memory: what is free here is free for both, and what an engine takes on
the GPU is missing here. Swap (zram on a Jetson) is not counted: an engine in it is as good as none.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

_ROOT = Path("/")
_M_ARENA_MAX = -8
"""malloc.h"""
_TUNABLES = "GLIBC_TUNABLES"
_THREAD_CACHES = "glibc.malloc.tcache_count"


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
    """Let all threads allocate from one heap (mallopt(3), M_ARENA_MAX), where the C library is glibc.

    A heap for each thread keeps what engines leave behind when they are loaded on one thread and closed on another:
    over 200 exchanges resident memory wandered between 175 and 202 MB with them, and stayed at 174 MB with one.
    Inference does not allocate, so nothing waits for it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none, and one heap
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


def without_thread_caches() -> None:
    """Begin this program anew without malloc's caches per thread, where it has them; returns where it has none.

    FFmpeg allocates a scaled picture of 1.5 MB per frame at 64 bytes. glibc (2.36) cuts it out of a larger piece and
    puts the few bytes that are left over into a thread's cache, from where they never join the rest again: the piece
    is too small for the next picture, and the heap grows by another. With yolox_nano at 416 px and one camera, 37 of
    its 91 MB were such holes after 8 s. Without the caches the peak of the process was 150 MB and not 185, and frames
    took as much CPU as before (9.08 and 9.04 ms); Python's small objects have an allocator of their own. Mapping the
    pictures instead (M_MMAP_THRESHOLD) kept the memory as low, and new pages for each took 8 % of the frames.

    Only glibc's tunables can say it, and they are read when a program begins: 20 ms. On a Jetson FFmpeg aligns to 16
    bytes, which is what malloc gives anyway, and nothing has to be done.
    """
    if os.uname().machine != "x86_64" or not _has_glibc() or not (program := sys.orig_argv):
        return
    environment = uncached(os.environ)
    if environment is not None:
        # a program that cannot be begun anew runs as it is
        with contextlib.suppress(OSError):
            os.execve(sys.executable, program, environment)  # noqa: S606  a shell has no business here


def uncached(environment: Mapping[str, str]) -> dict[str, str] | None:
    """The environment with malloc's caches per thread switched off; None where it says already what they are."""
    tunables = environment.get(_TUNABLES, "")
    if _THREAD_CACHES in tunables:
        return None
    return {**environment, _TUNABLES: ":".join([*filter(None, [tunables]), f"{_THREAD_CACHES}=0"])}


def _has_glibc() -> bool:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (OSError, ValueError):
        return False


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
