"""How fast a backlog goes, and that what is live goes past it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paho.mqtt import client as paho

from edge_runtime.mqtt.link import MqttLink
from edge_runtime.mqtt.outbox import Message
from edge_runtime.mqtt.rate import TokenBucket
from edge_runtime.mqtt.settings import BrokerSettings
from tests.mosquitto import Mosquitto, Subscriber, wait_until
from tests.mqtt.lanes import LongLane, TimedLane


@given(rate=st.floats(0.01, 1e6), steps=st.lists(st.tuples(st.integers(0, 10**10), st.integers(0, 50)), max_size=50))
def test_bucket_never_gives_more_than_rate_and_burst(rate: float, steps: list[tuple[int, int]]) -> None:
    now_ns, taken = 0, 0
    bucket = TokenBucket(rate, now_ns)
    for wait_ns, wanted in steps:
        now_ns += wait_ns
        for _ in range(min(wanted, bucket.tokens(now_ns))):
            bucket.take()
            taken += 1
        assert taken <= max(20.0, rate / 10) + rate * now_ns / 1e9 + 1e-6 * taken + 1e-6
        if bucket.tokens(now_ns) < 1:
            assert bucket.ready_ns() > now_ns
            assert TokenBucket.tokens(bucket, bucket.ready_ns() + 1000) >= 1
            now_ns = bucket.ready_ns() + 1000


def test_bucket_needs_a_rate() -> None:
    for rate in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="sends nothing"):
            TokenBucket(rate, 0)


@pytest.mark.parametrize("rate", [100.0, pytest.param(600.0, marks=pytest.mark.full)])
def test_backlog_goes_at_its_rate(tmp_path: Path, rate: float) -> None:
    lane = LongLane(100_000)
    seconds = 1.0
    with Mosquitto(tmp_path) as broker:
        link = MqttLink(BrokerSettings(broker.host, broker.port), lanes=[lane], backlog_rate=rate)
        link.start()
        wait_until(lambda: link.status().published)
        t_start, before = time.monotonic(), link.status().published
        wait_until(lambda: link.status().published - before >= rate * seconds, 30)
        took_s = time.monotonic() - t_start
        link.close(0.2)
    burst = max(20.0, rate / 10)
    assert took_s >= seconds - burst / rate - 0.02
    assert took_s < seconds * 2.5  # 1.0 on an idle machine


@pytest.mark.full
def test_backlog_at_5000_a_second_is_as_fast_as_the_link(tmp_path: Path) -> None:
    reached: dict[float | None, float] = {}
    for rate in (None, 5000.0):
        lane = LongLane(1_000_000)
        with Mosquitto(tmp_path / str(rate)) as broker:
            link = MqttLink(BrokerSettings(broker.host, broker.port), lanes=[lane], backlog_rate=rate)
            link.start()
            wait_until(lambda link=link: link.status().published)  # type: ignore[misc]
            t_start, before = time.monotonic(), link.status().published
            wait_until(lambda link=link, before=before: link.status().published - before >= 15_000, 60)  # type: ignore[misc]
            reached[rate] = 15_000 / (time.monotonic() - t_start)
            link.close(0.2)
    assert reached[5000.0] <= 5500
    assert reached[5000.0] >= 0.8 * min(5000, reached[None] or 0)


class ArrivalTimes(Subscriber):
    """Takes payloads as the time (monotonic, ns) at which they were published."""

    def __init__(self, broker: Mosquitto, *topic_filters: str) -> None:
        self.took_s: list[float] = []
        super().__init__(broker, *topic_filters)

    def _add(self, message: paho.MQTTMessage) -> None:
        self.took_s.append((time.monotonic_ns() - int(message.payload)) / 1e9)


@pytest.mark.parametrize("rate", [100.0, None])
def test_live_messages_do_not_wait_for_a_backlog_of_100000(tmp_path: Path, rate: float | None) -> None:
    """Events (a capped lane beside the backlog), replies (memory) and results (QoS 0), 40 of each."""
    backlog, events = LongLane(100_000), TimedLane("event")
    with Mosquitto(tmp_path) as broker:
        arrivals = ArrivalTimes(broker, "reply", "result")
        with arrivals:
            link = MqttLink(BrokerSettings(broker.host, broker.port), lanes=[backlog, events], backlog_rate=rate)
            link.start()
            wait_until(lambda: link.status().published >= 20)
            for number in range(40):
                events.put(Message("event", b"e"))
                link.publish("reply", b"%d" % time.monotonic_ns())
                assert link.publish_now("result", b"%d" % time.monotonic_ns())
                # paced by the backlog itself: it goes on all the while
                done = len(backlog.gone)
                wait_until(lambda done=done: len(backlog.gone) >= done + 3)  # type: ignore[misc]
                assert backlog.waiting() > 20, number
            wait_until(lambda: len(events.took_s) == 40)
            wait_until(lambda: len(arrivals.took_s) == 80)
            link.close(0.2)
    assert max(events.took_s) < 0.9
    assert max(arrivals.took_s) < 0.9


def test_lanes_of_a_backlog_take_turns(tmp_path: Path) -> None:
    lanes = [LongLane(100_000, name=name, topic=name) for name in ("a", "b")]
    with Mosquitto(tmp_path) as broker:
        link = MqttLink(BrokerSettings(broker.host, broker.port), lanes=lanes, backlog_rate=400)
        link.start()
        wait_until(lambda: link.status().published >= 200)
        link.close(0.2)
    less, more = sorted(len(lane.gone) for lane in lanes)
    assert less > 0.6 * more
