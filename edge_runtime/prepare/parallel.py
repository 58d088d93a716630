"""The same work on many items, on a few threads, with the results in order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from edge_runtime.threads import ThreadGroup

__all__ = ["in_parallel"]

T = TypeVar("T")

_JOIN_S = 30.0


def in_parallel(
    workers: Sequence[Callable[[int], T]], count: int, *, name: str, progress: Callable[[int], None] = lambda _: None
) -> list[T]:
    """The results for the items 0 to count - 1, in this order.

    Every worker is called with one item after the other on a thread of its own, called `name` and a number; a
    worker may so own what must not be shared. `progress` is called on the calling thread with the number of
    items done. The first exception of a worker ends it all and is raised here; so does KeyboardInterrupt on the
    calling thread. The threads are joined before this returns or raises: each at the end of its current item.
    """
    numbers = iter(range(count))
    changed = threading.Condition()
    results: dict[int, T] = {}
    errors: list[BaseException] = []
    stopping = False

    def work(worker: Callable[[int], T]) -> None:
        while True:
            with changed:
                number = None if stopping or errors else next(numbers, None)
            if number is None:
                return
            try:
                result = worker(number)
            except BaseException as error:  # noqa: BLE001  raised again on the calling thread
                with changed:
                    errors.append(error)
                    changed.notify()
                return
            with changed:
                results[number] = result
                changed.notify()

    group = ThreadGroup()
    try:
        for index, worker in enumerate(workers[:count]):
            group.spawn(f"{name}-{index}", partial(work, worker))
        done = 0
        while done < count:
            with changed:
                while not errors and len(results) == done:
                    changed.wait()
                if errors:
                    raise errors[0]
                done = len(results)
            progress(done)
    finally:
        with changed:
            stopping = True
        group.join(_JOIN_S)
    return [results[number] for number in range(count)]
