"""One lane of the spool, as its three sides see it: callers put, the pump reads, the thread "spool" moves.

Nothing here does I/O. The lock is a leaf: under it nothing is called.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from edge_runtime.mqtt.outbox import Message, Row
from edge_runtime.telemetry.spool_file import LaneLimits, SpoolRow

log = logging.getLogger(__name__)

Make = Callable[[int], bytes]

PENDING_ROWS = 10_000
"""Messages that may wait for the next commit; more are dropped, oldest first."""

AHEAD_ROWS = 256
"""Rows that are kept ready for the pump."""

_AHEAD_LOW = 64


@dataclass(frozen=True, slots=True)
class Gone:
    """Rows that the file may forget: delivered, or refused for good with the reason."""

    done: list[int]
    refused: list[tuple[int, str]]

    @property
    def seqs(self) -> set[int]:
        return {*self.done, *(seq for seq, _ in self.refused)}


class SpoolLane:
    """A `mqtt.outbox.Lane` over rows on disk; tokens are sequence numbers.

    The pump reads from rows that are kept ready ahead of its cursor. Where it asks for others (after a
    reconnect, or at the end of them) `read` gives nothing, the thread "spool" is asked to fetch them, and
    `wake` is called when they are there. So the pump never waits for the disk.
    """

    def __init__(self, limits: LaneLimits, ask: Callable[[], None]) -> None:
        self.limits = limits
        self._ask = ask
        self._wake: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._inbox: deque[tuple[str, Make]] = deque()
        self._being_written = 0
        self._stored = 0
        self._newest = -1  # the highest number that the pump may see
        # All rows with a number in (_from, _to] that still wait are in _ahead.
        self._ahead: deque[Row] = deque()
        self._from = -1
        self._to = -1
        self._wanted = False
        self._handed: dict[int, Row] = {}  # read by the pump, and nothing heard of since
        self._gone: dict[int, str | None] = {}  # done (None) or refused (why), still in the file
        self._dropped = 0
        # The thread "spool" alone: the next number, and rows that have one but are not on disk.
        self.next_seq = 0
        self.unsaved: deque[SpoolRow] = deque()

    # ---- any thread

    @property
    def name(self) -> str:
        return self.limits.name

    def put(self, topic: str, make: Make) -> int:
        """Queues a message; returns how many wait for the next commit now."""
        with self._lock:
            if len(self._inbox) >= PENDING_ROWS:
                self._inbox.popleft()
                self._dropped += 1
            self._inbox.append((topic, make))
            return len(self._inbox)

    def waiting(self) -> int:
        with self._lock:
            return len(self._inbox) + self._being_written + self._stored - len(self._gone)

    def dropped(self) -> int:
        return self._dropped

    def on_put(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    # ---- the pump's thread

    def read(self, after: int, limit: int) -> Sequence[Row]:
        with self._lock:
            if not self._from <= after <= self._to:
                self._ahead.clear()
                self._to = after
            self._from = after
            while self._ahead and self._ahead[0].token <= after:
                self._ahead.popleft()
            rows = list(itertools.islice((row for row in self._ahead if row.token not in self._gone), limit))
            self._handed.update((row.token, row) for row in rows)
            self._wanted = len(self._ahead) < _AHEAD_LOW and self._to < self._newest
            wanted = self._wanted
        if wanted:
            self._ask()
        return rows

    def done(self, tokens: Sequence[int]) -> None:
        self._let_go((token, None) for token in tokens)

    def refuse(self, token: int, reason: str) -> None:
        self._let_go(((token, reason),))

    def _let_go(self, tokens: Iterable[tuple[int, str | None]]) -> None:
        with self._lock:
            first = not self._gone
            for token, reason in tokens:
                if self._handed.pop(token, None) is not None:
                    self._gone[token] = reason
            first = first and bool(self._gone)
        if first:
            self._ask()

    # ---- the thread "spool"

    def attach(self, rows_on_disk: int) -> None:
        """A file is there (or none, 0 rows) that holds rows with numbers below `next_seq`."""
        with self._lock:
            self._stored = rows_on_disk + len(self.unsaved)
            self._newest = self.next_seq - 1
            self._ahead.clear()
            self._from = self._to = -1
        self._wake()

    def busy(self) -> int:
        """How much waits for the next commit."""
        with self._lock:
            return len(self._inbox) + len(self._gone)

    def make_rows(self) -> None:
        """Give what waits in the inbox its numbers, and add it to `unsaved`."""
        with self._lock:
            inbox, self._inbox = self._inbox, deque()
            self._being_written = len(inbox)
        for topic, make in inbox:
            try:
                payload = make(self.next_seq)
                if not isinstance(payload, bytes):
                    raise TypeError(f"the payload is {type(payload).__name__}, not bytes")
                topic.encode()
            except Exception:
                log.exception("spool: a message to %s could not be made and is lost", topic)
                with self._lock:
                    self._dropped += 1
                continue
            self.unsaved.append(SpoolRow(self.next_seq, topic, payload))
            self.next_seq += 1

    def gone(self) -> Gone:
        with self._lock:
            return Gone(
                [seq for seq, reason in self._gone.items() if reason is None],
                [(seq, reason) for seq, reason in self._gone.items() if reason is not None],
            )

    def settle(self, *, rows_on_disk: int, forgotten: set[int], evicted: Sequence[int], added: list[SpoolRow]) -> None:
        """After a commit, or instead of one: `forgotten` and `evicted` exist no more, `added` may be seen."""
        out = {*forgotten, *evicted}
        with self._lock:
            self._dropped += sum(seq not in self._gone for seq in evicted)
            for seq in out:
                self._gone.pop(seq, None)
                self._handed.pop(seq, None)
            if out:
                self._ahead = deque(row for row in self._ahead if row.token not in out)
            complete = self._to >= self._newest
            self._newest = max(self._newest, self.next_seq - 1)
            if complete and len(self._ahead) + len(added) <= AHEAD_ROWS:
                self._ahead.extend(_row(row) for row in added if row.seq not in out and row.seq > self._to)
                self._to = max(self._to, self._newest)
            self._being_written = 0
            self._stored = rows_on_disk + len(self.unsaved)
        if added:
            self._wake()

    def wants(self) -> tuple[int, int] | None:
        """Which rows the pump will ask for next: above which number, and how many."""
        with self._lock:
            if not self._wanted or self._to >= self._newest or len(self._ahead) >= _AHEAD_LOW:
                self._wanted = False
                return None
            return self._to, AHEAD_ROWS - len(self._ahead)

    def fill(self, after: int, rows: Sequence[SpoolRow], *, all_of_them: bool) -> None:
        """The answer to `wants`; `all_of_them`: no more rows follow these."""
        with self._lock:
            if self._to != after:  # the pump has turned elsewhere meanwhile
                return
            self._ahead.extend(_row(row) for row in rows if row.seq not in self._gone)
            self._to = self._newest if all_of_them or not rows else rows[-1].seq
        self._wake()

    def salvage(self, rescued: Sequence[SpoolRow]) -> None:
        """The file is lost: what is in memory or was `rescued` goes to `unsaved`, the rest is counted as dropped."""
        with self._lock:
            before = self._stored - len(self._gone)
            kept = {row.token: row for row in (*self._ahead, *self._handed.values())}
            rows = {row.seq: row for row in rescued if 0 <= row.seq < self.next_seq}
            rows.update((seq, SpoolRow(seq, row.message.topic, row.message.payload)) for seq, row in kept.items())
            rows.update((row.seq, row) for row in self.unsaved)
            self.unsaved = deque(rows[seq] for seq in sorted(rows) if seq not in self._gone)
            self._gone.clear()
            self._stored = len(self.unsaved)
            self._dropped += max(0, before - self._stored)


def _row(row: SpoolRow) -> Row:
    return Row(row.seq, Message(row.topic, row.payload))
