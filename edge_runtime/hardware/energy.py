"""Joules from watts: the trapezoid rule on a monotonic clock, end points interpolated."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from edge_runtime.records.power import Energy, Exceeded, Unavailable

MAX_GAP_PERIODS = 3.0
"""A hole of more than this many sampling periods makes a span's energy unknown."""

_SECOND_NS = 1_000_000_000

_ABOVE = 1 + 1e-9
"""What is exactly at a limit is not above it, although joules are differences of large sums."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What a power reading came from: the source, the rails that it is the sum of, how often one is due (s), and
    its step (W; None where that is not known)."""

    source: str
    rails: tuple[str, ...]
    period_s: float
    quantum_w: float | None


class IdlePower:
    """Module power with no load, W, by nvpmodel mode: `known` from elsewhere, or learned while nothing runs."""

    def __init__(self, known: Mapping[str, float] | None = None) -> None:
        self._watts = dict(known or {})

    def of(self, mode: str | None) -> float | Unavailable:
        """The idle power in that mode."""
        if mode is None:
            return Unavailable("the power mode is not known, and idle power differs between modes")
        watts = self._watts.get(mode)
        return Unavailable(f"idle power was never measured in mode {mode}") if watts is None else watts

    def learn(self, mode: str, watts: float) -> None:
        """Power of a span in which nothing ran. The lowest counts: what else was busy then only adds to it."""
        self._watts[mode] = min(watts, self._watts.get(mode, watts))


@dataclass(frozen=True, slots=True)
class Sample:
    """Module power, W, at a monotonic time; `mode` as nvpmodel calls it, None where that is not known."""

    t_ns: int
    watts: float
    origin: Origin
    mode: str | None = None


class _Point(NamedTuple):
    """A sample, and the joules from the first one to it."""

    t_ns: int
    watts: float
    joules: float
    origin: Origin
    mode: str | None


