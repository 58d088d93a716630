"""The lease on an operating point: it lapses to the safe point unless it is renewed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from edge_runtime.records.governing import OperatingPoint

log = logging.getLogger(__name__)

LEASE_S = 2.0
"""Several of the governor's periods, and less than it takes a heat sink to notice."""


class PointLease:
    """Applies operating points, and takes the last one back when nobody renews it.

    `grant` is for the governor's thread, `check` for another one that goes on when that hangs. `apply` is called on
    either, one at a time.
    """

    def __init__(self, apply: Callable[[OperatingPoint], None], lease_s: float = LEASE_S) -> None:
        self._apply = apply
        self._lease_ns = int(lease_s * 1e9)
        self._lock = threading.Lock()
        self._until_ns: int | None = None
        self._safe: OperatingPoint | None = None

    def grant(self, point: OperatingPoint, safe: OperatingPoint, now_ns: int) -> None:
        """Apply `point` for as long as a lease lasts from a monotonic time on; `safe` is what it lapses to."""
        with self._lock:
            self._until_ns, self._safe = now_ns + self._lease_ns, safe
            self._apply(point)

    def release(self) -> None:
        """There is nothing to hold any more: the last point stays."""
        if self._lock.acquire(timeout=0.1):  # a stop must not wait for what hangs in `apply`
            self._until_ns = None
            self._lock.release()

    def check(self, now_ns: int) -> bool:
        """Whether the lease has lapsed just now; the safe point is applied then."""
        if not self._lock.acquire(timeout=0.1):
            return False  # somebody hangs in `apply`: the supervisor sees the governor's silence
        try:
            if self._until_ns is None or now_ns < self._until_ns or self._safe is None:
                return False
            self._until_ns = None
            log.error("governor: nobody has renewed the operating point: the safe point is in force")
            self._apply(self._safe)
            return True
        finally:
            self._lock.release()
