"""A program that prints lines without end: started, read with a deadline, killed and reaped."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence

from edge_runtime.hardware.protocol import SensorError

log = logging.getLogger(__name__)

MAX_LINE_BYTES = 16 * 1024
"""A longer line is skipped to its end."""

_CHUNK_BYTES = 64 * 1024
_MAX_CHUNKS = 16
_KEPT_ERROR_BYTES = 512
_EXIT_S = 0.2
_REAP_S = 1.0


class LineProgram:
    """One run of `command`, in a session of its own, with an empty standard input. For one thread.

    `stop_fd`: nothing waits any more as soon as this file descriptor can be read from; another thread sees to that.
    """

    def __init__(self, command: Sequence[str], stop_fd: int) -> None:
        """Raises SensorError if the program is not there or can't be started."""
        path = shutil.which(command[0], path=f"{os.environ.get('PATH', '')}:/usr/bin")
        if path is None:
            raise SensorError(
                "there is no such program on PATH nor in /usr/bin",
                where=command[0],
                remedy="it is part of NVIDIA's Jetson Linux; in a container, mount it from the host",
            )
        try:
            self._process = subprocess.Popen(
                [path, *command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            raise SensorError(f"cannot be started: {error}", where=path, retryable=True) from error
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._stdout = self._process.stdout.fileno()
        self._stderr = self._process.stderr.fileno()
        self._stop_fd = stop_fd
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._stop_fd, selectors.EVENT_READ)
        for fd in (self._stdout, self._stderr):
            os.set_blocking(fd, False)
            self._selector.register(fd, selectors.EVENT_READ)
        self._rest = b""
        self._skipping = False
        self._errors = b""
        self._ended = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def newest(self, deadline: float) -> str | None:
        """The newest whole line since the last call, as soon as there is one; None at `deadline` (monotonic, s).

        Lines that came before it and were not asked for are gone. None also as soon as `stop_fd` says so.
        Raises SensorError, with its exit status and last words, when the program has ended.
        """
        while True:
            line = self._drain()
            if line is not None:
                return line
            if self._ended:
                raise SensorError(self._last_words(), retryable=True)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return None
            ready = {key.fd for key, _ in self._selector.select(left_s)}
            if self._stop_fd in ready:
                return None
            if self._stderr in ready:
                self._drain_errors()

    def end(self) -> None:
        """Kill it with all it has started, and reap it. A monitor has nothing to save: no SIGTERM first."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            try:
                self._process.wait(_REAP_S)
            except subprocess.TimeoutExpired:
                log.warning("process %d does not end, not even when killed", self._process.pid)
        self._selector.close()
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()

    def _drain(self) -> str | None:
        newest: bytes | None = None
        for _ in range(_MAX_CHUNKS):  # bounded: a program that floods may not hold us here
            try:
                chunk = os.read(self._stdout, _CHUNK_BYTES)
            except BlockingIOError:
                break
            if not chunk:
                self._ended = True
                break
            *lines, rest = (self._rest + chunk).split(b"\n")
            if lines and self._skipping:
                lines = lines[1:]
                self._skipping = False
            newest = next((line for line in reversed(lines) if 0 < len(line) <= MAX_LINE_BYTES), newest)
            if len(rest) > MAX_LINE_BYTES or self._skipping:
                rest, self._skipping = b"", True
            self._rest = rest
        return None if newest is None else newest.decode("utf-8", "replace")

    def _drain_errors(self) -> None:
        try:
            chunk = os.read(self._stderr, _CHUNK_BYTES)
        except BlockingIOError:
            return
        if not chunk:
            self._selector.unregister(self._stderr)
            return
        self._errors = (self._errors + chunk)[-_KEPT_ERROR_BYTES:]

    def _last_words(self) -> str:
        try:
            status = self._process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            return "it has closed its output"
        if self._stderr in self._selector.get_map():
            self._drain_errors()
        said = self._errors.decode("utf-8", "replace").split("\n")
        words = next((line.strip() for line in reversed(said) if line.strip()), "")
        return f"it has ended with status {status}" + (f": {words}" if words else "")
