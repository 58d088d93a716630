"""The spool behind the real pump and a real broker that goes away."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from edge_runtime.mqtt.link import MqttLink
from edge_runtime.mqtt.settings import BrokerSettings, Timing
from edge_runtime.telemetry.spool import SpoolOptions
from tests.mosquitto import Mosquitto, Subscriber, wait_until
from tests.telemetry.spools import Opened, said

QUICK = SpoolOptions(commit_s=0.02)
TIMING = Timing(retry_first_s=0.05, retry_cap_s=0.2)
TOPIC = "t/telemetry"


def link_to(broker: Mosquitto, opened: Opened) -> MqttLink:
    link = MqttLink(BrokerSettings(broker.host, broker.port), lanes=opened.spool.lanes, timing=TIMING)
    link.start()
    return link


def first_arrivals(subscriber: Subscriber) -> list[int]:
    """Numbers in the order of their first arrival: QoS 1 may bring one again."""
    return list(dict.fromkeys(int(payload.split()[0]) for payload in subscriber.payloads(TOPIC)))


def rows_on_disk(store: Path) -> int:
    with sqlite3.connect(store / "spool.sqlite") as db:
        count = int(db.execute("SELECT count(*) FROM message").fetchone()[0])
    db.close()
    return count


def put(opened: Opened, count: int) -> None:
    for number in range(count):
        opened.spool.append("telemetry", TOPIC, said(str(number)))


def test_rows_made_while_the_broker_is_away_arrive_in_order(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    with Mosquitto(tmp_path / "broker", persistent=True) as broker, Opened(store, options=QUICK) as opened:
        link = link_to(broker, opened)
        lane = opened.spool.lane("telemetry")
        with Subscriber(broker, TOPIC) as subscriber:
            put(opened, 100)
            wait_until(lambda: lane.waiting() == 0)
            broker.kill()
            put(opened, 360)
            opened.flush()
            assert lane.waiting() >= 360 - 20
            broker.start()
            wait_until(lambda: lane.waiting() == 0, 20)
            subscriber.wait_for(lambda _: len(first_arrivals(subscriber)) == 460, 20)
            assert first_arrivals(subscriber) == list(range(460))
        assert link.close()
        assert opened.close()
    assert rows_on_disk(store) == 0


def test_a_backlog_is_drained_while_the_broker_is_killed_again_and_again(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    # else it drops what is more than 1000 for a subscriber that is not back yet
    config = ["max_queued_messages 0"]
    with Mosquitto(tmp_path / "broker", config, persistent=True) as broker, Opened(store, options=QUICK) as opened:
        with Subscriber(broker, TOPIC) as subscriber:
            put(opened, 1500)
            opened.flush()
            link = link_to(broker, opened)
            for share in (300, 600, 1000):
                wait_until(lambda share=share: len(first_arrivals(subscriber)) >= share, 20)  # type: ignore[misc]
                broker.stop()  # saves what it acknowledged
                broker.start()
            wait_until(lambda: opened.spool.lane("telemetry").waiting() == 0, 20)
            subscriber.wait_for(lambda _: len(first_arrivals(subscriber)) == 1500, 20)
            arrived = first_arrivals(subscriber)
            assert arrived == list(range(1500))
        assert link.close()


def test_rows_are_deleted_only_after_the_broker_has_acknowledged_them(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    with Mosquitto(tmp_path / "broker") as broker, Opened(store, options=QUICK) as opened:
        link = link_to(broker, opened)
        wait_until(lambda: link.status().connected)
        broker.freeze()
        put(opened, 50)
        opened.flush()
        lane = opened.spool.lane("telemetry")
        wait_until(lambda: lane._handed)
        assert lane.waiting() == 50
        link.close(0.2)
        assert opened.close()
        broker.thaw()
    assert rows_on_disk(store) == 50
    with (
        Mosquitto(tmp_path / "broker2") as broker,
        Opened(store, "s2", options=QUICK) as opened,
        Subscriber(broker, TOPIC) as subscriber,
    ):
        link = link_to(broker, opened)
        subscriber.wait_for(lambda _: len(first_arrivals(subscriber)) == 50)
        assert first_arrivals(subscriber) == list(range(50))
        wait_until(lambda: opened.spool.lane("telemetry").waiting() == 0)
        assert link.close()


def test_what_the_broker_refuses_for_good_is_set_aside(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    (tmp_path / "acl").write_text(f"topic readwrite {TOPIC}\n")
    config = [f"acl_file {tmp_path / 'acl'}"]
    timing = Timing(retry_first_s=0.05, retry_cap_s=0.2, refused_retry_s=0.05, refused_cap_s=0.05, refused_tries=3)
    with Mosquitto(tmp_path / "broker", config) as broker, Opened(store, options=QUICK) as opened:
        opened.spool.append("telemetry", "t/denied", said("denied"))
        put(opened, 3)
        link = MqttLink(BrokerSettings(broker.host, broker.port), lanes=opened.spool.lanes, timing=timing)
        link.start()
        wait_until(lambda: opened.spool.lane("telemetry").waiting() == 0)
        assert link.status().refused == 1
        assert opened.spool.status().refused == {"event": 0, "telemetry": 1}
        assert link.close()
        assert opened.close()
    with sqlite3.connect(store / "spool.sqlite") as db:
        assert db.execute("SELECT seq, topic, payload FROM refused").fetchall() == [(0, "t/denied", b"0 denied")]
    db.close()
