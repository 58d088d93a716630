"""What the spool holds: lanes with limits, and rows, in memory and as they are written, and what changes them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ROW_OVERHEAD_BYTES = 64
"""What a row takes on disk beside its topic and payload, roughly. The file's triggers have it too."""

_SEQ_BITS = 48
_WORTH_BYTES = 512
_PLAIN, _ZLIB = 0, 1


@dataclass(frozen=True, slots=True)
class LaneLimits:
    """A lane and what it may hold, 1 or more each: rows, bytes (as stored), and seconds since a row was put (None:
    any). When a limit is passed, the oldest rows go."""

    name: str
    max_rows: int
    max_bytes: int
    max_age_s: float | None = None


@dataclass(frozen=True, slots=True)
class SpoolRow:
    """A message with its number; `payload` contains that number already. `t_s`: when it was put, in seconds of the
    spool's timeline."""

    seq: int
    topic: str
    payload: bytes
    t_s: int = 0

    @property
    def size_bytes(self) -> int:
        return ROW_OVERHEAD_BYTES + len(self.topic.encode()) + len(self.payload)


@dataclass(frozen=True, slots=True)
class PreviousSession:
    """The start before this one. `clean`: it closed the spool. `last_seq`: the last number per lane, without the
    lanes that never had one. `last_utc`: its last commit, by its own wall clock; `synced`: that was synchronised."""

    session: str
    boot: str
    clean: bool
    last_seq: Mapping[str, int]
    t_open_utc: str
    last_utc: str
    synced: bool = True


@dataclass(slots=True)
class LaneChanges:
    """What one transaction does to one lane."""

    next_seq: int
    added: Sequence[SpoolRow] = ()
    deleted: Sequence[int] = ()
    refused: Sequence[tuple[int, str]] = ()


def first_id(lane: int) -> int:
    """Ids grow with the number and lie apart for each lane, so that the table needs no other index."""
    return lane << _SEQ_BITS


def row_id(lane: int, seq: int) -> int:
    return lane << _SEQ_BITS | seq


def seq_of(found_id: int) -> int:
    return found_id & ((1 << _SEQ_BITS) - 1)


def pack(payload: bytes) -> tuple[int, bytes]:
    """The form and the bytes that are written: a window report is a third in size, and so is the wear of the disk."""
    if len(payload) > _WORTH_BYTES:
        packed = zlib.compress(payload)
        if len(packed) < len(payload):
            return _ZLIB, packed
    return _PLAIN, payload


def unpack(form: int, packed: bytes) -> bytes:
    """Raises ValueError and zlib.error for what `pack` did not write."""
    if form == _ZLIB:
        return zlib.decompress(packed)
    if form != _PLAIN:
        raise ValueError(f"a row is of form {form}, which this program does not know")
    return bytes(packed)
