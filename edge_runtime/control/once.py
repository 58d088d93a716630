"""What was obeyed already: every id once, for as long as its command lives."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from edge_runtime.records.commands import Reply


@dataclass(slots=True)
class Errand:
    """A command that is being obeyed, or was. `fingerprint` tells it from another with the same id."""

    fingerprint: bytes
    t_forget_ns: int
    finished: threading.Event = field(default_factory=threading.Event)
    reply: Reply | None = None


class Memory:
    """Errands by id, at most `capacity`. Thread-safe; the lock is a leaf."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._errands: dict[str, Errand] = {}

    def find(self, command_id: str, now_ns: int) -> Errand | None:
        """The errand of this id, if it is not yet to be forgotten at `now_ns` (monotonic)."""
        with self._lock:
            errand = self._errands.get(command_id)
            return None if errand is None or self._forgettable(errand, now_ns) else errand

    def begin(self, command_id: str, errand: Errand, now_ns: int) -> Errand | None:
        """Enter a new errand. Returns `errand`; the one that is there already; None when there is no room."""
        with self._lock:
            known = self._errands.get(command_id)
            if known is not None and not self._forgettable(known, now_ns):
                return known
            if len(self._errands) >= self._capacity:
                self._errands = {
                    key: value for key, value in self._errands.items() if not self._forgettable(value, now_ns)
                }
            # One that is forgotten too early could be obeyed twice: rather none than that.
            if len(self._errands) >= self._capacity:
                return None
            self._errands[command_id] = errand
            return errand

    @staticmethod
    def _forgettable(errand: Errand, now_ns: int) -> bool:
        return errand.finished.is_set() and now_ns >= errand.t_forget_ns
