"""The governor's decisions: pure, from a sample and the state before to an operating point.

Order of sacrifice: never over a power or temperature budget; then every camera's `min_fps`; then the most accurate
variant; then frames per second up to what is wanted. Down at once, up with patience.

* A power budget and a temperature budget are both limits in watts (`thermal`); the lower one counts.
* What a limit allows in frames per second follows from a learned estimate of base power and of the cost of a frame
  (`energy`, `costs`). It is trusted as far as its own uncertainty says: an untried load is approached step by step.
* `allocate` shares the frames out among cameras.
* A reading that a budget needs and that does not come is the hottest reading: the safe point.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from edge_runtime.governor.adopting import adopt
from edge_runtime.governor.costs import Prices, learn
from edge_runtime.governor.limits import limit_now
from edge_runtime.governor.planning import choose_variants, plan_rates
from edge_runtime.governor.readings import (
    first_look,
    lacking,
    note_load,
    note_punishment,
    offered_now,
    safe,
    shares_now,
    take_readings,
)
from edge_runtime.governor.state import UNKNOWN_W, Plan, PolicyState
from edge_runtime.governor.tuner import Tuning
from edge_runtime.governor.words import told
from edge_runtime.records.governing import Budget, Decision, GovernorSample, Site


def decide(
    site: Site, budget: Budget, sample: GovernorSample, tunings: Mapping[str, Tuning], state: PolicyState
) -> tuple[PolicyState, Decision]:
    """The operating point for now, and why. `tunings`: what the latency tuner says, by model."""
    state = replace(state, now_ns=sample.t_ns)
    state.learned = learn(state.learned, site, sample)
    state.offered = offered_now(state, sample)
    state.shares = shares_now(state, sample)
    state.down = frozenset(name for name, seen in sample.models.items() if seen.variant is None)
    if state.ordinary_w is None:
        state.ordinary_w = budget.power_w or sample.power_w
    prices = Prices(site, state.learned, state.ordinary_w or UNKNOWN_W)
    work_w = prices.work_w(sample)
    take_readings(state, site, sample, work_w)
    if (why := lacking(state, budget, sample, work_w)) is not None:
        return state, safe(site, state, sample, why)
    if (waits := first_look(state, budget)) is not None:
        return state, waits
    note_load(state, site, sample)
    note_punishment(state, sample, work_w)
    limit = limit_now(state, budget, sample, work_w)
    variants = choose_variants(site, budget, sample, tunings, state, prices, limit)
    plan = plan_rates(site, budget, state, prices, limit.work_w, variants)

    def lower(work_w: float) -> Plan:
        return plan_rates(site, budget, state, prices, work_w, variants)

    changed = adopt(site, budget, sample, tunings, state, limit, plan, lower)
    return state, told(site, budget, sample, tunings, state, prices, limit, plan, changed=changed)
