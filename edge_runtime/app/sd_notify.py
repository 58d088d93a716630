"""What the daemon says to systemd (sd_notify(3)): one datagram a word, no dependency.

Without systemd every call is a no-op; a socket that is gone or full costs the word, never the caller.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import MutableMapping

log = logging.getLogger(__name__)

_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
_SEND_TIMEOUT_S = 1.0
"""systemd reads its socket at once; where it doesn't, the supervisor has better things to do than to wait."""


class Notifier:
    """Tells the service manager how the daemon is doing. Any thread may call it.

    `watchdog_interval_s` is how often `watchdog` is to be called, half of what systemd waits; None without one.
    """

    def __init__(self, address: str | None = None, watchdog_interval_s: float | None = None) -> None:
        self._address = None if address is None else _socket_address(address)
        self.watchdog_interval_s = None if self._address is None else watchdog_interval_s
        self._complained = False

    @classmethod
    def from_environment(cls, environ: MutableMapping[str, str] | None = None) -> Notifier:
        """Read NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID, and take them out of `environ` (default: os.environ).

        A child that inherited them would speak in our name.
        """
        environ = os.environ if environ is None else environ
        address, usec, pid = (environ.pop(name, None) for name in _VARIABLES)
        return cls(address or None, _interval_s(usec, pid))

    @property
    def active(self) -> bool:
        """Whether anybody listens."""
        return self._address is not None

    def ready(self, status: str) -> bool:
        """The warm-up is done: `systemctl start` returns. From here on the watchdog wants to be fed."""
        return self._send("READY=1", f"STATUS={_line(status)}")

    def status(self, text: str) -> bool:
        """One line that `systemctl status` shows."""
        return self._send(f"STATUS={_line(text)}")

    def stopping(self) -> bool:
        """The end has begun."""
        return self._send("STOPPING=1")

    def reloading(self) -> bool:
        """The configuration is read anew; `ready` ends it."""
        # the time is what Type=notify-reload (systemd 253) pairs with its SIGHUP; older ones ignore it
        return self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def watchdog(self) -> bool:
        """Feed the watchdog."""
        return self._send("WATCHDOG=1")

    def extend_timeout(self, usec: int) -> bool:
        """The start (or stop) under way needs up to `usec` from now. Say it again before that is over, or it failed."""
        return self._send(f"EXTEND_TIMEOUT_USEC={usec}")

    def _send(self, *lines: str) -> bool:
        """Whether the word got through. A socket for each: there are few words, and none is left to a child."""
        if self._address is None:
            return False
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(_SEND_TIMEOUT_S)
                sender.sendto("\n".join(lines).encode(), self._address)
        except OSError as error:
            if not self._complained:
                self._complained = True
                log.warning("systemd cannot be told %s: %s", lines[0], error)
            return False
        self._complained = False
        return True


def _socket_address(address: str) -> bytes | None:
    """The address to send to; None for a kind that is no AF_UNIX socket (vsock: of a virtual machine)."""
    encoded = os.fsencode(address)
    if encoded.startswith(b"/"):
        return encoded
    if encoded.startswith(b"@") and len(encoded) > 1:
        return b"\0" + encoded[1:]  # in the abstract namespace
    log.warning("NOTIFY_SOCKET=%s is neither a path nor an abstract socket and is ignored", address)
    return None


def _interval_s(usec: str | None, pid: str | None) -> float | None:
    """Half of the watchdog's time, as sd_watchdog_enabled(3) advises; None where it is not meant for this process."""
    try:
        if usec is None or (pid is not None and int(pid) != os.getpid()):
            return None
        wait_usec = int(usec)
    except ValueError:
        log.warning("WATCHDOG_USEC=%s WATCHDOG_PID=%s cannot be read; the watchdog is not fed", usec, pid)
        return None
    return wait_usec / 2e6 if wait_usec > 0 else None


def _line(text: str) -> str:
    return " ".join(text.split())
