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

from edge_runtime.mqtt.connection import BrokerConnection
from edge_runtime.mqtt.events import OnEvent, guarded
from edge_runtime.mqtt.lanes import Lanes
from edge_runtime.mqtt.outbox import Flight, Lane
from edge_runtime.mqtt.results import Results
from edge_runtime.mqtt.session import SessionInfo
from edge_runtime.mqtt.settings import Presence, Timing
from edge_runtime.mqtt.states import State, States
from edge_runtime.mqtt.window import Window
from edge_runtime.threads import set_os_thread_name

log = logging.getLogger(__name__)

# QoS 0 packets that paho may hold: a frozen broker must not make its queue grow.
_RESULTS_IN_PAHO = 32


class Pump:
    """Publishes lanes, states and results through a connection, on the thread "mqtt-pump".

    `memory` is the lane of the callers, `lanes` those with a backlog, of which `backlog_rate` rows a second are sent
    at most (None: as fast as the broker takes them). `on_event` is called on the thread and must only enqueue.
    """

    def __init__(
        self,
        connection: BrokerConnection,
        memory: Lane,
        lanes: Sequence[Lane] = (),
        *,
        presence: Presence | None = None,
        filters: Callable[[], Sequence[str]] = tuple,
        timing: Timing | None = None,
        results_capacity: int = 256,
        backlog_rate: float | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        self._connection = connection
        self._presence = presence
        self._filters = filters
        self._timing = timing or Timing()
        self.window = Window(connection)
        self.results = Results(results_capacity)
        self.lanes = Lanes(
            self.window,
            memory,
            lanes,
            timing=self._timing,
            backlog_rate=backlog_rate,
            before_rows=self._send_subscriptions,  # of a caller that subscribed and then put one of these rows
            on_event=guarded(on_event),
        )
        self._states = States(presence, self._timing)
        self._inbox: deque[Callable[[], None]] = deque()
        self._subscribe: deque[str] = deque()
        self._awake = threading.Event()
        self._t_flush_end_ns: int | None = None
        self._t_close_end_ns = 0
        self._offline_said = False
        self._flushed = False
        self.states_refused = 0
        self.states_oversize = 0
        self.errors = 0
        self.tick_ns = time.monotonic_ns()
        self.thread = threading.Thread(target=self._run, name="mqtt-pump", daemon=True)
        for lane in (memory, *lanes):
            lane.on_put(self.wake)

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
        taken = self.results.put(topic, payload)
        if taken:
            self._awake.set()
        return taken

    def set_retained(self, topic: str, payload: bytes) -> None:
        """Keeps the last value of a topic at the broker, and puts it there again after every connect."""

        def change() -> None:
            self._states.set(topic, payload)

        self.tell(change)

    def up(self, session: SessionInfo) -> None:
        self.results.connected()
        self.tell(lambda: self._on_up(session))

    def down(self, generation: int, *, closed_by_broker: bool) -> bool:
        """True if the broker may have closed the connection because of a row (P13)."""
        self.results.lost()
        suspect = closed_by_broker and self.window.may_be_broken_by_a_row()
        self.tell(lambda: self._on_down(generation, closed_by_broker=closed_by_broker))
        return suspect

    def acknowledged(self, generation: int, mid: int, code: int) -> None:
        self.tell(lambda: self._on_ack(generation, mid, code))

    def close(self, flush_s: float, deadline_s: float) -> bool:
        """Publishes what it can within `flush_s`, then offline, and ends the thread within `deadline_s`.

        True if everything had been acknowledged. Waits only while connected or connecting.
        """
        now_ns = time.monotonic_ns()
        self.results.end()
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
            self.window.begin_turn(self.tick_ns)
            try:
                if self._turn():
                    return
            except Exception:
                # A lane's disk may fail; the pump goes on with what it can.
                log.exception("mqtt: the pump failed")
                self.errors += 1
                if self._t_flush_end_ns is not None and time.monotonic_ns() >= self._t_close_end_ns:
                    return
                time.sleep(0.05)

    def _wait_s(self) -> float:
        if self._t_flush_end_ns is not None:
            return 0.01
        return max(0.0, (self.window.t_next_ns - time.monotonic_ns()) / 1e9)

    def _turn(self) -> bool:
        """One round; true when closing is complete."""
        try:
            while self._inbox:
                self._inbox.popleft()()
        finally:
            self.lanes.tell_done()
        closing = self._t_flush_end_ns is not None
        self.window.drop_if_stuck(self._timing.ack_s)
        if self.window.session is not None:
            self._send_subscriptions()
            if not self._offline_said:
                self._send_states()
            if not closing or self.tick_ns < (self._t_flush_end_ns or 0):
                self.lanes.send()
            self._send_results()
        return closing and self._closed()

    def _closed(self) -> bool:
        now_ns = time.monotonic_ns()
        if now_ns >= self._t_close_end_ns:
            return True
        flushing = now_ns < (self._t_flush_end_ns or 0)
        if self.window.session is None:
            # A connection that is just being made may still take everything; otherwise there is nobody to wait for.
            status = self._connection.status()
            return not (flushing and (status.connecting or status.connected))
        empty = not self.window.flights and not self.lanes.waiting() and self._states.settled()
        if self._offline_said:
            self._flushed = empty
            return not self.window.flights
        if flushing and not empty:
            return False
        if self._presence is None:
            self._flushed = empty
            return True
        if len(self.window.flights) < self.window.size:
            self._offline_said = True
            goodbye = self._presence.goodbye
            payload = self._presence.offline if goodbye is None else goodbye()
            self._send_state(self._presence.topic, self._states.set(self._presence.topic, payload))
        return False

    # ---- what the connection says

    def _on_up(self, session: SessionInfo) -> None:
        self._reset()
        self.window.open(session)
        self._states.renew()
        self._subscribe.clear()
        self.window.subscribe(list(self._filters()))

    def _on_down(self, generation: int, *, closed_by_broker: bool) -> None:
        if self.window.session is None or self.window.session.generation != generation:
            return
        if closed_by_broker and self.window.may_be_broken_by_a_row():
            self._suspect()
        self._reset()

    def _reset(self) -> None:
        self.results.reset()
        self.window.close()
        self.lanes.reset()

    def _suspect(self) -> None:
        """P13: a message that makes the broker hang up would do so for ever. After a session that ended without
        a row acknowledged, the next sends one at a time; who then breaks it three times is set aside."""
        flights = self.window.flights
        if self.window.narrow and len(flights) == 1 and (feed := flights[0].feed) and (row := flights[0].row):
            self.lanes.broke(feed, row, "the broker closes the connection when it gets this message")
        self.window.narrow = True

    def _on_ack(self, generation: int, mid: int, code: int) -> None:
        if self.window.session is None or self.window.session.generation != generation or self.results.written(mid):
            return
        flight = self.window.acknowledged(mid)
        if flight is None:
            return
        if flight.feed is None or flight.row is None:
            self.states_refused += self._states.acknowledged(flight.topic, flight.version, code, self.tick_ns)
            return
        self.window.row_acked = True
        self.window.narrow = False
        self.lanes.acknowledged(flight.feed, flight.row, code)

    # ---- sending

    def _send_subscriptions(self) -> None:
        while self._subscribe:
            self.window.subscribe([self._subscribe.popleft()])

    def _send_states(self) -> None:
        for topic, state in self._states.due(self.tick_ns):
            if self.window.room() > 0:
                self._send_state(topic, state)
        if (due_ns := self._states.next_due_ns(self.tick_ns)) is not None:
            self.window.wake_at(due_ns)

    def _send_state(self, topic: str, state: State) -> None:
        if not self.window.fits(topic, state.payload):
            self.states_oversize += 1
            state.given_up = True
            log.warning("mqtt: the state %s is larger than the broker takes", topic)
            return
        flight = Flight(self.tick_ns, topic=topic, version=state.version)
        if self.window.send(flight, topic, state.payload, retain=True):
            state.sent = state.version

    def _send_results(self) -> None:
        while self.results.in_paho < _RESULTS_IN_PAHO and (result := self.results.take()) is not None:
            topic, payload = result
            mid = None
            try:
                mid = self.window.send_unacknowledged(topic, payload)
            except ValueError as error:
                log.warning("mqtt: a result to %r was dropped: %s", topic, error)
            self.results.handed(mid)
