"""Connections of a `multiprocessing` manager's client that do not wait for ever.

The library's own have no time-out: a service that is stopped, or whose worker is dead, holds its client for good.
"""

from __future__ import annotations

import socket
import threading
import time
from multiprocessing import managers
from multiprocessing.connection import Connection, Pipe, answer_challenge, deliver_challenge, wait
from typing import Any

_CONNECT_S = 2.0

_Peers = dict[str, tuple[Any, Any]]


class ManagerWire:
    """All connections of one manager's client, which `adopt` gives to it.

    Until `settle` every wait for the service ends `start_s` after the wire was made, from then on after `wait_s`, and
    all of them at `cut`, which any thread may call: the client gets TimeoutError or ConnectionAbortedError. `close`
    is for when none of the client's threads is left.
    """

    def __init__(self, *, start_s: float, wait_s: float) -> None:
        self._deadline: float | None = time.monotonic() + start_s
        self._wait_s = wait_s
        self._cutting = threading.Lock()
        self._stop, self._stopper = Pipe(duplex=False)
        self._name = f"wire-{id(self):x}"
        self._address: Any = None
        self._connections: list[Connection] = []

    def adopt(self, manager: managers.BaseManager) -> None:
        """Let `manager` and the proxies it makes connect through this wire."""
        # proxies find their way to connect by the name of their manager's serializer
        _peers()[self._name] = (None, self.connect)
        self._address = manager.address
        manager._serializer = self._name  # type: ignore[attr-defined]
        manager._Client = self.connect  # type: ignore[attr-defined]

    def settle(self) -> None:
        """The client has started."""
        self._deadline = None

    def connect(self, address: str, *, authkey: bytes | None = None) -> Connection:
        """As multiprocessing.connection.Client does it. Raises OSError, EOFError and AuthenticationError."""
        if self._stop.poll():
            raise ConnectionAbortedError("given up")
        with socket.socket(socket.AF_UNIX) as plain:
            plain.settimeout(_CONNECT_S)
            plain.connect(address)
            plain.setblocking(True)
            connection = _BoundedConnection(plain.detach(), self)
        try:
            if authkey is not None:
                answer_challenge(connection, authkey)
                deliver_challenge(connection, authkey)
        except BaseException:
            connection.close()
            raise
        self._connections = [known for known in self._connections if not known.closed]
        self._connections.append(connection)
        return connection

    def wait_for(self, connection: Connection) -> None:
        """Until there is something to receive."""
        left_s = self._wait_s if self._deadline is None else self._deadline - time.monotonic()
        ready = wait([connection, self._stop], max(0.0, left_s))
        if self._stop in ready:
            raise ConnectionAbortedError("given up")
        if not ready or left_s <= 0:
            raise TimeoutError("no answer in time")

    def cut(self) -> None:
        """End every wait, now and later; no further connection is made. Idempotent."""
        with self._cutting:
            self._stopper.close()
        _peers().pop(self._name, None)

    def close(self) -> None:
        """Close all connections, and let no later client to the same address inherit them."""
        self.cut()
        # proxies share one connection to an address on a thread, a dead one too
        managers.BaseProxy._address_to_local.pop(self._address, None)
        for connection in self._connections:
            connection.close()
        self._stop.close()


class _BoundedConnection(Connection):
    def __init__(self, handle: int, wire: ManagerWire) -> None:
        super().__init__(handle)
        self._wire = wire

    def recv(self) -> Any:
        self._wire.wait_for(self)
        return super().recv()

    def recv_bytes(self, maxlength: int | None = None) -> bytes:
        self._wire.wait_for(self)
        return super().recv_bytes(maxlength)


def _peers() -> _Peers:
    """What multiprocessing knows of serializers: (listener, client) by name."""
    peers: _Peers = managers.listener_client  # type: ignore[attr-defined]
    return peers
