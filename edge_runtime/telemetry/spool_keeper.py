"""What the thread "spool" does to the file, and how it goes on when it cannot."""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_runtime.clock import Clock
from edge_runtime.records.identity import Identity
from edge_runtime.telemetry import spool_gaps as reasons
from edge_runtime.telemetry.spool_age import Timeline
from edge_runtime.telemetry.spool_disk import DiskReserve
from edge_runtime.telemetry.spool_file import SpoolFile, SpoolFileError
from edge_runtime.telemetry.spool_floors import Reserve
from edge_runtime.telemetry.spool_gaps import Gap, GapBook
from edge_runtime.telemetry.spool_lane import Gone, SpoolLane
from edge_runtime.telemetry.spool_opening import Opening
from edge_runtime.telemetry.spool_rows import LaneChanges, PreviousSession, SpoolRow
from edge_runtime.telemetry.spool_saying import GapMessage, GapSayer, LossLog

log = logging.getLogger(__name__)

FILE = "spool.sqlite"
FLOOR_FILE = "spool.seq"

# What a lane may hold in memory while there is no disk.
_MEMORY_ROWS = 10_000
_MEMORY_BYTES = 16 << 20
_BATCH_BYTES = 1 << 20
_AGE_CHECK_S = 60


@dataclass(frozen=True, slots=True)
class Telling:
    """Whom the keeper tells: of alarms (code, message), of rows that may be sent now, and how a gap is said."""

    alarm: Callable[[str, str], None]
    saved: Callable[[str, SpoolRow], None]
    gap_message: GapMessage | None


@dataclass(frozen=True, slots=True)
class Bounds:
    """`batch_rows`: most rows of a lane in one transaction. `max_file_bytes`: most of the file; None: any.
    `reserve_bytes`: what is to stay free on its disk, by `free_bytes`. `retry_s`: when to try a failed disk again."""

    batch_rows: int
    max_file_bytes: int | None
    reserve_bytes: int
    free_bytes: Callable[[Path], int]
    retry_s: float


