"""What a new engine's first frames say of it."""

from __future__ import annotations

import threading
import time

import pytest

from edge_runtime.app.watch import STUCK_S, watch
from edge_runtime.engine.slot import Resident
from edge_runtime.errors import EngineError, RefusedError
from tests.fakes import FakeEngine, fake_decoder


def resident() -> Resident:
    return Resident(FakeEngine(), fake_decoder, lanes=2, places=1, buffers=3)


def test_enough_good_frames_end_it_at_once() -> None:
    new = resident()
    new.tally.ran(0, 15, 0)
    new.tally.ran(1, 5, 2)
    start = time.monotonic()
    seen = watch(new, threading.Event(), run_s=0.01, timeout_s=10, within_s=30)
    assert (seen.frames, seen.note) == (20, None)
    assert time.monotonic() - start < 5


def test_without_frames_it_says_so() -> None:
    seen = watch(resident(), threading.Event(), run_s=0.01, timeout_s=10, within_s=0.1)
    assert seen.frames == 0
    assert "no frame came" in str(seen.note)


@pytest.mark.parametrize(
    ("ran", "sick", "failed", "words"), [(5, 0, 1, "1 of its first 6 frames failed"), (3, 3, 0, "no usable value")]
)
def test_bad_frames_are_refused(ran: int, sick: int, failed: int, words: str) -> None:
    new = resident()
    new.tally.ran(0, ran, sick)
    if failed:
        new.tally.failed(1, failed)
    with pytest.raises(RefusedError, match=words) as caught:
        watch(new, threading.Event(), run_s=0.01, timeout_s=10, within_s=5)
    assert (caught.value.code, caught.value.exit_code) == ("rolled_back", 3)


def test_a_few_sick_frames_are_a_matter_of_the_picture() -> None:
    new = resident()
    new.tally.ran(0, 20, 19)
    assert watch(new, threading.Event(), run_s=0.01, timeout_s=10).frames == 20


def test_a_run_that_does_not_come_back() -> None:
    new = resident()
    new.leases = 1
    new.tally.began(1, time.monotonic_ns() - int(STUCK_S * 1e9))
    with pytest.raises(RefusedError, match="has not come back"):
        watch(new, threading.Event(), run_s=0.001, timeout_s=10)


def test_a_slow_run_is_waited_for() -> None:
    """Slower than the time for watching, and not yet so slow that it must be stuck."""
    new = resident()
    new.leases = 1

    def come() -> None:
        new.tally.ran(0, 1, 0)

    timer = threading.Timer(0.3, come)
    timer.start()
    seen = watch(new, threading.Event(), run_s=1.0, timeout_s=10, within_s=0.05)
    timer.join()
    assert (seen.frames, seen.note) == (1, None)


def test_o11_a_stop_before_it_was_seen_at_work_is_no_success() -> None:
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(EngineError) as caught:
        watch(resident(), cancel, run_s=1.0, timeout_s=10, within_s=30)
    assert (caught.value.code, caught.value.retryable) == ("stopping", True)
