"""What waits to be published: messages, and the lanes they wait in."""

from __future__ import annotations

import bisect
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from edge_runtime.mqtt.holding import Hold


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a lane; lanes are QoS 1.

    `t_expires_ns` is monotonic: a message that is older when its turn comes is discarded and counted, and
    MQTT 5 tells the broker how many seconds are left.
    """

    topic: str
    payload: bytes
    retain: bool = False
    t_expires_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """A message with its place in the lane. Tokens are 0 or more and grow in the order of publishing."""

    token: int
    message: Message


class Lane(Protocol):
    """A queue that forgets a row only when told that the broker has it.

    The pump keeps a cursor, the lane keeps none: after a reconnect the cursor goes back to -1 and everything
    that was never `done` is read, and sent, again in order. All methods are called on the pump's thread, never
    under a lock of the pump, and may take as long as a disk takes. A lane may evict rows that were read
    already; such a row may still be delivered.
    """

    @property
    def name(self) -> str:
        """For messages and counters."""
        ...

    def read(self, after: int, limit: int) -> Sequence[Row]:
        """The oldest at most `limit` rows whose token is greater than `after`. Removes nothing.

        A lane that comes to know of older ones begins anew with those, once; without what is under way.
        """
        ...

    def done(self, tokens: Sequence[int]) -> None:
        """The broker has these (or they expired): delete them. Unknown tokens are ignored."""
        ...

    def refuse(self, token: int, reason: str) -> None:
        """This row can never be delivered: set it aside or delete it. Unknown tokens are ignored."""
        ...

    def waiting(self) -> int:
        """Rows not yet done or refused. Called from any thread, and must not block."""
        ...

    def dropped(self) -> int:
        """Rows evicted since the start, for lack of room. Called from any thread, and must not block."""
        ...

    def on_put(self, wake: Callable[[], None]) -> None:
        """Call `wake` (cheap, thread-safe, never blocks) whenever a row was added."""
        ...


class MemoryLane:
    """A bounded lane in memory: when full, the oldest row makes room for the newest and is counted.

    `capacity` is 1 or more rows. Thread-safe; no method does I/O.
    """

    def __init__(self, name: str, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"lane {name}: capacity {capacity} is less than 1")
        self._name = name
        self._capacity = capacity
        self._lock = threading.Lock()
        self._rows: OrderedDict[int, Message] = OrderedDict()
        self._next_token = 0
        self._dropped = 0
        self._wake: Callable[[], None] = lambda: None

    @property
    def name(self) -> str:
        return self._name

    def put(self, message: Message) -> None:
        """Adds a row; from any thread, in microseconds."""
        with self._lock:
            if len(self._rows) >= self._capacity:
                self._rows.popitem(last=False)
                self._dropped += 1
            self._rows[self._next_token] = message
            self._next_token += 1
        self._wake()

    def read(self, after: int, limit: int) -> Sequence[Row]:
        with self._lock:
            if not self._rows or self._next_token - 1 <= after:
                return ()
            first = next(iter(self._rows))
            if after < first:
                return [Row(token, message) for token, message in itertools.islice(self._rows.items(), limit)]
            # Tokens are dense apart from the few done out of order, so counting up beats walking from the oldest.
            rows: list[Row] = []
            for token in range(after + 1, self._next_token):
                message = self._rows.get(token)
                if message is not None:
                    rows.append(Row(token, message))
                    if len(rows) >= limit:
                        break
            return rows

    def done(self, tokens: Sequence[int]) -> None:
        with self._lock:
            for token in tokens:
                self._rows.pop(token, None)

    def refuse(self, token: int, reason: str) -> None:  # noqa: ARG002 - a spool would keep the reason
        self.done((token,))

    def waiting(self) -> int:
        return len(self._rows)

    def dropped(self) -> int:
        return self._dropped

    def on_put(self, wake: Callable[[], None]) -> None:
        self._wake = wake


@dataclass(slots=True)
class Feed:
    """A lane with the pump's cursor, and what is known of its rows that were sent and are not settled.

    `breaks` counts answers that are about the row itself (a final refusal, a connection that ended over it),
    `refusals` those that may be mended. `again` is what was refused and is to be sent again, by token.
    """

    lane: Lane
    capped: bool = False
    cursor: int = -1
    breaks: dict[int, int] = field(default_factory=dict)
    refusals: dict[int, int] = field(default_factory=dict)
    acked: list[int] = field(default_factory=list)
    again: list[tuple[int, Row]] = field(default_factory=list)  # (due at, monotonic ns; row)
    hold: Hold | None = None

    def send_again(self, row: Row, due_ns: int) -> None:
        bisect.insort(self.again, (due_ns, row), key=lambda one: one[1].token)

    def forget_before(self, token: int) -> None:
        """The lane's oldest row is `token`: what was counted of older ones is of no use."""
        for counts in (self.breaks, self.refusals):
            for old in [one for one in counts if one < token]:
                del counts[old]


@dataclass(frozen=True, slots=True)
class Flight:
    """An unacknowledged packet: a row of a lane, or a version of a state."""

    t_sent_ns: int
    feed: Feed | None = None
    row: Row | None = None
    topic: str = ""
    version: int = 0
