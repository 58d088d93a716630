"""Commands over a real broker: their order, what waits and what does not, what is answered, and what a stop leaves."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from pydantic import JsonValue

from edge_runtime.app import command_door
from edge_runtime.app.command_door import CommandDoor
from edge_runtime.clock import SystemClock
from edge_runtime.control.commands import CommandSpec
from edge_runtime.control.dispatcher import Dispatcher
from edge_runtime.control.journal import JOURNAL_NAME, CommandJournal
from edge_runtime.mqtt.link import MqttLink
from edge_runtime.mqtt.settings import BrokerSettings
from edge_runtime.records.commands import PingArgs
from edge_runtime.records.identity import Identity
from edge_runtime.records.window import Payload
from tests.mosquitto import Mosquitto, Subscriber, wait_until

ROOT = "edge/v1/gate-07"
_NUMBERS = itertools.count()


class NoteArgs(Payload):
    what: str


class Device:
    """A door with commands that a test can hold up: `note` waits for `go`, `build` (slow) for `built`."""

    def __init__(self, store: Path, broker: Mosquitto, *, client_id: str = "gate-07") -> None:
        self.go, self.built = threading.Event(), threading.Event()
        self.go.set()
        self.notes: list[str] = []
        self.building: list[str] = []
        identity, clock = Identity("gate-07", "b1", "s1", "1", 0), SystemClock()
        self.journal = CommandJournal(store / JOURNAL_NAME, clock, lambda: True, "b1")
        commands: dict[str, CommandSpec[Any]] = {
            "note": CommandSpec(NoteArgs, self._note),
            "build": CommandSpec(NoteArgs, self._build, slow=True),
            "look": CommandSpec(PingArgs, lambda _: len(self.notes), changes=False),
        }
        self.dispatcher = Dispatcher(identity, clock, lambda: True, commands, journal=self.journal)
        self.door = CommandDoor(self.dispatcher, "gate-07", retry_s=0.05)
        self.link = MqttLink(BrokerSettings(host=broker.host, port=broker.port, client_id=client_id))
        self.door.attach(self.link)
        self.link.start()
        self.door.start()
        wait_until(lambda: self.link.status().connected, what="the link")

    def _note(self, args: NoteArgs) -> JsonValue:
        assert self.go.wait(10)
        self.notes.append(args.what)
        return args.what

    def _build(self, args: NoteArgs) -> JsonValue:
        self.building.append(args.what)
        assert self.built.wait(10)
        return args.what

    def close(self) -> list[str]:
        stuck = self.door.stop(5)
        self.link.close(2)
        assert self.journal.close(1)
        return stuck

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        self.go.set()
        self.built.set()
        assert self.close() == []


class Sender:
    """Sends commands, and looks at the replies."""

    def __init__(self, broker: Mosquitto) -> None:
        self._client = Subscriber(broker, f"{ROOT}/reply/+", client_id=f"sender-{next(_NUMBERS)}")
        self._soon = (datetime.now(timezone.utc) + timedelta(minutes=5)).isoformat()

    def send(self, name: str, command_id: str | None, **args: object) -> None:
        wish = {"id": command_id, "expires_utc": self._soon, "args": args}
        self.raw(name, json.dumps({key: value for key, value in wish.items() if value is not None}).encode())

    def note(self, *ids: str, name: str = "note") -> None:
        for each in ids:
            self.send(name, each, what=each)

    def raw(self, name: str, payload: bytes) -> None:
        self._client.publish(f"{ROOT}/cmd/{name}", payload)

    def wait(self, command_id: str, count: int = 1) -> list[dict[str, Any]]:
        """The replies to an id, once there are `count`."""
        topic = f"{ROOT}/reply/{command_id}"
        self._client.wait_for(
            lambda seen: sum(one.topic == topic for one in seen) >= count, what=f"reply {count} to {command_id}"
        )
        return [json.loads(payload) for payload in self._client.payloads(topic)]

    def order(self) -> list[str]:
        return [one.topic.rpartition("/")[2] for one in self._client.seen()]

    def close(self) -> None:
        self._client.close()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mosquitto]:
    with Mosquitto(tmp_path_factory.mktemp("broker")) as broker:
        yield broker


@pytest.fixture
def sender(broker: Mosquitto) -> Iterator[Sender]:
    sender = Sender(broker)
    yield sender
    sender.close()


def test_o1_slow_ones_wait_for_each_other_and_nobody_for_them(
    tmp_path: Path, broker: Mosquitto, sender: Sender
) -> None:
    with Device(tmp_path, broker) as device:
        sender.note("s1", "s2", "s3", "s4", "s5", "s6", name="build")
        wait_until(lambda: len(device.building) == 4, what="four at a time")
        device.go.clear()
        sender.note("f1", "f2", "f3")
        # what changes nothing waits for none of them
        sender.send("look", "look")
        assert sender.wait("look")[0]["result"] == 0
        device.go.set()
        sender.wait("f3")
        assert [each for each in sender.order() if each[0] == "f"] == ["f1", "f2", "f3"]
        assert device.notes == ["f1", "f2", "f3"]
        assert len(device.building) == 4
        device.built.set()
        for number in range(1, 7):
            assert sender.wait(f"s{number}")[0]["ok"]
        assert sorted(device.building) == ["s1", "s2", "s3", "s4", "s5", "s6"]


def test_sent_again_while_it_is_obeyed_and_afterwards(tmp_path: Path, broker: Mosquitto, sender: Sender) -> None:
    with Device(tmp_path, broker) as device:
        device.go.clear()
        sender.note("c1", "c1")
        assert sender.wait("c1")[0]["error"]["code"] == "in_progress"
        device.go.set()
        done = sender.wait("c1", 2)[1]
        assert done["ok"]
        sender.note("c1")
        assert sender.wait("c1", 3)[2] == done
        sender.send("note", "c1", what="else")
        assert sender.wait("c1", 4)[3]["error"]["code"] == "id_reused"
        assert device.notes == ["c1"]


@pytest.mark.parametrize(
    ("name", "payload", "code", "where"),
    [
        ("note", b"", "invalid", "payload"),
        ("note", b'{"id": "a/b"}', "invalid", "id"),
        ("note", b"{}", "invalid", "id"),
        ("x" * 5000, b"{}", "unknown_command", "name"),
        ("", b"{}", "unknown_command", "name"),
        ("note", b'{"id": "bad", "args": {"what": "x"}}', "invalid", "expires_utc"),
    ],
)
def test_what_is_malformed_is_answered(
    tmp_path: Path, broker: Mosquitto, sender: Sender, name: str, payload: bytes, code: str, where: str
) -> None:
    with Device(tmp_path, broker):
        sender.raw(name, payload)
        named = b"bad" in payload
        (reply,) = sender.wait("bad" if named else "malformed")
        assert reply["id"] == ("bad" if named else None)
        assert (reply["error"]["code"], reply["error"]["where"]) == (code, where)


def test_too_many_that_wait_are_refused(
    tmp_path: Path, broker: Mosquitto, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_door, "MOST_WAITING", 3)
    with Device(tmp_path, broker) as device:
        device.go.clear()
        sender.note("c1", "c2", "c3", "c4")
        (busy,) = sender.wait("c4")
        assert (busy["error"]["code"], busy["error"]["retryable"]) == ("busy", True)
        sender.send("look", "look")
        assert sender.wait("look")[0]["ok"]
        device.go.set()
        sender.wait("c3")
        sender.note("c4")
        assert sender.wait("c4", 2)[1]["ok"]
        assert device.notes == ["c1", "c2", "c3", "c4"]


def test_what_a_stop_leaves_the_next_start_obeys(tmp_path: Path, broker: Mosquitto, sender: Sender) -> None:
    with Device(tmp_path, broker) as device:
        device.go.clear()
        sender.note("c1", "c2", "c3")
        wait_until(lambda: device.journal.find("c3") is not None, what="c3 is accepted")
        device.door.halt()
        sender.note("c4")
        assert sender.wait("c4")[0]["error"]["code"] == "stopping"
        device.go.set()  # c1 is being obeyed, and may end
        assert device.close() == []
        assert device.notes == ["c1"]
    with Device(tmp_path, broker) as device:
        sender.wait("c3")
        assert sender.order() == ["c4", "c1", "c2", "c3"]
        assert device.notes == ["c2", "c3"]
        # over the other door, the one and the other
        assert device.dispatcher.handle("note", {"id": "c1"}, door="socket").error is not None
        sender.note("c1", "c2")
        sender.wait("c1", 2)
        sender.wait("c2", 2)
        assert device.notes == ["c2", "c3"]


def test_what_does_not_end_in_time_is_answered_by_the_next_start(
    tmp_path: Path, broker: Mosquitto, sender: Sender
) -> None:
    with Device(tmp_path, broker) as device:
        sender.note("s1", name="build")
        wait_until(lambda: device.building, what="s1 is begun")
        assert device.door.stop(0.01) == ["command-slow"]
        assert device.journal.close(1)
        device.link.close(2)
        with Device(tmp_path, broker) as following:
            (reply,) = sender.wait("s1")
            assert (reply["error"]["code"], reply["error"]["retryable"]) == ("interrupted", False)
            sender.note("s1", name="build")
            assert sender.wait("s1", 2)[1] == reply
            assert following.building == []


def test_accepted_ones_wait_for_the_disk_in_their_order(tmp_path: Path, broker: Mosquitto, sender: Sender) -> None:
    """The disk goes between the command's acceptance and its turn."""
    with Device(tmp_path, broker) as device:
        device.go.clear()
        sender.note("c1", "c2", "c3")
        sender.note("s1", "s2", "s3", "s4", "s5", name="build")
        wait_until(lambda: len(device.building) == 4 and device.journal.find("s5"), what="all are accepted")
        path, journal = device.journal._path, device.journal
        assert path is not None
        with journal._disk:
            journal._drop_file()
            journal._path = tmp_path / "gone" / JOURNAL_NAME
        device.go.set()
        device.built.set()
        sender.wait("c1")
        for number in range(1, 5):
            sender.wait(f"s{number}")
        sender.note("c4")
        assert sender.wait("c4")[0]["error"]["code"] == "store_unwritable"
        (alarm,) = journal.alarms()
        assert "cannot be written" in alarm
        assert device.notes == ["c1"]
        assert len(device.building) == 4
        with journal._disk:
            journal._path = path
        sender.wait("c3")
        sender.wait("s5")
        assert device.notes == ["c1", "c2", "c3"]
        wait_until(lambda: not journal.alarms(), what="the alarm is over")


