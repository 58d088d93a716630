"""The pump: the one thread that publishes.

It owns a window of at most min(20, ReceiveMaximum) unacknowledged QoS 1 messages (P4), fed in this order: state
(presence first), what was refused and is due again, the lanes in turn. Results are QoS 0, beside the window.
Callers and paho's callbacks only enqueue; whatever they say is acted on here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edge_runtime.mqtt.connection import BrokerConnection
from edge_runtime.mqtt.outbox import Feed, Flight, Lane, Row, State
from edge_runtime.mqtt.session import SessionInfo
from edge_runtime.mqtt.settings import Presence, Timing
from edge_runtime.threads import set_os_thread_name

log = logging.getLogger(__name__)

WINDOW = 20
# Far below MQTT's 268,435,455 (P15): what is larger belongs into chunks or on HTTP.
MAX_PACKET_BYTES = 8 * 1024 * 1024
# QoS 0 packets that paho may hold: a frozen broker must not make its queue grow.
_RESULTS_IN_PAHO = 32
_TRIES = 3
_TURN_S = 0.25
# Fixed header, topic length, packet id, property length and an expiry: what a PUBLISH needs beside its contents.
_OVERHEAD_BYTES = 5 + 2 + 2 + 1 + 5


@dataclass(slots=True)
class PumpCounters:
    """Counts since the start. Written by the pump's thread, except `results_dropped` (under its lock)."""

    published: int = 0
    refused: int = 0
    oversize: int = 0
    expired: int = 0
    results_dropped: int = 0
    errors: int = 0


