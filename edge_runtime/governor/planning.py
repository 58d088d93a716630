"""Which variants should run, and at which rates."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from edge_runtime.governor.allocate import Claim, allot
from edge_runtime.governor.costs import Prices
from edge_runtime.governor.state import NS_PER_S, Limit, Plan, PolicyState
from edge_runtime.governor.tuner import Tuning
from edge_runtime.records.governing import Budget, CameraSite, GovernorSample, Site

HEAVIER_S = 10.0
"""So long a heavier variant has to be affordable before it is taken."""
HEAVIER_AGAIN_S = 30.0
HEAVIER_ROOM = 0.9
HEAVIER_TIME = 0.75
"""Shares of energy and lane time that a heavier variant has to fit into; the rest is what keeps it from going back."""
SETTLE_S = 1.0
NEARLY = 0.9
MORE_FRAMES, LESS_POWER = 1.03, 0.95
CLOCK_S, CLOCK_DOWN_S = 5.0, 30.0
"""So long a clock is kept, against one that brings more frames and one that takes less power."""
MOST_CHOICES = 81
"""Four models of three variants: some milliseconds a look."""
RUN_SHARE = 0.4
CLOCKED_UTILISATION = 0.85
"""Share of lane time that a lower clock may fill: what is left is what a burst of frames needs."""
ASSUMED_HZ = 30.0
"""What a camera may come to bring that has no wanted rate."""


def least_hz(camera: CameraSite) -> float:
    return camera.min_hz if camera.wanted_hz is None else min(camera.min_hz, camera.wanted_hz)


def _claims(
    site: Site, state: PolicyState, prices: Prices, variants: Mapping[str, str], gpu_hz: float | None
) -> list[Claim]:
    costs = {model: prices.cost(model, variant, gpu_hz) for model, variant in variants.items()}
    claims = []
    for camera in site.cameras:
        offered = state.offered.get(camera.name, 0.0)
        wanted = math.inf if camera.wanted_hz is None else camera.wanted_hz
        ceiling = wanted if camera.wanted_hz is not None else max(ASSUMED_HZ, 2 * offered)
        models = [name for name in camera.models if name in costs and name not in state.down]
        claims.append(
            Claim(
                camera.name,
                camera.priority,
                min(wanted, offered),
                least_hz(camera) if camera.full_pace else min(least_hz(camera), offered),
                ceiling if camera.full_pace else min(wanted, offered),
                ceiling,
                sum(costs[name].work_j * state.shares.get(name, 1.0) for name in models),
                {name: costs[name].busy_s * state.shares.get(name, 1.0) for name in models},
            )
        )
    return claims


def plan_rates(
    site: Site, budget: Budget, state: PolicyState, prices: Prices, work_w: float, variants: Mapping[str, str]
) -> Plan:
    """Rates for these variants at the clock that brings most frames, and of equal ones least power."""
    best = stay = None
    for gpu_hz in _clocks(site, budget, prices, variants):
        claims = _claims(site, state, prices, variants, gpu_hz)
        # more frames than the lanes take in time are left out by age, at the claim: a cap would leave out others
        lane_s = {model.name: CLOCKED_UTILISATION * model.lanes for model in site.models}
        if gpu_hz is None or gpu_hz == site.clocks_hz[-1]:
            lane_s, gpu_hz = {}, None
        allotment = allot(claims, work_w, lane_s)
        rate = sum(min(allotment.rates[claim.name], claim.demand) for claim in claims)
        found = _Option(Plan(variants, gpu_hz, claims, allotment), rate, allotment.work_w(claims, demanded=True))
        if best is None or found.better(best):
            best = found
        if state.point is not None and gpu_hz == state.point.gpu_hz:
            stay = found
    assert best is not None
    return (stay if stay is not None and not _worth_another_clock(state, stay, best) else best).plan


@dataclass(frozen=True, slots=True)
class _Option:
    """A plan at one clock, the frames that it lets through (Hz), and their work (W)."""

    plan: Plan
    rate: float
    work: float

    def better(self, other: _Option) -> bool:
        return self.rate > other.rate * 1.01 or (self.rate > other.rate * 0.99 and self.work < other.work)


def _worth_another_clock(state: PolicyState, stay: _Option, best: _Option) -> bool:
    """Whether to leave the clock of now: for more frames soon, for less power seldom."""
    since_s = math.inf if state.t_clock_ns is None else (state.now_ns - state.t_clock_ns) / NS_PER_S
    if best.rate > stay.rate * MORE_FRAMES:
        return since_s >= CLOCK_S
    return best.work < stay.work * LESS_POWER and since_s >= CLOCK_DOWN_S


def _clocks(
    site: Site, budget: Budget, prices: Prices, variants: Mapping[str, str]
) -> Sequence[float | None]:  # fmt: skip
    """The clocks to choose from: without those at which a run alone takes too much of the latency that is allowed."""
    if not site.clocks_hz:
        return (None,)
    if budget.latency_p99_ms is None:
        return site.clocks_hz
    most_s = RUN_SHARE * budget.latency_p99_ms / 1e3
    quick = [
        hz
        for hz in site.clocks_hz
        if all(prices.cost(model, variant, hz).busy_s <= most_s for model, variant in variants.items())
    ]
    return quick or site.clocks_hz[-1:]


def ladders(site: Site) -> Iterator[Mapping[str, str]]:
    """Every choice of variants, the most accurate first: fewest steps down in all. With many models, one step more for
    all of them at a time."""
    if math.prod(len(model.variants) for model in site.models) > MOST_CHOICES:
        for depth in range(max(len(model.variants) for model in site.models)):
            yield {model.name: model.variants[min(depth, len(model.variants) - 1)].name for model in site.models}
        return
    choices = itertools.product(*(range(len(model.variants)) for model in site.models))
    for places in sorted(choices, key=lambda each: (sum(each), max(each, default=0))):
        yield {model.name: model.variants[place].name for model, place in zip(site.models, places, strict=True)}


def depth(site: Site, variants: Mapping[str, str]) -> int:
    """Steps below what is wanted, over all models."""
    depth = 0
    for model in site.models:
        names = [variant.name for variant in model.variants]
        depth += names.index(variants[model.name]) if variants.get(model.name) in names else 0
    return depth


def choose_variants(
    site: Site, budget: Budget, sample: GovernorSample, tunings: Mapping[str, Tuning], state: PolicyState,
    prices: Prices, limit: Limit,
) -> Mapping[str, str]:  # fmt: skip
    """Which variants should run: the most accurate that let every camera have its `min_fps`, and its frames in time."""
    now = _running(site, state)
    if any(seen.changing for seen in sample.models.values()):
        return now
    # caution about an untried load is no reason for a lighter variant
    work_w = math.inf if limit.caution else limit.work_w

    def fits(variants: Mapping[str, str]) -> bool:
        return _fits(site, budget, tunings, state, prices, work_w, variants, now)

    lightest = {model.name: model.variants[-1].name for model in site.models}
    wanted = next((each for each in ladders(site) if fits(each)), lightest)
    if wanted == now:
        state.t_heavier_ns = None
        return now
    since_s = math.inf if state.t_variant_ns is None else (sample.t_ns - state.t_variant_ns) / NS_PER_S
    if state.t_variant_ns is not None and fits(now):
        # something more accurate would do as well
        if state.t_heavier_ns is None:
            state.t_heavier_ns = sample.t_ns
        if (sample.t_ns - state.t_heavier_ns) / NS_PER_S < HEAVIER_S or since_s < HEAVIER_AGAIN_S:
            return now
    elif since_s < SETTLE_S:
        return now
    return wanted


def _running(site: Site, state: PolicyState) -> Mapping[str, str]:
    """The variants of the point in force, as far as they are still to be had."""
    before = state.point.variants if state.point is not None else {}
    now = {}
    for model in site.models:
        names = [variant.name for variant in model.variants]
        name = before.get(model.name)
        now[model.name] = name if name in names else names[0]
    return now


def _fits(
    site: Site, budget: Budget, tunings: Mapping[str, Tuning], state: PolicyState, prices: Prices, work_w: float,
    variants: Mapping[str, str], now: Mapping[str, str],
) -> bool:  # fmt: skip
    """Whether these variants leave every camera its `min_fps` and, where a latency is to be held, time for what
    energy allows. Heavier ones than now have to fit with room to spare."""
    heavier = depth(site, variants) < depth(site, now)
    claims = _claims(site, state, prices, variants, site.clocks_hz[-1] if site.clocks_hz else None)
    cheap = claims if not site.clocks_hz else _claims(site, state, prices, variants, site.clocks_hz[0])
    if sum(claim.work_j * claim.least for claim in cheap) > (HEAVIER_ROOM if heavier else 1.0) * work_w:
        return False
    if work_w <= 0.0 and variants != {model.name: model.variants[-1].name for model in site.models}:
        return False
    tuned = [model for model in site.models if model.name in tunings]
    if budget.latency_p99_ms is None or not tuned:
        return True
    allotment = allot(claims, work_w, {})
    for model in tuned:
        tuning = tunings[model.name]
        need_s = sum(
            claim.busy_s.get(model.name, 0.0) * min(allotment.rates[claim.name], claim.demand) for claim in claims
        )
        have_s = tuning.utilisation * model.lanes
        late = tuning.p99_ms is not None and tuning.p99_ms > budget.latency_p99_ms
        if variants[model.name] == now[model.name]:
            if tuning.overloaded and (late or need_s > NEARLY * have_s):
                return False
        elif need_s > (HEAVIER_TIME if heavier else 1.0) * have_s:
            return False
    return True


def rate_of(cap: float | None, claim: Claim) -> float:
    """What a camera brings under a cap, Hz."""
    return claim.now if cap is None else min(cap, claim.now)
