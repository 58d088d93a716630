"""Passwords, tokens and keys given to a real daemon, and looked for in everything that it lets out."""

from __future__ import annotations

import http.client
import sqlite3
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from edge_runtime.cli.main import run
from tests.awaiting import wait_until
from tests.certificates import Authority
from tests.e2e.daemon import DaemonProcess, write_config
from tests.mosquitto import Mosquitto, Subscriber, free_port

PASSWORD = "mqtt-S3cret-7f1c"
WRONG_PASSWORD = "mqtt-Wr0ng-55aa"
CAMERA_PASSWORD = "cam-S3cret-0b2d"
TOKEN = "web-S3cret-9e8d7c6b"
ROOT = "edge/v1/test-device"
AUDITOR = "auditor"


@dataclass(slots=True)
class Places:
    """Where the daemon's files are, and a broker that wants both a certificate and a password."""

    password: Path
    key: Path
    ca: Path
    good_key: bytes
    good_ca: bytes
    other_ca: bytes


Trouble = tuple[Callable[[Places], object], str]

# (what is made wrong, what the daemon then says)
NOT_AUTHORISED: Trouble = (lambda at: at.password.write_text(WRONG_PASSWORD), "refused: not authorised")
NO_KEY: Trouble = (lambda at: at.key.write_bytes(at.good_key[:60] + at.good_key[80:]), "holds no private key")
TWO_LINES: Trouble = (lambda at: at.password.write_text(f"{PASSWORD}\n{WRONG_PASSWORD}\n"), "holds no password")
BINARY: Trouble = (lambda at: at.password.write_bytes(PASSWORD.encode() + b"\xff\xfe"), "holds no password")
NO_PASSWORD: Trouble = (lambda at: at.password.unlink(), "cannot read")
UNKNOWN_CA: Trouble = (lambda at: at.ca.write_bytes(at.other_ca), "signed by nobody in mqtt.ca_file")


def _http(port: int, path: str, token: str, method: str = "GET") -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    with closing(connection):
        connection.request(method, path, headers={"Authorization": f"Bearer {token}"})
        return connection.getresponse().read()


