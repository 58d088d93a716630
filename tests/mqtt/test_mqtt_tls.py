"""TLS against a real mosquitto: whom a device believes, what it shows, and what it says when that does not do."""

from __future__ import annotations

import itertools
import logging
import shutil
import socket
import ssl
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from edge_runtime.mqtt.link import MqttLink
from edge_runtime.mqtt.settings import BrokerSettings, ProtocolChoice, Timing
from tests.certificates import Authority, Certificate
from tests.mosquitto import Mosquitto, free_port, wait_until

FAST = Timing(retry_first_s=0.02, retry_cap_s=0.1, refused_retry_s=0.02, connack_s=1.0, connect_s=1.0, fallback_s=0.5)
PROTOCOLS = pytest.mark.parametrize("protocol", ["5", "3.1.1"])

MakeLink = Callable[..., MqttLink]


@dataclass(frozen=True, slots=True)
class Paper:
    """Who signs what: the broker's side and the device's side have authorities of their own."""

    brokers: Authority
    devices: Authority
    strangers: Authority
    broker: Certificate
    device: Certificate


@pytest.fixture(scope="module")
def paper(tmp_path_factory: pytest.TempPathFactory) -> Paper:
    folder = tmp_path_factory.mktemp("certificates")
    brokers, devices, strangers = (Authority(folder / name, name) for name in ("brokers", "devices", "strangers"))
    broker = brokers.issue("broker", "DNS:localhost")
    return Paper(brokers, devices, strangers, broker, devices.issue("gate-07"))


def tls_lines(paper: Paper, shown: Certificate | None = None, *, mutual: bool = False) -> list[str]:
    shown = shown or paper.broker
    lines = [f"certfile {shown.cert_file}", f"keyfile {shown.key_file}"]
    if mutual:
        lines += [f"cafile {paper.devices.ca_file}", "require_certificate true", "use_identity_as_username true"]
    return lines


@pytest.fixture(scope="module")
def broker(paper: Paper, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mosquitto]:
    with Mosquitto(tmp_path_factory.mktemp("broker"), tls_lines(paper)) as mosquitto:
        yield mosquitto


@pytest.fixture(scope="module")
def strict_broker(paper: Paper, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mosquitto]:
    """It wants a certificate of its clients."""
    with Mosquitto(tmp_path_factory.mktemp("strict"), tls_lines(paper, mutual=True)) as mosquitto:
        yield mosquitto


@pytest.fixture
def make_link() -> Iterator[MakeLink]:
    links: list[MqttLink] = []

    def make(
        port: int,
        *,
        host: str = "localhost",
        protocol: ProtocolChoice = "auto",
        ca_file: Path | None = None,
        device: Certificate | None = None,
        key_file: Path | None = None,
        password_file: Path | None = None,
        use_tls: bool = False,
        timing: Timing = FAST,
    ) -> MqttLink:
        settings = BrokerSettings(
            host,
            port,
            "gate-07",
            protocol,
            username=None if password_file is None else "gate-07",
            password_file=password_file,
            ca_file=ca_file,
            cert_file=device.cert_file if device else None,
            key_file=key_file or (device.key_file if device else None),
            use_tls=use_tls,
        )
        links.append(MqttLink(settings, timing=timing))
        links[-1].start()
        return links[-1]

    yield make
    for link in links:
        link.close(2.0)


def never_connected(link: MqttLink, *words: str) -> str:
    """Until the status has all of `words`; it may not have been connected meanwhile."""

    def told() -> bool:
        status = link.status()
        assert not status.connected
        return all(word in status.reason for word in words)

    try:
        wait_until(told, 10.0)
    except AssertionError as error:
        raise AssertionError(f"{error}: {link.status().reason!r} has not all of {words}") from None
    assert link.status().reconnects == 0
    return link.status().reason


def connected(link: MqttLink) -> MqttLink:
    wait_until(lambda: link.status().connected, 10.0, f"connected ({link.status().reason})")
    return link


def spoken(port: int, paper: Paper) -> str | None:
    """The version of TLS that a broker agrees on."""
    context = ssl.create_default_context(cafile=str(paper.brokers.ca_file))
    context.load_cert_chain(paper.device.cert_file, paper.device.key_file)
    with (
        socket.create_connection(("127.0.0.1", port), 5) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as wrapped,
    ):
        return wrapped.version()


