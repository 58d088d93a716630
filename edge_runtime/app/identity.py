"""Who this process is, and whether its wall clock can be trusted."""

from __future__ import annotations

import ctypes
import secrets
import time
from pathlib import Path

from edge_runtime import __version__
from edge_runtime.records.identity import Identity

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_TIMEX_BYTES = 256  # struct timex is 208 bytes on 64-bit Linux
_TIME_ERROR = 5  # adjtimex(2): the clock is not synchronised


def make_identity(device: str) -> Identity:
    """The identity of this start."""
    try:
        boot = _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:  # not Linux, or hidden: a start is then its own boot
        boot = secrets.token_hex(16)
    return Identity(device, boot, secrets.token_hex(8), __version__, time.monotonic_ns())


def clock_synced() -> bool:
    """Whether the kernel holds the wall clock for synchronised (adjtimex(2), asking only)."""
    try:
        adjtimex = ctypes.CDLL(None, use_errno=True).adjtimex
    except (OSError, AttributeError):
        return False
    # modes = 0 in the first word: nothing is set
    state = int(adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES)))
    return 0 <= state < _TIME_ERROR
