"""What a governor has to be better than: nothing, a fixed point from the data sheet, on and off."""

from __future__ import annotations

from collections.abc import Mapping

from edge_runtime.bench.governor_best import best_point
from edge_runtime.bench.governor_cells import AMBIENTS_C, Setup
from edge_runtime.governor.readings import wished_point
from edge_runtime.records.governing import Budget, Decision, GovernorSample, OperatingPoint, Site
from edge_runtime.sim.plant import Plant

ORDINARY_AMBIENT_C = AMBIENTS_C[1]
SAFE_HZ = 1.0
"""At the safe point, of a camera without `min_fps`."""


class Uncontrolled:
    """Everything that is wanted, whatever it takes."""

    def begin(self, site: Site, budget: Budget) -> OperatingPoint:  # noqa: ARG002
        return wished_point(site)

    def step(self, site: Site, budget: Budget, sample: GovernorSample) -> Decision:  # noqa: ARG002
        return Decision(wished_point(site), "off", "no budget is held", {}, changed=False)


class Static:
    """The best point of the nominal module in ordinary air under the full load, for ever."""

    def __init__(self, setup: Setup) -> None:
        load = setup.load
        wanted = [camera.wanted_hz or 0.0 for camera in load.cameras]
        best = best_point(Plant(setup.nominal, ORDINARY_AMBIENT_C), load, wanted, setup.budget)
        assert best is not None, f"{setup.cell.module}: the budget does not allow a single frame"
        self._variant, self._gpu_hz = best.variant, best.gpu_hz
        self._fps = {camera.name: hz for camera, hz in zip(load.cameras, best.rates_hz, strict=True)}

    def begin(self, site: Site, budget: Budget) -> OperatingPoint:  # noqa: ARG002
        return _point(site, {model.name: self._variant for model in site.models}, self._fps, self._gpu_hz)

    def step(self, site: Site, budget: Budget, sample: GovernorSample) -> Decision:  # noqa: ARG002
        return Decision(self.begin(site, budget), "derating", "fixed", {}, changed=False)


class BangBang:
    """Over a budget or without a reading: the safe point. Else everything that is wanted."""

    def begin(self, site: Site, budget: Budget) -> OperatingPoint:  # noqa: ARG002
        return wished_point(site)

    def step(self, site: Site, budget: Budget, sample: GovernorSample) -> Decision:
        over = False
        for value, limit in ((sample.power_w, budget.power_w), (sample.tj_c, budget.temperature_c)):
            over = over or (limit is not None and (value is None or value > limit))
        if not over:
            return Decision(wished_point(site), "holding", "below the budget", {}, changed=False)
        return Decision(safe_point(site), "safe", "above the budget", {}, changed=False)


def safe_point(site: Site) -> OperatingPoint:
    """The lightest variants, every camera at its `min_fps`."""
    variants = {model.name: model.variants[-1].name for model in site.models}
    return _point(site, variants, {camera.name: camera.min_hz or SAFE_HZ for camera in site.cameras})


def _point(
    site: Site, variants: dict[str, str], fps: Mapping[str, float | None], gpu_hz: float | None = None
) -> OperatingPoint:
    return OperatingPoint(
        variants,
        dict(fps),
        {model.name: model.places for model in site.models},
        {model.name: model.batch_timeout_ms for model in site.models},
        gpu_hz,
    )
