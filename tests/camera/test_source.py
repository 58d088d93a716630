"""The reading loop at full pace under a cap: it waits, loses nothing, and wakes at once for whatever comes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest

from edge_runtime.camera.synthetic import SyntheticCamera, read_number
from edge_runtime.records.frames import Frame
from tests.awaiting import wait_until

SOON_S = 0.5


def camera(frames: int = 1000) -> SyntheticCamera:
    return SyntheticCamera(name="c", url=f"synthetic:?width=64&height=32&frames={frames}", pace="max")


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def test_a_cap_at_full_pace_makes_it_wait_and_loses_no_picture() -> None:
    capped = camera(frames=12)
    capped.set_cap(50)
    start = time.monotonic()
    frames = list(iter(capped.read, None))
    assert time.monotonic() - start >= 11 / 50
    assert [read_number(frame.pixels.to_rgb()) for frame in frames] == list(range(12))
    source = capped.source()
    assert (source.decoded, source.skipped_rate) == (12, 0)
    # its capture is when it was read, not when its turn was
    gaps = [b.t_capture_ns - a.t_capture_ns for a, b in pairwise(frames)]
    assert min(gaps) > 0.25e9 / 50


def test_a_cap_that_is_lifted_leaves_it_as_fast_as_it_was() -> None:
    capped = camera(frames=200)
    capped.set_cap(1)
    assert capped.read() is not None
    capped.set_cap(None)
    start = time.monotonic()
    assert len(list(iter(capped.read, None))) == 199
    assert time.monotonic() - start < 5


def waiting(capped: SyntheticCamera, pool: ThreadPoolExecutor, cap: float) -> Callable[[], Frame | None]:
    """Reads its second frame, which is not due for a long time; returns how to wait for it."""
    capped.set_cap(cap)
    if cap:
        assert capped.read() is not None
    future = pool.submit(capped.read)
    return lambda: future.result(SOON_S + 5)


@pytest.mark.parametrize("cap", [0.01, 0.0])
def test_a_changed_cap_wakes_it(pool: ThreadPoolExecutor, cap: float) -> None:
    capped = camera()
    result = waiting(capped, pool, cap)
    start = time.monotonic()
    capped.set_cap(None)
    assert result() is not None
    assert time.monotonic() - start < SOON_S


def test_a_stop_wakes_it(pool: ThreadPoolExecutor) -> None:
    capped = camera()
    result = waiting(capped, pool, 0.01)
    start = time.monotonic()
    capped.stop()
    assert result() is None
    assert time.monotonic() - start < SOON_S


def test_a_pause_wakes_it_and_the_picture_comes_after_it(pool: ThreadPoolExecutor) -> None:
    capped = camera()
    result = waiting(capped, pool, 0.01)
    capped.pause()
    wait_until(lambda: capped.status().state == "paused", SOON_S, "the pause")
    capped.set_cap(None)
    assert capped.status().state == "paused"
    capped.resume()
    frame = result()
    assert frame is not None
    assert read_number(frame.pixels.to_rgb()) == 1


def test_a_cap_below_the_configured_rate_skips_where_it_is_paced() -> None:
    paced = SyntheticCamera(name="c", url="synthetic:?width=64&height=32&fps=200&frames=60", fps=100)
    paced.set_cap(150)
    given = sum(1 for _ in iter(paced.read, None))
    assert abs(given - 30) <= 1
    assert paced.source().skipped_rate == 60 - given
    held = SyntheticCamera(name="c", url="synthetic:?width=64&height=32&fps=200&frames=60", fps=100)
    held.set_cap(20)
    assert abs(sum(1 for _ in iter(held.read, None)) - 6) <= 1
