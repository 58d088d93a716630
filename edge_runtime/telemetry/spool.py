"""The spool: what must reach the broker waits on disk until the broker has it.

Callers only enqueue. The thread "spool" owns the file: it numbers, writes and deletes in batches, and keeps rows
ready for the pump. A row is sent only when it is committed, unless the disk fails: then rows wait in memory, under
the same rules, and every `retry_s` the disk is tried again.

Numbers (`seq`, per lane) are written in the transaction of their rows. They go on where they stopped after a clean
start and after a kill. Where the file may have forgotten some (a power cut, a corrupt or missing file, rows that were
in memory only), they go on at a reserve of the next 1000 that is fsynced beside the file: numbers are skipped then,
never used twice. Only when the store could not be written at all, or both files are lost, does this end; `session`
still tells messages apart.

Every number arrives, or a gap tells of it (`Gap`): noted in the transaction that loses it, and said by an event once
somebody reads.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from edge_runtime.clock import Clock
from edge_runtime.records.identity import Identity
from edge_runtime.telemetry import spool_disk
from edge_runtime.telemetry.spool_gaps import SAID_IN, Gap
from edge_runtime.telemetry.spool_keeper import Bounds, Keeper, Telling
from edge_runtime.telemetry.spool_lane import Make, SpoolLane
from edge_runtime.telemetry.spool_rows import LaneLimits, PreviousSession, SpoolRow
from edge_runtime.telemetry.spool_saying import GapMessage
from edge_runtime.threads import ThreadGroup

__all__ = [
    "EVENT",
    "LANES",
    "TELEMETRY",
    "Gap",
    "GapMessage",
    "LaneLimits",
    "Make",
    "PreviousSession",
    "Spool",
    "SpoolLane",
    "SpoolOptions",
    "SpoolRow",
    "SpoolStatus",
    "spool_lanes",
]

log = logging.getLogger(__name__)

EVENT = SAID_IN
TELEMETRY = "telemetry"
LANES = (
    LaneLimits(EVENT, 10_000, 16 << 20, 90 * 86_400.0),
    LaneLimits(TELEMETRY, 100_000, 128 << 20, 30 * 86_400.0),
)
"""What makes room last, first."""


def spool_lanes(file_bytes: int, telemetry_age_s: float) -> tuple[LaneLimits, ...]:
    """The lanes of a file of at most so many bytes, with windows that are kept for so long, s.

    Windows may have what the file has and events leave; the rows that are allowed grow with the file.
    """
    events, windows = LANES
    standard_bytes = sum(lane.max_bytes for lane in LANES)
    return (
        events,
        replace(
            windows,
            max_rows=max(windows.max_rows, windows.max_rows * file_bytes // standard_bytes),
            max_bytes=max(file_bytes - events.max_bytes, file_bytes // 2),
            max_age_s=telemetry_age_s,
        ),
    )


_TURN_S = 1.0
# Of the rows that may be out, each lane can have so many whatever the others do.
_OUT_AT_LEAST = 4


@dataclass(frozen=True, slots=True)
class SpoolStatus:
    """`on_disk` false: rows wait in memory, for the `reason` in words. Counts are per lane, all but `waiting` since
    the start: `dropped` were lost for lack of room or age, `refused` can never be delivered. `gaps_pending`: of so
    many gaps no event tells yet. `reserve_touched`: the disk is so full that new rows replace the oldest."""

    on_disk: bool
    reason: str | None
    waiting: dict[str, int]
    dropped: dict[str, int]
    refused: dict[str, int]
    gaps_pending: int
    reserve_touched: bool


@dataclass(frozen=True, slots=True)
class SpoolOptions:
    """`commit_s`: a row is on disk at most that many seconds after it was put, or with the `commit_rows`-th row
    if that is earlier. `retry_s`: how often a failed disk is tried again. `delete_s`: what was delivered is deleted
    with the next row, or at most so many seconds later. `rows_out`: so many rows at most, of all lanes, are in the
    pump's hands or delivered and not deleted yet: a kill sends no more than those again. At least 4 for each lane.
    `max_file_bytes`: most that the file takes (None: any); the oldest rows make room, but for 1 MiB of each lane.
    `disk_reserve_bytes`: with less than that free on its disk, the file does not grow; each lane may have 1 MiB.
    All above 0 but the last."""

    commit_s: float = 0.5
    commit_rows: int = 500
    retry_s: float = 10.0
    delete_s: float = 30.0
    rows_out: int = 20
    max_file_bytes: int | None = None
    disk_reserve_bytes: int = 0


class _Flush:
    """Somebody waits for a commit."""

    def __init__(self) -> None:
        self.finished = threading.Event()
        self.saved = False


class Spool:
    """Lanes on disk in the folder `store`. `start`, any number of `append`, `close`.

    `alarm(code, message)` is told `spool_corrupt` (a damaged file was set aside), `spool_memory` (the disk cannot
    be used), `spool_restored`, `spool_reserve` (the disk's reserve is touched) and `spool_reserve_over`.
    `on_saved(lane, row)` gets each row once it may be sent: it is on disk, or in memory for want of one.
    `gap_message(gap)` gives the topic and the contents of the event that says a gap; without it gaps stay pending.
    All three are called on the thread "spool", where `append` is allowed; what they raise is logged.
    `clock_synced` tells whether the wall clock can be trusted, `free_bytes` what is free on a folder's disk.
    Nothing here raises for a bad disk.
    """

    def __init__(
        self,
        store: Path,
        identity: Identity,
        clock: Clock,
        *,
        lanes: Sequence[LaneLimits] = LANES,
        options: SpoolOptions | None = None,
        alarm: Callable[[str, str], None] = lambda _code, _message: None,
        on_saved: Callable[[str, SpoolRow], None] = lambda _lane, _row: None,
        gap_message: GapMessage | None = None,
        clock_synced: Callable[[], bool] = lambda: False,
        free_bytes: Callable[[Path], int] = spool_disk.free_bytes,
    ) -> None:
        self._options = options or SpoolOptions()
        self._wake = threading.Event()
        self._lanes = {limits.name: SpoolLane(limits, self._wake.set) for limits in lanes}
        self._keeper = Keeper(
            store,
            identity,
            clock,
            clock_synced,
            self._lanes,
            Bounds(
                self._options.commit_rows,
                self._options.max_file_bytes,
                self._options.disk_reserve_bytes,
                free_bytes,
                self._options.retry_s,
            ),
            Telling(alarm, on_saved, gap_message),
        )
        for lane in self._lanes.values():
            lane.may_be_out = self._may_be_out(lane)
        self._flushes: deque[_Flush] = deque()
        self._opened = threading.Event()
        self._stopping = False
        self._clean = False
        self._threads = ThreadGroup()
        self._thread: threading.Thread | None = None
        self.tick_ns = time.monotonic_ns()

    # ---- any thread

    def start(self, wait_s: float = 5.0) -> None:
        """Open the file on the spool's thread and wait for that, at most `wait_s`. May be called once."""
        self._thread = self._threads.spawn("spool", self._run)
        if not self._opened.wait(wait_s):
            log.warning("spool: %s is still not open after %g s", self._keeper.path, wait_s)

    @property
    def previous(self) -> PreviousSession | None:
        """The start before this one; None before `start`, in a new store, and after a corrupt file."""
        return self._keeper.previous

    def lane(self, name: str) -> SpoolLane:
        """The lane for the pump (a `mqtt.outbox.Lane`). Raises KeyError."""
        return self._lanes[name]

    @property
    def lanes(self) -> tuple[SpoolLane, ...]:
        """All lanes, for the pump."""
        return tuple(self._lanes.values())

    def append(self, lane: str, topic: str, make: Make) -> None:
        """Queue the message `make(seq)` for `topic`. Never blocks and does no I/O.

        `make` is called on the thread "spool" with the row's number, up to `commit_s` later: what is to say *now*
        must be in it already. If it raises, this message is lost, that is logged, and the number is used for the
        next one. Raises KeyError for an unknown lane.
        """
        waiting = self._lanes[lane].put(topic, make)
        if waiting == 1 or waiting == self._options.commit_rows:
            self._wake.set()

    def flush(self, deadline_s: float) -> bool:
        """Write everything that was put so far, now; true when it is on disk within `deadline_s`."""
        flush = _Flush()
        self._flushes.append(flush)
        self._wake.set()
        return flush.finished.wait(deadline_s) and flush.saved

    def status(self) -> SpoolStatus:
        return SpoolStatus(
            on_disk=self._keeper.on_disk,
            reason=self._keeper.trouble,
            waiting={name: lane.waiting() for name, lane in self._lanes.items()},
            dropped={name: lane.dropped() for name, lane in self._lanes.items()},
            refused={name: lane.refused() for name, lane in self._lanes.items()},
            gaps_pending=self._keeper.gaps_pending,
            reserve_touched=self._keeper.reserve_touched,
        )

    def ticks(self) -> dict[str, tuple[threading.Thread, int]]:
        """For the supervisor, as `MqttLink.ticks`: once a second, but silent for as long as the disk takes."""
        return {} if self._thread is None else {"spool": (self._thread, self.tick_ns)}

    def close(self, deadline_s: float = 1.0) -> bool:
        """Write what was put, note that this session ended cleanly, and end the thread.

        True when all of that was done within `deadline_s`. Later messages stay unnoticed. May be called again.
        """
        self._stopping = True
        self._wake.set()
        return not self._threads.join(deadline_s) and self._clean

    def _may_be_out(self, lane: SpoolLane) -> Callable[[], int | None]:
        others = [other for other in self._lanes.values() if other is not lane]

        def rows() -> int | None:
            if not self._keeper.on_disk:
                return None  # nothing can be deleted: what waits is sent rather than held back
            return max(_OUT_AT_LEAST, self._options.rows_out - sum(max(_OUT_AT_LEAST, each.out()) for each in others))

        return rows

    # ---- "spool"

    def _run(self) -> None:
        try:
            self._keeper.open()
        except Exception:
            log.exception("spool: it could not be opened")
            self._keeper.enter_trouble("it could not be opened")
        self._opened.set()
        due_ns: int | None = None
        while True:
            wait_s = _TURN_S if due_ns is None else (due_ns - time.monotonic_ns()) / 1e9
            self._wake.wait(min(_TURN_S, max(0.0, wait_s)))
            self._wake.clear()
            self.tick_ns = time.monotonic_ns()
            stopping = self._stopping
            flushes = [self._flushes.popleft() for _ in range(len(self._flushes))]
            try:
                due_ns = self._turn(due_ns, now=stopping or bool(flushes))
            except Exception:
                log.exception("spool: a turn failed")
                due_ns = None
            for flush in flushes:
                flush.saved = self._keeper.on_disk
                flush.finished.set()
            if stopping:
                self._clean = self._keeper.close()
                return

    def _turn(self, due_ns: int | None, *, now: bool) -> int | None:
        """One round; returns when the next commit is due."""
        self._keeper.load_ahead()
        put = sum(lane.pending() for lane in self._lanes.values())
        if put and due_ns is None:
            due_ns = self.tick_ns + int(self._options.commit_s * 1e9)
        work = self._keeper.work_due(self.tick_ns)
        delete = any(lane.delete_due(self.tick_ns, self._options.delete_s) for lane in self._lanes.values())
        full = due_ns is not None and (put >= self._options.commit_rows or self.tick_ns >= due_ns)
        if now or work or delete or full:
            self._keeper.commit(try_disk=now or work or self._keeper.trouble is None)
            self._keeper.load_ahead()
            return None
        return due_ns
