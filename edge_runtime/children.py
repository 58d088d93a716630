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
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

log = logging.getLogger(__name__)

END_S = 5.0
"""How long the kernel may take to end a process and free its memory."""
_PR_SET_PDEATHSIG = 1
_TAIL_BYTES = 2048
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


class ChildOutput:
    """What a child says: lines on standard output, and the end of what it writes to standard error. One thread's.

    A line may have `max_line_bytes`.
    """

    def __init__(self, process: subprocess.Popen[bytes], max_line_bytes: int = 64 * 1024) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self._process = process
        self._stdout, self._stderr = process.stdout, process.stderr
        self._most = max_line_bytes
        self._line = bytearray()
        self._tail = bytearray()
        self._poller = select.poll()
        self._poller.register(self._stdout, select.POLLIN)
        self._poller.register(self._stderr, select.POLLIN)

    def read(self, wait_s: float) -> list[bytes] | None:
        """The lines that have come within `wait_s`, or before more was waited for; None: standard output has ended.

        Raises ValueError, in words, where a line has no end.
        """
        lines: list[bytes] = []
        said = self._stdout.fileno()
        for descriptor, _ in self._poller.poll(1000 * wait_s):
            chunk = os.read(descriptor, self._most)
            if descriptor != said:
                self._keep(chunk)
                if not chunk:
                    self._poller.unregister(descriptor)
            elif not chunk:
                return None
            else:
                self._line += chunk
                *whole, rest = bytes(self._line).split(b"\n")
                self._line = bytearray(rest)
                lines += whole
        if len(self._line) > self._most:
            raise ValueError(f"its process wrote {len(self._line)} bytes without an end of line")
        return lines

    def exit_code(self) -> int | None:
        """After the end of its standard output: with what it ended; None where it goes on for END_S."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        self._drain()
        return self._process.returncode

    @property
    def last_words(self) -> str:
        """The last line on standard error, at most 200 characters; empty: none."""
        return self._text().rpartition("\n")[2][:200]

    def close(self) -> str:
        """Close the pipes; the last 2 KB of standard error."""
        self._drain()
        self._stdout.close()
        self._stderr.close()
        return self._text()

    def _text(self) -> str:
        return self._tail.decode("utf-8", "replace").strip()

    def _keep(self, chunk: bytes) -> None:
        self._tail += chunk
        del self._tail[:-_TAIL_BYTES]

    def _drain(self) -> None:
        """Take what a child that has ended had still written to standard error."""
        poller = select.poll()
        poller.register(self._stderr, select.POLLIN)
        while poller.poll(0) and (chunk := self._stderr.read(self._most)):
            self._keep(chunk)


def signal_name(code: int) -> str:
    """Of an exit code below 0: "SIGSEGV"; a real-time signal has no name, and is "signal 40"."""
    return next((known.name for known in signal.Signals if known == -code), f"signal {-code}")


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
