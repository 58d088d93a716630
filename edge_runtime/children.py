"""Child processes that load what could crash, hang or eat memory: started, put behind everybody else, and ended.

A child is `python -m MODULE ORDER`, with the order as JSON; it says how far it came in JSON lines on standard output.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

log = logging.getLogger(__name__)

END_S = 5.0
"""How long the kernel may take to end a process and free its memory."""
_PR_SET_PDEATHSIG = 1
# A service's own lines to systemd are not the child's. BLAS would start a thread per core, for nothing.
_NOT_INHERITED = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES")
_SET = {"OPENBLAS_NUM_THREADS": "1"}


def start_child(module: str, order: Mapping[str, object]) -> subprocess.Popen[bytes]:
    """Start it, in a session of its own, with pipes for what it says. Raises OSError.

    It gives itself its priority: anything that Python runs between fork and exec can deadlock here. It dies with the
    thread that starts it (PR_SET_PDEATHSIG).
    """
    environment = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    return subprocess.Popen(
        [sys.executable, "-m", module, json.dumps(order)],
        bufsize=0,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # `-m` looks here first: the same package as this one, wherever the service was started
        cwd=Path(__file__).resolve().parents[1],
        env=environment | _SET,
        start_new_session=True,
    )


def kill_child(process: subprocess.Popen[bytes], what: str) -> None:
    """Kill the child and its group, and reap it. `what` it did, for the log."""
    if process.returncode is not None:  # reaped: its number may be somebody else's by now
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        log.error("process %d, which %s, was killed and does not end: stuck in a driver?", process.pid, what)


def settle(nice: int, parent: int) -> None:
    """In the child: behind everybody else for the processors, first in line when memory runs out, and never alone.

    The child has a session of its own, and where the kernel shares the processors out by session (autogroup,
    sched(7)), niceness counts within one only: so the session gets it as well. `parent`: the process that asks.
    """
    os.nice(nice)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is expected here: no core file of it
    for file, text in (("autogroup", str(nice)), ("oom_score_adj", "1000")):
        with contextlib.suppress(OSError):  # a kernel without it
            Path("/proc/self", file).write_text(text, encoding="ascii")
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it had ended before the line above
        os._exit(1)


class Report:
    """In the child: writes the lines. What else writes to standard output there ends up in standard error."""

    def __init__(self) -> None:
        self._stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self.stage = "starting"

    def line(self, stage: str, facts: Mapping[str, object] | None = None) -> None:
        """One line: in which stage the child is, and what else there is to say."""
        self.stage = stage
        self._stream.write(json.dumps({"stage": stage, **(facts or {})}) + "\n")
        self._stream.flush()
