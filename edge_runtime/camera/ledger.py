"""A camera's state, counters and effort, and the lines in the log that tell of its state."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace

from edge_runtime.clock import Clock
from edge_runtime.records.cameras import CameraEffort, CameraState, CameraStatus, SourceCounters

log = logging.getLogger(__name__)

_LINES = 10
_LINE_EVERY_NS = 60_000_000_000
_TROUBLE = ("down", "stalled")


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

    def deliver(self, *, kept: bool = True) -> bool:
        """Count an intact picture, which becomes a frame unless the cap has no use for it (`kept`): the source is up.
        True where it was not before."""
        with self._lock:
            self._counters.decoded += 1
            self._counters.skipped_rate += not kept
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

    def damage(self) -> tuple[int, int, int]:
        """(corrupt, pre_key, skipped_codec) so far."""
        with self._lock:
            counters = self._counters
            return counters.corrupt, counters.pre_key, counters.skipped_codec

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


class StateLog:
    """One camera's states in the log: a line per change, not per retry.

    Trouble that only goes on, or comes back before the camera was up, is not told again. One whose state keeps
    changing gets ten lines, then one a minute; what was left out is counted in the next. On the reading thread.
    """

    def __init__(self, name: str, clock: Clock) -> None:
        self._name = name
        self._clock = clock
        self._last: str | None = None
        self._budget_ns = _LINES * _LINE_EVERY_NS
        self._t_ns = clock.monotonic_ns()
        self._left_out = 0

    def tell(self, state: CameraState, words: str) -> None:
        """The camera is in `state`, for which `words` (no credentials) are the reason or the remark."""
        if state == self._last:
            return
        self._last = state
        now_ns = self._clock.monotonic_ns()
        self._budget_ns = min(_LINES * _LINE_EVERY_NS, self._budget_ns + now_ns - self._t_ns)
        self._t_ns = now_ns
        if self._budget_ns < _LINE_EVERY_NS:
            self._left_out += 1
            return
        self._budget_ns -= _LINE_EVERY_NS
        left_out, self._left_out = self._left_out, 0
        more = f" ({left_out} changes before this were not logged)" if left_out else ""
        log.log(
            logging.WARNING if state in _TROUBLE else logging.INFO,
            "camera %s: %s: %s%s",
            self._name,
            state,
            words,
            more,
        )
