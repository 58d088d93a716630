"""A real broker for tests, that can be killed, frozen and restarted, and a plain subscriber to look at it with."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion

_START_S = 10.0


def wait_until(condition: Callable[[], object], timeout_s: float = 10.0, what: str = "the condition") -> None:
    """Polls every 5 ms; fails after `timeout_s`."""
    t_end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < t_end, f"{what} did not come true within {timeout_s:g} s"
        time.sleep(0.005)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Mosquitto:
    """mosquitto on a loopback port that stays the same over restarts.

    `config` are further lines of mosquitto.conf. With `persistent` the broker's store survives `kill` and `stop`
    (mosquitto saves it after every change); without, a restart comes back empty. Raises RuntimeError if mosquitto
    is not installed.
    """

    def __init__(
        self,
        folder: Path,
        config: Sequence[str] = (),
        *,
        persistent: bool = False,
        anonymous: bool = True,
        start: bool = True,
    ) -> None:
        program = shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin")
        if program is None:
            raise RuntimeError("mosquitto is not installed: apt-get install mosquitto (scripts/test does it)")
        self._program = program
        self.host = "127.0.0.1"
        self.port = free_port()
        folder.mkdir(parents=True, exist_ok=True)
        self._config = folder / "mosquitto.conf"
        lines = [
            f"listener {self.port} {self.host}",
            f"allow_anonymous {'true' if anonymous else 'false'}",
            "user root",  # else it drops its rights, and cannot read the test's folder
        ]
        if persistent:
            lines += ["persistence true", f"persistence_location {folder}/", "autosave_on_changes true"]
            lines += ["autosave_interval 1"]
        self._config.write_text("\n".join([*lines, *config, ""]), encoding="utf-8")
        self._log = folder / "mosquitto.log"
        self._process: subprocess.Popen[bytes] | None = None
        if start:
            self.start()

    def start(self) -> None:
        """Returns when it accepts connections."""
        assert self._process is None
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [self._program, "-c", str(self._config)], stdout=log, stderr=subprocess.STDOUT
            )
        t_end = time.monotonic() + _START_S
        while not self._accepts():
            if self._process.poll() is not None or time.monotonic() > t_end:
                self.kill()
                raise RuntimeError(f"mosquitto did not start: {self.log()}")
            time.sleep(0.01)

    def _accepts(self) -> bool:
        try:
            socket.create_connection((self.host, self.port), timeout=1.0).close()
        except OSError:
            return False
        return True

    def kill(self) -> None:
        """SIGKILL: no goodbye, nothing saved."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM, as systemd does it."""
        self._end(signal.SIGTERM)

    def restart(self) -> None:
        """SIGKILL and start again on the same port."""
        self.kill()
        self.start()

    def freeze(self) -> None:
        """SIGSTOP: connections stay open, new ones are accepted by the kernel, nothing is answered."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""

    def _end(self, signum: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGCONT)
        process.send_signal(signum)
        process.wait(10)

    def __enter__(self) -> Mosquitto:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


@dataclass(frozen=True, slots=True)
class Seen:
    """A message as a plain client got it."""

    topic: str
    payload: bytes
    retained: bool


class Subscriber:
    """A plain paho client: collects what arrives, and reconnects by itself after a restart of the broker.

    It keeps its session at the broker, so that with `persistent` nothing sent meanwhile is missed.
    """

    def __init__(
        self,
        broker: Mosquitto | tuple[str, int],
        *topic_filters: str,
        client_id: str = "subscriber",
        qos: int = 1,
        username: str | None = None,
        password: str | None = None,
    ) -> None:
        self._changed = threading.Condition()
        self._seen: list[Seen] = []
        self._ready = threading.Event()
        self._lost = threading.Event()
        self._filters = topic_filters or ("#",)
        host, port = broker if isinstance(broker, tuple) else (broker.host, broker.port)
        self._client = paho.Client(CallbackAPIVersion.VERSION2, client_id=client_id, clean_session=False)
        if username is not None:
            self._client.username_pw_set(username, password)
        self._client.reconnect_delay_set(1, 1)
        self._client.on_connect = lambda client, *_: client.subscribe([(name, qos) for name in self._filters])
        self._client.on_subscribe = lambda *_: self._ready.set()
        self._client.on_message = lambda _client, _userdata, message: self._add(message)
        self._client.on_disconnect = lambda *_: self._lost.set()
        self._client.connect(host, port)
        self._client.loop_start()
        assert self._ready.wait(10), "the subscriber could not subscribe"

    def _add(self, message: paho.MQTTMessage) -> None:
        with self._changed:
            self._seen.append(Seen(message.topic, bytes(message.payload), message.retain))
            self._changed.notify_all()

    def seen(self, topic: str | None = None) -> list[Seen]:
        with self._changed:
            return [one for one in self._seen if topic is None or one.topic == topic]

    def payloads(self, topic: str) -> list[bytes]:
        return [one.payload for one in self.seen(topic)]

    def wait_for(self, condition: Callable[[list[Seen]], object], timeout_s: float = 10.0, what: str = "") -> None:
        """Waits until `condition` holds for the list of everything seen."""
        with self._changed:
            came = self._changed.wait_for(lambda: condition(self._seen), timeout_s)
            assert came, f"{what or 'it'} did not arrive within {timeout_s:g} s; seen last: {self._seen[-5:]}"

    def wait_payload(self, topic: str, payload: bytes, timeout_s: float = 10.0) -> None:
        self.wait_for(
            lambda seen: any(one.topic == topic and one.payload == payload for one in seen), timeout_s, f"{payload!r}"
        )

    def wait_lost(self) -> None:
        """Waits until it has read everything that a broker which is gone had sent."""
        assert self._lost.wait(10), "the subscriber is still connected"

    def publish(self, topic: str, payload: bytes, *, qos: int = 1, retain: bool = False) -> None:
        """Waits until the broker has it."""
        self._client.publish(topic, payload, qos, retain).wait_for_publish(10)

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
