"""The relay between a camera and whoever reads it: it knows RTSP, and can hold back or damage single packets."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Collection
from urllib.parse import urlsplit, urlunsplit

from tests.camera.rtp import H264_KEY as H264_KEY
from tests.camera.rtp import H264_PARAMETERS as H264_PARAMETERS
from tests.camera.rtp import H265_KEY as H265_KEY
from tests.camera.rtp import H265_PARAMETERS as H265_PARAMETERS
from tests.camera.rtp import RtpPacket as RtpPacket
from tests.camera.rtp import RtspReader, payload_of
from tests.relay import Link, Pipe, Relay


class FaultRelay(Relay):
    """Forwards RTSP, interleaved (over TCP), from a loopback port to `host:port`. `trickle` slows what goes to clients
    alone, and who is refused finds nobody listening."""

    def __init__(self, host: str, port: int) -> None:
        self._readers: weakref.WeakKeyDictionary[Link, RtspReader] = weakref.WeakKeyDictionary()
        self._dropped = 0
        self._corrupted = 0
        self._predicate: Callable[[RtpPacket], bool] | None = None
        self._corrupt: tuple[float, random.Random] | None = None
        super().__init__(port, target_host=host)

    def url_of(self, url: str) -> str:
        """The same address, through this relay."""
        parts = urlsplit(url)
        account, at, _ = parts.netloc.rpartition("@")
        return urlunsplit(parts._replace(netloc=f"{account}{at}{self.host}:{self.port}"))

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
        return self.bytes_down

    def ok(self) -> None:
        with self._lock:
            self._predicate = self._corrupt = None
        super().ok()

    def trickle(self, bytes_per_s: float, *, both_ways: bool = False) -> None:
        super().trickle(bytes_per_s, both_ways=both_ways)

    def refuse(self, *, listening: bool = False) -> None:
        super().refuse(listening=listening)

    def drop(self, predicate: Callable[[RtpPacket], bool]) -> None:
        """Hold back the RTP packets for which `predicate`, on the relay's thread, is true."""
        with self._lock:
            self._predicate = predicate

    def drop_nals(self, types: Collection[int]) -> None:
        """Hold back every packet with a NAL unit of these types, or a piece of one."""
        wanted = frozenset(types)
        self.drop(lambda packet: not wanted.isdisjoint(packet.nals))

    def corrupt(self, rate: float, seed: int = 0) -> None:
        """Flip a bit in this share of the bytes of RTP payloads, nowhere else."""
        with self._lock:
            self._corrupt = (rate, random.Random(seed))

    def arrived(self, link: Link, pipe: Pipe, data: bytes) -> bytes | bytearray:
        if pipe is link.up:
            return data
        reader = self._readers.setdefault(link, RtspReader())
        if not data:
            return reader.rest()
        forward = bytearray()
        for piece, channel in reader.pieces(data):
            if channel is not None and not self._passes(reader, piece, channel):
                self._dropped += 1
                continue
            forward += piece
        return forward

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


def _gap(rng: random.Random, rate: float) -> int:
    """Bytes that are left alone before the next one that is not."""
    count = 0
    if rate <= 0:
        return 1 << 30
    while rng.random() >= rate:
        count += 1
    return count
