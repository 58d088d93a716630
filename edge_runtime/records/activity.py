"""What the pipeline counted in one window, as telemetry takes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

LATENCY_BUCKETS_MS: tuple[float, ...] = (5, 10, 20, 30, 40, 50, 60, 80, 100, 150, 200, 300, 500, 1000, 2000, 5000)
"""Upper bounds of the latency histogram in ms; what is slower falls into a last bucket without a bound."""
_BOUNDS_NS = np.array([bound * 1e6 for bound in LATENCY_BUCKETS_MS])

MAX_SAMPLES = 65_536
"""Durations kept per stream and window for percentiles: the newest ones (some 2 MiB at the most)."""


class Samples:
    """Durations of one window: an exact histogram, and the newest values for percentiles.

    `add` is on every frame's way and does next to nothing; the histogram is made when it is asked for.
    """

    __slots__ = ("_folded", "values_ns")

    def __init__(self) -> None:
        self.values_ns: list[int] = []
        self._folded: NDArray[np.int64] | None = None

    def add(self, duration_ns: int) -> None:
        self.values_ns.append(duration_ns)
        if len(self.values_ns) >= MAX_SAMPLES:
            oldest, self.values_ns = self.values_ns[: MAX_SAMPLES // 2], self.values_ns[MAX_SAMPLES // 2 :]
            self._folded = _histogram(oldest) + (0 if self._folded is None else self._folded)

    def buckets(self) -> list[int]:
        """Counts by LATENCY_BUCKETS_MS, and of what is slower: every duration ever added is in one of them."""
        counts = _histogram(self.values_ns)
        return [int(count) for count in (counts if self._folded is None else counts + self._folded)]

    def merge(self, other: Samples) -> None:
        """Take in another's durations, for a total."""
        self.values_ns.extend(other.values_ns)
        if other._folded is not None:
            self._folded = other._folded + (0 if self._folded is None else self._folded)


def _histogram(values_ns: list[int]) -> NDArray[np.int64]:
    # a value on a bound belongs below it
    places = np.searchsorted(_BOUNDS_NS, np.asarray(values_ns, np.int64), side="left")
    return np.bincount(places, minlength=len(_BOUNDS_NS) + 1)


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


CacheMode = Literal["off", "exact", "scene"]
"""off: every frame is inferred. exact: one whose input was seen before gets the same answer. scene: a camera's last
answer holds until something moves."""

CacheOutcome = Literal["hit", "miss", "bypassed"]


@dataclass(slots=True)
class CacheCounters:
    """What was asked of a model's cache: `hits + misses = lookups`. `bypassed`: frames for which nobody asked."""

    lookups: int = 0
    hits: int = 0
    misses: int = 0
    bypassed: int = 0

    def count(self, outcome: CacheOutcome) -> None:
        if outcome == "bypassed":
            self.bypassed += 1
            return
        self.lookups += 1
        if outcome == "hit":
            self.hits += 1
        else:
            self.misses += 1


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

    __slots__ = ("backend", "batches", "cache", "counters", "inference", "latency", "places", "variant")

    def __init__(self, variant: str = "", backend: str = "") -> None:
        self.variant = variant
        self.backend = backend
        self.counters = Counters()
        self.cache = CacheCounters()
        self.latency = Samples()
        self.inference = Samples()
        self.batches = 0
        self.places = 0


@dataclass(slots=True)
class LedgerCut:
    """Everything that was counted between two cuts; `engines` by (model, engine digest)."""

    streams: list[StreamCut]
    engines: dict[tuple[str, str], EngineCounters]
