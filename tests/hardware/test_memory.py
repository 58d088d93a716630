"""Free memory from files as kernels write them: without control groups, with version 2, with version 1."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.hardware.memory import available_bytes, peak_resident_bytes, resident_bytes, uncached

MIB = 1024 * 1024
MEMINFO = {"proc/meminfo": "MemTotal:       8000000 kB\nMemFree:          10000 kB\nMemAvailable:     512000 kB\n"}
V2 = {"proc/self/cgroup": "0::/system.slice/edge-runtime.service\n"}
SERVICE = "sys/fs/cgroup/system.slice/edge-runtime.service"


def write(root: Path, files: Mapping[str, object]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}")
    return root


def group(folder: str, limit: object, used: int, droppable: int = 0, name: str = "memory.max") -> dict[str, object]:
    return {
        f"{folder}/{name}": limit,
        f"{folder}/memory.current": used,
        f"{folder}/memory.stat": f"anon 5\nactive_file 7\ninactive_file {droppable}\n",
    }


def test_nothing_to_read_is_unknown(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None
    assert resident_bytes(root=tmp_path) is None
    assert peak_resident_bytes(root=tmp_path) is None


def test_without_a_limit_it_is_what_the_system_has(tmp_path: Path) -> None:
    write(tmp_path, {**MEMINFO, **V2, **group(SERVICE, "max", 300 * MIB)})
    assert available_bytes(tmp_path) == 512000 * 1024


def test_a_group_of_version_2_and_the_pages_it_can_drop(tmp_path: Path) -> None:
    write(tmp_path, {**MEMINFO, **V2, **group(SERVICE, 400 * MIB, 300 * MIB, 50 * MIB)})
    assert available_bytes(tmp_path) == 150 * MIB
    # at memory.high a process is not killed, but slowed until it hardly moves
    write(tmp_path, {f"{SERVICE}/memory.high": 320 * MIB})
    assert available_bytes(tmp_path) == 70 * MIB
    # over it already
    write(tmp_path, {f"{SERVICE}/memory.high": 100 * MIB})
    assert available_bytes(tmp_path) == 0


def test_the_tightest_group_on_the_way_up_counts(tmp_path: Path) -> None:
    files = group(SERVICE, 400 * MIB, 300 * MIB) | group("sys/fs/cgroup/system.slice", 500 * MIB, 480 * MIB)
    write(tmp_path, {**MEMINFO, **V2, **files})
    assert available_bytes(tmp_path) == 20 * MIB


def test_version_1_where_other_controllers_are_elsewhere(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/memory/docker/abc"
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n1:name=systemd:/\n0::/\n",
        f"{folder}/memory.limit_in_bytes": 256 * MIB,
        f"{folder}/memory.usage_in_bytes": 200 * MIB,
        f"{folder}/memory.stat": f"inactive_file 1\ntotal_inactive_file {4 * MIB}\n",
        # 2 ** 63 rounded to pages: no limit
        "sys/fs/cgroup/memory/memory.limit_in_bytes": 9223372036854771712,
        "sys/fs/cgroup/memory/memory.usage_in_bytes": 5,
    }
    write(tmp_path, {**MEMINFO, **files})
    assert available_bytes(tmp_path) == 60 * MIB


@pytest.mark.parametrize("path", ["/kubepods/pod1/abc", "/../../abc", "/"])
def test_in_a_container_the_groups_own_folder_is_the_mount(tmp_path: Path, path: str) -> None:
    """The path is then the host's, or leads out of what is seen."""
    files = group("sys/fs/cgroup", 100 * MIB, 60 * MIB)
    write(tmp_path, {**MEMINFO, "proc/self/cgroup": f"0::{path}\n", **files})
    assert available_bytes(tmp_path) == 40 * MIB


@pytest.mark.parametrize("text", ["", "garbage", "::::\n\n4\n", "0::/a\x01b\n"])
def test_files_that_cannot_be_understood_limit_nothing(tmp_path: Path, text: str) -> None:
    write(tmp_path, {**MEMINFO, "proc/self/cgroup": text, **group("sys/fs/cgroup", "?", 1)})
    assert available_bytes(tmp_path) == 512000 * 1024


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 2**40), st.integers(0, 2**30)), max_size=4))
def test_never_more_than_any_limit_leaves(
    tmp_path_factory: pytest.TempPathFactory, groups: list[tuple[int, int, int]]
) -> None:
    root = tmp_path_factory.mktemp("root")
    path = "".join(f"/g{depth}" for depth in range(len(groups)))
    files: dict[str, object] = {**MEMINFO, "proc/self/cgroup": f"0::{path}\n"}
    for depth, (limit, used, droppable) in enumerate(groups):
        folder = "sys/fs/cgroup" + "".join(f"/g{n}" for n in range(depth + 1))
        files |= group(folder, limit, used, droppable)
    left = [512000 * 1024, *(limit - used + droppable for limit, used, droppable in groups)]
    assert available_bytes(write(root, files)) == max(min(left), 0)


def test_of_this_very_process() -> None:
    available, before = available_bytes(), resident_bytes()
    assert available is not None
    assert before is not None
    assert available > 0
    # written, and so resident; the array is far above what malloc keeps by itself
    block = np.ones(64 * MIB, np.uint8)
    during = resident_bytes(os.getpid())
    assert during is not None
    assert 60 * MIB < during - before < 100 * MIB
    del block
    peak = peak_resident_bytes()
    assert peak is not None
    assert peak >= during - MIB  # the kernel counts a process's pages in lots


def test_malloc_is_told_once_to_have_no_caches_and_whoever_says_otherwise_is_heeded() -> None:
    first = uncached({"PATH": "/bin"})
    assert first == {"PATH": "/bin", "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}
    assert uncached(first) is None
    kept = uncached({"GLIBC_TUNABLES": "glibc.malloc.check=1"})
    assert kept == {"GLIBC_TUNABLES": "glibc.malloc.check=1:glibc.malloc.tcache_count=0"}
    assert uncached({"GLIBC_TUNABLES": "glibc.malloc.tcache_count=7"}) is None


TWICE = """
import os, sys
from edge_runtime.hardware.memory import without_thread_caches
print("begun", flush=True)
without_thread_caches()
print(os.environ.get("GLIBC_TUNABLES"), sys.argv)
"""


@pytest.mark.skipif(
    platform.machine() != "x86_64" or platform.libc_ver()[0] != "glibc", reason="there is nothing to switch off"
)
def test_a_program_is_begun_anew_once_with_its_arguments() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    found = subprocess.run(
        [sys.executable, "-c", TWICE, "a", "b c"], env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout.splitlines() == ["begun", "begun", "glibc.malloc.tcache_count=0 ['-c', 'a', 'b c']"]
