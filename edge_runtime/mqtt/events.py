"""What the link has to tell beside its status: things that happened to it, for the device's events."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

log = logging.getLogger(__name__)

What = Literal["taken-over", "suspended", "held", "opened"]


@dataclass(frozen=True, slots=True)
class LinkEvent:
    """`message` is for people, `data` for machines.

    - `taken-over`: another client uses our client id. {client_id, short_sessions, said_so, retry_s}
    - `suspended`: the device slept, and the session was given up. {suspended_s}
    - `held`: the broker refuses what a lane sends, so the lane waits. {lane, code, reason}
    - `opened`: it takes the lane's messages again. {lane, held_s, given_up}
    """

    what: What
    message: str
    data: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)


OnEvent = Callable[[LinkEvent], None]


def guarded(on_event: OnEvent | None) -> OnEvent:
    """`on_event` whose exceptions end in the log: the link's threads must outlive them (P7)."""

    def tell(event: LinkEvent) -> None:
        try:
            if on_event is not None:
                on_event(event)
        except Exception:
            log.exception("mqtt: whoever is told of %s failed", event.what)

    return tell
