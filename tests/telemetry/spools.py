"""Spools for tests: opened in a folder, filled with messages that say their own number, and read to the end."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

from edge_runtime.mqtt.outbox import Row
from edge_runtime.records.identity import Identity
from edge_runtime.telemetry.spool import LANES, Gap, GapMessage, LaneLimits, Spool, SpoolOptions, SpoolRow

SLOW = SpoolOptions(commit_s=3600.0, commit_rows=1_000_000, retry_s=3600.0, delete_s=3600.0, rows_out=1_000_000)
"""Commits only when flushed or closed, and gives away as many rows as somebody asks for."""


class FakeClock:
    def __init__(self) -> None:
        self.now_ns = 10**9
        self.now_utc = datetime(2026, 3, 1, 12, 0, tzinfo=timezone.utc)

    def monotonic_ns(self) -> int:
        return self.now_ns

    def utc(self) -> datetime:
        return self.now_utc


def identity(session: str = "s1", boot: str = "b1") -> Identity:
    return Identity("gate-07", boot, session, "0", 0)


class Opened:
    """A started spool, and what it has told."""

    def __init__(
        self,
        store: Path,
        session: str = "s1",
        *,
        boot: str = "b1",
        options: SpoolOptions = SLOW,
        lanes: tuple[LaneLimits, ...] = LANES,
        gap_message: GapMessage | None = None,
        clock: FakeClock | None = None,
        synced: bool = True,
        free_bytes: Callable[[Path], int] = lambda _folder: 1 << 40,
    ) -> None:
        self.alarms: list[str] = []
        self.saved: list[tuple[str, int]] = []
        self.clock = clock or FakeClock()
        self.synced = synced
        self.spool = Spool(
            store,
            identity(session, boot),
            self.clock,
            lanes=lanes,
            options=options,
            alarm=lambda code, _message: self.alarms.append(code),
            on_saved=self._on_saved,
            gap_message=gap_message,
            clock_synced=lambda: self.synced,
            free_bytes=free_bytes,
        )
        self.spool.start()

    def _on_saved(self, lane: str, row: SpoolRow) -> None:
        self.saved.append((lane, row.seq))

    @property
    def gaps(self) -> list[Gap]:
        """Those of which no event tells yet."""
        return list(self.spool._keeper._gaps.pending)

    def put(self, *words: str, lane: str = "telemetry") -> None:
        for word in words:
            self.spool.append(lane, f"t/{word}", said(word))

    def read_all(self, lane: str = "telemetry", after: int = -1, limit: int = 7) -> list[Row]:
        return read_all(self.spool, lane, after, limit)

    def words(self, lane: str = "telemetry") -> list[str]:
        return [word(row) for row in self.read_all(lane)]

    def seqs(self, lane: str = "telemetry") -> list[int]:
        return [row.token for row in self.read_all(lane)]

    def flush(self) -> None:
        assert self.spool.flush(10)

    def close(self) -> bool:
        return self.spool.close(10)

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def gap_words(gap: Gap) -> tuple[str, Callable[[int], bytes]]:
    """A message that says a gap, as short as can be."""
    return "t/gap", lambda seq: f"{seq} {gap.lane}:{gap.from_seq}:{gap.to_seq}:{gap.count}:{gap.reason}".encode()


def said(word: str) -> Callable[[int], bytes]:
    return lambda seq: f"{seq} {word}".encode()


def word(row: Row) -> str:
    """The word of a message; its number has to be the row's."""
    seq, _, found = row.message.payload.decode().partition(" ")
    assert int(seq) == row.token
    return found


def read_all(spool: Spool, lane: str, after: int = -1, limit: int = 7) -> list[Row]:
    """Everything above `after`, as the pump would read it. Rows in memory count, those not committed do not."""
    view = spool.lane(lane)
    rows: list[Row] = []
    empty_turns = 0
    while empty_turns < 2:
        found = view.read(after, limit)
        if found:
            assert all(row.token > after for row in found)
            after, empty_turns = found[-1].token, 0
            rows += found
        else:
            # what a read asks for is fetched in the next turn
            turn_of(spool)
            empty_turns += 1
    return rows


def turn_of(spool: Spool) -> None:
    """Return when the thread "spool" has looked around after this call."""
    before = spool.tick_ns
    spool._wake.set()
    end = time.monotonic() + 10
    while spool.tick_ns == before or spool._wake.is_set():
        assert time.monotonic() < end, "the spool does not turn"
        time.sleep(0.0005)
    before = spool.tick_ns
    spool._wake.set()
    while spool.tick_ns == before:
        assert time.monotonic() < end, "the spool does not turn"
        time.sleep(0.0005)
