"""How a device is governed, as reports say it: the operating point, the governor, and whether the budget was held."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from edge_runtime.records.governing import Budget, Operating
from edge_runtime.records.power import Exceeded, Unavailable
from edge_runtime.records.status import GovernorNow
from edge_runtime.records.window import BudgetWindow, GovernorWindow, OperatingPointWindow

TOLERANCE = 1.03
"""A second counts as above the power budget from here on, as a share of it."""


@dataclass(frozen=True, slots=True)
class ModelView:
    """A model as it stands now; `engine` None when it is down for `down_reason`."""

    name: str
    engine: str | None
    variant: str
    backend: str
    max_batch: int
    down_reason: str | None


def operating_point(
    operating: Operating, models: Sequence[ModelView], fps_wanted: Mapping[str, float | None]
) -> OperatingPointWindow:
    """What runs how: what is there, and within it what was decided."""
    up = [model for model in models if model.engine]
    variants = {model.name: model.variant for model in up}
    batch = {model.name: model.max_batch for model in up}
    decision = operating.decision
    if decision is None:
        return OperatingPointWindow(variants=variants, fps=dict(fps_wanted), batch=batch)
    point = decision.point
    return OperatingPointWindow(
        variants=variants,
        fps={name: _lower(wanted, point.fps.get(name)) for name, wanted in fps_wanted.items()},
        batch={name: min(most, point.batch.get(name, most)) for name, most in batch.items()},
        limits={name: why for name, why in decision.limits.items() if name in fps_wanted},
        batch_timeout_ms={name: ms for name, ms in point.batch_timeout_ms.items() if name in batch},
        gpu_hz=point.gpu_hz,
    )


def _lower(wanted_hz: float | None, cap_hz: float | None) -> float | None:
    there = [hz for hz in (wanted_hz, cap_hz) if hz is not None]
    return round(min(there), 3) if there else None


def governor_now(operating: Operating) -> GovernorNow:
    """What the governor does, and how often it has changed something since the start."""
    decision = operating.decision
    if decision is not None:
        state, because = decision.state, decision.because
    else:
        state, because = "off", "no budget is set" if operating.budget == Budget() else "nothing was decided yet"
    return GovernorNow(state=state, because=because, changes=operating.changes, estimates=dict(operating.estimates))


class GoverningReport:
    """What consecutive windows say of the governor and of the budget."""

    def __init__(
        self,
        operating: Callable[[], Operating],
        seconds_above: Callable[[int, int, float], Exceeded | Unavailable],
    ) -> None:
        self._operating = operating
        self._seconds_above = seconds_above
        self._before = operating()

    def build(self, start_ns: int, end_ns: int) -> tuple[Operating, GovernorWindow, BudgetWindow]:
        """For the window between two monotonic times, whose readings are there already."""
        before, self._before = self._before, self._operating()
        now, told = self._before, governor_now(self._before)
        governor = GovernorWindow(
            state=told.state, because=told.because, changes=now.changes - before.changes, estimates=told.estimates
        )
        return now, governor, self._budget(before.budget.power_w, now.budget, start_ns, end_ns)

    def _budget(self, before_w: float | None, budget: Budget, start_ns: int, end_ns: int) -> BudgetWindow:
        violated_s: float | None = None
        reason: str | None
        if budget.power_w is None:
            reason = "no power budget is set"
        elif budget.power_w != before_w:
            reason = "the power budget changed in the window"
        else:
            found = self._seconds_above(start_ns, end_ns, budget.power_w * TOLERANCE)
            reason = found.reason
            if isinstance(found, Exceeded):
                violated_s = round(found.above_s, 3)
                if found.unknown_s:
                    reason = f"not known for {found.unknown_s:.1f} s of the window: {found.reason}"
        return BudgetWindow(
            power_w=budget.power_w,
            temperature_c=budget.temperature_c,
            latency_p99_ms=budget.latency_p99_ms,
            violated_s=violated_s,
            reason=reason,
        )
