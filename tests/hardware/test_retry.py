"""When a lost source is opened again: ever less often, and soon again once it was good for a while."""

from __future__ import annotations

from datetime import datetime, timezone

from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.hardware.retry import Retry


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic_ns(self) -> int:
        return round(self.now_s * 1e9)

    def utc(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=timezone.utc)


def test_delays_double_up_to_a_limit_and_start_over_after_a_good_while() -> None:
    clock = FakeClock()
    retry = Retry(base_s=0.5, limit_s=4.0, stable_s=10.0, clock=clock)
    assert retry.wait_s == 0
    delays = []
    for _ in range(5):
        retry.failed()
        delays.append(retry.wait_s)
        clock.now_s += retry.wait_s
        retry.up()
        clock.now_s += 9.0  # a source that gives readings and is lost again keeps its long delays
        retry.up()
    assert delays == [0.5, 1.0, 2.0, 4.0, 4.0]
    retry.up()
    clock.now_s += 1.0
    retry.failed()
    assert retry.wait_s == 0.5


@given(st.lists(st.tuples(st.sampled_from(["up", "failed"]), st.floats(0, 100)), max_size=200))
def test_the_wait_is_never_longer_than_the_limit(events: list[tuple[str, float]]) -> None:
    clock = FakeClock()
    retry = Retry(clock=clock)
    for event, after_s in events:
        clock.now_s += after_s
        getattr(retry, event)()
        assert 0 <= retry.wait_s <= 30.0