class EnergyMeter:
    """Cumulative energy over accepted readings; spans by subtraction, so that adjoining spans add up.

    Readings of several sources may follow one another: each pair counts with the longer period of the two.
    Readings are kept for `keep_s` seconds: a span may start that long ago. Not thread-safe.
    """

    def __init__(self, idle: IdlePower, *, keep_s: float) -> None:
        self._idle = idle
        self._keep_ns = int(keep_s * 1e9)
        self._points: deque[_Point] = deque()
        self._refused_ns: deque[int] = deque()
        self.refused = 0

    @property
    def last_ns(self) -> int | None:
        """Time of the newest reading."""
        return self._points[-1].t_ns if self._points else None

    def add(self, sample: Sample) -> bool:
        """Take a reading; False where its time is not after the last one's: it is refused and counted.

        No span around such a moment has a known energy: a clock or a source is at fault.
        """
        joules = 0.0
        if self._points:
            last = self._points[-1]
            if sample.t_ns <= last.t_ns:
                self.refused += 1
                self._refused_ns.append(last.t_ns)
                return False
            joules = last.joules + (last.watts + sample.watts) / 2 * (sample.t_ns - last.t_ns) / 1e9
        self._points.append(_Point(sample.t_ns, sample.watts, joules, sample.origin, sample.mode))
        oldest_ns = sample.t_ns - self._keep_ns
        while len(self._points) > 2 and self._points[1].t_ns < oldest_ns:
            self._points.popleft()
        while self._refused_ns and self._refused_ns[0] < oldest_ns:
            self._refused_ns.popleft()
        return True

    def span(self, start_ns: int, end_ns: int) -> Energy | Unavailable:
        """Energy between two monotonic times, both within the readings."""
        if end_ns <= start_ns:
            return Unavailable("the span is empty")
        points = list(self._points)
        bearing = _bearing(points, [point.t_ns for point in points], start_ns, end_ns)
        if isinstance(bearing, Unavailable):
            return bearing
        inside = [point for point in bearing if start_ns <= point.t_ns <= end_ns]
        if len(inside) < 2:
            return Unavailable(f"only {len(inside)} readings in the window")
        if fault := self._fault(bearing):
            return Unavailable(fault)
        joules = _joules_between(start_ns, end_ns, bearing)
        return self._energy(joules, (end_ns - start_ns) / 1e9, bearing, inside)

    def seconds_above(self, start_ns: int, end_ns: int, watts: float) -> Exceeded | Unavailable:
        """For how long the mean power of a second was above `watts`, in the span between two monotonic times.

        Seconds count from the start of the span; what is left of it at its end counts where the whole second that ends
        with it was above. A second with a hole is unknown; where all are, so is the answer.
        """
        points = list(self._points)
        times = [point.t_ns for point in points]
        above_ns = unknown_ns = 0
        reason: str | None = None
        for t_ns in range(start_ns, end_ns, _SECOND_NS):
            length_ns = min(_SECOND_NS, end_ns - t_ns)
            to_ns = t_ns + length_ns
            bearing = _bearing(points, times, to_ns - _SECOND_NS, to_ns)
            fault = bearing.reason if isinstance(bearing, Unavailable) else self._fault(bearing)
            if fault is not None or isinstance(bearing, Unavailable):
                unknown_ns += length_ns
                reason = reason or fault
            elif _joules_between(to_ns - _SECOND_NS, to_ns, bearing) > watts * _ABOVE:
                above_ns += length_ns
        if unknown_ns >= end_ns - start_ns:
            return Unavailable(reason or "the span is empty")
        return Exceeded(above_ns / 1e9, unknown_ns / 1e9, reason)

    def _fault(self, bearing: Sequence[_Point]) -> str | None:
        for before, after in pairwise(bearing):
            gap_s = (after.t_ns - before.t_ns) / 1e9
            if gap_s > MAX_GAP_PERIODS * max(before.origin.period_s, after.origin.period_s):
                return f"a hole of {gap_s:.1f} s in the readings"
        if any(bearing[0].t_ns <= t_ns < bearing[-1].t_ns for t_ns in self._refused_ns):
            return "a reading had a time that was not after the one before"
        return None

    def _energy(self, joules: float, duration_s: float, bearing: Sequence[_Point], inside: Sequence[_Point]) -> Energy:
        origins = list(dict.fromkeys(point.origin for point in bearing))
        quanta = [origin.quantum_w for origin in origins if origin.quantum_w is not None]
        modes = {point.mode for point in bearing}
        mode = bearing[0].mode if len(modes) == 1 else None
        reasons = {}
        quantum_w = max(quanta) if len(quanta) == len(origins) else None
        if quantum_w is None:
            reasons["quantum_w"] = "the source does not tell the step of its readings"
        if mode is None:
            reasons["mode"] = "the source does not tell it" if None in modes else "it changed in the window"
        idle_w: float | None = None
        net_joules: float | None = None
        if isinstance(idle := self._idle.of(mode), Unavailable):
            reasons["idle_w"] = reasons["net_joules"] = idle.reason
        else:
            idle_w, net_joules = idle, joules - idle * duration_s
        return Energy(
            source="+".join(dict.fromkeys(origin.source for origin in origins)),
            rails=tuple(dict.fromkeys(rail for origin in origins for rail in origin.rails)),
            joules=joules,
            net_joules=net_joules,
            mean_w=joules / duration_s,
            peak_w=max(point.watts for point in inside),
            samples=len(inside),
            rate_hz=(len(inside) - 1) * 1e9 / (inside[-1].t_ns - inside[0].t_ns),
            quantum_w=quantum_w,
            idle_w=idle_w,
            mode=mode,
            reasons=reasons,
        )


def _bearing(
    points: Sequence[_Point], times: Sequence[int], start_ns: int, end_ns: int
) -> Sequence[_Point] | Unavailable:
    """The readings that bear on a span: from the one at or before its start to the one at or after its end."""
    first, last = bisect_left(times, start_ns), bisect_left(times, end_ns)
    low = first if first < len(times) and times[first] == start_ns else first - 1
    if low < 0:
        return Unavailable("no reading at or before the start of the window")
    if last >= len(times):
        return Unavailable("no reading at or after the end of the window: the sensor is late or lost")
    return points[low : last + 1]


def _joules_between(start_ns: int, end_ns: int, bearing: Sequence[_Point]) -> float:
    return _joules_at(end_ns, bearing[-2], bearing[-1]) - _joules_at(start_ns, bearing[0], bearing[1])


def _joules_at(t_ns: int, before: _Point, after: _Point) -> float:
    """Cumulative joules at a time from `before` to `after`, with power linear between them."""
    if t_ns == after.t_ns:
        return after.joules
    since_ns = t_ns - before.t_ns
    watts = before.watts + (after.watts - before.watts) * since_ns / (after.t_ns - before.t_ns)
    return before.joules + (before.watts + watts) / 2 * since_ns / 1e9