def _stored(store: Path) -> Iterator[bytes]:
    """Every file of the store, and every value in its databases, unpacked where it is packed."""
    for path in store.rglob("*"):
        if path.is_file():
            yield path.read_bytes()
        if path.suffix == ".sqlite":
            with closing(sqlite3.connect(path)) as database:
                for (table,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
                    for row in database.execute(f'SELECT * FROM "{table}"'):
                        yield from map(_plain, row)


def _plain(value: object) -> bytes:
    if not isinstance(value, bytes):
        return str(value).encode()
    try:
        return zlib.decompress(value)
    except zlib.error:
        return value


@pytest.mark.parametrize(
    "troubles",
    [
        pytest.param([NOT_AUTHORISED, NO_KEY], id="some", marks=pytest.mark.full),
        pytest.param(
            [NOT_AUTHORISED, NO_KEY, TWO_LINES, BINARY, NO_PASSWORD, UNKNOWN_CA], id="all", marks=pytest.mark.full
        ),
    ],
)
def test_no_secret_gets_out_whatever_the_broker_does(tmp_path: Path, troubles: list[Trouble]) -> None:
    brokers, devices = Authority(tmp_path / "brokers"), Authority(tmp_path / "devices")
    shown, mine = brokers.issue("broker", "DNS:localhost"), devices.issue("test-device")
    users = tmp_path / "users"
    users.touch()
    for user in ("gate", AUDITOR):
        subprocess.run(["mosquitto_passwd", "-b", users, user, PASSWORD], check=True, capture_output=True)
    at = Places(
        password=tmp_path / "password",
        key=tmp_path / "device.key",
        ca=tmp_path / "ca.pem",
        good_key=mine.key_file.read_bytes(),
        good_ca=brokers.ca_file.read_bytes(),
        other_ca=devices.ca_file.read_bytes(),
    )
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN)
    for path in (at.password, at.key, token_file):
        path.touch(0o600)
    key_lines = [line for line in at.good_key.decode().splitlines() if not line.startswith("-")]
    secrets = [PASSWORD, WRONG_PASSWORD, CAMERA_PASSWORD, TOKEN, *key_lines]

    def make_right() -> None:
        at.password.write_text(PASSWORD)
        at.key.write_bytes(at.good_key)
        at.ca.write_bytes(at.good_ca)

    tls_port, web_port = free_port(), free_port()
    lines = [f"listener {tls_port} 127.0.0.1", f"certfile {shown.cert_file}", f"keyfile {shown.key_file}"]
    lines += [f"cafile {devices.ca_file}", "require_certificate true", f"password_file {users}"]
    mqtt = (
        f'host = "localhost"\nport = {tls_port}\nusername = "gate"\npassword_file = "{at.password}"\n'
        f'ca_file = "{at.ca}"\ncert_file = "{mine.cert_file}"\nkey_file = "{at.key}"\nresults = true'
    )
    camera = f'name = "gate"\nurl = "rtsp://admin:{CAMERA_PASSWORD}@127.0.0.1:9/main"'
    web = f'[web]\nlisten = "127.0.0.1:{web_port}"\ntoken_file = "{token_file}"\n'
    config = write_config(tmp_path, camera=camera, mqtt=mqtt, more=web)
    out: dict[str, bytes] = {}
    with (
        Mosquitto(tmp_path / "broker", lines, anonymous=False) as broker,
        Subscriber(broker, client_id=AUDITOR, username=AUDITOR, password=PASSWORD) as auditor,
    ):
        make_right()
        troubles[0][0](at)
        with DaemonProcess(config) as daemon:
            proc = Path(f"/proc/{daemon.process.pid}")
            for make_wrong, words in troubles:
                make_right()
                make_wrong(at)
                daemon.wait_for(words, 60)
            out["status while away"] = _http(web_port, "/api/status", TOKEN)
            make_right()
            daemon.wait_for("mqtt: connected to localhost", 60)
            auditor.wait_for(lambda seen: any(one.topic == f"{ROOT}/telemetry/window" for one in seen), 20)
            for page in ("/api/status", "/api/windows?last=100", "/metrics", "/", "/healthz"):
                out[page] = _http(web_port, page, TOKEN)
            out["another's token"] = _http(web_port, "/api/command/ping", TOKEN[:-1], "POST")
            out["cmdline"], out["environ"] = (proc / "cmdline").read_bytes(), (proc / "environ").read_bytes()
            command = [sys.executable, "-m", "edge_runtime", "status", "-c", str(config)]
            out["status"] = subprocess.run(command, capture_output=True, check=True).stdout
            seen = auditor.seen()
            broker.kill()
            before = daemon.windows()
            wait_until(lambda: daemon.windows() > before + 2, what="windows that wait")
            assert daemon.stop()[0] == 0
            out["log"] = daemon.log.encode()
    out["mqtt"] = b"\n".join(part for one in seen for part in (one.topic.encode(), one.payload))
    out["store"] = b"\n".join(_stored(tmp_path / "store"))
    # each was really looked at
    for where, known in {
        "log": troubles[-1][1].encode(),
        "status while away": troubles[-1][1].encode(),
        "/api/status": b"rtsp://***@127.0.0.1:9/main",
        "/metrics": b"edge_",
        "/api/windows?last=100": b"edge.window/1",
        "cmdline": b"edge_runtime",
        "environ": b"PATH=",
        "mqtt": b"edge.window/1",
        "store": b"edge.window/1",
        "another's token": b"unauthorized",
        "status": b"test-device",
    }.items():
        assert known in out[where], where
    for where, text in out.items():
        for secret in secrets:
            assert secret.encode() not in text, where


def test_no_secret_is_in_what_check_config_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The mistakes that people make with a password."""
    camera = f'name = "gate"\nurl = "rtsp://admin:{CAMERA_PASSWORD}@host:99999/main"'
    mistakes = {
        f'host = "mqtt://gate:{PASSWORD}@broker"': "mqtt.host",
        f'host = "gate:{PASSWORD}@broker"': "mqtt.host",
        f'password = "{PASSWORD}"': "unknown key",
        f'password_file = ["{PASSWORD}"]\nusername = "gate"': "password_file",
        f'password_file = "credential:{PASSWORD}/x"\nusername = "gate"': "password_file",
        f'password_file = "{PASSWORD}\\n"\nusername = "gate"': "password_file",
    }
    for mqtt, words in mistakes.items():
        config = write_config(tmp_path, camera=camera, mqtt=mqtt)
        assert run(["check-config", str(config)]) == 2
        told = "".join(capsys.readouterr())
        assert words in told
        assert PASSWORD not in told, mqtt
        assert CAMERA_PASSWORD not in told, mqtt
