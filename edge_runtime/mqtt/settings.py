"""How to reach the broker, and how long to wait before trying again."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from edge_runtime.errors import MqttError

ProtocolChoice = Literal["auto", "5", "3.1.1"]


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """The `[mqtt]` table, resolved. TLS is used with `use_tls`, and as soon as one of the three files is given.

    `client_id` must be unique among all clients of the broker. `keepalive_s` is 2..65535; a link on which
    nothing was heard for 1.5 times that is given up. The files are read anew for every connection, so that
    renewed certificates and passwords take effect without a restart.

    Raises MqttError for a value that can never work.
    """

    host: str
    port: int = 1883
    client_id: str = "edge-runtime"
    protocol: ProtocolChoice = "auto"
    username: str | None = None
    password_file: Path | None = None
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    keepalive_s: int = 30
    use_tls: bool = False

    def __post_init__(self) -> None:
        for wrong, what, remedy in (
            (not self.host, "the broker's host is empty", "set mqtt.host"),
            (not 1 <= self.port <= 65535, f"port {self.port} does not exist", "use 1..65535, usually 1883 or 8883"),
            (not self.client_id, "the client id is empty", "set device.id"),
            (not 2 <= self.keepalive_s <= 65535, f"keepalive_s {self.keepalive_s} is out of range", "use 2..65535"),
            (self.protocol not in ("auto", "5", "3.1.1"), f"protocol {self.protocol!r} is unknown", "use 5 or 3.1.1"),
            (
                self.password_file is not None and self.username is None,
                "a password without a user name",
                "set mqtt.username",
            ),
            (
                self.key_file is not None and self.cert_file is None,
                "a key without a certificate",
                "set mqtt.cert_file",
            ),
        ):
            if wrong:
                raise MqttError(what, code="mqtt_settings", where="mqtt", remedy=remedy)

    @property
    def tls(self) -> bool:
        return self.use_tls or any((self.ca_file, self.cert_file, self.key_file))

    @property
    def on_this_machine(self) -> bool:
        """Whether the broker is on the loopback: no fleet shares that one."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    @property
    def where(self) -> str:
        """`host:port`, for messages."""
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Presence:
    """What the broker shows about us: `offline` is the will; a graceful close publishes `goodbye()`, or `offline`."""

    topic: str
    online: bytes
    offline: bytes
    goodbye: Callable[[], bytes] | None = None


@dataclass(frozen=True, slots=True)
class Timing:
    """Every waiting time of the link, in seconds. Only tests change these.

    `retry_first_s` and `retry_cap_s` bound the exponential back-off; `stable_s` is how long a connection must
    have lasted to start it over; a connection shorter than `short_session_s` is suspicious. `start_jitter_s` spreads
    the first connect after a start, and the one after a suspend of more than `suspend_s`. `fallback_s` is how
    long an unknown broker may be silent about MQTT 5 before 3.1.1 is tried. What the broker refused and may take
    later is sent again after `refused_retry_s`, doubling to `refused_cap_s`, `refused_tries` times. What goes on is
    told as an event again every `event_repeat_s`.
    """

    retry_first_s: float = 1.0
    retry_cap_s: float = 60.0
    stable_s: float = 60.0
    short_session_s: float = 5.0
    connect_s: float = 5.0
    connack_s: float = 10.0
    fallback_s: float = 2.0
    ack_s: float = 30.0
    refused_retry_s: float = 1.0
    refused_cap_s: float = 60.0
    refused_tries: int = 10
    start_jitter_s: float = 1.0
    suspend_s: float = 2.0
    event_repeat_s: float = 3600.0


class Backoff:
    """Full jitter: uniform in [first / 10, min(cap, first * 2**n)], the first retry too (O8).

    A fleet that loses its broker would otherwise come back in the same second, again and again; and nobody comes
    back in the first tenth, in which a broker that restarts is busy with itself.
    """

    def __init__(self, timing: Timing, rng: random.Random | None = None) -> None:
        self._timing = timing
        self._rng = rng or random.Random()
        self._attempt = 0

    def next_delay_s(self, *, suspicious: bool = False) -> float:
        """The next wait in seconds; `suspicious` draws from the cap's upper three quarters instead."""
        cap_s = self._timing.retry_cap_s
        if suspicious:
            return self._rng.uniform(cap_s / 4, cap_s)
        # 2**n overflows a float long before anybody stops retrying
        ceiling_s = min(cap_s, self._timing.retry_first_s * 2.0 ** min(self._attempt, 30))
        self._attempt += 1
        return max(0.01, self._rng.uniform(min(cap_s, self._timing.retry_first_s) / 10, ceiling_s))

    def soon_s(self) -> float:
        """The wait in seconds where nothing has failed, but many may come at once: power that is back, a wake-up."""
        return self._rng.uniform(0.0, self._timing.start_jitter_s)

    def reset(self) -> None:
        """To be called after a connection that was stable."""
        self._attempt = 0
