"""What the thread "spool" does to the file, and how it goes on when it cannot."""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_runtime.clock import Clock, utc_text
from edge_runtime.records.identity import Identity
from edge_runtime.telemetry.spool_file import (
    LaneChanges,
    PreviousSession,
    SpoolFile,
    SpoolFileError,
    SpoolRow,
    set_aside,
)
from edge_runtime.telemetry.spool_floors import FloorFile, Floors
from edge_runtime.telemetry.spool_lane import SpoolLane

log = logging.getLogger(__name__)

FILE = "spool.sqlite"
FLOOR_FILE = "spool.seq"

_RESERVE = 1000
# What a lane may hold in memory while there is no disk.
_MEMORY_ROWS = 10_000
_MEMORY_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Dropped:
    """Rows of a lane that were evicted undelivered: `count` of those from `first_seq` to `last_seq`."""

    lane: str
    first_seq: int
    last_seq: int
    count: int
    reason: str


class Keeper:
    """Moves rows between lanes and file. All of it runs on the thread "spool"; nothing raises for a bad disk.

    Three ways to be: on disk; in trouble with an open file (it can be read, not written); in trouble without one.
    """

    def __init__(
        self,
        store: Path,
        identity: Identity,
        clock: Clock,
        lanes: Mapping[str, SpoolLane],
        *,
        retry_s: float,
        alarm: Callable[[str, str], None],
        on_drop: Callable[[Dropped], None],
    ) -> None:
        self.path = store / FILE
        self._floors = FloorFile(store / FLOOR_FILE)
        self._identity = identity
        self._clock = clock
        self._lanes = lanes
        self._limits = tuple(lane.limits for lane in lanes.values())
        self._retry_s = retry_s
        self._alarm = alarm
        self._on_drop = on_drop
        self._file: SpoolFile | None = None
        self._reserved: dict[str, int] = {}
        self._in_memory = False
        self._retry_ns = 0
        # These may be looked at from any thread.
        self.previous: PreviousSession | None = None
        self.trouble: str | None = None

    @property
    def on_disk(self) -> bool:
        return self._file is not None and self.trouble is None

    def retry_due(self, now_ns: int) -> bool:
        """Whether a disk that failed should be tried again."""
        return self.trouble is not None and now_ns >= self._retry_ns

    # ---- the file

    def open(self) -> None:
        """Open the file, or a fresh one in its place, and find where numbers go on."""
        corrupt = self._opens_damaged()
        for _ in range(2):
            if corrupt is not None and not self._set_aside(corrupt):
                return
            try:
                file = SpoolFile(self.path, self._limits)
                break
            except SpoolFileError as error:
                if not error.corrupt:
                    self._floors_without_file()
                    self.enter_trouble(str(error))
                    return
                corrupt = str(error)
        else:
            self._floors_without_file()
            self.enter_trouble(corrupt or "it is damaged")
            return
        floors = self._floors.read()
        previous = file.previous
        # After a power cut the file may be older than what was sent from it. A kill forgets nothing.
        forgot = file.fresh or (previous is not None and not previous.clean and previous.boot != self._identity.boot)
        for name, lane in self._lanes.items():
            floor = floors.reserved.get(name, 0) if floors and (forgot or floors.in_memory) else 0
            lane.next_seq = max(lane.next_seq, file.next_seq[name], floor)
        self._in_memory = False
        self._reserve(force=True)
        try:
            file.begin(
                self._identity.session,
                self._identity.boot,
                self._now(),
                {name: lane.next_seq for name, lane in self._lanes.items()},
            )
        except SpoolFileError as error:
            file.close(clean=False)
            self.enter_trouble(str(error))
            return
        if previous is not None and previous.session != self._identity.session:
            self.previous = previous
        self._file = file
        for name, lane in self._lanes.items():
            lane.attach(file.rows[name])

    def _opens_damaged(self) -> str | None:
        """sqlite takes an empty file for a new one; if there was a spool before, it is a damaged one."""
        if self.trouble is not None:
            return None  # a full disk left it so, a moment ago
        try:
            empty = self.path.stat().st_size == 0
        except OSError:
            return None
        return "it is empty" if empty and self._floors.path.exists() else None

    def _floors_without_file(self) -> None:
        floors = self._floors.read()
        for name, lane in self._lanes.items():
            if floors is not None and lane.next_seq == 0:
                lane.next_seq = floors.reserved.get(name, 0)

    def _set_aside(self, reason: str) -> bool:
        try:
            aside = set_aside(self.path)
        except OSError as error:
            self._floors_without_file()
            self.enter_trouble(f"{self.path} is damaged ({reason}) and cannot be set aside: {error}")
            return False
        self._tell_alarm("spool_corrupt", f"{self.path} is damaged ({reason}); it was set aside as {aside.name}")
        return True

    def _replace(self, reason: str) -> None:
        """The open file turned out to be damaged: go on with a fresh one and what is still in memory."""
        file, self._file = self._file, None
        for name, lane in self._lanes.items():
            before = lane.dropped()
            lane.salvage([] if file is None else file.rescue(name, _MEMORY_ROWS, _MEMORY_BYTES))
            if lost := lane.dropped() - before:
                self._tell_drop(Dropped(name, 0, lane.next_seq - 1, lost, "corrupt"))
        if file is not None:
            file.close(clean=False)
        if self._set_aside(reason):
            self.open()

    def close(self) -> bool:
        """Note that this session ended cleanly, if it did, and close the file. True if it is noted."""
        file, self._file = self._file, None
        if file is None:
            return False
        clean = self.trouble is None
        try:
            file.close(clean=clean, t_utc=self._now())
        except SpoolFileError as error:
            log.warning("spool: the end of this session could not be noted: %s", error)
            return False
        return clean

    def _reserve(self, *, force: bool = False) -> None:
        """Keep the numbers that are about to be used below what is noted beside the file."""
        used = {name: lane.next_seq for name, lane in self._lanes.items()}
        if not force and all(seq < self._reserved.get(name, 0) for name, seq in used.items()):
            return
        # all at once, since the file is written as a whole; a lane that needs none keeps its own
        reserved = {name: max(self._reserved.get(name, 0), seq + _RESERVE) for name, seq in used.items()}
        try:
            self._floors.write(Floors(reserved, self._in_memory))
        except OSError as error:
            log.warning("spool: no numbers could be reserved: %s", error)
        self._reserved = reserved

    # ---- rows

    def commit(self, *, try_disk: bool) -> None:
        """Number what was put, and bring file and lanes up to date; without the disk, the lanes alone."""
        for lane in self._lanes.values():
            lane.make_rows()
        self._reserve()
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
        gone = {name: lane.gone() for name, lane in self._lanes.items()}
        changes = {}
        for name, lane in self._lanes.items():
            # delivered before it was ever saved
            added = [row for row in lane.unsaved if row.seq not in gone[name].seqs]
            changes[name] = LaneChanges(lane.next_seq, added, gone[name].done, gone[name].refused)
        written = file.write(changes, self._now())
        for name, lane in self._lanes.items():
            lane.unsaved.clear()
            file.rows[name] = written[name].rows
            evicted = written[name].evicted
            lane.settle(
                rows_on_disk=written[name].rows,
                forgotten=gone[name].seqs,
                evicted=evicted,
                added=list(changes[name].added),
            )
            self._say_evicted(name, evicted)

    def _settle_in_memory(self) -> None:
        for name, lane in self._lanes.items():
            saved = 0 if self._file is None else self._file.rows[name]
            in_memory = {row.seq for row in lane.unsaved}
            # what is in the file cannot be deleted now, and stays noted as gone
            forgotten = {seq for seq in lane.gone().seqs if seq in in_memory or self._file is None}
            unsaved = deque(row for row in lane.unsaved if row.seq not in forgotten)
            evicted = []
            size = sum(row.size_bytes for row in unsaved)
            while unsaved and (
                len(unsaved) > min(_MEMORY_ROWS, lane.limits.max_rows)
                or size > min(_MEMORY_BYTES, lane.limits.max_bytes)
            ):
                row = unsaved.popleft()
                size -= row.size_bytes
                evicted.append(row.seq)
            lane.unsaved = unsaved
            lane.settle(rows_on_disk=saved, forgotten=forgotten, evicted=evicted, added=list(unsaved))
            self._say_evicted(name, evicted)

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
        self._retry_ns = time.monotonic_ns() + int(self._retry_s * 1e9)
        if not self._in_memory:
            self._in_memory = True
            self._reserve(force=True)
        if self.trouble is None:
            self._tell_alarm("spool_memory", f"messages wait in memory, since {self.path} cannot be used: {reason}")
        self.trouble = reason

    def _leave_trouble(self) -> None:
        if self._in_memory:
            self._in_memory = False
            self._reserve(force=True)
        if self.trouble is not None:
            self.trouble = None
            self._tell_alarm("spool_restored", f"messages wait on disk again, in {self.path}")

    def _say_evicted(self, lane: str, evicted: Sequence[int]) -> None:
        if evicted:
            self._tell_drop(Dropped(lane, min(evicted), max(evicted), len(evicted), "full"))

    def _tell_alarm(self, code: str, message: str) -> None:
        log.warning("spool: %s", message)
        try:
            self._alarm(code, message)
        except Exception:
            log.exception("spool: an alarm failed")

    def _tell_drop(self, dropped: Dropped) -> None:
        log.warning(
            "spool: lane %s lost %d messages of %d to %d: %s",
            dropped.lane,
            dropped.count,
            dropped.first_seq,
            dropped.last_seq,
            dropped.reason,
        )
        try:
            self._on_drop(dropped)
        except Exception:
            log.exception("spool: the drop handler failed")

    def _now(self) -> str:
        return utc_text(self._clock.utc())
