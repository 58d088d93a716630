"""When a source that was lost may be opened again."""

from __future__ import annotations

from edge_runtime.backoff import Backoff
from edge_runtime.clock import Clock, SystemClock

_NS_PER_S = 1_000_000_000


class Retry:
    """A back-off that nobody sleeps through: it says when the time has come. One source alone needs no jitter."""

    def __init__(
        self, *, base_s: float = 0.5, limit_s: float = 30.0, stable_s: float = 10.0, clock: Clock | None = None
    ) -> None:
        self._clock = clock or SystemClock()
        self._backoff = Backoff(base_s=base_s, limit_s=limit_s, stable_s=stable_s, jitter=False, clock=self._clock)
        self._due_ns: int | None = None

    def up(self) -> None:
        """The source gave a reading. Repeated calls do not restart the time it has been stable for."""
        self._backoff.up()

    def failed(self) -> None:
        """The source is lost, or could not be opened."""
        self._due_ns = self._clock.monotonic_ns() + round(self._backoff.next_delay_s() * _NS_PER_S)

    @property
    def wait_s(self) -> float:
        """Seconds until it may be tried; 0 when it may be tried now."""
        return 0.0 if self._due_ns is None else max(0.0, (self._due_ns - self._clock.monotonic_ns()) / _NS_PER_S)
