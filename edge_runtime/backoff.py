"""How long to wait before something that was lost is tried again."""

from __future__ import annotations

import random

from edge_runtime.clock import Clock, SystemClock

_NS_PER_S = 1_000_000_000


class Backoff:
    """Exponential back-off: each delay is up to a limit that doubles from `base_s` to `limit_s`.

    With full jitter (the default) a delay is uniform between 0 and the limit, the first one too, so that what was
    lost together does not come back together; without, it is the limit. The limit falls back to `base_s` only
    after the source was up for `stable_s`: one that opens and dies at once keeps its long delays.
    """

    def __init__(
        self,
        *,
        base_s: float = 0.5,
        limit_s: float = 30.0,
        stable_s: float = 60.0,
        jitter: bool = True,
        clock: Clock | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._base_s = base_s
        self._limit_s = limit_s
        self._stable_ns = round(stable_s * _NS_PER_S)
        self._jitter = jitter
        self._clock = clock or SystemClock()
        self._rng = rng or random.Random()
        self._failures = 0
        self._up_since_ns: int | None = None

    def up(self) -> None:
        """The source delivers. Repeated calls do not restart the time it has been stable for."""
        if self._up_since_ns is None:
            self._up_since_ns = self._clock.monotonic_ns()

    def next_delay_s(self, at_least_s: float = 0.0) -> float:
        """The source failed: seconds to wait before it is tried again, `at_least_s` and the back-off."""
        if self._up_since_ns is not None and self._clock.monotonic_ns() - self._up_since_ns >= self._stable_ns:
            self._failures = 0
        self._up_since_ns = None
        # The exponent is bounded: after a month of failures 2.0**n would overflow.
        limit_s = min(self._limit_s, self._base_s * 2.0 ** min(self._failures, 30))
        self._failures += 1
        return at_least_s + (self._rng.uniform(0.0, limit_s) if self._jitter else limit_s)
