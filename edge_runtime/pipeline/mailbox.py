"""Mailboxes, in which a camera's frames wait for a model, and the queue of those that have one."""

from __future__ import annotations

import threading
from collections import deque

from edge_runtime.pipeline.ledger import Entry, Stream


class Mailbox:
    """Frames of one camera that wait for one model.

    `capacity` None keeps only the newest frame (live sources); a number keeps that many and makes the
    producer wait (files at full pace). `passes` counts claims that went to another camera while it was ready.
    """

    __slots__ = (
        "capacity",
        "ended",
        "entries",
        "interval_ns",
        "passes",
        "priority",
        "removed",
        "space",
        "stream",
        "t_put_ns",
    )

    def __init__(self, stream: Stream, monitor: threading.Lock, *, capacity: int | None, priority: int) -> None:
        self.stream = stream
        self.capacity = capacity
        self.priority = priority
        self.entries: deque[Entry] = deque()
        self.space = threading.Condition(monitor)
        self.passes = 0
        self.removed = False
        self.ended = False
        self.t_put_ns = 0
        self.interval_ns = 0

    def expects_before(self, now_ns: int, deadline_ns: int) -> bool:
        """Whether another frame of this camera is likely to come by `deadline_ns`, judged by its rhythm."""
        if self.ended:
            return False
        if self.capacity is not None:
            return True
        if self.interval_ns == 0:
            return False
        due_ns = self.t_put_ns + self.interval_ns
        # one that is overdue by more than its interval is not counted on
        return due_ns <= deadline_ns and due_ns + self.interval_ns > now_ns


class ReadyQueue:
    """Mailboxes with a frame, in the order in which they became ready. Guarded by M."""

    def __init__(self) -> None:
        self._ready: list[Mailbox] = []

    def __bool__(self) -> bool:
        return bool(self._ready)

    def add(self, mailbox: Mailbox) -> None:
        """It has a frame; nothing where it is in the queue already."""
        if mailbox not in self._ready:
            self._ready.append(mailbox)

    def discard(self, mailbox: Mailbox) -> None:
        if mailbox in self._ready:
            self._ready.remove(mailbox)
        mailbox.passes = 0

    def take(self, cameras: int) -> Entry | None:
        """The next frame by priority and age, of `cameras` in all; none is passed over more than N - 1 times.

        `passes` never increases along the queue, since it is in order of readiness. Serving the one at index k
        passes over those before it; that keeps the bound as long as passes[j] + 1 + j <= N - 1 for each j < k:
        they can still be served one after the other in time.
        """
        ready = self._ready
        if not ready:
            return None
        best = 0
        for index, mailbox in enumerate(ready):
            if mailbox.priority > ready[best].priority:
                best = index
            if mailbox.passes + 1 + index > cameras - 1:
                break
        chosen = ready.pop(best)
        for mailbox in ready:
            mailbox.passes += 1
        chosen.passes = 0
        entry = chosen.entries.popleft()
        if chosen.entries:
            ready.append(chosen)
        if chosen.capacity is not None:
            chosen.space.notify()
        return entry
