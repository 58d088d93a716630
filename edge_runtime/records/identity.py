"""Who is speaking: every message carries it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Identity:
    """`boot` is the kernel's boot id, `session` random per start of the daemon, `t_start_ns` monotonic."""

    device: str
    boot: str
    session: str
    version: str
    t_start_ns: int
