"""What paho does by itself and this link does not: rows P1 to P26 of the facts, those that no other file has."""

from __future__ import annotations

import os
import re
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from edge_runtime.mqtt.link import MqttLink
from edge_runtime.mqtt.session import Incoming, SessionInfo
from edge_runtime.mqtt.settings import BrokerSettings, Presence, Timing
from edge_runtime.mqtt.window import WINDOW
from tests.certificates import Authority
from tests.mosquitto import Mosquitto, Subscriber, wait_until
from tests.mqtt.brokers import PUBLISH, SUBSCRIBE, Packet, packets
from tests.mqtt.lanes import LongLane
from tests.relay import Relay

FAST = Timing(retry_first_s=0.02, retry_cap_s=0.2, connack_s=1.0, short_session_s=0.0)
PRESENCE = Presence("edge/v1/dev/presence", b"on", b"off")


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Mosquitto]:
    with Mosquitto(tmp_path / "broker") as mosquitto:
        yield mosquitto


@contextmanager
def linked(settings: BrokerSettings, *, timing: Timing = FAST, capacity: int = 10_000) -> Iterator[MqttLink]:
    link = MqttLink(settings, presence=PRESENCE, timing=timing, capacity=capacity)
    link.start()
    try:
        yield link
    finally:
        link.close(0.5)


def up(link: MqttLink) -> None:
    wait_until(lambda: link.status().connected, what="connected")


def alive(link: MqttLink) -> bool:
    return all(thread.is_alive() for thread, _ in link.ticks().values())


def test_every_row_has_a_test_that_names_it() -> None:
    """O3, O6 and O12 are about downloads and roll-outs: there is nothing yet that could do them wrong."""
    tests = sorted(Path(__file__).parents[1].rglob("test_*.py"))
    text = "".join(path.read_text(encoding="utf-8") for path in tests)
    named = {row for name in re.findall(r"def test_((?:[po]\d+_)+)", text) for row in name.split("_") if row}
    wanted = {f"p{number}" for number in range(1, 27)} | {f"o{number}" for number in (1, 2, 4, 5, 7, 8, 9, 10, 11)}
    assert wanted <= named, sorted(wanted - named)


def test_p3_a_long_outage_leaves_paho_and_the_memory_small(broker: Mosquitto) -> None:
    """Its own queue would end at 65,535 with an error; it never holds more than the window."""
    with linked(BrokerSettings(broker.host, broker.port), capacity=1000) as link:
        up(link)
        wait_until(lambda: link.status().queued == 0)
        broker.freeze()
        for number in range(70_000):
            link.publish("lane", b"%d" % number)
        session = link._connection._live
        assert session is not None
        assert len(session._client._out_messages) <= WINDOW
        status = link.status()
        assert status.queued == 1000
        assert status.dropped == 69_000
        broker.thaw()
        wait_until(lambda: link.status().queued == 0)


@pytest.mark.full
def test_p3_packet_ids_start_over(broker: Mosquitto) -> None:
    """70,000 rows in one session: ids are 16 bits, and 0 is none."""
    lane = LongLane(70_000)
    with Subscriber(broker, "lane", qos=0) as subscriber:
        link = MqttLink(BrokerSettings(broker.host, broker.port), lanes=[lane])
        link.start()
        wait_until(lambda: lane.waiting() == 0, 110)
        subscriber.wait_payload("lane", b"69999", 30)
        assert subscriber.payloads("lane") == [b"%d" % number for number in range(70_000)]
        assert link.status().reconnects == 0
        link.close(0.5)


def test_p5_callers_and_handlers_may_share_a_lock(broker: Mosquitto) -> None:
    """With paho's `on_publish` this stops for ever after some thousand messages."""
    lock = threading.Lock()
    echoed: list[bytes] = []

    def handler(incoming: Incoming) -> None:
        with lock:
            echoed.append(incoming.payload)
            link.publish("echo", incoming.payload)

    with linked(BrokerSettings(broker.host, broker.port)) as link:
        up(link)
        link.subscribe("lane", handler)
        for number in range(700):
            with lock:
                link.publish("lane", b"%d" % number)
        wait_until(lambda: len(echoed) == 700 and link.status().queued == 0, 30)
        assert link.status().published == 1400


