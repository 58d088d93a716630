"""The process in which a camera of `isolation = "process"` is read: it decodes, and hands pictures to its parent.

`python -m edge_runtime.camera.child CONTROL RETURNS PARENT`: the numbers of an inherited socket (SOCK_SEQPACKET) and of
the reading end of a pipe, and the process id of who started it. On the socket comes one order first (options, which may
hold credentials, and so never stand in arguments or environment), then what is wanted and memory for pictures; see
`child_messages` for what goes back, and `shared_frames` for what comes on the pipe.

It ends with the socket, so that no end of the parent leaves it behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import logging
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_runtime.camera.child_messages import (
    MAX_MESSAGE_BYTES,
    Ended,
    FrameSent,
    FromChild,
    LogLine,
    MemoryWanted,
    Report,
    Wanted,
    encode,
)
from edge_runtime.camera.options import CameraOptions
from edge_runtime.camera.shared_frames import ASK, MAX_PICTURE_BYTES, SLOTS, SlotWriter
from edge_runtime.clock import SystemClock
from edge_runtime.errors import CameraError
from edge_runtime.records.cameras import CameraEffort, CameraStatus, SourceCounters
from edge_runtime.source_url import redact_text
from edge_runtime.threads import set_os_thread_name

if TYPE_CHECKING:
    from edge_runtime.camera.av_raw import Disassembler
    from edge_runtime.camera.protocol import Camera
    from edge_runtime.records.frames import Frame

log = logging.getLogger(__name__)

BEAT_S = 0.5
"""The child says how it stands at least so often."""
_REPORT_S = 0.4
"""A frame brings a report along where the last one is older than this; it need not come alone then."""
_END_S = 0.8
"""How long the camera may take to close, before the process ends anyway; its parent kills it after 1 s."""
_LOG_LINES_A_SECOND = 20
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_OOM_SCORE_STEP = 300


class _Gone(Exception):
    """The parent has closed the socket, or is no more."""


class TickingClock(SystemClock):
    """The system's clock, which counts how often the thread that made it looks: a reading loop does by the packet."""

    def __init__(self) -> None:
        self._reader = threading.get_ident()
        self.ticks = 0

    def monotonic_ns(self) -> int:
        if threading.get_ident() == self._reader:
            self.ticks += 1
        return time.monotonic_ns()


class _ToParent(logging.Handler):
    """Log lines go to the parent, to be written as its own are. What is too much is left out, and counted."""

    def __init__(self, send: Callable[[LogLine], object]) -> None:
        super().__init__()
        self._line_out = send
        self._second = 0
        self._lines = 0
        self._left_out = 0

    def emit(self, record: logging.LogRecord) -> None:
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._lines = second, 0
        self._lines += 1
        if self._lines > _LOG_LINES_A_SECOND:
            self._left_out += 1
            return
        try:
            text = redact_text(self.format(record))
        except Exception:  # noqa: BLE001  a record that cannot be formatted
            self.handleError(record)
            return
        if self._left_out:
            text, self._left_out = f"{text} ({self._left_out} further lines were left out)", 0
        # A level of somebody's own becomes the next lower one.
        level = max((each for each in (10, 20, 30, 40, 50) if each <= record.levelno), default=10)
        self._line_out(LogLine(level, text))


