"""The governor as one step: the latency tuner of each model, then the policy over all of them."""

from __future__ import annotations

from edge_runtime.governor.policy import decide
from edge_runtime.governor.readings import safe_point, wished_point
from edge_runtime.governor.state import PolicyState
from edge_runtime.governor.tuner import Tuner, TunerState, Tuning
from edge_runtime.records.governing import (
    Budget,
    Decision,
    GovernorSample,
    LimitWord,
    ModelSeen,
    OperatingPoint,
    Site,
)


class Controller:
    """Keeps the state between samples. `step` is called by one thread, every `PERIOD_S`; nothing in it waits."""

    def __init__(self, tuner: Tuner | None = None) -> None:
        self._tuner = tuner or Tuner()
        self._policy = PolicyState()
        self._tuners: dict[str, TunerState] = {}
        self._is_off = False

    def begin(self, site: Site, budget: Budget) -> OperatingPoint:
        """The point to begin with, before anything has been seen: nobody knows yet what more would take."""
        unknown = budget.power_w is not None or budget.temperature_c is not None
        point = self._policy.point = safe_point(site) if unknown else wished_point(site)
        return point

    def step(self, site: Site, budget: Budget, sample: GovernorSample) -> Decision:
        """The operating point for now, and why."""
        if budget == Budget():
            return self._off(site)
        if self._is_off:
            self._is_off = False
            self.begin(site, budget)
        tunings: dict[str, Tuning] = {}
        for model in site.models:
            seen = sample.models.get(model.name, ModelSeen(None))
            offered_hz = sum(
                min(sample.cameras[camera.name].offered / sample.span_s, camera.wanted_hz or float("inf"))
                for camera in site.cameras
                if model.name in camera.models and camera.name in sample.cameras
            ) * self._policy.shares.get(model.name, 1.0)
            before = self._tuners.get(model.name, TunerState())
            after, tunings[model.name] = self._tuner.step(
                model, budget.latency_p99_ms, seen, sample.span_s, offered_hz, before
            )
            self._tuners[model.name] = after
        self._policy, decision = decide(site, budget, sample, tunings, self._policy)
        return decision

    def held(self, site: Site, budget: Budget, decision: Decision, why: str) -> Decision:
        """The same while something else takes power that nothing is known of, for the reason `why`: the safe point,
        where power or temperature are to be held."""
        if budget.power_w is None and budget.temperature_c is None:
            return decision
        point = self._policy.point = safe_point(site)
        limits: dict[str, LimitWord] = dict.fromkeys(point.fps, "caution")
        return Decision(point, "safe", why, limits, changed=point != decision.point)

    def estimates(self, site: Site, sample: GovernorSample) -> dict[str, float]:
        """What is only estimated, W: power without any inference (`base_w`), and of the rest what each model and each
        camera takes, by its share of lane time (`model NAME`, `camera NAME`)."""
        base_w = self.base_w
        if base_w is None or sample.power_w is None:
            return {}
        found = {"base_w": base_w}
        dynamic_w = max(0.0, sample.power_w - base_w)
        busy_s = {name: seen.busy_s for name, seen in sample.models.items()}
        total_s = sum(busy_s.values())
        if total_s <= 0.0:
            return found
        found |= {f"model {name}": dynamic_w * share / total_s for name, share in busy_s.items()}
        shares = self._shares(site, busy_s)
        return found | {f"camera {name}": dynamic_w * share / total_s for name, share in shares.items()}

    def _shares(self, site: Site, busy_s: dict[str, float]) -> dict[str, float]:
        """Lane seconds that each camera stood for: those of its models by frames."""
        point, offered = self._policy.point, self._policy.offered
        rates = {}
        for camera in site.cameras:
            caps = [camera.wanted_hz, point.fps.get(camera.name) if point is not None else None]
            rates[camera.name] = min(offered.get(camera.name, 0.0), *(cap for cap in caps if cap is not None), 1e9)
        shares = dict.fromkeys(rates, 0.0)
        for model, seconds in busy_s.items():
            of_model = [camera.name for camera in site.cameras if model in camera.models]
            frames = sum(rates[name] for name in of_model)
            for name in of_model:
                shares[name] += seconds * rates[name] / frames if frames > 0 else 0.0
        return shares

    @property
    def base_w(self) -> float | None:
        """Module power without any inference, as it is estimated now, W; None where there is no estimate."""
        energy = self._policy.energy
        return energy.base_w if energy.started else None

    def _off(self, site: Site) -> Decision:
        """No budget: everything as it is wanted."""
        before, self._is_off = self._policy.point, True
        self._policy, self._tuners = PolicyState(), {}
        point = self._policy.point = wished_point(site)
        return Decision(point, "off", "no budget is set", {}, changed=before is not None and point != before)
