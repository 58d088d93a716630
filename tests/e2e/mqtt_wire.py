"""What a device has sent to a broker, and what the broker has acknowledged, read from the bytes of one connection."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

CONNECT, PUBLISH, PUBACK = 1, 3, 4


@dataclass(frozen=True, slots=True)
class Packet:
    """`kind` and `flags` are the halves of the first byte; `body` is what follows the length."""

    kind: int
    flags: int
    body: memoryview


@dataclass(slots=True)
class Published:
    """A PUBLISH with QoS 1, and the reason code it was acknowledged with (3.1.1 has none: 0), or None."""

    topic: str
    payload: bytes
    code: int | None = None

    @property
    def taken(self) -> bool:
        """Whether the broker has taken it: from there on it is not the device's any more."""
        return self.code is not None and self.code < 0x80


def packets(data: bytes) -> Iterator[Packet]:
    """Whole packets; the last one of a connection that broke may be cut off, and is left out."""
    view, at = memoryview(data), 0
    while at < len(view):
        found = _number(view, at + 1)
        if found is None:
            return
        length, start = found
        if start + length > len(view):
            return
        yield Packet(view[at] >> 4, view[at] & 15, view[start : start + length])
        at = start + length


def published(up: bytes, down: bytes) -> list[Published]:
    """The QoS 1 messages of one connection, in the order they were sent. `up`: what the device sent; `down`: what
    the broker did."""
    found: list[Published] = []
    unanswered: dict[int, deque[Published]] = {}
    version = 0
    for packet in packets(up):
        if packet.kind == CONNECT:
            version = packet.body[2 + int.from_bytes(packet.body[:2], "big")]
        elif packet.kind == PUBLISH and (packet.flags >> 1) & 3 == 1:
            mid, message = _publish(packet.body, version)
            found.append(message)
            unanswered.setdefault(mid, deque()).append(message)
    for packet in packets(down):
        if packet.kind == PUBACK:
            mid = int.from_bytes(packet.body[:2], "big")
            # an acknowledged id may be used again, in the same connection
            unanswered[mid].popleft().code = packet.body[2] if len(packet.body) > 2 else 0
    return found


def _publish(body: memoryview, version: int) -> tuple[int, Published]:
    end = 2 + int.from_bytes(body[:2], "big")
    topic, mid, at = bytes(body[2:end]).decode(), int.from_bytes(body[end : end + 2], "big"), end + 2
    if version == 5:
        properties = _number(body, at)
        assert properties is not None
        at = properties[1] + properties[0]
    return mid, Published(topic, bytes(body[at:]))


def _number(view: memoryview, at: int) -> tuple[int, int] | None:
    """MQTT's variable byte integer, and where it ends; None where it is cut off."""
    value = shift = 0
    while at < len(view):
        byte = view[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
    return None
