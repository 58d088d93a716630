"""What the daemon tells of its governor: every state, and of the operating point no more than the spool can take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from edge_runtime.app.telling import Teller
from edge_runtime.records.cameras import STOPPED_ON_REQUEST, CameraState, CameraStatus, CameraView, SourceCounters
from edge_runtime.records.governing import Budget, Decision, GovernorSample, GovernorWord, OperatingPoint

S = 1_000_000_000
BUDGET = Budget(15.0, 85.0, None)


class Events:
    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []

    def emit(self, kind: str, message: str, *, severity: str = "info", **data: Any) -> None:
        self.told.append({"kind": kind, "message": message, "severity": severity, **data})


class Device:
    """A teller, and what it told."""

    def __init__(self) -> None:
        self.events = Events()
        self.teller = Teller(SimpleNamespace(events=self.events))  # type: ignore[arg-type]

    def decide(self, t_s: float, state: GovernorWord, fps: float | None = None) -> None:
        point = OperatingPoint(
            {"detector": "fp32-320"}, {"gate": fps, "yard": None}, {"detector": 1}, {"detector": 5.0}
        )
        limits: dict[str, Any] = {"gate": "power"} if fps is not None else {}
        decision = Decision(point, state, f"{state} for a reason", limits, True)
        self.teller.governor(decision, BUDGET, GovernorSample(int(t_s * S), 0.25, 14.5, 71.0, {}, {}))

    def told(self) -> list[tuple[str, str, str]]:
        return [(each["what"], each["state"], each["fps"]) for each in self.events.told]


def test_every_state_is_told_and_points_at_most_every_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    device = Device()
    device.decide(1.0, "holding")
    device.decide(1.25, "derating", 9.0)
    device.decide(1.5, "derating", 8.0)
    device.decide(1.75, "safe", 1.0)
    device.decide(2.0, "raising", 2.0)
    for step in range(36):
        device.decide(2.25 + step / 4, "raising", 2.5 + step / 4)
    assert device.told() == [
        ("state", "holding", ""),
        ("state", "derating", "gate 9"),
        ("state", "safe", "gate 1"),
        ("state", "raising", "gate 2"),
    ]
    # what it came to is told in the end, once
    for t_s in (11.5, 12.0, 12.25, 30.0):
        device.decide(t_s, "raising", 12.5)
    assert device.told()[4:] == [("point", "raising", "gate 12.5")]
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO", "WARNING", "INFO"]


def test_an_event_of_the_governor_says_what_and_why() -> None:
    device = Device()
    device.decide(1.0, "safe", 7.5)
    assert device.events.told == [
        {
            "kind": "governor", "message": "governor safe: safe for a reason", "severity": "warning", "what": "state",
            "state": "safe", "because": "safe for a reason", "power_w": 14.5, "tj_c": 71.0, "budget_power_w": 15.0,
            "budget_temperature_c": 85.0, "budget_latency_p99_ms": None, "variants": "detector fp32-320",
            "batch": "detector 1", "gpu_hz": None, "fps": "gate 7.5", "limits": "gate power",
        }
    ]  # fmt: skip


def test_a_governor_with_nothing_to_hold_is_no_event_until_it_had_something() -> None:
    device = Device()
    device.decide(1.0, "off")
    device.decide(30.0, "off")
    assert device.told() == []
    device.decide(31.0, "holding")
    device.decide(32.0, "off")
    assert [state for _, state, _ in device.told()] == ["holding", "off"]


def test_another_budget_is_told() -> None:
    device = Device()
    device.teller.budget("info", "the budget is 5 W, by the command", {"power_w": 5.0, "set_by": "command"})
    assert device.events.told == [
        {
            "kind": "governor", "message": "the budget is 5 W, by the command", "severity": "info", "what": "budget",
            "power_w": 5.0, "set_by": "command",
        }
    ]  # fmt: skip


class Cameras:
    """A teller of cameras under a clock that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events = Events()
        self.now_ns = 0
        self._since_ns: dict[str, tuple[CameraState, int]] = {}
        monkeypatch.setattr("edge_runtime.app.telling.time.monotonic_ns", lambda: self.now_ns)
        self._teller = Teller(SimpleNamespace(events=self.events))  # type: ignore[arg-type]

    def look(self, t_s: float, *states: CameraState, reason: str | None = None, serial: int = 1) -> None:
        """The cameras "c1", "c2" ... are in these states, since the first look that found them so."""
        self.now_ns = int(t_s * S)
        views = []
        for number, state in enumerate(states, serial):
            before = self._since_ns.get(name := f"c{number}")
            since_ns = before[1] if before is not None and before[0] == state else self.now_ns
            self._since_ns[name] = (state, since_ns)
            views.append(CameraView(name, (), CameraStatus(state, reason, since_ns), SourceCounters(), serial=number))
        self._teller.cameras(views)

    def told(self) -> list[tuple[str, str, float | None, int]]:
        return [(each["state"], each["before"], each["before_s"], each["left_out"]) for each in self.events.told]


