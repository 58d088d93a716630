"""The governor's decisions in an operator's words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from edge_runtime.governor.costs import Prices
from edge_runtime.governor.planning import depth, rate_of
from edge_runtime.governor.state import NS_PER_S, Limit, Plan, PolicyState
from edge_runtime.governor.tuner import Tuning
from edge_runtime.records.governing import Budget, Decision, GovernorSample, GovernorWord, LimitWord, Site

LASTING_S = 5.0


def readings(budget: Budget, sample: GovernorSample, p99_ms: float | None, limiter: LimitWord) -> str:
    """What is measured against what is allowed: of what binds, if that is measured."""
    found: list[tuple[LimitWord, str]] = []
    if budget.power_w is not None and sample.power_w is not None:
        found.append(("power", f"power {sample.power_w:.1f} of {budget.power_w:.1f} W"))
    if budget.temperature_c is not None and sample.tj_c is not None:
        found.append(("temperature", f"Tj {sample.tj_c:.1f} of {budget.temperature_c:.1f} degC"))
    if budget.latency_p99_ms is not None and p99_ms is not None:
        found.append(("latency", f"p99 {p99_ms:.0f} of {budget.latency_p99_ms:.0f} ms"))
    found.sort(key=lambda item: item[0] != limiter)
    return found[0][1] if found else "nothing was measured yet"


def steps(site: Site, variants: Mapping[str, str], saved_w: Mapping[str, float]) -> list[str]:
    """Lighter variants in use, and about what they save."""
    found = []
    for model in site.models:
        wanted, runs = model.variants[0].name, variants.get(model.name)
        if runs is not None and runs != wanted:
            saves = saved_w.get(model.name)
            about = f" saves about {saves:.1f} W" if saves is not None and saves >= 0.05 else ""
            found.append(f"{model.name} {wanted} → {runs}{about}")
    return found


def rates(held: Sequence[tuple[str, float, float]]) -> str | None:
    """Cameras that get less than they bring: (name, demand, rate), Hz."""
    if not held:
        return None
    shown = [f"{name} {demand:.3g} → {rate:.3g} fps" for name, demand, rate in held[:3]]
    more = f" and {len(held) - 3} more" if len(held) > 3 else ""
    return ", ".join(shown) + more


def told(
    site: Site, budget: Budget, sample: GovernorSample, tunings: Mapping[str, Tuning], state: PolicyState,
    prices: Prices, limit: Limit, plan: Plan, *, changed: bool,
) -> Decision:  # fmt: skip
    """The decision in words, and for which reason each camera is held back."""
    assert state.point is not None
    limits: dict[str, LimitWord] = {}
    held: list[tuple[str, float, float]] = []
    for claim in plan.claims:
        cap = state.point.fps[claim.name]
        if cap is not None and cap < 0.98 * claim.demand:
            limits[claim.name] = "caution" if limit.caution else limit.word
            held.append((claim.name, claim.demand, cap))
    short = _short(site, budget, tunings, plan, state)
    for camera in site.cameras:
        if not short.isdisjoint(camera.models):
            limits.setdefault(camera.name, "latency")
    state.limits = limits
    below = depth(site, plan.variants)
    rising = bool(held) and all(word == "caution" for word in limits.values())
    now: GovernorWord = "holding" if not limits and not below else "raising" if rising else "derating"
    word = _lasting(state, sample, now, changed=changed)
    p99_ms = max((tuning.p99_ms for tuning in tunings.values() if tuning.p99_ms is not None), default=None)
    if word == "holding" and p99_ms is not None and p99_ms > (budget.latency_p99_ms or p99_ms):
        p99_ms = None  # a few late frames, of too few to say so
    binding: LimitWord = "latency" if short or (not held and below) else limit.word
    measured_words = readings(budget, sample, p99_ms, binding)
    if word == "holding":
        return Decision(state.point, word, f"every wish is granted: {measured_words}", limits, changed)
    granted = {claim.name: rate_of(state.point.fps[claim.name], claim) for claim in plan.claims}
    saved = {}
    for model in site.models:
        wanted = prices.cost(model.name, model.variants[0].name, plan.gpu_hz)
        runs = prices.cost(model.name, plan.variants[model.name], plan.gpu_hz)
        frames = sum(granted[camera.name] for camera in site.cameras if model.name in camera.models)
        if budget.power_w is None and budget.temperature_c is None:
            continue  # nobody has told what a frame takes
        saved[model.name] = (wanted.work_j - runs.work_j) * state.energy.scale * frames
    parts = [measured_words, *_others(limits, state.punished_why), *steps(site, plan.variants, saved)]
    if (shown := rates(held)) is not None:
        parts.append(shown)
    return Decision(state.point, word, "; ".join(parts), limits, changed)


def _lasting(state: PolicyState, sample: GovernorSample, now: GovernorWord, *, changed: bool) -> GovernorWord:
    """The state to tell: another one once something changed, or after it has lasted. Demand wavers."""
    if now == state.word:
        state.t_word_ns = None
    elif state.t_word_ns is None:
        state.t_word_ns = sample.t_ns
    if now != state.word and (changed or sample.t_ns - (state.t_word_ns or sample.t_ns) >= LASTING_S * NS_PER_S):
        state.word, state.t_word_ns = now, None
    return state.word


def _short(site: Site, budget: Budget, tunings: Mapping[str, Tuning], plan: Plan, state: PolicyState) -> set[str]:
    """Models whose lanes cannot take in time what the point lets through: the oldest of it is left out."""
    assert state.point is not None
    found = set()
    for model in site.models:
        tuning = tunings.get(model.name)
        if tuning is None or not tuning.overloaded:
            continue
        need_s = sum(
            claim.busy_s.get(model.name, 0.0) * rate_of(state.point.fps[claim.name], claim) for claim in plan.claims
        )
        late = tuning.p99_ms is not None and tuning.p99_ms > (budget.latency_p99_ms or math.inf)
        if late or need_s > tuning.utilisation * model.lanes:
            found.add(model.name)
    return found


def _others(limits: Mapping[str, LimitWord], why: str) -> list[str]:
    found = set(limits.values())
    texts = {
        "latency": "more than the lanes can give results for in time",
        "over-current": why,
        "throttling": why,
        "caution": "step by step, since what more costs is not known yet",
    }
    return [text for word, text in texts.items() if word in found]
