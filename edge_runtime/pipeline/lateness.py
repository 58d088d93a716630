"""Which waiting frames are not worth a lane any more: those whose result would come too late anyway.

An overloaded model serves fewer frames than come. Which ones it leaves out decides on latency: with the ones that have
waited longest gone, the lanes have as much to do as before, and what they do comes in time.
"""

from __future__ import annotations

from edge_runtime.pipeline.ledger import Entry

WEIGHT = 16
"""A run counts for a sixteenth: a change of variant shows within half a second of a busy lane."""
DEVIATIONS = 3
"""Mean absolute deviations above the mean: about the slowest run in fifty, as they are spread here."""
MARGIN = 0.9
"""Of the latency that is allowed: handing the result on takes some, and so does a thread that is woken late."""
STARVED_NS = 1_000_000_000
"""A camera without a result for so long is served however late: a late result is better than none."""


class Lateness:
    """How long a frame takes from its claim to its result, and what that means for one that waits. Guarded by M."""

    __slots__ = ("_deviation_ns", "_limit_ns", "_mean_ns")

    def __init__(self) -> None:
        self._limit_ns: int | None = None
        self._mean_ns = 0
        self._deviation_ns = 0

    def allow(self, limit_s: float | None) -> None:
        """Capture to result at most, s; None: as long as it takes."""
        self._limit_ns = None if limit_s is None else int(MARGIN * limit_s * 1e9)

    def took(self, duration_ns: int) -> None:
        """A batch is done, so long after its first frame was claimed."""
        if self._mean_ns == 0:
            self._mean_ns = duration_ns
            return
        self._mean_ns += (duration_ns - self._mean_ns) // WEIGHT
        self._deviation_ns += (abs(duration_ns - self._mean_ns) - self._deviation_ns) // WEIGHT

    def too_late(self, entry: Entry, now_ns: int) -> bool:
        """Whether the result of a frame that is claimed now would come after its time."""
        stream = entry.stream
        if self._limit_ns is None or stream.patient or now_ns - stream.t_result_ns > STARVED_NS:
            return False
        expected_ns = now_ns - entry.frame.t_capture_ns + self._mean_ns + DEVIATIONS * self._deviation_ns
        return expected_ns > self._limit_ns
