"""The one reading loop behind every camera: open, stamp, skip, pace, retry, tell the state."""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from edge_runtime.backoff import Backoff
from edge_runtime.camera.pacing import JUMP_NS, Pacer, RateCap, Timeline
from edge_runtime.clock import Clock, SystemClock
from edge_runtime.errors import CameraError
from edge_runtime.records.cameras import (
    STOPPED_ON_REQUEST,
    CameraEffort,
    CameraState,
    CameraStatus,
    SourceCounters,
)
from edge_runtime.records.frames import Frame, Pixels
from edge_runtime.records.spec import InputSpec
from edge_runtime.source_url import redact_text

log = logging.getLogger(__name__)

Pace = Literal["realtime", "max"]

STALLED = "camera_stalled"
"""Code of the CameraError of a source that is connected and silent."""


@dataclass(frozen=True, slots=True)
class Picture:
    """An intact picture as a session gives it.

    `pts_ns` is the source's own presentation time, to be distrusted; `t_packet_ns` the monotonic time at
    which its packet left the demuxer. `skipped`: packets before it, since the last picture, that were not decoded.
    """

    pixels: Pixels
    pts_ns: int | None
    t_packet_ns: int
    skipped: int = 0


class Session(Protocol):
    """One opened source, from open to end or fault."""

    @property
    def interval_ns(self) -> int | None:
        """The nominal frame interval, None where the source declares nothing believable."""
        ...

    def pictures(self) -> Iterator[Picture]:
        """Intact pictures until the source ends. Raises CameraError; `code` STALLED after a read time-out."""
        ...

    def close(self) -> None: ...


class Intake(Protocol):
    """What a session may ask of the camera that it reads for. On the reading thread."""

    @property
    def ledger(self) -> Ledger: ...

    @property
    def inputs(self) -> Sequence[InputSpec]:
        """What models will make of the pictures; empty: not known."""
        ...

    def early(self, pts_ns: int | None, t_packet_ns: int) -> tuple[int, int]:
        """(ns by which a picture of these times is too early to be kept by the cap, the cap's step in ns).

        (0, step): it would be kept, as far as anybody can tell; a step of 0: everything is. Changes nothing.
        """
        ...


class Alone:
    """The Intake of a session without a camera: keeps everything."""

    inputs: Sequence[InputSpec] = ()

    def __init__(self, clock: Clock) -> None:
        self.ledger = Ledger(clock)

    def early(self, pts_ns: int | None, t_packet_ns: int) -> tuple[int, int]:  # noqa: ARG002
        return 0, 0


