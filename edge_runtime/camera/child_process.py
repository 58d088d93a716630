"""The process of a camera, seen from its parent: started, spoken to, listened to with suspicion, ended and reaped."""

from __future__ import annotations

import array
import contextlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import edge_runtime
from edge_runtime.camera.child_messages import (
    MAX_MESSAGE_BYTES,
    FrameSent,
    FromChild,
    MessageError,
    Report,
    Wanted,
    decode,
)
from edge_runtime.camera.options import CameraOptions
from edge_runtime.camera.shared_frames import ASK, Returns, SlotMemory

log = logging.getLogger(__name__)

_MODULE = "edge_runtime.camera.child"
_KILLED_S = 5.0
"""How long the kernel may take to end a process."""
_BURST_MESSAGES, _MESSAGES_A_SECOND = 1000.0, 100.0
"""Other messages than frames: the most at once, which is more than a socket holds, and in the long run."""
_BURST_FRAMES, _FRAMES_A_SECOND = 2000.0, 2000.0
# A service's own lines to systemd are not the child's; BLAS would start a thread per core, for nothing.
_NOT_INHERITED = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES")
_SET = {"OPENBLAS_NUM_THREADS": "1"}


class Lost(Exception):
    """The process is of no more use; the message says why, as it follows after "its process"."""


class _Bucket:
    """So many at once, and so many a second: what a process may send before it counts as one that floods."""

    def __init__(self, most: float, per_s: float) -> None:
        self._most, self._per_s = most, per_s
        self._left, self._at_s = most, time.monotonic()

    def take(self) -> bool:
        now_s = time.monotonic()
        self._left = min(self._most, self._left + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        self._left -= 1
        return self._left >= 0


class ChildProcess:
    """One run of the child, from its start to its end. Everything but `shut` and `want` is the reading thread's."""

    def __init__(self, options: CameraOptions, wanted: Wanted, level: int) -> None:
        """Start it. It dies with the thread that does (PR_SET_PDEATHSIG). Raises OSError where that cannot be had."""
        self._lock = threading.Lock()  # the socket is open while it is held
        reading, writing = os.pipe()
        self.returns = Returns(writing)
        try:
            self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError:
            self.returns.close()
            os.close(reading)
            raise
        self.memory: SlotMemory | None = None
        self._open = True
        try:
            order = {"options": options.as_dict(), "wanted": wanted.as_dict(), "level": level, "cwd": str(Path.cwd())}
            self._link.send(json.dumps(order).encode())
            environment = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
            numbers = [str(number) for number in (theirs.fileno(), reading, os.getpid())]
            self.process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, *numbers],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # `-m` looks here first: the same package as this one, wherever the service was started
                cwd=Path(edge_runtime.__file__).resolve().parents[1],
                env=environment | _SET,
                pass_fds=(theirs.fileno(), reading),
                start_new_session=True,
            )
        except BaseException:
            self._close()
            raise
        finally:
            theirs.close()
            os.close(reading)
        self._poller = select.poll()
        self._poller.register(self._link, select.POLLIN)
        self._others = _Bucket(_BURST_MESSAGES, _MESSAGES_A_SECOND)
        self._frames = _Bucket(_BURST_FRAMES, _FRAMES_A_SECOND)
        self.started_ns = time.monotonic_ns()
        self.received = 0
        self.asked = False
        self.report: Report | None = None

    def receive(self, timeout_s: float) -> FromChild | None:
        """The next message, None where none comes in time. Raises Lost at its end, and where it is not in order."""
        if not self._poller.poll(max(0.0, timeout_s) * 1000):
            return None
        try:
            # Without room for descriptors: any that come along are closed by the kernel.
            data, _, flags, _ = self._link.recvmsg(MAX_MESSAGE_BYTES)
        except OSError:
            data, flags = b"", 0
        if not data:
            raise Lost("")
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise Lost("sent more than a message may hold and was ended")
        try:
            message = decode(data)
        except MessageError as error:
            raise Lost(f"sent what is no message and was ended ({error})") from None
        # At full pace each frame was asked for; see `_admit`.
        frame = isinstance(message, FrameSent)
        if not ((self.asked or self._frames.take()) if frame else self._others.take()):
            raise Lost("sent too many messages and was ended")
        return message

    def want(self, wanted: Wanted) -> bool:
        """Tell it what is wanted. False where it takes nothing now: to be said again."""
        with self._lock:
            return self._send({"wanted": wanted.as_dict()})

    def remake_memory(self, picture_bytes: int) -> None:
        """Memory for larger pictures, in place of what there is. Raises Lost where it cannot be had."""
        if self.memory is not None:
            if picture_bytes <= self.memory.picture_bytes:
                raise Lost("wanted memory that it has and was ended")
            self.memory.retire()
        try:
            self.memory = SlotMemory(picture_bytes, self.returns)
        except OSError as error:
            raise Lost(f"got no memory for pictures and was ended ({error.strerror})") from None
        message = {"slot_bytes": self.memory.slot_bytes}
        with self._lock:
            sent = self._send(message, [self.memory.descriptor])
        self.memory.close()
        if not sent:
            raise Lost("took no memory for pictures and was ended")

    def _send(self, message: object, descriptors: Sequence[int] = ()) -> bool:
        if not self._open:
            return True
        data = json.dumps(message).encode()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        try:
            # Not by `send_fds`, which forgets the flags: a child that has stopped would stop whoever sets its rate.
            self._link.sendmsg([data], rights, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            pass  # its end is seen by who reads
        return True

    def ask(self) -> None:
        """At full pace: one more picture."""
        if not self.asked:
            self.asked = True
            self.returns.write(ASK)

    def shut(self) -> None:
        """Let it end; who waits for its messages is woken. From any thread."""
        with self._lock, contextlib.suppress(OSError):
            if self._open:
                self._link.shutdown(socket.SHUT_RDWR)

    def end(self, within_s: float) -> int | None:
        """Let it end, kill it after `within_s`, reap it; its exit code, None where the kernel cannot end it."""
        self.shut()
        # Whoever waits for a slot sees the pipe end.
        self.returns.close()
        if self.memory is not None:
            self.memory.retire()
        try:
            if within_s > 0:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return self.process.wait(within_s)
            # A child that was not reaped keeps its number, and that of its group.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            try:
                return self.process.wait(_KILLED_S)
            except subprocess.TimeoutExpired:
                log.error("process %d of a camera was killed and does not end: stuck in a driver?", self.process.pid)
                return None
        finally:
            self._close()

    def _close(self) -> None:
        with self._lock:
            self._open = False
            self._link.close()
        self.returns.close()


def how_it_ended(code: int | None) -> str:
    """What `end` returned, in words that follow after "its process"."""
    if code is None:
        return "closed its connection and cannot be ended"
    if code < 0:
        return f"died ({next((known.name for known in signal.Signals if known == -code), f'signal {-code}')})"
    return f"ended by itself (exit code {code})"
