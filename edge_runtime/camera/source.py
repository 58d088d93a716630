"""The one reading loop behind every camera: open, stamp, skip, pace, retry, tell the state."""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence

from edge_runtime.backoff import Backoff
from edge_runtime.camera.ledger import Ledger, StateLog
from edge_runtime.camera.liveness import Liveness
from edge_runtime.camera.pacing import AHEAD_NS, Pacer, RateCap, Timeline
from edge_runtime.camera.session import INTERRUPTED, REFUSED, STALLED, Intake, Pace, Picture, Session
from edge_runtime.clock import Clock, SystemClock
from edge_runtime.errors import CameraError
from edge_runtime.records.cameras import STOPPED_ON_REQUEST, CameraEffort, CameraState, CameraStatus, SourceCounters
from edge_runtime.records.frames import Frame
from edge_runtime.records.spec import InputSpec
from edge_runtime.source_url import redact_text

log = logging.getLogger(__name__)

REFUSED_S = 30.0
"""After a refused password: wait at least so long. Cameras lock accounts after a few attempts (typically 3 to 10 in
some minutes)."""
_REPLAY_NS = 60_000_000_000
"""More than a live playlist holds."""


class SourceCamera:
    """A Camera over sessions that `opener` makes.

    `live`: the end of the stream is a fault and is reconnected. Otherwise the source is a file: paced with
    `pace = "realtime"` (`t_capture_ns` is the due time), as fast as `read` is called with `"max"`, begun
    again at its end with `loop`. `fps` caps live and paced sources by capture time; with `"max"` it is not used, and
    `set_cap` makes `read` wait instead: no picture is lost.

    Faults are retried for ever with `backoff`, a missing or damaged file too: it may be put right; a refused password
    after `refused_s` at the earliest. Only an error that is not retryable ends the camera: it stays `down` with the
    reason and `read` returns None.

    `open_s` and `stall_s` are a live source's time-outs. A session keeps them as well as it can; `status` does not
    depend on that: it tells of an open or a read that did not come back in time, too.
    """

    def __init__(
        self,
        name: str,
        opener: Callable[[Intake], Session],
        *,
        live: bool,
        fps: float | None = None,
        pace: Pace = "realtime",
        loop: bool = True,
        clock: Clock | None = None,
        backoff: Backoff | None = None,
        end_reason: str = "end of file",
        open_s: float | None = None,
        stall_s: float | None = None,
        refused_s: float = REFUSED_S,
    ) -> None:
        self._name = name
        self._opener = opener
        self._live = live
        self._paced = not live and pace == "realtime"
        self._full_pace = not live and pace == "max"
        self._loop = loop
        self._end_reason = end_reason
        self._clock = clock or SystemClock()
        self._backoff = backoff or Backoff(clock=self._clock)
        self._fps = None if self._full_pace else fps
        self._limit: float | None = None
        self._cap = RateCap(self._fps)
        self._timeline = Timeline()
        self._pacer = Pacer()
        self._ledger = Ledger(self._clock)
        self._log = StateLog(name, self._clock)
        self._refused_s = refused_s
        self._liveness = Liveness(self._ledger, self._log, open_s, stall_s, self._clock) if live else None
        self._stop = threading.Event()
        self._paused = False
        self._rates = threading.Lock()
        self._inputs: tuple[InputSpec, ...] = ()
        self._last_pts_ns: int | None = None
        self._seam_pts_ns: int | None = None
        self._changed = threading.Event()
        self._session: Session | None = None
        self._pictures: Iterator[Picture] = iter(())
        self._pass_delivered = False
        self._skipped_before = 0
        self._passed = 0  # packets since the last picture
        self._ended = False
        self._surprise: str | None = None  # what was logged of the last one
        self._next_id = 0
        self._last_capture_ns = -1

    @property
    def name(self) -> str:
        return self._name

    @property
    def reanchored(self) -> int:
        """How often a paced file fell more than a second behind and its schedule was moved to now."""
        return self._pacer.reanchored

    def read(self) -> Frame | None:
        """Block until the next wanted frame; None when the source has ended or `stop` was called.

        Raises nothing: a fault is a state with a reason.
        """
        while not self._stop.is_set() and not self._ended:
            if self._paused:
                self._rest()
                continue
            if self._full_pace and not self._await_slot():
                continue
            try:
                picture = self._next_picture()
            except CameraError as error:
                if error.code == INTERRUPTED:
                    self._close_session()
                else:
                    self._lose(error)
                continue
            except Exception as error:  # noqa: BLE001
                # One camera's surprise must not end its thread, nor fill the log. What it says may hold the address.
                place = f"{type(error).__name__} {traceback.format_tb(error.__traceback__)}"
                if place != self._surprise:
                    self._surprise = place
                    log.warning("camera %s: unexpected fault: %s", self._name, redact_text(traceback.format_exc()))
                self._lose(CameraError(f"unexpected fault: {type(error).__name__}", retryable=True))
                continue
            frame = None if picture is None else self._admit(picture)
            # One that is not wanted must not stay in memory while the next one is decoded.
            picture = None
            if frame is not None:
                return frame
        return None

    def stop(self) -> None:
        """Make `read` return None: at once where it waits, after its read time-out where it reads."""
        self._stop.set()
        self._changed.set()

    def pause(self) -> None:
        self._paused = True
        self._changed.set()

    def resume(self) -> None:
        self._paused = False
        self._changed.set()

    def set_cap(self, fps: float | None) -> None:
        with self._rates:
            self._limit = fps
            self._change_rate()

    def set_base(self, fps: float | None) -> None:
        with self._rates:
            self._fps = None if self._full_pace else fps
            self._change_rate()

    def _change_rate(self) -> None:
        wanted = [rate for rate in (self._fps, self._limit) if rate is not None]
        self._cap.change(min(wanted) if wanted else None)
        self._changed.set()

    def expect(self, inputs: Sequence[InputSpec]) -> None:
        self._inputs = tuple(inputs)

    def close(self) -> None:
        """Release the source; called by the reading thread after the last `read`. Idempotent."""
        self._close_session()
        if self._stop.is_set() and not self._ended:
            self._ledger.enter("stopped", STOPPED_ON_REQUEST)
        self._ended = True

    def status(self) -> CameraStatus:
        return self._ledger.status() if self._liveness is None else self._liveness.status()

    def source(self) -> SourceCounters:
        return self._ledger.counters()

    def effort(self) -> CameraEffort:
        return self._ledger.effort()

    # --- for sessions (Intake)

    @property
    def ledger(self) -> Ledger:
        return self._ledger

    @property
    def inputs(self) -> Sequence[InputSpec]:
        return self._inputs

    def early(self, pts_ns: int | None, t_packet_ns: int, skipped: int = 0) -> tuple[int, int]:
        """See Intake. A paced file's picture is captured when it is due, which its presentation time tells."""
        if self._full_pace:
            return 0, 0
        t_capture_ns = t_packet_ns
        if self._paced:
            reach_ns = self._timeline.reach_ns(skipped)
            if pts_ns is None or self._last_pts_ns is None or abs(pts_ns - self._last_pts_ns) > reach_ns:
                return 0, self._cap.step_ns
            t_capture_ns = self._last_capture_ns + pts_ns - self._last_pts_ns
            self._passed = skipped + 1
            if skipped and not self._live:
                self._hold_back(t_capture_ns - AHEAD_NS)
        if self._ledger.status().state != "up":
            # Whatever the cap: only a picture shows that the source is well.
            return 0, self._cap.step_ns
        return self._cap.early_ns(t_capture_ns), self._cap.step_ns

    def _hold_back(self, until_ns: int) -> None:
        """While pictures are passed over nobody else waits, and a file would be through at once."""
        while True:
            self._changed.clear()
            if self._stop.is_set():
                raise CameraError("to stop", code=INTERRUPTED, retryable=True)
            if self._paused:
                self._rest()
                return
            if (wait_ns := until_ns - self._clock.monotonic_ns()) <= 0 or self._changed.wait(wait_ns / 1e9):
                return

    def arrived(self) -> None:
        if self._liveness is None:
            return
        if self._stop.is_set() or self._paused:
            raise CameraError("to stop or to pause", code=INTERRUPTED, retryable=True)
        self._liveness.arrived(self._cap.step_ns)

    def play(self, in_bursts: bool) -> None:
        """For a live source, when it is opened: does it come in bursts (HLS) that are to be played at their pace?

        Its pictures are then captured when they are due, like a file's; otherwise when they come.
        """
        self._paced = in_bursts

    def _rest(self) -> None:
        """Paused: wait for `resume` or `stop`. A file stays open where it is; a live source would only go stale."""
        if self._live:
            self._close_session()
        self._enter("paused", "paused by a command")
        while self._paused and not self._stop.is_set():
            self._changed.clear()
            if self._paused and not self._stop.is_set():
                self._changed.wait()
        self._pacer.restart()
        self._ledger.enter("starting", "resumed")

    def _await_slot(self) -> bool:
        """Wait until the cap lets the next picture be read, with none in hand. False: paused or stopped meanwhile."""
        while True:
            self._changed.clear()
            if self._paused or self._stop.is_set():
                return False
            now_ns = self._clock.monotonic_ns()
            if (wait_ns := self._cap.wait_ns(now_ns)) == 0:
                # false where the rate became 0 since
                if self._cap.wants(now_ns):
                    return True
                continue
            self._changed.wait(wait_ns / 1e9)

    def _next_picture(self) -> Picture | None:
        """The next picture; None where a pass or the source has ended. Raises CameraError."""
        picture: Picture | None = None
        try:
            if self._session is None:
                self._open()
            if self._liveness is not None:
                self._liveness.asked()
            picture = next(self._pictures, None)
        finally:
            if self._liveness is not None:
                self._liveness.answered(picture is not None)
        if picture is not None:
            self._pass_delivered = True
            return picture
        self._close_session()
        if self._live:
            raise CameraError("the source closed the stream", retryable=True)
        if not self._pass_delivered and self._ledger.damage()[2] == self._skipped_before:
            # Never begin again at once: a loop over a file without pictures would spin.
            raise CameraError("no picture in it could be decoded", retryable=True)
        if not self._loop:
            self._ended = True
            self._ledger.enter("stopped", self._end_reason)
        return None

    def _open(self) -> None:
        if self._liveness is not None:
            self._liveness.opening()
        self._session = self._opener(self)
        # A file's times go on over its end, whether or not its last pictures were decoded.
        self._timeline.splice(self._session.interval_ns, 0 if self._live else self._passed)
        self._seam_pts_ns = self._last_pts_ns if self._paced and self._ledger.status().state == "stalled" else None
        self._last_pts_ns = None
        self._pictures = self._session.pictures()
        self._pass_delivered = False
        self._skipped_before = self._ledger.damage()[2]
        if self._liveness is not None:
            self._liveness.opened()
            # Where a source that comes in bursts goes on has nothing to do with where it broke off.
            self._pacer.restart()

    def _enter(self, state: CameraState, reason: str) -> None:
        self._ledger.enter(state, reason)
        self._log.tell(state, reason)

    def _admit(self, picture: Picture) -> Frame | None:
        """Stamp, cap and pace one picture; None where it is not wanted or `stop` came."""
        if self._is_replayed(picture.pts_ns):
            self._ledger.count(decoded=1, duplicate=1)
            return None
        media_ns = self._timeline.stamp(picture.pts_ns, picture.skipped)
        self._passed = 0
        if media_ns is None:
            self._ledger.count(decoded=1, duplicate=1)
            return None
        t_capture_ns = self._due_ns(media_ns) if self._paced else picture.t_packet_ns
        # With reordered pictures packet times are not in picture order; capture times always are.
        t_capture_ns = max(t_capture_ns, self._last_capture_ns + 1)
        self._last_capture_ns = t_capture_ns
        self._last_pts_ns = picture.pts_ns
        kept = self._full_pace or self._cap.wants(t_capture_ns)
        if kept and self._paced:
            due_ns = self._await_due(t_capture_ns, media_ns)
            if due_ns is None:
                return None
            t_capture_ns = self._last_capture_ns = due_ns
        self._backoff.up()
        if self._ledger.deliver(kept=kept):
            self._log.tell("up", f"{picture.pixels.width} x {picture.pixels.height} px")
        if not kept:
            return None
        frame = Frame(self._name, self._next_id, t_capture_ns, picture.pixels)
        self._next_id += 1
        return frame

    def _await_due(self, due_ns: int, media_ns: int) -> int | None:
        """When a picture in hand was due, or a pause ended; waits. None: to stop, or it came live and is too old."""
        while (wait_ns := due_ns - self._clock.monotonic_ns()) > 0:
            self._changed.clear()
            if self._stop.is_set():
                return None
            if self._paused:
                self._rest()
                if self._live or self._stop.is_set():
                    return None
                due_ns = self._pacer.due_ns(media_ns, self._clock.monotonic_ns())
                continue
            self._changed.wait(wait_ns / 1e9)
        return due_ns

    def _is_replayed(self, pts_ns: int | None) -> bool:
        """Opened again after a stall, HLS whose playlist stands still begins with the last segments once more."""
        if self._seam_pts_ns is None or pts_ns is None:
            return False
        if self._seam_pts_ns - _REPLAY_NS < pts_ns <= self._seam_pts_ns:
            return True
        self._seam_pts_ns = None
        return False

    def _due_ns(self, media_ns: int) -> int:
        before = self._pacer.reanchored
        due_ns = self._pacer.due_ns(media_ns, self._clock.monotonic_ns())
        if before == 0 and self._pacer.reanchored:
            log.warning(
                "camera %s: decoding fell more than 1 s behind real time; counted, not logged again", self._name
            )
        return due_ns

    def _lose(self, error: CameraError) -> None:
        self._close_session()
        if self._stop.is_set():
            return  # nobody asks any more, and a successor may have its name
        reason = redact_text(f"{error.message} ({error.remedy})" if error.remedy else error.message)
        self._enter("stalled" if error.code == STALLED else "down", reason)
        if not error.retryable:
            self._ended = True
            return
        wait_s = self._backoff.next_delay_s(at_least_s=self._refused_s if error.code == REFUSED else 0.0)
        t_end_ns = self._clock.monotonic_ns() + round(wait_s * 1e9)
        while (wait_ns := t_end_ns - self._clock.monotonic_ns()) > 0:
            self._changed.clear()
            # A changed cap wakes it as well, and does not end the wait.
            if self._stop.is_set() or self._paused:
                return
            self._changed.wait(wait_ns / 1e9)

    def _close_session(self) -> None:
        session, self._session = self._session, None
        # Dropping the generator first: it reads from the container that is closed next.
        self._pictures = iter(())
        if session is not None:
            try:
                session.close()
            except Exception:  # noqa: BLE001  what a library makes of a closed door is no other camera's trouble
                log.warning("camera %s: cannot be closed: %s", self._name, redact_text(traceback.format_exc()))
