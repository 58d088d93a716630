"""The thread "web": uvicorn on the control socket and on TCP, in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from types import TracebackType

import uvicorn
from h11 import LocalProtocolError

from edge_runtime.config_values import is_loopback
from edge_runtime.errors import EdgeError
from edge_runtime.threads import ThreadGroup
from edge_runtime.web.access import Access, check_listen, parse_listen
from edge_runtime.web.api import Crew, build_app
from edge_runtime.web.door import Door
from edge_runtime.web.protocol import MAX_HEADER_BYTES, BoundedProtocol
from edge_runtime.web.sockets import BACKLOG, ControlSocket, bind_tcp
from edge_runtime.web.workers import Workers

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 5
READS = 2
COMMANDS = 4
_START_S = 10.0
_ACCEPTED_S = 0.02


class WebServer:
    """The control socket at `control`, and TCP on `listen` (`HOST:PORT`) where that is given.

    `token` is what a request has to bring on TCP; `names` are names (besides localhost, IP addresses and the host of
    `listen`) under which this device may be addressed there. `on_death(name, error)` is called on the dying thread.
    """

    def __init__(
        self,
        door: Door,
        control: Path,
        *,
        listen: str | None = None,
        token: str | None = None,
        names: Iterable[str] = (),
        on_death: Callable[[str, BaseException], None] | None = None,
    ) -> None:
        """Raises UsageError for a `listen` that other machines reach while there is no `token` (check_listen)."""
        if listen is not None:
            check_listen(listen, token)
        self._door = door
        self._control_path = control
        self._listen = listen
        self._token = token
        self._names = frozenset(name.lower().rstrip(".") for name in names)
        self._threads = ThreadGroup(on_death)
        self._calls = ThreadGroup()
        self._control: ControlSocket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._deadline_s = 1.0
        self._serving = threading.Event()
        self.address: tuple[str, int] | None = None
        """Where TCP is served, once started."""

    def start(self) -> None:
        """Bind, and return when both are served.

        Raises EdgeError: `web_listen` for a port that is taken, `socket_held` where another daemon listens,
        `socket_path` and `socket_unusable` (UsageError) for a control socket that cannot be.
        """
        if self._control is not None:
            raise EdgeError("the web server was started before", code="web_state")
        with contextlib.ExitStack() as undo:
            tcp = None
            if self._listen is not None:
                tcp = bind_tcp(self._listen)
                undo.callback(tcp.close)
                self.address = tcp.getsockname()[:2]
            control = ControlSocket(self._control_path)
            undo.callback(control.socket.close)
            undo.callback(control.remove)
            # last of all, when nothing can fail any more: what a browser may reach has to be right
            access = None if tcp is None else self._tcp_access(tcp)
            self._control = control
            self._threads.spawn("web", lambda: self._run(control.socket, tcp, access))
            if not self._serving.wait(_START_S) or self._loop is None or not self._threads.alive():
                raise EdgeError("the web server does not start", code="web_failed", remedy="see the log")
            undo.pop_all()
        log.info("control socket %s%s", control.path, f", http on {self._listen}" if self._listen else "")

    def stop(self, deadline_s: float = 1.0) -> list[str]:
        """Finish the requests in hand, cut what is left, end within `deadline_s`; names of threads that did not.

        A command that hangs is one of these ("web-command"), and an upload ("web-upload"). Idempotent.
        """
        end = time.monotonic() + deadline_s
        if self._loop is not None and self._stopping is not None:
            self._deadline_s = deadline_s
            # RuntimeError: the loop has ended by itself
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stopping.set)
        stuck = self._threads.join(max(0.0, end - time.monotonic()))
        if self._control is not None:
            self._control.remove()
        return stuck + self._calls.join(max(0.0, end - time.monotonic()))

    def __enter__(self) -> WebServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _tcp_access(self, tcp: socket.socket) -> Access:
        bound = tcp.getsockname()[0]
        open_to_others = not ipaddress.ip_address(bound.partition("%")[0]).is_loopback
        if open_to_others:
            # a name that was said to be the loopback, and leads elsewhere
            check_listen(f"[{bound}]:0" if ":" in bound else f"{bound}:0", self._token)
        host, _ = parse_listen(self._listen or "")
        own = frozenset() if is_loopback(host) else frozenset({host.lower()})
        return Access(token=self._token, open_to_others=open_to_others, names=self._names | own)

    # --- on the thread "web"

    def _run(self, control: socket.socket, tcp: socket.socket | None, access: Access | None) -> None:
        try:
            asyncio.run(self._serve(control, tcp, access))
        finally:
            self._serving.set()  # start() looks whether we live
            for each in (control, tcp):
                if each is not None:
                    each.close()

    async def _serve(self, control: socket.socket, tcp: socket.socket | None, access: Access | None) -> None:
        crew = Crew(
            health=Workers(self._calls, "web-health", 1),
            reads=Workers(self._calls, "web-read", READS),
            commands=Workers(self._calls, "web-command", COMMANDS),
            uploads=Workers(self._calls, "web-upload", 1),
        )
        stopping = asyncio.Event()
        # a listener each: however many come over TCP, the control socket has connections of its own
        listeners = [_Listener(build_app(self._door, Access(trusted=True), crew), control, stopping, self._grace)]
        if tcp is not None and access is not None:
            listeners.append(_Listener(build_app(self._door, access, crew), tcp, stopping, self._grace))
        tasks = [asyncio.create_task(each.serve(sockets=[each.socket])) for each in listeners]
        for each in listeners:
            await _first(tasks, each.listening.wait())
        self._loop, self._stopping = asyncio.get_running_loop(), stopping
        self._serving.set()
        await _first(tasks, stopping.wait())
        # half of the time for requests in hand, then their callers hear that we stop
        self._loop.call_later(self._grace() / 2, crew.close)
        await asyncio.gather(*tasks)
        crew.close()

    def _grace(self) -> float:
        return 0.8 * self._deadline_s


async def _first(tasks: Iterable[asyncio.Task[None]], wanted: Coroutine[object, object, object]) -> None:
    """Until `wanted`. Raises what ended one of the `tasks` before that."""
    waiter = asyncio.create_task(wanted)
    done, _ = await asyncio.wait([waiter, *tasks], return_when=asyncio.FIRST_COMPLETED)
    if waiter not in done:
        waiter.cancel()
        for task in done:
            task.result()
        raise RuntimeError("a web listener ended by itself")


class _Listener(uvicorn.Server):
    """uvicorn on one socket of ours, without ticks ten times a second, and with an end that comes in time."""

    def __init__(
        self,
        app: object,
        listening_socket: socket.socket,
        stopping: asyncio.Event,
        grace: Callable[[], float],
    ) -> None:
        config = uvicorn.Config(
            app,  # type: ignore[arg-type]
            http=BoundedProtocol,
            ws="none",
            loop="asyncio",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="error",
            access_log=False,
            # nobody but a proxy of the operator's could say who the client is, and nothing here asks
            proxy_headers=False,
            server_header=False,
            date_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        )
        super().__init__(config)
        self.socket = listening_socket
        self.listening = asyncio.Event()
        self._stop_wanted = stopping
        self._grace = grace

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.listening.set()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self._stop_wanted.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + self._grace()
        # asyncio would leave a socket open that it accepted in the very turn in which its server is closed
        for each in sockets or []:
            loop.remove_reader(each)
        await asyncio.sleep(_ACCEPTED_S)
        for server in self.servers:
            server.close()
        for each in sockets or []:
            each.close()
        connections = self.server_state.connections
        while connections and loop.time() < end:
            for connection in list(connections):
                # LocalProtocolError: it is being closed already
                with contextlib.suppress(LocalProtocolError):
                    connection.shutdown()
            await asyncio.sleep(_ACCEPTED_S)
        for connection in list(connections):
            connection.transport.abort()
        while self.server_state.tasks and loop.time() < end + 10 * _ACCEPTED_S:
            await asyncio.sleep(0.005)  # their clients are gone, and they notice
        await asyncio.sleep(0)
