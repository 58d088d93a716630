"""Retained states (presence, reported): a topic's last value, asserted again after every connect (O10)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from edge_runtime.mqtt.holding import accepted, in_words, may_be_mended, retry_s
from edge_runtime.mqtt.settings import Presence, Timing

log = logging.getLogger(__name__)

_TRIES = 3


@dataclass(slots=True)
class State:
    """A retained message. `sent` and `acked` are versions of this session, `refusals` of this version in it."""

    payload: bytes
    version: int = 1
    sent: int = 0
    acked: int = 0
    refusals: int = 0
    due_ns: int = 0
    given_up: bool = False


class States:
    """All states of a link, presence first. Belongs to the pump's thread."""

    def __init__(self, presence: Presence | None, timing: Timing) -> None:
        self._timing = timing
        self._states: dict[str, State] = {}
        if presence is not None:
            self._states[presence.topic] = State(presence.online)

    def set(self, topic: str, payload: bytes) -> State:
        """The topic's value from now on; sent if it is another one."""
        state = self._states.get(topic)
        if state is None:
            state = self._states[topic] = State(payload)
        elif state.payload != payload:
            state.payload = payload
            state.version += 1
            state.refusals = state.due_ns = 0
            state.given_up = False
        return state

    def renew(self) -> None:
        """A new session: the broker may know nothing any more, and may take what it refused."""
        for state in self._states.values():
            state.sent = state.acked = state.refusals = state.due_ns = 0
            state.given_up = False

    def due(self, now_ns: int) -> Iterator[tuple[str, State]]:
        """What is to be sent now."""
        for topic, state in self._states.items():
            if state.sent != state.version and not state.given_up and state.due_ns <= now_ns:
                yield topic, state

    def next_due_ns(self, now_ns: int) -> int | None:
        """When a refused one is to be sent again."""
        waits = [
            state.due_ns
            for state in self._states.values()
            if state.sent != state.version and not state.given_up and state.due_ns > now_ns
        ]
        return min(waits, default=None)

    def settled(self) -> bool:
        """Whether the broker has, or has refused, every value."""
        return all(state.acked == state.version or state.refusals or state.given_up for state in self._states.values())

    def acknowledged(self, topic: str, version: int, code: int, now_ns: int) -> bool:
        """A PUBACK; true if the value was refused so often now that it counts as refused.

        A refusal that may be mended is tried again as long as the session lasts: there is one message per topic.
        """
        state = self._states[topic]
        if accepted(code):
            state.acked = max(state.acked, version)
            return False
        if version != state.version:
            return False
        state.refusals += 1
        final = not may_be_mended(code)
        state.given_up = final and state.refusals >= _TRIES
        state.sent = 0
        state.due_ns = now_ns + int(retry_s(self._timing, state.refusals) * 1e9)
        if state.refusals <= _TRIES:
            log.warning("mqtt: the broker refused %s: %s", topic, in_words(code))
        return state.refusals == _TRIES