# ---- whom we believe


@PROTOCOLS
def test_a_broker_with_the_right_certificate(
    broker: Mosquitto, paper: Paper, make_link: MakeLink, protocol: ProtocolChoice
) -> None:
    link = connected(make_link(broker.port, ca_file=paper.brokers.ca_file, protocol=protocol))
    link.publish("lane", bytes(300_000))  # many records of TLS
    wait_until(lambda: link.status().published == 1)
    got: list[bytes] = []
    link.subscribe("big", lambda incoming: got.append(incoming.payload))
    link.publish("big", bytes(300_000))
    wait_until(lambda: got)
    assert got == [bytes(300_000)]


@PROTOCOLS
def test_a_broker_that_somebody_else_signed(
    broker: Mosquitto, paper: Paper, make_link: MakeLink, protocol: ProtocolChoice
) -> None:
    link = make_link(broker.port, ca_file=paper.strangers.ca_file, protocol=protocol)
    never_connected(link, "refused: the broker's certificate is signed by nobody in mqtt.ca_file = ", "strangers")


def test_the_systems_certificates_do_not_know_it(broker: Mosquitto, make_link: MakeLink) -> None:
    never_connected(make_link(broker.port, use_tls=True), "signed by nobody in the system's certificates")


def test_p26_a_broker_with_another_name(broker: Mosquitto, paper: Paper, make_link: MakeLink) -> None:
    link = make_link(broker.port, host="127.0.0.1", ca_file=paper.brokers.ca_file)
    never_connected(link, "refused: the broker's certificate is not for 127.0.0.1; put a name that it is for")


@pytest.mark.parametrize(
    ("starts", "ends", "words"),
    [
        (-9, -1, ("certificate has expired: by this device's clock it is 20", "UTC; renew the certificate")),
        (1, 9, ("not yet valid: by this device's clock it is 20", "UTC; if that is wrong, set the clock (NTP)")),
    ],
    ids=["expired", "o5-clock-behind"],
)
def test_o5_a_certificate_of_another_time(
    paper: Paper, make_link: MakeLink, tmp_path: Path, starts: int, ends: int, words: tuple[str, ...]
) -> None:
    shown = paper.brokers.issue("late", "DNS:localhost", starts=timedelta(days=starts), ends=timedelta(days=ends))
    with Mosquitto(tmp_path, tls_lines(paper, shown)) as broker:
        never_connected(make_link(broker.port, ca_file=paper.brokers.ca_file), "refused: the broker's", *words)


def test_other_name_is_refused_by_name_too(paper: Paper, make_link: MakeLink, tmp_path: Path) -> None:
    shown = paper.brokers.issue("elsewhere", "DNS:elsewhere.example", "IP:127.0.0.1")
    with Mosquitto(tmp_path, tls_lines(paper, shown)) as broker:
        never_connected(make_link(broker.port, ca_file=paper.brokers.ca_file), "certificate is not for localhost")
        connected(make_link(broker.port, host="127.0.0.1", ca_file=paper.brokers.ca_file))


# ---- what goes over the line


