"""Media time, due times, rate cap, back-off, redaction: pure, with no clock but ours."""

from __future__ import annotations

import random
from datetime import datetime, timezone
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.backoff import Backoff
from edge_runtime.camera.pacing import JUMP_NS, NEVER_NS, Ordered, Pacer, RateCap, Timeline, nominal_interval_ns
from edge_runtime.source_url import redact_text

MS = 1_000_000
S = 1_000_000_000


class HandClock:
    def __init__(self) -> None:
        self.now_ns = 0

    def monotonic_ns(self) -> int:
        return self.now_ns

    def utc(self) -> datetime:
        return datetime.fromtimestamp(0, timezone.utc)


def stamps(timeline: Timeline, *pts_ms: int | None) -> list[int | None]:
    out = [timeline.stamp(None if pts is None else pts * MS) for pts in pts_ms]
    return [None if ns is None else ns // MS for ns in out]


def test_steady_times_keep_their_distance() -> None:
    assert stamps(Timeline(), 500, 540, 580, 700) == [0, 40, 80, 200]


@pytest.mark.parametrize("odd_ms", [-9_800_000, 37_600_000])
def test_one_wild_time_costs_one_nominal_step(odd_ms: int) -> None:
    timeline = Timeline(40 * MS)
    assert stamps(timeline, 0, 40, odd_ms, 120, 160) == [0, 40, 80, 120, 160]
    assert timeline.restamped == 2


def test_a_jump_that_stays_is_taken_over() -> None:
    assert stamps(Timeline(40 * MS), 0, 40, 90_000, 90_040, 90_080) == [0, 40, 80, 120, 160]


def test_absent_times_get_the_nominal_interval() -> None:
    assert stamps(Timeline(100 * MS), None, None, None) == [0, 100, 200]
    assert stamps(Timeline(None), None, None) == [0, 40]


def test_a_repeated_time_is_a_duplicate_but_times_that_stand_still_are_not() -> None:
    assert stamps(Timeline(40 * MS), 0, 40, 40, 80) == [0, 40, None, 80]
    still = stamps(Timeline(40 * MS), *[7] * 20)
    assert len([ms for ms in still if ms is not None]) >= 14


def test_a_new_pass_continues_one_interval_later() -> None:
    timeline = Timeline(40 * MS)
    assert stamps(timeline, 0, 40) == [0, 40]
    timeline.splice(40 * MS)
    assert stamps(timeline, 0, 40) == [80, 120]


@given(st.lists(st.one_of(st.none(), st.integers(-(2**62), 2**62)), max_size=60))
def test_media_time_only_goes_forward_and_never_stands_for_long(times: list[int | None]) -> None:
    timeline = Timeline(40 * MS)
    given_ns = [timeline.stamp(pts) for pts in times]
    kept = [ns for ns in given_ns if ns is not None]
    assert all(0 < b - a <= JUMP_NS for a, b in pairwise(kept))
    run = 0
    for ns in given_ns:
        run = run + 1 if ns is None else 0
        assert run <= 5


@pytest.mark.parametrize("fps", [18, 20, 120, 100, 0.5])
def test_any_rate_keeps_its_distance_and_a_change_is_followed(fps: float) -> None:
    step = round(S / fps)
    timeline = Timeline(40 * MS)
    times = [timeline.stamp(index * step) for index in range(20)]
    assert [b - a for a, b in pairwise(times) if a is not None and b is not None] == [step] * 19
    later = [timeline.stamp(20 * step + index * 50 * MS) for index in range(20)]
    assert [b - a for a, b in pairwise(later) if a is not None and b is not None] == [50 * MS] * 19


def test_a_rate_modulo_100_is_only_used_where_there_are_no_times() -> None:
    """A camera of 120 pictures a second that says 20."""
    timeline = Timeline(nominal_interval_ns(20))
    assert [timeline.stamp(index * S // 120) for index in range(4)] == [index * S // 120 for index in range(4)]


def test_pictures_that_were_not_decoded_leave_their_time_and_make_no_jump_an_outlier() -> None:
    timeline = Timeline(40 * MS)
    assert timeline.stamp(0) == 0
    assert timeline.stamp(60 * S, skipped=1499) == 60 * S
    assert timeline.restamped == 0
    assert timeline.stamp(60 * S + 36_000 * S, skipped=24) == 61 * S
    assert timeline.restamped == 1
    assert timeline.stamp(None, skipped=9) == 61 * S + 400 * MS
    timeline.splice(40 * MS, skipped=24)
    assert timeline.stamp(0) == 62 * S + 400 * MS


@given(
    st.lists(
        st.tuples(st.sampled_from([0, 0, 0, 0, 36_000, -36_000, 7, -7]), st.integers(0, 30), st.booleans()),
        min_size=1,
        max_size=80,
    )
)
def test_media_time_is_the_streams_own_but_for_a_step_per_outlier(odd: list[tuple[int, int, bool]]) -> None:
    """Over outliers, jumps that stay and skipped pictures: never more than the true time and a step for each."""
    timeline = Timeline(40 * MS)
    true_ns = shift_ns = 0
    last = timeline.stamp(0)
    assert last == 0
    outliers = 0
    for by_s, skipped, stays in odd:
        true_ns += 40 * MS * (skipped + 1)
        if stays:
            shift_ns += by_s * S
        ns = timeline.stamp(true_ns + shift_ns + (0 if stays else by_s * S), skipped)
        outliers += by_s != 0
        if ns is not None:
            assert ns > last
            last = ns
    assert last <= true_ns + outliers * JUMP_NS * 4


@pytest.mark.parametrize("rate", [None, 0.0, -1.0, 90_000.0, float("nan"), float("inf")])
def test_rates_that_cannot_be_are_no_rate(rate: float | None) -> None:
    assert nominal_interval_ns(rate) is None


def test_a_schedule_that_fell_behind_moves_to_now_once() -> None:
    pacer = Pacer()
    assert pacer.due_ns(0, 5 * S) == 5 * S
    assert pacer.due_ns(1 * S, 6 * S + 900 * MS) == 6 * S
    assert pacer.reanchored == 0
    assert pacer.due_ns(2 * S, 9 * S) == 9 * S
    assert pacer.due_ns(2 * S + 40 * MS, 9 * S) == 9 * S + 40 * MS
    assert pacer.reanchored == 1


@pytest.mark.parametrize(("source", "cap"), [(25, 15), (30, 15), (30, 29), (120, 7), (25, 24)])
def test_the_cap_is_exact_on_average(source: int, cap: int) -> None:
    limit = RateCap(cap)
    kept = sum(limit.wants(index * S // source) for index in range(source * 60))
    assert abs(kept - cap * 60) <= 1


def test_a_cap_at_or_above_the_source_loses_nothing_to_jitter() -> None:
    rng = random.Random(1)
    for cap in (15, 20):
        limit = RateCap(cap)
        assert all(limit.wants(index * S // 15 + rng.randrange(20 * MS)) for index in range(300))


def test_slots_without_a_picture_are_not_made_up_for() -> None:
    limit = RateCap(10)
    assert limit.wants(0)
    assert limit.wants(60 * S)
    assert sum(limit.wants(60 * S + index * 10 * MS) for index in range(1, 101)) <= 11


def test_a_change_of_rate_goes_on_from_the_last_slot() -> None:
    """Twenty changes a second keep no more pictures than the rate: a new grid each time would keep one at each."""
    limit = RateCap(2)
    kept = 0
    for index in range(30 * 60):
        if index % 2 == 0:
            limit.change(2 + index % 4 * 0.01)
        kept += limit.wants(index * S // 30)
    assert 118 <= kept <= 122
    for before, after in ((None, 1.0), (10.0, 1.0), (1.0, 10.0), (5.0, None)):
        limit = RateCap(before)
        last = max(index for index in range(90) if limit.wants(index * S // 30))
        limit.change(after)
        times = [index for index in range(90, 180) if limit.wants(index * S // 30)]
        assert all(b - a >= 30 / (after or 30) / 2 for a, b in zip((last, *times), times, strict=False))
        assert abs(len(times) - 3 * min(after or 30, 30)) <= 1


def test_a_rate_of_nothing_keeps_nothing_until_it_is_another() -> None:
    limit = RateCap(0)
    assert not any(limit.wants(index * S) for index in range(10))
    assert limit.wait_ns(20 * S) == NEVER_NS
    limit.change(1)
    assert limit.wants(20 * S)
    assert limit.wait_ns(20 * S) == S
    assert limit.wait_ns(23 * S) == 0
    limit.change(None)
    assert limit.wait_ns(20 * S) == 0


@given(
    rates=st.lists(st.sampled_from([None, 0.0, 0.5, 3.0, 10.0, 40.0]), min_size=1, max_size=40),
    source=st.integers(5, 60),
)
def test_changes_bring_no_burst(rates: list[float | None], source: int) -> None:
    """Between two pictures lies at least half a step of the rate that let the later one through."""
    limit = RateCap(rates[0])
    last = None
    for index in range(len(rates) * 20):
        rate = rates[index // 20]
        if index % 20 == 0:
            limit.change(rate)
        t_ns = index * S // source
        if limit.wants(t_ns):
            assert rate != 0.0
            if last is not None and rate is not None and limit_early(t_ns - last[0], rate, last[1]):
                raise AssertionError((t_ns, rate, last))
            last = (t_ns, rate)


def limit_early(gap_ns: int, rate: float, before: float | None) -> bool:
    """Whether a picture came too soon: the one before may have been late for its own slot by up to a step of then."""
    late_ns = 0 if before is None else S / before
    return gap_ns < S / rate / 2 - late_ns - 1


def test_delays_are_jittered_from_the_first_and_bounded() -> None:
    clock = HandClock()
    delays = [[Backoff(clock=clock, rng=random.Random(seed)).next_delay_s()] for seed in range(50)]
    assert len({d[0] for d in delays}) == 50
    assert all(0 <= d[0] <= 0.5 for d in delays)
    backoff = Backoff(clock=clock, rng=random.Random(1))
    many = [backoff.next_delay_s() for _ in range(5000)]
    assert all(d <= min(30.0, 0.5 * 2**n) for n, d in enumerate(many[:10]))
    assert max(many) <= 30.0
    assert max(many) > 25.0


def test_only_a_stable_source_resets_the_delay() -> None:
    clock = HandClock()
    backoff = Backoff(clock=clock, rng=random.Random(3))
    for _ in range(10):
        backoff.next_delay_s()
    backoff.up()
    clock.now_ns += 59 * S
    backoff.up()
    assert max(backoff.next_delay_s() for _ in range(20)) > 0.5
    backoff.up()
    clock.now_ns += 60 * S
    assert backoff.next_delay_s() <= 0.5


def test_times_of_decoding_are_gone_by_where_those_of_presentation_go_back_and_forth() -> None:
    ordered, shown = Ordered(), [1, 4, 3, 5, 2]
    pts = [round_ * 4 + step for round_ in range(10) for step in shown[1:]]
    chosen = [ordered.choose(time * 40, (index + 3) * 40) for index, time in enumerate(pts)]
    assert chosen[-25:] == [(index + 3) * 40 for index in range(40)][-25:]
    given = [time for time in chosen if time is not None]
    assert all(a != b for a, b in pairwise(given)), "or a picture would look like one that came twice"
    right = Ordered()
    for index in range(200):  # some are wrong: no reason to distrust the others
        pts_ns = index * 40 - (9_000_000 if index % 20 == 7 else 0)
        assert right.choose(pts_ns, index * 40) == pts_ns


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("rtsp://admin:secret@10.0.0.2/ch1", "rtsp://***@10.0.0.2/ch1"),
        ("http://admin:se/c@r:et@cam/x", "http://***@cam/x"),
        ("[Errno 5] I/O error: 'http://u:p@cam/x?token=abc'", "[Errno 5] I/O error: 'http://***@cam/x?***'"),
        ("no rtsp://op:it's\"it@cam/x: gone", "no rtsp://***@cam/x: gone"),
        ("no 'http://cam/a'b?pass=it's&c': gone", "no 'http://cam/a'b?***': gone"),
        ("https://cam/live?user=a&pwd=b", "https://cam/live?***"),
        ("file:/srv/clip.mp4", "file:/srv/clip.mp4"),
    ],
)
def test_credentials_do_not_show(url: str, shown: str) -> None:
    assert redact_text(url) == shown
