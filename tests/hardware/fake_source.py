"""A sensor that plays what a test wants: watts, degrees, failures, a read that blocks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from edge_runtime.hardware.feed import Candidate
from edge_runtime.hardware.protocol import SensorError
from edge_runtime.records.power import DeviceReading


class FakeSource:
    """`read` waits for `gate`, raises `error` where there is one, else gives `watts` and `tj_c` of now.

    `fails`: whether the read of that number fails, from 1. `blocked`: whether a read waits now.
    """

    rails: tuple[str, ...] = ("VDD_IN",)
    quantum_w: float | None = 0.04

    def __init__(self, name: str = "ina3221", period_s: float = 0.02) -> None:
        self.name = name
        self.period_s = period_s
        self.gate = threading.Event()
        self.gate.set()
        self.blocked = False
        self.error: Exception | None = None
        self.fails: Callable[[int], bool] = lambda _: False
        self.watts: float | None = 5.0
        self.tj_c: float | None = 50.0
        self.mode: str | None = "15W"
        self.reasons: dict[str, str] = {}
        self.over_current: dict[str, int] = {}
        self.clock: Callable[[], int] = time.monotonic_ns
        self.reads = self.made = self.closed = 0

    def candidate(self, *, steady: bool = True) -> Candidate:
        return Candidate(self.name, self._open, steady=steady)

    def _open(self) -> FakeSource:
        self.made += 1
        return self

    def read(self) -> DeviceReading:
        self.blocked = not self.gate.is_set()
        self.gate.wait()
        self.blocked = False
        self.reads += 1
        if self.error is not None:
            raise self.error
        if self.fails(self.reads):
            raise SensorError("Input/output error (EIO)", where=self.name)
        rails_w = {} if self.watts is None else {"VDD_IN": self.watts}
        zones_c = {} if self.tj_c is None else {"tj": self.tj_c}
        return DeviceReading(
            self.clock(),
            watts=self.watts,
            rails_w=rails_w,
            tj_c=self.tj_c,
            zones_c=zones_c,
            throttling=False,
            over_current=self.over_current,
            mode=self.mode,
            reasons=self.reasons,
        )

    def close(self) -> None:
        self.closed += 1