@contextmanager
def tls_server(context: ssl.SSLContext) -> Iterator[int]:
    """A server that does the handshakes and hangs up; its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                with client:
                    try:
                        client.settimeout(5)
                        context.wrap_socket(client, server_side=True).close()
                    except OSError:
                        pass

        thread = threading.Thread(target=serve, name="test-tls-server", daemon=True)
        thread.start()
        try:
            yield int(listener.getsockname()[1])
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(5)


@pytest.mark.parametrize(("host", "sent"), [("localhost", "localhost"), ("127.0.0.1", None)])
def test_sni_has_the_hosts_name_and_no_address(paper: Paper, make_link: MakeLink, host: str, sent: str | None) -> None:
    seen: list[str | None] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    shown = paper.brokers.issue("both", "DNS:localhost", "IP:127.0.0.1")
    context.load_cert_chain(shown.cert_file, shown.key_file)
    context.sni_callback = lambda _socket, name, _context: seen.append(name)
    with tls_server(context) as port:
        make_link(port, host=host, ca_file=paper.brokers.ca_file)
        wait_until(lambda: seen)
    assert set(seen) == {sent}


def test_a_broker_that_speaks_old_tls_only(paper: Paper, make_link: MakeLink) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(paper.broker.cert_file, paper.broker.key_file)
    other = ssl.create_default_context(cafile=str(paper.brokers.ca_file))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = other.minimum_version = ssl.TLSVersion.TLSv1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    for one in (context, other):
        one.set_ciphers("ALL:@SECLEVEL=0")
    with tls_server(context) as port:
        # who is not as careful does get through: it is ours that refuses
        with (
            socket.create_connection(("127.0.0.1", port), 5) as plain,
            other.wrap_socket(plain, server_hostname="localhost") as loose,
        ):
            assert loose.version() == "TLSv1.1"
        link = make_link(port, ca_file=paper.brokers.ca_file)
        never_connected(link, "refused: the broker speaks no TLS 1.2 or later")


# ---- the wrong kind of port


@PROTOCOLS
def test_tls_to_a_port_without(paper: Paper, make_link: MakeLink, tmp_path: Path, protocol: ProtocolChoice) -> None:
    with Mosquitto(tmp_path) as broker:
        link = make_link(broker.port, ca_file=paper.brokers.ca_file, protocol=protocol)
        never_connected(link, f"is port {broker.port} one for TLS")


def test_tls_to_a_port_that_speaks_first(paper: Paper, make_link: MakeLink) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        link = make_link(listener.getsockname()[1], ca_file=paper.brokers.ca_file)
        client, _ = listener.accept()
        with client:
            client.sendall(b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n")
            never_connected(link, "refused: localhost:", "does not speak TLS")


@pytest.mark.parametrize("protocol", ["auto", "5", "3.1.1"])
def test_no_tls_to_a_port_with(broker: Mosquitto, make_link: MakeLink, protocol: ProtocolChoice) -> None:
    never_connected(make_link(broker.port, protocol=protocol), f"is port {broker.port} one for TLS? (mqtt.ca_file")


def test_what_keeps_a_broker_away_is_logged_once(
    broker: Mosquitto, paper: Paper, make_link: MakeLink, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not once per try: it may be away for weeks."""
    shown = paper.brokers.issue("old", "DNS:localhost", starts=timedelta(days=-9), ends=timedelta(days=-1))
    with Mosquitto(tmp_path, tls_lines(paper, shown)) as late, caplog.at_level(logging.INFO):
        links = [make_link(broker.port), make_link(late.port, ca_file=paper.brokers.ca_file)]
        with pytest.MonkeyPatch.context() as patched:
            minutes = itertools.count()
            clock = SimpleNamespace(now=lambda _zone: datetime(2026, 11, 30, 8, next(minutes)))
            patched.setattr("edge_runtime.mqtt.reasons.datetime", clock)
            for link in links:
                wait_until(lambda link=link: link._connection._generation > 8, 10.0, "several tries")  # type: ignore[misc]
        said = [record.getMessage() for record in caplog.records]
    # of the first also, that 3.1.1 is tried
    for link, lines in zip(links, (2, 1), strict=True):
        assert sum(f"{link._where}: refused" in each for each in said) == lines, said


def test_a_port_that_says_nothing_is_left_in_time(paper: Paper, make_link: MakeLink) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        timing = Timing(retry_first_s=0.02, retry_cap_s=0.1, connect_s=0.3)
        link = make_link(listener.getsockname()[1], ca_file=paper.brokers.ca_file, timing=timing)
        begun = time.monotonic()
        never_connected(link, "unreachable: timed out before TLS was agreed on")
        assert time.monotonic() - begun < 2.0


# ---- what we show


@PROTOCOLS
def test_mutual_tls_with_a_certificate(
    strict_broker: Mosquitto, paper: Paper, make_link: MakeLink, protocol: ProtocolChoice
) -> None:
    link = make_link(strict_broker.port, ca_file=paper.brokers.ca_file, device=paper.device, protocol=protocol)
    connected(link)
    assert "'gate-07'" in strict_broker.log()  # the name is the certificate's: no user name was sent


