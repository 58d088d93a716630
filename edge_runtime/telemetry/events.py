"""Events: made where something happens, kept by the spool until the broker has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime

from edge_runtime.clock import Clock, utc_text
from edge_runtime.records.events import Event, EventKind, Scalar, Severity
from edge_runtime.records.identity import Identity
from edge_runtime.telemetry import spool_gaps as reasons
from edge_runtime.telemetry.spool import EVENT, Gap, Make, PreviousSession, Spool
from edge_runtime.telemetry.topics import Topics

_WHY = {
    reasons.FULL: "there was no more room for what waits",
    reasons.AGE: "nobody could be sent it for too long",
    reasons.DISK_RESERVE: "the disk has too little free space",
    reasons.REFUSED: "it can never be delivered",
    reasons.CORRUPT: "a damaged file took it along",
    reasons.MEMORY: "the disk could not be used, and it was in memory only",
    reasons.SKIPPED: "what was written last may be forgotten, as after a power cut",
    reasons.PENDING: "more came at once than can be written",
}


class EventWriter:
    """Writes events into the lane `event`. Any thread; never blocks."""

    def __init__(self, identity: Identity, clock: Clock, clock_synced: Callable[[], bool], spool: Spool) -> None:
        self._identity = identity
        self._topics = Topics(identity.device)
        self._clock = clock
        self._clock_synced = clock_synced
        self._spool = spool

    def emit(self, kind: EventKind, message: str, *, severity: Severity = "info", **data: Scalar) -> None:
        """Note that something happened now. `data` says the same as `message`, for machines.

        Raises ValueError for a kind that cannot be in a topic, or data that are no scalars.
        """
        self._spool.append(EVENT, *self._event(kind, message, severity, data))

    def gap_message(self, gap: Gap) -> tuple[str, Make]:
        """Topic and contents of the event that says a gap, for the spool, which puts it into the lane itself."""
        lost = "some, maybe," if gap.count is None else str(gap.count)
        message = (
            f"{lost} of the messages {gap.from_seq} to {gap.to_seq} of the lane {gap.lane} will not arrive:"
            f" {_WHY.get(gap.reason, gap.reason)}"
        )
        data: dict[str, Scalar] = {
            "lane": gap.lane,
            "from_seq": gap.from_seq,
            "to_seq": gap.to_seq,
            "count": gap.count,
            "reason": gap.reason,
        }
        if gap.detail is not None:
            message += f" ({gap.detail})"
            data["detail"] = gap.detail
        return self._event("spool-gap", message, "warning", data)

    def _event(self, kind: EventKind, message: str, severity: Severity, data: Mapping[str, Scalar]) -> tuple[str, Make]:
        event = Event(
            device=self._identity.device,
            boot=self._identity.boot,
            session=self._identity.session,
            seq=0,  # the spool knows, when it writes the row
            clock_synced=self._clock_synced(),
            kind=kind,
            severity=severity,
            message=message,
            t_utc=utc_text(self._clock.utc()),
            uptime_s=round(max(0, self._clock.monotonic_ns() - self._identity.t_start_ns) / 1e9, 3),
            data=dict(data),
        )
        topic = f"{self._topics.root}/event/{kind}"
        return topic, lambda seq: event.model_copy(update={"seq": seq}).to_json()

    def emit_start(self, previous: PreviousSession | None) -> bool:
        """Emit `unclean-start` if the start before did not end cleanly; returns whether that was so.

        `downtime_s` counts from that session's last commit, so it is too long by at most the time between two
        messages; null where a clock that was set meanwhile makes it negative, or was not synchronised then or is not.
        """
        if previous is None or previous.clean:
            return False
        down_s = self._downtime_s(previous)
        self.emit(
            "unclean-start",
            f"the last session ended without a goodbye, after {previous.last_utc}",
            severity="warning",
            previous_session=previous.session,
            previous_boot=previous.boot,
            same_boot=previous.boot == self._identity.boot,
            last_utc=previous.last_utc,
            downtime_s=down_s,
            **{f"last_seq_{lane}": seq for lane, seq in previous.last_seq.items()},
        )
        return True

    def _downtime_s(self, previous: PreviousSession) -> float | None:
        if not (previous.synced and self._clock_synced()):
            return None
        try:
            last = datetime.fromisoformat(previous.last_utc.replace("Z", "+00:00"))
        except ValueError:
            return None
        down_s = (self._clock.utc() - last).total_seconds()
        return round(down_s, 3) if down_s >= 0 else None
