"""letterbox.cu compiled for the CPU: the very same source, with CUDA's words defined away, run thread after thread."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edge_runtime.engine.tensorrt.letterbox import BLOCK, KINDS, NAME, SOURCE
from tests.engine.tensorrt.fake_machine import Machine

_TYPES: dict[str, Any] = {"P": ctypes.c_void_p, "i": ctypes.c_int, "f": ctypes.c_float}
_C = {"P": "unsigned char *", "i": "int ", "f": "float "}

_SHIM = """
#include <cmath>
#include <cstddef>
#define __global__
#define __device__
struct Three {{ int x, y, z; }};
static Three blockIdx, blockDim, threadIdx;
#include "{source}"
extern "C" void run(int grid_x, int grid_y, int block_x, int block_y, {declared})
{{
    blockDim = {{block_x, block_y, 1}};
    for (blockIdx.y = 0; blockIdx.y < grid_y; blockIdx.y++)
        for (blockIdx.x = 0; blockIdx.x < grid_x; blockIdx.x++)
            for (threadIdx.y = 0; threadIdx.y < block_y; threadIdx.y++)
                for (threadIdx.x = 0; threadIdx.x < block_x; threadIdx.x++)
                    {name}({given});
}}
"""


class Unavailable(Exception):
    """Why it cannot be compiled here."""


@functools.cache
def _library(source: Path) -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise Unavailable("there is no C++ compiler (g++)")
    names = [f"a{index}" for index in range(len(KINDS))]
    declared = ", ".join(f"{_C[kind]}{name}" for kind, name in zip(KINDS, names, strict=True))
    with tempfile.TemporaryDirectory() as place:
        shim = Path(place) / "shim.cpp"
        shim.write_text(_SHIM.format(source=source, declared=declared, name=NAME, given=", ".join(names)))
        made = Path(place) / "kernel.so"
        # the strictest that a C++ compiler can be with it; an argument too many or too few does not compile
        command = [compiler, "-O2", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off"]
        answer = subprocess.run([*command, "-o", str(made), str(shim)], capture_output=True, text=True, timeout=100)
        if answer.returncode:
            raise AssertionError(answer.stderr)
        return ctypes.CDLL(str(made))


def run(values: Sequence[int | float], grid: tuple[int, int], block: tuple[int, int] = BLOCK) -> None:
    """A launch. `values` as letterbox.arguments gives them, with addresses in this process. Raises Unavailable."""
    launch = _library(SOURCE).run
    launch.argtypes = [ctypes.c_int] * 4 + [_TYPES[kind] for kind in KINDS]
    launch.restype = None
    launch(*grid, *block, *values)


def on_machine(machine: Machine, values: Sequence[Any], grid: tuple[int, ...], block: tuple[int, ...]) -> None:
    """A launch on a fake machine, with addresses in its memory: what it reads and writes has to lie in it."""
    given = list(values)
    assert len(given) == len(KINDS)
    pitch, chroma_pitch, kind, height, place_kind = given[1], given[3], given[4], given[6], given[8]
    step, chroma_next = given[-4], given[-3]
    place_bytes = given[9] * given[10] * {0: 12, 1: 3, 2: 4}[place_kind]
    chroma_bytes = chroma_pitch * -(-height // 2) + (chroma_next if step == 1 else 0)
    sizes = {0: pitch * height, 2: chroma_bytes if kind == 2 else 0, 7: place_bytes}
    for index, nbytes in sizes.items():
        if nbytes:
            given[index] = machine.memory(given[index], nbytes, what="the kernel").ctypes.data
    run(given, (grid[0], grid[1]), (block[0], block[1]))
