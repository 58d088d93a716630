"""What Home Assistant is told: a payload that it takes, templates that render what is true, nothing left behind.

The rules are those of Home Assistant 2024.12 (its mqtt integration's schemas); what `homeassistant` itself made of such
a payload was looked at by hand, see deploy/README.md.
"""

from __future__ import annotations

import errno
import json
import logging
import re
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import StrictUndefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from edge_runtime.records.activity import LedgerCut, StreamCut
from edge_runtime.records.cameras import CameraState
from edge_runtime.records.events import ReportedCamera
from edge_runtime.records.identity import Identity
from edge_runtime.records.power import Unavailable
from edge_runtime.telemetry import home_assistant
from edge_runtime.telemetry.home_assistant import FILE_NAME, HomeAssistant, discovery
from tests.telemetry.test_windows import IDENTITY, Device, S, a_cut

NOW = datetime(2026, 11, 30, 12, 0, tzinfo=timezone.utc)
NAME = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True)  # what a configuration takes
UNITS: Mapping[str | None, set[str]] = {
    None: {"fps", "fps/W"},
    "power": {"W"},
    "temperature": {"°C"},
    "duration": {"ms"},
}


# --- Home Assistant's rules


class Rules(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Origin(Rules):
    name: str
    sw_version: str


class DeviceInfo(Rules):
    identifiers: Annotated[list[str], Field(min_length=1)]
    name: str
    manufacturer: str
    model: str | None = None
    sw_version: str


class Availability(Rules):
    topic: Annotated[str, Field(pattern=r"^[^+#]+$")]
    value_template: str


class Removal(Rules):
    platform: Literal["sensor"]


class Component(Rules):
    platform: Literal["sensor"]
    unique_id: str
    name: str
    expire_after: Annotated[int, Field(gt=0)]
    value_template: str
    device_class: Literal["power", "temperature", "duration", "enum"] | None = None
    state_class: Literal["measurement"] | None = None
    unit_of_measurement: str | None = None
    suggested_display_precision: Annotated[int, Field(ge=0)] | None = None
    options: Annotated[list[str], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _classes_fit(self) -> Component:
        if self.device_class == "enum":
            assert self.options
            assert self.state_class is None
            assert self.unit_of_measurement is None
        else:
            assert self.options is None
            assert self.state_class == "measurement"
            assert self.unit_of_measurement in UNITS[self.device_class]
        return self


class Discovery(Rules):
    device: DeviceInfo
    origin: Origin
    state_topic: Annotated[str, Field(pattern=r"^edge/v1/[^+#/]+/telemetry/\+$")]
    availability: list[Availability]
    components: dict[str, Component | Removal]

    def sensors(self) -> dict[str, Component]:
        return {key: each for key, each in self.components.items() if isinstance(each, Component)}


TOPIC = re.compile(r"device/[a-zA-Z0-9_-]+/config")
"""Without the prefix; Home Assistant calls any other one illegal."""


def taken(topic: str, payload: bytes, prefix: str = "homeassistant") -> Discovery:
    """The payload as Home Assistant takes it."""
    assert topic.startswith(f"{prefix}/")
    assert TOPIC.fullmatch(topic.removeprefix(f"{prefix}/"))
    return TypeAdapter(Discovery).validate_json(payload)


def rendered(template: str, payload: str, state: str | None = None) -> str:
    """As Home Assistant renders a template for a message; what is undefined, of which it warns, is an error here."""

    def as_timestamp(text: str) -> float:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()

    jinja = ImmutableSandboxedEnvironment(undefined=StrictUndefined)
    jinja.globals |= {
        "utcnow": lambda: NOW,
        "as_timestamp": lambda at: at.timestamp() if at is NOW else as_timestamp(at),
    }
    values: dict[str, Any] = {"value": payload}
    try:
        values["value_json"] = json.loads(payload)
    except ValueError:
        pass
    if state is not None:
        values["this"] = {"state": state}
    return jinja.from_string(template).render(values).strip()


# --- windows


def a_window(device: Device, *, age_s: float = 0.0, **changes: object) -> str:
    builder = device.builder()
    device.clock.now_ns += 10 * S
    window = json.loads(builder.build().to_json())
    window["t_end_utc"] = (NOW - timedelta(seconds=age_s)).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return json.dumps(window | changes)


def working() -> Device:
    device = Device()
    device.next_cut = a_cut()
    return device


def announced(*streams: tuple[str, str], sensors: bool = True, window_s: float = 10.0) -> Discovery:
    topic, payload = discovery(
        "homeassistant", IDENTITY, streams=streams, window_s=window_s, hardware="orin-nano-8gb", sensors=sensors
    )
    return taken(topic, payload)


def values(found: Discovery, payload: str, states: Mapping[str, str] | None = None) -> dict[str, str]:
    """Every sensor's new value by its name: "" leaves a number as it is, "None" is unknown."""
    known = states or {}
    return {
        each.name: rendered(each.value_template, payload, known.get(each.name)) for each in found.sensors().values()
    }


# --- the tests


def test_every_sensor_has_the_values_of_a_window() -> None:
    found = announced(("gate", "detector"))
    assert values(found, a_window(working())) == {
        "FPS": "14.8",
        "Latency p99": "44.0",
        "Power": "12.14",
        "FPS per watt": "1.2191",
        "Temperature": "61.5",
        "gate state": "up",
        "gate FPS": "14.8",
    }
    assert found.device.model == "orin-nano-8gb"
    assert found.state_topic == "edge/v1/gate-07/telemetry/+"


def test_what_is_null_is_unknown() -> None:
    device = working()
    device.power = Unavailable("no sensor")
    device.heat = Unavailable("no sensor")
    device.next_cut = LedgerCut(
        [StreamCut("gate", "detector", a_cut(0).streams[0].counters, a_cut().streams[0].latency, {})], {}
    )
    device.next_cut.streams[0].latency.values_ns.clear()
    found = values(announced(("gate", "detector")), a_window(device))
    assert {name for name, value in found.items() if value == "None"} == {
        "Latency p99", "Power", "FPS per watt", "Temperature"
    }  # fmt: skip
    assert found["gate FPS"] == "0.0"


def test_a_camera_that_is_not_in_a_window_is_unknown() -> None:
    found = values(announced(("gate", "detector"), ("yard", "detector"), ("gate", "faces")), a_window(working()))
    assert (found["gate (detector) state"], found["gate (detector) FPS"]) == ("up", "14.8")
    assert {found[f"{name} {what}"] for name in ("yard", "gate (faces)") for what in ("state", "FPS")} == {"None"}


def test_a_window_out_of_a_backlog_changes_nothing() -> None:
    found = announced(("gate", "detector"))
    for age_s, known, state in ((61, "paused", "paused"), (86_400, "unavailable", "None"), (3600, "unknown", "None")):
        told = values(found, a_window(working(), age_s=age_s), {"gate state": known})
        assert told.pop("gate state") == state
        assert set(told.values()) == {""}
    fresh = values(found, a_window(working(), age_s=59), {"gate state": "paused"})
    assert (fresh["gate state"], fresh["FPS"]) == ("up", "14.8")
    # three windows are no backlog
    assert values(announced(("gate", "detector"), window_s=600), a_window(working(), age_s=1700))["FPS"] == "14.8"


def test_a_device_whose_clock_is_not_set_is_believed() -> None:
    told = values(announced(("gate", "detector")), a_window(working(), age_s=1e9, clock_synced=False))
    assert (told["FPS"], told["gate state"]) == ("14.8", "up")


@pytest.mark.parametrize("payload", ["", "no json", "[]", "7", "null", "{}", '{"schema": "edge.other/1"}'])
def test_what_is_no_window_changes_nothing(payload: str) -> None:
    told = values(announced(("gate", "detector")), payload, {"gate state": "down"})
    assert told.pop("gate state") == "down"
    assert set(told.values()) == {""}


@pytest.mark.parametrize(
    ("payload", "word"),
    [
        ('{"online": true}', "online"),
        ('{"online": false}', "offline"),
        ("", "offline"),
        ("null", "offline"),
        ("{}", "offline"),
    ],
)
def test_presence_says_whether_the_device_is_available(payload: str, word: str) -> None:
    (availability,) = announced().availability
    assert availability.topic == "edge/v1/gate-07/presence"
    assert rendered(availability.value_template, payload) == word


def test_without_sensors_there_is_nothing_about_them() -> None:
    assert {each.name for each in announced(("gate", "detector"), sensors=False).sensors().values()} == {
        "FPS", "Latency p99", "gate state", "gate FPS"
    }  # fmt: skip


def test_a_state_is_one_of_the_options() -> None:
    state = next(each for each in announced(("gate", "detector")).sensors().values() if each.name == "gate state")
    assert state.options == list(get_args(CameraState))


@pytest.mark.parametrize(("window_s", "expire_s"), [(0.2, 30), (10.0, 30), (10.1, 31), (3600.0, 10_800)])
def test_values_expire_after_three_windows(window_s: float, expire_s: int) -> None:
    assert {each.expire_after for each in announced(window_s=window_s).sensors().values()} == {expire_s}


@settings(max_examples=15)
@given(st.lists(NAME, min_size=2, max_size=2, unique=True), st.sets(st.tuples(NAME, NAME), max_size=6))
def test_no_two_things_have_one_name(devices: list[str], streams: set[tuple[str, str]]) -> None:
    topics, unique, sensors = set(), set(), 0
    for device in devices:
        identity = Identity(device, "boot", "session", "0", 0)
        topic, payload = discovery(
            "ha/x", identity, streams=sorted(streams), window_s=10.0, hardware=None, sensors=True
        )
        found = taken(topic, payload, "ha/x").sensors()
        topics.add(topic)
        unique |= {each.unique_id for each in found.values()}
        sensors += len(found)
    assert len(topics) == 2
    assert len(unique) == sensors == 2 * (5 + 2 * len(streams))


@settings(max_examples=15)
@given(NAME, NAME)
def test_any_name_is_found_in_a_window(camera: str, model: str) -> None:
    window = json.loads(a_window(working()))
    window["cameras"] = [window["cameras"][0] | {"name": camera, "model": model, "fps": 3.25}]
    assert values(announced((camera, model)), json.dumps(window))[f"{camera} FPS"] == "3.25"


def test_32_cameras_fit_into_64_kb() -> None:
    streams = [(f"camera-{number:02d}", "detector") for number in range(32)]
    _, payload = discovery(
        "homeassistant", IDENTITY, streams=streams, window_s=10.0, hardware="orin-nano-8gb", sensors=True
    )
    assert len(payload) < 64 * 1024


# --- over time


class Broker:
    """Its retained messages."""

    def __init__(self) -> None:
        self.retained: dict[str, bytes] = {}
        self.said: list[tuple[str, bytes]] = []

    def set_retained(self, topic: str, payload: bytes) -> None:
        self.said.append((topic, payload))
        self.retained[topic] = payload
        if not payload:
            del self.retained[topic]

    def keys(self) -> tuple[set[str], set[str]]:
        """Of the one announcement: names of sensors, and keys that are removed."""
        ((topic, payload),) = self.retained.items()
        found = taken(topic, payload)
        removed = {key for key, each in found.components.items() if isinstance(each, Removal)}
        return {each.name for each in found.sensors().values()}, removed


def started(
    broker: Broker, folder: Path, prefix: str | None = "homeassistant", *, sensors: bool = False
) -> HomeAssistant:
    return HomeAssistant(
        prefix, IDENTITY, folder / FILE_NAME, broker.set_retained, window_s=10.0, hardware=None, sensors=sensors
    )


def camera(name: str, *models: str) -> ReportedCamera:
    return ReportedCamera(name=name, models=list(models), source="configuration", paused=False, cap_fps=None)


def test_a_camera_that_is_removed_is_removed_there_too_and_may_come_back(tmp_path: Path) -> None:
    broker = Broker()
    device = started(broker, tmp_path)
    device.announce([camera("gate", "detector"), camera("yard", "detector")])
    assert broker.keys() == ({"FPS", "Latency p99", "gate state", "gate FPS", "yard state", "yard FPS"}, set())
    device.announce([camera("gate", "detector")])
    gone = {"camera-yard-detector-state", "camera-yard-detector-fps"}
    assert broker.keys() == ({"FPS", "Latency p99", "gate state", "gate FPS"}, gone)
    started(broker, tmp_path).announce([camera("gate", "detector")])
    assert broker.keys()[1] == gone, "Home Assistant may have been away"
    started(broker, tmp_path).announce([camera("yard", "detector")])
    assert broker.keys() == (
        {"FPS", "Latency p99", "yard state", "yard FPS"},
        {"camera-gate-detector-state", "camera-gate-detector-fps"},
    )


def test_sensors_that_are_no_longer_there_are_removed(tmp_path: Path) -> None:
    broker = Broker()
    started(broker, tmp_path, sensors=True).announce([])
    started(broker, tmp_path, sensors=False).announce([])
    assert broker.keys() == ({"FPS", "Latency p99"}, {"power", "fps_per_watt", "temperature"})


def test_what_is_removed_is_not_kept_without_end(tmp_path: Path) -> None:
    broker = Broker()
    device = started(broker, tmp_path)
    for number in range(100):
        device.announce([camera(f"camera-{number}", "detector")])
    gone = broker.keys()[1]
    assert len(gone) == 64
    assert {"camera-camera_2d98-detector-fps", "camera-camera_2d67-detector-state"} <= gone


def test_turned_off_nothing_is_left_behind(tmp_path: Path) -> None:
    broker = Broker()
    started(broker, tmp_path).announce([camera("gate", "detector")])
    topic = next(iter(broker.retained))
    broker.said.clear()
    for _ in range(2):  # a start whose broker never acknowledged it is followed by one that says it again
        started(broker, tmp_path, None).announce([])
    assert broker.said == [(topic, b"")] * 2
    assert not broker.retained
    off = started(broker, tmp_path, None)
    off.announce([])
    off.settled()
    started(broker, tmp_path, None).announce([])
    assert broker.said == [(topic, b"")] * 3


def test_without_the_option_nothing_is_said_or_written(tmp_path: Path) -> None:
    broker = Broker()
    device = started(broker, tmp_path, None)
    device.announce([camera("gate", "detector")])
    device.settled()
    assert not broker.said
    assert not list(tmp_path.iterdir())


def test_another_prefix_moves_it_and_back(tmp_path: Path) -> None:
    broker = Broker()
    started(broker, tmp_path).announce([])
    started(broker, tmp_path, "ha").announce([])
    assert list(broker.retained) == ["ha/device/edge_gate-07/config"]
    device = started(broker, tmp_path)
    device.announce([])
    assert list(broker.retained) == ["homeassistant/device/edge_gate-07/config"]
    assert [topic for topic, payload in broker.said if not payload].count(
        "homeassistant/device/edge_gate-07/config"
    ) == 1


def test_a_disk_that_fails_does_not_keep_the_device_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(home_assistant, "write_atomic", full)
    broker = Broker()
    device = started(broker, tmp_path)
    with caplog.at_level(logging.WARNING):
        device.announce([camera("gate", "detector"), camera("yard", "detector")])
        device.announce([camera("gate", "detector")])
    assert "No space left on device" in caplog.text
    assert "camera-yard-detector-fps" in broker.keys()[1]


@pytest.mark.parametrize("text", [b"", b"{", b'{"topic": 7}', b"\xff\x00"])
def test_a_damaged_memory_is_said_and_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture, text: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(text)
    broker = Broker()
    with caplog.at_level(logging.WARNING):
        started(broker, tmp_path).announce([])
    assert "cannot be read" in caplog.text
    caplog.clear()
    started(broker, tmp_path).announce([])
    assert not caplog.text
