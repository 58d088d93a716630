"""The age of what waits: by a timeline of the spool's own, whatever the wall clock does."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from edge_runtime.telemetry.spool import Gap, LaneLimits
from edge_runtime.telemetry.spool_age import Stamp, Timeline
from tests.telemetry.spools import FakeClock, Opened, turn_of

HOUR = 3600.0
LANES = (LaneLimits("event", 100, 1 << 20, 100 * HOUR), LaneLimits("telemetry", 100, 1 << 20, 10 * HOUR))
NOON = datetime(2026, 3, 1, 12, 0, tzinfo=timezone.utc)


def clock_at(utc: datetime) -> FakeClock:
    clock = FakeClock()
    clock.now_utc = utc
    return clock


def pass_by(clock: FakeClock, hours: float) -> None:
    clock.now_ns += int(hours * HOUR * 1e9)
    clock.now_utc += timedelta(hours=hours)


def test_what_is_too_old_goes_and_is_a_gap(tmp_path: Path) -> None:
    with Opened(tmp_path, lanes=LANES) as opened:
        opened.put("a", "b")
        opened.put("e", lane="event")
        opened.flush()
        pass_by(opened.clock, 9)
        opened.put("c")
        opened.flush()
        assert opened.words() == ["a", "b", "c"]
        pass_by(opened.clock, 1.1)
        opened.flush()
        assert (opened.words(), opened.words("event")) == (["c"], ["e"])
        assert opened.gaps == [Gap("telemetry", 0, 1, 2, "age")]
        assert opened.spool.lane("telemetry").dropped() == 2


def test_what_is_too_old_goes_though_nothing_new_comes(tmp_path: Path) -> None:
    with Opened(tmp_path, lanes=LANES) as opened:
        opened.put("a")
        opened.flush()
        pass_by(opened.clock, 11)
        turn_of(opened.spool)
        assert opened.words() == []
        assert opened.gaps == [Gap("telemetry", 0, 0, 1, "age")]


def test_in_memory_too(tmp_path: Path) -> None:
    with Opened(tmp_path / "absent", lanes=LANES) as opened:
        opened.put("a")
        opened.spool.flush(10)
        pass_by(opened.clock, 11)
        opened.put("b")
        opened.spool.flush(10)
        assert opened.words() == ["b"]
        assert opened.gaps == [Gap("telemetry", 0, 0, 1, "age")]


@pytest.mark.parametrize(
    ("jumps_to", "synced", "left"),
    [
        (NOON + timedelta(hours=6), True, ["a"]),
        (NOON + timedelta(hours=11), True, []),
        (NOON + timedelta(hours=11), False, ["a"]),  # nobody knows for how long it was off
        (datetime(1970, 1, 1, 0, 1, tzinfo=timezone.utc), True, ["a"]),
        (NOON + timedelta(days=365 * 30), True, ["a"]),  # that is no downtime
    ],
)
def test_time_that_the_device_was_off(tmp_path: Path, jumps_to: datetime, synced: bool, left: list[str]) -> None:
    with Opened(tmp_path, lanes=LANES, clock=clock_at(NOON)) as opened:
        opened.put("a")
        assert opened.close()
    with Opened(tmp_path, "s2", boot="b2", lanes=LANES, clock=clock_at(jumps_to), synced=synced) as opened:
        opened.put("b")
        opened.flush()
        assert opened.words() == [*left, "b"]


def test_a_clock_that_was_not_synchronised_then_says_nothing_of_the_downtime(tmp_path: Path) -> None:
    with Opened(tmp_path, lanes=LANES, clock=clock_at(NOON), synced=False) as opened:
        opened.put("a")
        assert opened.close()
    with Opened(tmp_path, "s2", lanes=LANES, clock=clock_at(NOON + timedelta(hours=11))) as opened:
        opened.flush()
        assert opened.words() == ["a"]


def test_ages_add_up_over_reboots_with_a_clock_of_1970(tmp_path: Path) -> None:
    left = []
    for boot in range(4):
        clock = clock_at(datetime(1970, 1, 1, tzinfo=timezone.utc))
        with Opened(tmp_path, f"s{boot}", boot=f"b{boot}", lanes=LANES, clock=clock, synced=False) as opened:
            opened.put(f"{boot}")
            opened.flush()
            pass_by(clock, 4)
            opened.flush()
            left.append(opened.words())
            assert opened.close()
    assert left == [["0"], ["0", "1"], ["1", "2"], ["2", "3"]]


def test_a_wall_clock_that_jumps_while_it_runs_ages_nothing(tmp_path: Path) -> None:
    with Opened(tmp_path, lanes=LANES) as opened:
        opened.put("a")
        opened.flush()
        for year in (1970, 2099, 2026):
            opened.clock.now_utc = datetime(year, 1, 1, tzinfo=timezone.utc)
            opened.put("x")
            opened.flush()
        assert opened.words() == ["a", "x", "x", "x"]


def test_a_timeline_goes_on_and_never_back() -> None:
    clock = clock_at(NOON)
    timeline = Timeline(clock, lambda: True)
    pass_by(clock, 1)
    assert timeline.now_s() == 3600
    # the downtime holds the hour that this session has counted already
    assert timeline.go_on(Stamp(500, "2026-03-01T11:00:00.000Z", True)) == 500 + 3600
    assert timeline.now_s() == 500 + 2 * 3600
    assert timeline.now().t_utc == "2026-03-01T13:00:00.000Z"
    assert Timeline(clock, lambda: True).go_on(Stamp(7, "yesterday", True)) == 7
