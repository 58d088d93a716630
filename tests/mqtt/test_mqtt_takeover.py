"""Another device with our id, a device that slept, and how long to wait before coming back."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest

from edge_runtime.mqtt.connection import asleep_s
from edge_runtime.mqtt.events import LinkEvent
from edge_runtime.mqtt.link import MqttLink
from edge_runtime.mqtt.settings import Backoff, BrokerSettings, ProtocolChoice, Timing
from edge_runtime.mqtt.takeover import TakeoverWatch
from tests.mosquitto import Mosquitto, free_port, wait_until
from tests.mqtt.brokers import ScriptedBroker
from tests.relay import Relay


class RecordingBackoff(Backoff):
    """Remembers what it was asked, and lets nobody wait long."""

    def __init__(self) -> None:
        super().__init__(Timing())
        self.asked: list[str] = []

    def next_delay_s(self, *, suspicious: bool = False) -> float:
        self.asked.append("suspicious" if suspicious else "next")
        return 0.02

    def soon_s(self) -> float:
        self.asked.append("soon")
        return 0.0

    def reset(self) -> None:
        self.asked.append("reset")


@pytest.mark.parametrize("protocol", ["5", pytest.param("3.1.1", marks=pytest.mark.full)])
def test_o7_two_devices_with_one_id_are_an_event_on_both(tmp_path: Path, protocol: ProtocolChoice) -> None:
    timing = Timing(retry_first_s=0.02, retry_cap_s=0.5, connack_s=1.0)
    events: list[list[LinkEvent]] = [[], []]
    with Mosquitto(tmp_path) as broker:
        settings = BrokerSettings(broker.host, broker.port, "gate-07", protocol)
        links = [MqttLink(settings, timing=timing, on_event=events[number].append) for number in range(2)]
        for link in links:
            link.start()
        wait_until(lambda: all(events), 20)
        wait_until(lambda: all(link.status().reconnects >= 4 for link in links), 20)
        statuses = [link.status() for link in links]
        for link in links:
            link.close(0.5)
    for told, status in zip(events, statuses, strict=True):
        assert [event.what for event in told] == ["taken-over"], "once per episode"
        assert status.takeovers == 1
        assert told[0].data["client_id"] == "gate-07"
        assert told[0].data["short_sessions"] == 3
        assert "'gate-07'" in told[0].message


def test_p17_a_broker_that_says_so_is_believed_at_once() -> None:
    """0x8E, session taken over; mosquitto 2.0 only closes the connection."""
    events: list[LinkEvent] = []
    backoff = RecordingBackoff()
    with ScriptedBroker(lambda *_: 0) as broker:
        settings = BrokerSettings(broker.host, broker.port, "gate-07", "5")
        link = MqttLink(settings, backoff=backoff, on_event=events.append)
        link.start()
        wait_until(lambda: link.status().connected)
        broker.hang_up(0x8E)
        wait_until(lambda: link.status().reconnects == 1)
        link.close(0.3)
    assert [(event.what, event.data["said_so"]) for event in events] == [("taken-over", True)]
    assert "taken over by another client" in events[0].message
    assert backoff.asked == ["suspicious"]


def test_o7_an_episode_is_told_hourly_and_ends() -> None:
    watch = TakeoverWatch("dev", Timing())
    hour_ns = int(3600e9)
    for _ in range(2):
        assert not watch.session_ended(1.0, by_broker=True, said_so=False)
    assert watch.session_ended(1.0, by_broker=True, said_so=False)
    assert watch.event(0) is not None
    assert watch.session_ended(40.0, by_broker=True, said_so=False), "who steps back is evicted late"
    assert watch.event(hour_ns - 1) is None
    assert watch.event(hour_ns) is not None
    assert watch.episodes == 1
    assert not watch.session_ended(61.0, by_broker=True, said_so=False)
    assert not watch.session_ended(40.0, by_broker=True, said_so=False), "over"
    assert watch.session_ended(500.0, by_broker=True, said_so=True), "the broker's word"
    assert watch.event(hour_ns + 1) is not None
    assert watch.episodes == 2


def test_o7_a_broker_that_goes_away_is_no_takeover(tmp_path: Path) -> None:
    """It ends short sessions too, but then nobody answers."""
    events: list[LinkEvent] = []
    with Mosquitto(tmp_path) as broker:
        timing = Timing(retry_first_s=0.02, retry_cap_s=0.1)
        link = MqttLink(BrokerSettings(broker.host, broker.port), timing=timing, on_event=events.append)
        link.start()
        for life in range(5):
            wait_until(partial(reconnected, link, life))
            broker.kill()
            wait_until(lambda: "unreachable" in link.status().reason)
            broker.start()
        link.close(0.3)
    assert not events


def reconnected(link: MqttLink, times: int) -> bool:
    return link.status().connected and link.status().reconnects == times


@pytest.mark.parametrize("network", ["as it was", "gone"])
def test_suspend_ends_the_session_and_comes_back_at_once(tmp_path: Path, network: str) -> None:
    slept = [100.0]
    events: list[LinkEvent] = []
    backoff = RecordingBackoff()
    with Mosquitto(tmp_path) as broker, Relay(broker.port) as relay:
        settings = BrokerSettings("127.0.0.1", relay.port)
        link = MqttLink(settings, backoff=backoff, on_event=events.append, asleep_s=lambda: slept[0])
        link.start()
        wait_until(lambda: link.status().connected)
        slept[0] += 1.9  # not worth it
        link.publish("lane", b"x")
        wait_until(lambda: link.status().published == 1)
        assert link.status().reconnects == 0
        slept[0] += 3600.0
        if network == "gone":
            relay.reset()  # the first thing that is heard after waking up
        wait_until(lambda: link.status().reconnects == 1)
        link.publish("lane", b"y")
        wait_until(lambda: link.status().published == 2)
        assert link.status().suspends == 1
        link.close(0.5)
    assert [(event.what, event.message) for event in events] == [
        ("suspended", "this device was suspended for 3600 s"),
    ]
    assert events[0].data == {"suspended_s": 3600.0}
    assert backoff.asked == ["soon"], "no back-off, and no suspicion"


def test_suspend_while_not_connected_is_nobodys_business() -> None:
    slept = [0.0]
    events: list[LinkEvent] = []
    link = MqttLink(
        BrokerSettings("127.0.0.1", free_port()),
        backoff=RecordingBackoff(),
        on_event=events.append,
        asleep_s=lambda: slept[0],
    )
    link.start()
    wait_until(lambda: "unreachable" in link.status().reason)
    slept[0] = 1000.0
    tries = link._connection._generation
    wait_until(lambda: link._connection._generation > tries + 2)
    link.close(0.3)
    assert not events


def test_clocks_of_a_device_that_is_awake_agree() -> None:
    first = asleep_s()
    time.sleep(0.02)
    assert abs(asleep_s() - first) < 0.2


@pytest.mark.parametrize("protocol", ["5", "3.1.1"])
def test_p22_backoff_starts_over_only_after_a_stable_session(tmp_path: Path, protocol: ProtocolChoice) -> None:
    backoff = RecordingBackoff()
    with Mosquitto(tmp_path) as broker, Relay(broker.port) as relay:
        timing = Timing(stable_s=0.4, short_session_s=0.0)
        settings = BrokerSettings("127.0.0.1", relay.port, protocol=protocol)
        link = MqttLink(settings, timing=timing, backoff=backoff)
        link.start()
        for times in range(3):
            wait_until(partial(reconnected, link, times))
            relay.reset()
        wait_until(partial(reconnected, link, 3))
        assert backoff.asked == ["next", "next", "next"], "an accepted CONNACK alone says nothing"
        since_ns = link.status().since_ns
        wait_until(lambda: time.monotonic_ns() - since_ns > 0.41e9)
        relay.reset()
        wait_until(partial(reconnected, link, 4))
        assert backoff.asked[3:] == ["reset", "next"]
        link.close(0.3)


def test_o8_first_connect_of_a_start_is_spread_but_for_a_broker_on_this_machine(tmp_path: Path) -> None:
    backoff = RecordingBackoff()
    elsewhere = MqttLink(BrokerSettings("192.0.2.1", 9), backoff=backoff, timing=Timing(connect_s=0.05))
    elsewhere.start()
    wait_until(lambda: "next" in backoff.asked)
    elsewhere.close(1.0)
    assert backoff.asked[0] == "soon"

    here = RecordingBackoff()
    with Mosquitto(tmp_path) as broker:
        link = MqttLink(BrokerSettings(broker.host, broker.port), backoff=here)
        link.start()
        wait_until(lambda: link.status().connected)
        link.close(0.5)
    assert here.asked == []
    assert all(0 <= Backoff(Timing()).soon_s() <= 1.0 for _ in range(100))
