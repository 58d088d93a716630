"""What becomes of each encoded picture (access unit) on its way through a decoder that says little. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, replace
from typing import Literal

from edge_runtime.camera.ledger import Ledger

_WATCHED = 64
"""Units whose picture is waited for; a codec reorders 16 at most."""
_KEY_PATIENCE = 300
"""A stream whose key frames are never marked (intra refresh) is taken as it comes after this many units."""
_INTERVALS = 3
_SURE = 4
_REORDERED_NS = 1_000_000_000
"""A step back in presentation time by more than this is a jump, and not the order of decoding."""

Fate = Literal["wanted", "pre_key", "skipped", "damaged"]


@dataclass(frozen=True, slots=True)
class Unit:
    """An access unit: its rank in decoding order and that of the last key frame, the camera's size (px).

    `t_ns`: when it came. `fate`: what is to become of its picture.
    """

    rank: int
    key_rank: int
    fate: Fate
    size: tuple[int, int] | None
    t_ns: int


class Units:
    """Which pictures of a decoder are intact.

    Units arrive in decoding order, before their pictures; pictures come by presentation time. A unit whose picture
    never comes was damaged (decoders leave those out without a word), and so is every picture from it to the next
    key frame, though they look like pictures. The same is true of units behind a gap.

    While `key_only`, a gate in front of the decoder lets key frames pass alone. It opens at any time, and what follows
    in mid-GOP refers to pictures that were never decoded: the pictures up to the next key frame are left out.
    Not thread-safe.
    """

    def __init__(self, ledger: Ledger, *, intra_only: bool) -> None:
        self._ledger = ledger
        self._intra_only = intra_only
        self._watched: OrderedDict[int, Unit] = OrderedDict()
        self._rank = 0
        self._started = intra_only
        self._waited = 0
        self._let_go: deque[int] = deque(maxlen=_WATCHED)
        self._damaged: deque[int] = deque(maxlen=_WATCHED)
        self._left: deque[int] = deque(maxlen=_SURE)
        self._key_rank = 0
        self._key_only = False
        self._skipping = False
        self._last_key_ns: int | None = None
        self._last_pts_ns: int | None = None
        self._reordered = False
        self._intervals: list[int] = []
        self._skipped = 0
        self._counts = (0, 0)

    @property
    def key_interval_ns(self) -> int | None:
        """The longest of the last few times from key frame to key frame.

        None where too few were seen, and where the decoder reorders pictures: it would hold the last key frames back.
        """
        return max(self._intervals) if len(self._intervals) >= 2 and not self._reordered else None

    def gate(self, key_only: bool) -> None:
        """The gate in front of the decoder was set."""
        self._key_only = key_only
        if not key_only:
            return
        self._skipping = True
        # The last unit may have been on its way to the gate.
        if self._watched:
            pts_ns, unit = next(reversed(self._watched.items()))
            if unit.fate == "wanted" and unit.rank != unit.key_rank:
                self._watched[pts_ns] = replace(unit, fate="skipped")

    def take_counts(self) -> tuple[int, int]:
        """(units that went to the decoder, units that did not) since the last call."""
        sent, kept = self._counts
        self._counts = (0, 0)
        return sent, kept

    def take_skipped(self) -> int:
        """Units kept from the decoder since the last call."""
        skipped, self._skipped = self._skipped, 0
        return skipped

    def arrive(
        self,
        pts_ns: int | None,
        *,
        key: bool,
        gap: bool = False,
        whole: bool = True,
        size: tuple[int, int] | None = None,
        t_ns: int = 0,
    ) -> None:
        """A unit came, at `t_ns`. `gap`: something was lost right before it; `whole` is False where it is cut off."""
        key = key or self._intra_only
        self._rank += 1
        if key:
            self._key_rank = self._rank
            self._skipping = self._key_only
            self._key_seen(pts_ns)
        fate: Fate = "wanted"
        if not key and not self._started:
            self._waited += 1
            self._started = self._waited >= _KEY_PATIENCE
            fate = "wanted" if self._started else "pre_key"
        elif not key and self._skipping:
            fate = "skipped"
        elif not whole or (gap and not key and self._rank > 1):
            fate = "damaged"
            self._damage(self._rank)
        if key:
            self._started = True
        if fate == "skipped":
            self._skipped += 1
            self._counts = (self._counts[0], self._counts[1] + 1)
            self._ledger.count(skipped_codec=1)
        else:
            self._counts = (self._counts[0] + 1, self._counts[1])
        if fate == "pre_key":
            self._ledger.count(pre_key=1)
        if fate == "damaged":
            self._ledger.count(corrupt=1)
        if pts_ns is None:
            if not self._intra_only:
                return
            pts_ns = -self._rank  # the parts of a multipart stream have times by the piece of data that they begin in
        elif self._last_pts_ns is not None and 0 < self._last_pts_ns - pts_ns < _REORDERED_NS:
            self._reordered = True
        if pts_ns >= 0:
            self._last_pts_ns = pts_ns
        if fate == "skipped":
            self._let_go.append(pts_ns)
            return
        self._watched[pts_ns] = Unit(self._rank, self._key_rank, fate, size, t_ns)
        if len(self._watched) > _WATCHED:
            _, unit = self._watched.popitem(last=False)
            if unit.fate == "wanted":
                # A picture that others do not refer to, or one behind a jump of presentation times.
                self._ledger.count(corrupt=1)

    def picture(self, pts_ns: int | None, *, flagged: bool = False, newest: bool = False) -> tuple[bool, Unit | None]:
        """A picture came: (whether it is intact and wanted, its unit). Counts it where it is neither.

        `flagged`: the decoder itself says that it is corrupt. `newest`: it came while nothing else was to be decoded.
        Decoders make times up where units have none; where nothing is reordered the order tells which is which.
        """
        if pts_ns in self._let_go:
            return False, None
        unit = self._watched.pop(pts_ns, None) if pts_ns is not None else None
        if unit is None and self._intra_only and self._watched:
            _, unit = self._watched.popitem(last=False)
            if newest:
                self._leave_out()
        if unit is not None and pts_ns is not None:
            self._miss(unit.rank, pts_ns)
        if unit is not None and unit.fate != "wanted":
            return False, unit
        if flagged:
            self._ledger.count(corrupt=1)
            self._damage(self._rank if unit is None else unit.rank)
            return False, unit
        if unit is not None and self._spoiled(unit):
            self._ledger.count(corrupt=1)
            return False, unit
        return True, unit

    def complain(self, pts_ns: int | None) -> None:
        """The decoder had to make up a part of the unit of this presentation time (None: of one that is not known)."""
        unit = self._watched.get(pts_ns) if pts_ns is not None else None
        if unit is None:
            self._damage(self._rank)
        elif unit.fate == "wanted" and pts_ns is not None:
            self._watched[pts_ns] = replace(unit, fate="damaged")
            self._ledger.count(corrupt=1)
            self._damage(unit.rank)

    def end(self) -> None:
        """The stream has ended: what is still watched for will not come."""
        lost = sum(unit.fate == "wanted" for unit in self._watched.values())
        self._watched.clear()
        if lost:
            self._ledger.count(corrupt=lost)

    def _miss(self, rank: int, pts_ns: int) -> None:
        """Units that were decoded and are shown before this one, and never came."""
        late = [pts for pts, unit in self._watched.items() if unit.rank < rank and (pts < pts_ns or self._intra_only)]
        for pts in late:
            unit = self._watched.pop(pts)
            if unit.fate == "wanted":
                self._ledger.count(corrupt=1)
                self._damage(unit.rank)

    def _leave_out(self) -> None:
        """Units are still waited for though all is decoded: where that stays so, nothing came of the oldest ones.

        A single look may fall between a unit's arrival and its picture's.
        """
        self._left.append(len(self._watched))
        if len(self._left) < _SURE or not (lost := min(self._left)):
            return
        gone = [self._watched.popitem(last=False)[1] for _ in range(lost)]
        self._left.clear()
        if count := sum(unit.fate == "wanted" for unit in gone):
            self._ledger.count(corrupt=count)

    def _damage(self, rank: int) -> None:
        if not self._intra_only and (not self._damaged or self._damaged[-1] != rank):
            self._damaged.append(rank)

    def _spoiled(self, unit: Unit) -> bool:
        """Whether something was damaged between the key frame before it and this one."""
        return any(max(unit.key_rank, unit.rank - _KEY_PATIENCE) <= rank < unit.rank for rank in self._damaged)

    def _key_seen(self, pts_ns: int | None) -> None:
        if pts_ns is None or self._intra_only:
            return
        if self._last_key_ns is not None and pts_ns > self._last_key_ns:
            self._intervals = [*self._intervals, pts_ns - self._last_key_ns][-_INTERVALS:]
        self._last_key_ns = pts_ns
