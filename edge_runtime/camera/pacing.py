"""Time on a frame's way in: media time made sane, due times of a paced file, the rate cap. All pure."""

from __future__ import annotations

_NS_PER_S = 1_000_000_000

JUMP_NS = 5 * _NS_PER_S
LAG_NS = 1 * _NS_PER_S
AHEAD_NS = _NS_PER_S // 2
"""How far ahead of its time a paced file is read while its pictures are passed over."""
DUPLICATES_IN_A_ROW = 5
DEFAULT_INTERVAL_NS = 40_000_000
MAX_RATE_HZ = 1000.0
_OFTEN = 4  # times that go backward: so many, and one in so many


def nominal_interval_ns(rate_hz: float | None) -> int | None:
    """The interval of a declared frame rate; None for rates that cannot be (0, negative, a clock's tick)."""
    if rate_hz is None or not 0.0 < rate_hz <= MAX_RATE_HZ:
        return None
    return round(_NS_PER_S / rate_hz)


class Ordered:
    """Which times are those of presentation? Containers such as AVI know when packets are decoded, and FFmpeg gives
    that out as both: where pictures are reordered, their presentation times then go back and forth all the time, and
    the decoder's own (of the packet that pushed a picture out) do not."""

    def __init__(self) -> None:
        self._last: list[int | None] = [None, None]
        self._backward = [0, 0]
        self._chosen: int | None = None  # the last presentation time that was gone by
        self._seen = 0

    def choose(self, pts_ns: int | None, dts_ns: int | None) -> int | None:
        """The time to go by of the next picture in order of presentation; None where both would mislead."""
        self._seen += 1
        for index, time_ns in enumerate((pts_ns, dts_ns)):
            last_ns = self._last[index]
            self._backward[index] += time_ns is not None and last_ns is not None and time_ns < last_ns
            self._last[index] = time_ns
        often = self._backward[0] > _OFTEN and self._backward[0] * _OFTEN > self._seen
        if not often or dts_ns is None or self._backward[1] * 4 >= self._backward[0]:
            self._chosen = pts_ns
            return pts_ns
        # Where one follows the other they may meet, which would look like a picture that came twice.
        if self._chosen is not None and dts_ns <= self._chosen:
            return None
        self._chosen = None
        return dts_ns


class Timeline:
    """Turns presentation times as they come into media time that only goes forward.

    A step backward or by more than `JUMP_NS` forward is an outlier: that picture gets the nominal interval
    and later ones are measured from it, so that a jump that stays and one that returns both cost one step.
    """

    def __init__(self, interval_ns: int | None = None) -> None:
        self._nominal_ns = interval_ns
        self._last_step_ns = DEFAULT_INTERVAL_NS
        self._last_pts_ns: int | None = None
        self._media_ns = 0
        self._started = False
        self._duplicates = 0
        self._skipped = 0
        self.restamped = 0

    def splice(self, interval_ns: int | None, skipped: int = 0) -> None:
        """A new pass or connection begins: its first picture follows the last one at a nominal interval.

        `skipped`: how many pictures at the end of the last pass were not decoded.
        """
        if interval_ns is not None:
            self._nominal_ns = interval_ns
        self._last_pts_ns = None
        self._duplicates = 0
        self._skipped = skipped

    def reach_ns(self, skipped: int) -> int:
        """The longest step forward that is no outlier, `skipped` pictures after the last one."""
        return JUMP_NS + skipped * (self._nominal_ns or self._last_step_ns)

    def stamp(self, pts_ns: int | None, skipped: int = 0) -> int | None:
        """Media time (ns, from 0, strictly increasing) of the next picture; None where it is a duplicate.

        `skipped`: how many pictures between it and the one before were not decoded; each may take a nominal interval.
        A duplicate repeats the presentation time before it. More than `DUPLICATES_IN_A_ROW` of them mean a
        source whose times stand still: its pictures are kept and get nominal intervals.
        """
        if not self._started:
            self._started = True
            self._last_pts_ns = pts_ns
            return self._media_ns
        last_ns = self._last_pts_ns
        skipped, self._skipped = skipped + self._skipped, 0
        nominal_ns = self._nominal_ns or self._last_step_ns
        step_ns = nominal_ns * (skipped + 1)
        if pts_ns is not None and last_ns is not None:
            delta_ns = pts_ns - last_ns
            if delta_ns == 0:
                self._duplicates += 1
                if self._duplicates <= DUPLICATES_IN_A_ROW:
                    return None
            else:
                self._duplicates = 0
                if 0 < delta_ns <= self.reach_ns(skipped):
                    step_ns = delta_ns
                    self._last_step_ns = delta_ns // (skipped + 1)
                else:
                    self.restamped += 1
        if pts_ns is not None:
            self._last_pts_ns = pts_ns
        self._media_ns += step_ns
        return self._media_ns