class Keeper:
    """Moves rows between lanes and file. All of it runs on the thread "spool"; nothing raises for a bad disk.

    Three ways to be: on disk; in trouble with an open file (it can be read, not written); in trouble without one.
    """

    def __init__(
        self,
        store: Path,
        identity: Identity,
        clock: Clock,
        clock_synced: Callable[[], bool],
        lanes: Mapping[str, SpoolLane],
        bounds: Bounds,
        telling: Telling,
    ) -> None:
        self.path = store / FILE
        self._reserve = Reserve(store / FLOOR_FILE)
        self._lanes = lanes
        self._bounds = bounds
        self._telling = telling
        self._timeline = Timeline(clock, clock_synced)
        self._disk = DiskReserve(store, bounds.reserve_bytes, bounds.free_bytes, self._tell_alarm)
        self._opening = Opening(
            self.path, identity, lanes, bounds.max_file_bytes, self._reserve, self._timeline, self._tell_alarm
        )
        self._sayer = GapSayer(lanes.get(reasons.SAID_IN), telling.gap_message)
        self._losses = LossLog()
        self._file: SpoolFile | None = None
        self._gaps = GapBook()
        self._told: dict[str, int] = {}  # rows below this number were told of
        self._retry_ns = 0
        self._aged_s = 0
        # These may be looked at from any thread.
        self.previous: PreviousSession | None = None
        self.trouble: str | None = None

    @property
    def on_disk(self) -> bool:
        return self._file is not None and self.trouble is None

    @property
    def gaps_pending(self) -> int:
        """Gaps of which no event tells yet."""
        return len(self._gaps.pending)

    @property
    def reserve_touched(self) -> bool:
        return self._disk.touched

    def work_due(self, now_ns: int) -> bool:
        """Whether there is something to commit though nothing was put: a disk to try again, a gap to say, old rows."""
        if self.trouble is not None:
            return now_ns >= self._retry_ns
        return bool(self._sayer.due(self._gaps)) or self._outlived()

    def _outlived(self) -> bool:
        t_s = self._timeline.now_s()
        if self._file is None or t_s - self._aged_s < _AGE_CHECK_S:
            return False
        self._aged_s = t_s
        try:
            return self._file.outlived(t_s)
        except SpoolFileError:
            return True  # writing will show what is wrong

    # ---- the file

    def open(self) -> None:
        """Open the file, or a fresh one in its place, and find where numbers go on."""
        found = self._opening.open(self._gaps, empty_is_damaged=self.trouble is None)
        if isinstance(found, str):
            self.enter_trouble(found)
            return
        self._file = found.file
        self._gaps = found.gaps
        self.previous = self.previous or found.previous

    def _replace(self, reason: str) -> None:
        """The open file turned out to be damaged: go on with a fresh one and what is still in memory."""
        file, self._file = self._file, None
        t_s = self._timeline.now_s()
        for name, lane in self._lanes.items():
            rescued = [] if file is None else file.rescue(name, _MEMORY_ROWS, _MEMORY_BYTES)
            among, lost, gone = lane.salvage(rescued, t_s)
            self._note_gone(self._gaps, {name: gone})
            if lost:
                self._losses.note(name, lost, among[-1], reasons.CORRUPT)
                self._gaps.add(Gap(name, among[0], among[-1], lost, reasons.CORRUPT))
            if name == reasons.SAID_IN:
                left = {row.seq for row in lane.unsaved}
                self._gaps.keep_said(left.__contains__)
        if file is not None:
            file.close(clean=False)
        self._gaps.changed = True  # nothing of it is in the file that comes
        self._opening.damaged = reason
        self.open()

    def close(self) -> bool:
        """Note that this session ended cleanly, if it did, and close the file. True if it is noted."""
        file, self._file = self._file, None
        if file is None:
            return False
        clean = self.trouble is None
        try:
            file.close(clean=clean, stamp=self._timeline.now())
        except SpoolFileError as error:
            log.warning("spool: the end of this session could not be noted: %s", error)
            return False
        return clean

    def _keep_reserve(self, *, force: bool = False) -> None:
        used = {name: lane.next_seq for name, lane in self._lanes.items()}
        self._reserve.keep(used, self._settled, force=force)

    def _settled(self) -> dict[str, int]:
        """Below which numbers nothing is left to say. Unknown while a gap, or an event that says one, waits."""
        events = self._lanes.get(reasons.SAID_IN)
        if self._file is None or self._gaps.pending or self._gaps.said or (events is not None and events.waiting()):
            return {}
        settled = {}
        for name, lane in self._lanes.items():
            oldest = [row.seq for row in itertools.islice(lane.unsaved, 1)]
            try:
                first = self._file.first(name)
            except SpoolFileError:
                return {}
            settled[name] = min([*oldest, lane.next_seq if first is None else first])
        return settled

    # ---- rows

    def commit(self, *, try_disk: bool) -> None:
        """Number what was put, and bring file and lanes up to date; without the disk, the lanes alone."""
        t_s = self._timeline.now_s()
        for name, lane in self._lanes.items():
            self._lose(self._gaps, name, lane.make_rows(t_s), reasons.PENDING)
        self._sayer.say(self._gaps, t_s)
        self._keep_reserve()
        for _ in range(2):
            if not try_disk:
                break
            if self._file is None:
                self.open()
            if self._file is None:
                break
            try:
                self._write(self._file)
            except SpoolFileError as error:
                if not error.corrupt:
                    self.enter_trouble(str(error))
                    break
                self._replace(str(error))
            else:
                self._leave_trouble()
                return
        else:
            self.enter_trouble("a fresh file is damaged too")
        self._settle_in_memory()

    def _write(self, file: SpoolFile) -> None:
        """A transaction for each `batch_rows` rows, so that the WAL stays small. Raises SpoolFileError."""
        grow = self._disk.may_grow()
        first = True
        while first or any(lane.unsaved for lane in self._lanes.values()):
            gone = {name: lane.gone() if first else Gone([], []) for name, lane in self._lanes.items()}
            gaps = self._gaps.copy()
            self._note_gone(gaps, gone)
            # some were delivered before they were ever saved
            rest = {name: _but(lane.unsaved, gone[name].seqs) for name, lane in self._lanes.items()}
            taken = {name: _batch(rest[name], self._bounds.batch_rows) for name in rest}
            changes = {}
            for name, lane in self._lanes.items():
                whole = len(taken[name]) == len(rest[name])
                next_seq = lane.next_seq if whole else taken[name][-1].seq + 1
                changes[name] = LaneChanges(next_seq, taken[name], gone[name].done, gone[name].refused)
            written = file.write(changes, gaps, self._timeline.now(), grow=grow)
            self._gaps = written.gaps
            for name, lane in self._lanes.items():
                lane.unsaved = deque(rest[name][len(taken[name]) :])
                file.rows[name] = written.rows[name]
                evicted = [seq for each in written.evicted[name] for seq in each.seqs]
                for each in written.evicted[name]:
                    self._losses.note(name, len(each.seqs), max(each.seqs), each.reason)
                change = changes[name]
                lane.settle(
                    rows_on_disk=written.rows[name],
                    forgotten=gone[name].seqs,
                    evicted=evicted,
                    added=list(change.added),
                    upto=change.next_seq - 1,
                )
                self._tell_saved(name, change.added, set(evicted))
            first = False

    def _note_gone(self, gaps: GapBook, gone: Mapping[str, Gone]) -> None:
        for name, each in gone.items():
            for seq, reason in each.refused:
                gaps.lost(name, [seq], reasons.REFUSED, reason)
            if name == reasons.SAID_IN:
                gaps.told(each.done)
                if gaps.unsay(seq for seq, _ in each.refused):
                    self._sayer.hold()

    def _settle_in_memory(self) -> None:
        t_s = self._timeline.now_s()
        for name, lane in self._lanes.items():
            saved = 0 if self._file is None else self._file.rows[name]
            in_memory = {row.seq for row in lane.unsaved}
            gone = lane.gone()
            # what is in the file cannot be deleted now, and stays noted as gone
            forgotten = {seq for seq in gone.seqs if seq in in_memory or self._file is None}
            done = [seq for seq in gone.done if seq in forgotten]
            refused = [(seq, why) for seq, why in gone.refused if seq in forgotten]
            self._note_gone(self._gaps, {name: Gone(done, refused)})
            unsaved = deque(row for row in lane.unsaved if row.seq not in forgotten)
            old, evicted = [], []
            oldest_s = None if lane.limits.max_age_s is None else t_s - lane.limits.max_age_s
            while unsaved and oldest_s is not None and unsaved[0].t_s < oldest_s:
                old.append(unsaved.popleft().seq)
            size = sum(row.size_bytes for row in unsaved)
            while unsaved and (
                len(unsaved) > min(_MEMORY_ROWS, lane.limits.max_rows)
                or size > min(_MEMORY_BYTES, lane.limits.max_bytes)
            ):
                row = unsaved.popleft()
                size -= row.size_bytes
                evicted.append(row.seq)
            lane.unsaved = unsaved
            self._lose(self._gaps, name, old, reasons.AGE)
            self._lose(self._gaps, name, evicted, reasons.MEMORY)
            lane.settle(
                rows_on_disk=saved,
                forgotten=forgotten,
                evicted=[*old, *evicted],
                added=list(unsaved),
                upto=lane.next_seq - 1,
            )
            self._tell_saved(name, unsaved, set())

    def _lose(self, gaps: GapBook, lane: str, seqs: Sequence[int], reason: str) -> None:
        if seqs:
            self._losses.note(lane, len(seqs), max(seqs), reason)
            gaps.lost(lane, seqs, reason)
            if lane == reasons.SAID_IN:
                gaps.unsay(seqs)

    def load_ahead(self) -> None:
        """Fetch what the pump will ask for next."""
        for name, lane in self._lanes.items():
            while (wanted := lane.wants()) is not None:
                after, limit = wanted
                rows: list[SpoolRow] = []
                all_of_them = True
                if self._file is not None:
                    try:
                        rows, all_of_them = self._file.load(name, after, limit)
                    except SpoolFileError as error:
                        # whoever cannot be read cannot be delivered: as good as damaged
                        self._replace(str(error))
                        return
                if all_of_them:
                    more = (row for row in lane.unsaved if row.seq > after)
                    rows += itertools.islice(more, limit - len(rows))
                    all_of_them = next(more, None) is None
                lane.fill(after, rows, all_of_them=all_of_them)

    # ---- telling

    def enter_trouble(self, reason: str) -> None:
        """The disk cannot be used for now."""
        self._retry_ns = time.monotonic_ns() + int(self._bounds.retry_s * 1e9)
        if not self._reserve.in_memory:
            self._reserve.in_memory = True
            self._keep_reserve(force=True)
        if self.trouble is None:
            self._tell_alarm("spool_memory", f"messages wait in memory, since {self.path} cannot be used: {reason}")
        self.trouble = reason

    def _leave_trouble(self) -> None:
        if self._reserve.in_memory:
            self._reserve.in_memory = False
            self._keep_reserve(force=True)
        if self.trouble is not None:
            self.trouble = None
            self._tell_alarm("spool_restored", f"messages wait on disk again, in {self.path}")

    def _tell_alarm(self, code: str, message: str) -> None:
        log.warning("spool: %s", message)
        try:
            self._telling.alarm(code, message)
        except Exception:
            log.exception("spool: an alarm failed")

    def _tell_saved(self, lane: str, rows: Sequence[SpoolRow] | deque[SpoolRow], but: set[int]) -> None:
        for row in rows:
            if row.seq >= self._told.get(lane, self._opening.first[lane]):
                self._told[lane] = row.seq + 1
                if row.seq not in but:
                    try:
                        self._telling.saved(lane, row)
                    except Exception:
                        log.exception("spool: what is done with saved rows failed")


def _but(rows: Iterable[SpoolRow], gone: set[int]) -> list[SpoolRow]:
    return [row for row in rows if row.seq not in gone]


def _batch(unsaved: Sequence[SpoolRow], most: int) -> list[SpoolRow]:
    """The oldest rows, at most that many and about 1 MiB, but always one."""
    rows: list[SpoolRow] = []
    size = 0
    for row in unsaved:
        if len(rows) >= most or (rows and size + row.size_bytes > _BATCH_BYTES):
            break
        rows.append(row)
        size += row.size_bytes
    return rows
