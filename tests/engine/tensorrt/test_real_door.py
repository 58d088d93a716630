"""The door over cuda.bindings on the real ones: they take every argument as it is given. The driver is a stub."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.engine.tensorrt import real_bindings

ILLEGAL = "an illegal memory access was encountered"


def test_every_call_passes_the_real_bindings() -> None:
    try:
        paths, libraries = real_bindings.cuda_paths(), real_bindings.stub_driver()
    except real_bindings.Unavailable as reason:
        if os.environ.get("CI") == "true":
            pytest.fail(f"the real bindings have to be there in CI: {reason}")
        pytest.skip(f"no real bindings: {reason}")
    environment = os.environ | {
        "PYTHONPATH": ":".join(map(str, (*paths, ROOT))),
        "LD_LIBRARY_PATH": str(libraries),
    }
    command = [sys.executable, "-m", "tests.engine.tensorrt.door_child"]
    answer = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert answer.returncode == 0, answer.stderr[-2000:]
    assert json.loads(answer.stdout) == {
        "device": ["Orin", [8, 7], 13020, True],
        "memory": [1, 2],
        "events": [0x101, False, True, 1.5],
        "host": [True, None, False],
        "copied": 9,
        "no kernel": ["cuda_failed", "cuModuleGetFunction", 500, "named symbol not found"],
        "sticky": ["gpu_fatal", "cuStreamSynchronize", 700, ILLEGAL],
        "after": ["gpu_fatal", "cuStreamSynchronize", 700, ILLEGAL],
    }
    assert answer.stderr.splitlines() == [
        "cuMemHostAlloc 5000 2",
        "cuMemHostAlloc 10 0",
        "cuMemcpyHtoDAsync 700000000 0 100 0x101",
        "cuMemcpyHtoDAsync 700000000 5 100 0x101",
        "cuMemcpyDtoHAsync 700000000 80 0x101",
        "cuStreamBeginCapture 1",
        "cuGraphDestroy 0x300",
        "cuGraphLaunch 0x301 0x101",
        "cuGraphExecDestroy 0x301",
        "cuLaunchKernel 2 3 1, 16 8 1, 0 0x101: 700000000 -5 0.5",
        "cuModuleUnload 0x400",
        "cuModuleUnload 0x400",
        "cuMemFree_v2 0x700000000",
        "cuEventDestroy_v2 0x202",
        "cuEventDestroy_v2 0x200",
        "cuEventDestroy_v2 0x200",
    ]
