"""A broker that answers what a test wants: for what mosquitto cannot be brought to say."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

CONNECT, CONNACK, PUBLISH, PUBACK, SUBSCRIBE, SUBACK, PINGREQ, PINGRESP, DISCONNECT = 1, 2, 3, 4, 8, 9, 12, 13, 14


@dataclass(frozen=True, slots=True)
class Packet:
    """`kind` and `flags` are the halves of the first byte, `body` is what follows the length."""

    kind: int
    flags: int
    body: bytes

    @property
    def qos(self) -> int:
        """Of a PUBLISH."""
        return (self.flags >> 1) & 3

    @property
    def topic(self) -> str:
        """Of a PUBLISH."""
        return self.body[2 : 2 + self._topic_bytes].decode()

    @property
    def mid(self) -> int:
        """Of a PUBLISH with QoS 1 or 2."""
        return int.from_bytes(self.body[2 + self._topic_bytes : 4 + self._topic_bytes], "big")

    def properties_5(self) -> Properties:
        """Of a PUBLISH of MQTT 5."""
        found = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
        found.unpack(self.body[self._head :])  # type: ignore[no-untyped-call]
        return found

    def payload_5(self) -> bytes:
        """Of a PUBLISH of MQTT 5."""
        _, taken = Properties(PacketTypes.PUBLISH).unpack(self.body[self._head :])  # type: ignore[no-untyped-call]
        return self.body[self._head + taken :]

    @property
    def _topic_bytes(self) -> int:
        return int.from_bytes(self.body[:2], "big")

    @property
    def _head(self) -> int:
        return 2 + self._topic_bytes + (2 if self.qos else 0)


def packets(data: bytes) -> Iterator[Packet]:
    """The whole packets at the start of `data`."""
    at = 0
    while (found := _packet(data, at)) is not None:
        packet, at = found
        yield packet


def _packet(data: bytes, at: int) -> tuple[Packet, int] | None:
    length, shift, start = 0, 0, at + 1
    while True:
        if start >= len(data):
            return None
        byte = data[start]
        length |= (byte & 127) << shift
        shift, start = shift + 7, start + 1
        if not byte & 128:
            break
    if len(data) < start + length:
        return None
    return Packet(data[at] >> 4, data[at] & 15, data[start : start + length]), start + length


class ScriptedBroker:
    """Speaks MQTT 5, one client at a time, and answers a PUBLISH with QoS 1 by `code_of(topic, payload)`."""

    def __init__(self, code_of: Callable[[str, bytes], int]) -> None:
        self.host = "127.0.0.1"
        self.code_of = code_of
        self.published: list[tuple[str, bytes]] = []
        self._listener = socket.create_server((self.host, 0))
        self.port: int = self._listener.getsockname()[1]
        self._client: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="scripted-broker", daemon=True)
        self._thread.start()

    def payloads(self, topic: str) -> list[bytes]:
        return [payload for one, payload in self.published if one == topic]

    def hang_up(self, code: int | None = None) -> None:
        """Closes the client's connection, with a DISCONNECT that says why if a `code` is given."""
        if self._client is not None:
            if code is not None:
                self._client.sendall(bytes((DISCONNECT << 4, 2, code, 0)))
            with suppress(OSError):  # the client may have been quicker
                self._client.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        while True:
            try:
                self._client, _ = self._listener.accept()
            except OSError:
                return
            with self._client as client:
                try:
                    self._serve(client)
                except OSError:
                    pass

    def _serve(self, client: socket.socket) -> None:
        data = b""
        while chunk := client.recv(65536):
            data += chunk
            while (found := _packet(data, 0)) is not None:
                packet, used = found
                data = data[used:]
                if (answer := self._answer(packet)) is not None:
                    client.sendall(answer)

    def _answer(self, packet: Packet) -> bytes | None:
        if packet.kind == CONNECT:
            return bytes((CONNACK << 4, 3, 0, 0, 0))
        if packet.kind == PINGREQ:
            return bytes((PINGRESP << 4, 0))
        if packet.kind == SUBSCRIBE:
            return bytes((SUBACK << 4, 4)) + packet.body[:2] + bytes((0, 1))
        if packet.kind == PUBLISH and packet.qos == 1:
            payload = packet.payload_5()
            self.published.append((packet.topic, payload))
            return bytes((PUBACK << 4, 3)) + struct.pack("!HB", packet.mid, self.code_of(packet.topic, payload))
        return None

    def __enter__(self) -> ScriptedBroker:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.hang_up()
        self._thread.join(5)
