"""Refusals: what a broker says in a PUBACK, and how long a lane waits when that may be mended.

A wrong ACL, a quota or a full disk at the broker is put right within minutes or hours, and what was refused
meanwhile is not lost: the lane is held, and one row at a time asks whether it is taken again.
"""

from __future__ import annotations

from dataclasses import dataclass

from edge_runtime.mqtt.events import LinkEvent
from edge_runtime.mqtt.settings import Timing

_WORDS = {
    0x80: "unspecified error",
    0x83: "implementation specific error",
    0x87: "not authorised",
    0x90: "topic name invalid",
    0x91: "packet identifier in use",
    0x95: "packet too large",
    0x97: "quota exceeded",
    0x99: "payload format invalid",
}
# These are about the message itself: asking again brings the same answer.
_FINAL = frozenset((0x90, 0x95, 0x99))


def accepted(code: int) -> bool:
    """Whether the broker has the message; also where nobody subscribes to it (0x10)."""
    return code < 0x80


def may_be_mended(code: int) -> bool:
    """Whether the broker may take the same message later."""
    return code not in _FINAL


def in_words(code: int) -> str:
    """`not authorised (0x87)`."""
    return f"{_WORDS.get(code, 'refused')} (0x{code:02x})"


def retry_s(timing: Timing, refusals: int) -> float:
    """How long to wait after so many refusals (1 or more): doubling, up to the cap."""
    return min(timing.refused_cap_s, timing.refused_retry_s * 2.0 ** min(refusals - 1, 30))


@dataclass(slots=True)
class Hold:
    """A lane that waits. `probe` is the token of the row that asks now, None between two questions."""

    lane: str
    code: int
    since_ns: int
    due_ns: int
    delay_s: float
    refusals: int = 1
    given_up: int = 0
    probe: int | None = None
    told: bool = False

    def refused(self, code: int, now_ns: int, timing: Timing, *, given_up: bool) -> LinkEvent | None:
        """The probe was refused (or, with `given_up`, for the last time): the next one waits longer.

        The event comes with the second refusal: one that is over within a second is nobody's business.
        """
        self.probe = None
        self.code = code
        self.refusals += 1
        if given_up:
            self.given_up += 1
        else:
            self.delay_s = min(timing.refused_cap_s, self.delay_s * 2)
        self.due_ns = now_ns + int(self.delay_s * 1e9)
        if self.told:
            return None
        self.told = True
        message = (
            f"the broker refuses what the lane {self.lane} sends: {in_words(code)}; the lane waits, and one message "
            f"asks again every {timing.refused_retry_s:g} to {timing.refused_cap_s:g} s: look at the broker's rules "
            "for this device"
        )
        return LinkEvent("held", message, {"lane": self.lane, "code": code, "reason": in_words(code)})

    def opened(self, now_ns: int) -> LinkEvent | None:
        """The probe was accepted; None if nobody was told that the lane was held."""
        if not self.told:
            return None
        held_s = round((now_ns - self.since_ns) / 1e9, 1)
        lost = f"; {self.given_up} given up meanwhile" if self.given_up else ""
        message = f"the broker takes what the lane {self.lane} sends again, after {held_s:g} s{lost}"
        return LinkEvent("opened", message, {"lane": self.lane, "held_s": held_s, "given_up": self.given_up})


def hold(lane: str, code: int, now_ns: int, timing: Timing) -> Hold:
    """For a lane of which a row was refused just now."""
    delay_s = retry_s(timing, 1)
    return Hold(lane, code, now_ns, now_ns + int(delay_s * 1e9), delay_s)
