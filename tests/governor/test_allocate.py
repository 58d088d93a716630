"""Who gets how many frames: minimum first, then by priority, never beyond what there is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.governor.allocate import Claim, allot


def claim(
    name: str,
    demand: float,
    least: float = 0.0,
    *,
    priority: int = 0,
    ceiling: float | None = None,
    work_j: float = 1.0,
    busy_s: float = 0.01,
) -> Claim:
    ceiling = demand if ceiling is None else ceiling
    return Claim(name, priority, demand, least, demand, ceiling, work_j, {"m": busy_s})


def test_all_get_what_they_ask_for_where_there_is_enough() -> None:
    result = allot([claim("a", 10), claim("b", 20)], 30.0, {})
    assert result.rates == {"a": pytest.approx(10), "b": pytest.approx(20)}
    assert result.bound == {}


def test_equal_priority_gets_an_equal_share_of_its_way() -> None:
    result = allot([claim("a", 30, 10), claim("b", 20, 5)], 25.0, {})
    # 15 for the minima; 10 more for ways of 20 and 15: two sevenths of each
    assert result.rates == {"a": pytest.approx(10 + 20 * 10 / 35), "b": pytest.approx(5 + 15 * 10 / 35)}
    assert result.bound == {"a": "energy", "b": "energy"}


def test_priority_comes_after_every_minimum() -> None:
    result = allot([claim("low", 20, 5), claim("high", 20, 5, priority=3)], 22.0, {})
    assert result.rates == {"low": pytest.approx(5), "high": pytest.approx(17)}


def test_a_budget_comes_before_every_minimum() -> None:
    result = allot([claim("a", 20, 10), claim("b", 20, 10, priority=5)], 10.0, {})
    assert result.rates == {"a": pytest.approx(5), "b": pytest.approx(5)}


def test_what_is_left_over_is_kept_for_who_may_come() -> None:
    result = allot([claim("a", 10), claim("away", 0, ceiling=30)], 25.0, {})
    assert result.rates == {"a": pytest.approx(10), "away": pytest.approx(15)}
    assert result.bound == {}


def test_full_lanes_of_one_model_leave_the_others_alone() -> None:
    claims = [
        Claim("a", 0, 100, 0, 100, 100, 0.1, {"slow": 0.1}),
        Claim("b", 0, 100, 0, 100, 100, 0.1, {"fast": 0.001}),
    ]
    result = allot(claims, 1000.0, {"slow": 1.0, "fast": 1.0})
    assert result.rates == {"a": pytest.approx(10), "b": pytest.approx(100)}
    assert result.bound == {"a": "time"}


CLAIMS = st.lists(
    st.builds(
        lambda priority, least, more, ceiling, work_j, busy: (priority, least, more, ceiling, work_j, busy),
        st.integers(-3, 3),
        st.floats(0, 30),
        st.floats(0, 60),
        st.floats(0, 60),
        st.floats(0, 5),
        st.dictionaries(st.sampled_from(("m", "n")), st.floats(0, 0.1), max_size=2),
    ),
    min_size=1,
    max_size=8,
)


@given(CLAIMS, st.floats(0, 200), st.dictionaries(st.sampled_from(("m", "n")), st.floats(0, 3), max_size=2))
def test_never_more_than_there_is(
    rows: list[tuple[int, float, float, float, float, dict[str, float]]], work_w: float, lane_s: dict[str, float]
) -> None:
    claims = [
        Claim(f"c{index}", priority, least + more, least, least + more, least + more + above, work_j, busy)
        for index, (priority, least, more, above, work_j, busy) in enumerate(rows)
    ]
    rates = allot(claims, work_w, lane_s).rates
    for each in claims:
        assert -1e-9 <= rates[each.name] <= each.ceiling + 1e-6
    assert sum(each.work_j * rates[each.name] for each in claims) <= work_w + 1e-5
    for model, most_s in lane_s.items():
        assert sum(each.busy_s.get(model, 0.0) * rates[each.name] for each in claims) <= most_s + 1e-5


@given(CLAIMS, st.floats(0, 200))
def test_nothing_is_left_lying_while_somebody_asks(
    rows: list[tuple[int, float, float, float, float, dict[str, float]]], work_w: float
) -> None:
    claims = [
        Claim(f"c{index}", priority, least + more, least, least + more, least + more, work_j + 0.01, {})
        for index, (priority, least, more, _, work_j, _) in enumerate(rows)
    ]
    result = allot(claims, work_w, {})
    used_w = sum(each.work_j * result.rates[each.name] for each in claims)
    short = [each for each in claims if result.rates[each.name] < each.demand - 1e-6]
    assert not short or used_w >= work_w - 1e-5
    # and nobody of lower priority has more than its minimum while one of higher priority is short
    for each in short:
        for other in claims:
            if other.priority < each.priority:
                assert result.rates[other.name] <= other.least + 1e-6
