"""What a packet of H.264 or H.265 says of itself in its first bytes: who depends on it, and who is missing before it.

Only the headers up to the first slice are read, which costs about 10 us. Numbers of tables are those of ITU-T H.264 and
H.265 (08/2021). Whatever cannot be read is taken as a picture that others need.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

# Parameter sets, SEI and the first slice's header lie within this, else the whole packet is read.
_HEAD_BYTES = 2048
_SLICE_BYTES = 24
# A stream in which four of five pictures seem to miss one has an encoder that cannot count; damage makes fewer seem so.
_GAPS_JUDGED = 50

_H264_IDR, _H264_SEI, _H264_SPS, _H264_PPS = 5, 6, 7, 8
_H264_HIGH_PROFILES = frozenset({100, 110, 122, 244, 44, 83, 86, 118, 128, 138, 139, 134, 135})
_SEI_RECOVERY_POINT = 6
_P, _B = 0, 1  # slice_type % 5
_H265_RASL, _H265_LAST_SUB_LAYER, _H265_VCL_END, _H265_SPS = (8, 9), 14, 32, 33


class Glance(NamedTuple):
    """`disposable`: nothing is decoded from it. `leading`: it may need a picture before the key frame that it follows.
    `gap`: a picture that it may be decoded from is missing. `refresh`: no key frame, but one from which on the picture
    is renewed bit by bit, intact after so many."""

    disposable: bool = False
    leading: bool = False
    gap: bool = False
    refresh: int = 0


PLAIN = Glance()


class _Bits:
    """Unsigned numbers out of a NAL unit's payload. Raises ValueError at its end."""

    def __init__(self, data: bytes) -> None:
        data = data.replace(b"\0\0\3", b"\0\0")
        self._word = int.from_bytes(data, "big")
        self._left = len(data) * 8

    def bits(self, count: int) -> int:
        self._left -= count
        if self._left < 0:
            raise ValueError("end of a NAL unit")
        return self._word >> self._left & ((1 << count) - 1)

    def ue(self) -> int:
        """Exp-Golomb."""
        rest = self._word & ((1 << self._left) - 1)
        zeros = self._left - rest.bit_length()
        if zeros > 32:
            raise ValueError("no number")
        self._left -= zeros
        return self.bits(zeros + 1) - 1

    def se(self) -> int:
        value = self.ue()
        return (value + 1) // 2 if value & 1 else -(value // 2)


def _annexb(data: bytes) -> Iterator[bytes]:
    at = data.find(b"\0\0\1")
    while at >= 0:
        end = data.find(b"\0\0\1", at + 3)
        yield data[at + 3 : end if end >= 0 else len(data)]
        at = end


def _prefixed(data: bytes, length_bytes: int) -> Iterator[bytes]:
    at = 0
    while at + length_bytes < len(data):
        start = at + length_bytes
        at = start + int.from_bytes(data[at:start], "big")
        yield data[start:at]


