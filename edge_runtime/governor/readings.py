"""What a sample says, taken in; and what follows where a reading is missing that a budget needs."""

from __future__ import annotations

import math

from edge_runtime.governor.energy import begun, measured, missed, unsure
from edge_runtime.governor.planning import least_hz
from edge_runtime.governor.state import BASE_S, GOOD_SAMPLES, NS_PER_S, STEADY_S, UNKNOWN_W, PolicyState
from edge_runtime.governor.thermal import felt
from edge_runtime.records.governing import Budget, Decision, GovernorSample, OperatingPoint, Site

MISSING_SAMPLES = 2
"""So many samples in a row without a reading, and the next thing that happens is the safe point: within three."""
FOLLOW_W = 3.0
"""A load that moved by what ought to move power by so many of the reading's steps, and the very same reading: it does
not show this device's power."""
STILL_SAMPLES = 4
RATE_S, JUMP_S = 1.0, 0.3
"""Whole pictures make a rate uneven; one that jumps is believed at once."""
FIRST_SAMPLES = 4
PICTURE_SHARE_S = 0.001
"""To begin with: a hundred pictures a second take a tenth of ordinary power to decode."""
LOAD_SHARE = 0.15
"""The load has changed where what cameras bring differs by this share."""
OVER_CURRENT_SHARE = 0.75
OVER_CURRENT_S = 10.0
THROTTLED_SHARE = 0.9
THROTTLED_S = 5.0
THROTTLED_AGAIN_S = 1.0
OVER_CURRENT_INPUTS = {"oc1": "under-voltage (input 1)", "oc2": "over-current (input 2)"}
"""Step down now. An instantaneous over-current (oc3) was over before it was read: an alarm, and no more."""
SAFE_HZ = 1.0
"""At the safe point, of a camera without `min_fps`."""


def offered_now(state: PolicyState, sample: GovernorSample) -> dict[str, float]:
    """What each camera brings, Hz."""
    found = {}
    for name, seen in sample.cameras.items():
        hz = seen.offered / sample.span_s
        before = state.offered.get(name, hz)
        tau_s = JUMP_S if hz > 1.5 * before + 1.0 else RATE_S
        found[name] = hz + (before - hz) * math.exp(-sample.span_s / tau_s) if seen.live else 0.0
    return found


def shares_now(state: PolicyState, sample: GovernorSample) -> dict[str, float]:
    """Of each model's frames, the share that is really run: a cache that stops to help is believed sooner."""
    found = dict(state.shares)
    for name, seen in sample.models.items():
        if (total := seen.frames + seen.cached) > 0:
            share, before = seen.frames / total, found.get(name, 1.0)
            tau_s = 0.5 if share > before else 10.0
            found[name] = share + (before - share) * math.exp(-sample.span_s / tau_s)
    return found


def take_readings(state: PolicyState, site: Site, sample: GovernorSample, work_w: float) -> None:
    """Power and temperature into the estimates that follow from them."""
    power_w = sample.power_w
    quantum_w = sample.quantum_w or 0.0
    offered_hz = sum(seen.offered for seen in sample.cameras.values()) / sample.span_s
    if power_w is not None and power_w != state.last_power_w:
        state.disbelieved = False
    if power_w is None or state.disbelieved:
        state.energy = missed(state.energy, work_w, offered_hz, sample.span_s)
    elif state.seen < FIRST_SAMPLES:
        # power follows the load: nothing can be told before both have stood still for a moment
        state.seen += 1
        known = all(variant.joules is not None for model in site.models for variant in model.variants)
        picture_j = PICTURE_SHARE_S * (state.ordinary_w or power_w)
        state.energy = begun(power_w, work_w, offered_hz, scale_sd=0.25 if known else 1.5, picture_j=picture_j)
        state.base_w = state.energy.base_w
    else:
        state.energy = measured(state.energy, power_w, work_w, offered_hz, sample.span_s, quantum_w)
        state.base_w = state.energy.base_w + (state.base_w - state.energy.base_w) * math.exp(-sample.span_s / BASE_S)
    if sample.tj_c is not None:
        # without a power sensor, or beside one that stands still, it is held by what the load is believed to take
        told = power_w is not None and not state.disbelieved
        felt_w = power_w if told and power_w is not None else state.energy.power_w(work_w)
        state.thermal = felt(state.thermal, sample.tj_c, felt_w, sample.span_s, state.ordinary_w or UNKNOWN_W)
    if power_w is not None and power_w == state.last_power_w:
        state.still += 1
    else:
        state.still, state.still_work_w = 0, work_w
    state.last_power_w = power_w if power_w is not None else state.last_power_w


