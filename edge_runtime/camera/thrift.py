"""Which packets of a stream need not be decoded, since the cap would not keep their pictures. Pure.

Two rules. A packet from which nothing else is decoded is passed over when its own picture would come too early for the
cap. And where the next key frame comes in time for the cap's next slot, everything before it is passed over. When
it comes is learned: at the longest of the last key intervals.

Nothing is lost by a wrong guess: packets that were passed over are held until the next key frame, and if it does not
come in time they are decoded after all (`REPLAY`), their pictures thrown away, so that the next one can be had.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import Literal

from edge_runtime.camera.pacing import NEVER_NS

Kind = Literal["key", "reference", "disposable"]
"""Of a packet: a key frame, one that others are decoded from, one that none is."""

_INTERVALS = 4
# After so many packets of a kind older ones count half.
_COSTS = 256
# A gap between key frames above this is not an interval but a jump in the stream's times.
_LONGEST_INTERVAL_NS = 60_000_000_000


class Verdict(Enum):
    DECODE = "decode"
    SKIP = "skip"
    """Not to be decoded, and nothing needs it."""
    HOLD = "hold"
    """Not to be decoded now; all packets up to the next key frame are skipped or held as well."""
    REPLAY = "replay"
    """To be decoded, after those that were held."""


class Thrift:
    """Asked about every packet of one opened source, in decoding order."""

    def __init__(self) -> None:
        self._key_ns: int | None = None
        self._intervals_ns: deque[int] = deque(maxlen=_INTERVALS)
        self._holding = False
        self._alone = False
        self._due_ns = 0  # presentation time of the next slot, while holding
        self._step_ns = 0

    @property
    def holding(self) -> bool:
        """Whether the pictures up to the next key frame are passed over."""
        return self._holding

    @property
    def alone(self) -> bool:
        """Whether the packet asked about last is a key frame to be decoded, and none after it before the next one."""
        return self._alone

    def interrupt(self) -> None:
        """Something is damaged: what was held is of no use, and a key frame may have been missed."""
        self._holding = False
        self._key_ns = None

    def judge(self, pts_ns: int | None, early_ns: int, step_ns: int, *, key: bool, disposable: bool) -> Verdict:
        """What to do with a packet; `early_ns` and `step_ns` as Intake.early gives them for its picture."""
        self._alone = key and step_ns > 0 and self._is_enough(pts_ns, step_ns)
        if key:
            self._learn(pts_ns)
            # What was held before it is of no use any more.
            self._holding = False
        if step_ns and self._passes_over(pts_ns, early_ns, step_ns):
            if disposable and not key:
                return Verdict.SKIP
            self._holding = True
            return Verdict.HOLD
        if disposable and early_ns > 0:
            return Verdict.SKIP
        if self._holding:
            self._holding = False
            return Verdict.REPLAY
        return Verdict.DECODE

    def _is_enough(self, pts_ns: int | None, step_ns: int) -> bool:
        """Whether the key frame after this one, which ends what is passed over, comes in time for the slot after it."""
        if not self._holding or pts_ns is None or not self._intervals_ns or step_ns != self._step_ns:
            return False
        return pts_ns + max(self._intervals_ns) <= self._due_ns + step_ns + step_ns // 4

    def _learn(self, pts_ns: int | None) -> None:
        before_ns, self._key_ns = self._key_ns, pts_ns
        if before_ns is None or pts_ns is None:
            return
        if 0 < pts_ns - before_ns <= _LONGEST_INTERVAL_NS:
            self._intervals_ns.append(pts_ns - before_ns)
        else:
            self._intervals_ns.clear()

    def _passes_over(self, pts_ns: int | None, early_ns: int, step_ns: int) -> bool:
        """Whether everything up to the next key frame may be passed over, this packet too."""
        if early_ns >= NEVER_NS:
            return True
        if pts_ns is None or self._key_ns is None or not self._intervals_ns:
            return False
        longest_ns = max(self._intervals_ns)
        if abs(pts_ns - self._key_ns) > 2 * longest_ns:
            return False
        if early_ns > 0:
            # The slot itself is half a step after the first moment at which the cap takes a picture for it, and any
            # picture less than a step after it fills it. A quarter is left for jitter.
            self._due_ns, self._step_ns = pts_ns + early_ns + step_ns // 2, step_ns
            expected_ns = self._key_ns + longest_ns
            return expected_ns <= self._due_ns + step_ns // 4 and (pts_ns < expected_ns or self._holding)
        # The slot is there, and so far no key frame: it has until shortly before the cap takes pictures for the next.
        return self._holding and step_ns == self._step_ns and pts_ns < self._due_ns + step_ns * 3 // 8


class DecodeCosts:
    """What packets of each kind cost to decode, on average."""

    def __init__(self) -> None:
        self._sums: dict[Kind, tuple[int, int]] = {}

    def add(self, kind: Kind, cpu_ns: int) -> None:
        total_ns, count = self._sums.get(kind, (0, 0))
        if count >= _COSTS:
            total_ns, count = total_ns // 2, count // 2
        self._sums[kind] = (total_ns + cpu_ns, count + 1)

    def mean_ns(self, kind: Kind) -> int:
        """0 where none was ever decoded."""
        total_ns, count = self._sums.get(kind, (0, 0))
        return total_ns // count if count else 0
