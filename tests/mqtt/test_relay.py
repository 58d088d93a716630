"""The relay that the other tests trust."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.awaiting import wait_until
from tests.relay import Relay


class Echo:
    """Sends back what it gets, on one thread per connection."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._echo, args=(connection,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _echo(self, connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(65536):
                    connection.sendall(data)
            except OSError:
                return

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in (self._accepting, *self._threads):
            thread.join(5)


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.close()


def test_relay_forwards_records_and_closes(echo: Echo) -> None:
    with Relay(echo.port, record=True) as relay:
        with socket.create_connection(("127.0.0.1", relay.port), 5) as client:
            client.sendall(b"hello")
            assert client.recv(5, socket.MSG_WAITALL) == b"hello"
            assert (relay.bytes_up, relay.bytes_down, relay.connections) == (5, 5, 1)
        wait_until(lambda: relay.connections == 0)
        assert relay.recorded() == [b"hello"]
        assert relay.recorded(client_to_server=False) == [b"hello"]


def test_relay_swallows_and_leaves_the_connection_deaf(echo: Echo) -> None:
    with Relay(echo.port) as relay, socket.create_connection(("127.0.0.1", relay.port), 0.2) as client:
        relay.swallow()
        client.sendall(b"lost")
        with pytest.raises(TimeoutError):
            client.recv(1)
        relay.ok()
        client.sendall(b"lost too")
        with pytest.raises(TimeoutError):
            client.recv(1)
        with socket.create_connection(("127.0.0.1", relay.port), 5) as other:
            other.sendall(b"x")
            assert other.recv(1) == b"x"


def test_relay_delays_and_trickles(echo: Echo) -> None:
    with Relay(echo.port) as relay, socket.create_connection(("127.0.0.1", relay.port), 10) as client:
        relay.delay(0.1)
        t_start = time.monotonic()
        client.sendall(b"x")
        assert client.recv(1) == b"x"
        assert time.monotonic() - t_start >= 0.2  # there and back
        relay.ok()
        relay.trickle(20_000)
        t_start = time.monotonic()
        client.sendall(bytes(10_000))
        left = 10_000
        while left:
            left -= len(client.recv(left))
        assert 0.35 < time.monotonic() - t_start < 5


def test_relay_refuses_and_resets(echo: Echo) -> None:
    with Relay(echo.port) as relay, socket.create_connection(("127.0.0.1", relay.port), 5) as client:
        client.sendall(b"x")
        assert client.recv(1) == b"x"
        relay.refuse()
        with socket.create_connection(("127.0.0.1", relay.port), 5) as refused:
            assert refused.recv(1) == b""
        client.sendall(b"y")
        assert client.recv(1) == b"y"
        relay.reset()
        with pytest.raises(ConnectionResetError):
            client.recv(1)