def lacking(state: PolicyState, budget: Budget, sample: GovernorSample, work_w: float) -> str | None:
    """Why the safe point is the only right one now; None where it is not."""
    reasons = []
    if budget.power_w is not None:
        if sample.power_w is not None and _stands_still(state, sample.power_w, sample.quantum_w or 0.0, work_w):
            state.disbelieved = True  # until it moves: at the safe point the load does not tell any more
        if sample.power_w is None:
            reasons.append(f"no power reading: {sample.power_reason or 'none came'}")
        elif state.disbelieved:
            reasons.append(f"power reads exactly {sample.power_w:.2f} W whatever runs")
    if budget.temperature_c is not None and sample.tj_c is None:
        reasons.append(f"no temperature reading: {sample.tj_reason or 'none came'}")
    if reasons:
        state.good = 0
        state.missing += 1
        if state.missing >= MISSING_SAMPLES:
            state.safe = True
    else:
        state.missing = 0
        state.good += 1
        if state.good >= GOOD_SAMPLES:
            state.safe = False
    if state.safe:
        return "; ".join(reasons) or "readings have just come back"
    return None


def first_look(state: PolicyState, budget: Budget) -> Decision | None:
    """Stay as it is until it can be told what this device takes; None once that is so, or nobody has to know."""
    if state.point is None or state.seen >= FIRST_SAMPLES or budget.power_w is None:
        return None
    return Decision(state.point, "raising", "looking at what this device takes now", state.limits, changed=False)


def _stands_still(state: PolicyState, power_w: float, quantum_w: float, work_w: float) -> bool:
    """Whether power reads the very same although the load moved by what ought to show."""
    moved_w = state.energy.scale * abs(work_w - state.still_work_w)
    return state.still >= STILL_SAMPLES and moved_w > max(FOLLOW_W * quantum_w, 0.1 * power_w)


def safe(site: Site, state: PolicyState, sample: GovernorSample, why: str) -> Decision:
    """The safe point, for this reason."""
    point = safe_point(site)
    changed = point != state.point
    state.point = point
    state.limits = {camera.name: "sensor" for camera in site.cameras}
    state.energy = unsure(state.energy, 0.05) if changed else state.energy
    state.raising, state.t_more_ns, state.t_heavier_ns, state.steady_s = False, None, None, STEADY_S
    # what follows begins anew: no patience for what ran before
    state.t_variant_ns, state.t_load_ns, state.t_raised_ns = None, sample.t_ns, None
    if changed:
        state.t_changed_ns = sample.t_ns
    return Decision(point, "safe", why, state.limits, changed)


def safe_point(site: Site) -> OperatingPoint:
    """The least that is worth running: the lightest variants, every camera at its `min_fps`, the lowest clock."""
    return OperatingPoint(
        {model.name: model.variants[-1].name for model in site.models},
        {camera.name: least_hz(camera) or min(SAFE_HZ, camera.wanted_hz or SAFE_HZ) for camera in site.cameras},
        {model.name: 1 for model in site.models},
        {model.name: model.batch_timeout_ms for model in site.models},
        site.clocks_hz[0] if site.clocks_hz else None,
    )


def wished_point(site: Site) -> OperatingPoint:
    """Everything as people want it."""
    return OperatingPoint(
        {model.name: model.variants[0].name for model in site.models},
        {camera.name: None for camera in site.cameras},
        {model.name: model.places for model in site.models},
        {model.name: model.batch_timeout_ms for model in site.models},
    )


def note_load(state: PolicyState, site: Site, sample: GovernorSample) -> None:
    """Whether cameras bring something else than they did: then patience begins anew."""
    demand_hz = sum(state.offered.get(camera.name, 0.0) for camera in site.cameras)
    if abs(demand_hz - state.demand_hz) > LOAD_SHARE * max(demand_hz, state.demand_hz):
        state.demand_hz, state.t_load_ns, state.steady_s = demand_hz, sample.t_ns, STEADY_S


def note_punishment(state: PolicyState, sample: GovernorSample, work_w: float) -> None:
    """Over-current and the hardware's own throttling: less, now, for a while."""
    # a look may fall between two runs
    work_w = max(work_w, state.energy.smooth_work_w)
    if triggered := [words for name, words in OVER_CURRENT_INPUTS.items() if sample.over_current.get(name, 0) > 0]:
        base = min(work_w, state.punished_work_w if sample.t_ns < state.punished_until_ns else math.inf)
        state.punished_work_w, state.punished_for = OVER_CURRENT_SHARE * base, "over-current"
        state.punished_why = " and ".join(triggered)
        state.punished_until_ns = sample.t_ns + int(OVER_CURRENT_S * NS_PER_S)
    elif sample.throttling and sample.t_ns >= state.t_throttled_ns + int(THROTTLED_AGAIN_S * NS_PER_S):
        state.t_throttled_ns = sample.t_ns
        state.punished_work_w, state.punished_for = THROTTLED_SHARE * work_w, "throttling"
        state.punished_why = "the hardware throttles"
        state.punished_until_ns = sample.t_ns + int(THROTTLED_S * NS_PER_S)
    elif sample.t_ns >= state.punished_until_ns:
        state.punished_work_w = math.inf