def test_every_state_of_a_camera_is_told_with_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    cameras = Cameras(monkeypatch)
    cameras.look(0, "starting")
    cameras.look(1.5, "up")
    cameras.look(2, "up")
    cameras.look(20, "stalled", reason="no data for 5 s")
    cameras.look(21, "down", reason="refused")
    cameras.look(21.5, "down", reason="still refused")
    cameras.look(40, "up")
    cameras.look(50, "paused")
    cameras.look(55, "starting")
    cameras.look(56, "up")
    cameras.look(60, "stopped", reason=STOPPED_ON_REQUEST)
    assert cameras.told() == [
        ("up", "starting", 1.5, 0), ("stalled", "up", 18.5, 0), ("down", "stalled", 1.0, 0), ("up", "down", 19.0, 0),
        ("paused", "up", 10.0, 0), ("up", "paused", 6.0, 0),
    ]  # fmt: skip
    first = cameras.events.told[1]
    assert (first["kind"], first["severity"], first["camera"]) == ("camera", "warning", "c1")
    assert (first["message"], first["reason"]) == ("camera c1 is stalled: no data for 5 s", "no data for 5 s")


def test_a_camera_that_flaps_does_not_flood_the_spool(monkeypatch: pytest.MonkeyPatch) -> None:
    cameras = Cameras(monkeypatch)
    cameras.look(0, "starting", "starting")
    for step in range(200):  # c1 flaps twice a second, c2 once does something of its own
        t_s = 1 + step / 2
        cameras.look(t_s, "up" if step % 2 == 0 else "down", "up" if t_s < 31 else "down")
    of_c1 = [each for each in cameras.events.told if each["camera"] == "c1"]
    assert 10 <= len(of_c1) <= 13
    # every change is either an event or counted in one
    assert sum(each["left_out"] for each in of_c1) + len(of_c1) <= 200
    assert sum(each["left_out"] for each in of_c1) + len(of_c1) >= 180
    assert "changes before it were not told" in of_c1[-1]["message"]
    assert [each["state"] for each in cameras.events.told if each["camera"] == "c2"] == ["up", "down"]
    # what it came to is told in the end
    for t_s in (101.0, 105.0, 112.0, 125.0):
        cameras.look(t_s, "up", "down")
    assert [each["state"] for each in cameras.events.told if each["camera"] == "c1"][-1] == "up"
    told = len(cameras.events.told)
    cameras.look(200, "up", "down")
    assert len(cameras.events.told) == told


def test_a_camera_that_comes_back_under_its_name_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    cameras = Cameras(monkeypatch)
    cameras.look(0, "starting")
    cameras.look(1, "up")
    cameras.look(2)
    cameras.look(3, "up", serial=2)
    assert [(each["camera"], each["state"]) for each in cameras.events.told] == [("c1", "up"), ("c2", "up")]
