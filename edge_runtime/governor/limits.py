"""How much load the budgets allow, in watts by the costs that are known beforehand."""

from __future__ import annotations

import math

from edge_runtime.governor.energy import EnergyState
from edge_runtime.governor.state import Limit, PolicyState
from edge_runtime.governor.thermal import allowed_w
from edge_runtime.records.governing import Budget, GovernorSample

ROOM_SHARE = 0.012
"""Of the watts between base power and budget so many are left alone: half of what a change is worth."""
OVER_SHARE = 1.01
"""From here on the mean of one sample alone is reason enough to step down."""
OVER_SDS = 1.0
FAST_SDS, FAST_SHARE = 1.2, 0.006
FAR_SHARE, MOST_CUT = 1.2, 0.5
CAUTION_SHARE = 1.02
CAUTION_SDS = 2.0
"""A load is not tried where budget x CAUTION_SHARE lies within so many standard deviations of its expected power."""
MOST_GROWTH = 2.0
LEAST_TRIAL = 0.1
"""A load grows at most so many times from one sample to the next; a sensor that says nothing must not cost much."""


def limit_now(state: PolicyState, budget: Budget, sample: GovernorSample, work_w: float) -> Limit:
    """How much load the budgets allow."""
    energy = state.energy
    found = Limit(math.inf, math.inf, "power", caution=False)
    if budget.power_w is None and budget.temperature_c is None:
        punished_w = state.punished_work_w
        return found if math.isinf(punished_w) else Limit(punished_w, punished_w, state.punished_for, caution=False)
    if budget.power_w is not None:
        target_w = _target_w(state, budget.power_w)
        allowed = _work_for(energy, _base_w(state, budget.power_w), target_w)
        line_w = OVER_SHARE * budget.power_w + OVER_SDS * math.sqrt(energy.noise_var)
        if sample.power_w is not None and sample.power_w > line_w:
            # measured, and so no matter of estimates; the load as the reading knows it
            seen = max(0.0, energy.work_w - (sample.power_w - target_w) / energy.scale)
            allowed = min(allowed, seen)
            if sample.power_w < FAR_SHARE * budget.power_w:
                # an estimate that is off must not take everything away for a few watts
                allowed = max(allowed, MOST_CUT * min(work_w, energy.work_w))
        found = Limit(allowed, allowed, "power", caution=False)
    if budget.temperature_c is not None and sample.tj_c is not None:
        limit_w = allowed_w(state.thermal, budget.temperature_c)
        allowed = _work_for(energy, _base_w(state, state.thermal.power_w), limit_w)
        if allowed < found.work_w:
            found = Limit(allowed, allowed, "temperature", caution=False)
    if state.punished_work_w < found.work_w:
        found = Limit(state.punished_work_w, state.punished_work_w, state.punished_for, caution=False)
    most = _tried(state, budget, work_w)
    return found if most >= found.work_w else Limit(found.hard_w, most, found.word, caution=True)


def _base_w(state: PolicyState, ordinary_w: float) -> float:
    """Base power to plan with: the slow one, which noise does not move, unless the fast one has left it behind."""
    energy = state.energy
    doubt_w = max(FAST_SDS * math.sqrt(energy.noise_var), FAST_SHARE * ordinary_w)
    return energy.base_w if energy.base_w > state.base_w + doubt_w else state.base_w


def _work_for(energy: EnergyState, base_w: float, power_w: float) -> float:
    return max(0.0, (power_w - base_w) / energy.scale)


def _target_w(state: PolicyState, power_w: float) -> float:
    return power_w - ROOM_SHARE * max(0.0, power_w - state.base_w)


def _tried(state: PolicyState, budget: Budget, work_w: float) -> float:
    """The most load that may be tried with what is known by now."""
    energy = state.energy
    now_w = max(work_w, energy.work_w)
    if budget.power_w is None:
        return max(MOST_GROWTH * now_w, 0.05 * (state.last_power_w or 1.0))
    least = LEAST_TRIAL * max(0.0, budget.power_w - state.base_w) / energy.scale
    most = max(MOST_GROWTH * now_w, least)
    line_w = CAUTION_SHARE * budget.power_w
    if energy.power_w(most) + CAUTION_SDS * energy.sd_w(most) <= line_w:
        return most
    low, high = min(energy.work_w, most), most
    for _ in range(12):
        middle = (low + high) / 2
        if energy.power_w(middle) + CAUTION_SDS * energy.sd_w(middle) <= line_w:
            low = middle
        else:
            high = middle
    # what runs already is no trial
    return max(low, min(now_w, most))
