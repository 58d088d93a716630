"""Commands: what is obeyed, what is refused and with which words, and that nothing a sender writes does harm."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue

from edge_runtime.control.commands import CommandSpec, camera, ping
from edge_runtime.control.dispatcher import Dispatcher, Door
from edge_runtime.control.journal import CommandJournal
from edge_runtime.errors import EdgeError
from edge_runtime.records.commands import CameraAction, CameraArgs, CameraResult, PingArgs, Reply
from edge_runtime.records.identity import Identity
from edge_runtime.records.window import Payload

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=timezone.utc)
SOON = "2026-03-01T12:01:00Z"
IDENTITY = Identity("gate-07", "b1", "s1", "1.2.3", 0)


class FakeClock:
    def __init__(self) -> None:
        self.now_ns = 5 * 10**9
        self.now_utc = NOW

    def monotonic_ns(self) -> int:
        return self.now_ns

    def utc(self) -> datetime:
        return self.now_utc

    def pass_s(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)
        self.now_utc += timedelta(seconds=seconds)


class FakeCameras:
    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def pause(self, name: str) -> CameraResult:
        return self._note("pause", name)

    def resume(self, name: str) -> CameraResult:
        return self._note("resume", name)

    def cap(self, name: str, fps: float | None) -> CameraResult:
        return self._note("cap", name, fps)

    def add(self, table: Mapping[str, JsonValue]) -> CameraResult:
        return self._note("add", "gate", dict(table))

    def change(self, name: str, keys: Mapping[str, JsonValue]) -> CameraResult:
        return self._note("change", name, dict(keys))

    def remove(self, name: str) -> CameraResult:
        return self._note("remove", name)

    def reset(self, name: str | None) -> CameraResult:
        return self._note("reset", "gate" if name is None else name, name)

    def _note(self, action: CameraAction, *call: object) -> CameraResult:
        if call[0] != "gate":
            raise EdgeError(
                f"there is no camera {call[0]}",
                code="no_camera",
                where=str(call[0]),
                remedy="see status",
                retryable=True,
            )
        self.calls.append((action, *call))
        return CameraResult(name="gate", action=action, fps=None, done=[], persisted=True, notes=[])


class NumberArgs(Payload):
    number: int = 0


class Device:
    """A dispatcher with two real commands and some that go wrong."""

    def __init__(self, *, synced: bool = True, remembered: int = 100) -> None:
        self.clock = FakeClock()
        self.cameras = FakeCameras()
        self.seen: list[tuple[str, Door, Reply]] = []
        self.synced = synced
        self.count = 0
        commands: Mapping[str, CommandSpec[Any]] = {
            "ping": ping(IDENTITY, self.clock),
            "camera": camera(self.cameras),
            "count": CommandSpec(PingArgs, self._count),
            "crash": CommandSpec(PingArgs, lambda _: 1 / 0),
            "nan": CommandSpec(PingArgs, lambda _: float("nan")),
            "strange": CommandSpec(PingArgs, lambda _: object()),  # type: ignore[arg-type,return-value]
            "slow": CommandSpec(NumberArgs, self._slow, budget_s=1.0),
        }
        self.dispatcher = Dispatcher(
            IDENTITY,
            self.clock,
            lambda: self.synced,
            commands,
            journal=CommandJournal(None, self.clock, lambda: self.synced, IDENTITY.boot, capacity=remembered),
            observe=lambda *what: self.seen.append(what),
        )

    def _count(self, _: PingArgs) -> JsonValue:
        self.count += 1
        return self.count

    def _slow(self, args: NumberArgs) -> JsonValue:
        self.clock.pass_s(3.0)
        return args.number

    def mqtt(self, name: str, payload: object, *, retained: bool = False) -> Reply:
        data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        return self.dispatcher.handle(name, data, retained=retained, door="mqtt")

    def socket(self, name: str, payload: bytes | Mapping[str, object]) -> Reply:
        return self.dispatcher.handle(name, payload, door="socket")


def wish(command_id: str = "c1", expires: str = SOON, **args: Any) -> dict[str, object]:
    return {"id": command_id, "expires_utc": expires, "args": args}


def test_ping() -> None:
    reply = Device().mqtt("ping", wish())
    assert json.loads(reply.to_json()) == {
        "device": "gate-07",
        "boot": "b1",
        "session": "s1",
        "seq": 0,
        "clock_synced": True,
        "t_utc": "2026-03-01T12:00:00.000Z",
        "id": "c1",
        "ok": True,
        "error": None,
        "result": {"session": "s1", "uptime_s": 5.0, "version": "1.2.3"},
    }


@pytest.mark.parametrize(
    ("args", "call"),
    [
        ({"action": "pause"}, ("pause", "gate")),
        ({"action": "resume"}, ("resume", "gate")),
        ({"action": "cap", "fps": 5}, ("cap", "gate", 5.0)),
        ({"action": "cap", "fps": None}, ("cap", "gate", None)),
    ],
)
def test_camera(args: dict[str, Any], call: tuple[object, ...]) -> None:
    device = Device()
    reply = device.mqtt("camera", wish(name="gate", **args))
    assert reply.ok
    assert device.cameras.calls == [call]


REFUSED = [
    # name, payload, code, where
    ("ping", wish(expires="2026-03-01T12:00:00Z"), "expired", "expires_utc"),
    ("ping", wish(expires="2026-03-01T12:59:59+01:00"), "expired", "expires_utc"),
    ("ping", wish(expires="0001-01-01T00:00:00+23:59"), "expired", "expires_utc"),
    ("ping", wish(expires="2026-03-02T12:00:01Z"), "invalid", "expires_utc"),
    ("ping", wish(expires="9999-12-31T23:59:59-23:59"), "invalid", "expires_utc"),
    ("ping", wish(expires="2026-03-01T12:01:00"), "invalid", "expires_utc"),
    ("ping", wish(expires="1772366460"), "invalid", "expires_utc"),
    ("ping", wish(expires="2026-02-30T12:01:00Z"), "invalid", "expires_utc"),
    ("ping", {"id": "c1", "expires_utc": 1772366460}, "invalid", "expires_utc"),
    ("ping", {"id": "c1"}, "invalid", "expires_utc"),
    ("ping", {"id": "c1", "expires_utc": None}, "invalid", "expires_utc"),
    ("ping", {"id": "c1", "expires_utc": SOON, "args": []}, "invalid", "args"),
    ("ping", {"id": "c1", "expires_utc": SOON, "arg": {}}, "invalid", "arg"),
    ("ping", wish(verbose=True), "invalid", "args.verbose"),
    ("camera", wish(), "invalid", "args.action"),
    ("camera", wish(action="pause"), "invalid", "args"),
    ("camera", wish(name="gate", action="pause", camera={"fps": 5}), "invalid", "args"),
    ("camera", wish(name="gate", action="stop"), "forbidden", "args.action"),
    ("camera", wish(name="gate", action=3), "invalid", "args.action"),
    ("camera", wish(name="gate", action=["add"]), "invalid", "args.action"),
    ("camera", wish(name="gate", action={}), "invalid", "args.action"),
    ("camera", wish(name="gate", action="cap", fps=0), "invalid", "args.fps"),
    ("camera", wish(name="gate", action="cap", fps=1001), "invalid", "args.fps"),
    ("camera", wish(name="gate", action="cap", fps="x"), "invalid", "args.fps"),
    ("camera", wish(name="gate", action="cap"), "invalid", "args"),
    ("camera", wish(name="gate", action="pause", fps=3), "invalid", "args"),
    ("camera", wish(name="gate", action="pause", url="exec:rm"), "invalid", "args.url"),
    ("camera", wish(name="yard", action="pause"), "no_camera", "yard"),
    ("pong", wish(), "unknown_command", "name"),
    ("", wish(), "unknown_command", "name"),
    ("crash", wish(), "internal", None),
    ("nan", wish(), "internal", None),
    ("strange", wish(), "internal", None),
]


@pytest.mark.parametrize(("name", "payload", "code", "where"), REFUSED)
def test_refused_and_answered(name: str, payload: dict[str, object], code: str, where: str | None) -> None:
    device = Device()
    reply = device.mqtt(name, payload)
    assert reply.error is not None
    assert (reply.id, reply.ok, reply.error.code, reply.error.where) == ("c1", False, code, where)
    assert reply.result is None
    assert device.cameras.calls == []
    assert [seen[2] for seen in device.seen] == [reply]


def test_the_nearest_command_is_named() -> None:
    reply = Device().mqtt("pnig", wish())
    assert reply.error is not None
    assert reply.error.remedy == "did you mean 'ping'?"


def test_a_retained_command_is_refused() -> None:
    device = Device()
    reply = device.mqtt("count", wish(), retained=True)
    assert reply.error is not None
    assert reply.error.code == "retained"
    assert device.count == 0


@pytest.mark.parametrize(
    ("payload", "where"),
    [
        (b"", "payload"),
        (b"\xff\xfe", "payload"),
        (b"{", "payload"),
        (b"[]", "payload"),
        (b"null", "payload"),
        (b"[" * 60_000, "payload"),
        (b'{"id": NaN}', "payload"),
        (b'{"id": "c1", "x": ' + b"9" * 5000 + b"}", "payload"),
        (b'{"id": "' + b"x" * 70_000 + b'"}', "payload"),
        (b'{"id": "a/b"}', "id"),
        (b'{"id": "' + b"x" * 65 + b'"}', "id"),
        (b'{"id": ""}', "id"),
        (b'{"id": 7}', "id"),
        (b'{"expires_utc": "' + SOON.encode() + b'"}', "id"),
        (b'{"id": "c1\\n"}', "id"),
    ],
)
def test_without_a_readable_id_it_is_said_where_the_fault_is(payload: bytes, where: str) -> None:
    device = Device()
    reply = device.mqtt("count", payload)
    assert reply.error is not None
    assert (reply.id, reply.error.code, reply.error.where) == (None, "invalid", where)
    if b"expires_utc" not in payload:
        assert device.socket("count", payload).error == reply.error
    assert device.count == 0


def test_an_unsynchronised_clock() -> None:
    device = Device(synced=False)
    reply = device.mqtt("count", wish())
    assert reply.error is not None
    assert (reply.error.code, reply.error.retryable, device.count) == ("clock_unsynced", True, 0)
    assert device.socket("count", wish("c2", "2020-01-01T00:00:00Z")).ok  # nobody can tell
    device.synced = True
    again = device.mqtt("count", wish())
    assert again.ok


def test_the_socket_needs_neither_id_nor_expiry() -> None:
    device = Device()
    assert device.socket("count", {}).result == 1
    assert device.socket("count", b"{}").result == 2
    assert device.socket("count", {"id": "x"}).result == 3
    assert device.socket("count", {"id": "x"}).result == 3
    expired = device.socket("count", wish(expires="2026-03-01T11:59:59Z"))
    assert expired.error is not None
    assert expired.error.code == "expired"


def test_an_id_is_obeyed_once_and_answered_every_time() -> None:
    device = Device()
    first = device.mqtt("count", wish())
    device.clock.pass_s(90)  # expired, and not yet forgotten
    assert device.mqtt("count", wish()) == first
    assert device.socket("count", wish()) == first
    assert device.count == 1
    assert len(device.seen) == 1
    other = device.mqtt("ping", wish())
    assert other.error is not None
    assert other.error.code == "id_reused"
    device.clock.pass_s(40)
    late = device.mqtt("count", wish())
    assert late.error is not None
    assert late.error.code == "expired"
    assert device.mqtt("count", wish(expires="2026-03-01T12:10:00Z")) is not None
    assert device.count == 2


def test_a_failed_command_is_not_tried_again_under_its_id() -> None:
    device = Device()
    assert device.mqtt("crash", wish()) == device.mqtt("crash", wish())
    assert len(device.seen) == 1


def test_an_id_is_not_forgotten_when_the_wall_clock_steps_back() -> None:
    device = Device()
    assert device.mqtt("count", wish())
    device.clock.now_utc -= timedelta(hours=1)
    assert device.mqtt("count", wish())
    assert device.count == 1


def test_more_ids_than_can_be_remembered() -> None:
    device = Device(remembered=3)
    for number in range(3):
        assert device.mqtt("count", wish(f"c{number}"))
    reply = device.mqtt("count", wish("c3"))
    assert reply.error is not None
    assert (reply.error.code, reply.error.retryable) == ("busy", True)
    assert device.count == 3
    device.clock.pass_s(125)
    reply = device.mqtt("count", wish("c3", "2026-03-01T12:05:00Z"))
    assert reply.ok


def test_a_second_door_does_not_obey_what_the_first_is_obeying() -> None:
    device = Device()
    inside, go_on = threading.Event(), threading.Event()

    def run(_: PingArgs) -> JsonValue:
        inside.set()
        return go_on.wait(10)

    dispatcher = Dispatcher(IDENTITY, device.clock, lambda: True, {"wait": CommandSpec(PingArgs, run)})
    replies: list[Reply] = []
    thread = threading.Thread(target=lambda: replies.append(dispatcher.handle("wait", wish(), door="mqtt")))
    thread.start()
    assert inside.wait(10)
    second = dispatcher.handle("wait", wish(), door="socket")
    assert second.error is not None
    assert second.error.code == "in_progress"
    go_on.set()
    thread.join(10)
    assert replies[0].ok
    assert dispatcher.handle("wait", wish(), door="socket") == replies[0]


def test_a_command_that_is_late_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert Device().socket("slow", {"args": {"number": 7}}).result == 7
    assert "took 3.0 s, more than its 1 s" in caplog.text


def test_an_observer_that_raises_does_no_harm() -> None:
    device = Device()

    def broken(*_: object) -> None:
        raise RuntimeError("no")

    commands = {"ping": ping(IDENTITY, device.clock)}
    dispatcher = Dispatcher(IDENTITY, device.clock, lambda: True, commands, observe=broken)
    reply = dispatcher.handle("ping", wish(), door="mqtt")
    assert reply.ok


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "id": st.just("c1") | JSON,
        "expires_utc": st.just(SOON) | st.datetimes().map(str) | JSON,
        "args": JSON | st.fixed_dictionaries({}, optional={"name": JSON, "action": JSON, "fps": JSON}),
        "\ud800": JSON,
    },
)


@given(
    name=st.sampled_from(["ping", "camera", "crash", "strange"]) | st.text(),
    payload=st.binary(max_size=200) | FIELDS | FIELDS.map(lambda fields: json.dumps(fields).encode()),
    retained=st.booleans(),
    door=st.sampled_from(["mqtt", "socket", "http"]),
)
def test_nothing_that_is_sent_raises(name: str, payload: bytes | dict[str, object], retained: bool, door: Door) -> None:
    device = Device()
    reply = device.dispatcher.handle(name, payload, retained=retained, door=door)
    assert Reply.model_validate_json(reply.to_json()) == reply
    assert reply.ok == (reply.error is None)
    assert not (retained and reply.ok)
    assert reply.error is None or reply.error.code != "invalid" or reply.error.where


def test_the_camera_arguments_have_a_schema() -> None:
    schema = CameraArgs.model_json_schema()
    assert schema["additionalProperties"] is False
    assert set(schema["properties"]) == {"name", "action", "fps", "camera"}


TABLE = {"name": "roof", "url": "rtsp://admin:hunter2@10.0.0.9/"}


@pytest.mark.parametrize(
    ("args", "call"),
    [
        ({"action": "add", "camera": TABLE}, ("add", "gate", TABLE)),
        ({"action": "change", "name": "gate", "camera": {"fps": None}}, ("change", "gate", {"fps": None})),
        ({"action": "remove", "name": "gate"}, ("remove", "gate")),
        ({"action": "reset", "name": "gate"}, ("reset", "gate", "gate")),
        ({"action": "reset"}, ("reset", "gate", None)),
    ],
)
@pytest.mark.parametrize("door", ["mqtt", "http", "socket"])
def test_cameras_come_and_go_on_the_control_socket_alone(
    args: dict[str, Any], call: tuple[object, ...], door: Door, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever may write to a broker, or has the token of the page, may not start programs on the device."""
    device = Device()
    reply = device.dispatcher.handle("camera", wish(**args), door=door)
    if door == "socket":
        assert (reply.ok, device.cameras.calls) == (True, [call])
    else:
        assert (reply.ok, device.cameras.calls) == (False, [])
        assert reply.error is not None
        assert (reply.error.code, reply.error.where) == ("forbidden", "args.action")
        assert "start a program" in reply.error.message
    assert "hunter2" not in caplog.text + repr(device.seen)


