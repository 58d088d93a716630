"""A TCP relay with faults, to stand between a camera and whoever reads it."""

from __future__ import annotations

import random
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from urllib.parse import urlsplit, urlunsplit

from tests.camera.rtp import H264_KEY as H264_KEY
from tests.camera.rtp import H264_PARAMETERS as H264_PARAMETERS
from tests.camera.rtp import H265_KEY as H265_KEY
from tests.camera.rtp import H265_PARAMETERS as H265_PARAMETERS
from tests.camera.rtp import RtpPacket as RtpPacket
from tests.camera.rtp import RtspReader, payload_of

_READ_BYTES = 65536
# What is read ahead of a slow receiver.
_HELD_BYTES = 262144


@dataclass(eq=False, slots=True)
class _Link:
    """A client's connection and the server's that belongs to it."""

    client: socket.socket
    server: socket.socket
    reader: RtspReader = field(default_factory=RtspReader)
    to_client: bytearray = field(default_factory=bytearray)
    to_server: bytearray = field(default_factory=bytearray)
    client_ended: bool = False
    server_ended: bool = False
    bytes_left: int | None = None
    t_may_send_s: float = 0.0


class FaultRelay:
    """Forwards TCP from a loopback port to `host:port`, with faults that are switched while it runs.

    Faults add up until `ok()`. The port stays the same. One thread does everything; a switch is in force when the
    call returns. RTSP has to be interleaved (over TCP) to come through.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self.host = "127.0.0.1"
        self._lock = threading.RLock()
        self._listener: socket.socket | None = None
        self.port = 0
        self._links: dict[socket.socket, _Link] = {}
        self._accepted = 0
        self._dropped = 0
        self._corrupted = 0
        self._forwarded_bytes = 0
        self._frozen = False
        self._ending = False
        self._bytes_per_s: float | None = None
        self._cut_bytes: int | None = None
        self._predicate: Callable[[RtpPacket], bool] | None = None
        self._corrupt: tuple[float, random.Random] | None = None
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_out.setblocking(False)
        self._listen()
        self._thread = threading.Thread(target=self._run, name=f"relay-{self.port}", daemon=True)
        self._thread.start()

    def url_of(self, url: str) -> str:
        """The same address, through this relay."""
        parts = urlsplit(url)
        account, at, _ = parts.netloc.rpartition("@")
        return urlunsplit(parts._replace(netloc=f"{account}{at}{self.host}:{self.port}"))

    @property
    def connections(self) -> int:
        """Open now. Frozen, it does not notice that one is gone."""
        with self._lock:
            return len({id(link) for link in self._links.values()})

    @property
    def accepted(self) -> int:
        """Connections since the start."""
        with self._lock:
            return self._accepted

    @property
    def dropped(self) -> int:
        """RTP packets that `drop` held back since the start."""
        with self._lock:
            return self._dropped

    @property
    def corrupted(self) -> int:
        """Bits that `corrupt` flipped since the start."""
        with self._lock:
            return self._corrupted

    @property
    def forwarded_bytes(self) -> int:
        """Bytes sent to clients since the start."""
        with self._lock:
            return self._forwarded_bytes

    def ok(self) -> None:
        """No faults any more."""
        with self._switch():
            self._frozen = False
            self._bytes_per_s = self._cut_bytes = self._predicate = self._corrupt = None
            for link in self._links.values():
                link.bytes_left = None
            if self._listener is None:
                self._listen()

    def refuse(self) -> None:
        """New connections are refused. Those that are open stay: see `reset`."""
        with self._switch():
            if self._listener is not None:
                self._listener.close()
                self._listener = None

    def reset(self) -> None:
        """RST to everybody who is connected, once."""
        with self._switch():
            for link in {id(link): link for link in self._links.values()}.values():
                self._close(link, reset=True)

    def freeze(self) -> None:
        """Connections stay open, new ones are accepted, nothing is read or forwarded."""
        with self._switch():
            self._frozen = True

    def trickle(self, bytes_per_s: float) -> None:
        """This much to each client, in small pieces, the rest waits; all of it goes to the server."""
        with self._switch():
            self._bytes_per_s = bytes_per_s

    def cut_after(self, n_bytes: int) -> None:
        """Close each connection, also the new ones, after so many more bytes to its client."""
        with self._switch():
            self._cut_bytes = n_bytes
            for link in self._links.values():
                link.bytes_left = n_bytes

    def drop(self, predicate: Callable[[RtpPacket], bool]) -> None:
        """Hold back the RTP packets for which `predicate`, on the relay's thread, is true."""
        with self._switch():
            self._predicate = predicate

    def drop_nals(self, types: Collection[int]) -> None:
        """Hold back every packet with a NAL unit of these types, or a piece of one."""
        wanted = frozenset(types)
        self.drop(lambda packet: not wanted.isdisjoint(packet.nals))

    def corrupt(self, rate: float, seed: int = 0) -> None:
        """Flip a bit in this share of the bytes of RTP payloads, nowhere else."""
        with self._switch():
            self._corrupt = (rate, random.Random(seed))

    def close(self) -> None:
        with self._switch():
            self._ending = True
        self._thread.join(10)
        assert not self._thread.is_alive(), "the relay does not end"

    def __enter__(self) -> FaultRelay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _switch(self) -> _Switch:
        return _Switch(self._lock, self._wake_out)

    def _listen(self) -> None:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((self.host, self.port))
        listener.listen(64)
        listener.setblocking(False)
        self.port = listener.getsockname()[1]
        self._listener = listener

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
                continue
            is_client = end is link.client
            ended = link.client_ended if is_client else link.server_ended
            events = 0
            if not ended and len(link.to_server if is_client else link.to_client) < _HELD_BYTES:
                events |= selectors.EVENT_READ
            if link.to_client if is_client else link.to_server:
                if is_client and self._bytes_per_s is not None and link.t_may_send_s > now_s:
                    wait_s = link.t_may_send_s - now_s
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
            try:
                if events & selectors.EVENT_READ:
                    self._receive(link, end)
                if events & selectors.EVENT_WRITE and end in self._links:
                    self._send(link, end)
            except BlockingIOError:
                pass
            except OSError:
                self._close(link)
            if end in self._links and (link.client_ended or link.server_ended):
                self._end_when_sent(link)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            client, _ = self._listener.accept()
        except BlockingIOError:
            return
        self._accepted += 1
        try:
            server = socket.create_connection(self._target, timeout=5)
        except OSError:
            client.close()
            return
        for end in (client, server):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = _Link(client, server, bytes_left=self._cut_bytes)
        self._links[client] = self._links[server] = link

    def _receive(self, link: _Link, end: socket.socket) -> None:
        data = end.recv(_READ_BYTES)
        if end is link.client:
            link.to_server += data
            link.client_ended = not data
            return
        if not data:
            link.server_ended = True
            link.to_client += link.reader.rest()
            return
        for piece, channel in link.reader.pieces(data):
            if channel is not None and not self._passes(link.reader, piece, channel):
                self._dropped += 1
                continue
            link.to_client += piece

    def _passes(self, reader: RtspReader, piece: bytearray, channel: int) -> bool:
        if self._predicate is None and self._corrupt is None:
            return True
        packet = reader.packet(piece, channel)
        if packet is None:
            return True
        if self._predicate is not None and self._predicate(packet):
            return False
        if self._corrupt is not None:
            rate, rng = self._corrupt
            start, end = payload_of(piece)
            at = start + _gap(rng, rate)
            while at < end:
                piece[at] ^= 1 << rng.randrange(8)
                self._corrupted += 1
                at += 1 + _gap(rng, rate)
        return True

    def _send(self, link: _Link, end: socket.socket) -> None:
        if end is link.server:
            del link.to_server[: end.send(link.to_server)]
            return
        chunk = len(link.to_client)
        if self._bytes_per_s is not None:
            chunk = min(chunk, max(1, int(self._bytes_per_s / 50)))
        if link.bytes_left is not None:
            chunk = min(chunk, link.bytes_left)
        sent = end.send(memoryview(link.to_client)[:chunk].tobytes())
        del link.to_client[:sent]
        self._forwarded_bytes += sent
        if self._bytes_per_s is not None:
            link.t_may_send_s = max(link.t_may_send_s, time.monotonic() - 0.1) + sent / self._bytes_per_s
        if link.bytes_left is not None:
            link.bytes_left -= sent
            if link.bytes_left <= 0:
                self._close(link)

    def _end_when_sent(self, link: _Link) -> None:
        if (link.server_ended and not link.to_client) or (link.client_ended and not link.to_server):
            self._close(link)

    def _close(self, link: _Link, *, reset: bool = False) -> None:
        if reset:
            link.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        for end in (link.client, link.server):
            self._links.pop(end, None)
            end.close()


class _Switch:
    """The relay's lock; when it is given back, the thread looks at everything again."""

    def __init__(self, lock: threading.RLock, wake: socket.socket) -> None:
        self._lock = lock
        self._wake = wake

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        try:
            self._wake.send(b".")
        except OSError:
            pass  # full: it is awake; closed: it has ended


def _gap(rng: random.Random, rate: float) -> int:
    """Bytes that are left alone before the next one that is not."""
    count = 0
    if rate <= 0:
        return 1 << 30
    while rng.random() >= rate:
        count += 1
    return count
