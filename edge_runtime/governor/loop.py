"""The thread "governor": looks, lets the controller decide, renews the lease on what was decided. Moves data only."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from edge_runtime.governor.controller import Controller
from edge_runtime.governor.lease import PointLease
from edge_runtime.governor.readings import safe_point
from edge_runtime.records.governing import Budget, Decision, GovernorSample, Site
from edge_runtime.threads import ThreadGroup

log = logging.getLogger(__name__)

PERIOD_S = 0.25
"""How often the governor looks: two or three readings of power, and several times in the second that budgets go by."""
IDLE_PERIOD_S = 1.0
"""The same where there is no budget to hold."""


@dataclass(frozen=True, slots=True)
class Look:
    """What the governor sees: what there is, what has to be held, what it does now."""

    site: Site
    budget: Budget
    sample: GovernorSample


class GovernorLoop:
    """`look` is called every period, `tell` after every decision, both on the loop's thread. `hold`: why the safe point
    is to be kept to, whatever could be run besides; None where it need not be."""

    def __init__(
        self,
        look: Callable[[], Look | None],
        lease: PointLease,
        tell: Callable[[Decision, Look], None],
        *,
        controller: Controller | None = None,
        period_s: Callable[[], float] = lambda: PERIOD_S,
        hold: Callable[[], str | None] = lambda: None,
        on_death: Callable[[str, BaseException], None] | None = None,
    ) -> None:
        self._look = look
        self._lease = lease
        self._tell = tell
        self._controller = controller or Controller()
        self._period_s = period_s
        self._hold = hold
        self._stop = threading.Event()
        self._threads = ThreadGroup(on_death)
        self.tick_ns = time.monotonic_ns()

    def start(self) -> None:
        self._threads.spawn("governor", self._run)

    def stop(self, deadline_s: float = 0.3) -> list[str]:
        """The point in force stays; the thread's name where it did not end."""
        self._stop.set()
        self._lease.release()
        return self._threads.join(deadline_s)

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stop.wait(max(0.0, due - time.monotonic())):
            self.tick_ns = time.monotonic_ns()
            look = self._look()
            if look is not None:
                self._govern(look)
            due = max(due + (IDLE_PERIOD_S if look is None else self._period_s()), time.monotonic())

    def _govern(self, look: Look) -> None:
        decision = self._controller.step(look.site, look.budget, look.sample)
        if (why := self._hold()) is not None:
            decision = self._controller.held(look.site, look.budget, decision, why)
        if not self._stop.is_set():
            self._lease.grant(decision.point, safe_point(look.site), look.sample.t_ns)
        if decision.state == "off":
            self._lease.release()
        self._tell(decision, look)
