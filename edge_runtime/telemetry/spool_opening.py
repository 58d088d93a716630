"""How the spool's file is opened: damaged or not, and from where its numbers go on."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from edge_runtime.records.identity import Identity
from edge_runtime.telemetry import spool_gaps as reasons
from edge_runtime.telemetry.spool_age import Timeline
from edge_runtime.telemetry.spool_aside import set_aside
from edge_runtime.telemetry.spool_file import SpoolFile, SpoolFileError
from edge_runtime.telemetry.spool_floors import Floors, Reserve
from edge_runtime.telemetry.spool_gaps import Gap, GapBook
from edge_runtime.telemetry.spool_lane import SpoolLane
from edge_runtime.telemetry.spool_rows import PreviousSession, SpoolRow

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpenedFile:
    """A file to write to, the gaps that it notes, and the session before this one, if it is news."""

    file: SpoolFile
    gaps: GapBook
    previous: PreviousSession | None


class Opening:
    """Opens the file at `path` for a session, once or, where it fails, again and again. `tell(code, message)` is
    told `spool_corrupt`. Nothing raises for a bad disk."""

    def __init__(
        self,
        path: Path,
        identity: Identity,
        lanes: Mapping[str, SpoolLane],
        max_bytes: int | None,
        reserve: Reserve,
        timeline: Timeline,
        tell: Callable[[str, str], None],
    ) -> None:
        self._path = path
        self._identity = identity
        self._lanes = lanes
        self._limits = tuple(lane.limits for lane in lanes.values())
        self._max_bytes = max_bytes
        self._reserve = reserve
        self._timeline = timeline
        self._tell = tell
        self._begun = False  # a file was opened in this session
        self._timed = False  # the timeline goes on where a file stopped
        self.first: dict[str, int] = {}
        """Where the numbers of this session begin, by lane."""
        self.damaged: str | None = None
        """Why the file that is there cannot be used, and is to be set aside."""

    def open(self, gaps: GapBook, *, empty_is_damaged: bool) -> OpenedFile | str:
        """Open the file, or a fresh one in its place, give the lanes their next numbers and attach them. In words,
        why that is not possible now; lanes that had no number yet have one all the same."""
        corrupt = self.damaged or (self._emptied() if empty_is_damaged else None)
        floors = self._reserve.read()
        why_lost = reasons.SKIPPED
        for _ in range(2):
            if corrupt is not None:
                trouble = self._set_aside(corrupt)
                if trouble is not None:
                    return self._without_file(floors, trouble)
                why_lost = reasons.CORRUPT
            try:
                file = SpoolFile(self._path, self._limits, self._max_bytes)
            except SpoolFileError as error:
                if not error.corrupt:
                    return self._without_file(floors, str(error))
                corrupt = str(error)
                continue
            try:
                return self._begin(file, floors, gaps.copy(), why_lost)
            except SpoolFileError as error:
                file.close(clean=False)
                if not error.corrupt:
                    return str(error)
                corrupt = str(error)
        self.damaged = corrupt
        return self._without_file(floors, corrupt or "it is damaged")

    def _begin(self, file: SpoolFile, floors: Floors | None, gaps: GapBook, why_lost: str) -> OpenedFile:
        previous = file.previous
        # After a power cut the file may be older than what was sent from it. A kill forgets nothing.
        forgot = file.fresh or (previous is not None and not previous.clean and previous.boot != self._identity.boot)
        in_memory = floors is not None and floors.in_memory
        for name, lane in self._lanes.items():
            floor = floors.reserved.get(name, 0) if floors is not None and (forgot or in_memory) else 0
            self._number(name, max(file.next_seq[name], floor))
            lane.next_seq = max(lane.next_seq, file.next_seq[name])
        # until the file says where numbers go on, and holds what is in memory, only the reserve does
        unsaved = any(lane.unsaved for lane in self._lanes.values())
        self._reserve.in_memory = self._reserve.in_memory or in_memory or unsaved
        self._keep_reserve()
        if not self._begun:
            self._take_over(file, floors, gaps, reasons.MEMORY if in_memory and not file.fresh else why_lost)
        later_s = 0 if self._timed else self._timeline.go_on(file.last)
        self._timed = True
        for lane in self._lanes.values():
            lane.unsaved = deque(SpoolRow(row.seq, row.topic, row.payload, row.t_s + later_s) for row in lane.unsaved)
        next_seq = {
            # for a kill before they are written: what is in memory is not in the file
            name: max(file.next_seq[name], lane.unsaved[0].seq) if lane.unsaved else lane.next_seq
            for name, lane in self._lanes.items()
        }
        file.begin(self._identity.session, self._identity.boot, next_seq, gaps, self._timeline.now())
        gaps.changed = False
        shrunk = file.shrink(next_seq, gaps, self._timeline.now())
        if shrunk is not None:
            gaps = shrunk.gaps
            file.rows.update(shrunk.rows)
        self._begun = True
        if self._reserve.in_memory and not unsaved:
            self._reserve.in_memory = False
            self._keep_reserve()
        for name, lane in self._lanes.items():
            lane.attach(file.rows[name], file.first(name))
        news = previous is not None and previous.session != self._identity.session
        return OpenedFile(file, gaps, previous if news else None)

    def _take_over(self, file: SpoolFile, floors: Floors | None, gaps: GapBook, why: str) -> None:
        """Note, in `gaps`, what the file says is lost, and what lies between its last numbers and ours."""
        for name, first in self.first.items():
            known = file.next_seq[name]
            if file.fresh and floors is not None:
                known = min(floors.settled.get(name, 0), first)
            if known < first:
                gaps.add(Gap(name, known, first - 1, None, why))
        of_file = file.gaps()
        if reasons.SAID_IN in self._lanes:
            of_file.keep_said(lambda seq: file.holds(reasons.SAID_IN, seq))
        for gap in of_file.pending:
            gaps.add(gap)
        gaps.said.update(of_file.said)
        for name, lane in self._lanes.items():
            # a store that came late has a file that nobody could know of: its numbers were used again meanwhile
            twice = [row.seq for row in lane.unsaved if row.seq < file.next_seq[name] and file.holds(name, row.seq)]
            if twice:
                log.warning("spool: lane %s: %d messages have numbers of older ones, and are lost", name, len(twice))
                gaps.lost(name, twice, reasons.MEMORY)
                lane.unsaved = deque(row for row in lane.unsaved if row.seq not in twice)

    def _without_file(self, floors: Floors | None, trouble: str) -> str:
        for name in self._lanes:
            self._number(name, 0 if floors is None else floors.reserved.get(name, 0))
        return trouble

    def _number(self, name: str, seq: int) -> None:
        if name not in self.first:
            self.first[name] = self._lanes[name].next_seq = seq

    def _emptied(self) -> str | None:
        """sqlite takes an empty file for a new one; if there was a spool before, it is a damaged one."""
        try:
            empty = self._path.stat().st_size == 0
        except OSError:
            return None
        return "it is empty" if empty and self._reserve.path.exists() else None

    def _set_aside(self, reason: str) -> str | None:
        """In words, why it is still there."""
        try:
            aside = set_aside(self._path)
        except OSError as error:
            self.damaged = reason
            return f"{self._path} is damaged ({reason}) and cannot be set aside: {error}"
        self.damaged = None
        self._tell("spool_corrupt", f"{self._path} is damaged ({reason}); it was set aside as {aside.name}")
        return None

    def _keep_reserve(self) -> None:
        self._reserve.keep({name: lane.next_seq for name, lane in self._lanes.items()}, force=True)