class Child:
    """One camera, read on the thread that calls `run`; a second thread hears and speaks for it meanwhile."""

    def __init__(self, link: socket.socket, returns: int) -> None:
        self._link = link
        self._returns = returns
        os.set_blocking(returns, False)
        self._clock = TickingClock()
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._given: tuple[int, int] | None = None  # descriptor and slot size of a memory that came
        self._writer: SlotWriter | None = None
        self._asked = 0
        self._camera: Camera | None = None
        self._applying = threading.Lock()
        self._wanted = Wanted()
        self._gone = False
        self._done = threading.Event()
        self._waiting = False
        self._reader = threading.get_ident()
        self._last_report_ns = 0
        self._last_status: CameraStatus | None = None
        self._failed: CameraStatus | None = None  # of ours, in place of the camera's
        self._refused = 0

    def run(self) -> None:
        """From the first order to the end."""
        order = self._receive()
        if order is None:
            return
        options = CameraOptions(**order["options"])
        with contextlib.suppress(OSError):
            os.chdir(order["cwd"])
        set_os_thread_name(f"cam-{options.name}")
        logging.captureWarnings(True)
        logging.getLogger().handlers[:] = [_ToParent(self._say_line)]
        logging.getLogger().setLevel(order["level"])
        self._apply(Wanted.of(order["wanted"]))
        threading.Thread(target=self._listen, name="link", daemon=True).start()
        try:
            self._read(options)
        except _Gone:
            pass
        except CameraError as error:  # an address that no backend knows
            self._failed = CameraStatus("down", redact_text(str(error)), time.monotonic_ns())
        if self._camera is not None:
            self._camera.close()
        if not self._gone:
            with contextlib.suppress(_Gone):
                self._send(lambda: Ended(self._report()), wait=True)
        self._done.set()

    # --- the reading thread

    def _read(self, options: CameraOptions) -> None:
        from edge_runtime.camera.av_raw import Disassembler
        from edge_runtime.camera.open import open_camera

        camera = open_camera(replace(options, isolation="thread"), clock=self._clock)
        disassembler = Disassembler()
        with self._changed:
            self._camera = camera
            gone = self._gone
        if gone:
            raise _Gone
        self._apply()
        on_demand = options.pace == "max"
        while not on_demand or self._await(lambda: self._asked > 0):
            frame = camera.read()
            if frame is None:
                return
            try:
                self._hand_over(frame, disassembler)
            except CameraError as error:
                self._refuse(error)
            else:
                self._asked -= on_demand
                self._failed = None

    def _refuse(self, error: CameraError) -> None:
        """A picture that cannot be handed over is counted with the damaged ones: `up` would be a lie."""
        self._refused += 1
        if self._failed is None:
            self._failed = CameraStatus("down", redact_text(str(error)), time.monotonic_ns())
            log.warning("a picture cannot be handed over: %s", error)

    def _hand_over(self, frame: Frame, disassembler: Disassembler) -> None:
        """Copy a picture into a slot and tell of it; waits for a slot, as a camera waits for who reads it.

        Raises CameraError where the picture is of a kind that cannot be handed over.
        """
        form, planes = disassembler.take_apart(frame.pixels)
        if form.size_bytes > MAX_PICTURE_BYTES:
            raise CameraError(
                f"a picture of {form.width} x {form.height} px takes {form.size_bytes >> 20} MiB, and "
                f"{MAX_PICTURE_BYTES >> 20} MiB can be handed over",
                remedy='let the camera send smaller ones, or use isolation = "thread"',
            )
        if self._writer is None or not self._writer.fits(form):
            self._writer = self._new_writer(form.size_bytes)
        writer = self._writer
        self._await(lambda: bool(writer.free))
        slot = writer.put(form, planes)
        self._send(lambda: FrameSent(slot, frame.t_capture_ns, form, self._report_if_due()), wait=True)

    def _new_writer(self, picture_bytes: int) -> SlotWriter:
        self._send(lambda: MemoryWanted(picture_bytes), wait=True)
        with self._changed:
            self._waiting = True
            while self._given is None:
                if self._gone:
                    raise _Gone
                self._changed.wait()
            (descriptor, slot_bytes), self._given = self._given, None
            self._waiting = False
        # What still comes back on the pipe was of the old memory: everything of it was written before the new one came.
        self._collect(None)
        return SlotWriter(descriptor, slot_bytes)

    def _await(self, condition: Callable[[], bool]) -> bool:
        """Wait for what comes on the pipe. Always true; raises _Gone."""
        poller = select.poll()
        poller.register(self._returns, select.POLLIN)
        poller.register(self._link, 0)  # its end is told in any case
        self._collect(self._writer)
        while not condition():
            self._waiting = True
            ready = poller.poll()
            self._waiting = False
            if any(descriptor == self._link.fileno() for descriptor, _ in ready):
                raise _Gone
            self._collect(self._writer)
        return True

    def _collect(self, writer: SlotWriter | None) -> None:
        while True:
            try:
                came = os.read(self._returns, 4096)
            except BlockingIOError:
                return
            if not came:
                raise _Gone
            for byte in came:
                if byte == ASK:
                    self._asked += 1
                elif writer is not None and byte < SLOTS:
                    writer.free.add(byte)

    # --- either thread

    def _send(self, message: Callable[[], FromChild], *, wait: bool) -> bool:
        """Send what `message` makes, in the order in which it was made. Raises _Gone."""
        poller: select.poll | None = None
        while True:
            try:
                with self._sending:
                    self._link.send(encode(message()), socket.MSG_DONTWAIT)
                return True
            except BlockingIOError:
                if not wait:
                    return False
            except OSError:
                raise _Gone from None
            if poller is None:
                poller = select.poll()
                poller.register(self._link, select.POLLOUT)
            self._waiting = True
            poller.poll()
            self._waiting = False

    def _say_line(self, line: LogLine) -> None:
        # With the report that goes with it: a change of state is logged as it happens.
        with contextlib.suppress(_Gone):
            if self._send(lambda: line, wait=False):
                self._send(self._report, wait=False)

    def _report(self) -> Report:
        camera = self._camera
        status = self._failed or (camera.status() if camera is not None else None)
        if status is None:
            status = CameraStatus("starting", "its process is starting", 0)
        self._last_report_ns, self._last_status = time.monotonic_ns(), status
        counters = SourceCounters() if camera is None else camera.source()
        counters.corrupt += self._refused
        return Report(
            status.state,
            status.reason,
            status.since_ns,
            counters,
            CameraEffort() if camera is None else camera.effort(),
            self._clock.ticks,
            self._resting(),
        )

    def _report_if_due(self) -> Report | None:
        assert self._camera is not None
        due = time.monotonic_ns() - self._last_report_ns > _REPORT_S * 1e9
        return self._report() if due or self._camera.status() != self._last_status else None

    def _resting(self) -> bool:
        """Whether the reading thread waits for something of ours: back-off, pause, a cap, a slot, the parent.

        All of these are waits of Python's own; a driver that is stuck is a call that comes from another module.
        """
        if self._waiting:
            return True
        frame = sys._current_frames().get(self._reader)
        return frame is not None and frame.f_code.co_filename == threading.__file__

    # --- the second thread

    def _listen(self) -> None:
        set_os_thread_name("link")
        poller = select.poll()
        poller.register(self._link, select.POLLIN)
        try:
            while not self._done.is_set():
                left_s = BEAT_S - (time.monotonic_ns() - self._last_report_ns) / 1e9
                if left_s <= 0:
                    self._send(self._report, wait=False)
                elif not poller.poll(left_s * 1000):
                    continue
                elif (message := self._receive()) is None:
                    break
                elif "wanted" in message:
                    self._apply(Wanted.of(message["wanted"]))
        except _Gone:
            pass
        except Exception:
            # Without this thread nobody could end the other one.
            log.exception("the link to the parent is lost")
        if self._done.is_set():
            return
        with self._changed:
            self._gone = True
            camera = self._camera
            self._changed.notify_all()
        if camera is not None:
            camera.stop()
        self._done.wait(_END_S)
        os._exit(0)

    def _receive(self) -> dict[str, Any] | None:
        """The next message, None at the end. Memory that comes with one is kept for the reading thread."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._link, MAX_MESSAGE_BYTES, 1)
        except OSError:
            return None
        if not data:
            return None
        message: dict[str, Any] = json.loads(data)
        if descriptors:
            with self._changed:
                self._given = descriptors[0], message["slot_bytes"]
                self._changed.notify_all()
        return message

    def _apply(self, wanted: Wanted | None = None) -> None:
        """Let the camera do what is wanted: from now on, or what was wanted before there was a camera."""
        with self._applying:
            if wanted is not None:
                self._wanted = wanted
            if (camera := self._camera) is None:
                return
            camera.expect(self._wanted.inputs)
            if self._wanted.base_set:
                camera.set_base(self._wanted.base)
            camera.set_cap(self._wanted.cap)
            (camera.pause if self._wanted.paused else camera.resume)()


def _settle(parent: int) -> None:
    """First in line when memory runs out, without a way to more rights, without core files, and never alone.

    The terminal's signals do not come here, and systemd's to all of a service are the parent's to act on.
    """
    faulthandler.enable()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # a kernel without it
        own = Path("/proc/self/oom_score_adj")
        own.write_text(str(min(1000, int(own.read_text("ascii")) + _OOM_SCORE_STEP)), encoding="ascii")
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it had ended before the line above
        os._exit(1)


def main() -> None:
    """Read one camera. Ends the process by itself: a library's own end can hang or crash."""
    control, returns, parent = (int(argument) for argument in sys.argv[1:4])
    _settle(parent)
    try:
        Child(socket.socket(fileno=control), returns).run()
    except BaseException:
        log.exception("the camera's process ends")  # to the parent, without credentials
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