class Pacer:
    """When each picture of a file is due, as if it were live.

    Whoever is more than `LAG_NS` behind does not hurry after: the schedule moves to now (`reanchored`).
    """

    def __init__(self) -> None:
        self._anchor_ns: int | None = None
        self.reanchored = 0

    def restart(self) -> None:
        """The next picture is due at once, and the schedule goes on from there."""
        self._anchor_ns = None

    def due_ns(self, media_ns: int, now_ns: int) -> int:
        """Monotonic time at which the picture at `media_ns` is due; the first one is due now."""
        if self._anchor_ns is None:
            self._anchor_ns = now_ns - media_ns
        due_ns = self._anchor_ns + media_ns
        if now_ns - due_ns > LAG_NS:
            self._anchor_ns += now_ns - due_ns
            due_ns = now_ns
            self.reanchored += 1
        return due_ns


class RateCap:
    """Keeps at most `fps` pictures a second (None: all, 0: none), on a steady grid of capture times.

    A picture may be early by half a grid step: a source of just that rate, with jitter, loses nothing, and
    since the grid advances by whole steps the mean rate is still exact (15 of 25 a second, not 12.5).
    One thread asks; `change` may come from any.
    """

    def __init__(self, fps: float | None) -> None:
        self._step_ns = _step_ns(fps)
        self._slot_ns: int | None = None  # of the last picture kept

    def change(self, fps: float | None) -> None:
        """Another rate, from the last slot on: a new grid would keep a picture at once, at every change."""
        self._step_ns = _step_ns(fps)

    def wants(self, t_capture_ns: int) -> bool:
        """True where the picture captured at `t_capture_ns` (increasing) is one to keep."""
        step_ns = self._step_ns
        if step_ns == NEVER_NS:
            return False
        if step_ns is None or self._slot_ns is None:
            self._slot_ns = t_capture_ns
            return True
        due_ns = self._slot_ns + step_ns
        if t_capture_ns < due_ns - step_ns // 2:
            return False
        # More than a step late: slots have gone by without a picture; they are not made up for.
        self._slot_ns = t_capture_ns if t_capture_ns - due_ns > step_ns else due_ns
        return True

    @property
    def step_ns(self) -> int:
        """Time from slot to slot; 0 where every picture is kept, NEVER_NS where none is."""
        return self._step_ns or 0

    def early_ns(self, t_capture_ns: int) -> int:
        """By how much a picture captured then is too early: 0 where `wants` would keep it. Changes nothing."""
        step_ns = self._step_ns
        if step_ns == NEVER_NS:
            return NEVER_NS
        if step_ns is None or self._slot_ns is None:
            return 0
        return max(0, self._slot_ns + step_ns - step_ns // 2 - t_capture_ns)

    def wait_ns(self, now_ns: int) -> int:
        """How long after now the next slot is due, for who can wait for it: 0 where it is."""
        step_ns = self._step_ns
        if step_ns == NEVER_NS:
            return NEVER_NS
        if step_ns is None or self._slot_ns is None:
            return 0
        return max(0, self._slot_ns + step_ns - now_ns)


NEVER_NS = 3600 * _NS_PER_S
"""The step of a rate of 0, and the longest step there is."""


def _step_ns(fps: float | None) -> int | None:
    if fps is None:
        return None
    return NEVER_NS if fps <= 0 else min(NEVER_NS - 1, round(_NS_PER_S / fps))
