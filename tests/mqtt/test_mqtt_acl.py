"""deploy/mosquitto as it stands, in a real mosquitto: who gets in, and what everybody may write and read."""

from __future__ import annotations

import json
import re
import secrets
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

from tests.broker_rights import DEVICE, NAMES, OTHER_DEVICE, TOPICS, Role, may_read, may_write
from tests.certificates import Authority, Certificate
from tests.e2e.daemon import DaemonProcess, write_config
from tests.mosquitto import Mosquitto, Subscriber, free_port, wait_until

DEPLOYED = Path(__file__).resolve().parents[2] / "deploy" / "mosquitto"
NOT_AUTHORISED = 0x87
AUDITOR = "auditor"
"""A user of the tests, who may do everything: it tells what the broker really let through."""
PASSWORD = "correct-horse"


@dataclass(frozen=True, slots=True)
class Deployed:
    """A broker with the deployed files. `auditor` has a listener of its own, without TLS."""

    broker: Mosquitto
    mutual_port: int
    password_port: int
    brokers: Authority
    clients: Authority

    @property
    def auditor(self) -> Subscriber:
        # no session of a test before: nothing waits in it
        return Subscriber(self.broker, client_id=secrets.token_hex(8), username=AUDITOR, password=PASSWORD)


def _start(folder: Path, *, home_assistant: bool = False) -> Deployed:
    """The deployed files with nothing changed but places, ports and one more user; options as their comments say."""
    brokers, clients = Authority(folder / "brokers"), Authority(folder / "clients")
    shown = brokers.issue("broker", "DNS:localhost")
    ports = {"8883": str(free_port()), "8884": str(free_port())}
    acl = (DEPLOYED / "acl").read_text(encoding="ascii")
    if home_assistant:
        acl, changed = re.subn(r"(?m)^# (?=pattern write homeassistant|user homeassistant|topic )", "", acl)
        assert changed == 6
        acl = acl.replace("topic write homeassistant/device/edge_gate_2e07/config\n", "", 1)
    (folder / "acl").write_text(f"{acl}\nuser {AUDITOR}\ntopic readwrite #\n", encoding="ascii")
    users = folder / "passwords"
    users.touch()
    for user in (DEVICE, OTHER_DEVICE, "controller", "dashboard", "homeassistant", AUDITOR):
        subprocess.run(["mosquitto_passwd", "-b", users, user, PASSWORD], check=True, capture_output=True)
    config = (DEPLOYED / "mosquitto.conf").read_text(encoding="ascii")
    for place, here in {
        "/etc/mosquitto/edge-runtime.acl": folder / "acl",
        "/etc/mosquitto/edge-runtime.passwords": users,
        "/etc/mosquitto/certs/broker.pem": shown.cert_file,
        "/etc/mosquitto/certs/broker.key": shown.key_file,
        "/etc/mosquitto/certs/clients-ca.pem": clients.ca_file,
    }.items():
        assert place in config
        config = config.replace(place, str(here))
    config, changed = re.subn(
        r"(?m)^listener (888[34])$", lambda found: f"listener {ports[found[1]]} 127.0.0.1", config
    )
    assert changed == 2
    included = folder / "conf.d"
    included.mkdir()
    (included / "edge-runtime.conf").write_text(config, encoding="ascii")
    broker = Mosquitto(folder / "broker", [f"include_dir {included}"], anonymous=False, persistent=True)
    for port in ports.values():
        wait_until(partial(_accepts, int(port)), what=f"port {port}")
    return Deployed(broker, int(ports["8883"]), int(ports["8884"]), brokers, clients)


def _accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    deployed = _start(tmp_path_factory.mktemp("deployed"))
    with deployed.broker:
        yield deployed


