"""Small files of /sys and /proc: opened once, read again and again, never waited for.

Every reading of an attribute is one pread(2) at offset 0: the kernel asks the driver anew each time. That takes 1 us
of CPU where opening, reading and closing takes 6 us; and 3 us where the value is the same as before, because then it
has to be made sure that the file still is the one at its place.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

ATTRIBUTE_BYTES = 64
"""The longest text of a number, a label or a name; real ones have some 25 bytes at most."""

_NUMBER = re.compile(rb"\s*([+-]?[0-9]{1,18})\s*(?:m[avwAVW])?\s*\Z")
_LOST = (errno.ENOENT, errno.ENODEV, errno.ENXIO, errno.ESTALE, errno.ENOTDIR)
# O_NONBLOCK: a FIFO in the place of a file is opened at once, and refused, instead of waiting for its writer
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


class UnreadableError(Exception):
    """A file that has no value now: `reason` in words. `lost`: it was there before, and has gone or lost its driver."""

    def __init__(self, reason: str, *, lost: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.lost = lost


class SysfsFile:
    """One attribute. Kept open between readings; opened anew when it was replaced or its driver came back."""

    __slots__ = ("_data", "_fd", "_seen", "_value", "path")

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1
        self._seen = False
        self._data = b""
        self._value: int | None = None

    def number(self, low: int, high: int) -> int:
        """The whole number in the file, which has to lie in low..high. Raises UnreadableError."""
        data = self._read()
        if data != self._data or self._value is None:
            self._data, self._value = data, None
            found = _NUMBER.match(data)
            if found is None:
                raise UnreadableError(f"{_shown(data)} instead of a number" if data.strip() else "empty")
            self._value = int(found[1])
        if not low <= self._value <= high:
            raise UnreadableError(f"{self._value} cannot be: outside {low}..{high}")
        return self._value

    def close(self) -> None:
        """Let go of the file; the next reading opens it again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _read(self) -> bytes:
        try:
            if self._fd < 0:
                self._fd = _open(self.path)
            data = os.pread(self._fd, ATTRIBUTE_BYTES + 1, 0)
            # no link left: somebody put another file in its place, and this one would repeat itself for ever
            if data == self._data and os.fstat(self._fd).st_nlink == 0:
                self.close()
                self._fd = _open(self.path)
                data = os.pread(self._fd, ATTRIBUTE_BYTES + 1, 0)
        except OSError as error:
            lost = self._seen and error.errno in _LOST
            if lost:
                self.close()
                self._seen = False
            raise UnreadableError(_reason(error), lost=lost) from None
        self._seen = True
        if len(data) > ATTRIBUTE_BYTES:
            raise UnreadableError(f"longer than the {ATTRIBUTE_BYTES} bytes of an attribute")
        return data


def read_number(path: Path, low: int, high: int) -> int:
    """The whole number in a file that is read rarely; see `SysfsFile.number`. Raises UnreadableError."""
    file = SysfsFile(path)
    try:
        return file.number(low, high)
    finally:
        file.close()


def read_text(path: Path, limit: int = ATTRIBUTE_BYTES) -> str:
    """A file's text without white space and NULs around it; what is no UTF-8 becomes U+FFFD.

    Raises UnreadableError, also where it is longer than `limit` bytes.
    """
    try:
        fd = _open(path)
        try:
            data = b""
            while len(data) <= limit and (more := os.read(fd, limit + 1 - len(data))):
                data += more
        finally:
            os.close(fd)
    except OSError as error:
        raise UnreadableError(_reason(error)) from None
    if len(data) > limit:
        raise UnreadableError(f"longer than {limit} bytes")
    return data.decode("utf-8", "replace").strip(" \t\r\n\0")


def folders(path: Path, start: str = "") -> list[Path]:
    """What lies in a folder and starts with `start`, in the order of the number at the end; empty without the folder.

    hwmon10 comes after hwmon9.
    """
    try:
        found = [entry for entry in path.iterdir() if entry.name.startswith(start)]
    except OSError:
        return []
    return sorted(found, key=lambda entry: _natural(entry.name))


def _natural(name: str) -> tuple[str, int, str]:
    head = name.rstrip("0123456789")
    return head, int(name[len(head) :][:18] or -1), name


def _open(path: Path) -> int:
    fd = os.open(path, _FLAGS)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise UnreadableError("not a regular file")
    return fd


def _reason(error: OSError) -> str:
    if error.errno == errno.EAGAIN:
        return "power-gated or busy (EAGAIN)"
    return f"{os.strerror(error.errno or 0)} ({errno.errorcode.get(error.errno or 0, 'no code')})"


def _shown(data: bytes) -> str:
    return repr(data[:24].decode("ascii", "replace").strip())
