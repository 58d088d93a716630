"""What a simulated device has to do: cameras with rates that change by a schedule, models with variants that cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from edge_runtime.records.governing import CameraSite, ModelSite, Site, VariantSite


class Schedule(Protocol):
    """A camera's rate over time. `changes`: the times (s) at which it jumps; between them it is steady or smooth."""

    @property
    def changes(self) -> tuple[float, ...]: ...

    def hz(self, t_s: float) -> float:
        """Pictures a second at that time, Hz; 0: the camera is down."""
        ...

    def mean_hz(self, start_s: float, end_s: float) -> float:
        """Its mean over a span, Hz."""
        ...


@dataclass(frozen=True, slots=True)
class Steps:
    """`rates[0]` from the start, `rates[n]` from `changes[n - 1]` on, Hz. One rate: a steady camera."""

    rates: tuple[float, ...]
    changes: tuple[float, ...] = ()

    def hz(self, t_s: float) -> float:
        for index, change_s in enumerate(self.changes):
            if t_s < change_s:
                return self.rates[index]
        return self.rates[-1]

    def mean_hz(self, start_s: float, end_s: float) -> float:
        edges = [start_s, *(each for each in self.changes if start_s < each < end_s), end_s]
        return sum(self.hz(low_s) * (high_s - low_s) for low_s, high_s in pairwise(edges)) / (end_s - start_s)


@dataclass(frozen=True, slots=True)
class Sine:
    """Between `low` and `high` Hz with a period of `period_s`; begins in the middle, rising."""

    low: float
    high: float
    period_s: float
    changes: tuple[float, ...] = ()

    def hz(self, t_s: float) -> float:
        return (self.low + self.high) / 2 + (self.high - self.low) / 2 * math.sin(2 * math.pi * t_s / self.period_s)

    def mean_hz(self, start_s: float, end_s: float) -> float:
        turn = 2 * math.pi / self.period_s
        swing = (math.cos(turn * start_s) - math.cos(turn * end_s)) / turn
        return (self.low + self.high) / 2 + (self.high - self.low) / 2 * swing / (end_s - start_s)


def flapping(hz: float, period_s: float, until_s: float) -> Steps:
    """A camera that is there for half of every `period_s`, and down for the other half."""
    count = int(until_s / (period_s / 2))
    changes = tuple(period_s / 2 * number for number in range(1, count + 1))
    return Steps(tuple(hz if number % 2 == 0 else 0.0 for number in range(count + 1)), changes)


@dataclass(frozen=True, slots=True)
class SimCamera:
    """A camera. `jitter`: how far a picture may be from its grid time, in intervals, 0 to below 0.5. `decode_s`: CPU
    seconds of one core for every picture, also for those that a cap leaves out. The rest as in `CameraSite`."""

    name: str
    schedule: Schedule
    models: tuple[str, ...]
    wanted_hz: float | None = None
    min_hz: float = 0.0
    priority: int = 0
    jitter: float = 0.1
    decode_s: float = 0.004


@dataclass(frozen=True, slots=True)
class SimVariant:
    """What a run costs: `overhead_s + frame_s` for every frame, s of a lane at the highest GPU clock; and
    `preprocess_s` a frame, s of a CPU core."""

    name: str
    frame_s: float
    overhead_s: float = 0.0
    preprocess_s: float = 0.005

    def busy_s(self, batch: int) -> float:
        return self.overhead_s + self.frame_s * batch


@dataclass(frozen=True, slots=True)
class SimModel:
    """A model: its variants, the one that is wanted first, and as in `ModelSite`."""

    name: str
    lanes: int
    variants: tuple[SimVariant, ...]
    places: int = 1
    batch_timeout_ms: float = 20.0


@dataclass(frozen=True, slots=True)
class SimLoad:
    """All that a device has to do. `clocks_hz`: GPU clocks that may be chosen; empty: there is no such actuator."""

    cameras: tuple[SimCamera, ...]
    models: tuple[SimModel, ...]
    clocks_hz: tuple[float, ...] = ()

    def site(self, *, period_s: float = 0.1, costs_s: Mapping[str, float] | None = None) -> Site:
        """What a governor is told of it. `costs_s`: what it knows of a frame's lane time (s), by variant; one that
        is absent: nothing. None: what is true."""
        return Site(
            tuple(
                CameraSite(each.name, each.models, each.wanted_hz, each.min_hz, each.priority) for each in self.cameras
            ),
            tuple(
                ModelSite(
                    each.name,
                    each.lanes,
                    tuple(
                        VariantSite(variant.name, variant.busy_s(1) if costs_s is None else costs_s.get(variant.name))
                        for variant in each.variants
                    ),
                    each.places,
                    None,
                    each.batch_timeout_ms,
                )
                for each in self.models
            ),
            self.clocks_hz,
            period_s,
        )

    def changes_s(self) -> tuple[float, ...]:
        """When the load jumps, ascending."""
        return tuple(sorted({change_s for camera in self.cameras for change_s in camera.schedule.changes}))
