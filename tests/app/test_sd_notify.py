"""sd_notify against real datagram sockets."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_runtime.app.sd_notify import Notifier


class Manager:
    """The service manager's end."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self.socket.settimeout(5)

    def received(self) -> list[str]:
        """The next datagram's lines."""
        return self.socket.recv(4096).decode().split("\n")


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    manager = Manager(str(tmp_path / "notify") if request.param == "path" else f"@edge-runtime-test-{os.getpid()}")
    yield manager
    manager.socket.close()


def test_every_word_arrives(manager: Manager) -> None:
    notifier = Notifier.from_environment({"NOTIFY_SOCKET": manager.address})
    assert notifier.active
    said = [
        (notifier.extend_timeout(60_000_000), ["EXTEND_TIMEOUT_USEC=60000000"]),
        (notifier.ready("2 cameras,\n1 model"), ["READY=1", "STATUS=2 cameras, 1 model"]),
        (notifier.status("degraded: camera gate is down"), ["STATUS=degraded: camera gate is down"]),
        (notifier.watchdog(), ["WATCHDOG=1"]),
        (notifier.stopping(), ["STOPPING=1"]),
    ]
    for sent, lines in said:
        assert sent
        assert manager.received() == lines
    assert notifier.reloading()
    word, moment = manager.received()
    assert word == "RELOADING=1"
    assert int(moment.removeprefix("MONOTONIC_USEC=")) > 0


def test_without_systemd_nothing_is_said() -> None:
    environ: dict[str, str] = {}
    notifier = Notifier.from_environment(environ)
    assert not notifier.active
    assert notifier.watchdog_interval_s is None
    assert not notifier.ready("ready")
    assert not notifier.watchdog()


def test_the_environment_is_taken_away_from_children(manager: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "4000000", "WATCHDOG_PID": "1"}.items():
        monkeypatch.setenv(name, value)
    Notifier.from_environment()
    code = "import os; print([name for name in os.environ if name.startswith(('NOTIFY', 'WATCHDOG'))])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


@pytest.mark.parametrize(
    ("usec", "pid", "interval_s"),
    [
        ("30000000", None, 15.0),
        ("30000000", str(os.getpid()), 15.0),
        ("1000000", None, 0.5),
        ("30000000", "1", None),
        (None, None, None),
        ("0", None, None),
        ("soon", None, None),
        ("30000000", "me", None),
    ],
)
def test_the_watchdog_is_fed_at_half_its_time(usec: str | None, pid: str | None, interval_s: float | None) -> None:
    environ = {"NOTIFY_SOCKET": "/run/systemd/notify"}
    environ.update({} if usec is None else {"WATCHDOG_USEC": usec})
    environ.update({} if pid is None else {"WATCHDOG_PID": pid})
    notifier = Notifier.from_environment(environ)
    assert notifier.watchdog_interval_s == interval_s
    assert environ == {}


def test_a_socket_that_is_gone_raises_nothing_and_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    notifier = Notifier(str(tmp_path / "nobody"))
    with caplog.at_level(logging.WARNING):
        assert not notifier.watchdog()
        assert not notifier.watchdog()
    assert len(caplog.records) == 1
    assert "WATCHDOG=1" in caplog.text
    late = Manager(str(tmp_path / "nobody"))
    try:
        assert notifier.watchdog()
        assert late.received() == ["WATCHDOG=1"]
    finally:
        late.socket.close()


def test_a_socket_that_nobody_reads_costs_its_time_out_at_most(
    manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_runtime.app.sd_notify._SEND_TIMEOUT_S", 0.05)
    notifier = Notifier(manager.address)
    while notifier.watchdog():  # the kernel queues a few (net.unix.max_dgram_qlen)
        pass
    assert manager.received() == ["WATCHDOG=1"]
    assert notifier.watchdog()


@pytest.mark.parametrize("address", ["vsock:2:1234", "@", "notify", "/" + 200 * "x"])
def test_an_address_that_cannot_be_used_raises_nothing(address: str) -> None:
    assert not Notifier(address).ready("ready")
