"""A TCP relay with faults, to stand between a client and its server; tests/camera/relay.py knows RTSP as well."""

from __future__ import annotations

import os
import selectors
import socket
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass, field

from typing_extensions import Self

_READ_BYTES = 65536
# What is read ahead of a slow receiver; beyond it the sender's TCP window closes, as on a slow line.
_HELD_BYTES = 262144


@dataclass(eq=False, slots=True)
class Pipe:
    """One direction of a connection: what was read from `source` and waits for `sink`."""

    source: socket.socket
    sink: socket.socket
    held: deque[tuple[float, memoryview]] = field(default_factory=deque)
    held_bytes: int = 0
    t_may_send_s: float = 0.0
    ended: bool = False
    seen: bytearray = field(default_factory=bytearray)


@dataclass(eq=False)
class Link:
    """A client's connection and the server's that belongs to it. `deaf`: bytes of it were swallowed. `bytes_left`: so
    many more go to its client before it is cut."""

    up: Pipe
    down: Pipe
    deaf: bool = False
    bytes_left: int | None = None

    @property
    def client(self) -> socket.socket:
        return self.up.source

    @property
    def server(self) -> socket.socket:
        return self.down.source


class Relay:
    """Forwards TCP from a loopback port to `target_host:target_port`, with faults that are switched while it runs.

    Faults add up until `ok()`. The port stays the same. One thread does everything; a switch is in force when the
    call returns. With `record`, every byte that was read is kept, per connection.
    """

    def __init__(self, target_port: int, *, target_host: str = "127.0.0.1", record: bool = False) -> None:
        self._target = (target_host, target_port)
        self._record = record
        self.host = "127.0.0.1"
        self._lock = threading.RLock()
        self._links: dict[socket.socket, Link] = {}
        self._all: list[Link] = []
        self._accepted = 0
        self._bytes_up = 0
        self._bytes_down = 0
        self._swallowing = False
        self._refusing = False
        self._noise = False
        self._frozen = False
        self._delay_s = 0.0
        self._bytes_per_s: float | None = None
        self._slow_up = True
        self._cut_bytes: int | None = None
        self._ending = False
        self._listener: socket.socket | None = None
        self.port = 0
        self._listen()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._thread = threading.Thread(target=self._run, name=f"relay-{self.port}", daemon=True)
        self._thread.start()

    # ---- what passed

    @property
    def connections(self) -> int:
        """Open now. Frozen, it does not notice that one is gone."""
        with self._lock:
            return len(self._links) // 2

    @property
    def accepted(self) -> int:
        """Connections since the start, those that were closed at once included."""
        with self._lock:
            return self._accepted

    @property
    def bytes_up(self) -> int:
        """Bytes forwarded to the server since the start."""
        with self._lock:
            return self._bytes_up

    @property
    def bytes_down(self) -> int:
        """Bytes forwarded to clients since the start."""
        with self._lock:
            return self._bytes_down

    def recorded(self, *, client_to_server: bool = True) -> list[bytes]:
        """What was read from the client (or from the server), one entry per connection in the order they came."""
        assert self._record, "made without record=True"
        with self._lock:
            return [bytes((link.up if client_to_server else link.down).seen) for link in self._all]

    # ---- switches

    def ok(self) -> None:
        """No faults any more. A connection of which bytes were swallowed stays deaf until an end closes it:
        TCP loses no bytes in the middle."""
        with self._lock:
            self._swallowing = self._refusing = self._noise = self._frozen = False
            self._delay_s = 0.0
            self._bytes_per_s = self._cut_bytes = None
            for link in self._links.values():
                link.bytes_left = None
            if self._listener is None:
                self._listen()
        self._wake()

    def swallow(self) -> None:
        """Connections stay open and new ones are accepted; what arrives from either end is read and dropped."""
        with self._lock:
            self._swallowing = True
            for link in self._links.values():
                _deafen(link)
        self._wake()

    def delay(self, seconds: float) -> None:
        """Every byte, in both directions, comes so much later."""
        with self._lock:
            self._delay_s = seconds
        self._wake()

    def trickle(self, bytes_per_s: float, *, both_ways: bool = True) -> None:
        """At most this much, in small pieces, in each direction of each connection; or to its client only."""
        with self._lock:
            self._bytes_per_s, self._slow_up = bytes_per_s, both_ways
        self._wake()

    def freeze(self) -> None:
        """Connections stay open, new ones are accepted, nothing is read or forwarded."""
        with self._lock:
            self._frozen = True
        self._wake()

    def cut_after(self, n_bytes: int) -> None:
        """Close each connection, also the new ones, after so many more bytes to its client."""
        with self._lock:
            self._cut_bytes = n_bytes
            for link in self._links.values():
                link.bytes_left = n_bytes
        self._wake()

    def refuse(self, *, listening: bool = True) -> None:
        """New connections are closed at once; or, not `listening`, refused. Those that are open stay: see `reset`."""
        with self._lock:
            self._refusing = True
            if not listening and self._listener is not None:
                self._listener.close()
                self._listener = None
        self._wake()

    def noise(self) -> None:
        """What the server sends is replaced by random bytes, as many."""
        with self._lock:
            self._noise = True
        self._wake()

    def reset(self) -> None:
        """RST to both ends of every connection, once."""
        with self._lock:
            for link in {id(link): link for link in self._links.values()}.values():
                self._close(link, reset=True)
        self._wake()

    def close(self) -> None:
        with self._lock:
            self._ending = True
        self._wake()
        self._thread.join(10)
        assert not self._thread.is_alive(), "the relay does not end"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- what a relay that knows the protocol does otherwise; on the relay's thread, with the lock held

    def arrived(self, link: Link, pipe: Pipe, data: bytes) -> bytes | bytearray:
        """What is to be forwarded now of what was read; `data` is empty at the end of it."""
        return os.urandom(len(data)) if self._noise and pipe is link.down else data

    # ---- the relay's thread

    def _listen(self) -> None:
        self._listener = socket.create_server((self.host, self.port), backlog=512)
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]

    def _wake(self) -> None:
        try:
            self._wake_out.send(b".")
        except OSError:
            pass  # full: it is awake; closed: it has ended

    def _run(self) -> None:
        try:
            while True:
                with self._lock:
                    if self._ending:
                        return
                    selector, timeout_s = self._interests()
                with selector:
                    ready = selector.select(timeout_s)
                with self._lock:
                    for key, events in ready:
                        self._serve(key.fileobj, events)
        finally:
            with self._lock:
                for link in {id(link): link for link in self._links.values()}.values():
                    self._close(link)
                if self._listener is not None:
                    self._listener.close()
                self._wake_in.close()
                self._wake_out.close()

    def _interests(self) -> tuple[selectors.BaseSelector, float | None]:
        """What to wait for, and for how long."""
        selector = selectors.DefaultSelector()
        selector.register(self._wake_in, selectors.EVENT_READ)
        if self._listener is not None:
            selector.register(self._listener, selectors.EVENT_READ)
        timeout_s: float | None = None
        now_s = time.monotonic()
        for end, link in self._links.items():
            if self._frozen:
                break
            reads, writes = (link.up, link.down) if end is link.client else (link.down, link.up)
            events = 0
            if not reads.ended and reads.held_bytes < _HELD_BYTES:
                events |= selectors.EVENT_READ
            if writes.held:
                wait_s = max(writes.held[0][0], writes.t_may_send_s) - now_s
                if wait_s > 0:
                    timeout_s = wait_s if timeout_s is None else min(timeout_s, wait_s)
                else:
                    events |= selectors.EVENT_WRITE
            if events:
                selector.register(end, events)
        return selector, timeout_s

    def _serve(self, end: object, events: int) -> None:
        if end is self._wake_in:
            self._wake_in.recv(4096)
        elif end is self._listener:
            self._accept()
        elif isinstance(end, socket.socket) and (link := self._links.get(end)) is not None and not self._frozen:
            reads, writes = (link.up, link.down) if end is link.client else (link.down, link.up)
            try:
                if events & selectors.EVENT_READ:
                    self._receive(link, reads)
                if events & selectors.EVENT_WRITE and end in self._links:
                    self._send(link, writes)
            except BlockingIOError:
                pass
            except OSError:
                self._close(link)
            if end in self._links:
                self._end_when_sent(link)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            client, _ = self._listener.accept()
        except OSError:
            return  # it went away before its turn
        self._accepted += 1
        if self._refusing:
            client.close()
            return
        try:
            server = socket.create_connection(self._target, timeout=5)
        except OSError:
            client.close()
            return
        for end in (client, server):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        up, down = Pipe(client, server), Pipe(server, client)
        link = Link(up, down, deaf=self._swallowing, bytes_left=self._cut_bytes)
        self._links[client] = self._links[server] = link
        if self._record:
            self._all.append(link)

    def _receive(self, link: Link, pipe: Pipe) -> None:
        data = pipe.source.recv(_READ_BYTES)
        pipe.ended = not data
        if self._record:
            pipe.seen += data
        if not link.deaf and (forward := self.arrived(link, pipe, data)):
            pipe.held.append((time.monotonic() + self._delay_s, memoryview(forward)))
            pipe.held_bytes += len(forward)

    def _send(self, link: Link, pipe: Pipe) -> None:
        if not pipe.held:
            return
        is_down = pipe is link.down
        rate = self._bytes_per_s if is_down or self._slow_up else None
        t_due_s, data = pipe.held.popleft()
        limit = len(data) if rate is None else max(1, int(rate / 50))
        if is_down and link.bytes_left is not None:
            limit = min(limit, link.bytes_left)
        sent = 0
        try:
            sent = pipe.sink.send(data[:limit])
        finally:
            if sent < len(data):
                pipe.held.appendleft((t_due_s, data[sent:]))
            pipe.held_bytes -= sent
        if is_down:
            self._bytes_down += sent
        else:
            self._bytes_up += sent
        if rate is not None:
            pipe.t_may_send_s = max(pipe.t_may_send_s, time.monotonic() - 0.1) + sent / rate
        if is_down and link.bytes_left is not None:
            link.bytes_left -= sent
            if link.bytes_left <= 0:
                self._close(link)

    def _end_when_sent(self, link: Link) -> None:
        # Of a deaf connection only the client's end is heard: the server may go, the client does not learn it.
        if (link.up.ended and not link.up.held) or (link.down.ended and not link.down.held and not link.deaf):
            self._close(link)

    def _close(self, link: Link, *, reset: bool = False) -> None:
        for end in (link.client, link.server):
            if reset:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._links.pop(end, None)
            end.close()


def _deafen(link: Link) -> None:
    link.deaf = True
    for pipe in (link.up, link.down):
        pipe.held.clear()
        pipe.held_bytes = 0
