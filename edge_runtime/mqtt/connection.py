"""One broker connection, kept up by a thread of our own, "mqtt-net".

paho's `loop_start` and its reconnect are not used: its thread dies of a callback's exception (P7), its
`loop_stop` waits ten seconds for a frozen broker (P11), and it comes back without jitter (P22).
"""

from __future__ import annotations

import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from edge_runtime.errors import EdgeError
from edge_runtime.mqtt.events import LinkEvent, OnEvent, guarded
from edge_runtime.mqtt.reasons import describe
from edge_runtime.mqtt.session import Incoming, Listener, ProtocolVersion, Session, SessionInfo
from edge_runtime.mqtt.settings import Backoff, BrokerSettings, Presence, Timing
from edge_runtime.mqtt.takeover import TakeoverWatch
from edge_runtime.threads import set_os_thread_name

log = logging.getLogger(__name__)


def asleep_s() -> float:
    """How long this device has been suspended since it booted: the monotonic clock stands still meanwhile."""
    while True:
        before_s = time.monotonic()
        boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        if time.monotonic() - before_s < 0.1:  # else we were held up between the two, and it is no difference
            return boot_s - before_s


@dataclass(frozen=True, slots=True)
class ConnectionStatus:
    """The truth about the link. `since_ns` (monotonic) is when `connected` last changed.

    `connecting` is true while a try is under way, false between tries. `connects` counts accepted CONNACKs,
    `suspends` sessions given up because the device slept, `takeovers` the times another client seemed to have our id.
    """

    connected: bool
    since_ns: int
    reason: str
    protocol: ProtocolVersion | None
    connecting: bool = False
    connects: int = 0
    callback_errors: int = 0
    suspends: int = 0
    takeovers: int = 0


