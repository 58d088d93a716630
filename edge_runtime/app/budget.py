"""The budget in force: the configuration's, or what a command has set since."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from edge_runtime.config import BudgetConfig, Config
from edge_runtime.errors import RefusedError
from edge_runtime.records.commands import SetBudgetArgs
from edge_runtime.records.events import Scalar, Severity
from edge_runtime.records.governing import Budget

PROFILE_NAME = "profile.toml"
"""This device's own benchmark profile, in the store."""

Tell = Callable[[Severity, str, Mapping[str, Scalar]], None]


class BudgetInForce(NamedTuple):
    """A budget, who set it, and what set-budget may not exceed, W; None: there is no bound."""

    budget: Budget
    set_by: Literal["configuration", "command"]
    max_power_w: float | None


class BudgetKeeper:
    """Holds the budget. What a command sets lasts until the next start, or until `[budget]` in the file is another one.

    `unmeasured`: why nothing here can tell watts and degrees; None where something can. `tell` is told of every change,
    on the thread that makes it. Any thread may call.
    """

    def __init__(self, config: BudgetConfig | None, *, unmeasured: str | None = None, tell: Tell) -> None:
        self._lock = threading.Lock()
        self._unmeasured = unmeasured
        self._tell = tell
        self._config = config
        self._now = _configured(config)

    def current(self) -> Budget:
        """What has to be held now."""
        return self._now.budget

    def in_force(self) -> BudgetInForce:
        """The same, and where it comes from."""
        return self._now

    def unheld(self) -> list[str]:
        """What is asked for here and cannot be held, one sentence each. Any thread."""
        budget = self._now.budget
        asked = (("power", budget.power_w, "W"), ("temperature", budget.temperature_c, "degC"))
        return [
            f"{what} budget of {value:g} {unit} cannot be held: {self._unmeasured}; the safe point is in force"
            for what, value, unit in asked
            if value is not None and self._unmeasured is not None
        ]

    def set(self, args: SetBudgetArgs) -> Budget:
        """Change what `args` name; the budget in force then.

        Raises RefusedError for a power above the bound, and for what cannot be measured here.
        """
        with self._lock:
            now = self._now
            for key in sorted(args.model_fields_set):
                self._check(key, getattr(args, key), now.max_power_w)
            fields = {key: getattr(args, key) for key in args.model_fields_set}
            budget = Budget(**{**_fields(now.budget), **fields})
            self._now = now._replace(budget=budget, set_by="command")
        self._say(self._now)
        return budget

    def apply(self, config: BudgetConfig | None) -> None:
        """The configuration was read again. One that says what it said before leaves what a command has set."""
        with self._lock:
            if config == self._config:
                return
            self._config = config
            self._now = _configured(config)
        self._say(self._now)

    def _check(self, key: str, value: float | None, most_w: float | None) -> None:
        where = f"args.{key}"
        if value is not None and key != "latency_p99_ms" and self._unmeasured is not None:
            raise RefusedError(
                "nothing here could tell whether it is held",
                code="not_measured",
                where=where,
                remedy=self._unmeasured,
            )
        if key != "power_w" or most_w is None:
            return
        if value is None:
            raise RefusedError(
                f"without a power budget it could take more than {most_w:g} W",
                code="over_max_power",
                where=where,
                remedy=f"a number up to {most_w:g}",
            )
        if value > most_w:
            raise RefusedError(
                f"{value:g} W is more than set-budget may set",
                code="over_max_power",
                where=where,
                remedy=f"at most {most_w:g}; [budget] max_power_w in the configuration says so",
            )

    def _say(self, now: BudgetInForce) -> None:
        text = f"the budget is {describe(now.budget)}, by the {now.set_by}"
        self._tell("info", text, {"set_by": now.set_by, **_fields(now.budget)})


def _configured(config: BudgetConfig | None) -> BudgetInForce:
    if config is None:
        return BudgetInForce(Budget(), "configuration", None)
    budget = Budget(config.power_w, config.temperature_c, config.latency_p99_ms)
    most_w = config.max_power_w if config.max_power_w is not None else config.power_w
    return BudgetInForce(budget, "configuration", most_w)


def _fields(budget: Budget) -> dict[str, float | None]:
    return {
        "power_w": budget.power_w,
        "temperature_c": budget.temperature_c,
        "latency_p99_ms": budget.latency_p99_ms,
    }


def describe(budget: Budget) -> str:
    """A budget in words: "15 W, 85 degC, p99 80 ms", or "none"."""
    parts = (
        (budget.power_w, "{:g} W"),
        (budget.temperature_c, "{:g} degC"),
        (budget.latency_p99_ms, "p99 {:g} ms"),
    )
    return ", ".join(text.format(value) for value, text in parts if value is not None) or "none"


def profile_path(config: Config) -> Path | None:
    """Where this device's own profile is: the configuration's, else the store's where there is one."""
    if config.budget is not None and config.budget.profile is not None:
        return config.budget.profile
    path = config.device.store / PROFILE_NAME
    return path if path.is_file() else None
