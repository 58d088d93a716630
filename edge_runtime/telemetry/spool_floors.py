"""Beside the spool's file: which numbers may have been used, should the file have forgotten."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_FLOORS_BYTES = 512


@dataclass(frozen=True, slots=True)
class Floors:
    """No number at or above `reserved[lane]` has ever been used. `in_memory`: numbers were given to rows that
    are not in the file, so all below may have been."""

    reserved: Mapping[str, int]
    in_memory: bool


class FloorFile:
    """Keeps `Floors` in a file of fixed size, written in place and fsynced: that works on a full disk too.

    So few bytes reach the disk whole or not at all; what is unreadable all the same counts as not there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Floors | None:
        """None where there is no such file, or nothing sensible in it."""
        try:
            found = json.loads(self.path.read_bytes())
            reserved = {str(name): int(seq) for name, seq in found["reserved"].items()}
            return Floors(reserved, bool(found["in_memory"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def write(self, floors: Floors) -> None:
        """Raises OSError."""
        text = json.dumps({"reserved": dict(floors.reserved), "in_memory": floors.in_memory})
        data = text.encode().ljust(_FLOORS_BYTES - 1) + b"\n"
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o640)
        try:
            os.pwrite(descriptor, data, 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