class BrokerConnection:
    """Keeps one session with the broker up until stopped.

    `start` returns at once; there is no error to raise, since an absent broker is a state (see `status`).
    `publish`, `subscribe`, `acknowledge` and `drop` name the session they mean by its generation and do nothing
    once it is over; they never do I/O and may be called from any thread. `on_event` is called on "mqtt-net" and
    must only enqueue. `asleep_s` tells for how many seconds the device was suspended so far.
    """

    def __init__(
        self,
        settings: BrokerSettings,
        listener: Listener,
        *,
        presence: Presence | None = None,
        timing: Timing | None = None,
        backoff: Backoff | None = None,
        on_event: OnEvent | None = None,
        asleep_s: Callable[[], float] = asleep_s,
    ) -> None:
        self._settings = settings
        self._listener = listener
        self._presence = presence
        self._timing = timing or Timing()
        self._backoff = backoff or Backoff(self._timing)
        self._stopping = threading.Event()
        self._wake_r: socket.socket | None = None
        self._wake_w: socket.socket | None = None
        self._lock = threading.Lock()
        self._live: Session | None = None
        self._status = ConnectionStatus(False, time.monotonic_ns(), "not started", None)
        self._generation = 0
        self._version: ProtocolVersion = "3.1.1" if settings.protocol == "3.1.1" else "5"
        self._speaks_5: bool | None = None  # None: not known yet
        self._silent_5 = False
        self._on_event = guarded(on_event)
        self._takeover = TakeoverWatch(settings.client_id, self._timing)
        self._asleep_s = asleep_s
        self._was_asleep_s = 0.0
        self._slept_s: float | None = None  # the session ended because of it
        self._warned_of = self._tried_for = ""
        self.thread = threading.Thread(target=self._run, name="mqtt-net", daemon=True)
        self.tick_ns = time.monotonic_ns()

    # ---- any thread

    def start(self) -> None:
        self._wake_r, self._wake_w = socket.socketpair()
        self._wake_r.setblocking(False)
        self._wake_w.setblocking(False)
        self._set_status(reason="connecting", connecting=True)
        self.thread.start()

    def stop(self, deadline_s: float) -> bool:
        """Says goodbye and ends the thread; False if it did not end in time (stuck in a name look-up or TLS).

        A will is not sent after this: publish the offline state first (P24).
        """
        self._stopping.set()
        self.wake()
        if self.thread.ident is None:
            return True
        self.thread.join(max(0.0, deadline_s))
        return not self.thread.is_alive()

    def status(self) -> ConnectionStatus:
        return self._status

    def publish(
        self, generation: int, topic: str, payload: bytes, *, qos: int, retain: bool, expiry_s: int | None = None
    ) -> int | None:
        """Hands a message to the session; its packet id, or None if it was not taken.

        Raises ValueError for a topic that MQTT forbids.
        """
        session = self._session(generation)
        if session is None:
            return None
        mid = session.publish(topic, payload, qos=qos, retain=retain, expiry_s=expiry_s)
        self.wake()
        return mid

    def subscribe(self, generation: int, topic_filters: Sequence[str]) -> None:
        """Subscribes with QoS 1; a refusal arrives at the listener."""
        session = self._session(generation)
        if session is not None and topic_filters:
            session.subscribe(topic_filters)
            self.wake()

    def acknowledge(self, incoming: Incoming) -> None:
        """Tells the broker that a QoS 1 message was accepted (P8)."""
        session = self._session(incoming.generation)
        if session is not None and incoming.qos == 1:
            session.acknowledge(incoming.mid)
            self.wake()

    def drop(self, generation: int, reason: str) -> None:
        """Gives a session up, for instance because the broker acknowledges nothing."""
        session = self._session(generation)
        if session is not None:
            session.drop(reason)
            self.wake()

    def wake(self) -> None:
        if self._wake_w is not None:
            try:
                self._wake_w.send(b"w")
            except OSError:
                pass  # full: it wakes anyway; closed: nobody is left to wake

    def _session(self, generation: int) -> Session | None:
        with self._lock:
            session = self._live
        return session if session is not None and session.generation == generation else None

    def _set_status(self, **changes: Any) -> None:
        with self._lock:
            if changes.get("connected", self._status.connected) != self._status.connected:
                changes["since_ns"] = time.monotonic_ns()
            self._status = replace(self._status, **changes)

    # ---- "mqtt-net"

    def _run(self) -> None:
        set_os_thread_name("mqtt-net")
        try:
            if not self._settings.on_this_machine:
                self._idle(self._backoff.soon_s())
            while not self._stopping.is_set():
                self._slept_s = None
                self._idle(self._once())
        finally:
            self._set_status(connected=False, connecting=False, reason="stopped")
            for sock in (self._wake_r, self._wake_w):
                if sock is not None:
                    sock.close()

    def _idle(self, delay_s: float) -> None:
        t_end = time.monotonic() + delay_s
        while (left := t_end - time.monotonic()) > 0 and not self._stopping.wait(min(left, 1.0)):
            self.tick_ns = time.monotonic_ns()

    def _once(self) -> float:
        """One session from start to end; returns how many seconds to wait before the next."""
        session: Session | None = None
        self.tick_ns = time.monotonic_ns()
        self._set_status(connecting=True)
        self._generation += 1
        self._was_asleep_s = self._asleep_s()
        timing = self._timing
        if self._settings.protocol == "auto" and self._version == "5" and self._speaks_5 is None:
            timing = replace(timing, connack_s=min(timing.connack_s, timing.fallback_s))
        try:
            session = Session(
                self._settings,
                self._version,
                self._generation,
                listener=self._listener,
                presence=self._presence,
                timing=timing,
                on_up=self._on_up,
                on_callback_error=self._on_callback_error,
            )
            session.open()
            while session.ended is None and not self._stopping.is_set():
                if self._wake_r is not None:
                    session.turn(self._wake_r)
                self._notice_suspend(session)
                self.tick_ns = time.monotonic_ns()
            if session.ended is None:
                session.goodbye()
            reason = session.ended or "stopped"
        except Exception as error:
            # The thread must outlive whatever a library, a certificate or a name server comes up with (P7, P9).
            reason = describe(error, self._settings)
            if not isinstance(error, (OSError, EdgeError)):
                log.exception("mqtt: unexpected error")
        if session is not None:
            self._notice_suspend(session)
            if self._slept_s is not None:
                reason = session.ended or reason
        with self._lock:
            self._live = None
        self._set_status(connected=False, connecting=False, reason=reason)
        if session is None or session.t_up_ns is None:
            self._takeover.over()
        if session is None:
            self._warn(reason)
            return self._backoff.next_delay_s()
        session.close()
        return self._after(session, reason)

    def _after(self, session: Session, reason: str) -> float:
        by_message, lasted_s = False, 0.0
        if session.t_up_ns is not None:
            lasted_s = (time.monotonic_ns() - session.t_up_ns) / 1e9
            if lasted_s >= self._timing.stable_s:
                self._backoff.reset()
            try:
                by_message = self._listener.down(session.generation, closed_by_broker=session.closed_by_broker)
            except Exception:
                log.exception("mqtt: a listener failed")
                self._on_callback_error()
        if self._stopping.is_set():
            return 0.0
        if self._other_version(session):
            if reason != self._tried_for:
                log.info("mqtt: %s: %s; trying MQTT %s", self._settings.where, reason, self._version)
            self._tried_for = reason
            return 0.0
        if self._slept_s is not None:
            self._set_status(suspends=self._status.suspends + 1)
            self._warn(reason)
            self._on_event(LinkEvent("suspended", reason, {"suspended_s": round(self._slept_s, 1)}))
            return self._backoff.soon_s()
        if session.t_up_ns is not None and self._suspicious(session, lasted_s, by_message=by_message):
            return self._backoff.next_delay_s(suspicious=True)
        self._warn(reason)
        return self._backoff.next_delay_s()

    def _notice_suspend(self, session: Session) -> None:
        """The broker gave the session up long ago, or its network did; only the kernel does not know it yet."""
        total_s = self._asleep_s()
        slept_s, self._was_asleep_s = total_s - self._was_asleep_s, total_s
        if slept_s > self._timing.suspend_s and session.t_up_ns is not None:
            self._slept_s = slept_s
            session.abandon(f"this device was suspended for {slept_s:.0f} s")

    def _warn(self, reason: str) -> None:
        """Once per reason, not once per try: a broker may be away for weeks."""
        words = re.sub(r"\d", "", reason)  # some tell the time of day
        if words != self._warned_of:
            log.warning("mqtt: %s: %s", self._settings.where, reason)
        self._warned_of = words

    def _other_version(self, session: Session) -> bool:
        """Chooses the next session's version; true if it is worth trying at once.

        A broker that knows no MQTT 5 refuses it, closes the connection, or waits for ever for the rest of a CONNECT
        that it takes for another (amqtt). Closing may as well be a broker that just goes down: 5 is tried again next
        time. A broker that spoke 5 before has to refuse it in words.
        """
        if self._settings.protocol != "auto":
            return False
        if session.version == "5":
            wordless = self._speaks_5 is None and (session.without_answer or session.silent)
            if session.t_up_ns is not None or not (session.protocol_refused or wordless):
                return False
            self._speaks_5 = False if session.protocol_refused else None
            self._silent_5 = session.silent
            self._version = "3.1.1"
            return True
        if session.t_up_ns is not None and self._silent_5:
            self._speaks_5 = False
        if session.without_answer or self._speaks_5 is not False:
            self._version = "5"
            self._speaks_5 = None
        return False

    def _suspicious(self, session: Session, lasted_s: float, *, by_message: bool) -> bool:
        """Whether the session looks like one that another device with our client id has ended (P17)."""
        watch = self._takeover
        by_broker = session.closed_by_broker and not by_message
        if not watch.session_ended(lasted_s, by_broker=by_broker, said_so=session.taken_over):
            return False
        event = watch.event(time.monotonic_ns())
        self._set_status(reason=watch.reason, takeovers=watch.episodes)
        if event is not None:
            log.warning("mqtt: %s: %s", self._settings.where, event.message)
            self._on_event(event)
        return True

    def _on_up(self, session: Session, info: SessionInfo) -> None:
        self._warned_of = self._tried_for = ""
        if session.version == "5":
            self._speaks_5 = True
        with self._lock:
            self._live = session
        try:
            # First, so that whoever reads "connected" can publish at once.
            self._listener.up(info)
        finally:
            self._set_status(
                connected=True,
                connecting=False,
                reason="connected",
                protocol=session.version,
                connects=self._status.connects + 1,
            )
        log.info("mqtt: connected to %s with MQTT %s", self._settings.where, session.version)

    def _on_callback_error(self) -> None:
        self._set_status(callback_errors=self._status.callback_errors + 1)
