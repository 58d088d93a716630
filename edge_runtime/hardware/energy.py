"""Joules from watts: the trapezoid rule on a monotonic clock, end points interpolated."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque

from edge_runtime.records.power import Energy, PowerReading, Unavailable

MAX_GAP_PERIODS = 3.0
"""A hole of more than this many sampling periods makes a span's energy unknown."""


class EnergyMeter:
    """Cumulative energy over accepted readings; spans by subtraction, so that adjoining spans add up.

    `period_s` is the nominal sampling period. Readings are kept for `keep_s` seconds: a span may start
    that long ago. Not thread-safe.
    """

    def __init__(
        self, source: str, rails: tuple[str, ...], *, period_s: float, idle_w: float | None, keep_s: float
    ) -> None:
        self._source = source
        self._rails = rails
        self._idle_w = idle_w
        self._max_gap_ns = int(MAX_GAP_PERIODS * period_s * 1e9)
        self._keep_ns = int(keep_s * 1e9)
        self._times: deque[int] = deque()
        self._watts: deque[float] = deque()
        self._joules: deque[float] = deque()
        self.refused = 0

    @property
    def last_ns(self) -> int | None:
        """Time of the newest reading."""
        return self._times[-1] if self._times else None

    def add(self, reading: PowerReading) -> bool:
        """Take a reading; False where its time is not after the last one's (it is refused and counted)."""
        if self._times:
            last_ns = self._times[-1]
            if reading.t_ns <= last_ns:
                self.refused += 1
                return False
            step_j = (self._watts[-1] + reading.watts) / 2 * (reading.t_ns - last_ns) / 1e9
            self._joules.append(self._joules[-1] + step_j)
        else:
            self._joules.append(0.0)
        self._times.append(reading.t_ns)
        self._watts.append(reading.watts)
        while len(self._times) > 2 and self._times[1] < reading.t_ns - self._keep_ns:
            self._times.popleft()
            self._watts.popleft()
            self._joules.popleft()
        return True

    def span(self, start_ns: int, end_ns: int) -> Energy | Unavailable:
        """Energy between two monotonic times, both within the readings."""
        times, watts = list(self._times), list(self._watts)
        first, last = bisect_left(times, start_ns), bisect_left(times, end_ns)
        # the samples that bear on the span: from the one at or before its start to the one at or after its end
        low = first if first < len(times) and times[first] == start_ns else first - 1
        if end_ns <= start_ns:
            return Unavailable("the span is empty")
        if low < 0:
            return Unavailable("no reading at or before the start of the window")
        if last >= len(times):
            return Unavailable("no reading at or after the end of the window: the sensor is late or lost")
        inside = [watts[i] for i in range(first, last + 1) if start_ns <= times[i] <= end_ns]
        if len(inside) < 2:
            return Unavailable(f"only {len(inside)} readings in the window")
        gap_ns = max(times[i + 1] - times[i] for i in range(low, last))
        if gap_ns > self._max_gap_ns:
            return Unavailable(f"a hole of {gap_ns / 1e9:.1f} s in the readings")
        joules = self._at(end_ns, last) - self._at(start_ns, max(low + 1, first))
        duration_s = (end_ns - start_ns) / 1e9
        net = None if self._idle_w is None else joules - self._idle_w * duration_s
        return Energy(
            source=self._source,
            rails=self._rails,
            joules=joules,
            net_joules=net,
            mean_w=joules / duration_s,
            peak_w=max(inside),
            samples=len(inside),
        )

    def _at(self, t_ns: int, after: int) -> float:
        """Cumulative joules at `t_ns`, with power linear between readings; `after` is the reading at or after it."""
        if self._times[after] == t_ns:
            return self._joules[after]
        t0_ns, t1_ns = self._times[after - 1], self._times[after]
        w0, w1 = self._watts[after - 1], self._watts[after]
        part_s = (t_ns - t0_ns) / 1e9
        w_t = w0 + (w1 - w0) * (t_ns - t0_ns) / (t1_ns - t0_ns)
        return self._joules[after - 1] + (w0 + w_t) / 2 * part_s
