"""What the relay has to know of RTSP over TCP: where RTP packets begin, and which NAL units they hold."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

H264_IDR = frozenset({5})
H264_PARAMETERS = frozenset({7, 8})
H264_KEY = H264_IDR | H264_PARAMETERS
H265_IDR = frozenset(range(16, 22))
H265_PARAMETERS = frozenset({32, 33, 34})
H265_KEY = H265_IDR | H265_PARAMETERS

_RTP_HEADER_BYTES = 12


@dataclass(frozen=True, slots=True)
class RtpPacket:
    """An RTP packet on its way to the client. `codec` is the SDP's name, upper case; empty where unknown."""

    channel: int
    codec: str
    payload_type: int
    marker: bool
    sequence: int
    timestamp: int
    payload: memoryview

    @property
    def nals(self) -> frozenset[int]:
        """The types of the NAL units that it has, whole or in part. Empty for other codecs."""
        data = self.payload
        if self.codec == "H264" and len(data) >= 2:
            return _h264_nals(data)
        if self.codec == "H265" and len(data) >= 3:
            return _h265_nals(data)
        return frozenset()


def _h264_nals(data: memoryview) -> frozenset[int]:
    kind = data[0] & 0x1F
    if kind == 24:  # STAP-A
        return frozenset(data[at] & 0x1F for at in _aggregated(data, 1))
    if kind in (28, 29):  # FU-A, FU-B
        return frozenset({data[1] & 0x1F})
    return frozenset({kind})


def _h265_nals(data: memoryview) -> frozenset[int]:
    kind = data[0] >> 1 & 0x3F
    if kind == 48:  # an aggregation packet
        return frozenset(data[at] >> 1 & 0x3F for at in _aggregated(data, 2))
    if kind == 49:  # a fragment
        return frozenset({data[2] & 0x3F})
    return frozenset({kind})


def _aggregated(data: memoryview, at: int) -> list[int]:
    """Where the NAL units of an aggregation begin."""
    starts = []
    while at + 2 < len(data):
        starts.append(at + 2)
        at += 2 + int.from_bytes(data[at : at + 2], "big")
    return starts


class RtspReader:
    """Cuts what an RTSP server sends into messages and interleaved packets; anything else passes as it is."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._raw = False
        self._codecs: dict[int, str] = {26: "JPEG"}

    def pieces(self, data: bytes) -> list[tuple[bytearray, int | None]]:
        """The pieces that are complete: bytes, and the channel of those that are an interleaved packet."""
        self._held += data
        pieces: list[tuple[bytearray, int | None]] = []
        while self._held:
            length, channel = self._next()
            if length is None or length > len(self._held):
                break
            piece = self._held[:length]
            del self._held[:length]
            if channel is None and not self._raw:
                self._read_sdp(piece)
            pieces.append((piece, channel))
        return pieces

    def rest(self) -> bytearray:
        rest, self._held = self._held, bytearray()
        return rest

    def packet(self, piece: bytearray, channel: int) -> RtpPacket | None:
        """None where it is no RTP: RTCP, on the odd channels, and whatever is too short."""
        start, end = payload_of(piece)
        if channel % 2 or start >= end:
            return None
        kind, sequence, timestamp = struct.unpack_from(">xBHI", piece, 4)
        codec = self._codecs.get(kind & 0x7F, "")
        payload = memoryview(bytes(piece))[start:end]
        return RtpPacket(channel, codec, kind & 0x7F, bool(kind & 0x80), sequence, timestamp, payload)

    def _next(self) -> tuple[int | None, int | None]:
        held = self._held
        if self._raw:
            return len(held), None
        if held[0] == 0x24:
            return (4 + int.from_bytes(held[2:4], "big"), held[1]) if len(held) >= 4 else (None, None)
        if not held.startswith(b"RTSP/"[: len(held)]) and not re.match(rb"(?!HTTP)[A-Z_]{1,16}( |$)", held):
            self._raw = True  # HTTP, TLS
            return len(held), None
        end = held.find(b"\r\n\r\n")
        if end < 0:
            return None, None
        length = re.search(rb"(?im)^content-length:\s*(\d+)", held[:end])
        return end + 4 + (int(length[1]) if length else 0), None

    def _read_sdp(self, message: bytearray) -> None:
        for kind, codec in re.findall(rb"(?m)^a=rtpmap:(\d+) ([^/\s]+)/", message):
            self._codecs[int(kind)] = codec.decode("ascii", "replace").upper()


def payload_of(piece: bytearray) -> tuple[int, int]:
    """Where the payload of an interleaved RTP packet begins and ends; the same twice where there is none."""
    if len(piece) < 4 + _RTP_HEADER_BYTES:
        return 0, 0
    start = 4 + _RTP_HEADER_BYTES + 4 * (piece[4] & 0x0F)
    if piece[4] & 0x10 and len(piece) >= start + 4:
        start += 4 + 4 * int.from_bytes(piece[start + 2 : start + 4], "big")
    end = len(piece)
    if piece[4] & 0x20:
        end -= piece[-1]
    return (start, end) if start < end else (0, 0)
