"""What the pipeline counted in one window, as telemetry takes it."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

LATENCY_BUCKETS_MS: tuple[float, ...] = (5, 10, 20, 30, 40, 50, 60, 80, 100, 150, 200, 300, 500, 1000, 2000, 5000)
"""Upper bounds of the latency histogram in ms; what is slower falls into a last bucket without a bound."""
_BUCKETS_NS = tuple(int(bound * 1e6) for bound in LATENCY_BUCKETS_MS)

MAX_SAMPLES = 65_536
"""Durations kept per stream and window for percentiles: the newest ones (512 KiB at the most)."""


class Samples:
    """Durations of one window: an exact histogram, and the newest values for percentiles."""

    __slots__ = ("_next", "buckets", "values_ns")

    def __init__(self) -> None:
        self.buckets = [0] * (len(_BUCKETS_NS) + 1)
        self.values_ns: list[int] = []
        self._next = 0

    def add(self, duration_ns: int) -> None:
        self.buckets[bisect_left(_BUCKETS_NS, duration_ns)] += 1
        if len(self.values_ns) < MAX_SAMPLES:
            self.values_ns.append(duration_ns)
        else:
            self.values_ns[self._next] = duration_ns
            self._next = (self._next + 1) % MAX_SAMPLES

    def merge(self, other: Samples) -> None:
        """Take in another's durations, for a total."""
        self.buckets = [mine + theirs for mine, theirs in zip(self.buckets, other.buckets, strict=True)]
        self.values_ns.extend(other.values_ns)


@dataclass(slots=True)
class Counters:
    """Frames by outcome: `carried_in + captured = completed + cached + stale + dropped + failed + in_flight`."""

    carried_in: int = 0
    captured: int = 0
    completed: int = 0
    cached: int = 0
    stale: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    failed: int = 0
    in_flight: int = 0

    def ended(self) -> int:
        return self.completed + self.cached + self.stale + sum(self.dropped.values()) + self.failed

    def balanced(self) -> bool:
        """Whether the frame identity holds."""
        return self.carried_in + self.captured == self.ended() + self.in_flight

    def add(self, other: Counters) -> None:
        """Take in another's counts, for a total over cameras."""
        self.carried_in += other.carried_in
        self.captured += other.captured
        self.completed += other.completed
        self.cached += other.cached
        self.stale += other.stale
        for reason, count in other.dropped.items():
            self.dropped[reason] = self.dropped.get(reason, 0) + count
        self.failed += other.failed
        self.in_flight += other.in_flight


@dataclass(slots=True)
class StreamCut:
    """One camera on one model, in one window. `failures` tells `failed` by reason."""

    camera: str
    model: str
    counters: Counters
    latency: Samples
    failures: dict[str, int]


class EngineCounters:
    """What one engine of one model did in a window; frames without an engine count for the current one."""

    __slots__ = ("batches", "counters", "inference", "latency", "places")

    def __init__(self) -> None:
        self.counters = Counters()
        self.latency = Samples()
        self.inference = Samples()
        self.batches = 0
        self.places = 0


@dataclass(slots=True)
class LedgerCut:
    """Everything that was counted between two cuts; `engines` by (model, engine digest)."""

    streams: list[StreamCut]
    engines: dict[tuple[str, str], EngineCounters]