def test_a_retained_command_is_refused_at_every_start(tmp_path: Path, broker: Mosquitto, sender: Sender) -> None:
    """O9, case 19: it would switch things at each start."""
    soon = (datetime.now(timezone.utc) + timedelta(minutes=5)).isoformat()
    wish = json.dumps({"id": "old", "expires_utc": soon, "args": {"what": "old"}}).encode()
    sender._client.publish(f"{ROOT}/cmd/note", wish, retain=True)
    try:
        for start in (1, 2):
            # one that has not subscribed before: to whoever has, a broker delivers it as if it were not retained
            with Device(tmp_path, broker, client_id="new") as device:
                assert sender.wait("old", start)[-1]["error"]["code"] == "retained"
                assert device.notes == []
    finally:
        sender._client.publish(f"{ROOT}/cmd/note", b"", retain=True)


def test_a_command_that_is_published_with_retain_is_refused_at_once(
    tmp_path: Path, broker: Mosquitto, sender: Sender
) -> None:
    """Also by whoever has subscribed long ago; and clearing the topic is no command."""
    soon = (datetime.now(timezone.utc) + timedelta(minutes=5)).isoformat()
    wish = json.dumps({"id": "now", "expires_utc": soon, "args": {"what": "now"}}).encode()
    with Device(tmp_path, broker) as device:
        sender.note("c1")
        assert sender.wait("c1")[0]["ok"]
        sender._client.publish(f"{ROOT}/cmd/note", wish, retain=True)
        assert sender.wait("now")[0]["error"]["code"] == "retained"
        sender._client.publish(f"{ROOT}/cmd/note", b"", retain=True)
        sender.note("c2")
        assert sender.wait("c2")[0]["ok"]
        assert device.notes == ["c1", "c2"]
    assert not sender._client.payloads(f"{ROOT}/reply/malformed")


def test_commands_are_alive_after_the_broker_restarted(tmp_path: Path) -> None:
    """Case 18."""
    with Mosquitto(tmp_path / "broker") as broker, Device(tmp_path, broker) as device:
        broker.restart()
        wait_until(lambda: device.link.status().reconnects > 0, 20, "the link is back")
        sender = Sender(broker)
        sender.note("c1")
        assert sender.wait("c1")[0]["ok"]
        sender.close()