class Client:
    """A client of the deployed broker, by certificate or by password."""

    def __init__(
        self,
        deployed: Deployed,
        name: str,
        version: int = paho.MQTTv5,
        *,
        certificate: Certificate | None = None,
        password: str | None = None,
        client_id: str = "",
        will: str | None = None,
    ) -> None:
        self.codes: dict[int, int] = {}
        self.seen: list[str] = []
        self.subscribed = 0
        self.connected: bool | None = None
        self.ends = 0
        self._changed = threading.Condition()
        self._client = client = paho.Client(
            CallbackAPIVersion.VERSION2,
            client_id=client_id or f"edge-runtime-{name}",
            protocol=MQTTProtocolVersion(version),
            reconnect_on_failure=False,
        )
        context = ssl.create_default_context(cafile=str(deployed.brokers.ca_file))
        if certificate is not None:
            context.load_cert_chain(certificate.cert_file, certificate.key_file)
        client.tls_set_context(context)
        if password is not None:
            client.username_pw_set(name, password)
        if will is not None:
            client.will_set(will, b"will", qos=1)
        client.on_connect = lambda _client, _data, _flags, reason, _properties: self._set(
            connected=not reason.is_failure
        )
        client.on_publish = lambda _client, _data, mid, reason, _properties: self._put(self.codes, mid, reason.value)
        client.on_message = lambda _client, _data, message: self._append(message.topic)
        client.on_subscribe = lambda *_: self._set(subscribed=self.subscribed + 1)
        client.on_disconnect = lambda *_: self._set(ends=self.ends + 1)
        client.connect("localhost", deployed.mutual_port if certificate else deployed.password_port)
        client.loop_start()
        self.wait(lambda: self.connected is not None or self.ends)

    def _set(self, **values: Any) -> None:
        with self._changed:
            for name, value in values.items():
                setattr(self, name, value)
            self._changed.notify_all()

    def _put(self, where: dict[int, int], key: int, value: int) -> None:
        with self._changed:
            where[key] = value
            self._changed.notify_all()

    def _append(self, topic: str) -> None:
        with self._changed:
            self.seen.append(topic)
            self._changed.notify_all()

    def wait(self, condition: Any) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, 10), f"codes {self.codes}, seen {self.seen[-5:]}"

    def publish_all(self, topics: Sequence[str]) -> list[int]:
        """One message to each; the broker's codes."""
        mids = [self._client.publish(topic, b"x", qos=1).mid for topic in topics]
        self.wait(lambda: all(mid in self.codes for mid in mids))
        return [self.codes[mid] for mid in mids]

    def subscribe(self, *filters: str) -> None:
        wanted = self.subscribed + 1
        self._client.subscribe([(one, 1) for one in filters])
        self.wait(lambda: self.subscribed == wanted)

    def break_off(self) -> None:
        """Ends without a goodbye, so that the broker sends the will."""
        sock = self._client.socket()
        assert isinstance(sock, ssl.SSLSocket)
        sock.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.disconnect()
        self._client.loop_stop()


def as_role(deployed: Deployed, role: Role, version: int, *, mutual: bool = False) -> Client:
    name = NAMES[role]
    certificate = deployed.clients.issue(name) if mutual else None
    client = Client(deployed, name, version, certificate=certificate, password=None if mutual else PASSWORD)
    assert client.connected
    return client


ROLES = pytest.mark.parametrize("role", ["device", "controller", "dashboard"])
TRIES = [topic for topic in TOPICS if topic]


@ROLES
@pytest.mark.parametrize(
    ("version", "mutual"),
    [
        pytest.param(paho.MQTTv5, True, id="5-certificate"),
        pytest.param(paho.MQTTv311, False, id="3.1.1-password"),
        pytest.param(paho.MQTTv5, False, id="5-password", marks=pytest.mark.full),
        pytest.param(paho.MQTTv311, True, id="3.1.1-certificate", marks=pytest.mark.full),
    ],
)
def test_what_everybody_may_write(deployed: Deployed, role: Role, version: int, mutual: bool) -> None:
    allowed = [topic for topic in TRIES if may_write(role, topic)]
    assert len(allowed) == {"device": 7, "controller": 6, "dashboard": 0}[role]
    with deployed.auditor as auditor, as_role(deployed, role, version, mutual=mutual) as client:
        codes = client.publish_all(TRIES)
        # what comes last has passed everything before it
        auditor.publish("end", b"")
        auditor.wait_payload("end", b"")
        assert sorted({one.topic for one in auditor.seen()} - {"end"}) == sorted(allowed)
    if version == paho.MQTTv5:
        assert {topic for topic, code in zip(TRIES, codes, strict=True) if code == NOT_AUTHORISED} == {
            topic for topic in TRIES if not may_write(role, topic)
        }
    else:
        assert set(codes) == {0}  # 3.1.1 cannot say it


@ROLES
@pytest.mark.parametrize(
    "version",
    [pytest.param(paho.MQTTv5, id="5"), pytest.param(paho.MQTTv311, id="3.1.1", marks=pytest.mark.full)],
)
def test_what_everybody_may_read(deployed: Deployed, role: Role, version: int) -> None:
    allowed = [topic for topic in TRIES if may_read(role, topic)]
    with deployed.auditor as auditor, as_role(deployed, role, version) as client:
        # to have more than one filter that fits is no way around
        client.subscribe("#", "edge/v1/+/cmd/+", f"edge/v1/{OTHER_DEVICE}/#", f"edge/v1/{DEVICE}/desired", "$SYS/#")
        for topic in TRIES:
            auditor.publish(topic, b"x")
        last = allowed[-1]
        client.wait(lambda: last in client.seen)
        assert sorted(set(client.seen)) == sorted(allowed)


def test_a_retained_command_of_another_device_is_not_shown(deployed: Deployed) -> None:
    other, own = f"edge/v1/{OTHER_DEVICE}/desired", f"edge/v1/{DEVICE}/desired"
    with deployed.auditor as auditor, as_role(deployed, "device", paho.MQTTv5) as client:
        for topic in (other, own):
            auditor.publish(topic, b"x", retain=True)
        client.subscribe(other)
        client.subscribe(own)
        client.wait(lambda: own in client.seen)
        assert other not in client.seen
        for topic in (other, own):
            auditor.publish(topic, b"", retain=True)


