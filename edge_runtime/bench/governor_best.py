"""The best operating point there is for a plant that is known: what a governor that knows nothing is measured by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edge_runtime.records.governing import Budget
from edge_runtime.sim.load import SimLoad, SimVariant
from edge_runtime.sim.plant import Plant

STEPS = 100
"""Rates are shared out in hundredths of what a tier of cameras wants beyond its `min_fps`."""


@dataclass(frozen=True, slots=True)
class Best:
    """An operating point and what it would settle at: rates by camera (Hz), power (W), Tj (degC). `least_held`: every
    camera has its `min_fps`, or as much as it gives."""

    variant: str
    rates_hz: tuple[float, ...]
    power_w: float
    tj_c: float
    least_held: bool

    @property
    def fps(self) -> float:
        return sum(self.rates_hz)


def best_point(plant: Plant, load: SimLoad, offered_hz: Sequence[float], budget: Budget) -> Best | None:
    """Of all variants and rates that hold the budget for ever, the one that the order of sacrifice puts first: every
    `min_fps`, then the most accurate variant, then frames a second.

    Where no variant can give every `min_fps`: the lightest one, with as many frames as it can. None where no frame
    at all fits. For one model, batches of one, no GPU cap. `load.models[0].variants` has to be in order of cost.
    """
    demand = [
        min(hz, hz if camera.wanted_hz is None else camera.wanted_hz)
        for camera, hz in zip(load.cameras, offered_hz, strict=True)
    ]
    least = [min(camera.min_hz, hz) for camera, hz in zip(load.cameras, demand, strict=True)]
    variants = load.models[0].variants
    search = _Search(plant, load, offered_hz, budget)
    for variant in variants:
        path = _path(load, least, demand)
        if search.settled(variant, path[0]) is not None:
            return search.furthest(variant, path, least_held=True)
    path = [tuple(hz * step / STEPS for hz in least) for step in range(STEPS + 1)]
    if search.settled(variants[-1], path[0]) is None:
        return None
    return search.furthest(variants[-1], path, least_held=False)


class _Search:
    def __init__(self, plant: Plant, load: SimLoad, offered_hz: Sequence[float], budget: Budget) -> None:
        self._plant = plant
        self._lanes = load.models[0].lanes
        self._budget = budget
        self._decode_s = sum(camera.decode_s * hz for camera, hz in zip(load.cameras, offered_hz, strict=True))

    def settled(self, variant: SimVariant, rates_hz: Sequence[float]) -> tuple[float, float] | None:
        """(W, degC) that these rates settle at; None where a budget or the lanes do not allow them."""
        fps = sum(rates_hz)
        gpu_load = fps * variant.busy_s(1) / self._lanes
        cpu_load = (self._decode_s + fps * variant.preprocess_s) / self._plant.parameters.cpu_cores
        if gpu_load > 1 or cpu_load > 1:
            return None
        found = self._plant.settled(gpu_load, cpu_load)
        if found is None:
            return None
        budget = self._budget
        if budget.power_w is not None and found[0] > budget.power_w:
            return None
        return None if budget.temperature_c is not None and found[1] > budget.temperature_c else found

    def furthest(self, variant: SimVariant, path: Sequence[tuple[float, ...]], *, least_held: bool) -> Best:
        """The last point of a path of growing rates that is allowed; the first one is."""
        low, high = 0, len(path)
        while high - low > 1:
            middle = (low + high) // 2
            if self.settled(variant, path[middle]) is None:
                high = middle
            else:
                low = middle
        found = self.settled(variant, path[low])
        assert found is not None
        return Best(variant.name, path[low], *found, least_held)


def _path(load: SimLoad, least: Sequence[float], demand: Sequence[float]) -> list[tuple[float, ...]]:
    """From every `min_fps` up to all that is wanted, the tiers one after the other."""
    rates = list(least)
    path = [tuple(rates)]
    for tier in sorted({camera.priority for camera in load.cameras}, reverse=True):
        members = [index for index, camera in enumerate(load.cameras) if camera.priority == tier]
        for step in range(1, STEPS + 1):
            for index in members:
                rates[index] = least[index] + (demand[index] - least[index]) * step / STEPS
            path.append(tuple(rates))
    return path
