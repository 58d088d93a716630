"""How fast a backlog may be sent."""

from __future__ import annotations

import math

# A wake-up per token would keep a core busy at thousands a second.
_WAKE_EVERY_S = 0.005
_BURST_ROWS = 20.0


class TokenBucket:
    """`rate` tokens a second (more than 0), of which at most max(20, rate / 10) are saved up; full at first.

    Times are monotonic and in nanoseconds; they may stand still and never go back.
    """

    def __init__(self, rate: float, now_ns: int) -> None:
        if not rate > 0:
            raise ValueError(f"a rate of {rate:g} a second sends nothing")
        self._rate = rate
        self._burst = max(_BURST_ROWS, rate / 10)
        self._tokens = self._burst
        self._t_ns = now_ns

    def tokens(self, now_ns: int) -> int:
        """How many may be taken now."""
        self._tokens = min(self._burst, self._tokens + (now_ns - self._t_ns) * 1e-9 * self._rate)
        self._t_ns = now_ns
        return int(self._tokens)

    def take(self) -> None:
        """One less. May go below zero: what has to be sent is sent, and the rest waits longer."""
        self._tokens -= 1

    def ready_ns(self) -> int:
        """When it is worth looking again, after `tokens` gave too few."""
        wanted = min(self._burst, max(1.0, self._rate * _WAKE_EVERY_S))
        return self._t_ns + math.ceil(max(0.0, wanted - self._tokens) / self._rate * 1e9)