def test_a_will_is_held_to_the_same_rights(deployed: Deployed) -> None:
    with deployed.auditor as auditor:
        for topic in (f"edge/v1/{OTHER_DEVICE}/presence", f"edge/v1/{DEVICE}/presence"):
            with Client(deployed, DEVICE, password=PASSWORD, will=topic) as client:
                # mosquitto may refuse the connection for its will, or keep the will to itself
                if client.connected:
                    client.break_off()
                    client.wait(lambda client=client: client.ends)
        auditor.wait_payload(f"edge/v1/{DEVICE}/presence", b"will")
        assert auditor.payloads(f"edge/v1/{OTHER_DEVICE}/presence") == []


def test_nobody_is_thrown_out_by_a_borrowed_client_id(deployed: Deployed) -> None:
    with Client(deployed, OTHER_DEVICE, password=PASSWORD) as victim:
        for client_id in (f"edge-runtime-{OTHER_DEVICE}", OTHER_DEVICE):
            with Client(deployed, DEVICE, password=PASSWORD, client_id=client_id) as thief:
                assert thief.connected
        assert victim.publish_all([f"edge/v1/{OTHER_DEVICE}/presence"]) == [0]
        assert victim.ends == 0


@pytest.mark.parametrize("name", ["+", "#", "gate-07/#"])
def test_a_name_with_wildcards_opens_nothing(deployed: Deployed, name: str) -> None:
    made = deployed.clients.issue("wild", subject=name)
    with (
        deployed.auditor as auditor,
        Client(deployed, "wild", certificate=made) as client,
    ):
        if client.connected:
            codes = client.publish_all([f"edge/v1/{DEVICE}/presence", f"edge/v1/{DEVICE}/event/x"])
            assert codes == [NOT_AUTHORISED] * 2
        auditor.publish("end", b"")
        auditor.wait_payload("end", b"")
        assert [one.topic for one in auditor.seen()] == ["end"]


@pytest.mark.parametrize("password", [None, "wrong"])
def test_without_the_right_password_nobody_gets_in(deployed: Deployed, password: str | None) -> None:
    with Client(deployed, DEVICE, password=password) as client:
        assert not client.connected


def test_home_assistants_lines(tmp_path: Path) -> None:
    deployed = _start(tmp_path, home_assistant=True)
    own, other = (f"homeassistant/device/edge_{device}/config" for device in (DEVICE, OTHER_DEVICE))
    with (
        deployed.broker,
        Client(deployed, "homeassistant", password=PASSWORD) as assistant,
        as_role(deployed, "device", paho.MQTTv5) as client,
    ):
        assistant.subscribe("#")
        window = f"edge/v1/{DEVICE}/telemetry/window"
        event = f"edge/v1/{DEVICE}/event/camera"
        codes = client.publish_all([own, other, event, window])
        assert [code == NOT_AUTHORISED for code in codes] == [False, True, False, False]
        assistant.wait(lambda: window in assistant.seen)
        assert sorted(assistant.seen) == sorted([own, window])
        commanding = f"edge/v1/{DEVICE}/cmd/ping"
        assert assistant.publish_all([commanding, own]) == [NOT_AUTHORISED, 0]


def test_a_daemon_lives_within_these_rights(deployed: Deployed, tmp_path: Path) -> None:
    mine = deployed.clients.issue("test-device")
    mqtt = f"""host = "localhost"
port = {deployed.mutual_port}
ca_file = "{deployed.brokers.ca_file}"
cert_file = "{mine.cert_file}"
key_file = "{mine.key_file}"
results = true"""
    root = "edge/v1/test-device"
    with (
        deployed.auditor as auditor,
        as_role(deployed, "controller", paho.MQTTv5) as controller,
        DaemonProcess(write_config(tmp_path, mqtt=mqtt)) as daemon,
    ):
        controller.subscribe(f"{root}/#")
        daemon.wait_for("mqtt: connected to localhost")
        expires = datetime.now(timezone.utc) + timedelta(minutes=1)
        command = json.dumps({"id": "c1", "expires_utc": f"{expires:%Y-%m-%dT%H:%M:%SZ}"}).encode()
        auditor.publish(f"{root}/cmd/camera", command)
        wanted = {"presence", "reported", "telemetry/window", "results/gate", "reply/c1", "event/camera"}
        for rest in wanted:
            controller.wait(lambda rest=rest: f"{root}/{rest}" in controller.seen)
        assert daemon.stop()[0] == 0
        assert "refused" not in daemon.log
        assert "Traceback" not in daemon.log
        wait_until(lambda: auditor.payloads(f"{root}/presence"))
        assert json.loads(auditor.payloads(f"{root}/presence")[-1])["online"] is False
