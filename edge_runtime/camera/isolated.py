"""A camera in a process of its own: whatever happens in there, a crash of a decoder or a driver call that never comes
back, ends that process, and it is started again. See `camera.child` for its other side, and ADR 16 for the reasons.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from edge_runtime.backoff import Backoff
from edge_runtime.camera.child_messages import Ended, FrameSent, LogLine, MemoryWanted, Report, Wanted
from edge_runtime.camera.child_process import ChildProcess, Lost, how_it_ended
from edge_runtime.camera.options import CameraOptions
from edge_runtime.clock import Clock, SystemClock
from edge_runtime.errors import CameraError
from edge_runtime.records.cameras import (
    STOPPED_ON_REQUEST,
    CameraEffort,
    CameraState,
    CameraStatus,
    SourceCounters,
)
from edge_runtime.records.frames import Frame
from edge_runtime.records.spec import InputSpec
from edge_runtime.source_url import redact_text

if TYPE_CHECKING:
    from edge_runtime.camera.av_raw import Assembler

log = logging.getLogger(__name__)

GRACE_S = 5.0
"""A source may be silent for `open_s` or `stall_s`; a process that does not move for so much longer has wedged."""
START_S = 30.0
"""How long a process may take until its camera runs: an interpreter with its libraries, on a loaded device."""
END_S = 1.0
"""How long a process may take to close its source before it is killed."""
SILENT_S = 2.0
"""A process that says nothing for so long, four times what it should, is not `up`: at least, and `stall_s` at least."""
_RESEND_S = 0.2
_DOING = {"starting": "opening", "up": "reading"}


class IsolatedCamera:
    """A Camera that is read in a child process, which is started with the first `read` and again whenever it is lost.

    `options.isolation` is not looked at: the child reads the source as a thread would. A lost process makes the camera
    `down`, with the reason, until its successor brings a picture; `backoff` delays that one. `grace_s`: see GRACE_S.

    The counters advance with what the child tells, so what a lost one had decoded and not yet handed over is in none:
    `decoded` is what came here as frames, plus what the child skipped and found twice. Frames lie in shared memory, as
    the decoder left them; see `shared_frames` for how long.
    """

    def __init__(
        self,
        options: CameraOptions,
        *,
        clock: Clock | None = None,
        backoff: Backoff | None = None,
        grace_s: float = GRACE_S,
    ) -> None:
        self._options = options
        self._clock = clock or SystemClock()
        self._backoff = backoff or Backoff(clock=self._clock)
        self._react_s = max(options.open_s, options.stall_s) + grace_s
        self._on_demand = options.pace == "max"
        self._stop = threading.Event()
        self._changed = threading.Event()
        self._lock = threading.Lock()
        self._life: ChildProcess | None = None
        self._wanted = Wanted()
        self._told: Wanted | None = None
        self._status = CameraStatus("starting", "not opened yet", self._clock.monotonic_ns())
        self._counters = SourceCounters()
        self._effort = CameraEffort()
        self._past = (SourceCounters(), CameraEffort())
        self._heard_ns = 0  # when the child said something, or `read` began to listen; 0 while nobody listens
        self._assembler: Assembler | None = None
        self._ended = False
        self._next_id = 0
        self._last_capture_ns = -1

    @property
    def name(self) -> str:
        return self._options.name

    @property
    def pid(self) -> int | None:
        """The process that reads now, None where none does."""
        with self._lock:
            return None if self._life is None else self._life.process.pid

    def read(self) -> Frame | None:
        """Block until the next wanted frame; None when the source has ended or `stop` was called.

        Raises nothing: a fault is a state with a reason. The thread that reads must live as long as the camera.
        """
        while not self._stop.is_set() and not self._ended:
            try:
                life = self._life or self._begin()
                if life is None:
                    continue
                self._heard_ns = time.monotonic_ns()
                if (frame := self._take(life)) is not None:
                    return frame
            except Lost as lost:
                if not self._stop.is_set():
                    self._lose(str(lost))
            except Exception as error:  # noqa: BLE001
                # One camera's surprise must not end its thread.
                log.warning("camera %s: unexpected fault: %s", self.name, redact_text(traceback.format_exc()))
                self._lose(f"was ended after an unexpected fault: {type(error).__name__}")
            finally:
                self._heard_ns = 0
        return None

    def stop(self) -> None:
        self._stop.set()
        self._changed.set()
        with self._lock:
            life = self._life
        if life is not None:
            life.shut()

    def pause(self) -> None:
        self._want(lambda wanted: replace(wanted, paused=True))

    def resume(self) -> None:
        self._want(lambda wanted: replace(wanted, paused=False))

    def set_cap(self, fps: float | None) -> None:
        self._want(lambda wanted: replace(wanted, cap=fps))

    def set_base(self, fps: float | None) -> None:
        self._want(lambda wanted: replace(wanted, base=fps, base_set=True))

    def expect(self, inputs: Sequence[InputSpec]) -> None:
        self._want(lambda wanted: replace(wanted, inputs=tuple(inputs)))

    def close(self) -> None:
        """End the process; called by the reading thread after the last `read`. Idempotent. Takes up to END_S."""
        with self._lock:
            life, self._life = self._life, None
        if life is not None:
            life.end(END_S)
        if self._stop.is_set() and not self._ended:
            self._enter("stopped", STOPPED_ON_REQUEST)
        self._ended = True

    def status(self) -> CameraStatus:
        """What the process said last; `stalled` where it ought to have said something since."""
        with self._lock:
            status, heard_ns = self._status, self._heard_ns
        silent_s = max(self._options.stall_s, SILENT_S)
        due_ns = heard_ns + round(silent_s * 1e9)
        if not heard_ns or status.state != "up" or time.monotonic_ns() < due_ns:
            return status
        return CameraStatus("stalled", f"its process has said nothing for {silent_s:g} s", due_ns)

    def source(self) -> SourceCounters:
        with self._lock:
            return replace(self._counters)

    def effort(self) -> CameraEffort:
        with self._lock:
            return self._effort

    def _want(self, change: Callable[[Wanted], Wanted]) -> None:
        with self._lock:
            wanted = change(self._wanted)
            if wanted == self._wanted and self._told is self._wanted:
                return  # a rate is set again and again
            self._wanted = wanted
            # Under the lock, so that what is wanted last is told last.
            if self._life is not None and self._life.want(self._wanted):
                self._told = self._wanted
        self._changed.set()

    # --- the reading thread

    def _begin(self) -> ChildProcess | None:
        """Start the child; None where the camera is paused or was stopped meanwhile. Raises Lost."""
        self._changed.clear()
        if self._wanted.paused and not self._stop.is_set():
            self._enter("paused", "paused by a command")
            self._changed.wait()
            return None
        with self._lock:
            wanted = self._told = self._wanted
        level = logging.getLogger("edge_runtime").getEffectiveLevel()
        try:
            life = ChildProcess(self._options, wanted, level)
        except OSError as error:
            raise Lost(f"cannot be started: {error.strerror}") from None
        with self._lock:
            self._life = life
            self._past = (self._counters, self._effort)
        if self._stop.is_set():
            life.shut()
        return life

    def _take(self, life: ChildProcess) -> Frame | None:
        """Hear the child until it brings a frame; None where it has ended or `stop` was called. Raises Lost."""
        if self._on_demand:
            life.ask()
        since_ns = time.monotonic_ns()  # what it did while nobody listened is not held against it
        while not self._stop.is_set():
            if self._told is not self._wanted:
                self._want(lambda wanted: wanted)
            within_s = self._react_s if life.report is not None and life.report.ticks else max(START_S, self._react_s)
            left_s = within_s - (time.monotonic_ns() - since_ns) / 1e9
            message = life.receive(left_s if self._told is self._wanted else min(left_s, _RESEND_S))
            if message is None:
                if time.monotonic_ns() - since_ns >= within_s * 1e9:
                    raise Lost(f"did not react for {within_s:g} s and was ended")
                continue
            self._heard_ns = time.monotonic_ns()
            if isinstance(message, LogLine):
                log.log(message.level, "%s", message.text)
            elif isinstance(message, MemoryWanted):
                life.remake_memory(message.picture_bytes)
                since_ns = time.monotonic_ns()
            elif isinstance(message, FrameSent):
                return self._admit(life, message)
            elif isinstance(message, Ended):
                self._account(life, message.report)
                self._ended = True
                return None
            elif self._account(life, message):
                since_ns = time.monotonic_ns()
        return None

    def _admit(self, life: ChildProcess, sent: FrameSent) -> Frame:
        """Make a frame of what lies in a slot. Raises Lost where that cannot be so."""
        if self._assembler is None:
            from edge_runtime.camera.av_raw import Assembler

            self._assembler = Assembler()
        if life.memory is None or (self._on_demand and not life.asked):
            raise Lost("sent a picture that it was not asked for and was ended")
        try:
            array = life.memory.look(sent.slot, sent.form.size_bytes)
            pixels = self._assembler.assemble(sent.form, array)
        except (ValueError, CameraError) as error:
            raise Lost(f"sent a picture that cannot be and was ended ({error})") from None
        life.asked = False
        life.received += 1
        self._account(life, sent.report or life.report)
        self._backoff.up()
        # The clock is the same in both processes; what it says must be possible, and in order.
        t_capture_ns = max(min(sent.t_capture_ns, time.monotonic_ns()), life.started_ns, self._last_capture_ns + 1)
        self._last_capture_ns = t_capture_ns
        frame = Frame(self.name, self._next_id, t_capture_ns, pixels)
        self._next_id += 1
        return frame

    def _account(self, life: ChildProcess, report: Report | None) -> bool:
        """Take over what the child says of itself; whether it moves, or rests on purpose. Raises Lost."""
        before, life.report = life.report, report
        counters = replace(SourceCounters() if report is None else report.counters)
        effort = CameraEffort() if report is None else report.effort
        if before is not None and report is not None and _went_back(before, report):
            raise Lost("sent counters that count down and was ended")
        # Without `decoded`: see the class.
        counters.decoded = life.received + counters.skipped_rate + counters.duplicate
        with self._lock:
            self._counters = _sum(self._past[0], counters)
            self._effort = CameraEffort(
                decode_cpu_ns=self._past[1].decode_cpu_ns + effort.decode_cpu_ns,
                saved_cpu_ns=self._past[1].saved_cpu_ns + effort.saved_cpu_ns,
                opened=self._past[1].opened + effort.opened,
                backend=effort.backend or self._past[1].backend,
            )
            if report is not None and (report.state != "starting" or self._status.state in ("starting", "paused")):
                # A successor that starts doesn't hide why its predecessor is gone.
                since_ns = min(report.since_ns or life.started_ns, time.monotonic_ns())
                self._status = CameraStatus(report.state, report.reason, since_ns)
        return report is not None and (report.resting or before is None or report.ticks != before.ticks)

    def _lose(self, why: str) -> None:
        """End what is left of the child, tell the reason, wait out the back-off."""
        with self._lock:
            life, self._life = self._life, None
        doing = _DOING.get(self._status.state, f"it was {self._status.state}")
        if life is not None:
            # Without a reason it has closed the socket, and is about to end, or somebody asked for it.
            code = life.end(END_S if not why else 0.0)
            why = why or f"{how_it_ended(code)} while {doing}"
        if self._stop.is_set():
            return
        delay_s = self._backoff.next_delay_s()
        reason = f"its process {why}"
        log.warning("camera %s: down: %s; started again in %.1f s", self.name, reason, delay_s)
        self._enter("down", reason)
        self._stop.wait(delay_s)

    def _enter(self, state: CameraState, reason: str) -> None:
        with self._lock:
            old = self._status
            since_ns = old.since_ns if old.state == state else self._clock.monotonic_ns()
            self._status = CameraStatus(state, reason, since_ns)


def _sum(past: SourceCounters, now: SourceCounters) -> SourceCounters:
    return SourceCounters(
        **{name: getattr(past, name) + getattr(now, name) for name in SourceCounters.__dataclass_fields__}
    )


def _went_back(before: Report, report: Report) -> bool:
    pairs = [
        *((getattr(before.counters, n), getattr(report.counters, n)) for n in SourceCounters.__dataclass_fields__),
        (before.effort.decode_cpu_ns, report.effort.decode_cpu_ns),
        (before.effort.saved_cpu_ns, report.effort.saved_cpu_ns),
        (before.effort.opened, report.effort.opened),
        (before.ticks, report.ticks),
    ]
    return any(now < then for then, now in pairs)
