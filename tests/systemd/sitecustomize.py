"""Put into the throw-away host by the tests, and found by the daemon's Python through PYTHONPATH: it makes lanes hang.

What it does follows files. Those in the RuntimeDirectory go away with the process, so that the next one is well.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edge_runtime.app import health
from edge_runtime.engine import onnxrt, session_check

HOLD_WARM_UP = Path("/var/lib/edge-runtime/hold-warm-up")
STUCK_LANE = Path("/run/edge-runtime/stuck-lane")
HOLD_GIL = Path("/run/edge-runtime/hold-gil")
DEAD_LANE = Path("/run/edge-runtime/dead-lane")

_once = threading.Lock()
_collect = onnxrt.OnnxRuntimeLane.collect
_output_shapes: Callable[..., Any] = session_check.output_shapes


def _say(word: str) -> None:
    print(f"test hook: {word}", file=sys.stderr, flush=True)


def warm_up_for_the_test(*arguments: Any) -> Any:
    if HOLD_WARM_UP.exists():
        _say("the warm-up is held")
    while HOLD_WARM_UP.exists():
        time.sleep(0.02)
    return _output_shapes(*arguments)


def collect_for_the_test(lane: onnxrt.OnnxRuntimeLane) -> Any:
    if HOLD_GIL.exists():
        _say("a lane holds the interpreter")
        ctypes.PyDLL(None).sleep(600)
    if DEAD_LANE.exists():
        raise SystemExit("test hook: a lane dies")
    # the first lane that comes is stuck, others work on
    if STUCK_LANE.exists() and _once.acquire(blocking=False):
        _say("a lane is stuck")
        threading.Event().wait()
    return _collect(lane)


vars(onnxrt)["output_shapes"] = warm_up_for_the_test
setattr(onnxrt.OnnxRuntimeLane, "collect", collect_for_the_test)  # noqa: B010  mypy knows that it is a method
vars(health)["STALL_LIMIT_S"] = 2.0
