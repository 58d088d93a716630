"""The check that every dependency has wheels for the device follows the device's markers, not this machine's."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
from packaging.requirements import Requirement

from scripts.lib import aarch64_wheels
from scripts.lib.aarch64_wheels import JETPACK_6, JETPACK_7, MissingWheelError, OfflineError, left_out, resolve


def metadata(*requires: str) -> dict[str, Any]:
    return {"requires_dist": list(requires)}


@pytest.mark.parametrize(
    ("need", "missing_6", "missing_7"),
    [
        ("tomli; python_version < '3.11'", ["tomli"], []),
        ("new; python_version >= '3.12'", [], ["new"]),
        ("arm>=2; platform_machine == 'aarch64'", ["arm>=2"], ["arm>=2"]),
        ("intel; platform_machine == 'x86_64'", [], []),
        ("windows; sys_platform == 'win32'", [], []),
        ("fast; extra == 'speed'", ["fast"], ["fast"]),
        ("tests; extra == 'tests'", [], []),
    ],
)
def test_markers_are_the_device_s(need: str, missing_6: list[str], missing_7: list[str]) -> None:
    found = {"root": metadata("middle[speed]"), "middle": metadata(need)}
    assert left_out([Requirement("root")], found, JETPACK_6) == missing_6
    assert left_out([Requirement("root")], found, JETPACK_7) == missing_7


def test_requirements_in_a_circle_end() -> None:
    found = {"a": metadata("b"), "b": metadata("a")}
    assert left_out([Requirement("a")], found, JETPACK_6) == []


def test_pip_is_asked_again_for_what_it_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def ask_pip(wanted: list[str], target: object) -> dict[str, Any]:
        asked.append(list(wanted))
        found = {"a": metadata("b; python_version < '3.11'")}
        return found | ({"b": metadata()} if "b" in wanted else {})

    monkeypatch.setattr(aarch64_wheels, "ask_pip", ask_pip)
    assert set(resolve(["a", "c; python_version > '3.10'"], JETPACK_6)) == {"a", "b"}
    assert asked == [["a"], ["a", "b"]]


@pytest.mark.parametrize(
    ("stderr", "error"),
    [
        ("WARNING: noise\nERROR: No matching distribution found for x", MissingWheelError),
        ("ERROR: ResolutionImpossible", MissingWheelError),
        ("WARNING: Retrying after connection broken by 'NewConnectionError'\nERROR: No matching", OfflineError),
    ],
)
def test_no_wheel_and_no_network_are_told_apart(
    stderr: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", stderr)

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(error, match=r"^ERROR"):
        resolve(["x"], JETPACK_6)
