"""The broker in this process, and what a broker without MQTT 5 means for the link."""

from __future__ import annotations

import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from edge_runtime.errors import MqttError
from edge_runtime.mqtt.embedded import EmbeddedBroker
from edge_runtime.mqtt.link import MqttLink
from edge_runtime.mqtt.session import Incoming
from edge_runtime.mqtt.settings import BrokerSettings, Presence, ProtocolChoice, Timing
from tests.mosquitto import Subscriber, free_port, wait_until

FAST = Timing(retry_first_s=0.02, retry_cap_s=0.2, connack_s=1.0, fallback_s=0.3)
PRESENCE = Presence("edge/v1/dev/presence", b"on", b"off")


@pytest.fixture
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker() as embedded:
        yield embedded


MakeLink = Callable[..., MqttLink]


@pytest.fixture
def make_link() -> Iterator[MakeLink]:
    links: list[MqttLink] = []

    def make(port: int, protocol: ProtocolChoice = "auto") -> MqttLink:
        links.append(MqttLink(BrokerSettings("127.0.0.1", port, "dev", protocol), presence=PRESENCE, timing=FAST))
        return links[-1]

    yield make
    for link in links:
        link.close()


def test_starts_fast_on_a_free_port_and_stops() -> None:
    broker = EmbeddedBroker()
    t_start = time.monotonic()
    broker.start()
    assert time.monotonic() - t_start < 2.0  # 0.3 s on an idle machine, the import included
    assert broker.port > 0
    socket.create_connection((broker.host, broker.port), 1.0).close()
    assert broker.stop()
    assert broker.stop()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((broker.host, broker.port), 1.0)
    assert not any(thread.name == "broker" for thread in threading.enumerate())


def test_auto_falls_back_to_3_1_1_and_remembers(broker: EmbeddedBroker, make_link: MakeLink) -> None:
    with Subscriber((broker.host, broker.port)) as subscriber:
        link = make_link(broker.port)
        got: list[Incoming] = []
        link.subscribe("cmd/+", got.append)
        t_start = time.monotonic()
        link.start()
        wait_until(lambda: link.status().connected)
        assert time.monotonic() - t_start < 1.0
        assert link.status().protocol == "3.1.1"
        link.publish("lane", b"x")
        link.publish_now("results", b"y")
        subscriber.wait_payload(PRESENCE.topic, b"on")
        subscriber.wait_payload("lane", b"x")
        subscriber.wait_payload("results", b"y")
        subscriber.publish("cmd/ping", b"z")
        wait_until(lambda: [one.payload for one in got] == [b"z"])
        assert not got[0].retained

        generation = link._connection._generation
        link._connection.drop(generation, "for the test")
        wait_until(lambda: link.status().reconnects == 1)
        assert link._connection._generation == generation + 1, "5 was not tried again"
        assert link.close()
        subscriber.wait_payload(PRESENCE.topic, b"off")


def test_5_alone_is_not_connected(broker: EmbeddedBroker, make_link: MakeLink) -> None:
    link = make_link(broker.port, "5")
    link.start()
    wait_until(lambda: "no answer to CONNECT" in link.status().reason)
    assert not link.status().connected
    assert link.status().protocol is None


def test_protocol_of_the_broker_connects_without_a_detour(broker: EmbeddedBroker, make_link: MakeLink) -> None:
    link = make_link(broker.port, broker.protocol)
    t_start = time.monotonic()
    link.start()
    wait_until(lambda: link.status().connected)
    assert time.monotonic() - t_start < 0.3


def test_link_goes_on_when_the_broker_stops_under_it(broker: EmbeddedBroker, make_link: MakeLink) -> None:
    link = make_link(broker.port)
    link.start()
    wait_until(lambda: link.status().connected)
    assert broker.stop()
    wait_until(lambda: not link.status().connected)
    link.publish("lane", b"later")
    with EmbeddedBroker(port=broker.port):
        wait_until(lambda: link.status().published == 1)
        assert link.close()


def test_500_messages_in_order(broker: EmbeddedBroker, make_link: MakeLink) -> None:
    with Subscriber((broker.host, broker.port), "lane") as subscriber:
        link = make_link(broker.port)
        link.start()
        for number in range(500):
            link.publish("lane", b"%d" % number)
        subscriber.wait_payload("lane", b"499", 20)
        assert subscriber.payloads("lane") == [b"%d" % number for number in range(500)]
        link.close()


def test_port_in_use_is_said(broker: EmbeddedBroker) -> None:
    with pytest.raises(MqttError, match="cannot listen") as caught:
        EmbeddedBroker(port=broker.port).start()
    assert caught.value.where == f"127.0.0.1:{broker.port}"
    assert caught.value.remedy is not None


def test_address_of_somebody_else_is_said() -> None:
    with pytest.raises(MqttError, match="cannot listen"):
        EmbeddedBroker("192.0.2.1", free_port()).start()


def test_without_the_extra_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "amqtt.broker", None)
    with pytest.raises(MqttError, match=r"edge-runtime\[demo\]"):
        EmbeddedBroker().start()


def test_it_is_quiet(broker: EmbeddedBroker, make_link: MakeLink, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    link = make_link(broker.port)
    link.start()
    wait_until(lambda: link.status().connected)
    link.close()
    broker.stop()
    assert not [one for one in caplog.records if one.name.startswith(("amqtt", "transitions"))]
