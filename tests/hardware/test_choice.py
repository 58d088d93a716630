"""Which source is used: lost by time and not by one failure, back with patience, and no flapping. By our own clock."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.hardware.choice import DOUBT_S, MAX_RETURN_S, RETURN_S, Change, Choice, Standing, Track

S = 1_000_000_000
STEP_NS = S // 10

Behaviour = Callable[[int], bool | None]
"""What a reading at that step brings: good, bad (False), or nothing at all (None)."""


class Bench:
    """Two sources that are read ten times a second, and the choice between them."""

    def __init__(self, *behaviours: Behaviour) -> None:
        self.now_ns = 0
        self.behaviours = list(behaviours)
        self.tracks = [Track(0.1, 0, needs_rate=True) for _ in behaviours]
        self.choice = Choice([f"source{index}" for index in range(len(behaviours))])
        self.changes: list[tuple[float, Change]] = []
        self.step = 0

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds * 10)):
            self.now_ns += STEP_NS
            self.step += 1
            for track, behaviour in zip(self.tracks, self.behaviours, strict=True):
                came = behaviour(self.step)
                if came:
                    track.good(self.now_ns)
                elif came is False:
                    track.bad(self.now_ns, "EIO")
            standings = [track.standing(self.now_ns) for track in self.tracks]
            if change := self.choice.decide(self.now_ns, standings):
                self.changes.append((self.now_ns / S, change))

    def standing(self, index: int = 0) -> Standing:
        return self.tracks[index].standing(self.now_ns)


def good(step: int) -> bool | None:
    return True


def silent(step: int) -> bool | None:
    return None


def failing(step: int) -> bool | None:
    return False


def every_third_fails(step: int) -> bool | None:
    return step % 3 != 0


def test_the_best_source_is_taken_at_once() -> None:
    bench = Bench(good, good)
    bench.run(0.1)
    assert [(change.before, change.after) for _, change in bench.changes] == [(None, 0)]


@pytest.mark.parametrize(("fault", "word"), [(silent, "no good reading for 1.1 s"), (failing, "EIO")])
def test_a_source_that_is_silent_or_fails_for_longer_than_a_second_is_left(fault: Behaviour, word: str) -> None:
    bench = Bench(good, good)
    bench.run(5)
    bench.behaviours[0] = fault
    bench.run(0.9)
    assert bench.choice.chosen == 0
    bench.run(0.3)
    assert bench.choice.chosen == 1
    assert word in bench.changes[-1][1].reason


def test_a_sensor_that_fails_every_third_read_changes_nothing_at_all() -> None:
    bench = Bench(every_third_fails, good)
    bench.run(900)
    assert [(change.before, change.after) for _, change in bench.changes] == [(None, 0)]
    assert bench.standing().reason is None
    assert bench.standing().doubt


def test_who_fails_every_third_read_is_not_gone_back_to() -> None:
    bench = Bench(failing, good)
    bench.run(5)
    bench.behaviours[0] = every_third_fails
    bench.run(900)
    assert [(change.before, change.after) for _, change in bench.changes] == [(None, 1)]


def test_the_way_back_takes_ten_seconds_without_a_fault_and_doubles_with_every_loss() -> None:
    bench = Bench(good, good)
    bench.run(1)
    waits = []
    for _ in range(8):
        bench.behaviours[0] = silent
        bench.run(3)
        assert bench.choice.chosen == 1
        bench.behaviours[0] = good
        t_good, seen = bench.now_ns / S, len(bench.changes)
        bench.run(MAX_RETURN_S + 5)
        (change,) = bench.changes[seen:]
        waits.append(change[0] - t_good)
    # the last one: it was in use for less than five minutes before each loss
    assert waits == [pytest.approx(expected, abs=0.3) for expected in [10, 20, 40, 80, 160, 300, 300, 300]]


def test_who_was_in_use_for_five_minutes_begins_anew() -> None:
    bench = Bench(good, good)
    for _ in range(3):
        bench.run(MAX_RETURN_S + RETURN_S + 5)
        bench.behaviours[0] = silent
        bench.run(3)
        bench.behaviours[0] = good
        t_good, seen = bench.now_ns / S, len(bench.changes)
        bench.run(15)
        (change,) = bench.changes[seen:]
        assert change[0] - t_good == pytest.approx(RETURN_S, abs=0.3)


def test_the_only_source_is_resumed_after_a_second_and_then_ever_later() -> None:
    bench = Bench(lambda step: step % 40 < 20)  # two seconds good, two seconds not
    bench.run(120)
    ups = [t for t, change in bench.changes if change.after == 0]
    assert len(bench.changes) <= 5, bench.changes
    assert ups[:2] == [pytest.approx(0.1), pytest.approx(5, abs=0.3)]


def test_readings_that_come_too_seldom_for_joules_are_no_power_but_a_temperature() -> None:
    for needs_rate in (True, False):
        track = Track(0.1, 0, needs_rate=needs_rate)
        for index in range(20):
            track.good(index * S // 2)
        reason = track.standing(20 * S // 2).reason
        assert (reason is not None) == needs_rate
        if reason is not None:
            assert reason == "too slow: a reading came after 0.50 s, where one is due every 0.1 s"


def test_doubt_begins_with_the_first_fault_and_ends_long_after_it() -> None:
    bench = Bench(good)
    bench.run(5)
    assert not bench.standing().doubt
    bench.behaviours[0] = failing
    bench.run(0.1)
    assert bench.standing().doubt
    bench.behaviours[0] = good
    bench.run(DOUBT_S - 0.2)
    assert bench.standing().doubt
    bench.run(0.3)
    assert not bench.standing().doubt


@settings(max_examples=40)
@given(st.lists(st.lists(st.sampled_from([True, False, None]), min_size=2, max_size=2), min_size=1, max_size=240))
def test_whatever_happens_the_chosen_source_is_good_and_changes_are_rare(steps: list[list[bool | None]]) -> None:
    # each entry holds for half a second
    bench = Bench(lambda step: steps[(step - 1) // 5][0], lambda step: steps[(step - 1) // 5][1])
    for _ in steps:
        bench.run(0.5)
        if (chosen := bench.choice.chosen) is not None:
            assert bench.standing(chosen).reason is None
    # every source may be lost a few times before the waits have doubled to minutes
    minutes = len(steps) / 120
    assert len(bench.changes) <= 12 + 4 * minutes
