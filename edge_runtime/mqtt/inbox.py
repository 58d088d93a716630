"""What arrives from the broker: handlers and the thread they run on, "mqtt-handler" (P19)."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from edge_runtime.errors import MqttError
from edge_runtime.mqtt.session import RECEIVE_MAXIMUM, Incoming, topic_matches
from edge_runtime.threads import set_os_thread_name

log = logging.getLogger(__name__)

Handler = Callable[[Incoming], None]

_CAPACITY = 1000
# How many messages whose handler failed stay unacknowledged, for the broker to send again after the next connect.
# Half of what it may have outstanding: more would stop everything behind them.
_FAILED_KEPT = RECEIVE_MAXIMUM // 2


class Inbox:
    """Runs handlers one after another; a message is acknowledged only after its handler returned (P8).

    A handler that raises has not accepted the message: it is counted and stays with the broker, which delivers it
    again after the next connect. Beyond ten such messages the oldest is acknowledged and lost, and said so.
    """

    def __init__(self, acknowledge: Callable[[Incoming], None]) -> None:
        self._acknowledge = acknowledge
        self._handlers: dict[str, Handler] = {}
        self._lock = threading.Lock()
        self._queue: deque[Incoming] = deque()
        self._ready = threading.Condition(self._lock)
        self._stopping = False
        self._failed: deque[Incoming] = deque()
        self.handler_errors = 0
        self.dropped = 0
        self.tick_ns = time.monotonic_ns()
        self.thread = threading.Thread(target=self._run, name="mqtt-handler", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def stop(self, deadline_s: float) -> bool:
        """Ends the thread after the handler that runs; False if that one took longer than `deadline_s`."""
        with self._ready:
            self._stopping = True
            self._ready.notify()
        if self.thread.ident is None:
            return True
        self.thread.join(max(0.0, deadline_s))
        return not self.thread.is_alive()

    def add(self, topic_filter: str, handler: Handler) -> None:
        """Raises MqttError for a filter that MQTT forbids."""
        if not _valid(topic_filter):
            raise MqttError(
                f"{topic_filter!r} is no topic filter",
                code="mqtt_filter",
                remedy="use levels with + for one and a final # for the rest",
            )
        with self._lock:
            self._handlers[topic_filter] = handler

    def filters(self) -> Sequence[str]:
        with self._lock:
            return list(self._handlers)

    def put(self, incoming: Incoming) -> None:
        """From "mqtt-net"; QoS 0 is dropped and counted when the handlers do not keep up."""
        with self._ready:
            if incoming.qos == 0 and len(self._queue) >= _CAPACITY:
                self.dropped += 1
                return
            self._queue.append(incoming)
            self._ready.notify()

    def _run(self) -> None:
        set_os_thread_name("mqtt-handler")
        while True:
            with self._ready:
                while not self._queue and not self._stopping:
                    self._ready.wait(0.5)
                    self.tick_ns = time.monotonic_ns()
                if self._stopping:
                    return
                incoming = self._queue.popleft()
                handlers = [
                    handler for name, handler in self._handlers.items() if topic_matches(name, incoming.topic or "/")
                ]
            self.tick_ns = time.monotonic_ns()
            try:
                self._handle(incoming, handlers)
            except Exception:
                log.exception("mqtt: acknowledging %s failed", incoming.topic)
                self.handler_errors += 1

    def _handle(self, incoming: Incoming, handlers: Sequence[Handler]) -> None:
        failed = sum(not self._accepted(handler, incoming) for handler in handlers)
        if incoming.qos == 0:
            return
        if not failed:
            self._acknowledge(incoming)
            return
        self._failed.append(incoming)
        while self._failed[0].generation != incoming.generation:
            self._failed.popleft()  # of a session that is over: the broker has it
        if len(self._failed) > _FAILED_KEPT:
            lost = self._failed.popleft()
            log.error("mqtt: a message to %s is given up: its handler failed", lost.topic)
            self._acknowledge(lost)

    def _accepted(self, handler: Handler, incoming: Incoming) -> bool:
        try:
            handler(incoming)
        except Exception:
            log.exception("mqtt: the handler of %s failed", incoming.topic)
            self.handler_errors += 1
            return False
        return True


def _valid(topic_filter: str) -> bool:
    levels = topic_filter.split("/")
    return (
        0 < len(topic_filter.encode()) < 65536
        and "\0" not in topic_filter
        and "#" not in "/".join(levels[:-1])
        and all(level in ("+", "#") or not set(level) & {"+", "#"} for level in levels)
    )
