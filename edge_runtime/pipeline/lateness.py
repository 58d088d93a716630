"""Which waiting frames are not worth a lane any more: those whose result would come too late anyway.

An overloaded model serves fewer frames than come. Which ones it leaves out decides on latency: with the ones that have
waited longest gone, the lanes have as much to do as before, and what they do comes in time.
"""

from __future__ import annotations

from edge_runtime.pipeline.ledger import Entry

WEIGHT = 16
"""A run counts for a sixteenth: a change of variant shows within half a second of a busy lane."""
LATE_SHARE = 0.005
"""Of the results so many may be late: half of what a 99th percentile allows."""
STEP = 0.1
"""A late result raises the margin by this share of what is allowed; results in time take it back bit by bit."""
MOST_MARGIN = 0.5
MOST_TIMES = 3
HARDLY = 8
STARVED_NS = 1_000_000_000
"""A camera without a result for so long is served however late: a late result is better than none."""


class Lateness:
    """How long a frame takes from its claim to its result, and what that means for one that waits. Guarded by M.

    The margin above the mean is found by what comes of it: raised by a late result, lowered by one in time, so that in
    the long run `LATE_SHARE` of them are late. Nobody has to know how the times of runs are spread.
    """

    __slots__ = ("_limit_ns", "_margin_ns", "_mean_ns")

    def __init__(self) -> None:
        self._limit_ns: int | None = None
        self._mean_ns = 0
        self._margin_ns = 0

    def allow(self, limit_s: float | None) -> None:
        """Capture to result at most, s; None: as long as it takes."""
        limit_ns = None if limit_s is None else int(limit_s * 1e9)
        if limit_ns != self._limit_ns:
            self._limit_ns = limit_ns
            self._margin_ns = 0 if limit_ns is None else int(STEP * limit_ns)

    def took(self, duration_ns: int) -> None:
        """A batch came back, so long after its first frame was claimed."""
        if self._mean_ns == 0:
            self._mean_ns = duration_ns
        else:
            # one that was held up says nothing about the next ones
            self._mean_ns += (min(duration_ns, MOST_TIMES * self._mean_ns) - self._mean_ns) // WEIGHT

    def came(self, latency_ns: int) -> None:
        """A result came, so long after its capture."""
        limit_ns = self._limit_ns
        if limit_ns is None:
            return
        step_ns = int(STEP * limit_ns)
        if latency_ns > limit_ns:
            self._margin_ns = min(self._margin_ns + step_ns, int(MOST_MARGIN * limit_ns))
        else:
            self._margin_ns = max(0, self._margin_ns - int(LATE_SHARE * step_ns))

    def too_late(self, entry: Entry, now_ns: int) -> bool:
        """Whether the result of a frame that is claimed now would come after its time."""
        stream = entry.stream
        if self._limit_ns is None or stream.patient or now_ns - stream.t_result_ns > STARVED_NS:
            return False
        waited_ns = now_ns - entry.frame.t_capture_ns
        # one that has hardly waited is as good as any: where even it comes too late, leaving it out helps nobody
        return waited_ns > self._limit_ns // HARDLY and waited_ns + self._mean_ns + self._margin_ns > self._limit_ns
