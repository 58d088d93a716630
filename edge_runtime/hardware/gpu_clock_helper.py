"""Caps the GPU's clock for the daemon, which is not root: `python -m edge_runtime.hardware.gpu_clock_helper`.

One line a request on a Unix socket: `cap HZ` or `free`, answered by `ok HZ CEILING` (what is in force, 0 for no cap,
and what would hold without one, Hz; 0: not known) or `error WHY`. A cap is a lease: it ends when the client goes, says
`free`, or says neither for 5 s. Of several clients the lowest cap holds. It writes the one file `max_freq` and nothing
else.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import selectors
import signal
import socket
import stat
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from edge_runtime.errors import EXIT_DONE, EXIT_FAILED
from edge_runtime.hardware.gpu_clock import LEASE_S, MAX_LINE_BYTES, NOTE, SOCKET, GpuClock

log = logging.getLogger(__name__)

MAX_CLIENTS = 8
RETRY_S = 1.0
"""A cap that could not be freed is tried again so often."""
_CAP = re.compile(rb"cap ([0-9]{1,11})")


@dataclass(slots=True)
class _Client:
    """Whoever is connected. `until_s`: when it is dropped unless it says something."""

    sock: socket.socket
    until_s: float
    data: bytes = b""
    cap_hz: int | None = None


class ClockHelper:
    """Serves `listener`, on the caller's thread, until something can be read from `wake`."""

    def __init__(self, clock: GpuClock, listener: socket.socket, wake: socket.socket, lease_s: float = LEASE_S) -> None:
        self._clock = clock
        self._listener = listener
        self._wake = wake
        self._lease_s = lease_s
        self._clients: dict[int, _Client] = {}
        self._selector = selectors.DefaultSelector()
        self._retry_s: float | None = None
        self._trouble: str | None = None

    def run(self) -> None:
        """Until it is woken. No cap is left behind."""
        self._note(self._clock.recover())
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        try:
            while self._turn():
                pass
        finally:
            for client in list(self._clients.values()):
                self._drop(client)
            self._clock.close()
            self._selector.close()

    def _turn(self) -> bool:
        ends = [client.until_s for client in self._clients.values()]
        if self._retry_s is not None:
            ends.append(self._retry_s)
        timeout_s = max(0.0, min(ends) - time.monotonic()) if ends else None
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._wake:
                return False
            if key.fileobj is self._listener:
                self._accept()
            elif (client := self._clients.get(key.fd)) is not None:
                self._hear(client)
        now_s = time.monotonic()
        for client in list(self._clients.values()):
            if client.until_s <= now_s:
                self._drop(client)
        if self._retry_s is not None and self._retry_s <= now_s:
            self._apply()
        return True

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # it is gone again
            return
        if len(self._clients) >= MAX_CLIENTS:
            sock.close()
            return
        sock.setblocking(False)
        self._clients[sock.fileno()] = _Client(sock, time.monotonic() + self._lease_s)
        self._selector.register(sock, selectors.EVENT_READ)

    def _hear(self, client: _Client) -> None:
        try:
            data = client.sock.recv(4 * MAX_LINE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(client)
            return
        *lines, client.data = (client.data + data).split(b"\n")
        for line in lines:
            if not self._answer(client, self._obey(client, line)):
                return
        if len(client.data) > MAX_LINE_BYTES:
            self._answer(client, "error no line is that long")
            self._drop(client)

    def _obey(self, client: _Client, line: bytes) -> str:
        before = client.cap_hz
        found = _CAP.fullmatch(line)
        if found is None and line != b"free":
            return "error there is only: cap HZ, free"
        wanted = None if found is None else int(found[1])
        # not left to the lowest cap: another client's may hide this one for now
        if wanted is not None and (reason := self._clock.refusal(wanted)) is not None:
            return f"error {reason}"
        client.cap_hz = wanted
        if (reason := self._apply()) is not None:
            client.cap_hz = before
            self._apply()
            return f"error {reason}"
        client.until_s = time.monotonic() + self._lease_s
        return f"ok {self._lowest() or 0} {self._clock.ceiling_hz() or 0:.0f}"

    def _lowest(self) -> int | None:
        return min((each.cap_hz for each in self._clients.values() if each.cap_hz is not None), default=None)

    def _apply(self) -> str | None:
        reason = self._clock.cap(self._lowest())
        self._note(reason)
        return reason

    def _note(self, reason: str | None) -> None:
        """Come back to a cap that is in force, and could not be changed for this reason."""
        if reason is None or not self._clock.capped:
            self._retry_s = self._trouble = None
            return
        self._retry_s = time.monotonic() + RETRY_S
        if reason != self._trouble:
            log.error("the GPU's clock could not be set, and is tried again: %s", reason)
        self._trouble = reason

    @staticmethod
    def _answer(client: _Client, text: str) -> bool:
        """False where the client takes no answers: it will not be there for long."""
        try:
            return client.sock.send(f"{text}\n".encode()) > 0
        except OSError:
            client.until_s = 0.0
            return False

    def _drop(self, client: _Client) -> None:
        self._clients.pop(client.sock.fileno(), None)
        with suppress(KeyError):
            self._selector.unregister(client.sock)
        if client.cap_hz is not None:
            self._apply()
        client.sock.close()  # last: who sees this end may count on it


def listen(path: Path) -> socket.socket:
    """A socket that the owner and the group may use. Raises OSError, also where another helper listens there."""
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise FileExistsError(f"{path} is no socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(os.fspath(path))
            except ConnectionRefusedError:
                path.unlink()
            else:
                raise FileExistsError(f"another helper listens on {path}")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o117)
    try:
        listener.bind(os.fspath(path))
        listener.listen(MAX_CLIENTS)
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(before)
    return listener


def main(arguments: Sequence[str]) -> int:
    """Serve until SIGTERM or SIGINT; 0, or 1 where the socket cannot be."""
    parser = argparse.ArgumentParser(
        prog="edge_runtime.hardware.gpu_clock_helper", description="Caps the GPU's clock for the edge-runtime daemon."
    )
    parser.add_argument("--root", type=Path, default=Path("/"), metavar="DIR", help="where sys/ is (default /)")
    parser.add_argument("--socket", type=Path, default=SOCKET, metavar="PATH", help=f"default {SOCKET}")
    parser.add_argument("--note", type=Path, default=NOTE, metavar="PATH", help=f"what was capped (default {NOTE})")
    parser.add_argument("--lease-s", type=float, default=LEASE_S, metavar="S", help=f"default {LEASE_S:g}")
    parsed = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    ours, wake = socket.socketpair()
    with ours, wake:
        ours.setblocking(False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)  # the byte in the pipe is what counts
        signal.set_wakeup_fd(ours.fileno())
        try:
            listener = listen(parsed.socket)
        except OSError as error:
            log.error("the socket cannot be: %s", error)
            return EXIT_FAILED
        with listener:
            clock = GpuClock(parsed.root, note=parsed.note)
            log.info("listening on %s; %s", parsed.socket, clock.find() or "the GPU's clock can be capped")
            try:
                ClockHelper(clock, listener, wake, parsed.lease_s).run()
            finally:
                with suppress(OSError):
                    parsed.socket.unlink()
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