def test_p6_a_handler_may_wait_for_its_own_publish(broker: Mosquitto) -> None:
    waited: list[int] = []

    def handler(_: Incoming) -> None:
        before = link.status().published
        link.publish("reply", b"y")
        wait_until(lambda: link.status().published > before, 5, "the broker has the reply")
        waited.append(link.status().published - before)

    with linked(BrokerSettings(broker.host, broker.port)) as link:
        up(link)
        link.subscribe("cmd", handler)
        link.publish("cmd", b"x")
        wait_until(lambda: waited)
        assert link.status().handler_errors == 0


def test_p9_noise_in_place_of_tls_ends_no_thread(tmp_path: Path) -> None:
    """Somebody else is on the port, and later the broker."""
    authority = Authority(tmp_path / "ca")
    made = authority.issue("broker", "IP:127.0.0.1")
    with (
        Mosquitto(tmp_path / "broker", [f"certfile {made.cert_file}", f"keyfile {made.key_file}"]) as broker,
        Relay(broker.port) as relay,
    ):
        relay.noise()
        settings = BrokerSettings("127.0.0.1", relay.port, ca_file=authority.ca_file)
        with linked(settings) as link:
            wait_until(lambda: "refused" in link.status().reason)
            assert not link.status().connected
            assert alive(link)
            relay.ok()
            up(link)
            generation = link.status().reconnects
            relay.noise()  # in the middle of a session
            link.publish("lane", b"x")
            wait_until(lambda: not link.status().connected)
            wait_until(lambda: "refused" in link.status().reason)
            assert alive(link)
            relay.ok()
            wait_until(lambda: link.status().published == 1)
            assert link.status().reconnects == generation + 1
            assert alive(link)


