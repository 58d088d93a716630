"""What is under way to the broker: a window of our own, since paho forgets its limit at a reconnect (P4)."""

from __future__ import annotations

import time

from edge_runtime.mqtt.connection import BrokerConnection
from edge_runtime.mqtt.outbox import Flight
from edge_runtime.mqtt.session import SessionInfo

WINDOW = 20
# Far below MQTT's 268,435,455 (P15): what is larger belongs into chunks or on HTTP.
MAX_PACKET_BYTES = 8 * 1024 * 1024
_TURN_S = 0.25
# Fixed header, topic length, packet id, property length and an expiry: what a PUBLISH needs beside its contents.
_OVERHEAD_BYTES = 5 + 2 + 2 + 1 + 5


class Window:
    """The session, and the at most min(20, ReceiveMaximum) QoS 1 packets that it has not acknowledged.

    Belongs to the pump's thread, as does its clock: `now_ns` (monotonic) stands still during a turn.
    """

    def __init__(self, connection: BrokerConnection) -> None:
        self._connection = connection
        self.size = WINDOW
        """How many packets this session may have under way."""
        self._in_flight: dict[int, Flight] = {}
        self.session: SessionInfo | None = None
        self.narrow = False
        """One at a time."""
        self.row_acked = False
        """Whether a row was acknowledged in this session."""
        self.largest = 0
        """The most that ever were under way."""
        self.now_ns = time.monotonic_ns()
        self.t_next_ns = self.now_ns
        """When the next turn is due if nobody asks for one."""

    def begin_turn(self, now_ns: int) -> None:
        self.now_ns = now_ns
        self.t_next_ns = now_ns + int(_TURN_S * 1e9)

    def wake_at(self, t_ns: int) -> None:
        """Something is to be done then."""
        self.t_next_ns = min(self.t_next_ns, t_ns)

    def open(self, session: SessionInfo) -> None:
        self.session = session
        self.size = max(1, min(WINDOW, session.receive_maximum))

    def close(self) -> None:
        self.session = None
        self.row_acked = False
        self._in_flight.clear()

    def room(self) -> int:
        """How many more QoS 1 packets may be sent; 0 without a session."""
        if self.session is None:
            return 0
        return (1 if self.narrow else self.size) - len(self._in_flight)

    @property
    def flights(self) -> list[Flight]:
        """Oldest first."""
        return list(self._in_flight.values())

    def may_be_broken_by_a_row(self) -> bool:
        """Whether rows are under way in a session that has not seen one acknowledged. A guess on other threads."""
        return not self.row_acked and any(flight.row is not None for flight in self.flights)

    def fits(self, topic: str, payload: bytes) -> bool:
        """Whether it is no larger than what the broker takes (P13)."""
        granted = None if self.session is None else self.session.max_packet_bytes
        limit = min(granted or MAX_PACKET_BYTES, MAX_PACKET_BYTES)
        return len(topic.encode()) + len(payload) + _OVERHEAD_BYTES <= limit

    def send(
        self, flight: Flight, topic: str, payload: bytes, *, retain: bool = False, expiry_s: int | None = None
    ) -> bool:
        """With QoS 1; false if the session did not take it. Raises ValueError for a topic that MQTT forbids."""
        if self.session is None:
            return False
        mid = self._connection.publish(self.session.generation, topic, payload, qos=1, retain=retain, expiry_s=expiry_s)
        if mid is None:
            return False
        self._in_flight[mid] = flight
        self.largest = max(self.largest, len(self._in_flight))
        return True

    def send_unacknowledged(self, topic: str, payload: bytes) -> int | None:
        """With QoS 0, beside the window; the packet id, or None if it was not taken. Raises ValueError as `send`."""
        if self.session is None or not self.fits(topic, payload):
            return None
        return self._connection.publish(self.session.generation, topic, payload, qos=0, retain=False)

    def subscribe(self, topic_filters: list[str]) -> None:
        if self.session is not None:
            self._connection.subscribe(self.session.generation, topic_filters)

    def acknowledged(self, mid: int) -> Flight | None:
        """What has come back; None if nothing is under way with this packet id."""
        return self._in_flight.pop(mid, None)

    def drop_if_stuck(self, ack_s: float) -> None:
        """A broker that answers pings but acknowledges nothing is as good as gone."""
        oldest = next(iter(self._in_flight.values()), None)
        if self.session is not None and oldest is not None and self.now_ns - oldest.t_sent_ns > ack_s * 1e9:
            self._connection.drop(self.session.generation, f"frozen: the broker acknowledged nothing for {ack_s:g} s")
