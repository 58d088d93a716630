"""When a source that was lost may be opened again."""

from __future__ import annotations

from edge_runtime.clock import Clock, SystemClock

_NS_PER_S = 1_000_000_000


class Retry:
    """Delays double from `base_s` to `limit_s`; they start over once the source was up for `stable_s`."""

    def __init__(
        self, *, base_s: float = 0.5, limit_s: float = 30.0, stable_s: float = 10.0, clock: Clock | None = None
    ) -> None:
        self._base_s = base_s
        self._limit_s = limit_s
        self._stable_ns = round(stable_s * _NS_PER_S)
        self._clock = clock or SystemClock()
        self._failures = 0
        self._due_ns: int | None = None
        self._up_since_ns: int | None = None

    def up(self) -> None:
        """The source gave a reading. Repeated calls do not restart the time it has been stable for."""
        if self._up_since_ns is None:
            self._up_since_ns = self._clock.monotonic_ns()

    def failed(self) -> None:
        """The source is lost, or could not be opened."""
        now_ns = self._clock.monotonic_ns()
        if self._up_since_ns is not None and now_ns - self._up_since_ns >= self._stable_ns:
            self._failures = 0
        self._up_since_ns = None
        # the exponent is bounded: after a month of failures 2.0**n would overflow
        delay_s = min(self._limit_s, self._base_s * 2.0 ** min(self._failures, 30))
        self._failures += 1
        self._due_ns = now_ns + round(delay_s * _NS_PER_S)

    @property
    def wait_s(self) -> float:
        """Seconds until it may be tried; 0 when it may be tried now."""
        return 0.0 if self._due_ns is None else max(0.0, (self._due_ns - self._clock.monotonic_ns()) / _NS_PER_S)
