"""Work on several threads comes back in order, ends at the first fault, and leaves no thread (see conftest.py)."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.prepare.parallel import in_parallel


@given(st.integers(1, 5), st.integers(0, 40))
def test_results_are_in_order_and_each_worker_keeps_to_its_thread(workers: int, count: int) -> None:
    threads: list[set[str]] = [set() for _ in range(workers)]

    def worker(own: set[str]) -> Callable[[int], int]:
        def square(number: int) -> int:
            own.add(threading.current_thread().name)
            return number * number

        return square

    told: list[int] = []
    results = in_parallel([worker(own) for own in threads], count, name="square", progress=told.append)
    assert results == [number * number for number in range(count)]
    assert told == sorted(set(told))
    assert told[-1:] == ([count] if count else [])
    assert all(own <= {f"square-{index}"} for index, own in enumerate(threads))


def test_the_first_fault_ends_it() -> None:
    begun: list[int] = []
    failed = threading.Event()

    def work(number: int) -> None:
        begun.append(number)
        if number == 1:
            failed.set()
            raise ValueError("this one")
        failed.wait(10)

    with pytest.raises(ValueError, match="this one"):
        in_parallel([work, work], 1000, name="work")
    assert len(begun) < 1000


def test_an_interrupt_on_the_calling_thread_ends_it() -> None:
    begun: list[int] = []

    def interrupt(done: int) -> None:
        raise KeyboardInterrupt

    interrupted = threading.Event()

    def work(number: int) -> None:
        begun.append(number)
        if number > 10:
            interrupted.wait(0.01)

    with pytest.raises(KeyboardInterrupt):
        in_parallel([work] * 3, 100_000, name="work", progress=interrupt)
    assert len(begun) < 100_000
