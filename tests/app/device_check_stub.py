"""Stands in for device_check_child: a process that ends as the names of its checks say."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from dataclasses import asdict

from edge_runtime.app.device_check_report import Outcome, Status
from edge_runtime.children import Report, settle

ERRORS = {"none": "cuda_missing", "locked": "no_gpu_driver"}


def main() -> None:
    order = json.loads(sys.argv[1])
    settle(order["nice"], order["parent"])
    report = Report()
    report.line("opening")
    if order["door"] == "dead":
        os._exit(3)
    if order["door"] is not None:
        report.line("broken", {"error": {"code": ERRORS[order["door"]], "message": "no", "remedy": None}})
        os._exit(0)
    for name in order["checks"]:
        report.line(name)
        if name == "crash":
            print("last words", file=sys.stderr, flush=True)
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGSEGV)
        elif name == "exit":
            os._exit(7)
        elif name == "hang":
            threading.Event().wait()
        status: Status = "failed" if name == "sticky" else "passed"
        report.line(name, {"outcome": asdict(Outcome(name, status, "it did", {"pid": os.getpid()}))})
        if name == "sticky":
            report.line("broken", {"error": {"code": "gpu_fatal", "message": "700", "remedy": None}})
            os._exit(0)
    report.line("done")
    os._exit(0)


if __name__ == "__main__":
    main()
