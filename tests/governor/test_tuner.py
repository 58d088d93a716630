"""The latency tuner: alone against any samples, and over a queue of frames in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.governor.tuner import MOST_UTILISATION, Tuner, TunerState, Tuning, percentile, sizes_of
from edge_runtime.records.governing import ModelSeen, ModelSite, VariantSite
from tests.governor.lane_queue import STEP_S, Look, World

BUDGET_MS = 80.0
SURGE_S = 5.0


def surge(hz: float) -> Callable[[float], float]:
    """From a tenth of `hz` to all of it, within a second."""
    return lambda t_s: hz * min(1.0, max(0.1, 0.1 + 0.9 * (t_s - SURGE_S)))


def linear(frame_s: float, run_s: float = 0.0) -> Callable[[int], float]:
    return lambda frames: run_s + frame_s * frames


def p99_ms(looks: list[Look]) -> float:
    return percentile(sorted(latency for look in looks for latency in look.latencies_ms))


def rate_hz(looks: list[Look]) -> float:
    return sum(len(look.latencies_ms) for look in looks) / (len(looks) * STEP_S)


def after(looks: list[Look], t_s: float) -> list[Look]:
    return [look for look in looks if look.t_s > t_s]


# --- over a queue


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("load", [1.0, 2.0])
@pytest.mark.parametrize("cameras", [4, 8])
def test_a_tenfold_surge_is_in_time_after_two_seconds_and_loses_little(cameras: int, load: float, seed: int) -> None:
    costs = [linear(0.03), linear(0.02), linear(0.012)]
    offered_hz = load * 2 / costs[0](1)
    world = World(surge(offered_hz / cameras), costs, cameras=cameras, beside_s=0.001, seed=seed)
    looks = world.run(30)
    tail = after(looks, SURGE_S + 2.0)
    assert p99_ms(tail) <= BUDGET_MS
    # what the variant that was chosen can do, or what there is
    settled = after(looks, SURGE_S + 5.0)
    can_hz = 2 / (costs[min(look.depth for look in settled)](1) + 0.001)
    assert rate_hz(settled) >= 0.9 * min(can_hz, offered_hz)
    changes = sum(a.tuning.utilisation != b.tuning.utilisation for a, b in pairwise(after(looks, SURGE_S + 8.0)))
    assert changes <= 3


def test_what_one_variant_cannot_do_in_time_is_left_out() -> None:
    """No lighter variant: fewer frames, in time, and a share that settles where they are."""
    looks = World(surge(2 * 2 / 0.03 / 8), [linear(0.03)], beside_s=0.001).run(120)
    assert p99_ms(after(looks, 15.0)) <= BUDGET_MS
    cuts = [b.t_s for a, b in pairwise(looks) if b.tuning.utilisation < a.tuning.utilisation]
    assert cuts[0] <= SURGE_S + 1.5  # the load passed what lanes can do in the middle of that second
    assert sum(t_s > 60.0 for t_s in cuts) <= 3
    assert rate_hz(after(looks, 60.0)) > 0.6 * 2 / 0.03


def test_when_the_surge_is_over_the_overload_ends_after_ten_seconds_and_no_sooner() -> None:
    full_hz = 2 / 0.03 / 4

    def rate(t_s: float) -> float:
        return 2 * full_hz if 5 <= t_s < 15 else 0.1 * full_hz

    looks = World(rate, [linear(0.03)], cameras=4).run(40)
    over = [look.t_s for look in looks if look.tuning.overloaded]
    assert over[0] <= 5.0 + 0.75
    assert 15 + 9.5 <= over[-1] <= 15 + 13
    assert looks[-1].tuning.utilisation == MOST_UTILISATION


def test_cameras_in_step_are_tried_on_the_heavier_variant_less_and_less() -> None:
    """Little load, and always late on the heavy variant: nothing but a lighter one helps, and no average shows it."""
    looks = World(lambda _: 2.5, [linear(0.04), linear(0.015)], cameras=4, lanes=1, in_step=True).run(200)
    back = [b.t_s for a, b in pairwise(looks) if b.depth < a.depth]
    assert 3 <= len(back) <= 6
    waits = [b - a for a, b in pairwise(back)]
    assert all(later > 1.5 * sooner for sooner, later in pairwise(waits))


def test_batches_that_pay_stay_and_those_that_do_not_are_given_back() -> None:
    pays = World(surge(2 * 62 / 8), [linear(0.004, 0.012)], lanes=1, places=8).run(40)
    assert p99_ms(after(pays, 8.0)) <= BUDGET_MS
    assert pays[-1].tuning.batch >= 4
    assert rate_hz(after(pays, 20.0)) > 1.5 / 0.016  # of what it could do one by one
    not_so = World(surge(2 * 100 / 8), [linear(0.01)], lanes=1, places=4).run(40)
    assert p99_ms(after(not_so, 8.0)) <= BUDGET_MS
    assert not_so[-1].tuning.batch <= 2
    assert rate_hz(after(not_so, 20.0)) > 0.85 * 100


def test_without_a_budget_all_is_as_configured() -> None:
    looks = World(surge(2 * 2 / 0.03 / 8), [linear(0.03)], places=4, planned=False, budget_ms=None).run(10)
    for look in looks:
        tuning = look.tuning
        assert (tuning.batch, tuning.batch_timeout_ms, tuning.utilisation) == (4, 20.0, MOST_UTILISATION)
        assert not tuning.overloaded
    assert looks[-1].tuning.p99_ms is not None


# --- step by step


class Steps:
    """A tuner fed by hand, 60 frames a second on one lane unless it is said otherwise."""

    def __init__(self, **site: object) -> None:
        defaults = {"lanes": 1, "variants": (VariantSite("v", 0.015),), "places": 8}
        self.site = ModelSite("m", **{**defaults, **site})  # type: ignore[arg-type]
        self.state = TunerState()
        self.tuning = Tuning(0, 0.0, 0.0, None, overloaded=False)

    def step(
        self, latency_ms: float, *, frames: int = 15, busy_s: float | None = None, fill: float = 1.0,
        offered_hz: float = 60.0, times: int = 1,
    ) -> Tuning:  # fmt: skip
        for _ in range(times):
            size = self.state.batch or self.site.places
            spent_s = 0.24 if busy_s is None else busy_s * frames
            seen = ModelSeen("v", spent_s, frames, round(frames / size / fill), (latency_ms,) * frames)
            self.state, self.tuning = Tuner().step(self.site, BUDGET_MS, seen, STEP_S, offered_hz, self.state)
        return self.tuning


def at_one(**site: object) -> Steps:
    """At batch 1, as after a surge, with what it cost then forgotten."""
    steps = Steps(**site)
    steps.step(20.0)
    steps.state = replace(steps.state, batch=1, refused=())
    return steps


def test_a_batch_that_brings_nothing_is_not_asked_for_again_for_minutes() -> None:
    steps = at_one()
    steps.step(20.0, frames=16, times=8)
    assert steps.tuning.batch == 2
    steps.step(20.0, frames=16, times=9)
    assert steps.tuning.batch == 1
    tried = {steps.step(20.0, frames=16).batch for _ in range(int(280 / STEP_S))}
    assert tried == {1}
    assert 2 in {steps.step(20.0, frames=16).batch for _ in range(int(40 / STEP_S))}


def test_a_batch_that_pays_stays_and_the_next_is_tried() -> None:
    steps = at_one()
    cost_s = {1: 0.016, 2: 0.012, 3: 0.010, 4: 0.0099}
    sizes = []
    for _ in range(200):
        size = steps.state.batch
        sizes.append(steps.step(20.0, frames=int(0.24 / cost_s[size]), busy_s=cost_s[size], offered_hz=200.0).batch)
    assert sizes[-1] == 3
    assert max(sizes) == 4
    assert all(b - a <= 1 for a, b in pairwise(sizes))


@pytest.mark.parametrize(
    ("latency_ms", "fill", "offered_hz"),
    [(75.0, 1.0, 60.0), (20.0, 0.5, 60.0), (20.0, 1.0, 10.0)],
    ids=["no room", "batches are not full", "lanes are idle"],
)
def test_a_larger_batch_is_not_tried_where_it_cannot_help(latency_ms: float, fill: float, offered_hz: float) -> None:
    steps = at_one()
    steps.state = replace(steps.state, batch=2)
    frames = 16 if offered_hz > 20 else 3
    tried = {steps.step(latency_ms, frames=frames, fill=fill, offered_hz=offered_hz).batch for _ in range(100)}
    assert tried == {2}


def test_one_late_frame_or_one_bad_moment_is_no_reason() -> None:
    steps = Steps(places=1)
    steps.step(20.0, times=20)
    before = steps.tuning.utilisation
    steps.step(500.0)  # all the frames of one step: something held the device up
    steps.step(20.0, times=3)
    assert steps.tuning.utilisation == before
    few = Steps(places=1)
    few.step(20.0, frames=1, times=10, offered_hz=4.0)
    few.step(200.0, frames=1, offered_hz=4.0)
    few.step(20.0, frames=1, times=10, offered_hz=4.0)
    assert few.state.few
    assert few.tuning.utilisation == MOST_UTILISATION


def test_a_surge_is_paid_for_once() -> None:
    """Frames that were captured before a cut took effect are no evidence against what it led to."""
    steps = Steps(places=1)
    steps.step(20.0, times=20)
    steps.step(400.0, times=2)
    once = steps.tuning.utilisation
    assert once < MOST_UTILISATION
    steps.step(400.0)
    steps.step(20.0, times=3)
    assert steps.tuning.utilisation == once
    steps.step(20.0, times=20)
    assert steps.tuning.utilisation > once


@pytest.mark.parametrize(
    ("sizes", "places", "allowed"),
    [(None, 3, (1, 2, 3)), ((1, 2, 4, 8), 4, (1, 2, 4)), ((1, 2, 4), 3, (1, 2, 3)), ((4,), 2, (2,)), (None, 1, (1,))],
)
def test_sizes(sizes: tuple[int, ...] | None, places: int, allowed: tuple[int, ...]) -> None:
    assert sizes_of(ModelSite("m", 1, (VariantSite("v"),), places, sizes)) == allowed


# --- against anything

LOOKS = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", None]),
        st.lists(st.sampled_from([5.0, 40.0, 75.0, 79.0, 85.0, 300.0]), max_size=12),
        st.integers(0, 20),
        st.floats(0.0, 0.5),
        st.sampled_from([0.0, 1.0, 30.0, 200.0]),
    ),
    max_size=30,
)
SITES = st.builds(
    lambda lanes, places, sizes, known: ModelSite(
        "m", lanes, (VariantSite("a", 0.02 if known else None), VariantSite("b")), places, sizes
    ),
    st.integers(1, 4),
    st.integers(1, 8),
    st.sampled_from([None, (1, 2, 4, 8), (4,), (1,)]),
    st.booleans(),
)


_Looks = list[tuple[str | None, list[float], int, float, float]]


def fed(site: ModelSite, looks: _Looks) -> list[tuple[TunerState, Tuning]]:
    state, found = TunerState(), []
    for variant, latencies, frames, busy_s, offered_hz in looks:
        seen = ModelSeen(variant, busy_s, frames, min(frames, 3), tuple(latencies))
        state, tuning = Tuner().step(site, BUDGET_MS, seen, STEP_S, offered_hz, state)
        found.append((state, tuning))
    return found


def check_bounds(site: ModelSite, tuning: Tuning) -> None:
    assert tuning.batch in sizes_of(site)
    assert 0.0 <= tuning.batch_timeout_ms <= site.batch_timeout_ms
    assert Tuner().least_utilisation <= tuning.utilisation <= MOST_UTILISATION


@settings(max_examples=150, deadline=None)
@given(site=SITES, looks=LOOKS)
def test_bounds_hold_whatever_comes_and_the_same_comes_of_the_same(site: ModelSite, looks: _Looks) -> None:
    found = fed(site, looks)
    for _, tuning in found:
        check_bounds(site, tuning)
    assert found == fed(site, looks)


@settings(max_examples=100, deadline=None)
@given(site=SITES, looks=LOOKS, frames=st.integers(2, 20))
def test_late_frames_bring_everything_down(site: ModelSite, looks: _Looks, frames: int) -> None:
    found = fed(site, looks)
    state = found[-1][0] if found else TunerState()
    seen = ModelSeen("a", 0.2, frames, frames, (200.0,) * frames)
    utilisations, timeouts = [state.utilisation], [min(state.batch_timeout_ms, site.batch_timeout_ms)]
    for _ in range(60):
        state, tuning = Tuner().step(site, BUDGET_MS, seen, STEP_S, 10.0, state)
        check_bounds(site, tuning)
        utilisations.append(tuning.utilisation)
        timeouts.append(tuning.batch_timeout_ms)
    # the very first steps may still be judged by what came before
    assert all(later <= sooner for sooner, later in pairwise(utilisations[8:]))
    assert (utilisations[-1], timeouts[-1]) == (Tuner().least_utilisation, 0.0)
    assert tuning.overloaded


@settings(max_examples=150, deadline=None)
@given(
    site=SITES,
    looks=LOOKS,
    latencies=st.lists(st.sampled_from([5.0, 40.0, 75.0, 85.0]), min_size=1, max_size=20),
    slower=st.floats(1.0, 4.0),
    offered_hz=st.floats(0.0, 200.0),
    more=st.floats(1.0, 4.0),
)
def test_worse_latencies_never_bring_more_and_more_load_never_less_overload(
    site: ModelSite, looks: _Looks, latencies: list[float], slower: float, offered_hz: float, more: float
) -> None:
    found = fed(site, looks)
    state = found[-1][0] if found else TunerState()

    def step(factor: float, hz: float) -> Tuning:
        seen = ModelSeen("a", 0.2, len(latencies), len(latencies), tuple(each * factor for each in latencies))
        return Tuner().step(site, BUDGET_MS, seen, STEP_S, hz, state)[1]

    now, worse = step(1.0, offered_hz), step(slower, offered_hz)
    assert worse.utilisation <= now.utilisation
    assert worse.batch_timeout_ms <= now.batch_timeout_ms
    assert step(1.0, offered_hz * more).overloaded >= now.overloaded


@settings(max_examples=100, deadline=None)
@given(site=SITES, looks=LOOKS, steps=st.integers(1, 200), down=st.booleans())
def test_without_frames_nothing_changes(site: ModelSite, looks: _Looks, steps: int, down: bool) -> None:
    found = fed(site, looks)
    before = found[-1] if found else (TunerState(), None)
    state = before[0]
    tunings = []
    for _ in range(steps):
        state, tuning = Tuner().step(site, BUDGET_MS, ModelSeen(None if down else "a"), STEP_S, 0.0, state)
        tunings.append(replace(tuning, overloaded=False))
    assert len({replace(each, overloaded=False) for each in tunings}) == 1
    if before[1] is not None:
        assert tunings[0] == replace(before[1], overloaded=False)
    if steps * STEP_S > Tuner().most_back_s and not down:
        assert not state.overloaded
