"""Waiting for a condition instead of sleeping."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], timeout_s: float = 10.0, what: str = "it") -> None:
    """Return as soon as `condition` is true; fail after `timeout_s`."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"{what} did not come within {timeout_s} s")
        time.sleep(0.005)
