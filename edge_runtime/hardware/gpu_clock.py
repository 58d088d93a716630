"""The highest clock of the GPU: its devfreq device, found by name, capped and given back.

The file that caps is root's. The daemon is not: it asks the helper (gpu_clock_helper.py), through gpu_clock_client.py.
"""

from __future__ import annotations

import errno
import math
import os
import time
from contextlib import suppress
from pathlib import Path

from edge_runtime.hardware.modules import MODULES
from edge_runtime.hardware.nvpmodel import read_mode
from edge_runtime.hardware.sysfs_board import gpu_by
from edge_runtime.hardware.sysfs_files import UnreadableError, folders, read_number, read_text

SOCKET = Path("/run/edge-runtime-clock/clock.sock")
NOTE = Path("/run/edge-runtime-clock/capped")
LEASE_S = 5.0
"""A cap that was not asked for again for this long is taken away."""
MAX_LINE_BYTES = 64
MODE_SETTLES_S = 10.0
"""A power mode that is switched writes the clock, and that it was switched, in an order and a time of its own."""

_ROOT = Path("/")
_NAMES = tuple(dict.fromkeys(name for module in MODULES for name in module.gpu_names))
_MAX_HZ = 10_000_000_000
_STEPS_BYTES = 4096


class GpuClock:
    """Implements ClockControl over the files below `root`; to cap takes the right to write them.

    `note`: a file that keeps what was there before a cap, so that the next start can give back what a kill left.
    A `max_freq` that somebody else has set meanwhile, as nvpmodel does with a new power mode, is what holds without a
    cap from then on; also one that is by chance what was capped to, which only the power mode tells.
    """

    def __init__(self, root: Path = _ROOT, *, note: Path | None = None) -> None:
        self._root = root
        self._note = note
        self._folder: Path | None = None
        self._ceiling: int | None = None
        self._ours: int | None = None
        self._mode: int | None = None
        self._t_foreign_s = -math.inf

    @property
    def capped(self) -> bool:
        """Whether a cap of this object's is in force, as far as it knows."""
        return self._ours is not None

    def find(self) -> str | None:
        reason = self._look()
        if reason is None and self._folder is not None and not os.access(self._folder / "max_freq", os.W_OK):
            return "its max_freq may not be written by this user"
        return reason

    def recover(self) -> str | None:
        """Give back what a process before this one has left capped. Why it could not be, None where all is well:
        `cap(None)` tries again."""
        if self._note is None or self._look() is not None:
            return None
        try:
            ceiling, capped, mode = (None if word == "-" else int(word) for word in read_text(self._note).split())
        except (UnreadableError, ValueError):
            return None
        now = self._max()
        if isinstance(now, str):
            return now
        if ceiling is None or capped is None or mode != self._read_mode():
            self._forget()
        # drivers round: what was asked for need not be what they say
        elif now < ceiling and abs(now - capped) <= 0.01 * capped:
            self._ours, self._ceiling, self._mode = now, ceiling, mode
            return self._free()
        else:
            self._forget()
        return None

    def steps_hz(self) -> tuple[float, ...]:
        most = self.ceiling_hz()
        return () if most is None else tuple(step for step in self.all_steps_hz() if step <= most)

    def all_steps_hz(self) -> tuple[float, ...]:
        """Every step of the clock, ascending, whether the power mode allows it or not."""
        return () if self._look() is not None else tuple(float(step) for step in self._steps())

    def ceiling_hz(self) -> float | None:
        """The highest clock without a cap of ours; None where it is not known."""
        if self._look() is not None or isinstance(now := self._max(), str):
            return None
        ours = now == self._ours and (self._settles() or self._read_mode() == self._mode)
        return float(self._ceiling if self._ceiling is not None and ours else now)

    def hz(self) -> float | None:
        if self._look() is not None or self._folder is None:
            return None
        try:
            return float(read_number(self._folder / "cur_freq", 1, _MAX_HZ))
        except UnreadableError:
            return None

    def cap(self, hz: float | None) -> str | None:
        if (reason := self._look()) is not None:
            return reason
        now = self._max()
        if isinstance(now, str):
            return now
        self._heed_others(now)
        if hz is None:
            return self._free()
        if (reason := self.refusal(hz)) is not None:
            return reason
        assert self._ceiling is not None
        if hz >= self._ceiling:
            return self._free()
        if hz == self._ours:
            return None
        return self._cap(self._ceiling, int(hz))

    def refusal(self, hz: float) -> str | None:
        """Why `hz` can be no cap here; None where it can be."""
        if (reason := self._look()) is not None:
            return reason
        steps = self._steps()
        if hz in steps:
            return None
        known = ", ".join(f"{step / 1e6:g}" for step in steps)
        return f"{hz / 1e6:g} MHz is no step of the GPU's clock" + (f": {known}" if known else "; none is known")

    def close(self) -> None:
        if self._ours is not None:
            self.cap(None)

    # --- the files

    def _heed_others(self, now: int) -> None:
        """Take what somebody else has set for what holds without a cap."""
        mode = self._read_mode()
        if now != self._ours:
            if self._ceiling is not None and now != self._ceiling:
                self._t_foreign_s = time.monotonic()
        elif mode == self._mode:
            return
        elif self._settles():
            # the clock of this mode was seen already, before its name
            self._mode = mode
            self._remember(self._ceiling, now)
            return
        if self._ours is not None:
            self._forget()
        self._ours, self._ceiling, self._mode = None, now, mode

    def _settles(self) -> bool:
        return time.monotonic() - self._t_foreign_s < MODE_SETTLES_S

    def _read_mode(self) -> int | None:
        return read_mode(self._root).number

    def _cap(self, ceiling: int, wanted: int) -> str | None:
        self._remember(ceiling, wanted)
        if (reason := self._write(wanted)) is not None:
            if self._ours is None:
                self._forget()
            else:
                self._remember(ceiling, self._ours)
            return reason
        taken = self._max()
        self._ours = wanted if isinstance(taken, str) else taken
        if isinstance(taken, str) or taken > wanted:
            self._free()
            return taken if isinstance(taken, str) else f"the driver keeps to {taken / 1e6:g} MHz"
        return None

    def _free(self) -> str | None:
        if self._ours is None or self._ceiling is None:
            return None
        if (reason := self._write(self._ceiling)) is not None:
            return reason
        self._ours = None
        self._forget()
        return None

    def _look(self) -> str | None:
        """Find the device, or again where it has gone; why there is none."""
        if self._folder is not None and self._folder.is_dir():
            return None
        self._folder = self._ours = self._ceiling = None
        for folder in folders(self._root / "sys/class/devfreq"):
            if gpu_by(folder, _NAMES) is not None:
                self._folder = folder
                return None
        return "no GPU among the devfreq devices"

    def _steps(self) -> tuple[int, ...]:
        if self._folder is None:
            return ()
        try:
            words = read_text(self._folder / "available_frequencies", _STEPS_BYTES).split()
            return tuple(sorted({step for word in words if 0 < (step := int(word)) <= _MAX_HZ}))
        except (UnreadableError, ValueError):
            return ()

    def _max(self) -> int | str:
        """What holds now, Hz, or why that cannot be read."""
        assert self._folder is not None
        try:
            return read_number(self._folder / "max_freq", 1, _MAX_HZ)
        except UnreadableError as error:
            return f"max_freq: {error.reason}"

    def _write(self, hz: int) -> str | None:
        assert self._folder is not None
        try:
            # no O_CREAT and no O_TRUNC: an attribute is there, and takes one write
            fd = os.open(self._folder / "max_freq", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.write(fd, f"{hz}\n".encode())
            finally:
                os.close(fd)
        except OSError as error:
            code = errno.errorcode.get(error.errno or 0, "no code")
            return f"max_freq cannot be written: {os.strerror(error.errno or 0)} ({code})"
        return None

    def _remember(self, ceiling: int | None, wanted: int) -> None:
        if self._note is not None:
            # no fsync: after a power cut no clock is capped either
            with suppress(OSError):
                mode = "-" if self._mode is None else self._mode
                self._note.write_text(f"{ceiling} {wanted} {mode}\n", encoding="ascii")

    def _forget(self) -> None:
        if self._note is not None:
            with suppress(OSError):
                self._note.unlink()
