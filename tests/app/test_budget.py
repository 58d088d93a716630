"""The budget in force: what a command may set, what lasts, and what the configuration takes back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.app.budget import BudgetKeeper, describe, profile_path
from edge_runtime.config import BudgetConfig, Config
from edge_runtime.control.commands import set_budget
from edge_runtime.control.dispatcher import Dispatcher
from edge_runtime.errors import RefusedError
from edge_runtime.records.commands import SetBudgetArgs
from edge_runtime.records.events import Scalar, Severity
from edge_runtime.records.governing import Budget
from edge_runtime.records.identity import Identity


class Told:
    """Every change that was told."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.data: list[Mapping[str, Scalar]] = []

    def __call__(self, severity: Severity, text: str, data: Mapping[str, Scalar]) -> None:
        assert severity == "info"
        self.texts.append(text)
        self.data.append(data)


def keeper(told: Told | None = None, *, unmeasured: str | None = None, **config: float) -> BudgetKeeper:
    budget = BudgetConfig(**config) if config else None  # type: ignore[arg-type]
    return BudgetKeeper(budget, unmeasured=unmeasured, tell=told or Told())


def test_a_command_changes_what_it_names_and_nothing_else() -> None:
    told = Told()
    budget = keeper(told, power_w=15.0, temperature_c=85.0)
    assert budget.current() == Budget(15.0, 85.0, None)
    assert budget.set(SetBudgetArgs(power_w=10.0)) == Budget(10.0, 85.0, None)
    assert budget.set(SetBudgetArgs(temperature_c=None, latency_p99_ms=80.0)) == Budget(10.0, None, 80.0)
    assert budget.current() == Budget(10.0, None, 80.0)
    assert budget.in_force() == (Budget(10.0, None, 80.0), "command", 15.0)
    assert told.texts[-1] == "the budget is 10 W, p99 80 ms, by the command"
    assert told.data[-1] == {"set_by": "command", "power_w": 10.0, "temperature_c": None, "latency_p99_ms": 80.0}


@pytest.mark.parametrize(
    ("config", "most_w"),
    [
        ({"power_w": 10.0, "max_power_w": 15.0}, 15.0),
        ({"temperature_c": 85.0, "max_power_w": 15.0}, 15.0),
        ({"power_w": 10.0}, 10.0),
    ],
)
def test_no_command_allows_more_power_than_the_configuration(config: dict[str, float], most_w: float) -> None:
    budget = BudgetKeeper(BudgetConfig(**config), tell=Told())  # type: ignore[arg-type]
    before = budget.current()
    for watts in (most_w + 0.01, None):
        with pytest.raises(RefusedError) as caught:
            budget.set(SetBudgetArgs(power_w=watts, latency_p99_ms=50.0))
        assert (caught.value.code, caught.value.where) == ("over_max_power", "args.power_w")
        # nothing of a command that is refused is done
        assert budget.current() == before
    assert budget.set(SetBudgetArgs(power_w=most_w)).power_w == most_w


def test_without_a_bound_any_power_goes_and_goes_away_again() -> None:
    budget = keeper()
    assert budget.set(SetBudgetArgs(power_w=900.0)).power_w == 900.0
    assert budget.set(SetBudgetArgs(power_w=None)) == Budget()


def test_where_nothing_is_measured_only_latency_can_be_held() -> None:
    budget = keeper(unmeasured='hardware = "none"')
    for args in (SetBudgetArgs(power_w=5.0), SetBudgetArgs(temperature_c=80.0, latency_p99_ms=1.0)):
        with pytest.raises(RefusedError, match="nothing here could tell"):
            budget.set(args)
    assert budget.set(SetBudgetArgs(latency_p99_ms=80.0, power_w=None)) == Budget(latency_p99_ms=80.0)


def test_what_nothing_can_tell_is_said_for_as_long_as_it_is_asked_for() -> None:
    assert keeper(power_w=15.0).unheld() == []
    budget = keeper(unmeasured="no sensors: this is no Jetson", power_w=15.0, temperature_c=85.0, latency_p99_ms=80.0)
    assert budget.unheld() == [
        "power budget of 15 W cannot be held: no sensors: this is no Jetson; the safe point is in force",
        "temperature budget of 85 degC cannot be held: no sensors: this is no Jetson; the safe point is in force",
    ]
    with pytest.raises(RefusedError) as caught:
        budget.set(SetBudgetArgs(power_w=5.0))
    assert (caught.value.code, caught.value.remedy) == ("not_measured", "no sensors: this is no Jetson")
    budget.apply(BudgetConfig(latency_p99_ms=80.0))
    assert budget.unheld() == []


