"""Two devices with one client id: each connect evicts the other, for ever, unless somebody steps back (P17, O7)."""

from __future__ import annotations

from edge_runtime.mqtt.events import LinkEvent
from edge_runtime.mqtt.settings import Timing

_SHORT_SESSIONS = 3


class TakeoverWatch:
    """Counts sessions in a row that the broker ended soon, and says when that looks like a takeover.

    MQTT 5 says it in words (0x8E), 3.1.1 only closes the connection. An episode lasts until a session was stable or
    ended otherwise, or the broker was away: then it was that.
    """

    def __init__(self, client_id: str, timing: Timing) -> None:
        self._client_id = client_id
        self._timing = timing
        self._short = 0
        self._said_so = False
        self._t_told_ns: int | None = None
        self.episodes = 0

    @property
    def reason(self) -> str:
        """For the status."""
        said = "taken over by another client" if self._said_so else "dropped soon after connecting"
        return f"{said}: is another device using client id {self._client_id!r}?"

    def session_ended(self, lasted_s: float, *, by_broker: bool, said_so: bool) -> bool:
        """Whether to step back before the next try."""
        if said_so:
            self._short = max(self._short + 1, _SHORT_SESSIONS)
        elif by_broker and lasted_s < self._short_s():
            self._short += 1
        else:
            self.over()
        self._said_so = said_so
        return self._short >= _SHORT_SESSIONS

    def over(self) -> None:
        """No takeover, or none any more."""
        self._short = 0
        self._t_told_ns = None

    def event(self, now_ns: int) -> LinkEvent | None:
        """To be told now, after `session_ended` was true: at the start of an episode, and hourly while it lasts."""
        first = self._t_told_ns is None
        if self._t_told_ns is not None and now_ns - self._t_told_ns < self._timing.event_repeat_s * 1e9:
            return None
        self.episodes += first
        self._t_told_ns = now_ns
        cap_s = self._timing.retry_cap_s
        message = (
            f"{self.reason} {self._short} session(s) in a row ended so; each id may be used once (device.id): "
            f"the next try is in {cap_s / 4:g} to {cap_s:g} s"
        )
        return LinkEvent(
            "taken-over",
            message,
            {
                "client_id": self._client_id,
                "short_sessions": self._short,
                "said_so": self._said_so,
                "retry_s": cap_s,
            },
        )

    def _short_s(self) -> float:
        # who stepped back is evicted when the other one comes back from its own waiting
        return self._timing.short_session_s if self._t_told_ns is None else self._timing.stable_s
