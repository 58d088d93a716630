"""A new engine's first frames, watched while the old one still stands by."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from edge_runtime.engine.slot import Resident
from edge_runtime.errors import EngineError, RefusedError

FRAMES = 20
WITHIN_S = 3.0
LOOK_S = 0.05
SICK_FRAMES = 3
"""So many first results without one usable value are no coincidence."""
STUCK_RUNS = 20
STUCK_S = 2.0
"""A run is stuck that takes longer than this, and longer than STUCK_RUNS runs took in the proof or than its frames
may take: the supervisor must not be the first to notice."""


@dataclass(frozen=True, slots=True)
class Watched:
    """Frames that a new engine has brought to an end; `note` where that says little."""

    frames: int
    note: str | None


def watch(
    resident: Resident,
    cancel: threading.Event,
    *,
    run_s: float,
    timeout_s: float,
    frames: int = FRAMES,
    within_s: float = WITHIN_S,
) -> Watched:
    """Look at `resident`, current since a moment ago, until it has brought `frames` to an end or the time is up.

    `run_s`: how long a run took in the proof; `timeout_s`: how long a frame may take. Raises RefusedError
    `rolled_back` where it fails frames, says nothing that can be used, or does not come back, and EngineError
    `stopping` once `cancel` is set: the caller exchanges the engines again.
    """
    stuck_ns = int(max(STUCK_S, min(STUCK_RUNS * run_s, timeout_s)) * 1e9)
    end = time.monotonic() + within_s
    while True:
        ran, sick, failed = resident.tally.total()
        if failed:
            raise _bad(resident, f"{failed} of its first {ran + failed} frames failed")
        if sick == ran >= SICK_FRAMES:
            raise _bad(resident, f"its first {ran} results hold no usable value (NaN, or no valid box)")
        if resident.tally.longest_ns(time.monotonic_ns()) > stuck_ns:
            raise _bad(resident, f"a run has not come back for {stuck_ns / 1e9:.1f} s")
        if ran >= frames:
            return Watched(ran, None)
        if cancel.is_set():
            # not seen at work: it must not be what the next start begins with
            raise EngineError("the daemon is stopping", code="stopping", where=resident.info.digest, retryable=True)
        # a run that has begun and not ended is waited for: it is what a model that hangs looks like
        if time.monotonic() >= end and (ran or not resident.leases):
            note = None if ran else f"no frame came within {within_s:g} s: it runs, and was not seen at work"
            return Watched(ran, note)
        cancel.wait(LOOK_S)


def _bad(resident: Resident, reason: str) -> RefusedError:
    return RefusedError(
        f"the new engine was taken back: {reason}",
        code="rolled_back",
        where=resident.info.digest,
        remedy="the engine before runs on; the log has the errors of the new one",
    )
