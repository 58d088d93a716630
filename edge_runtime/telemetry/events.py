"""Events: made where something happens, kept by the spool until the broker has them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from edge_runtime.clock import Clock, utc_text
from edge_runtime.records.events import Event, EventKind, Scalar, Severity
from edge_runtime.records.identity import Identity
from edge_runtime.telemetry.spool import EVENT, PreviousSession, Spool
from edge_runtime.telemetry.topics import Topics


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
            data=data,
        )
        topic = f"{self._topics.root}/event/{kind}"
        self._spool.append(EVENT, topic, lambda seq: event.model_copy(update={"seq": seq}).to_json())

    def emit_start(self, previous: PreviousSession | None) -> bool:
        """Emit `unclean-start` if the start before did not end cleanly; returns whether that was so.

        `downtime_s` counts from that session's last commit, so it is too long by at most the time between two
        messages; null where a clock that was set meanwhile makes it negative, or is not synchronised.
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
        if not self._clock_synced():
            return None
        try:
            last = datetime.fromisoformat(previous.last_utc.replace("Z", "+00:00"))
        except ValueError:
            return None
        down_s = (self._clock.utc() - last).total_seconds()
        return round(down_s, 3) if down_s >= 0 else None