@PROTOCOLS
def test_mutual_tls_without_a_certificate(
    strict_broker: Mosquitto, paper: Paper, make_link: MakeLink, protocol: ProtocolChoice
) -> None:
    link = make_link(strict_broker.port, ca_file=paper.brokers.ca_file, protocol=protocol)
    never_connected(link, "refused: the broker wants a certificate of this device: set mqtt.cert_file and")


@pytest.mark.parametrize("version", ["TLSv1.2", "TLSv1.3"])  # 1.3 refuses a client only after the handshake
def test_p9_mutual_tls_with_a_wrong_certificate_until_it_is_renewed(
    paper: Paper, make_link: MakeLink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    only = tmp_path / "openssl.cnf"  # mosquitto itself can only be told the least
    only.write_text(f"openssl_conf = a\n[a]\nssl_conf = b\n[b]\nsystem_default = c\n[c]\nMaxProtocol = {version}\n")
    stranger = paper.strangers.issue("gate-07")
    old = paper.devices.issue("old", starts=timedelta(days=-9), ends=timedelta(days=-1))
    mine = Certificate(tmp_path / "device.pem", tmp_path / "device.key")

    def renew(by: Certificate) -> None:
        shutil.copyfile(by.key_file, mine.key_file)
        shutil.copyfile(by.cert_file, mine.cert_file)

    renew(stranger)
    monkeypatch.setenv("OPENSSL_CONF", str(only))
    with Mosquitto(tmp_path / "broker", tls_lines(paper, mutual=True)) as broker:
        assert spoken(broker.port, paper) == version
        link = make_link(broker.port, ca_file=paper.brokers.ca_file, device=mine)
        words = f"refused: the broker does not take the certificate in mqtt.cert_file = {mine.cert_file} "
        never_connected(link, words + "(unknown CA)")
        renew(old)
        never_connected(link, words + "(certificate expired)")
        without = make_link(broker.port, ca_file=paper.brokers.ca_file)
        never_connected(without, "certificate of this device")
        renew(paper.device)
        connected(link)


def test_a_renewed_ca_is_taken(broker: Mosquitto, paper: Paper, make_link: MakeLink, tmp_path: Path) -> None:
    ca_file = tmp_path / "ca.pem"
    shutil.copyfile(paper.strangers.ca_file, ca_file)
    link = make_link(broker.port, ca_file=ca_file)
    never_connected(link, "signed by nobody")
    shutil.copyfile(paper.brokers.ca_file, ca_file)
    connected(link)


def test_a_broker_that_dies_and_comes_back(paper: Paper, make_link: MakeLink, tmp_path: Path) -> None:
    with Mosquitto(tmp_path, tls_lines(paper)) as broker:
        link = connected(make_link(broker.port, ca_file=paper.brokers.ca_file))
        for end in (broker.kill, broker.stop):
            end()
            wait_until(lambda: not link.status().connected)
            assert "TLS" not in link.status().reason  # nothing is wrong with it
            broker.start()
            connected(link)
        assert link.status().reconnects == 2


# ---- files that are not what they should be


@dataclass(frozen=True, slots=True)
class Files:
    """What a link is given; None: what is right."""

    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None


def _locked_key(paper: Paper, folder: Path) -> Path:
    locked = folder / "locked.key"
    command = f"openssl pkey -aes256 -passout pass:phrase -in {paper.device.key_file} -out {locked}"
    subprocess.run(command.split(), check=True, capture_output=True)
    return locked


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda _, d: Files(ca_file=d / "absent"), "cannot read {0.ca_file}: No such file or directory"),
        (lambda _, d: Files(ca_file=d / "text"), "mqtt.ca_file: {0.ca_file} holds no certificate"),
        (lambda _, d: Files(cert_file=d / "absent"), "cannot read {0.cert_file}: No such file or directory"),
        (lambda _, d: Files(cert_file=d / "text"), "mqtt.cert_file: {0.cert_file} holds no certificate"),
        (lambda _, d: Files(key_file=d / "absent"), "cannot read {0.key_file}: No such file or directory"),
        (lambda _, d: Files(key_file=d / "text"), "mqtt.key_file: {0.key_file} holds no private key"),
        (lambda paper, _: Files(key_file=paper.broker.key_file), "mqtt.key_file: {0.key_file} is not the key of"),
        (lambda paper, d: Files(key_file=_locked_key(paper, d)), "mqtt.key_file: {0.key_file} is a key with a pass"),
        (lambda _, d: Files(ca_file=d), "cannot read {0.ca_file}: Is a directory"),
    ],
    ids=["no-ca", "ca-text", "no-cert", "cert-text", "no-key", "key-text", "other-key", "locked-key", "ca-folder"],
)
def test_files_that_do_not_do(
    paper: Paper,
    make_link: MakeLink,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    wrong: Callable[[Paper, Path], Files],
    words: str,
) -> None:
    (tmp_path / "text").write_text("no PEM in here\n", encoding="ascii")
    given = wrong(paper, tmp_path)
    device = Certificate(given.cert_file or paper.device.cert_file, given.key_file or paper.device.key_file)
    link = make_link(free_port(), ca_file=given.ca_file or paper.brokers.ca_file, device=device)
    never_connected(link, words.format(given))
    assert not any(record.exc_info for record in caplog.records)  # a mistake of the operator is no traceback


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"\n", "is empty"),
        (b"first\nsecond\n", "holds no password"),
        (b"\xff\xfe\x00", "holds no password"),
        (b"x" * 65536, "holds no password"),
    ],
    ids=["empty", "newline", "lines", "binary", "huge"],
)
def test_password_files_that_do_not_do(make_link: MakeLink, tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "password"
    path.write_bytes(content)
    reason = never_connected(make_link(free_port(), password_file=path), f"mqtt.password_file: {path} {words}")
    assert "first" not in reason


def test_a_password_file_nobody_may_read(make_link: MakeLink, tmp_path: Path) -> None:
    # a folder, since root may read every file
    never_connected(make_link(free_port(), password_file=tmp_path), f"cannot read {tmp_path}: Is a directory")


def test_a_secret_that_everybody_can_read_is_warned_of_once(
    strict_broker: Mosquitto, paper: Paper, make_link: MakeLink, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    path, key_file = tmp_path / "password", tmp_path / "device.key"
    path.write_bytes(b"\xef\xbb\xbfhunter2\r\n")
    shutil.copyfile(paper.device.key_file, key_file)
    for mode in (0o640, 0o644):
        for secret in (path, key_file):
            secret.chmod(mode)
        link = make_link(
            strict_broker.port,
            ca_file=paper.brokers.ca_file,
            device=paper.device,
            key_file=key_file,
            password_file=path,
        )
        connected(link).close()
        told = [record.message for record in caplog.records if "every user of this machine" in record.message]
        assert len(told) == (0 if mode == 0o640 else 2)
    for secret in (path, key_file):
        assert any(str(secret) in message and f"chmod 640 {secret}" in message for message in told)
    assert "hunter2" not in caplog.text


# ---- systemd's credentials


def test_a_credential_is_found_where_systemd_puts_it(
    tmp_path: Path, paper: Paper, make_link: MakeLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    users = tmp_path / "users"
    users.write_text("")
    subprocess.run(["mosquitto_passwd", "-b", str(users), "gate-07", "right"], check=True, capture_output=True)
    credentials = tmp_path / "credentials"
    credentials.mkdir()
    shutil.copyfile(paper.device.key_file, credentials / "mqtt-key")
    lines = [*tls_lines(paper), f"cafile {paper.devices.ca_file}", "require_certificate true", f"password_file {users}"]
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    with Mosquitto(tmp_path / "broker", lines, anonymous=False) as broker:
        link = make_link(
            broker.port,
            ca_file=paper.brokers.ca_file,
            device=Certificate(paper.device.cert_file, Path("credential:mqtt-key")),
            password_file=Path("credential:mqtt"),
        )
        never_connected(link, "cannot read credential:mqtt: systemd handed no credentials over (LoadCredential=)")
        monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(credentials))
        never_connected(link, f"cannot read {credentials / 'mqtt'}: No such file or directory")
        (credentials / "mqtt").write_text("right")
        connected(link)
