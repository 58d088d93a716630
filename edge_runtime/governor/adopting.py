"""Whether a plan is worth a change of what is in force: down at once, up with patience."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from edge_runtime.governor.energy import unsure
from edge_runtime.governor.limits import ROOM_SHARE
from edge_runtime.governor.planning import rate_of
from edge_runtime.governor.state import BASE_S, MAX_STEADY_S, NS_PER_S, Limit, Plan, PolicyState
from edge_runtime.governor.tuner import Tuning
from edge_runtime.records.governing import Budget, GovernorSample, OperatingPoint, Site

NOISE_SDS = 2.5
MUCH = 0.2
WORTH = 0.03
"""Less than this share of frames per second more is not worth a change."""
PATIENCE_S = 1.0
"""So long more has to be possible before it is given, while things settle after a change of the load."""
SETTLING_S = 15.0
RAISE_S = 1.0
"""From one trial to the next: what the last one takes has to show first."""
STEADY_PATIENCE_S = 3.0
TAKEN_BACK_S = 30.0
LEAST_CAP_HZ = 0.2
LOST = 0.7
STARVED = 0.8
QUIET_S = 4.0
"""From a change until smoothed readings are about what follows it."""


def adopt(
    site: Site, budget: Budget, sample: GovernorSample, tunings: Mapping[str, Tuning], state: PolicyState,
    limit: Limit, plan: Plan, lower: Callable[[float], Plan],
) -> bool:  # fmt: skip
    """Take the plan over, or stay with what is in force where it is not worth a change; whether something changed.

    `lower`: the plan for another load, W.
    """
    before = state.point
    fresh = before is None or state.limits.get(next(iter(state.limits), ""), None) == "sensor"
    other = before is None or before.variants != plan.variants or before.gpu_hz != plan.gpu_hz
    caps = dict(before.fps) if before is not None else {}
    now_s = sample.t_ns / NS_PER_S
    over = more = False
    gain = 0.0
    held: dict[str, float] = {}
    if before is not None and not other:
        held = {claim.name: rate_of(caps.get(claim.name), claim) for claim in plan.claims}
        used_w = sum(claim.work_j * held[claim.name] for claim in plan.claims)
        band_w = _band_w(state, budget) / state.energy.scale
        # what lanes really do may be more than what was planned: other programs slow them down, pictures differ
        seen_w = state.energy.smooth_work_w if _quiet(state, now_s) else used_w
        over = max(used_w, seen_w) > limit.hard_w + band_w
        if over:
            # a step that is worth one: what is taken back bit by bit is a change every few seconds
            plan = lower(max(0.0, limit.work_w - band_w) * min(1.0, used_w / max(seen_w, 1e-9)))
        gain_hz = sum(
            max(0.0, min(plan.allotment.rates[claim.name], claim.demand) - held[claim.name]) for claim in plan.claims
        )
        gain = gain_hz / max(sum(held.values()), 1e-6)
        more = gain > WORTH
    if more and not over:
        state.t_more_ns = state.t_more_ns if state.t_more_ns is not None else sample.t_ns
    elif not over:
        state.t_more_ns = None
        state.raising = False
    # nobody waits for the least that it is to have: a camera that is back, a minimum that fits again
    short = not limit.caution and any(
        held[claim.name] < STARVED * claim.least and plan.allotment.rates[claim.name] > held[claim.name] / STARVED
        for claim in plan.claims
        if claim.name in held
    )
    take = fresh or other or over or short or (more and _patient(state, now_s, gain))
    if take:
        caps = _caps(site, budget, plan)
        if over and sum(rate_of(caps[claim.name], claim) for claim in plan.claims) < LOST * sum(held.values()):
            state.t_load_ns = sample.t_ns  # so deep a cut was a mistake somewhere: settle anew
        if before is not None and before.gpu_hz != plan.gpu_hz:
            state.t_clock_ns = sample.t_ns
        _note_change(state, sample, over=over and not other, caution=limit.caution)
        if before is not None and before.variants != plan.variants:
            state.t_variant_ns, state.t_heavier_ns = sample.t_ns, None
            state.energy = unsure(state.energy, 0.15)
    for camera in site.cameras:
        caps.setdefault(camera.name, None)
    point = OperatingPoint(
        plan.variants,
        {camera.name: caps[camera.name] for camera in site.cameras},
        {model.name: tunings[model.name].batch if model.name in tunings else model.places for model in site.models},
        {
            model.name: tunings[model.name].batch_timeout_ms if model.name in tunings else model.batch_timeout_ms
            for model in site.models
        },
        plan.gpu_hz,
    )
    changed = before is None or point.variants != before.variants or point.fps != before.fps or other
    state.point = point
    return changed


def _band_w(state: PolicyState, budget: Budget) -> float:
    """How far beyond the target is no reason for a change yet, W."""
    room_w = max(0.0, (budget.power_w or state.energy.base_w * 2) - state.base_w)
    noise_w = math.sqrt(state.energy.noise_var) / math.sqrt(BASE_S / 0.25)
    return max(ROOM_SHARE * room_w, NOISE_SDS * noise_w)


def _patient(state: PolicyState, now_s: float, gain: float) -> bool:
    """Whether it has been possible for long enough to give more."""
    if state.raising and state.t_changed_ns is not None:
        return now_s - state.t_changed_ns / NS_PER_S >= RAISE_S
    assert state.t_more_ns is not None
    waited_s = now_s - state.t_more_ns / NS_PER_S
    if state.t_changed_ns is None or _settling(state, now_s):
        return waited_s >= PATIENCE_S
    steady_s = state.steady_s / 5 if gain > MUCH else state.steady_s
    return waited_s >= STEADY_PATIENCE_S and now_s - state.t_changed_ns / NS_PER_S >= steady_s


def _quiet(state: PolicyState, now_s: float) -> bool:
    """Whether the load that is measured is that of the point in force."""
    return state.t_changed_ns is not None and now_s - state.t_changed_ns / NS_PER_S >= QUIET_S


def _settling(state: PolicyState, now_s: float) -> bool:
    return now_s - state.t_load_ns / NS_PER_S < SETTLING_S


def _note_change(state: PolicyState, sample: GovernorSample, *, over: bool, caution: bool) -> None:
    now_ns = sample.t_ns
    if over and state.t_raised_ns is not None and now_ns - state.t_raised_ns < TAKEN_BACK_S * NS_PER_S:
        state.steady_s = min(2 * state.steady_s, MAX_STEADY_S)
    # an untried load is approached step by step, and those steps wait for nothing but their own readings
    state.raising = caution
    if not over:
        state.t_raised_ns = None if caution or _settling(state, now_ns / NS_PER_S) else now_ns
    state.t_changed_ns, state.t_more_ns = now_ns, None if not caution else now_ns


def _caps(site: Site, budget: Budget, plan: Plan) -> dict[str, float | None]:
    caps: dict[str, float | None] = {}
    claims = {claim.name: claim for claim in plan.claims}
    for camera in site.cameras:
        claim = claims[camera.name]
        rate = plan.allotment.rates[camera.name]
        # at full pace there is no rate beyond which nothing comes
        unbounded = camera.full_pace and (budget.power_w is not None or budget.temperature_c is not None)
        if rate >= claim.ceiling * 0.995 and not unbounded:
            caps[camera.name] = None
        else:
            # a camera that brings nothing now may come back at any time: what it gets then is decided then
            rate = max(rate, min(LEAST_CAP_HZ, claim.ceiling))
            caps[camera.name] = round(rate, 2)
    return caps
