"""Files that are kept from GStreamer, which does not survive them well. Pure but for `refusal`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_EBML = b"\x1a\x45\xdf\xa3"
_DOC_TYPE, _DOC_TYPE_READ_VERSION = 0x4282, 0x4285
_KNOWN = ("", "matroska", "webm")
_NEWEST = 2
_HEADER_BYTES = 4096


def refusal(path: Path) -> str | None:
    """Why this file is not to be given to GStreamer, None where it may be. Raises OSError."""
    with path.open("rb") as file:
        return refused_header(file.read(_HEADER_BYTES))


def refused_header(head: bytes) -> str | None:
    """Why a file that begins with `head` is not to be read.

    matroskademux (seen in 1.22) tells of a document that it does not know by an error on behalf of something that is
    no element: GLib complains, and follows whatever pointer lies there.
    """
    if not head.startswith(_EBML):
        return None
    for name, value in _elements(head):
        if name == _DOC_TYPE:
            kind = value.split(b"\0")[0].decode("ascii", "backslashreplace")
            if kind not in _KNOWN:
                return f"it is of the kind {kind[:32]!r}, and no Matroska or WebM file"
        if name == _DOC_TYPE_READ_VERSION and int.from_bytes(value, "big") > _NEWEST:
            return f"its Matroska is of version {int.from_bytes(value[-8:], 'big')}, and {_NEWEST} is read"
    return None


def _elements(head: bytes) -> Iterator[tuple[int, bytes]]:
    """(id, content) of what the EBML header holds, as far as it is there."""
    at = len(_EBML)
    size, at = _number(head, at, keep_length=False)
    end = min(len(head), at + size)
    while at < end:
        name, at = _number(head, at, keep_length=True)
        size, at = _number(head, at, keep_length=False)
        yield name, head[at : at + size]
        at += size


def _number(head: bytes, at: int, *, keep_length: bool) -> tuple[int, int]:
    """(an EBML number of variable length, where it ends); ids keep the bits that tell their length."""
    first = head[at] if at < len(head) else 0
    length = 9 - first.bit_length()
    value = int.from_bytes(head[at : at + length], "big")
    return (value if keep_length else value & ((1 << (7 * length)) - 1)), at + length
