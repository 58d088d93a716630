"""The cap of the GPU's clock as the daemon has it: asked for at the helper, which is root."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from edge_runtime.backoff import Backoff
from edge_runtime.hardware.gpu_clock import LEASE_S, MAX_LINE_BYTES, SOCKET, GpuClock

ANSWER_S = 0.2
"""The most that a call waits for the helper."""
RENEW_S = LEASE_S / 5

_ROOT = Path("/")


class HelperClock:
    """Implements ClockControl over the helper's socket. Connects when a cap is wanted, and again, after a while, when
    it was lost. The helper takes the cap away when this process ends, however that is."""

    def __init__(self, path: Path = SOCKET, root: Path = _ROOT, *, backoff: Backoff | None = None) -> None:
        self._path = path
        self._files = GpuClock(root)
        self._backoff = backoff or Backoff(base_s=1.0, limit_s=30.0)
        self._sock: socket.socket | None = None
        self._wanted_hz: float | None = None
        self._asked_s = self._retry_s = 0.0
        self._reason: str | None = None
        self._ceiling_hz: float | None = None

    def find(self) -> str | None:
        self._retry_s = 0.0
        # a cap that is held stays: who looks again for other steps does not want a moment without it
        held_hz = None if self._sock is None else self._wanted_hz
        reason = self._ask("free" if held_hz is None else f"cap {held_hz:.0f}")
        if held_hz is None:
            self._close()
        if reason is None and not self.steps_hz():
            return "the GPU's clock has no steps that are known"
        return reason

    def steps_hz(self) -> tuple[float, ...]:
        if self._ceiling_hz is None:
            return ()
        # the files alone do not tell a cap from a ceiling
        return tuple(step for step in self._files.all_steps_hz() if step <= self._ceiling_hz)

    def hz(self) -> float | None:
        return self._files.hz()

    def cap(self, hz: float | None) -> str | None:
        if hz is None:
            reason = self._ask("free") if self._sock is not None else None
            self._close()
            return reason
        if hz == self._wanted_hz and time.monotonic() < self._asked_s + RENEW_S:
            return self._reason
        self._asked_s = time.monotonic()
        self._reason = self._ask(f"cap {hz:.0f}")
        self._wanted_hz = hz
        return self._reason

    def close(self) -> None:
        self._close()

    def _ask(self, line: str) -> str | None:
        """Send a line and take the answer; why it was not done, None where it was."""
        now_s = time.monotonic()
        if self._sock is None and now_s < self._retry_s:
            return self._reason or "the helper was away a moment ago"
        try:
            answer = self._exchange(line, now_s + ANSWER_S)
        except OSError as error:
            self._close()
            self._retry_s = time.monotonic() + self._backoff.next_delay_s()
            why = os.strerror(error.errno) if error.errno else str(error) or type(error).__name__
            return f"no answer from the helper on {self._path}: {why}"
        self._backoff.up()
        word, _, rest = answer.partition(" ")
        if word != "ok":
            return rest or "the helper's answer is not understood"
        _, _, ceiling = rest.partition(" ")
        self._ceiling_hz = float(ceiling) if ceiling.isdecimal() and int(ceiling) else None
        return None

    def _exchange(self, line: str, end_s: float) -> str:
        if self._sock is None:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.settimeout(_left_s(end_s))
                sock.connect(os.fspath(self._path))
            except OSError:
                sock.close()
                raise
            self._sock = sock
        self._sock.settimeout(_left_s(end_s))
        self._sock.sendall(f"{line}\n".encode())
        data = b""
        while not data.endswith(b"\n"):
            self._sock.settimeout(_left_s(end_s))
            more = self._sock.recv(1024)
            if not more:
                raise ConnectionResetError("it has closed the connection")
            data += more
            if len(data) > 16 * MAX_LINE_BYTES:
                raise ConnectionResetError("its answer has no end")
        return data.decode("ascii", "replace").strip()

    def _close(self) -> None:
        self._wanted_hz = None
        if self._sock is not None:
            self._sock.close()
            self._sock = None


def _left_s(end_s: float) -> float:
    left_s = end_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("it takes too long")
    return left_s
