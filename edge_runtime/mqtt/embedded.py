"""A broker in this process, for trials and the demo: amqtt, which speaks MQTT 3.1.1 only.

Nothing is stored, anybody on the listening address may connect: keep it on loopback.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from typing import Any, Literal

from edge_runtime.errors import MqttError
from edge_runtime.threads import set_os_thread_name

log = logging.getLogger(__name__)

_START_S = 10.0
_SHUTDOWN_S = 0.5
_REMEDY_EXTRA = "install it with: pip install 'edge-runtime[demo]'"


class EmbeddedBroker:
    """amqtt with its event loop on the thread "broker".

    `port` 0 chooses a free one, which `port` tells after `start`. Connect with `protocol`: to a CONNECT of MQTT 5
    it mostly gives no answer, and "auto" finds that out only after a time-out.
    """

    protocol: Literal["3.1.1"] = "3.1.1"

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._host = host
        self._port = port
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._listening = threading.Event()
        self._error: BaseException | None = None
        self._log_level = logging.NOTSET

    @property
    def host(self) -> str:
        return self._host

    @property
    def port(self) -> int:
        """The port it listens on; 0 before `start` if a free one was asked for."""
        return self._port

    def start(self) -> None:
        """Returns when the broker listens, usually within 0.3 s.

        Raises MqttError if the `demo` extra is not installed or the address cannot be used.
        """
        try:
            from amqtt.broker import Broker
        except ImportError as error:
            raise MqttError(
                f"the embedded broker is not installed ({error})", code="mqtt_no_broker", remedy=_REMEDY_EXTRA
            ) from error
        if self._thread is not None:
            raise MqttError("the embedded broker was started before", code="mqtt_state")
        self._port = self._checked_port()
        # It logs every packet, and tracebacks of clients that went away; what matters is raised from here.
        self._log_level = logging.getLogger("amqtt").level
        logging.getLogger("amqtt").setLevel(logging.CRITICAL)
        logging.getLogger("transitions").setLevel(logging.WARNING)
        self._thread = threading.Thread(target=self._run, args=(Broker,), name="broker", daemon=True)
        self._thread.start()
        if not self._listening.wait(_START_S) or self._error is not None:
            cause = self._error
            self.stop()
            raise MqttError(
                f"the embedded broker cannot listen: {cause or 'no answer'}",
                code="mqtt_listen",
                where=f"{self._host}:{self._port}",
                remedy="use another port",
            ) from cause

    def stop(self, deadline_s: float = 2.0) -> bool:
        """Closes every connection and ends the thread; False if that took longer than `deadline_s`."""
        thread = self._thread
        if thread is None:
            return True
        if self._loop is not None and self._stop is not None:
            try:
                self._loop.call_soon_threadsafe(self._stop.set)
            except RuntimeError:
                pass  # the loop is closed: it has ended by itself
        thread.join(max(0.0, deadline_s))
        if thread.is_alive():
            return False
        self._thread = None
        logging.getLogger("amqtt").setLevel(self._log_level)
        return True

    def __enter__(self) -> EmbeddedBroker:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _checked_port(self) -> int:
        """A port that can be bound now: amqtt would hide the reason in a traceback, and does not tell a free one."""
        try:
            family, kind, proto, _, address = socket.getaddrinfo(
                self._host, self._port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            with socket.socket(family, kind, proto) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
                return int(probe.getsockname()[1])
        except OSError as error:
            raise MqttError(
                f"the embedded broker cannot listen: {error.strerror or error}",
                code="mqtt_listen",
                where=f"{self._host}:{self._port}",
                remedy="stop what uses the port, or choose another",
                retryable=True,
            ) from error

    def _run(self, broker_class: Any) -> None:
        set_os_thread_name("broker")
        try:
            asyncio.run(self._serve(broker_class))
        except BaseException as error:  # noqa: BLE001 - handed to start()
            self._error = error
            log.debug("the embedded broker ended: %s", error)
        finally:
            self._listening.set()

    async def _serve(self, broker_class: Any) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        # A client that vanishes leaves a task with an exception that nobody asks for.
        self._loop.set_exception_handler(lambda _loop, context: log.debug("amqtt: %s", context.get("message")))
        host = f"[{self._host}]" if ":" in self._host else self._host
        broker = broker_class(
            {
                "listeners": {"default": {"type": "tcp", "bind": f"{host}:{self._port}"}},
                "plugins": {"amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True}},
            }
        )
        # amqtt forgets connections that never finished their CONNECT, and those that another took over: asyncio holds
        # tasks weakly, and a collected one would leave its socket open.
        tasks: set[asyncio.Task[Any]] = set()
        writers: set[asyncio.StreamWriter] = set()
        connected = broker.stream_connected

        async def connected_and_closed(reader: Any, writer: asyncio.StreamWriter, listener_name: str) -> None:
            writers.add(writer)
            task = asyncio.current_task()
            if task is not None:
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            try:
                await connected(reader, writer, listener_name)
            finally:
                writer.close()
                if writer.transport.get_write_buffer_size() == 0:
                    writers.discard(writer)

        broker.stream_connected = connected_and_closed
        await broker.start()
        self._listening.set()
        await self._stop.wait()
        # asyncio leaves a socket open that it accepted in the very turn in which its server is closed.
        await asyncio.sleep(0.02)
        # First, and by ourselves: its shutdown comes to the listeners last, or never if a session hangs, and clients
        # that reconnect in the meantime hold it up.
        for server in getattr(broker, "_servers", {}).values():
            if server.instance is not None:
                server.instance.close()
        try:
            # From Python 3.12 on, a server waits for its last client before it is closed.
            await asyncio.wait_for(broker.shutdown(), _SHUTDOWN_S)
        except Exception as error:  # noqa: BLE001 - it is going away in any case
            log.debug("amqtt: shutdown: %s", error)
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        if rest:
            await asyncio.wait(rest, timeout=_SHUTDOWN_S)
        for writer in writers:
            writer.transport.abort()
        await asyncio.sleep(0.01)  # transports close their sockets a turn of the loop later
