"""Lanes, the pump's use of them, and waiting times: no broker needed."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.errors import MqttError
from edge_runtime.mqtt.link import MqttLink
from edge_runtime.mqtt.outbox import Lane, MemoryLane, Message, Row
from edge_runtime.mqtt.settings import Backoff, BrokerSettings, Timing
from tests.mosquitto import Mosquitto, Subscriber, wait_until


def put(lane: MemoryLane, count: int, first: int = 0) -> None:
    for number in range(first, first + count):
        lane.put(Message("t", b"%d" % number))


def payloads(rows: Sequence[Row]) -> list[int]:
    return [int(row.message.payload) for row in rows]


def test_memory_lane_keeps_the_newest_and_counts() -> None:
    lane = MemoryLane("m", 3)
    put(lane, 5)
    assert payloads(lane.read(-1, 10)) == [2, 3, 4]
    assert (lane.waiting(), lane.dropped()) == (3, 2)


def test_memory_lane_reads_again_what_is_not_done() -> None:
    lane = MemoryLane("m", 10)
    put(lane, 5)
    rows = lane.read(-1, 2)
    assert payloads(rows) == [0, 1]
    assert payloads(lane.read(rows[-1].token, 10)) == [2, 3, 4]
    lane.done([rows[0].token, 99])
    assert payloads(lane.read(-1, 10)) == [1, 2, 3, 4]
    lane.refuse(rows[1].token, "no")
    assert payloads(lane.read(-1, 10)) == [2, 3, 4]


@given(st.lists(st.one_of(st.just("put"), st.just("read"), st.just("reset"), st.integers(0, 30)), max_size=60))
def test_memory_lane_never_loses_or_reorders(steps: list[str | int]) -> None:
    lane, cursor, number = MemoryLane("m", 8), -1, 0
    model: list[int] = []
    for step in steps:
        if step == "put":
            lane.put(Message("t", b"%d" % number))
            model = [*model, number][-8:]
            number += 1
        elif step == "read":
            rows = lane.read(cursor, 3)
            assert payloads(rows) == [one for one in model if one > cursor][:3]
            cursor = rows[-1].token if rows else cursor
        elif step == "reset":
            cursor = -1
        elif isinstance(step, int):
            lane.done([step])
            model = [one for one in model if one != step]
    assert payloads(lane.read(-1, 100)) == model
    assert lane.waiting() == len(model)


def test_memory_lane_needs_room() -> None:
    with pytest.raises(ValueError, match="capacity"):
        MemoryLane("m", 0)


class DiskLane:
    """What a spool looks like to the pump; its disk fails now and then."""

    name = "disk"

    def __init__(self, count: int) -> None:
        self.rows = {10 * number: Message("disk", b"%d" % number) for number in range(count)}
        self.threads: set[str] = set()
        self.fail_next = False

    def read(self, after: int, limit: int) -> Sequence[Row]:
        self.threads.add(threading.current_thread().name)
        if self.fail_next:
            self.fail_next = False
            raise OSError(5, "Input/output error")
        return [Row(token, message) for token, message in sorted(self.rows.items()) if token > after][:limit]

    def done(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.rows.pop(token, None)

    def refuse(self, token: int, reason: str) -> None:
        self.rows.pop(token, None)

    def waiting(self) -> int:
        return len(self.rows)

    def dropped(self) -> int:
        return 0

    def on_put(self, wake: Callable[[], None]) -> None:
        pass


def test_a_second_lane_with_a_failing_disk(tmp_path: Path) -> None:
    lane = DiskLane(100)
    as_lane: Lane = lane
    lane.fail_next = True
    with Mosquitto(tmp_path) as broker, Subscriber(broker, "disk", "live") as subscriber:
        link = MqttLink(BrokerSettings(broker.host, broker.port), lanes=[as_lane], timing=Timing(retry_first_s=0.05))
        link.start()
        link.publish("live", b"not held up")
        subscriber.wait_payload("disk", b"99")
        subscriber.wait_payload("live", b"not held up")
        assert [int(one) for one in subscriber.payloads("disk")] == list(range(100))
        wait_until(lambda: not lane.rows)
        assert link.status().internal_errors == 1
        assert lane.threads == {"mqtt-pump"}
        assert link.close()


def test_p22_backoff_has_full_jitter_from_the_first_retry() -> None:
    timing = Timing(retry_first_s=1.0, retry_cap_s=60.0)
    firsts = [Backoff(timing, random.Random(seed)).next_delay_s() for seed in range(500)]
    assert 0.1 <= min(firsts) < 0.15  # and nobody in the first tenth
    assert 0.95 < max(firsts) <= 1.0

    backoff = Backoff(timing, random.Random(1))
    delays = [backoff.next_delay_s() for _ in range(2000)]
    assert all(delay <= 2.0**attempt for attempt, delay in enumerate(delays[:6]))
    assert 55 < max(delays) <= 60
    backoff.reset()
    assert backoff.next_delay_s() <= 1.0
    assert 15 <= backoff.next_delay_s(suspicious=True) <= 60


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"host": ""}, "host is empty"),
        ({"port": 0}, "port 0"),
        ({"client_id": ""}, "client id"),
        ({"keepalive_s": 1}, "keepalive_s"),
        ({"protocol": "4"}, "protocol '4'"),
        ({"password_file": Path("x")}, "without a user name"),
        ({"key_file": Path("x")}, "without a certificate"),
    ],
)
def test_settings_that_can_never_work(changes: dict[str, object], words: str) -> None:
    with pytest.raises(MqttError, match=words):
        BrokerSettings(**({"host": "h"} | changes))  # type: ignore[arg-type]
