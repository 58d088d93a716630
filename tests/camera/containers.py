"""Video files written by hand: with whatever times and packets, which a real muxer would refuse."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Literal

Codec = Literal["h264", "h265", "mjpeg"]
Container = Literal["mp4", "mov", "mkv", "ts", "avi", "raw"]

TICKS_PER_S = 90_000
# Of MP4: times of 36,000 s have to fit into 31 bits.
_MP4_DIVISOR = 10
_START_CODE = b"\0\0\0\1"


@dataclass(frozen=True, slots=True)
class Sample:
    """A packet: NAL units without their framing, or for `loose` bytes that get none. Times are of 1/90,000 s."""

    nals: tuple[bytes, ...]
    pts: int
    dts: int
    key: bool
    loose: bytes | None = None

    def framed(self, codec: Codec, annex_b: bool) -> bytes:
        if self.loose is not None:
            return self.loose
        if codec == "mjpeg":
            return b"".join(self.nals)
        return b"".join((_START_CODE if annex_b else struct.pack(">I", len(nal))) + nal for nal in self.nals)


@dataclass(frozen=True, slots=True)
class Track:
    """What a container says of its only stream. `interval` in 1/90,000 s, 0 where it declares no rate.

    `parameters` are the parameter sets that the header carries, `head` what its record begins with.
    """

    codec: Codec
    width: int
    height: int
    interval: int
    parameters: tuple[bytes, ...] = ()
    head: bytes = b""

    def record(self) -> bytes:
        """avcC or hvcC."""
        if self.codec == "mjpeg":
            return b""
        kinds: dict[int, list[bytes]] = {}
        for nal in self.parameters:
            kinds.setdefault(nal_type(self.codec, nal), []).append(nal)
        if self.codec == "h264":
            sps, pps = kinds.get(7, []), kinds.get(8, [])
            return self.head + bytes([0xE0 | len(sps)]) + _sized(sps) + bytes([len(pps)]) + _sized(pps)
        arrays = [bytes([kind]) + struct.pack(">H", len(nals)) + _sized(nals) for kind, nals in kinds.items()]
        return self.head + bytes([len(arrays)]) + b"".join(arrays)


def _sized(nals: Sequence[bytes]) -> bytes:
    return b"".join(struct.pack(">H", len(nal)) + nal for nal in nals)


def nal_type(codec: Codec, nal: bytes) -> int:
    """-1 where there is none."""
    if not nal or codec == "mjpeg":
        return -1
    return nal[0] & 0x1F if codec == "h264" else nal[0] >> 1 & 0x3F


def read_record(codec: Codec, record: bytes) -> tuple[bytes, tuple[bytes, ...]]:
    """The `head` and the `parameters` of an avcC or hvcC."""
    nals: list[bytes] = []

    def read(at: int, count: int) -> int:
        for _ in range(count):
            size = int.from_bytes(record[at : at + 2], "big")
            nals.append(record[at + 2 : at + 2 + size])
            at += 2 + size
        return at

    if codec == "h264":
        at = read(6, record[5] & 0x1F)
        read(at + 1, record[at])
        return record[:5], tuple(nals)
    at = 23
    for _ in range(record[22]):
        at = read(at + 3, int.from_bytes(record[at + 1 : at + 3], "big"))
    return record[:22], tuple(nals)


def write(container: Container, track: Track, samples: Sequence[Sample]) -> bytes:
    """The whole file."""
    lowest = min((min(sample.pts, sample.dts) for sample in samples), default=0)
    if lowest < 0:  # some containers have no times before 0
        samples = [replace(sample, pts=sample.pts - lowest, dts=sample.dts - lowest) for sample in samples]
    if container == "raw":
        return b"".join(sample.framed(track.codec, annex_b=True) for sample in samples)
    if container == "mkv":
        return _mkv(track, samples)
    if container == "ts":
        return _ts(track, samples)
    if container == "avi":
        return _avi(track, samples)
    return _mp4(track, samples, container)


# MP4 and MOV.


def _box(name: bytes, *parts: bytes) -> bytes:
    body = b"".join(parts)
    return struct.pack(">I4s", 8 + len(body), name) + body


def _full(name: bytes, version: int, *parts: bytes) -> bytes:
    return _box(name, bytes([version, 0, 0, 0]), *parts)


def _table(name: bytes, rows: Sequence[bytes], version: int = 0, before: bytes = b"") -> bytes:
    return _full(name, version, before, struct.pack(">I", len(rows)), *rows)


def _mp4(track: Track, samples: Sequence[Sample], container: Container) -> bytes:
    scale = TICKS_PER_S // _MP4_DIVISOR
    data = [sample.framed(track.codec, annex_b=False) for sample in samples]
    deltas: list[int] = []
    offsets: list[int] = []
    dts = samples[0].dts if samples else 0
    for sample, following in zip_longest(samples, samples[1:]):
        assert sample is not None
        offsets.append((sample.pts - dts) // _MP4_DIVISOR)
        # Decoding times only rise here; what does not goes into the offset.
        step = track.interval if following is None else max(0, following.dts - dts)
        deltas.append(step // _MP4_DIVISOR)
        dts += step
    duration = min(sum(deltas), 0xFFFFFFFF)
    kind = {"h264": b"avc1", "h265": b"hvc1", "mjpeg": b"jpeg" if container == "mov" else b"mp4v"}[track.codec]
    record = {"h264": b"avcC", "h265": b"hvcC"}.get(track.codec)
    entry = _box(
        kind,
        struct.pack(">6xH16xHHIIIH32xHh", 1, track.width, track.height, 0x480000, 0x480000, 0, 1, 24, -1),
        b"" if record is None else _box(record, track.record()),
    )
    matrix = struct.pack(">9I", 0x10000, 0, 0, 0, 0x10000, 0, 0, 0, 0x40000000)
    ftyp = _box(b"ftyp", b"qt  \0\0\2\0qt  " if container == "mov" else b"isom\0\0\2\0isomiso2mp41")
    tables = (
        _table(b"stsd", [entry]),
        _table(b"stts", [struct.pack(">II", 1, delta) for delta in deltas]),
        _table(b"ctts", [struct.pack(">Ii", 1, offset) for offset in offsets], version=1),
        _table(b"stss", [struct.pack(">I", at + 1) for at, sample in enumerate(samples) if sample.key]),
        _table(b"stsz", [struct.pack(">I", len(one)) for one in data], before=bytes(4)),
        _table(b"stsc", [struct.pack(">III", 1, len(data), 1)]),
        _table(b"stco", [struct.pack(">I", len(ftyp) + 8)]),
    )
    media = _box(
        b"minf",
        _full(b"vmhd", 0, bytes(8)),
        _box(b"dinf", _table(b"dref", [_box(b"url ", b"\0\0\0\1")])),
        _box(b"stbl", *tables),
    )
    size = struct.pack(">II", track.width << 16, track.height << 16)
    trak = _box(
        b"trak",
        _box(b"tkhd", b"\0\0\0\3", struct.pack(">8xI4xI16x", 1, duration), matrix, size),
        _box(
            b"mdia",
            _full(b"mdhd", 0, struct.pack(">8xIIHH", scale, duration, 0x55C4, 0)),
            _full(b"hdlr", 0, b"mhlrvide" if container == "mov" else b"\0\0\0\0vide", bytes(13)),
            media,
        ),
    )
    times = struct.pack(">8xIIIH10x", scale, duration, 0x10000, 0x100)
    return ftyp + _box(b"mdat", *data) + _box(b"moov", _full(b"mvhd", 0, times, matrix, bytes(24), b"\0\0\0\2"), trak)


# Matroska.


def _element(name: int, body: bytes | int) -> bytes:
    if isinstance(body, int):
        body = body.to_bytes(8, "big")
    head = name.to_bytes((name.bit_length() + 7) // 8, "big")
    return head + (0x0100000000000000 | len(body)).to_bytes(8, "big") + body


def _mkv(track: Track, samples: Sequence[Sample]) -> bytes:
    codec = {"h264": b"V_MPEG4/ISO/AVC", "h265": b"V_MPEGH/ISO/HEVC", "mjpeg": b"V_MJPEG"}[track.codec]
    video = _element(0xB0, track.width) + _element(0xBA, track.height)
    entry = _element(0xD7, 1) + _element(0x73C5, 1) + _element(0x83, 1) + _element(0x86, codec)
    if track.interval:
        entry += _element(0x23E383, track.interval * 1_000_000_000 // TICKS_PER_S)
    if record := track.record():
        entry += _element(0x63A2, record)
    head = _element(0x4286, 1) + _element(0x42F7, 1) + _element(0x42F2, 4) + _element(0x42F3, 8)
    head += _element(0x4282, b"matroska") + _element(0x4287, 4) + _element(0x4285, 2)
    segment = _element(0x1549A966, _element(0x2AD7B1, 1_000_000) + _element(0x4D80, b"-") + _element(0x5741, b"-"))
    segment += _element(0x1654AE6B, _element(0xAE, entry + _element(0xE0, video)))
    for sample in samples:
        block = b"\x81\0\0" + (b"\x80" if sample.key else b"\0") + sample.framed(track.codec, annex_b=False)
        segment += _element(0x1F43B675, _element(0xE7, sample.pts * 1000 // TICKS_PER_S) + _element(0xA3, block))
    return _element(0x1A45DFA3, head) + _element(0x18538067, segment)


# MPEG-TS.

_PMT_PID, _VIDEO_PID = 0x1000, 0x100
_CRC_TABLE: list[int] = []
for _byte in range(256):
    _crc = _byte << 24
    for _ in range(8):
        _crc = (_crc << 1 ^ (0x04C11DB7 if _crc & 0x80000000 else 0)) & 0xFFFFFFFF
    _CRC_TABLE.append(_crc)


def _section(table: int, number: int, body: bytes) -> bytes:
    data = struct.pack(">BHHBBB", table, 0xB000 | len(body) + 9, number, 0xC1, 0, 0) + body
    crc = 0xFFFFFFFF
    for byte in data:
        crc = (crc << 8 & 0xFFFFFFFF) ^ _CRC_TABLE[crc >> 24 ^ byte]
    return b"\0" + data + struct.pack(">I", crc)


def _stamp(prefix: int, ticks: int) -> bytes:
    ticks &= 0x1FFFFFFFF
    return struct.pack(">BHH", prefix << 4 | ticks >> 29 & 0xE | 1, ticks >> 14 & 0xFFFE | 1, ticks << 1 & 0xFFFE | 1)


def _ts(track: Track, samples: Sequence[Sample]) -> bytes:
    out = bytearray()
    counters: dict[int, int] = {}

    def packets(pid: int, payload: bytes, clock: int | None = None) -> None:
        at, first = 0, True
        while first or at < len(payload):
            field = b""
            if clock is not None and first:
                base = clock & 0x1FFFFFFFF
                field = b"\x10" + struct.pack(">IH", base >> 1, (base & 1) << 15 | 0x7E00)
            room = 183 - len(field) if field else 184
            chunk = payload[at : at + room]
            spare = room - len(chunk)
            adaptation = b""
            if field or spare:
                if not field:  # its length and its flags take two of the spare bytes, or one
                    field, spare = b"\0"[: spare - 1], max(0, spare - 2)
                adaptation = bytes([len(field) + spare]) + field + b"\xff" * spare
            counter = counters.get(pid, 0)
            counters[pid] = counter + 1 & 0xF
            flags = (0x30 if adaptation else 0x10) | counter
            out.extend(struct.pack(">BHB", 0x47, (0x4000 if first else 0) | pid, flags) + adaptation + chunk)
            at, first = at + len(chunk), False

    kind = {"h264": 0x1B, "h265": 0x24}[track.codec]
    pat = _section(0, 1, struct.pack(">HH", 1, 0xE000 | _PMT_PID))
    pmt = _section(2, 1, struct.pack(">HHBHH", 0xE000 | _VIDEO_PID, 0xF000, kind, 0xE000 | _VIDEO_PID, 0xF000))
    for number, sample in enumerate(samples):
        if number % 10 == 0:
            packets(0, pat)
            packets(_PMT_PID, pmt)
        stamps = _stamp(3, sample.pts) + _stamp(1, sample.dts)
        pes = b"\0\0\1\xe0\0\0\x80\xc0" + bytes([len(stamps)]) + stamps + sample.framed(track.codec, annex_b=True)
        packets(_VIDEO_PID, pes, sample.dts)
    return bytes(out)


# AVI: it has no times.


def _chunk(name: bytes, body: bytes) -> bytes:
    return name + struct.pack("<I", len(body)) + body + b"\0" * (len(body) % 2)


def _avi(track: Track, samples: Sequence[Sample]) -> bytes:
    data = [sample.framed(track.codec, annex_b=True) for sample in samples]
    fourcc = {"h264": b"H264", "h265": b"HEVC", "mjpeg": b"MJPG"}[track.codec]
    size, largest = (track.width, track.height), max(map(len, data), default=0)
    rate = TICKS_PER_S if track.interval else 0
    head = struct.pack("<14I", track.interval * 100 // 9, 0, 0, 0x10, len(data), 0, 1, largest, *size, 0, 0, 0, 0)
    lengths = (track.interval, rate, 0, len(data), largest)
    stream = b"vids" + fourcc + struct.pack("<12x5IiI4H", *lengths, -1, 0, 0, 0, *size)
    shape = struct.pack("<IiiHH4sIiiII", 40, *size, 1, 24, fourcc, track.width * track.height * 3, 0, 0, 0, 0)
    movi, index = b"movi", b""
    for one, sample in zip(data, samples, strict=True):
        index += b"00dc" + struct.pack("<III", 0x10 if sample.key else 0, len(movi), len(one))
        movi += _chunk(b"00dc", one)
    listed = _chunk(b"LIST", b"strl" + _chunk(b"strh", stream) + _chunk(b"strf", shape))
    header = _chunk(b"LIST", b"hdrl" + _chunk(b"avih", head) + listed)
    return _chunk(b"RIFF", b"AVI " + header + _chunk(b"LIST", movi) + _chunk(b"idx1", index))
