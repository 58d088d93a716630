"""The link against a real mosquitto: what a broker, a network and a handler may do to it."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from edge_runtime.errors import MqttError
from edge_runtime.mqtt.link import MqttLink
from edge_runtime.mqtt.session import Incoming
from edge_runtime.mqtt.settings import Backoff, BrokerSettings, Presence, ProtocolChoice, Timing
from edge_runtime.mqtt.window import WINDOW
from tests.mosquitto import Mosquitto, Subscriber, free_port, wait_until

FAST = Timing(
    retry_first_s=0.02,
    retry_cap_s=0.2,
    refused_retry_s=0.02,
    refused_cap_s=0.05,
    connack_s=1.0,
    short_session_s=0.0,
)
PRESENCE = Presence("edge/v1/dev/presence", b'{"online": true}', b'{"online": false}')

MakeLink = Callable[..., MqttLink]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Mosquitto]:
    with Mosquitto(tmp_path) as mosquitto:
        yield mosquitto


@pytest.fixture
def make_link() -> Iterator[MakeLink]:
    links: list[MqttLink] = []

    def make(
        broker: Mosquitto | int,
        *,
        protocol: ProtocolChoice = "auto",
        client_id: str = "dev",
        keepalive_s: int = 30,
        username: str | None = None,
        password_file: Path | None = None,
        presence: Presence | None = PRESENCE,
        capacity: int = 10_000,
        timing: Timing = FAST,
        backoff: Backoff | None = None,
        start: bool = True,
    ) -> MqttLink:
        port = broker if isinstance(broker, int) else broker.port
        settings = BrokerSettings(
            "127.0.0.1",
            port,
            client_id,
            protocol,
            username=username,
            password_file=password_file,
            keepalive_s=keepalive_s,
        )
        link = MqttLink(settings, presence=presence, capacity=capacity, timing=timing, backoff=backoff)
        links.append(link)
        if start:
            link.start()
        return link

    yield make
    for link in links:
        link.close(2.0)


def connected(link: MqttLink, timeout_s: float = 10.0) -> MqttLink:
    wait_until(lambda: link.status().connected, timeout_s, "connected")
    return link


def published(link: MqttLink, count: int) -> bool:
    return link.status().published >= count


def has(seen: list[Incoming], count: int) -> bool:
    return len(seen) >= count


def reason_has(link: MqttLink, words: str) -> Callable[[], bool]:
    return lambda: words in link.status().reason


@pytest.mark.parametrize("protocol", ["5", "3.1.1"])
def test_p24_connects_says_online_publishes_and_says_offline(
    broker: Mosquitto, make_link: MakeLink, protocol: ProtocolChoice
) -> None:
    with Subscriber(broker) as subscriber:
        link = connected(make_link(broker, protocol=protocol))
        link.publish("edge/v1/dev/event/x", b"hello")
        assert link.publish_now("edge/v1/dev/results/gate", b"result")
        subscriber.wait_payload(PRESENCE.topic, PRESENCE.online)
        subscriber.wait_payload("edge/v1/dev/event/x", b"hello")
        subscriber.wait_payload("edge/v1/dev/results/gate", b"result")
        status = link.status()
        assert (status.protocol, status.reason) == (protocol, "connected")
        assert status.since_ns <= time.monotonic_ns()

        t_close = time.monotonic()
        assert link.close()
        assert time.monotonic() - t_close < 0.5
        subscriber.wait_payload(PRESENCE.topic, PRESENCE.offline)  # P24: a graceful end sends no will
        assert not link.status().connected
        assert link.status().internal_errors == 0
    with Subscriber(broker, PRESENCE.topic, client_id="late") as late:
        late.wait_for(lambda seen: [(one.payload, one.retained) for one in seen] == [(PRESENCE.offline, True)])


def test_auto_takes_5_and_comes_back_with_it(broker: Mosquitto, make_link: MakeLink) -> None:
    link = connected(make_link(broker))
    assert link.status().protocol == "5"
    broker.restart()
    wait_until(lambda: link.status().reconnects == 1)
    assert link.status().protocol == "5"


def test_will_when_the_process_is_killed(broker: Mosquitto) -> None:
    program = (
        "import sys, time\n"
        "from edge_runtime.mqtt.link import MqttLink\n"
        "from edge_runtime.mqtt.settings import BrokerSettings, Presence\n"
        f"MqttLink(BrokerSettings('127.0.0.1', {broker.port}), presence={PRESENCE!r}).start()\n"
        "time.sleep(60)\n"
    )
    with Subscriber(broker, PRESENCE.topic) as subscriber:
        child = subprocess.Popen([sys.executable, "-c", program])
        try:
            subscriber.wait_payload(PRESENCE.topic, PRESENCE.online)
        finally:
            child.kill()
            child.wait()
        subscriber.wait_payload(PRESENCE.topic, PRESENCE.offline)


class GatedBackoff(Backoff):
    """Holds the link back until the gate is open, so that a subscriber can be there first."""

    def __init__(self) -> None:
        super().__init__(FAST)
        self.gate = threading.Event()
        self.gate.set()

    def next_delay_s(self, *, suspicious: bool = False) -> float:
        self.gate.wait(10)
        return 0.01


@pytest.mark.parametrize("protocol", ["5", pytest.param("3.1.1", marks=pytest.mark.full)])
def test_p4_2000_messages_over_a_killed_broker(tmp_path: Path, make_link: MakeLink, protocol: ProtocolChoice) -> None:
    """None lost, in order, duplicates within the window.

    The subscriber has QoS 0: then mosquitto writes a message to it before it acknowledges it to us, so that SIGKILL
    cannot take what was acknowledged.
    """
    count = 2000
    backoff = GatedBackoff()
    received: list[int] = []
    with Mosquitto(tmp_path) as broker:
        link = connected(make_link(broker, protocol=protocol, backoff=backoff))
        for life, until in enumerate((count // 4, count // 2, count)):
            with Subscriber(broker, "lane", client_id=f"life-{life}", qos=0) as subscriber:
                backoff.gate.set()
                if life == 0:
                    for number in range(count):
                        link.publish("lane", b"%d" % number)
                if until < count:
                    wait_until(partial(published, link, until))
                    backoff.gate.clear()
                    broker.kill()
                    subscriber.wait_lost()
                    wait_until(lambda: not link.status().connected)
                else:
                    subscriber.wait_payload("lane", b"%d" % (count - 1), 30)
                    wait_until(partial(published, link, count))
                received += [int(payload) for payload in subscriber.payloads("lane")]
            if until < count:
                broker.start()
        status = link.status()
    assert list(dict.fromkeys(received)) == list(range(count))
    assert len(received) - count <= 2 * WINDOW
    assert (status.queued, status.dropped, status.refused, status.published) == (0, 0, 0, count)
    assert status.reconnects == 2
    assert link._pump.window.largest <= WINDOW


def test_p1_broker_absent_at_start(tmp_path: Path, make_link: MakeLink) -> None:
    broker = Mosquitto(tmp_path, start=False)
    link = make_link(broker)
    wait_until(reason_has(link, "unreachable: connection refused"))
    link.publish("lane", b"early")
    assert not link.publish_now("results", b"gone")
    assert link.status().results_dropped == 1
    with broker:
        broker.start()
        wait_until(lambda: link.status().published == 1)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (socket.EAI_AGAIN, "no name server answers for 127.0.0.1: is the network up?"),
        (socket.EAI_NONAME, "the name 127.0.0.1 is not known"),
    ],
    ids=["no-name-server", "no-such-name"],
)
def test_a_network_that_is_away_is_no_wrong_name(
    make_link: MakeLink, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    def look_up(*_: object, **_more: object) -> None:
        raise socket.gaierror(number, "said by the system")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    wait_until(reason_has(make_link(free_port()), words))


def test_p2_close_with_an_absent_broker(make_link: MakeLink) -> None:
    link = make_link(free_port())
    link.publish("lane", b"never")
    wait_until(reason_has(link, "unreachable"))
    t_close = time.monotonic()
    assert not link.close()
    assert time.monotonic() - t_close < 2.0
    assert link.status().queued == 1


def test_p10_p11_close_with_frozen_broker(broker: Mosquitto, make_link: MakeLink) -> None:
    link = connected(make_link(broker, capacity=500))
    wait_until(lambda: link.status().queued == 0)
    broker.freeze()
    took_s: list[float] = []
    for number in range(5000):
        t_call = time.perf_counter()
        link.publish("lane", b"%d" % number)
        link.publish_now("results", bytes(2000))
        took_s.append(time.perf_counter() - t_call)
    assert sorted(took_s)[int(len(took_s) * 0.99)] < 0.005
    status = link.status()
    assert status.queued <= 500
    assert status.dropped >= 4500 - WINDOW
    t_close = time.monotonic()
    assert not link.close()
    assert time.monotonic() - t_close <= 2.5
    assert not any(thread.name.startswith("mqtt-") for thread in threading.enumerate())


def test_p10_half_open_link_ends_after_one_and_a_half_keepalives(broker: Mosquitto, make_link: MakeLink) -> None:
    link = connected(make_link(broker, keepalive_s=2, protocol="5"))
    broker.freeze()
    t_frozen = time.monotonic()
    took_s: list[float] = []
    while link.status().connected:
        t_call = time.perf_counter()
        link.publish("lane", b"x")
        took_s.append(time.perf_counter() - t_call)
        assert time.monotonic() - t_frozen < 6
        time.sleep(0.002)
    assert 2.0 < time.monotonic() - t_frozen < 3.8
    assert sorted(took_s)[int(len(took_s) * 0.99)] < 0.005
    wait_until(reason_has(link, "frozen"))
    broker.thaw()
    connected(link)
    wait_until(lambda: link.status().queued == 0)


def test_broker_that_acknowledges_nothing_is_left(broker: Mosquitto, make_link: MakeLink) -> None:
    timing = Timing(retry_first_s=0.02, retry_cap_s=0.1, ack_s=0.5, connack_s=1.0)
    link = connected(make_link(broker, timing=timing))
    wait_until(lambda: link.status().queued == 0)
    broker.freeze()
    link.publish("lane", b"x")
    wait_until(reason_has(link, "frozen: the broker acknowledged nothing"))
    broker.thaw()
    wait_until(lambda: link.status().published == 1)


@pytest.mark.parametrize("protocol", ["auto", "3.1.1"])
def test_refused_credentials_are_not_connected(tmp_path: Path, make_link: MakeLink, protocol: ProtocolChoice) -> None:
    users = tmp_path / "users"
    users.write_text("")
    subprocess.run(["mosquitto_passwd", "-b", str(users), "edge", "right"], check=True, capture_output=True)
    password_file = tmp_path / "password"
    password_file.write_text("wrong\n")
    with Mosquitto(tmp_path / "broker", [f"password_file {users}"], anonymous=False) as broker:
        link = make_link(broker, username="edge", password_file=password_file, protocol=protocol)
        wait_until(reason_has(link, "refused: not authorised"))
        assert not link.status().connected
        assert not link.publish_now("results", b"x")
        assert link.status().reconnects == 0
        password_file.write_text("right\n")  # read anew for every connection
        connected(link)


def test_missing_password_file_is_named(broker: Mosquitto, make_link: MakeLink, tmp_path: Path) -> None:
    link = make_link(broker, username="edge", password_file=tmp_path / "absent")
    wait_until(reason_has(link, f"cannot read {tmp_path / 'absent'}"))
    assert not link.status().connected


def test_p21_publish_refused_by_acl(tmp_path: Path, make_link: MakeLink) -> None:
    acl = tmp_path / "acl"
    acl.write_text("topic readwrite allowed/#\ntopic readwrite edge/#\n")
    with Mosquitto(tmp_path / "broker", [f"acl_file {acl}"]) as broker:
        link = connected(make_link(broker, protocol="5"))
        link.publish("forbidden/lane", b"x")
        link.publish("allowed/lane", b"y")
        wait_until(lambda: link.status().refused == 1)
        wait_until(lambda: link.status().queued == 0)
        assert link.status().published == 1
        assert link.status().connected


def test_subscription_refused_is_told(tmp_path: Path, make_link: MakeLink) -> None:
    # mosquitto's ACL of a filter lets it pass and withholds the messages; only $-topics of a plugin are refused, so
    # an unreadable one is taken as it is. What must hold: no error, and the rest works.
    with Mosquitto(tmp_path) as broker:
        link = connected(make_link(broker))
        got: list[Incoming] = []
        link.subscribe("$SYS/broker/version", got.append)
        wait_until(lambda: got)
        assert got[0].retained
        assert link.status().subscriptions_refused == ()


def test_p13_oversize_is_refused_up_front(tmp_path: Path, make_link: MakeLink) -> None:
    with (
        Mosquitto(tmp_path, ["max_packet_size 1000"]) as broker,
        Subscriber(broker, "lane") as subscriber,
    ):
        link = connected(make_link(broker, protocol="5"))
        link.publish("lane", bytes(2000))
        link.publish("lane", b"small")
        subscriber.wait_payload("lane", b"small")
        status = link.status()
        assert (status.refused, status.oversize, status.reconnects) == (1, 1, 0)
        assert not subscriber.seen("lane")[1:]


def test_p13_oversize_does_not_loop_where_the_broker_does_not_tell(tmp_path: Path, make_link: MakeLink) -> None:
    with (
        Mosquitto(tmp_path, ["max_packet_size 1000"]) as broker,
        Subscriber(broker, "lane") as subscriber,
    ):
        link = connected(make_link(broker, protocol="3.1.1"))
        link.publish("lane", b"before")
        link.publish("lane", bytes(2000))
        link.publish("lane", b"after")
        subscriber.wait_payload("lane", b"after", 20)
        wait_until(lambda: link.status().queued == 0)
        assert link.status().refused == 1


def test_p15_no_packet_is_huge(broker: Mosquitto, make_link: MakeLink) -> None:
    link = connected(make_link(broker))
    link.publish("lane", bytes(9 * 1024 * 1024))
    wait_until(lambda: link.status().oversize == 1)
    assert link.status().connected


def test_o10_retained_state_is_put_back_after_the_broker_lost_its_store(broker: Mosquitto, make_link: MakeLink) -> None:
    link = connected(make_link(broker))
    link.set_retained("edge/v1/dev/reported", b"first")
    link.set_retained("edge/v1/dev/reported", b"second")
    for life in range(2):
        with Subscriber(broker, "edge/v1/dev/#", client_id=f"life-{life}") as subscriber:
            subscriber.wait_payload("edge/v1/dev/reported", b"second")
            subscriber.wait_payload(PRESENCE.topic, PRESENCE.online)
        if life == 0:
            broker.restart()


def test_subscription_comes_back_after_a_restart(broker: Mosquitto, make_link: MakeLink) -> None:
    link = make_link(broker, start=False)
    got: list[Incoming] = []
    link.subscribe("edge/v1/dev/cmd/+", got.append)
    link.start()
    connected(link)
    link.subscribe("edge/v1/dev/desired", got.append)  # while connected
    for life in range(2):
        with Subscriber(broker, PRESENCE.topic, client_id=f"life-{life}") as other:
            other.wait_payload(PRESENCE.topic, PRESENCE.online)
            other.publish("edge/v1/dev/cmd/ping", b"%d" % life)
            other.publish("edge/v1/dev/desired", b"desired %d" % life)
            wait_until(partial(has, got, 2 * life + 2))
        if life == 0:
            broker.restart()
    assert {one.payload for one in got} == {b"0", b"1", b"desired 0", b"desired 1"}
    assert not any(one.retained for one in got)


def test_o9_retained_command_is_marked(broker: Mosquitto, make_link: MakeLink) -> None:
    with Subscriber(broker, "nothing") as other:
        other.publish("edge/v1/dev/cmd/reload", b"old", retain=True)
    link = connected(make_link(broker))
    got: list[Incoming] = []
    link.subscribe("edge/v1/dev/cmd/+", got.append)
    wait_until(lambda: got)
    assert got[0].retained


def test_p16_commands_sent_while_away_are_delivered(tmp_path: Path, make_link: MakeLink) -> None:
    with Mosquitto(tmp_path) as broker:
        first = connected(make_link(broker))
        first.subscribe("cmd", lambda _: None)
        with Subscriber(broker, "nothing") as other:
            other.publish("cmd", b"0")
            wait_until(lambda: not first._inbox._queue)
            first.close()
            other.publish("cmd", b"1")
        got: list[Incoming] = []
        second = make_link(broker, start=False)
        second.subscribe("cmd", got.append)
        second.start()
        wait_until(lambda: [one.payload for one in got][-1:] == [b"1"])


@pytest.mark.parametrize("protocol", ["5", "3.1.1"])
def test_p8_message_of_a_failed_handler_comes_again(
    tmp_path: Path, make_link: MakeLink, protocol: ProtocolChoice
) -> None:
    with Mosquitto(tmp_path, persistent=True) as broker:
        calls: list[bytes] = []

        def fails_once(incoming: Incoming) -> None:
            calls.append(incoming.payload)
            if len(calls) == 1:
                raise RuntimeError("disk full")

        link = connected(make_link(broker, protocol=protocol))
        link.subscribe("cmd", fails_once)
        link.publish("cmd", b"precious")
        wait_until(lambda: link.status().handler_errors == 1)
        assert link.status().connected
        broker.stop()
        broker.start()
        wait_until(lambda: calls == [b"precious", b"precious"])
        link.publish("cmd", b"next")
        wait_until(lambda: calls[-1] == b"next")
        assert link.status().handler_errors == 1


def test_p8_many_failed_messages_do_not_stop_the_rest(broker: Mosquitto, make_link: MakeLink) -> None:
    got: list[bytes] = []

    def poisoned(incoming: Incoming) -> None:
        got.append(incoming.payload)
        if incoming.payload != b"good":
            raise ValueError("poison")

    link = connected(make_link(broker))
    link.subscribe("cmd", poisoned)
    for _ in range(60):
        link.publish("cmd", b"bad")
    link.publish("cmd", b"good")
    wait_until(lambda: b"good" in got)
    assert link.status().handler_errors == 60


def test_p7_exception_in_a_callback_kills_nothing(
    broker: Mosquitto, make_link: MakeLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = connected(make_link(broker, presence=None))
    real = link._pump.acknowledged

    def fails(*_: object) -> None:
        monkeypatch.setattr(link._pump, "acknowledged", real)
        raise RuntimeError("boom")

    monkeypatch.setattr(link._pump, "acknowledged", fails)
    link.publish("lane", b"x")
    wait_until(lambda: link.status().internal_errors == 1)
    link.publish("lane", b"y")
    wait_until(lambda: link.status().published == 1)
    assert link.status().connected


def test_p19_slow_handler_does_not_starve_the_pings(broker: Mosquitto, make_link: MakeLink) -> None:
    link = connected(make_link(broker, keepalive_s=2))
    release = threading.Event()

    def slow(_: Incoming) -> None:
        release.wait(10)

    link.subscribe("cmd", slow)
    link.publish("cmd", b"x")
    t_end = time.monotonic() + 3.5  # longer than a broker waits for a client with a keepalive of 2 s
    while time.monotonic() < t_end:
        assert link.status().connected
        time.sleep(0.05)
    release.set()
    assert link.status().reconnects == 0


def test_p17_same_client_id_twice(broker: Mosquitto, make_link: MakeLink) -> None:
    timing = Timing(retry_first_s=0.02, retry_cap_s=4.0, connack_s=1.0)
    links = [make_link(broker, protocol="5", presence=None, timing=timing) for _ in range(2)]
    wait_until(lambda: all("another device" in link.status().reason or link.status().connected for link in links))
    wait_until(lambda: any("another device" in link.status().reason for link in links))
    # Three short sessions of each tell; after that a quarter of the cap is the least that is waited.
    connects = [link._connection.status().connects for link in links]
    assert max(connects) <= 4


def test_p22_threads_tick_and_are_ours(broker: Mosquitto, make_link: MakeLink) -> None:
    link = connected(make_link(broker))
    ticks = link.ticks()
    assert set(ticks) == {"mqtt-net", "mqtt-pump", "mqtt-handler"}
    wait_until(lambda: all(link.ticks()[name][1] > tick for name, (_, tick) in ticks.items()), 3.0)
    assert all(thread.is_alive() and thread.daemon for thread, _ in link.ticks().values())


def test_expired_messages_are_not_sent(broker: Mosquitto, make_link: MakeLink) -> None:
    with Subscriber(broker, "lane") as subscriber:
        link = make_link(broker, start=False)
        link.publish("lane", b"stale", expires_s=-1.0)
        link.publish("lane", b"fresh", expires_s=60.0)
        link.start()
        subscriber.wait_payload("lane", b"fresh")
        assert subscriber.payloads("lane") == [b"fresh"]
        wait_until(lambda: link.status().expired == 1)


def test_forbidden_topic_is_set_aside(broker: Mosquitto, make_link: MakeLink) -> None:
    link = connected(make_link(broker))
    link.publish("with/#/wildcard", b"x")
    link.publish("lane", b"y")
    link.publish_now("also/+", b"z")
    wait_until(lambda: link.status().queued == 0)
    assert (link.status().refused, link.status().published) == (1, 1)
    wait_until(lambda: link.status().results_dropped == 1)
    with pytest.raises(MqttError, match="no topic filter"):
        link.subscribe("a/#/b", lambda _: None)


def test_start_twice_is_an_error(broker: Mosquitto, make_link: MakeLink) -> None:
    link = make_link(broker)
    with pytest.raises(MqttError):
        link.start()


def test_close_without_start(make_link: MakeLink) -> None:
    link = make_link(free_port(), start=False)
    link.close()
    with pytest.raises(MqttError):
        link.start()
