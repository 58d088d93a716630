"""Results: QoS 0, now or never, beside the window and never waited for."""

from __future__ import annotations

import threading
from collections import deque


class Results:
    """A bounded queue; every result that surely never reached the socket is counted in `dropped`."""

    def __init__(self, capacity: int) -> None:
        self._lock = threading.Lock()
        self._queue: deque[tuple[str, bytes]] = deque(maxlen=capacity)
        self._open = False
        self._ending = False
        self._in_paho: set[int] = set()  # the pump's thread alone
        self.dropped = 0

    # ---- any thread

    def put(self, topic: str, payload: bytes) -> bool:
        """False, and counted, when not connected; when full the oldest is dropped and counted."""
        with self._lock:
            if not self._open or self._ending:
                self.dropped += 1
                return False
            if len(self._queue) == self._queue.maxlen:
                self.dropped += 1
            self._queue.append((topic, payload))
        return True

    def connected(self) -> None:
        with self._lock:
            self._open = True

    def lost(self) -> None:
        """The session is over, and with it whatever waited."""
        with self._lock:
            self._open = False
            self.dropped += len(self._queue)
            self._queue.clear()

    def end(self) -> None:
        """Closing: nothing more is taken."""
        with self._lock:
            self._ending = True

    # ---- the pump's thread

    @property
    def in_paho(self) -> int:
        """Packets handed over that have not reached the socket."""
        return len(self._in_paho)

    def take(self) -> tuple[str, bytes] | None:
        with self._lock:
            return self._queue.popleft() if self._queue else None

    def handed(self, mid: int | None) -> None:
        """Handed over under this packet id, or not taken."""
        if mid is not None:
            self._in_paho.add(mid)
            return
        with self._lock:
            self.dropped += 1

    def written(self, mid: int) -> bool:
        """It reached the socket; false if `mid` is no result's."""
        if mid not in self._in_paho:
            return False
        self._in_paho.discard(mid)
        return True

    def reset(self) -> None:
        """What the last session had not written is dropped."""
        with self._lock:
            self.dropped += len(self._in_paho)
        self._in_paho.clear()