@pytest.mark.parametrize("door", ["mqtt", "http"])
@pytest.mark.parametrize("args", [{"action": "add"}, {"action": "change", "camera": 3}, {"action": "exec"}])
def test_what_may_not_be_is_refused_before_anybody_looks_whether_it_is_right(args: dict[str, Any], door: Door) -> None:
    reply = Device().dispatcher.handle("camera", wish(**args), door=door)
    assert reply.error is not None
    assert reply.error.code == "forbidden"


@pytest.mark.parametrize(
    "args",
    [
        {"action": "add"},
        {"action": "add", "name": "roof", "camera": TABLE},
        {"action": "add", "camera": {}},
        {"action": "add", "camera": [TABLE]},
        {"action": "change", "camera": {"fps": 5}},
        {"action": "change", "name": "gate"},
        {"action": "remove"},
        {"action": "remove", "name": "gate", "camera": TABLE},
        {"action": "reset", "fps": 3},
    ],
)
def test_camera_arguments_that_do_not_go_together(args: dict[str, Any]) -> None:
    device = Device()
    reply = device.socket("camera", wish(**args))
    assert reply.error is not None
    assert reply.error.code == "invalid"
    assert "hunter2" not in str(reply)
    assert device.cameras.calls == []


def test_an_unexpected_fault_tells_no_address(caplog: pytest.LogCaptureFixture) -> None:
    device = Device()

    def crash(_: object) -> CameraResult:
        raise RuntimeError("no route to rtsp://admin:hunter2@10.0.0.9/")

    vars(device.cameras)["add"] = crash
    reply = device.socket("camera", wish(action="add", camera=TABLE))
    assert reply.error is not None
    assert (reply.error.code, reply.error.message) == ("internal", "RuntimeError: no route to rtsp://***@10.0.0.9/")
    assert "no route to" in caplog.text
    assert "hunter2" not in caplog.text
