"""The door to paho: one session with the broker, from the socket to its end.

Every session is a fresh paho client, driven by one thread and thrown away: what it had not got acknowledged is
resent by the pump, and by nobody else (P2, P4). paho's own loops, threads and reconnect are not used.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from edge_runtime.mqtt.reasons import describe, without_answer
from edge_runtime.mqtt.security import read_password, tls_context
from edge_runtime.mqtt.settings import BrokerSettings, Presence, Timing

log = logging.getLogger(__name__)

ProtocolVersion = Literal["5", "3.1.1"]

# How many unacknowledged messages a broker may send us at once.
RECEIVE_MAXIMUM = 20
# What a broker keeps for us while we are away: long enough for a reboot and a lunch break, since commands carry
# their own expiry and the desired state is retained.
_SESSION_EXPIRY_S = 3600
_POLL_S = 0.5
_GOODBYE_S = 0.2
_UNSUPPORTED_PROTOCOL = 0x84
_TAKEN_OVER = 0x8E


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """What the broker granted. `max_packet_bytes` is None where it did not say."""

    generation: int
    protocol: ProtocolVersion
    receive_maximum: int
    max_packet_bytes: int | None
    session_present: bool


@dataclass(frozen=True, slots=True)
class Incoming:
    """A message from the broker. `retained`: it is kept by the broker; with 3.1.1 only an old one says so."""

    topic: str
    payload: bytes
    qos: int
    retained: bool
    generation: int
    mid: int


class Listener(Protocol):
    """Whoever is told what happens. Called on "mqtt-net": implementations only enqueue (P5, P6)."""

    def up(self, session: SessionInfo) -> None: ...

    def down(self, generation: int, *, closed_by_broker: bool) -> bool:
        """True if it may have ended because of a message of ours (P13)."""
        ...

    def acknowledged(self, generation: int, mid: int, code: int) -> None: ...

    def message(self, incoming: Incoming) -> None: ...

    def subscription_refused(self, topic_filters: Sequence[str]) -> None: ...


class Session:
    """One try to be connected. `open`, `turn`, `goodbye` and `close` belong to one thread.

    `publish`, `subscribe`, `acknowledge` and `drop` may be called from others: they only hand bytes over, and the
    caller wakes the thread. `on_up` is called once connected. `on_callback_error` counts exceptions of listeners,
    which never reach paho (P7).
    """

    def __init__(
        self,
        settings: BrokerSettings,
        version: ProtocolVersion,
        generation: int,
        *,
        listener: Listener,
        presence: Presence | None,
        timing: Timing,
        on_up: Callable[[Session, SessionInfo], None],
        on_callback_error: Callable[[], None],
    ) -> None:
        self.version: ProtocolVersion = version
        self.generation = generation
        self.t_up_ns: int | None = None
        self.ended: str | None = None
        self.closed_by_broker = False
        self.taken_over = False
        self.silent = False  # CONNECT was never answered
        self._settings = settings
        self._listener = listener
        self._timing = timing
        self._on_up = on_up
        self._on_callback_error = on_callback_error
        self._t_start_ns = self._t_heard_ns = time.monotonic_ns()
        self._refused: ReasonCode | None = None
        self._farewell: str | None = None
        self._tls_error: ssl.SSLError | None = None
        self._subscriptions: dict[int, Sequence[str]] = {}
        self._client = self._new_client(presence)

    @property
    def protocol_refused(self) -> bool:
        """Whether the broker said that it does not speak this version."""
        return self._refused is not None and self._refused.value == _UNSUPPORTED_PROTOCOL

    @property
    def without_answer(self) -> bool:
        """Whether the broker closed the connection without a CONNACK."""
        told = self._refused is not None or self._tls_error is not None
        return self.t_up_ns is None and self.closed_by_broker and not told

    # ---- any thread

    def publish(self, topic: str, payload: bytes, *, qos: int, retain: bool, expiry_s: int | None) -> int | None:
        """The packet id, or None if the message was not taken. Raises ValueError for a topic MQTT forbids."""
        properties = None
        if expiry_s is not None and self.version == "5":
            properties = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
            properties.MessageExpiryInterval = expiry_s
        info = self._client.publish(topic, payload, qos, retain, properties)
        return info.mid if info.rc == paho.MQTT_ERR_SUCCESS else None

    def subscribe(self, topic_filters: Sequence[str]) -> None:
        if self.version == "5":
            # As published: who publishes a command with retain hears at once that it will never be obeyed, and not only
            # from the next start on.
            options = SubscribeOptions(qos=1, retainAsPublished=True)
            rc, mid = self._client.subscribe([(name, options) for name in topic_filters])
        else:
            rc, mid = self._client.subscribe([(name, 1) for name in topic_filters])
        if rc == paho.MQTT_ERR_SUCCESS and mid is not None:
            self._subscriptions[mid] = tuple(topic_filters)

    def acknowledge(self, mid: int) -> None:
        self._client.ack(mid, 1)

    def drop(self, reason: str) -> None:
        self.ended = self.ended or reason

    def abandon(self, reason: str) -> None:
        """Over for this reason and no other, whatever the broker may have said meanwhile."""
        self.ended = reason
        self.closed_by_broker = self.taken_over = False

    # ---- the thread that owns the session

    def open(self) -> None:
        """Opens the socket and sends CONNECT; takes up to the connect time-out.

        Raises OSError and ValueError of sockets, name look-up and TLS: see `reasons.describe`.
        """
        settings = self._settings
        client = self._client
        if self.version == "5":
            properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
            properties.SessionExpiryInterval = _SESSION_EXPIRY_S
            properties.ReceiveMaximum = RECEIVE_MAXIMUM
            client.connect_async(
                settings.host, settings.port, settings.keepalive_s, clean_start=False, properties=properties
            )
        else:
            client.connect_async(settings.host, settings.port, settings.keepalive_s)
        client.reconnect()
        if (sock := client.socket()) is not None:
            _hurry(sock)
        self._t_start_ns = self._t_heard_ns = time.monotonic_ns()

    def turn(self, wake: socket.socket) -> None:
        """Waits for the socket, for a byte from another thread or half a second, and does what is due."""
        client = self._client
        sock = client.socket()
        if sock is not None:
            # poll, not paho's select: a daemon with many cameras has file numbers above 1023 (P18)
            poller = select.poll()
            poller.register(wake, select.POLLIN)
            poller.register(sock.fileno(), select.POLLIN | (select.POLLOUT if client.want_write() else 0))
            ready = dict(poller.poll(_POLL_S * 1000))
            if ready.pop(wake.fileno(), 0):
                _drain(wake)
            if any(event & ~select.POLLOUT for event in ready.values()):
                self._t_heard_ns = time.monotonic_ns()
                client.loop_read()
                if client.socket() is not None:
                    _hurry(sock)
                while isinstance(sock, ssl.SSLSocket) and client.socket() is not None and sock.pending():
                    client.loop_read()
            if client.socket() is not None and client.want_write():
                client.loop_write()
            if client.socket() is not None:
                client.loop_misc()
        self._judge(time.monotonic_ns())

    def goodbye(self) -> None:
        """Sends DISCONNECT if the socket takes it at once: a frozen broker is not waited for (P11)."""
        client = self._client
        if self.t_up_ns is None:
            return
        client.disconnect()
        t_end = time.monotonic() + _GOODBYE_S
        while (sock := client.socket()) is not None and client.want_write() and (left := t_end - time.monotonic()) > 0:
            poller = select.poll()
            poller.register(sock.fileno(), select.POLLOUT)
            poller.poll(left * 1000)
            client.loop_write()

    def close(self) -> None:
        """Closes the socket without a word: the broker sends the will, unless goodbye was said."""
        sock = self._client.socket()
        if sock is not None:
            sock.close()

    def _judge(self, now_ns: int) -> None:
        """Ends a session that is over, or that nothing was heard from for too long (P10)."""
        if self.ended is not None:
            return
        if self._refused is not None:
            self.ended = f"refused: {_words(self._refused)}"
        elif self._client.socket() is None:
            self.closed_by_broker = True
            self.ended = self._farewell or self._why_closed()
        elif self.t_up_ns is None:
            if now_ns - self._t_start_ns > self._timing.connack_s * 1e9:
                self.silent = True
                self.ended = f"frozen: no answer to CONNECT for {self._timing.connack_s:g} s"
        elif (keepalive_s := self._client.keepalive) and now_ns - self._t_heard_ns > 1.5e9 * keepalive_s:
            self.ended = f"frozen: nothing heard for {1.5 * keepalive_s:g} s"

    def _why_closed(self) -> str:
        if self._tls_error is not None:
            return describe(self._tls_error, self._settings)
        return without_answer(self._settings) if self.t_up_ns is None else "the broker closed the connection"

    def _new_client(self, presence: Presence | None) -> paho.Client:
        settings = self._settings
        five = self.version == "5"
        client = paho.Client(
            CallbackAPIVersion.VERSION2,
            client_id=settings.client_id,
            clean_session=None if five else False,
            protocol=paho.MQTTv5 if five else paho.MQTTv311,
            reconnect_on_failure=False,
            manual_ack=True,
        )
        client.connect_timeout = self._timing.connect_s
        client.max_inflight_messages_set(0)  # the window is the pump's
        if settings.username is not None:
            password = None if settings.password_file is None else read_password(settings.password_file)
            client.username_pw_set(settings.username, password)
        if settings.tls:
            client.tls_set_context(tls_context(settings, self._on_tls_error))
        if presence is not None:
            client.will_set(presence.topic, presence.offline, qos=1, retain=True)
        client.on_connect = self._guard(self._on_connect)
        client.on_disconnect = self._guard(self._on_disconnect)
        client.on_publish = self._guard(self._on_publish)
        client.on_message = self._guard(self._on_message)
        client.on_subscribe = self._guard(self._on_subscribe)
        # With this set, paho never writes on the publisher's thread: two writers would interleave packets.
        client.on_socket_register_write = lambda *_: None
        return client

    def _on_tls_error(self, error: ssl.SSLError) -> None:
        self._tls_error = error

    # ---- paho's callbacks

    def _guard(self, callback: Callable[..., None]) -> Callable[..., None]:
        def guarded(_client: paho.Client, _userdata: object, *args: Any) -> None:
            try:
                callback(*args)
            except Exception:
                log.exception("mqtt: a callback failed")
                self._on_callback_error()

        return guarded

    def _on_connect(self, flags: paho.ConnectFlags, reason: ReasonCode, properties: Properties | None) -> None:
        if reason.is_failure:  # a refused CONNACK is not "connected"
            self._refused = reason
            return
        self.t_up_ns = time.monotonic_ns()
        info = SessionInfo(
            generation=self.generation,
            protocol=self.version,
            receive_maximum=int(getattr(properties, "ReceiveMaximum", 65535)),
            max_packet_bytes=getattr(properties, "MaximumPacketSize", None),
            session_present=flags.session_present,
        )
        self._on_up(self, info)

    def _on_disconnect(self, flags: paho.DisconnectFlags, reason: ReasonCode, _properties: Properties | None) -> None:
        # May come twice (P10) or not at all: what ends a session is its socket, see _judge.
        if flags.is_disconnect_packet_from_server and self._farewell is None:
            self._farewell = f"the broker closed the connection: {_words(reason)}"
            self.taken_over = reason.value == _TAKEN_OVER

    def _on_publish(self, mid: int, reason: ReasonCode, _properties: Properties | None) -> None:
        # P21: only this tells whether a publish was accepted
        self._listener.acknowledged(self.generation, mid, reason.value)

    def _on_message(self, message: paho.MQTTMessage) -> None:
        try:
            topic = message.topic
        except UnicodeDecodeError:
            topic = ""  # matches no handler, is acknowledged and gone
        self._listener.message(
            Incoming(topic, bytes(message.payload), message.qos, message.retain, self.generation, message.mid)
        )

    def _on_subscribe(self, mid: int, reasons: Sequence[ReasonCode], _properties: Properties | None) -> None:
        topic_filters = self._subscriptions.pop(mid, ())
        refused = [name for name, reason in zip(topic_filters, reasons, strict=False) if reason.is_failure]
        if refused:
            self._listener.subscription_refused(refused)


def topic_matches(topic_filter: str, topic: str) -> bool:
    """Whether a subscription with `+` and `#` covers a topic. Raises ValueError for a malformed filter."""
    return paho.topic_matches_sub(topic_filter, topic)


def _words(reason: ReasonCode) -> str:
    """British, lower case: `not authorised`, `bad user name or password`."""
    return str(reason).lower().replace("authorized", "authorised")


def _hurry(sock: object) -> None:
    """Send small packets at once, and confirm what arrives at once. Wants calling after every read: tcp(7).

    A broker that sends PUBACKs with Nagle's algorithm, as mosquitto does by default, waits with the second for the
    kernel's word on the first, which comes 40 ms late: 500 rows a second on the loopback instead of 2,400.
    """
    assert isinstance(sock, socket.socket)  # paho's type has less: it may be one of a websocket, too
    with contextlib.suppress(OSError):  # it has just been closed: whoever reads or writes next says so
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)


def _drain(sock: socket.socket) -> None:
    try:
        while len(sock.recv(4096)) == 4096:
            pass
    except BlockingIOError:
        pass