class Pump:
    """Publishes lanes, states and results through a connection, on the thread "mqtt-pump"."""

    def __init__(
        self,
        connection: BrokerConnection,
        lanes: Sequence[Lane],
        *,
        presence: Presence | None = None,
        filters: Callable[[], Sequence[str]] = tuple,
        timing: Timing | None = None,
        results_capacity: int = 256,
        window: int = WINDOW,
    ) -> None:
        self._connection = connection
        self._feeds = [Feed(lane) for lane in lanes]
        self._turn_of = 0
        self._presence = presence
        self._filters = filters
        self._timing = timing or Timing()
        self._window_wanted = window
        self._window = window
        self._lock = threading.Lock()
        self._results: deque[tuple[str, bytes]] = deque(maxlen=results_capacity)
        self._states: dict[str, State] = {}
        if presence is not None:
            self._states[presence.topic] = State(presence.online)
        self._inbox: deque[Callable[[], None]] = deque()
        self._subscribe: deque[str] = deque()
        self._awake = threading.Event()
        self._session: SessionInfo | None = None
        self._up = False  # as seen by callers: set before the pump has noticed
        self._in_flight: dict[int, Flight] = {}
        self._results_in_flight: set[int] = set()
        self._acked_in_session = False
        self._narrow = False
        self._t_flush_end_ns: int | None = None
        self._t_close_end_ns = 0
        self._offline_said = False
        self._flushed = False
        self.counters = PumpCounters()
        self.max_in_flight = 0
        self.tick_ns = time.monotonic_ns()
        self.thread = threading.Thread(target=self._run, name="mqtt-pump", daemon=True)
        for feed in self._feeds:
            feed.lane.on_put(self.wake)

    # ---- any thread: nothing here waits or does I/O

    def start(self) -> None:
        self.thread.start()

    def wake(self) -> None:
        self._awake.set()

    def tell(self, action: Callable[[], None]) -> None:
        """Runs `action` on the pump's thread."""
        self._inbox.append(action)
        self._awake.set()

    def subscribe(self, topic_filter: str) -> None:
        """Subscribes before anything that is published after this call. `filters` must name it already."""
        self._subscribe.append(topic_filter)
        self._awake.set()

    def publish_now(self, topic: str, payload: bytes) -> bool:
        """QoS 0, now or never. False, and counted, when not connected; when full the oldest is dropped."""
        with self._lock:
            if not self._up or self._t_flush_end_ns is not None:
                self.counters.results_dropped += 1
                return False
            if len(self._results) == self._results.maxlen:
                self.counters.results_dropped += 1
            self._results.append((topic, payload))
        self._awake.set()
        return True

    def set_retained(self, topic: str, payload: bytes) -> None:
        """Keeps the last value of a topic at the broker, and puts it there again after every connect."""

        def change() -> None:
            state = self._states.get(topic)
            if state is None:
                self._states[topic] = State(payload)
            elif state.payload != payload:
                state.payload = payload
                state.version += 1
                state.tries = 0

        self.tell(change)

    def up(self, session: SessionInfo) -> None:
        with self._lock:
            self._up = True
        self.tell(lambda: self._on_up(session))

    def down(self, generation: int, *, closed_by_broker: bool) -> None:
        with self._lock:
            self._up = False
            self.counters.results_dropped += len(self._results)
            self._results.clear()
        self.tell(lambda: self._on_down(generation, closed_by_broker=closed_by_broker))

    def acknowledged(self, generation: int, mid: int, code: int) -> None:
        self.tell(lambda: self._on_ack(generation, mid, code))

    def close(self, flush_s: float, deadline_s: float) -> bool:
        """Publishes what it can within `flush_s`, then offline, and ends the thread within `deadline_s`.

        True if everything had been acknowledged. Waits only while connected or connecting.
        """
        now_ns = time.monotonic_ns()
        with self._lock:
            self._t_close_end_ns = now_ns + int(deadline_s * 1e9)
            self._t_flush_end_ns = now_ns + int(min(flush_s, deadline_s) * 1e9)
        self._awake.set()
        if self.thread.ident is None:
            return False
        self.thread.join(max(0.0, deadline_s))
        return self._flushed and not self.thread.is_alive()

    # ---- "mqtt-pump"

    def _run(self) -> None:
        set_os_thread_name("mqtt-pump")
        while True:
            self._awake.wait(self._wait_s())
            self._awake.clear()
            self.tick_ns = time.monotonic_ns()
            try:
                if self._turn():
                    return
            except Exception:
                # A lane's disk may fail; the pump goes on with what it can.
                log.exception("mqtt: the pump failed")
                self.counters.errors += 1
                if self._t_flush_end_ns is not None and time.monotonic_ns() >= self._t_close_end_ns:
                    return
                time.sleep(0.05)

    def _wait_s(self) -> float:
        return 0.01 if self._t_flush_end_ns is not None else _TURN_S

    def _turn(self) -> bool:
        """One round; true when closing is complete."""
        try:
            while self._inbox:
                self._inbox.popleft()()
        finally:
            for feed in self._feeds:
                if feed.acked:
                    tokens, feed.acked = feed.acked, []
                    feed.lane.done(tokens)
        closing = self._t_flush_end_ns is not None
        if self._session is not None:
            self._check_acks(self._session)
        if self._session is not None:
            self._send_subscriptions(self._session)
            if not self._offline_said:
                self._send_states(self._session)
            if not closing or self.tick_ns < (self._t_flush_end_ns or 0):
                self._send_again(self._session)
                self._send_lanes(self._session)
            self._send_results(self._session)
        return closing and self._closed()

    def _closed(self) -> bool:
        now_ns = time.monotonic_ns()
        if now_ns >= self._t_close_end_ns:
            return True
        flushing = now_ns < (self._t_flush_end_ns or 0)
        if self._session is None:
            # A connection that is just being made may still take everything; otherwise there is nobody to wait for.
            status = self._connection.status()
            return not (flushing and (status.connecting or status.connected))
        empty = not self._in_flight and not any(feed.lane.waiting() for feed in self._feeds) and self._states_settled()
        if self._offline_said:
            self._flushed = empty
            return not self._in_flight
        if flushing and not empty:
            return False
        if self._presence is None:
            self._flushed = empty
            return True
        if len(self._in_flight) < self._window:
            self._offline_said = True
            state = self._states[self._presence.topic]
            goodbye = self._presence.goodbye
            state.payload = self._presence.offline if goodbye is None else goodbye()
            state.version += 1
            self._send_state(self._session, self._presence.topic, state)
        return False

    def _states_settled(self) -> bool:
        return all(state.acked == state.version or state.tries >= _TRIES for state in self._states.values())

    # ---- what the connection says

    def _on_up(self, session: SessionInfo) -> None:
        self._reset()
        self._session = session
        self._window = max(1, min(self._window_wanted, session.receive_maximum))
        for state in self._states.values():
            state.sent = state.acked = state.tries = 0
        self._subscribe.clear()
        self._connection.subscribe(session.generation, self._filters())

    def _on_down(self, generation: int, *, closed_by_broker: bool) -> None:
        if self._session is None or self._session.generation != generation:
            return
        if self._in_flight and not self._acked_in_session and closed_by_broker:
            self._suspect()
        self._reset()

    def _reset(self) -> None:
        with self._lock:
            self.counters.results_dropped += len(self._results_in_flight)
        self._results_in_flight.clear()
        self._in_flight.clear()
        self._session = None
        self._acked_in_session = False
        for feed in self._feeds:
            feed.cursor = -1
            feed.again.clear()

    def _suspect(self) -> None:
        """P13: a message that makes the broker hang up would do so for ever. After a session that ended without
        a row acknowledged, the next sends one at a time; who then breaks it `_TRIES` times is set aside."""
        if self._narrow and len(self._in_flight) == 1:
            flight = next(iter(self._in_flight.values()))
            if flight.feed is not None and flight.row is not None:
                self._refused(flight.feed, flight.row, "the broker closes the connection when it gets this message")
        self._narrow = True

    def _on_ack(self, generation: int, mid: int, code: int) -> None:
        if self._session is None or self._session.generation != generation:
            return
        if mid in self._results_in_flight:
            self._results_in_flight.discard(mid)
            return
        flight = self._in_flight.pop(mid, None)
        if flight is None:
            return
        if flight.feed is None or flight.row is None:
            self._on_state_ack(flight, code)
            return
        self._acked_in_session = True
        self._narrow = False
        if code < 0x80:
            self.counters.published += 1
            flight.feed.tries.pop(flight.row.token, None)
            flight.feed.acked.append(flight.row.token)
        elif not self._refused(flight.feed, flight.row, f"the broker refused it with 0x{code:02x}"):
            due_ns = self.tick_ns + int(self._timing.refused_retry_s * 1e9)
            flight.feed.again.append((due_ns, flight.row))

    def _on_state_ack(self, flight: Flight, code: int) -> None:
        state = self._states.get(flight.topic)
        if state is None:
            return
        if code < 0x80:
            state.acked = max(state.acked, flight.version)
        elif flight.version == state.version:
            state.tries += 1
            state.sent = flight.version if state.tries >= _TRIES else 0
            self.counters.refused += state.tries == _TRIES
            log.warning("mqtt: the broker refused %s with 0x%02x", flight.topic, code)

    def _refused(self, feed: Feed, row: Row, reason: str) -> bool:
        """Counts a refusal; true if it was the last one this row gets."""
        tries = feed.tries.get(row.token, 0) + 1
        feed.tries[row.token] = tries
        if tries < _TRIES:
            return False
        self._set_aside(feed, row, reason)
        return True

    def _set_aside(self, feed: Feed, row: Row, reason: str) -> None:
        feed.tries.pop(row.token, None)
        self.counters.refused += 1
        log.warning("mqtt: %s: a message to %s is given up: %s", feed.lane.name, row.message.topic, reason)
        feed.lane.refuse(row.token, reason)

    def _check_acks(self, session: SessionInfo) -> None:
        """A broker that answers pings but acknowledges nothing is as good as gone."""
        oldest = next(iter(self._in_flight.values()), None)
        if oldest is not None and self.tick_ns - oldest.t_sent_ns > self._timing.ack_s * 1e9:
            self._connection.drop(
                session.generation, f"frozen: the broker acknowledged nothing for {self._timing.ack_s:g} s"
            )

    # ---- sending

    def _room(self) -> int:
        return (1 if self._narrow else self._window) - len(self._in_flight)

    def _send_subscriptions(self, session: SessionInfo) -> None:
        while self._subscribe:
            self._connection.subscribe(session.generation, (self._subscribe.popleft(),))

    def _send_states(self, session: SessionInfo) -> None:
        for topic, state in self._states.items():
            if state.sent != state.version and state.tries < _TRIES and self._room() > 0:
                self._send_state(session, topic, state)

    def _send_state(self, session: SessionInfo, topic: str, state: State) -> None:
        state.sent = state.version
        if self._too_large(session, topic, state.payload):
            self.counters.oversize += 1
            state.tries = _TRIES
            log.warning("mqtt: the state %s is larger than the broker takes", topic)
            return
        mid = self._connection.publish(session.generation, topic, state.payload, qos=1, retain=True)
        if mid is None:
            state.sent = 0
        else:
            self._flies(mid, Flight(self.tick_ns, topic=topic, version=state.version))

    def _send_again(self, session: SessionInfo) -> None:
        for feed in self._feeds:
            while feed.again and feed.again[0][0] <= self.tick_ns and self._room() > 0:
                _, row = feed.again.pop(0)
                self._send_row(session, feed, row)

    def _send_lanes(self, session: SessionInfo) -> None:
        """Lanes in turn, so that a long backlog of one does not hold up the others."""
        idle = 0
        while idle < len(self._feeds) and (room := self._room()) > 0:
            feed = self._feeds[self._turn_of]
            self._turn_of = (self._turn_of + 1) % len(self._feeds)
            rows = feed.lane.read(feed.cursor, max(1, room // len(self._feeds)))
            idle = idle + 1 if not rows else 0
            self._send_subscriptions(session)  # of a caller that subscribed and then put one of these rows
            for row in rows:
                if not self._send_row(session, feed, row):
                    return
                feed.cursor = row.token

    def _send_row(self, session: SessionInfo, feed: Feed, row: Row) -> bool:
        """False if the session did not take it; true also for a row that was disposed of."""
        message = row.message
        expiry_s = None
        if message.t_expires_ns is not None:
            left_ns = message.t_expires_ns - self.tick_ns
            if left_ns <= 0:
                self.counters.expired += 1
                feed.lane.done((row.token,))
                return True
            expiry_s = max(1, left_ns // 1_000_000_000)
        if self._too_large(session, message.topic, message.payload):
            self.counters.oversize += 1
            self._set_aside(feed, row, "it is larger than the broker takes")
            return True
        try:
            mid = self._connection.publish(
                session.generation,
                message.topic,
                message.payload,
                qos=1,
                retain=message.retain,
                expiry_s=expiry_s,
            )
        except ValueError as error:
            self._set_aside(feed, row, str(error))
            return True
        if mid is None:
            return False
        self._flies(mid, Flight(self.tick_ns, feed=feed, row=row))
        return True

    def _flies(self, mid: int, flight: Flight) -> None:
        self._in_flight[mid] = flight
        self.max_in_flight = max(self.max_in_flight, len(self._in_flight))

    def _send_results(self, session: SessionInfo) -> None:
        while len(self._results_in_flight) < _RESULTS_IN_PAHO:
            with self._lock:
                if not self._results:
                    return
                topic, payload = self._results.popleft()
            mid = None
            if not self._too_large(session, topic, payload):
                try:
                    mid = self._connection.publish(session.generation, topic, payload, qos=0, retain=False)
                except ValueError as error:
                    log.warning("mqtt: a result to %r was dropped: %s", topic, error)
            if mid is None:
                with self._lock:
                    self.counters.results_dropped += 1
            else:
                self._results_in_flight.add(mid)

    @staticmethod
    def _too_large(session: SessionInfo, topic: str, payload: bytes) -> bool:
        limit = min(session.max_packet_bytes or MAX_PACKET_BYTES, MAX_PACKET_BYTES)
        return len(topic.encode()) + len(payload) + _OVERHEAD_BYTES > limit
