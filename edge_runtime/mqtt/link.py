"""What the rest of the program sees of MQTT. Nothing here waits for the broker but `close`."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edge_runtime.errors import MqttError
from edge_runtime.mqtt.connection import BrokerConnection, asleep_s
from edge_runtime.mqtt.events import OnEvent
from edge_runtime.mqtt.inbox import Handler, Inbox
from edge_runtime.mqtt.outbox import Lane, MemoryLane, Message
from edge_runtime.mqtt.pump import Pump
from edge_runtime.mqtt.session import Incoming, ProtocolVersion, SessionInfo
from edge_runtime.mqtt.settings import Backoff, BrokerSettings, Presence, Timing

log = logging.getLogger(__name__)

QUEUE_CAPACITY = 10_000


@dataclass(frozen=True, slots=True)
class LinkStatus:
    """`since_ns` (monotonic) is when `connected` last changed; `reason` says in words why it is not.

    `queued` counts messages not yet acknowledged, `dropped` those that a full queue lost, `refused` those that the
    broker will not take (too large ones included), `results_dropped` results that never reached the socket.
    `held` names the lanes that wait because the broker refuses what they send; `suspends` counts sessions given up
    because the device slept, `takeovers` the times another client seemed to use our client id.
    """

    connected: bool
    since_ns: int
    reason: str
    protocol: ProtocolVersion | None
    queued: int
    dropped: int
    expired: int
    published: int
    refused: int
    oversize: int
    results_dropped: int
    reconnects: int
    handler_errors: int
    internal_errors: int
    subscriptions_refused: tuple[str, ...]
    held: tuple[str, ...] = ()
    suspends: int = 0
    takeovers: int = 0


class MqttLink:
    """The broker connection with its queue, results, states and subscriptions.

    `publish` goes to a lane in memory of `capacity` messages. Further `lanes` (a spool on disk) are fed by their
    owners; their methods run on the pump's thread. Of these lanes together at most `backlog_rate` rows a second are
    sent (more than 0; None: no cap). `on_event` is called on the link's threads and must only enqueue. `asleep_s`
    tells for how many seconds the device was suspended so far.

    Raises ValueError for a `backlog_rate` or a `capacity` that lets nothing through.
    """

    def __init__(
        self,
        settings: BrokerSettings,
        *,
        presence: Presence | None = None,
        lanes: Sequence[Lane] = (),
        capacity: int = QUEUE_CAPACITY,
        results_capacity: int = 256,
        timing: Timing | None = None,
        backoff: Backoff | None = None,
        backlog_rate: float | None = None,
        on_event: OnEvent | None = None,
        asleep_s: Callable[[], float] = asleep_s,
    ) -> None:
        self._memory = MemoryLane("memory", capacity)
        self._lanes = (self._memory, *lanes)
        self._connection = BrokerConnection(
            settings, self, presence=presence, timing=timing, backoff=backoff, on_event=on_event, asleep_s=asleep_s
        )
        self._inbox = Inbox(self._connection.acknowledge)
        self._pump = Pump(
            self._connection,
            self._memory,
            lanes,
            presence=presence,
            filters=self._inbox.filters,
            timing=timing,
            results_capacity=results_capacity,
            backlog_rate=backlog_rate,
            on_event=on_event,
        )
        self._where = settings.where
        self._subscriptions_refused: set[str] = set()
        self._started = False
        self._closed = False

    def start(self) -> None:
        """Starts connecting, in the background; may be called once.

        Raises MqttError if the link was started or closed before.
        """
        if self._started or self._closed:
            raise MqttError("the link was started before", code="mqtt_state", where=self._where)
        self._started = True
        self._inbox.start()
        self._pump.start()
        self._connection.start()

    def publish(self, topic: str, payload: bytes, *, retain: bool = False, expires_s: float | None = None) -> None:
        """Queues a QoS 1 message, connected or not. When the queue is full the oldest is dropped and counted."""
        t_expires_ns = None if expires_s is None else time.monotonic_ns() + int(expires_s * 1e9)
        self._memory.put(Message(topic, payload, retain, t_expires_ns))

    def publish_now(self, topic: str, payload: bytes) -> bool:
        """Publishes with QoS 0, if connected; False, and counted, if not."""
        return self._pump.publish_now(topic, payload)

    def set_retained(self, topic: str, payload: bytes) -> None:
        """Keeps this as the topic's retained value, and asserts it again after every connect (O10)."""
        self._pump.set_retained(topic, payload)

    def subscribe(self, topic_filter: str, handler: Handler) -> None:
        """Calls `handler` on "mqtt-handler" for every message, subscribing again after every connect.

        What is published after this call is published after the subscription. A message counts as accepted when
        the handler returns; see Inbox. Raises MqttError for a malformed filter.
        """
        self._inbox.add(topic_filter, handler)
        self._pump.subscribe(topic_filter)

    def status(self) -> LinkStatus:
        """Never waits."""
        connection = self._connection.status()
        pump = self._pump
        counters = pump.lanes.counters
        return LinkStatus(
            connected=connection.connected,
            since_ns=connection.since_ns,
            reason=connection.reason,
            protocol=connection.protocol,
            queued=sum(lane.waiting() for lane in self._lanes),
            dropped=sum(lane.dropped() for lane in self._lanes),
            expired=counters.expired,
            published=counters.published,
            refused=counters.refused + pump.states_refused,
            oversize=counters.oversize + pump.states_oversize,
            results_dropped=pump.results.dropped,
            reconnects=max(0, connection.connects - 1),
            handler_errors=self._inbox.handler_errors,
            internal_errors=connection.callback_errors + pump.errors,
            subscriptions_refused=tuple(sorted(self._subscriptions_refused)),
            held=pump.lanes.held,
            suspends=connection.suspends,
            takeovers=connection.takeovers,
        )

    def ticks(self) -> dict[str, tuple[threading.Thread, int]]:
        """For the supervisor: every thread of the link by its name, and when (monotonic, ns) it last went round.

        "mqtt-net" may be silent for the connect time-out, "mqtt-handler" for as long as a handler runs.
        """
        return {room.thread.name: (room.thread, room.tick_ns) for room in (self._connection, self._pump, self._inbox)}

    def close(self, deadline_s: float = 2.0) -> bool:
        """Publishes what is queued, says offline and disconnects; returns within `deadline_s` whatever the broker does.

        True if everything had been acknowledged and every thread has ended. May be called more than once.
        """
        if self._closed:
            return True
        self._closed = True
        t_end = time.monotonic() + deadline_s
        # The last part is for saying goodbye; a good broker acknowledges in milliseconds.
        flushed = self._pump.close(deadline_s * 0.6, deadline_s * 0.85)
        stopped = self._connection.stop(t_end - time.monotonic())
        handled = self._inbox.stop(t_end - time.monotonic())
        if not (stopped and handled):
            log.warning("mqtt: %s: a thread did not end within %g s", self._where, deadline_s)
        return flushed and stopped and handled

    # ---- Listener, on "mqtt-net"

    def up(self, session: SessionInfo) -> None:
        self._pump.up(session)

    def down(self, generation: int, *, closed_by_broker: bool) -> bool:
        return self._pump.down(generation, closed_by_broker=closed_by_broker)

    def acknowledged(self, generation: int, mid: int, code: int) -> None:
        self._pump.acknowledged(generation, mid, code)

    def message(self, incoming: Incoming) -> None:
        self._inbox.put(incoming)

    def subscription_refused(self, topic_filters: Sequence[str]) -> None:
        self._subscriptions_refused.update(topic_filters)
        log.warning("mqtt: %s: the broker refused to subscribe us to %s", self._where, ", ".join(topic_filters))
