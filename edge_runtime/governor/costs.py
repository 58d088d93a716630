"""What one frame costs on each variant: time on a lane, and energy by what is known beforehand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from edge_runtime.records.governing import GovernorSample, ModelSite, Site, VariantSite

DYNAMIC_SHARE = 0.7
"""Without a profile: what all lanes together take when they are busy, as a share of ordinary power. A guess that the
first seconds correct."""
UNKNOWN_BUSY_S = 0.02
LEARN_S = 2.0
"""Time constant of the measured lane time per frame, in seconds of lane time."""
CLOCK_EXPONENT = 0.7
"""Energy per frame over the GPU's clock: power ~ f^1.7 (AGX and NX under stress), time ~ 1/f."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one frame: seconds of one lane, and J beyond idle, both at the clock that is meant."""

    busy_s: float
    work_j: float


Learned = Mapping[tuple[str, str], float]
"""(model, variant) -> measured lane seconds of one frame, at the highest clock."""


def learn(learned: Learned, site: Site, sample: GovernorSample) -> dict[tuple[str, str], float]:
    """Take in what a sample says of lane time per frame."""
    found = dict(learned)
    speed = 1.0
    if site.clocks_hz and sample.gpu_hz is not None:
        speed = min(1.0, sample.gpu_hz / site.clocks_hz[-1])
    for model in site.models:
        seen = sample.models.get(model.name)
        if seen is None or seen.variant is None or seen.changing or seen.frames <= 0 or seen.busy_s <= 0.0:
            continue
        key = (model.name, seen.variant)
        measured_s = seen.busy_s * speed / seen.frames
        if (before := found.get(key)) is None:
            known = next((each.busy_s for each in model.variants if each.name == seen.variant), None)
            before = known if known is not None else measured_s
        # a run that began before this sample, or has not ended in it, makes single samples uneven
        share = -math.expm1(-seen.busy_s / LEARN_S / max(1, model.lanes))
        found[key] = before + (min(measured_s, 4 * before) - before) * share
    return found


def busy_s(model: ModelSite, variant: VariantSite, learned: Learned) -> float:
    """Lane seconds of one frame at the highest clock: measured, else known, else by those that are."""
    if (measured := learned.get((model.name, variant.name))) is not None:
        return measured
    for each in model.variants:
        measured = learned.get((model.name, each.name))
        if measured is not None and each.busy_s and variant.busy_s:
            return measured * variant.busy_s / each.busy_s
    if variant.busy_s is not None:
        return variant.busy_s
    known = [s for each in model.variants if (s := learned.get((model.name, each.name)) or each.busy_s) is not None]
    return max(known) if known else UNKNOWN_BUSY_S


class Prices:
    """Costs of every variant at every clock. `ordinary_w`: the power that this device is made for, W."""

    def __init__(self, site: Site, learned: Learned, ordinary_w: float) -> None:
        lanes = sum(model.lanes for model in site.models) or 1
        self._lane_w = DYNAMIC_SHARE * ordinary_w / lanes
        self._top_hz = site.clocks_hz[-1] if site.clocks_hz else None
        self._costs: dict[tuple[str, str], Cost] = {}
        for model in site.models:
            for variant in model.variants:
                seconds = busy_s(model, variant, learned)
                joules = variant.joules if variant.joules is not None else self._lane_w * seconds
                self._costs[model.name, variant.name] = Cost(seconds, joules)

    def cost(self, model: str, variant: str, gpu_hz: float | None = None) -> Cost:
        """Of one frame, at a cap of the GPU's clock."""
        found = self._costs.get((model, variant))
        if found is None:  # an engine that is being exchanged has a variant of another bundle
            found = next((cost for (name, _), cost in self._costs.items() if name == model), Cost(UNKNOWN_BUSY_S, 0.0))
        if gpu_hz is None or self._top_hz is None or gpu_hz >= self._top_hz:
            return found
        ratio = gpu_hz / self._top_hz
        return Cost(found.busy_s / ratio, found.work_j * ratio**CLOCK_EXPONENT)

    def work_w(self, sample: GovernorSample) -> float:
        """The load of a sample in watts by these costs: smooth, since it goes by lane time and not by whole frames."""
        total = 0.0
        for name, seen in sample.models.items():
            if seen.variant is not None and seen.busy_s > 0.0:
                cost = self.cost(name, seen.variant, sample.gpu_hz)
                total += cost.work_j * seen.busy_s / cost.busy_s
        return total / sample.span_s