class Ledger:
    """A camera's state, counters and effort behind one lock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._counters = SourceCounters()
        self._effort = CameraEffort()
        self._status = CameraStatus("starting", "not opened yet", clock.monotonic_ns())

    def count(
        self,
        *,
        decoded: int = 0,
        skipped_rate: int = 0,
        skipped_codec: int = 0,
        corrupt: int = 0,
        pre_key: int = 0,
        duplicate: int = 0,
    ) -> None:
        """Add to the counters, all of them at once for whoever copies."""
        with self._lock:
            counters = self._counters
            counters.decoded += decoded
            counters.skipped_rate += skipped_rate
            counters.skipped_codec += skipped_codec
            counters.corrupt += corrupt
            counters.pre_key += pre_key
            counters.duplicate += duplicate

    def deliver(self) -> bool:
        """Count a picture that becomes a frame: the source is up. True where it was not before."""
        with self._lock:
            self._counters.decoded += 1
            if self._status.state == "up" and self._status.reason is None:
                return False
            self._status = CameraStatus("up", None, self._clock.monotonic_ns())
            return True

    def enter(self, state: CameraState, reason: str | None) -> bool:
        """Change the state; True where it is another one. `since_ns` stays while only the reason changes."""
        with self._lock:
            old = self._status
            if (old.state, old.reason) == (state, reason):
                return False
            since_ns = old.since_ns if old.state == state else self._clock.monotonic_ns()
            self._status = CameraStatus(state, reason, since_ns)
            return old.state != state

    def status(self) -> CameraStatus:
        with self._lock:
            return self._status

    def counters(self) -> SourceCounters:
        with self._lock:
            return replace(self._counters)

    def opened(self, backend: str) -> None:
        """The source was opened by `backend` (see CameraEffort)."""
        with self._lock:
            self._effort = replace(self._effort, opened=self._effort.opened + 1, backend=backend)

    def spent(self, *, decode_cpu_ns: int = 0, saved_cpu_ns: int = 0) -> None:
        """Decoding took CPU time, or did not."""
        with self._lock:
            effort = self._effort
            self._effort = replace(
                effort,
                decode_cpu_ns=effort.decode_cpu_ns + decode_cpu_ns,
                saved_cpu_ns=effort.saved_cpu_ns + saved_cpu_ns,
            )

    def effort(self) -> CameraEffort:
        with self._lock:
            return self._effort


class SourceCamera:
    """A Camera over sessions that `opener` makes.

    `live`: the end of the stream is a fault and is reconnected. Otherwise the source is a file: paced with
    `pace = "realtime"` (`t_capture_ns` is the due time), as fast as `read` is called with `"max"`, begun
    again at its end with `loop`. `fps` caps live and paced sources by capture time; with `"max"` it is not used, and
    `set_cap` makes `read` wait instead: no picture is lost.

    Faults are retried for ever with `backoff`, a missing or damaged file too: it may be put right. Only an
    error that is not retryable ends the camera: it stays `down` with the reason and `read` returns None.
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
        self._stop = threading.Event()
        self._paused = False
        self._rates = threading.Lock()
        self._inputs: tuple[InputSpec, ...] = ()
        self._last_pts_ns: int | None = None
        self._changed = threading.Event()
        self._session: Session | None = None
        self._pictures: Iterator[Picture] = iter(())
        self._pass_delivered = False
        self._ended = False
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
                self._lose(error)
                continue
            except Exception as error:  # noqa: BLE001
                # One camera's surprise must not end its thread. A foreign message may carry the address.
                log.warning("camera %s: unexpected fault: %s", self._name, redact_text(traceback.format_exc()))
                self._lose(CameraError(f"unexpected fault: {type(error).__name__}", retryable=True))
                continue
            if picture is not None and (frame := self._admit(picture)) is not None:
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
        return self._ledger.status()

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

    def early(self, pts_ns: int | None, t_packet_ns: int) -> tuple[int, int]:
        """See Intake. A paced file's picture is captured when it is due, which its presentation time tells."""
        if self._full_pace:
            return 0, 0
        t_capture_ns = t_packet_ns
        if self._paced:
            if pts_ns is None or self._last_pts_ns is None or abs(pts_ns - self._last_pts_ns) > JUMP_NS:
                return 0, self._cap.step_ns
            t_capture_ns = self._last_capture_ns + pts_ns - self._last_pts_ns
        return self._cap.early_ns(t_capture_ns), self._cap.step_ns

    def _rest(self) -> None:
        """Paused: wait for `resume` or `stop`. A file stays open where it is; a live source would only go stale."""
        if self._live:
            self._close_session()
        if self._ledger.enter("paused", "paused by a command"):
            log.info("camera %s: paused", self._name)
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
        if self._session is None:
            self._session = self._opener(self)
            self._timeline.splice(self._session.interval_ns)
            self._last_pts_ns = None
            self._pictures = self._session.pictures()
            self._pass_delivered = False
        picture = next(self._pictures, None)
        if picture is not None:
            self._pass_delivered = True
            return picture
        self._close_session()
        if self._live:
            raise CameraError("the source closed the stream", retryable=True)
        if not self._pass_delivered:
            # Never begin again at once: a loop over a file without pictures would spin.
            raise CameraError("no picture in it could be decoded", retryable=True)
        if not self._loop:
            self._ended = True
            self._ledger.enter("stopped", self._end_reason)
        return None

    def _admit(self, picture: Picture) -> Frame | None:
        """Stamp, cap and pace one picture; None where it is not wanted or `stop` came."""
        media_ns = self._timeline.stamp(picture.pts_ns, picture.skipped)
        if media_ns is None:
            self._ledger.count(decoded=1, duplicate=1)
            return None
        t_capture_ns = self._due_ns(media_ns) if self._paced else picture.t_packet_ns
        # With reordered pictures packet times are not in picture order; capture times always are.
        t_capture_ns = max(t_capture_ns, self._last_capture_ns + 1)
        self._last_capture_ns = t_capture_ns
        self._last_pts_ns = picture.pts_ns
        if not self._full_pace and not self._cap.wants(t_capture_ns):
            self._ledger.count(decoded=1, skipped_rate=1)
            return None
        if self._paced:
            while (wait_ns := t_capture_ns - self._clock.monotonic_ns()) > 0:
                if self._stop.wait(wait_ns / 1e9):
                    return None
        self._backoff.up()
        if self._ledger.deliver():
            log.info("camera %s: up, %d x %d px", self._name, picture.pixels.width, picture.pixels.height)
        frame = Frame(self._name, self._next_id, t_capture_ns, picture.pixels)
        self._next_id += 1
        return frame

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
        reason = redact_text(error.message)
        state: CameraState = "stalled" if error.code == STALLED else "down"
        delay_s = self._backoff.next_delay_s()
        if self._ledger.enter(state, reason):
            log.warning("camera %s: %s: %s", self._name, state, reason)
        if not error.retryable:
            self._ended = True
            return
        self._stop.wait(delay_s)

    def _close_session(self) -> None:
        session, self._session = self._session, None
        # Dropping the generator first: it reads from the container that is closed next.
        self._pictures = iter(())
        if session is not None:
            session.close()