def test_p9_expired_certificate_is_said_and_tried_again(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    old = authority.issue("old", "IP:127.0.0.1", starts=timedelta(days=-3), ends=timedelta(days=-2))
    good = authority.issue("good", "IP:127.0.0.1")
    used = tmp_path / "used.pem"
    key = tmp_path / "used.key"
    used.write_bytes(old.cert_file.read_bytes())
    key.write_bytes(old.key_file.read_bytes())
    with (
        Mosquitto(tmp_path / "broker", [f"certfile {used}", f"keyfile {key}"]) as broker,
        linked(BrokerSettings("127.0.0.1", broker.port, ca_file=authority.ca_file)) as link,
    ):
        wait_until(lambda: "certificate has expired" in link.status().reason)
        assert alive(link)
        assert not link.status().connected
        used.write_bytes(good.cert_file.read_bytes())
        key.write_bytes(good.key_file.read_bytes())
        broker.restart()
        up(link)


def test_p26_certificate_of_another_host_is_refused(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    made = authority.issue("other", "DNS:other.example")
    with (
        Mosquitto(tmp_path / "broker", [f"certfile {made.cert_file}", f"keyfile {made.key_file}"]) as broker,
        linked(BrokerSettings("127.0.0.1", broker.port, ca_file=authority.ca_file)) as link,
    ):
        wait_until(lambda: "certificate is not for 127.0.0.1" in link.status().reason)
        assert not link.status().connected
        assert link.status().reconnects == 0


def test_p12_what_is_published_at_the_connect_comes_after_the_backlog(broker: Mosquitto) -> None:
    with (
        Relay(broker.port) as relay,
        Subscriber(broker, "lane") as subscriber,
        linked(BrokerSettings("127.0.0.1", relay.port)) as link,
    ):
        up(link)
        relay.refuse()
        relay.reset()
        wait_until(lambda: not link.status().connected)
        for number in range(200):
            link.publish("lane", b"%d" % number)
        up_now = link._pump.up

        def publishes(session: SessionInfo) -> None:
            link.publish("lane", b"200")  # on the network's thread, as an on_connect would
            up_now(session)

        link._pump.up = publishes  # type: ignore[method-assign]
        relay.ok()
        subscriber.wait_payload("lane", b"200")
        assert subscriber.payloads("lane") == [b"%d" % number for number in range(201)]


def sent(relay: Relay) -> list[Packet]:
    return [packet for connection in relay.recorded() for packet in packets(connection)]


def test_p14_p25_no_alias_and_no_qos_2_on_the_wire(broker: Mosquitto) -> None:
    """Over a reconnect with messages under way: they come again whole, as QoS 1."""
    with Relay(broker.port, record=True) as relay, Subscriber(broker, "lane") as subscriber:
        with linked(BrokerSettings("127.0.0.1", relay.port, protocol="5")) as link:
            up(link)
            link.subscribe("cmd", lambda _: None)
            relay.swallow()
            for number in range(50):
                link.publish("lane", b"%d" % number)
            wait_until(lambda: sum(packet.kind == PUBLISH for packet in sent(relay)) >= WINDOW)
            relay.ok()
            relay.reset()
            wait_until(lambda: link.status().reconnects == 1 and link.publish_now("result", b"x"))
            subscriber.wait_payload("lane", b"49")
            wait_until(lambda: link.status().published == 50)
            wait_until(lambda: any(packet.kind == PUBLISH and packet.qos == 0 for packet in sent(relay)))
            subscriber.publish("cmd", b"z", qos=2)
        publishes = [packet for packet in sent(relay) if packet.kind == PUBLISH]
    assert len(publishes) >= 50 + WINDOW
    assert {packet.qos for packet in publishes} == {0, 1}
    for packet in publishes:
        assert packet.topic
        assert not hasattr(packet.properties_5(), "TopicAlias")
    asked = [packet.body[-1] & 3 for packet in sent(relay) if packet.kind == SUBSCRIBE]
    assert set(asked) == {1}
    assert subscriber.payloads("lane") == [b"%d" % number for number in range(50)]


@pytest.mark.parametrize("first", ["killed", "alive"])
def test_p25_a_command_of_qos_2_comes_again_after_a_kill(broker: Mosquitto, first: str) -> None:
    """We subscribe with QoS 1, so that nothing depends on a state of ours that a kill would lose."""
    got: list[Incoming] = []
    with ExitStack() as stack:
        link = stack.enter_context(linked(BrokerSettings(broker.host, broker.port)))
        link.subscribe("cmd", got.append)
        up(link)
        if first == "killed":
            link._inbox._acknowledge = lambda _: None  # the process dies before it can
        other = stack.enter_context(Subscriber(broker, "nothing"))
        link.publish("nothing", b"subscribed before")
        other.wait_payload("nothing", b"subscribed before")
        other.publish("cmd", b"x", qos=2)
        wait_until(lambda: got)
        assert got[0].qos == 1
        session = link._connection._live
        assert session is not None
        link._connection.drop(session.generation, "for the test")
        wait_until(lambda: link.status().reconnects == 1)
        link.publish("cmd", b"last")
        wait_until(lambda: got[-1].payload == b"last")
    assert [one.payload for one in got] == ([b"x", b"x", b"last"] if first == "killed" else [b"x", b"last"])


def test_p18_file_numbers_above_1023(broker: Mosquitto) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard == resource.RLIM_INFINITY or hard >= 2048, "ulimit -Hn is below 2048: this cannot be tested"
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1100):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        link = stack.enter_context(linked(BrokerSettings(broker.host, broker.port)))
        up(link)
        session = link._connection._live
        assert session is not None
        connected = session._client.socket()
        assert isinstance(connected, socket.socket)
        assert connected.fileno() > 1023
        got: list[Incoming] = []
        link.subscribe("lane", got.append)
        link.publish("lane", b"x")
        wait_until(lambda: got)
        assert link.close()


@pytest.mark.full
def test_p20_a_large_download_does_not_trip_the_keepalive(broker: Mosquitto) -> None:
    """5 MB that take twice a keepalive and a half; the answers to our pings wait behind them."""
    got: list[int] = []
    with (
        Relay(broker.port) as relay,
        Subscriber(broker, "nothing") as other,
        linked(BrokerSettings("127.0.0.1", relay.port, keepalive_s=2)) as link,
    ):
        link.subscribe("large", lambda incoming: got.append(len(incoming.payload)))
        up(link)
        link.publish("nothing", b"subscribed before")
        other.wait_payload("nothing", b"subscribed before")
        relay.trickle(850_000)
        t_start = time.monotonic()
        other.publish("large", bytes(5_000_000))
        wait_until(lambda: got, 30)
        assert time.monotonic() - t_start > 5
        assert got == [5_000_000]
        assert link.status().reconnects == 0


def test_p23_started_long_before_there_is_a_broker(tmp_path: Path) -> None:
    broker = Mosquitto(tmp_path / "broker", start=False)
    got: list[Incoming] = []
    with linked(BrokerSettings(broker.host, broker.port)) as link:
        link.subscribe("lane", got.append)
        link.publish("lane", b"early")
        tries = link._connection._generation
        wait_until(lambda: link._connection._generation >= tries + 3)
        assert alive(link)
        with broker:
            broker.start()
            wait_until(lambda: got and link.status().published == 1)
