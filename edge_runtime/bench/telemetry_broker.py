"""A broker to take away: mosquitto in a process, a line to it with faults, and somebody who reads what arrives."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Literal

from edge_runtime.errors import EdgeError, NotThereError
from edge_runtime.mqtt.link import MqttLink
from edge_runtime.mqtt.session import Incoming
from edge_runtime.mqtt.settings import BrokerSettings

HOST = "127.0.0.1"
START_S = 10.0
SLOW_BYTES_PER_S = 2000.0
_PIECE_BYTES = 65536

LineState = Literal["ok", "swallowing", "slow", "refusing"]


def find_mosquitto() -> str:
    """Where mosquitto is. Raises NotThereError."""
    # Debian keeps it in a folder that is not on everybody's PATH
    program = shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin")
    if program is None:
        remedy = "install it: on Debian and Ubuntu, apt-get install mosquitto"
        raise NotThereError("this benchmark needs the broker mosquitto", code="not_installed", remedy=remedy)
    return program


class BenchBroker:
    """mosquitto on a loopback port that stays the same, as a context; it keeps nothing over a restart.

    Raises NotThereError where mosquitto is not installed, EdgeError where it does not start.
    """

    def __init__(self, folder: Path) -> None:
        program = find_mosquitto()
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            self.port: int = probe.getsockname()[1]
        config = folder / "mosquitto.conf"
        config.write_text(
            f"listener {self.port} {HOST}\nallow_anonymous true\nmax_queued_messages 0\n", encoding="utf-8"
        )
        self._command = [program, "-c", str(config)]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Return when it accepts connections."""
        # Ctrl-C is for the benchmark, which ends it
        process = self._process = subprocess.Popen(
            self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        end_s = time.monotonic() + START_S
        while process.poll() is None and time.monotonic() < end_s:
            with suppress(OSError), socket.create_connection((HOST, self.port), timeout=1.0):
                return
            time.sleep(0.02)
        raise EdgeError(f"mosquitto did not start on port {self.port}", code="broker_failed", retryable=True)

    def kill(self) -> None:
        """SIGKILL."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(10)

    def freeze(self) -> None:
        """SIGSTOP: connections stay open and nothing is answered."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def __enter__(self) -> BenchBroker:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


class Line:
    """A TCP relay from a loopback port to the broker's, as a context. `bytes_up`: forwarded to the broker so far."""

    def __init__(self, target_port: int) -> None:
        self._target = (HOST, target_port)
        self._lock = threading.Lock()
        self._state: LineState = "ok"
        self._open: dict[socket.socket, socket.socket] = {}  # each end, and the other one
        self._deaf: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self.bytes_up = 0
        self._listener = socket.create_server((HOST, 0))
        self.port: int = self._listener.getsockname()[1]
        self._spawn(self._accept)

    def set(self, state: LineState) -> None:
        """From now on. `refusing` ends what is open; a connection that was swallowed ends with the swallowing, since
        TCP loses no bytes in the middle."""
        with self._lock:
            self._state = state
            over = list(self._open) if state == "refusing" else list(self._deaf) if state != "swallowing" else []
            self._deaf.clear()
            if state == "swallowing":
                self._deaf.update(self._open)
        for end in over:
            _hang_up(end)

    def _spawn(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, name="bench-line", daemon=True)
        with self._lock:
            self._threads = [each for each in self._threads if each.is_alive() or each.ident is None]
            self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with suppress(OSError):
                if self._state == "refusing":
                    client.close()
                    continue
                server = socket.create_connection(self._target, timeout=5)
                server.settimeout(None)
                with self._lock:
                    self._open[client], self._open[server] = server, client
                    if self._state == "swallowing":
                        self._deaf.update((client, server))
                self._spawn(self._pass_on, client, server, True)
                self._spawn(self._pass_on, server, client, False)
                continue
            client.close()

    def _pass_on(self, source: socket.socket, sink: socket.socket, up: bool) -> None:
        with suppress(OSError):
            while data := source.recv(_PIECE_BYTES if self._state != "slow" else 256):
                if source in self._deaf:
                    continue
                if self._state == "slow":
                    time.sleep(len(data) / SLOW_BYTES_PER_S)
                sink.sendall(data)
                if up:
                    self.bytes_up += len(data)
        _hang_up(source)
        _hang_up(sink)
        with self._lock:
            self._open.pop(source, None)
            self._deaf.discard(source)
        source.close()

    def __enter__(self) -> Line:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _hang_up(self._listener)
        self._listener.close()
        self.set("refusing")
        for thread in self._threads:
            thread.join(5)


def _hang_up(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


class Reader:
    """Tells `take` of every message that the broker passes on, on a thread of its own; a context."""

    def __init__(self, broker_port: int, device: str, take: Callable[[Incoming], None]) -> None:
        self._link = MqttLink(BrokerSettings(HOST, broker_port, client_id=f"{device}-reader"))
        for what in ("results/+", "telemetry/+", "event/+"):
            self._link.subscribe(f"edge/v1/{device}/{what}", take)

    def wait(self, timeout_s: float = 90.0) -> bool:
        """Until it is connected."""
        return wait_for(lambda: self._link.status().connected, timeout_s)

    def __enter__(self) -> Reader:
        self._link.start()
        self.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._link.close(1.0)


def wait_for(condition: Callable[[], object], timeout_s: float) -> bool:
    """Look every 10 ms; False when the time is up first."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.01)
    return True