class NalReader:
    """Reads one stream's packets in decoding order. `codec`: h264 or hevc; `extradata` as the container gives it."""

    def __init__(self, codec: str, extradata: bytes | None) -> None:
        self._h264 = codec == "h264"
        self._length_bytes = 0
        self._frame_num_bits: dict[int, int] = {}  # of an SPS, where gaps are not allowed
        self._sps_of: dict[int, int] = {}  # of a PPS
        self._separate_planes: set[int] = set()
        self._fields: set[int] = set()
        self._top_layer = 0
        self._last_frame_num: int | None = None
        self._seen = self._gaps = self._refresh = 0
        self._counts, self._proven = True, False  # what frame_num says is believed; and was right for long enough
        self._parameters = False  # whether the access unit has some
        for nal in self._parameter_sets(extradata or b""):
            self._read_parameters(nal)

    def look(self, packet: memoryview) -> Glance:
        """`packet`: one access unit."""
        try:
            for size in (_HEAD_BYTES, len(packet)):
                self._refresh, self._parameters = 0, False
                data = bytes(packet[:size])
                nals = _prefixed(data, self._length_bytes) if self._length_bytes else _annexb(data)
                for nal in nals:
                    if len(nal) < 3:
                        continue
                    if self._is_slice(nal):
                        return self._look_h264(nal) if self._h264 else self._look_h265(nal)
                    self._parameters = self._parameters or (self._h264 and nal[0] & 31 == _H264_SPS)
                    self._read_parameters(nal)
                if size >= len(packet):
                    break
        except ValueError:
            pass
        return PLAIN

    def _is_slice(self, nal: bytes) -> bool:
        return 1 <= nal[0] & 31 <= _H264_IDR if self._h264 else nal[0] >> 1 & 63 < _H265_VCL_END

    def _look_h265(self, nal: bytes) -> Glance:
        kind, layer = nal[0] >> 1 & 63, (nal[1] & 7) - 1
        # Even types up to 14 are not needed within their temporal layer; higher layers may need them.
        disposable = kind <= _H265_LAST_SUB_LAYER and kind % 2 == 0 and layer >= self._top_layer
        return Glance(disposable, kind in _H265_RASL)

    def _look_h264(self, nal: bytes) -> Glance:
        reference, kind = nal[0] >> 5 & 3, nal[0] & 31
        bits = _Bits(nal[1:_SLICE_BYTES])
        bits.ue()  # first_mb_in_slice
        slice_type = bits.ue() % 5
        if kind == _H264_IDR:
            self._last_frame_num = 0
            return PLAIN
        sps = self._sps_of.get(bits.ue())
        # Parameter sets come with key frames: this one's slices are missing, and the rest went to the next picture.
        headless = self._parameters and slice_type in (_P, _B) and not self._refresh
        gap = self._is_gap(bits, sps, reference > 0, headless)
        return Glance(reference == 0, slice_type == _B, gap, self._refresh)

    def _is_gap(self, bits: _Bits, sps: int | None, reference: bool, headless: bool) -> bool:
        """H.264 7.4.3: frame_num is one more than the last reference picture's; a second field has the same again."""
        if sps is None or (size := self._frame_num_bits.get(sps)) is None:
            return False
        if sps in self._separate_planes:
            bits.bits(2)
        frame_num, last = bits.bits(size), self._last_frame_num
        if reference:
            self._last_frame_num = frame_num
            self._judge()
        follows = frame_num == (last or 0) + 1 & ((1 << size) - 1) or (frame_num == last and sps in self._fields)
        if last is None or (follows and not headless):
            return False
        self._gaps += 1
        return self._counts

    def _judge(self) -> None:
        """Another reference picture: can the encoder count? Once it has shown that it can, damage is no sign that it
        cannot; one that could not may have been damaged."""
        self._seen += 1
        if self._seen < _GAPS_JUDGED:
            return
        self._proven = self._proven or self._gaps * 5 < self._seen * 4
        self._counts = self._proven
        self._seen = self._gaps = 0

    def _parameter_sets(self, extradata: bytes) -> Iterator[bytes]:
        """Those in an avcC or hvcC record (ISO/IEC 14496-15), or in Annex B."""
        if not extradata or extradata[0] != 1:
            yield from _annexb(extradata)
        elif self._h264 and len(extradata) > 6:
            self._length_bytes = (extradata[4] & 3) + 1
            at = 5
            for mask in (31, 255):
                count, at = (extradata[at] & mask if at < len(extradata) else 0), at + 1
                for _ in range(count):
                    size = int.from_bytes(extradata[at : at + 2], "big")
                    yield extradata[at + 2 : at + 2 + size]
                    at += 2 + size
        elif len(extradata) > 22:
            self._length_bytes = (extradata[21] & 3) + 1
            at = 23
            for _ in range(extradata[22]):
                count, at = int.from_bytes(extradata[at + 1 : at + 3], "big"), at + 3
                for _ in range(count):
                    size = int.from_bytes(extradata[at : at + 2], "big")
                    if at >= len(extradata):
                        return
                    yield extradata[at + 2 : at + 2 + size]
                    at += 2 + size

    def _read_parameters(self, nal: bytes) -> None:
        try:
            if len(nal) < 4:
                pass
            elif not self._h264:
                if nal[0] >> 1 & 63 == _H265_SPS:
                    self._top_layer = nal[2] >> 1 & 7  # sps_max_sub_layers_minus1
            elif nal[0] & 31 == _H264_SPS:
                self._read_sps(nal)
            elif nal[0] & 31 == _H264_PPS:
                bits = _Bits(nal[1:_SLICE_BYTES])
                pps = bits.ue()
                self._sps_of[pps] = bits.ue()
            elif nal[0] & 31 == _H264_SEI:
                self._read_sei(nal[1:])
        except ValueError:
            pass

    def _read_sei(self, data: bytes) -> None:
        """H.264 D.1.8: a recovery point, frame_num counted from it."""
        at = 0
        while at + 2 < len(data):
            kind, at = _byte_sum(data, at)
            size, at = _byte_sum(data, at)
            if kind == _SEI_RECOVERY_POINT:
                self._refresh = _Bits(data[at : at + size]).ue()
                return
            at += size

    def _read_sps(self, nal: bytes) -> None:
        """H.264 7.3.2.1.1, as far as frame_mbs_only_flag."""
        bits = _Bits(nal[4:])
        sps, planes = bits.ue(), False
        if nal[1] in _H264_HIGH_PROFILES:
            chroma = bits.ue()
            planes = chroma == 3 and bits.bits(1) == 1
            bits.ue(), bits.ue(), bits.bits(1)
            if bits.bits(1):
                for index in range(12 if chroma == 3 else 8):
                    if bits.bits(1):
                        _skip_scaling_list(bits, 16 if index < 6 else 64)
        size = bits.ue() + 4
        order = bits.ue()
        if order == 0:
            bits.ue()
        elif order == 1:
            bits.bits(1), bits.se(), bits.se()
            for _ in range(bits.ue()):
                bits.se()
        bits.ue()  # max_num_ref_frames
        self._frame_num_bits.pop(sps, None)
        if not bits.bits(1) and size <= 16:  # gaps_in_frame_num_value_allowed_flag
            self._frame_num_bits[sps] = size
        bits.ue(), bits.ue()  # the size in macroblocks
        (self._fields.discard if bits.bits(1) else self._fields.add)(sps)  # frame_mbs_only_flag
        (self._separate_planes.add if planes else self._separate_planes.discard)(sps)


def _byte_sum(data: bytes, at: int) -> tuple[int, int]:
    """A number of an SEI message, and where it ends."""
    total = 0
    while at < len(data) and data[at] == 255:
        total, at = total + 255, at + 1
    return total + (data[at] if at < len(data) else 0), at + 1


def _skip_scaling_list(bits: _Bits, size: int) -> None:
    last, following = 8, 8
    for _ in range(size):
        if following:
            following = (last + bits.se()) % 256
        last = following or last
