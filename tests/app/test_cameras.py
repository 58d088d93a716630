"""Rates of cameras: what people want, what the governor allows, and what is in force."""

from __future__ import annotations

import pytest

from edge_runtime.app.cameras import CameraSwitch
from edge_runtime.errors import EdgeError
from tests.fakes import ScriptedCamera


def make() -> tuple[CameraSwitch, dict[str, ScriptedCamera]]:
    cameras = {name: ScriptedCamera(name, ()) for name in ("gate", "yard", "file")}
    switch = CameraSwitch(cameras.get, {"gate": 15.0, "yard": None, "file": None}, {"file"})
    return switch, cameras


def test_the_lowest_of_all_caps_is_in_force_and_only_peoples_is_wanted() -> None:
    switch, cameras = make()
    assert switch.in_force() == switch.wanted() == {"gate": 15.0, "yard": None, "file": None}
    switch.cap("gate", 10.0)
    switch.limit("gate", 4.0)
    switch.limit("yard", 7.0)
    assert switch.wanted() == {"gate": 10.0, "yard": None, "file": None}
    assert switch.in_force() == {"gate": 4.0, "yard": 7.0, "file": None}
    assert (cameras["gate"].cap, cameras["yard"].cap) == (4.0, 7.0)
    switch.cap("gate", 2.0)
    assert (switch.in_force()["gate"], cameras["gate"].cap) == (2.0, 2.0)
    switch.cap("gate", None)
    assert (switch.wanted()["gate"], switch.in_force()["gate"], cameras["gate"].cap) == (15.0, 4.0, 4.0)
    switch.limit("gate", None)
    assert (switch.in_force()["gate"], cameras["gate"].cap) == (15.0, None)
    # above what is configured it changes nothing
    switch.limit("gate", 100.0)
    assert switch.in_force()["gate"] == 15.0


def test_at_full_pace_the_governor_may_and_a_command_may_not() -> None:
    switch, cameras = make()
    with pytest.raises(EdgeError) as caught:
        switch.cap("file", 5.0)
    assert caught.value.code == "full_pace"
    switch.limit("file", 5.0)
    assert (switch.wanted()["file"], switch.in_force()["file"], cameras["file"].cap) == (None, 5.0, 5.0)


def test_nobody_caps_what_is_not_there() -> None:
    switch, _ = make()
    with pytest.raises(EdgeError) as caught:
        switch.limit("roof", 5.0)
    assert caught.value.code == "unknown_camera"
