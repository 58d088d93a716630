"""`edge-runtime camera`: what it asks for, what it prints, and where an address may come from."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.cli.main import run as edge_runtime
from edge_runtime.web.server import WebServer
from tests.web.doors import FakeDoor

URL = "rtsp://admin:hunter2@10.0.0.9/main"
RESULT = {"name": "gate", "action": "add", "fps": None, "done": ["camera gate: added"], "persisted": True, "notes": []}


def ask(control: Path, *arguments: str) -> int:
    action, *rest = arguments
    return edge_runtime(["camera", action, "--socket", str(control), *rest])


def asked(door: FakeDoor) -> dict[str, Any]:
    name, body, entry = door.executed[-1]
    assert (name, entry) == ("camera", "socket")
    found: dict[str, Any] = json.loads(body)["args"]
    return found


@pytest.mark.parametrize(
    ("arguments", "args"),
    [
        (["add", "gate", "synthetic:"], {"action": "add", "camera": {"name": "gate", "url": "synthetic:"}}),
        (
            ["add", "gate", "file:/a.mp4", "--model", "m", "--model", "n", "--fps", "5", "--min-fps", "1", "--loop",
             "false"],
            {"action": "add", "camera": {"name": "gate", "url": "file:/a.mp4", "model": ["m", "n"], "fps": 5.0,
             "min_fps": 1.0, "loop": False}},
        ),
        (
            ["change", "gate", "--fps", "none", "--priority", "-3", "--stall-s", "2", "--ca-file", "none"],
            {"action": "change", "name": "gate",
             "camera": {"fps": None, "priority": -3, "stall_s": 2.0, "ca_file": None}},
        ),
        (["remove", "gate"], {"action": "remove", "name": "gate"}),
        (["pause", "gate"], {"action": "pause", "name": "gate"}),
        (["resume", "gate"], {"action": "resume", "name": "gate"}),
        (["cap", "gate", "2.5"], {"action": "cap", "name": "gate", "fps": 2.5}),
        (["cap", "gate", "none"], {"action": "cap", "name": "gate", "fps": None}),
        (["reset", "gate"], {"action": "reset", "name": "gate"}),
        (["reset", "--all"], {"action": "reset"}),
    ],
)  # fmt: skip
def test_what_is_asked_for(
    server: WebServer, control: Path, door: FakeDoor, arguments: list[str], args: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    door.result = RESULT
    assert ask(control, *arguments) == 0
    assert asked(door) == args
    assert capsys.readouterr().out == "camera gate: added\n"
    assert ask(control, *arguments, "--json") == 0
    assert json.loads(capsys.readouterr().out) == RESULT


def test_an_address_need_not_stand_on_the_command_line(
    server: WebServer, control: Path, door: FakeDoor, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    door.result = RESULT
    file = tmp_path / "url"
    for text in (URL, f"{URL}\n", f"{URL}\r\n"):
        file.write_bytes(text.encode())
        assert ask(control, "add", "gate", "--url-file", str(file)) == 0
        assert asked(door)["camera"]["url"] == URL
        for arguments in (
            ["add", "gate", "-"],
            ["change", "gate", "--url", "-"],
            ["change", "gate", "--url-file", "-"],
        ):
            monkeypatch.setattr(sys, "stdin", io.StringIO(text))
            assert ask(control, *arguments) == 0
            assert asked(door)["camera"]["url"] == URL
    assert capsys.readouterr().err == ""
    # who writes it there all the same is told
    assert ask(control, "add", "gate", URL) == 0
    out, err = capsys.readouterr()
    assert "there for everybody to see (ps)" in err
    assert "hunter2" not in out + err


@pytest.mark.parametrize("data", [b"", b"\n", b"a\nb\n", b"a\n\n", b"\xff", b"x" * 20_000])
def test_a_file_that_holds_no_address(
    control: Path, server: WebServer, door: FakeDoor, tmp_path: Path, data: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "url"
    file.write_bytes(data)
    assert ask(control, "add", "gate", "--url-file", str(file)) == 2
    assert str(file) in capsys.readouterr().err
    assert door.executed == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["add"], ["add", "gate", "x", "--fps", "fast"], ["add", "gate", "x", "--loop", "maybe"], ["cap", "gate"],
        ["cap", "gate", "slow"], ["reset"], ["reset", "gate", "--all"], ["remove"], ["paint", "gate"], [],
        ["add", "gate", "x", "--priority", "1.5"],
    ],
)  # fmt: skip
def test_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        edge_runtime(["camera", *arguments])
    assert caught.value.code == 2
    capsys.readouterr()


def test_usage_that_a_parser_does_not_see(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (["add", "gate"], "no URL was given"),
        (["change", "gate"], "nothing is to change"),
        (["add", "gate", URL, "--url-file", "x"], "give the address once"),
    ):
        assert edge_runtime(["camera", *arguments]) == 2
        err = capsys.readouterr().err
        assert words in err
        assert "hunter2" not in err
    assert edge_runtime(["camera", "list", "--socket", str(tmp_path / "no.sock")]) == 4


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [("invalid", 2), ("unknown_camera", 2), ("camera_exists", 3), ("forbidden", 3), ("camera_unsupported", 3),
     ("stopping", 1), ("change_failed", 1)],
)  # fmt: skip
def test_exit_codes(
    server: WebServer, control: Path, door: FakeDoor, code: str, exit_code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    door.refusal = {"code": code, "message": "no\x1b[31m", "where": "args.camera", "remedy": "do", "retryable": False}
    assert ask(control, "add", "gate", "synthetic:") == exit_code
    out, err = capsys.readouterr()
    assert (out, err) == ("", "edge-runtime: args.camera: no?[31m (do)\n")


def test_the_list(server: WebServer, control: Path, door: FakeDoor, capsys: pytest.CaptureFixture[str]) -> None:
    door.two_models = True
    assert ask(control, "list") == 0
    header, gate, yard, touched = capsys.readouterr().out.splitlines()
    assert header.split() == ["CAMERA", "MODEL", "STATE", "SINCE", "WANTED", "CAP", "SOURCE", "ADDRESS", "REASON"]
    assert gate.split() == [
        "gate", "detector,other", "up", "1", "min", "30", "s", "-", "15", "overlay", "rtsp://***@10.0.0.9/main"
    ]  # fmt: skip
    assert yard.startswith("yard ")
    assert "\x1b" not in yard
    assert ask(control, "list", "--json") == 0
    assert [each["name"] for each in json.loads(capsys.readouterr().out)] == ["gate", "gate", "yard"]
    assert edge_runtime(["status", "--socket", str(control)]) == 0
    assert touched == "by commands changed: gate; removed: roof (see edge-runtime camera)"
    assert touched in capsys.readouterr().out.splitlines()


def test_a_change_that_is_not_kept_says_so(
    server: WebServer, control: Path, door: FakeDoor, capsys: pytest.CaptureFixture[str]
) -> None:
    door.result = {**RESULT, "done": [], "persisted": False, "notes": ["the next start will not know of it"]}
    assert ask(control, "pause", "gate") == 0
    assert capsys.readouterr().out == "nothing to do: it was so already\n  note: the next start will not know of it\n"
