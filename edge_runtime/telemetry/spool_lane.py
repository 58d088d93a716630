"""One lane of the spool, as its three sides see it: callers put, the pump reads, the thread "spool" moves.

Nothing here does I/O. The lock is a leaf: under it nothing is called.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from edge_runtime.mqtt.outbox import Message, Row
from edge_runtime.telemetry.spool_rows import LaneLimits, SpoolRow

log = logging.getLogger(__name__)

Make = Callable[[int], bytes]

PENDING_ROWS = 10_000
"""Messages that may wait for the next commit; more are dropped, oldest first."""

AHEAD_ROWS = 256
"""Rows that are kept ready for the pump."""

_AHEAD_LOW = 64
_READ_PAUSE_NS = 5_000_000_000
"""Whoever reads again after so long has begun anew."""


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
    `wake` is called when they are there. So the pump never waits for the disk. Once a file is there that could not
    be read before, `read` begins with its oldest rows, wherever the cursor is.

    Rows that the pump was given and that are not deleted on disk yet are *out*: those would be sent again after a
    kill. `may_be_out` bounds them; where `read` stops for that, a commit is asked for that deletes what is done.
    """

    def __init__(self, limits: LaneLimits, ask: Callable[[], None]) -> None:
        self.limits = limits
        self.may_be_out: Callable[[], int | None] = lambda: None
        self._ask = ask
        self._wake: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._inbox: deque[tuple[str, Make]] = deque()
        self._overflowed = 0
        self._being_written = 0
        self._on_disk = 0
        self._in_memory = 0
        self._oldest = 0  # no number below it waits
        self._newest = -1  # the highest number that the pump may see
        # All rows with a number in (_from, _to] that still wait are in _ahead.
        self._ahead: deque[Row] = deque()
        self._from = -1
        self._to = -1
        self._wanted = False
        self._handed: dict[int, Row] = {}  # read by the pump, and nothing heard of since
        self._back = False  # the pump is to begin with the oldest, whatever it asks for
        self._under_way: frozenset[int] = frozenset()  # and of these it has got each in this session
        self._gone: dict[int, str | None] = {}  # done (None) or refused (why), still in the file
        self._gone_since_ns = 0
        self._starved = False
        self._read_ns: int | None = None
        self._reading_since_ns = 0
        self._dropped = 0
        self._refused = 0
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
                self._overflowed += 1
                self._dropped += 1
            self._inbox.append((topic, make))
            return len(self._inbox)

    def waiting(self) -> int:
        with self._lock:
            return len(self._inbox) + self._being_written + self._on_disk + self._in_memory - len(self._gone)

    def dropped(self) -> int:
        return self._dropped

    def refused(self) -> int:
        """Rows that were refused for good, since the start."""
        return self._refused

    def out(self) -> int:
        """Rows that were given to the pump and are not deleted yet. On the pump's thread it can only shrink."""
        return len(self._handed) + len(self._gone)

    def on_put(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    # ---- the pump's thread

    def read(self, after: int, limit: int) -> Sequence[Row]:
        most = self.may_be_out()
        now_ns = time.monotonic_ns()
        rows: list[Row] = []
        with self._lock:
            self._note_reading(after, now_ns)
            if after < 0:
                self._back, self._under_way = False, frozenset()
            elif self._back:
                after, self._under_way = -1, frozenset(self._handed)
            if not self._from <= after <= self._to:
                self._ahead.clear()
                self._to = after
            self._from = after
            while self._ahead and self._ahead[0].token <= after:
                self._ahead.popleft()
            out = len(self._handed) + len(self._gone)
            cut = False
            for row in self._ahead:
                if len(rows) >= limit:
                    break
                if row.token in self._gone or row.token in self._under_way:
                    continue
                if row.token not in self._handed:
                    if most is not None and out >= most:
                        cut = True
                        break
                    out += 1
                    self._handed[row.token] = row
                rows.append(row)
            self._wanted = len(self._ahead) < _AHEAD_LOW and self._to < self._newest
            self._back = self._back and not rows and self._to < self._newest
            # not for each row that is done, or a backlog would cost a commit a row
            self._starved = cut and len(self._gone) * 2 >= out
            ask = self._wanted or self._starved
        if ask:
            self._ask()
        return rows

    def _note_reading(self, after: int, now_ns: int) -> None:
        again = self._read_ns is None or now_ns - self._read_ns > _READ_PAUSE_NS
        if again or (after < 0 <= self._from):
            self._reading_since_ns = now_ns
        self._read_ns = now_ns

    def done(self, tokens: Sequence[int]) -> None:
        self._let_go((token, None) for token in tokens)

    def refuse(self, token: int, reason: str) -> None:
        self._let_go(((token, reason),))

    def _let_go(self, tokens: Iterable[tuple[int, str | None]]) -> None:
        with self._lock:
            if not self._gone:
                self._gone_since_ns = time.monotonic_ns()
            for token, reason in tokens:
                if self._handed.pop(token, None) is not None:
                    self._gone[token] = reason
                    self._refused += reason is not None

    # ---- the thread "spool"

    def attach(self, rows_on_disk: int, oldest: int | None) -> None:
        """A file is there (or none, 0 rows) that holds rows with numbers below `next_seq`, from `oldest` on."""
        with self._lock:
            self._on_disk, self._in_memory = rows_on_disk, len(self.unsaved)
            self._oldest = self.next_seq if oldest is None else oldest
            if self.unsaved:
                self._oldest = min(self._oldest, self.unsaved[0].seq)
            self._newest = self.next_seq - 1
            self._ahead.clear()
            self._from = self._to = -1
            # a file that comes late may hold what is older than anything sent so far
            self._back = self._read_ns is not None
        self._wake()

    def pending(self) -> int:
        """How many messages wait for the next commit."""
        with self._lock:
            return len(self._inbox)

    def delete_due(self, now_ns: int, after_s: float) -> bool:
        """Whether what is done should be deleted now, and not with the next row."""
        with self._lock:
            return bool(self._gone) and (self._starved or now_ns - self._gone_since_ns >= after_s * 1e9)

    def is_done(self, seq: int) -> bool:
        """Whether this row was delivered, though it may still be in the file."""
        return seq in self._gone

    def read_at(self) -> tuple[int | None, int]:
        """When the pump last read (monotonic ns; None: never), and since when it has read without a pause."""
        with self._lock:
            return self._read_ns, self._reading_since_ns

    def make_rows(self, t_s: int) -> range:
        """Give what waits in the inbox its numbers, and add it to `unsaved`. Returns the numbers of what was put
        and could not be kept."""
        with self._lock:
            inbox, self._inbox = self._inbox, deque()
            overflowed, self._overflowed = self._overflowed, 0
            self._being_written = len(inbox)
        lost = range(self.next_seq, self.next_seq + overflowed)
        self.next_seq += overflowed
        for topic, make in inbox:
            self._try_add(topic, make, t_s)
        return lost

    def _try_add(self, topic: str, make: Make, t_s: int) -> None:
        try:
            self.add_row(topic, make, t_s)
        except Exception:
            log.exception("spool: a message to %s could not be made and is lost", topic)
            with self._lock:
                self._dropped += 1

    def add_row(self, topic: str, make: Make, t_s: int) -> int:
        """Make a message and add it to `unsaved`; returns its number. Raises what `make` raises, or TypeError and
        UnicodeError; then no number is used."""
        payload = make(self.next_seq)
        if not isinstance(payload, bytes):
            raise TypeError(f"the payload is {type(payload).__name__}, not bytes")
        topic.encode()
        self.unsaved.append(SpoolRow(self.next_seq, topic, payload, t_s))
        self.next_seq += 1
        return self.next_seq - 1

    def gone(self) -> Gone:
        with self._lock:
            return self._gone_now()

    def _gone_now(self) -> Gone:
        return Gone(
            [seq for seq, reason in self._gone.items() if reason is None],
            [(seq, reason) for seq, reason in self._gone.items() if reason is not None],
        )

    def settle(
        self, *, rows_on_disk: int, forgotten: set[int], evicted: Sequence[int], added: list[SpoolRow], upto: int
    ) -> None:
        """After a commit, or instead of one: `forgotten` and `evicted` exist no more, `added` may be seen, and with
        them all numbers up to `upto`."""
        out = {*forgotten, *evicted}
        with self._lock:
            self._dropped += sum(seq not in self._gone for seq in evicted)
            for seq in out:
                self._gone.pop(seq, None)
                self._handed.pop(seq, None)
            if out:
                self._ahead = deque(row for row in self._ahead if row.token not in out)
                self._gone_since_ns = time.monotonic_ns()
            self._starved = False
            complete = self._to >= self._newest
            self._newest = max(self._newest, upto)
            if complete and len(self._ahead) + len(added) <= AHEAD_ROWS:
                self._ahead.extend(_row(row) for row in added if row.seq not in out and row.seq > self._to)
                self._to = max(self._to, self._newest)
            self._being_written = 0
            self._on_disk, self._in_memory = rows_on_disk, len(self.unsaved)
            if not self._on_disk + self._in_memory:
                self._oldest = self._newest + 1
        if added or out:
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

    def salvage(self, rescued: Sequence[SpoolRow], t_s: int) -> tuple[range, int, Gone]:
        """The file is lost: what is in memory or was `rescued` goes to `unsaved`, the rest is counted as dropped.

        Returns among which numbers those are, how many, and what need not be kept. `t_s`: when a row was put of
        which only topic and payload are known.
        """
        with self._lock:
            saved = {row.token: row for row in (*self._ahead, *self._handed.values())}
            rows = {row.seq: row for row in rescued if 0 <= row.seq < self.next_seq}
            for seq, row in saved.items():
                if seq not in rows:
                    rows[seq] = SpoolRow(seq, row.message.topic, row.message.payload, t_s)
            in_memory = {row.seq: row for row in self.unsaved}
            done = sum(seq not in in_memory for seq in self._gone)
            lost = max(0, self._on_disk - done - len(rows.keys() - in_memory.keys() - self._gone.keys()))
            rows.update(in_memory)
            first, last = self._oldest, self.next_seq - 1
            while first < last and (first in rows or first in self._gone):
                first += 1
            while first < last and (last in rows or last in self._gone):
                last -= 1
            self.unsaved = deque(rows[seq] for seq in sorted(rows) if seq not in self._gone)
            gone = self._gone_now()
            self._gone.clear()
            self._on_disk, self._in_memory = 0, len(self.unsaved)
            self._dropped += lost
            return range(first, last + 1), lost, gone


def _row(row: SpoolRow) -> Row:
    return Row(row.seq, Message(row.topic, row.payload))
