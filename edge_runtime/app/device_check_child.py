"""The process in which `device-check` uses the GPU: what crashes, hangs or poisons it ends this one alone.

`python -m edge_runtime.app.device_check_child ORDER`, where ORDER is a JSON object: `parent` and `nice` (see
children.settle), `root`, `digest`, `variant`, `plan`, `kernels` (a folder), `checks` (names, in order), `reloads`, and
`door` ("cuda.bindings", or null for whichever there is). On standard output comes a JSON object a line: `stage`
"opening"; for each check `stage` is its name, first alone and then with `outcome`; at last "done", or "broken" with
`error` where the GPU could not be opened, or cannot be used any more.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from edge_runtime.app.device_check_report import carry_out
from edge_runtime.children import Report, settle
from edge_runtime.errors import EdgeError, EngineError

BROKEN, DONE = "broken", "done"
_STOP_S = 5.0


def main() -> None:
    """Carry out the order in sys.argv[1]. Ends the process by itself: a library's own end can hang or crash."""
    order = json.loads(sys.argv[1])
    settle(order["nice"], order["parent"])
    report = Report()
    report.line("opening")
    try:
        _work(order, report)
    except EdgeError as error:
        report.line(BROKEN, {"error": error.as_payload()})
    except Exception as error:  # noqa: BLE001  told to who asks, with the traceback in its log
        traceback.print_exc()
        failed = EngineError(f"the check itself broke: {error!r}", remedy="report this as a fault")
        report.line(BROKEN, {"error": failed.as_payload()})
    os._exit(0)


def _work(order: Mapping[str, Any], report: Report) -> None:
    # here, so that a start that fails is told from a library that does
    from edge_runtime.app.device_check_bench import Bench
    from edge_runtime.app.device_check_gpu import CHECKS
    from edge_runtime.app.evaluate import read_image
    from edge_runtime.engine.bundle import load_bundle
    from edge_runtime.engine.tensorrt.gpu import open_gpu
    from edge_runtime.engine.tensorrt.stopwatch import with_stopwatch

    bundle = load_bundle(Path(order["root"]))
    if bundle.digest != order["digest"]:
        raise EngineError("somebody changed the bundle meanwhile", code="digest_mismatch", where=order["root"])
    door, stopwatch = with_stopwatch(order["door"])
    gpu = open_gpu(open_door=lambda: door)
    bench = Bench(
        gpu=gpu,
        stopwatch=stopwatch,
        bundle=bundle,
        variant=order["variant"],
        plan=Path(order["plan"]),
        read_image=read_image,
        kernels=Path(order["kernels"]),
        reloads=order["reloads"],
    )
    for name in order["checks"]:
        report.line(name)
        outcome = carry_out(name, partial(CHECKS[name], bench))
        report.line(name, {"outcome": asdict(outcome)})
        gpu.owner.require_alive()
    gpu.stop(_STOP_S)
    report.line(DONE)


if __name__ == "__main__":
    main()
