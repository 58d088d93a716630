"""Which of several sensor sources is used: pure decisions with hysteresis, by the monotonic clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edge_runtime.hardware.energy import MAX_GAP_PERIODS

MIN_STALE_S = 1.0
"""A source is lost after `MAX_GAP_PERIODS` without a good reading, but not before this."""

SLOW_READINGS = 3
"""After so many readings in a row that came too late for joules, a source is too slow for power."""

LATE_S = 0.5
"""From here on without a reading a source is in doubt, or from two periods on: others are made ready."""

DOUBT_S = 30.0
"""So long after a fault a source stays in doubt."""

RETURN_S, MAX_RETURN_S = 10.0, 300.0
"""A better source than the present one has to have been good for this long; doubled with every loss, up to the most."""

RESUME_S, MAX_RESUME_S = 1.0, 60.0
"""The same where there is no present one: a source that was lost before. One that never was is taken at once."""

_MOST_LOSSES = 16


def stale_s(period_s: float) -> float:
    """After how long without a good reading a source of that period is lost."""
    return max(MIN_STALE_S, MAX_GAP_PERIODS * period_s)


@dataclass(frozen=True, slots=True)
class Standing:
    """How one source does as regards one quantity. `reason`: why it cannot be used now; None: it can.

    `clean_s`: for how long it has been good without a fault. `doubt`: whether it would be wise to have another ready.
    """

    reason: str | None
    clean_s: float
    doubt: bool


class Track:
    """Keeps the standing of one quantity of one source, from what each reading brought.

    `needs_rate`: whether readings that come too seldom are no use, as for joules. Not thread-safe.
    """

    def __init__(self, period_s: float, now_ns: int, *, needs_rate: bool) -> None:
        self.period_s = period_s
        self._needs_rate = needs_rate
        self._start_ns = now_ns
        self._newest_ns: int | None = None
        self._clean_ns: int | None = None
        self._fault_ns: int | None = None
        self._fault = ""
        self._slow = 0

    def good(self, t_ns: int) -> None:
        """A good reading of that time."""
        if self._newest_ns is not None:
            after_s = (t_ns - self._newest_ns) / 1e9
            if after_s > MAX_GAP_PERIODS * self.period_s:
                self._slow += 1
                self.bad(t_ns, f"a reading came after {after_s:.2f} s, where one is due every {self.period_s:g} s")
            else:
                self._slow = 0
        if self._clean_ns is None:
            self._clean_ns = t_ns
        self._newest_ns = t_ns

    def bad(self, t_ns: int, reason: str) -> None:
        """No reading, or none that can be used. Only time without a good one makes it unavailable."""
        self._clean_ns = None
        self._fault_ns = t_ns
        self._fault = reason

    def standing(self, now_ns: int) -> Standing:
        newest_ns = self._start_ns if self._newest_ns is None else self._newest_ns
        age_s = (now_ns - newest_ns) / 1e9
        recent_fault = self._fault_ns is not None and self._fault_ns > newest_ns
        reason: str | None = None
        if self._newest_ns is None:
            reason = self._fault or "no reading yet"
        elif age_s > stale_s(self.period_s):
            reason = f"no good reading for {age_s:.1f} s" + (f": {self._fault}" if recent_fault else "")
        elif self._needs_rate and self._slow >= SLOW_READINGS:
            reason = f"too slow: {self._fault}"
        return Standing(
            reason=reason,
            clean_s=0.0 if self._clean_ns is None else (now_ns - self._clean_ns) / 1e9,
            doubt=age_s > max(LATE_S, 2 * self.period_s)
            or (self._fault_ns is not None and (now_ns - self._fault_ns) / 1e9 < DOUBT_S),
        )


@dataclass(frozen=True, slots=True)
class Change:
    """From one source to another, by their places in the order; None: no source."""

    before: int | None
    after: int | None
    reason: str


class Choice:
    """One quantity's source among several in the order of preference.

    A source is left when it is lost, and then the best of the others is taken. A better one is gone back to when it
    has been good for a while; the while doubles each time that it is lost again. Who was in use for `MAX_RETURN_S`
    begins anew. Not thread-safe.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._losses = [0] * len(names)
        self._since_ns = 0
        self.chosen: int | None = None

    def decide(self, now_ns: int, standings: Sequence[Standing]) -> Change | None:
        """The change that is due now, made; None where there is none. `standings`: one for each source."""
        current = self.chosen
        if current is not None and (lost := standings[current].reason) is None:
            for index, standing in enumerate(standings[:current]):
                if standing.reason is None and standing.clean_s >= self._hold_s(index, RETURN_S, MAX_RETURN_S):
                    return self._change(now_ns, index, f"it has been good for {standing.clean_s:.0f} s")
            return None
        after = None
        for index, standing in enumerate(standings):
            hold_s = self._hold_s(index, RESUME_S, MAX_RESUME_S) if self._losses[index] else 0.0
            if standing.reason is None and standing.clean_s >= hold_s:
                after = index
                break
        if current is not None:
            in_use_s = (now_ns - self._since_ns) / 1e9
            before = 0 if in_use_s >= MAX_RETURN_S else self._losses[current]
            self._losses[current] = min(before + 1, _MOST_LOSSES)
            return self._change(now_ns, after, f"{self._names[current]}: {lost}")
        return None if after is None else self._change(now_ns, after, "it is the first that is good")

    def _hold_s(self, index: int, first_s: float, most_s: float) -> float:
        return min(most_s, first_s * 2.0 ** max(0, self._losses[index] - 1))

    def _change(self, now_ns: int, after: int | None, reason: str) -> Change:
        change = Change(self.chosen, after, reason)
        self.chosen, self._since_ns = after, now_ns
        return change
