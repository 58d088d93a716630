"""Numbers that will never arrive: which, how many, and why."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

FULL: Final = "full"
"""The lane, or the file, had no more room."""
AGE: Final = "age"
"""Nobody could be sent it for longer than the lane keeps it."""
DISK_RESERVE: Final = "disk-reserve"
"""The disk had less free space than is to be left to others."""
REFUSED: Final = "refused"
"""It can never be delivered; kept in the file, the last 100 of them."""
CORRUPT: Final = "corrupt"
"""A damaged file took it along."""
MEMORY: Final = "memory"
"""It was in memory only, since the disk could not be used, and there was no more room, or the process ended."""
SKIPPED: Final = "skipped"
"""It may have been used before a power cut, or in a file that is gone, and is not used again."""
PENDING: Final = "pending"
"""More was put than can wait for a commit."""

SAID_IN: Final = "event"
"""The lane whose messages say gaps."""

PENDING_GAPS = 64
"""Gaps that are remembered one by one; of more, the nearest of one lane and reason become one."""


@dataclass(frozen=True, slots=True)
class Gap:
    """`count` of the numbers from `from_seq` to `to_seq` of a lane are lost, for the `reason` (a word of this
    module) and in `detail` (in words, or None). `count` None: it is not known which of them were ever used."""

    lane: str
    from_seq: int
    to_seq: int
    count: int | None
    reason: str
    detail: str | None = None

    def joined(self, other: Gap) -> Gap:
        """Both in one, of the same lane and reason."""
        count = None if self.count is None or other.count is None else self.count + other.count
        return Gap(
            self.lane,
            min(self.from_seq, other.from_seq),
            max(self.to_seq, other.to_seq),
            count,
            self.reason,
            self.detail if self.detail == other.detail else None,
        )


@dataclass(slots=True)
class GapBook:
    """All gaps that no consumer knows of yet. `said`: by the number of the event that says it and is on its way;
    when that is lost itself, what it said is pending again. `changed`: since it was last written to the file."""

    pending: list[Gap] = field(default_factory=list)
    said: dict[int, Gap] = field(default_factory=dict)
    changed: bool = False

    def copy(self) -> GapBook:
        return GapBook(list(self.pending), dict(self.said), self.changed)

    def lost(self, lane: str, seqs: Sequence[int], reason: str, detail: str | None = None) -> None:
        """Note that these numbers are lost."""
        if seqs:
            self.add(Gap(lane, min(seqs), max(seqs), len(seqs), reason, detail))

    def add(self, gap: Gap) -> None:
        """Note a gap; what adjoins becomes one."""
        self.changed = True
        for index, other in enumerate(self.pending):
            same = (other.lane, other.reason, other.detail) == (gap.lane, gap.reason, gap.detail)
            if same and other.from_seq <= gap.to_seq + 1 and gap.from_seq <= other.to_seq + 1:
                del self.pending[index]
                self.add(other.joined(gap))
                return
        self.pending.append(gap)
        if len(self.pending) > PENDING_GAPS:
            self._join_nearest()

    def _join_nearest(self) -> None:
        ordered = sorted(self.pending, key=lambda gap: (gap.lane, gap.reason, gap.from_seq))
        pairs = [
            (right.from_seq - left.to_seq, index)
            for index, (left, right) in enumerate(itertools.pairwise(ordered))
            if (left.lane, left.reason) == (right.lane, right.reason)
        ]
        if pairs:
            _, index = min(pairs)
            ordered[index : index + 2] = [ordered[index].joined(ordered[index + 1])]
            self.pending = ordered

    def say(self, gap: Gap, seq: int) -> None:
        """The event `seq` says this gap, which was pending."""
        self.pending.remove(gap)
        self.said[seq] = gap
        self.changed = True

    def told(self, seqs: Iterable[int]) -> None:
        """These events were delivered."""
        for seq in seqs:
            if self.said.pop(seq, None) is not None:
                self.changed = True

    def unsay(self, seqs: Iterable[int]) -> bool:
        """These events will not be delivered; true if one of them said something."""
        unsaid = [gap for seq in seqs if (gap := self.said.pop(seq, None)) is not None]
        for gap in unsaid:
            self.add(gap)
        return bool(unsaid)

    def keep_said(self, waiting: Callable[[int], bool]) -> None:
        """After damage: only events that still wait say anything."""
        self.unsay([seq for seq in self.said if not waiting(seq)])
