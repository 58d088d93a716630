"""Lanes for tests of the pump."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from edge_runtime.mqtt.outbox import MemoryLane, Message, Row


class LongLane:
    """A backlog of `count` rows that takes no room; payloads are the tokens. Remembers what became of each."""

    def __init__(self, count: int, *, name: str = "long", topic: str = "lane") -> None:
        self.count = count
        self.topic = topic
        self.gone: set[int] = set()
        self.refused: dict[int, str] = {}
        self._name = name
        self._low = 0
        self._wake: Callable[[], None] = lambda: None

    @property
    def name(self) -> str:
        return self._name

    def grow(self, count: int) -> None:
        self.count += count
        self._wake()

    def read(self, after: int, limit: int) -> Sequence[Row]:
        rows: list[Row] = []
        token = max(after + 1, self._low)
        while token < self.count and len(rows) < limit:
            if token not in self.gone:
                rows.append(Row(token, Message(self.topic, b"%d" % token)))
            token += 1
        return rows

    def done(self, tokens: Sequence[int]) -> None:
        self.gone.update(tokens)
        while self._low in self.gone:
            self._low += 1

    def refuse(self, token: int, reason: str) -> None:
        self.refused[token] = reason
        self.done((token,))

    def waiting(self) -> int:
        return self.count - len(self.gone)

    def dropped(self) -> int:
        return 0

    def on_put(self, wake: Callable[[], None]) -> None:
        self._wake = wake


class TimedLane(MemoryLane):
    """A lane in memory that knows how long each row took from `put` until the broker had it."""

    def __init__(self, name: str) -> None:
        super().__init__(name, 10_000)
        self.took_s: list[float] = []
        self._put_ns: dict[int, int] = {}
        self._timed = threading.Lock()
        self._next = 0

    def put(self, message: Message) -> None:
        with self._timed:
            self._put_ns[self._next] = time.monotonic_ns()
            self._next += 1
            super().put(message)

    def done(self, tokens: Sequence[int]) -> None:
        now_ns = time.monotonic_ns()
        self.took_s += [(now_ns - self._put_ns[token]) / 1e9 for token in tokens]
        super().done(tokens)
