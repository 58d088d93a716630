"""Beside the spool's file: which numbers may have been used, should the file have forgotten."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

log = logging.getLogger(__name__)

_FLOORS_BYTES = 512
_RESERVE = 1000


@dataclass(frozen=True, slots=True)
class Floors:
    """No number at or above `reserved[lane]` has ever been used. `in_memory`: numbers were given to rows that
    are not in the file, so all below may have been. All numbers below `settled[lane]` were delivered, or are
    known to be lost by whoever reads."""

    reserved: Mapping[str, int]
    in_memory: bool
    settled: Mapping[str, int] = field(default_factory=dict)


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
            settled = {str(name): int(seq) for name, seq in found.get("settled", {}).items()}
            return Floors(reserved, bool(found["in_memory"]), settled)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def write(self, floors: Floors) -> None:
        """Raises OSError."""
        text = json.dumps(
            {"reserved": dict(floors.reserved), "in_memory": floors.in_memory, "settled": dict(floors.settled)}
        )
        data = text.encode().ljust(_FLOORS_BYTES - 1) + b"\n"
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o640)
        try:
            os.pwrite(descriptor, data, 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class Reserve:
    """Keeps the numbers that are about to be used below what is noted beside the file. Raises nothing."""

    def __init__(self, path: Path) -> None:
        self._file = FloorFile(path)
        self._reserved: dict[str, int] = {}
        self._settled: dict[str, int] = {}
        self._failing = False
        self.in_memory = False

    @property
    def path(self) -> Path:
        return self._file.path

    def read(self) -> Floors | None:
        """What an earlier session, or this one, has noted."""
        floors = self._file.read()
        if floors is not None:
            self._settled = {**floors.settled, **self._settled}
        return floors

    def keep(
        self, used: Mapping[str, int], settled: Callable[[], Mapping[str, int]] = dict, *, force: bool = False
    ) -> None:
        """Note more, if less than is needed lies above `used` (the next numbers). `settled` tells what is news."""
        if not force and all(seq < self._reserved.get(name, 0) for name, seq in used.items()):
            return
        # all at once, since the file is written as a whole; a lane that needs none keeps its own
        reserved = {name: max(self._reserved.get(name, 0), seq + _RESERVE) for name, seq in used.items()}
        self._settled.update(settled())
        try:
            self._file.write(Floors(reserved, self.in_memory, self._settled))
        except OSError as error:
            if not self._failing:
                log.warning("spool: no numbers could be reserved, which is tried again: %s", error)
            self._failing = True
            return
        self._reserved, self._failing = reserved, False
