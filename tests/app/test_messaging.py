"""What the daemon says to the broker beside the link: live copies, alarms, and how the session before ended."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from edge_runtime.app import messaging
from edge_runtime.clock import SystemClock
from edge_runtime.config import parse_config
from edge_runtime.mqtt.link import MqttLink
from edge_runtime.telemetry.home_assistant import HomeAssistant
from edge_runtime.telemetry.spool import TELEMETRY, Spool
from edge_runtime.telemetry.spool_file import SpoolFile, SpoolFileError
from edge_runtime.telemetry.spool_keeper import Keeper
from tests.awaiting import wait_until
from tests.telemetry.payloads import window
from tests.telemetry.spools import identity, read_all

CONFIG = """
[device]
store = "store"
[[camera]]
name = "gate"
url = "synthetic:"
[[model]]
name = "detector"
bundle = "bundled:centernet"
[mqtt]
host = "127.0.0.1"
port = 1
backlog_rate = 100
"""


class Sender:
    """Messaging whose link never starts; the test says whether it is connected."""

    def __init__(self, folder: Path, session: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.connected = False
        self.live: list[int] = []
        monkeypatch.setattr(MqttLink, "start", lambda _link: None)
        self.messaging = messaging.Messaging(
            parse_config(CONFIG, "config.toml", folder), identity(session), SystemClock()
        )
        store = folder / "store"
        store.mkdir(exist_ok=True)
        self.messaging.start(store)
        link = self.messaging.link
        assert link is not None
        status = link.status

        def now() -> object:
            held = SimpleNamespace(**{name: getattr(status(), name) for name in status().__slots__})
            held.connected = self.connected
            return held

        monkeypatch.setattr(link, "status", now)
        monkeypatch.setattr(link, "publish_now", self._publish_now)

    def _publish_now(self, topic: str, payload: bytes) -> bool:
        assert topic == "edge/v1/gate-07/telemetry/live"
        self.live.append(json.loads(payload)["seq"])
        return True

    @property
    def spool(self) -> Spool:
        assert self.messaging._spool is not None
        return self.messaging._spool

    def windows(self, count: int) -> None:
        for number in range(count):
            self.messaging.window(window(1, number), lambda _report: None)
        self.spool.flush(10)

    def events(self) -> list[dict[str, object]]:
        self.spool.flush(10)
        return [json.loads(row.message.payload) for row in read_all(self.spool, "event")]

    def stop(self) -> None:
        self.messaging.stop(lambda most_s: most_s)


def test_live_copies_go_beside_a_backlog_while_there_is_a_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = Sender(tmp_path, "s1", monkeypatch)
    sender.windows(60)
    assert sender.live == []
    sender.connected = True
    sender.windows(2)
    assert sender.live == [60, 61]
    sender.connected = False
    sender.windows(1)
    sender.connected = True
    lane = sender.spool.lane(TELEMETRY)
    lane.done([row.token for row in [*lane.read(-1, 99), *read_all(sender.spool, TELEMETRY)]])
    sender.windows(1)
    assert sender.live == [60, 61]  # what few wait before needs no copy
    sender.stop()


def test_an_alarm_ends_with_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **_more: object) -> None:
        raise SpoolFileError("database or disk is full", corrupt=False)

    sender = Sender(tmp_path, "s1", monkeypatch)
    with monkeypatch.context() as patched:
        patched.setattr(SpoolFile, "write", full)
        sender.windows(1)
        (alarm,) = sender.messaging.alarms()
        assert "full" in alarm
    sender.windows(1)
    assert sender.messaging.alarms() == []
    assert [event["data"] for event in sender.events()] == [{"code": "spool_memory"}, {"code": "spool_restored"}]
    sender.stop()


def test_a_disk_that_hangs_is_an_alarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sender = Sender(tmp_path, "s1", monkeypatch)
    monkeypatch.setattr(messaging, "SPOOL_SILENCE_S", 0.2)
    real = Keeper.commit

    def hang(keeper: Keeper, *, try_disk: bool) -> None:
        time.sleep(1.0)
        real(keeper, try_disk=try_disk)

    with monkeypatch.context() as patched:
        patched.setattr(Keeper, "commit", hang)
        sender.messaging.window(window(1, 0), lambda _report: None)
        wait_until(lambda: any("hangs" in alarm for alarm in sender.messaging.alarms()))
    monkeypatch.setattr(messaging, "SPOOL_SILENCE_S", 30.0)
    assert sender.messaging.alarms() == []
    sender.stop()


def test_a_stop_does_not_wait_for_a_disk_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sender = Sender(tmp_path, "s1", monkeypatch)
    answers = threading.Event()
    real = SpoolFile.write

    def hang(file: SpoolFile, *args: object, **more: object) -> object:
        answers.wait(30)
        return real(file, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(SpoolFile, "write", hang)
    monkeypatch.setattr(HomeAssistant, "settled", lambda _home: answers.wait(30))
    link = sender.messaging.link
    assert link is not None
    monkeypatch.setattr(link, "close", lambda _deadline_s: True)
    sender.messaging.window(window(1, 0), lambda _report: None)
    start = time.monotonic()
    sender.stop()
    assert time.monotonic() - start < messaging.FLUSH_S + messaging.SPOOL_CLOSE_S + 1.0
    answers.set()
    assert sender.spool.close(10)


def test_an_unclean_start_is_told_also_where_the_disk_was_in_trouble_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Sender(tmp_path, "s1", monkeypatch)
    first.windows(1)
    with monkeypatch.context() as patched:
        patched.setattr(SpoolFile, "close", lambda file, **_: file._db.close())  # as after a kill
        first.stop()

    def full(*_: object, **_more: object) -> None:
        raise SpoolFileError("database or disk is full", corrupt=False)

    with monkeypatch.context() as patched:
        patched.setattr(SpoolFile, "begin", full)
        sender = Sender(tmp_path, "s2", monkeypatch)
        sender.windows(1)
    sender.windows(2)
    sender.windows(1)
    started = [event["data"] for event in sender.events() if event["kind"] == "unclean-start"]
    assert [data["previous_session"] for data in started] == ["s1"]  # type: ignore[index]
    sender.stop()


def test_a_name_server_that_hangs_is_no_stall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are a broker's many addresses: the watchdog would restart the daemon for a network that is away."""
    sender = Sender(tmp_path, "s1", monkeypatch)
    assert sender.messaging.loops()["mqtt-net"].max_silence_s > 120
    sender.connected = True
    assert {name: loop.max_silence_s for name, loop in sender.messaging.loops().items()} == messaging.LOOP_SILENCE_S
    sender.stop()
