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
    camera has its `min_fps`, or as much as it gives. `gpu_hz`: the cap of the GPU's clock; None: none is needed."""

    variant: str
    rates_hz: tuple[float, ...]
    power_w: float
    tj_c: float
    least_held: bool
    gpu_hz: float | None = None

    @property
    def fps(self) -> float:
        return sum(self.rates_hz)


def best_point(plant: Plant, load: SimLoad, offered_hz: Sequence[float], budget: Budget) -> Best | None:
    """Of all variants, rates and GPU clocks that hold the budget for ever, the one that the order of sacrifice puts
    first: every `min_fps`, then the most accurate variant, then frames a second, then watts.

    Where no variant can give every `min_fps`: the lightest one, with as many frames as it can. None where no frame
    at all fits. For one model, batches of one, the clocks of `load.clocks_hz` (none: the highest one), all lanes busy
    if need be. `load.models[0].variants` has to be in order of cost.
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
        if (found := search.furthest(variant, path, least_held=True)) is not None:
            return found
    path = [tuple(hz * step / STEPS for hz in least) for step in range(STEPS + 1)]
    return search.furthest(variants[-1], path, least_held=False)


class _Search:
    def __init__(self, plant: Plant, load: SimLoad, offered_hz: Sequence[float], budget: Budget) -> None:
        self._plant = plant
        self._lanes = load.models[0].lanes
        self._clocks_hz: tuple[float | None, ...] = load.clocks_hz or (None,)
        self._budget = budget
        self._decode_s = sum(camera.decode_s * hz for camera, hz in zip(load.cameras, offered_hz, strict=True))

    def furthest(self, variant: SimVariant, path: Sequence[tuple[float, ...]], *, least_held: bool) -> Best | None:
        """The last point of a path of growing rates that is allowed at any clock, at the one that takes least. None:
        not even the first point is."""
        found: list[Best] = []
        for gpu_hz in self._clocks_hz:
            low, high = -1, len(path)
            while high - low > 1:
                middle = (low + high) // 2
                if self._settled(variant, path[middle], gpu_hz) is None:
                    high = middle
                else:
                    low = middle
            settled = self._settled(variant, path[low], gpu_hz) if low >= 0 else None
            if settled is not None:
                found.append(Best(variant.name, path[low], *settled, least_held, gpu_hz))
        return max(found, key=lambda each: (each.fps, -each.power_w), default=None)

    def _settled(
        self, variant: SimVariant, rates_hz: Sequence[float], gpu_hz: float | None
    ) -> tuple[float, float] | None:
        """(W, degC) that these rates settle at; None where a budget or the lanes do not allow them."""
        fps = sum(rates_hz)
        parameters = self._plant.parameters
        stretch = 1.0 if gpu_hz is None else parameters.gpu_max_hz / gpu_hz
        gpu_load = fps * variant.busy_s(1) * stretch / self._lanes
        cpu_load = (self._decode_s + fps * variant.preprocess_s) / parameters.cpu_cores
        if gpu_load > 1 or cpu_load > 1:
            return None
        found = self._plant.settled(gpu_load, cpu_load, gpu_hz)
        if found is None:
            return None
        budget = self._budget
        if budget.power_w is not None and found[0] > budget.power_w:
            return None
        return None if budget.temperature_c is not None and found[1] > budget.temperature_c else found


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