def test_a_configuration_that_says_what_it_said_leaves_what_a_command_has_set() -> None:
    told = Told()
    budget = keeper(told, power_w=15.0)
    budget.set(SetBudgetArgs(power_w=5.0))
    budget.apply(BudgetConfig(power_w=15.0))
    assert (budget.current().power_w, len(told.texts)) == (5.0, 1)
    budget.apply(BudgetConfig(power_w=14.0))
    assert budget.in_force() == (Budget(14.0), "configuration", 14.0)
    budget.apply(None)
    assert (budget.current(), told.texts[-1]) == (Budget(), "the budget is none, by the configuration")


limits = st.none() | st.floats(1, 1000)


@given(limits, limits, st.lists(limits, max_size=20))
def test_whatever_is_commanded_the_bound_holds(power_w: float | None, most_w: float | None, asked: list[Any]) -> None:
    if power_w is not None and most_w is not None and power_w > most_w:
        power_w, most_w = most_w, power_w
    budget = BudgetKeeper(BudgetConfig(power_w=power_w, max_power_w=most_w), tell=Told())
    bound_w = most_w if most_w is not None else power_w
    for watts in asked:
        before = budget.current()
        try:
            budget.set(SetBudgetArgs(power_w=watts))
        except RefusedError:
            assert budget.current() == before
        now = budget.current().power_w
        assert bound_w is None or now is None or now <= bound_w
        # what was there is never lifted where there is a bound
        assert bound_w is None or before.power_w is None or now is not None


class Clock:
    def monotonic_ns(self) -> int:
        return 5

    def utc(self) -> datetime:
        return datetime(2026, 3, 1, tzinfo=timezone.utc)


def command(budget: BudgetKeeper, args: str) -> dict[str, Any]:
    identity = Identity("gate-07", "b", "s", "0", 0)
    dispatcher = Dispatcher(identity, Clock(), lambda: True, {"set-budget": set_budget(budget)})
    reply = dispatcher.handle("set-budget", f'{{"args": {args}}}'.encode(), door="socket")
    assert reply is not None
    answer: dict[str, Any] = json.loads(reply.to_json())
    return answer


def test_the_command_is_answered_with_the_budget_in_force() -> None:
    answer = command(keeper(power_w=15.0, temperature_c=85.0), '{"power_w": 7, "temperature_c": null}')
    assert answer["result"] == {"power_w": 7.0, "temperature_c": None, "latency_p99_ms": None}


@pytest.mark.parametrize(
    ("args", "code"),
    [
        ("{}", "invalid"),
        ('{"power": 7}', "invalid"),
        ('{"power_w": 0}', "invalid"),
        ('{"power_w": -1}', "invalid"),
        ('{"power_w": 1001}', "invalid"),
        ('{"power_w": "7"}', "invalid"),
        ('{"power_w": true}', "invalid"),
        ('{"power_w": NaN}', "invalid"),
        ('{"power_w": 1e999}', "invalid"),
        ('{"temperature_c": 29.9}', "invalid"),
        ('{"temperature_c": 111}', "invalid"),
        ('{"latency_p99_ms": 60001}', "invalid"),
        ('{"power_w": 15.1}', "over_max_power"),
        ('{"power_w": null}', "over_max_power"),
    ],
)
def test_a_command_that_is_wrong_changes_nothing(args: str, code: str) -> None:
    budget = keeper(power_w=15.0)
    answer = command(budget, args)
    assert (answer["ok"], answer["error"]["code"]) == (False, code), answer
    assert budget.current() == Budget(15.0)


def test_a_budget_in_words() -> None:
    assert describe(Budget(7.5, 85.0, 80.0)) == "7.5 W, 85 degC, p99 80 ms"
    assert describe(Budget()) == "none"


def test_the_profile_is_the_configured_one_or_the_stores(tmp_path: Path) -> None:
    config = Config.model_validate({"device": {"store": str(tmp_path)}}, context={"base": tmp_path})
    assert profile_path(config) is None
    (tmp_path / "profile.toml").touch()
    assert profile_path(config) == tmp_path / "profile.toml"
    named = config.model_copy(update={"budget": BudgetConfig(power_w=5.0, profile="other.toml")})  # type: ignore[arg-type]
    assert profile_path(named) is not None
    assert profile_path(named) != tmp_path / "profile.toml"
