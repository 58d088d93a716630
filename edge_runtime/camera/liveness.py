"""Does a live source still deliver? Judged by what it was asked and what came, not by what its library promises."""

from __future__ import annotations

from typing import NamedTuple

from edge_runtime.camera.ledger import Ledger, StateLog
from edge_runtime.camera.session import STALLED
from edge_runtime.clock import Clock
from edge_runtime.errors import CameraError
from edge_runtime.records.cameras import CameraState, CameraStatus

STALLED_LIMITS = 4
"""A source that sends, but nothing that can be decoded, is opened again after so many times `stall_s` ..."""
FIRST_KEY_S = 30.0
"""... and one that waits for its first key frame after this at the earliest: some cameras send one in 20 s."""
_GRACE_NS = 250_000_000


class _Waiting(NamedTuple):
    """The reading thread waits for an open, or else for data, since then (monotonic)."""

    opening: bool
    since_ns: int


class Liveness:
    """Watches one live source. Everything but `status` on the reading thread.

    `open_s`, `stall_s`: its time-outs, None where it has none.
    """

    def __init__(
        self, ledger: Ledger, state_log: StateLog, open_s: float | None, stall_s: float | None, clock: Clock
    ) -> None:
        self._ledger = ledger
        self._log = state_log
        self._open_s = open_s
        self._stall_s = stall_s
        self._clock = clock
        # Written whole, so that any thread may look; None while nothing is waited for.
        self._waiting: _Waiting | None = None
        self._first = True
        self._told = False
        self._t_data_ns = 0
        self._t_look_ns = 0
        self._before = (0, 0, 0)
        self._packets = 0

    def opening(self) -> None:
        """The source is about to be opened."""
        self._waiting = _Waiting(True, self._clock.monotonic_ns())
        if self._ledger.status().state == "starting":
            self._ledger.enter("starting", "being opened")

    def opened(self) -> None:
        """It is open, and has given nothing yet."""
        self._first, self._told = True, False
        self._t_look_ns = 0
        self._before = self._ledger.damage()
        self._packets = 0

    def asked(self) -> None:
        """It is asked for a picture."""
        now_ns = self._clock.monotonic_ns()
        self._waiting = _Waiting(False, now_ns)
        if not self._first:
            self._t_look_ns = now_ns + _GRACE_NS
            self._before = self._ledger.damage()
            self._packets = 0

    def answered(self, picture: bool) -> None:
        """It gave one, or else ended or failed."""
        self._waiting = None
        if picture:
            self._first = self._told = False

    def arrived(self, step_ns: int) -> None:
        """A packet came; the cap wants a picture every `step_ns`. Raises CameraError, STALLED, where pictures have not
        come for too long."""
        now_ns = self._clock.monotonic_ns()
        self._waiting = _Waiting(False, now_ns)
        if self._packets == 0:
            # How long nobody asked, or nothing came, is another matter.
            self._t_data_ns = now_ns
        self._packets += 1
        if self._stall_s is not None and now_ns >= self._t_look_ns:
            self._t_look_ns = now_ns + min(_GRACE_NS, round(self._stall_s * 1e8))
            self._look((now_ns - self._t_data_ns) / 1e9, self._stall_s, step_ns / 1e9)

    def status(self) -> CameraStatus:
        """The ledger's, unless an open or a read has not come back in time: a library may wait for ever in a resolver
        or in a driver."""
        waiting = self._waiting
        status = self._ledger.status()
        limit_s = None if waiting is None else self._open_s if waiting.opening else self._stall_s
        if waiting is None or limit_s is None:
            return status
        t_due_ns = waiting.since_ns + round(limit_s * 1e9)
        # Whoever came back meanwhile is not late.
        if self._clock.monotonic_ns() <= t_due_ns + _GRACE_NS or self._waiting is not waiting:
            return status
        state: CameraState = "down" if waiting.opening else "stalled"
        reason = f"no answer within {limit_s:g} s" if waiting.opening else f"no data for {limit_s:g} s"
        return CameraStatus(state, reason, status.since_ns if status.state == state else t_due_ns)

    def _look(self, quiet_s: float, stall_s: float, step_s: float) -> None:
        """Packets come: do pictures?"""
        corrupt, pre_key, skipped = (
            now - before for now, before in zip(self._ledger.damage(), self._before, strict=True)
        )
        longest_s = STALLED_LIMITS * stall_s
        if self._first and (pre_key or not corrupt):
            longest_s = max(longest_s, FIRST_KEY_S)
        if self._first and not corrupt and quiet_s <= longest_s and (pre_key or quiet_s <= stall_s):
            waits = "waits for its first key frame" if pre_key else "no picture yet"
            self._ledger.enter("starting", f"connected, {waits}")
            return
        if skipped and not corrupt and not pre_key:
            # The cap has no use for them: from here on it may.
            self._t_data_ns, self._packets, self._before = self._clock.monotonic_ns(), 0, self._ledger.damage()
            return
        # With a low cap pictures are decoded once in a while: one that was damaged is no stall yet.
        if quiet_s <= max(stall_s, 2 * step_s):
            return
        given_up = quiet_s > max(longest_s, 2 * step_s)
        reason = (
            f"data comes, but for {quiet_s if given_up else stall_s:.3g} s no picture in it could be decoded: "
            f"{self._packets} packets, {corrupt} corrupt, {pre_key} before a key frame"
        )
        if given_up:
            remedy = "let the camera send a key frame every few seconds (GOP, key frame interval)" if pre_key else None
            raise CameraError(reason, code=STALLED, remedy=remedy, retryable=True)
        if not self._told:
            # Once, so that the reason holds no running numbers.
            self._told = True
            self._ledger.enter("stalled", reason)
            self._log.tell("stalled", reason)
