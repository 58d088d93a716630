"""`edge-runtime status` against a daemon that is nothing but its answers."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from edge_runtime.cli import control as control_client
from edge_runtime.cli import status as status_command
from edge_runtime.errors import EdgeError, NotThereError, UsageError
from edge_runtime.web.server import WebServer
from tests.awaiting import wait_until
from tests.web.doors import FakeDoor

PROGRAM = """
import argparse, sys
from edge_runtime.cli import status
from edge_runtime.errors import EdgeError
parser = argparse.ArgumentParser()
status.add_arguments(parser)
try:
    sys.exit(status.run(parser.parse_args()))
except EdgeError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
except KeyboardInterrupt:
    sys.exit(130)
"""


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    status_command.add_arguments(parser)
    return parser.parse_args(arguments)


@pytest.fixture(autouse=True)
def nothing_is_installed_here(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(control_client, "RUN_SOCKET", folder / "installed" / "control.sock")
    monkeypatch.setattr(control_client, "STORE_SOCKET", folder / "store" / "control.sock")


def config(folder: Path, store: Path) -> Path:
    path = folder / "config.toml"
    path.write_text(
        f'[device]\nstore = "{store}"\n[[model]]\nname = "m"\nbundle = "bundled:centernet"\n'
        '[[camera]]\nname = "c"\nurl = "synthetic:"\n',
        encoding="utf-8",
    )
    return path


def test_the_table(server: WebServer, control: Path, door: FakeDoor, capsys: pytest.CaptureFixture[str]) -> None:
    door.current = door.current.model_copy(update={"state": "degraded", "reasons": ["camera yard is down"]})
    assert status_command.run(parse("--socket", str(control))) == 0
    text = capsys.readouterr().out
    for expected in ("gate-07", "degraded", "- camera yard is down", "12.50 W (simulated)", "1.22 fps/W", "Tj 61.5 C"):
        assert expected in text
    assert "away for 5 s, 3 queued, 1 lost from a full queue, 4 results lost: refused" in text
    assert "budget   15 W, p99 80 ms, set by the command, above the power budget for 2.5 s since the start" in text
    assert "governor derating: 15 W are taken (gate 7.5 fps for power)" in text
    gate = next(line for line in text.splitlines() if line.startswith("gate "))
    assert gate.split() == ["gate", "detector", "up", "1", "min", "30", "s", "14.8", "100", "7", "2", "0"]
    # a camera's words cannot drive the terminal
    assert "\x1b" not in text
    assert 'no "picture"\\??[31m' in text


def test_a_bare_daemon_has_a_table_too(server: WebServer, control: Path, door: FakeDoor) -> None:
    door.bare = True
    text = status_command.describe(status_command.fetch_status(parse("--socket", str(control))))
    assert "not measured: no sensor" in text
    assert "none configured" in text
    assert "budget   none\ngovernor off: no budget is set\n" in text


def test_a_daemon_of_another_version_has_a_table() -> None:
    strange = {"cameras": [{"name": "x", "new": 1}], "models": [{}], "health": None, "mqtt": {"connected": True}}
    assert "connected" in status_command.describe(strange)
    assert status_command.describe({})


@pytest.mark.parametrize(
    ("mqtt", "line"),
    [
        ({"connected": True, "protocol": "5", "since_s": 9}, "connected for 9 s with MQTT 5"),
        (
            {"connected": False, "reason": "unreachable: timed out", "since_s": 70, "queued": 3, "protocol": "5"},
            "away for 1 min 10 s, 3 queued: unreachable: timed out",
        ),
    ],
)
def test_the_broker_in_a_line(mqtt: dict[str, object], line: str) -> None:
    assert f"broker   {line}\n" in status_command.describe({"mqtt": mqtt})


def test_a_clock_that_no_command_can_be_held_against_is_shown() -> None:
    line = "clock    not synchronised: commands over MQTT are refused"
    assert line in status_command.describe({"mqtt": {"connected": True}, "clock_synced": False})
    for report in ({"mqtt": {"connected": True}, "clock_synced": True}, {"mqtt": None, "clock_synced": False}):
        assert line not in status_command.describe(report)


def test_json_is_one_document(server: WebServer, control: Path, door: FakeDoor) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "--socket", str(control), "--json"], capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == json.loads(door.snapshot().to_json())


def test_watch_repaints_until_interrupted(server: WebServer, control: Path) -> None:
    program = PROGRAM.replace("parser = ", "status.WATCH_S = 0.05\nparser = ", 1)
    with subprocess.Popen(
        [sys.executable, "-c", program, "--socket", str(control), "--watch"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        paints = 0
        while paints < 3:
            paints += process.stdout.readline().startswith("gate-07 ")
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130


def test_watch_survives_a_restart_of_the_daemon(
    door: FakeDoor, control: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = 0

    def sleep(_: float) -> None:
        nonlocal turns
        turns += 1
        if turns == 1:
            server.stop()
        else:
            raise KeyboardInterrupt

    monkeypatch.setattr("edge_runtime.cli.status.time.sleep", sleep)
    server = WebServer(door, control)
    server.start()
    with pytest.raises(KeyboardInterrupt):
        status_command.run(parse("--socket", str(control), "--watch"))
    assert "no daemon is running" in capsys.readouterr().out


def test_no_daemon_says_where_it_looked(folder: Path) -> None:
    with pytest.raises(NotThereError) as caught:
        status_command.run(parse())
    assert caught.value.exit_code == 4
    assert f"{folder}/installed/control.sock (not there)" in str(caught.value)
    assert f"{folder}/store/control.sock (not there)" in str(caught.value)
    dead = folder / "dead.sock"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(dead))
    for path, words in ((dead, "nobody listens"), (folder / ("x" * 200), "not there")):
        with pytest.raises(NotThereError, match=words):
            status_command.run(parse("--socket", str(path)))


@pytest.mark.parametrize("place", ["installed", "store"])
def test_the_usual_places(door: FakeDoor, folder: Path, place: str) -> None:
    with WebServer(door, folder / place / "control.sock"):
        assert control_client.find_daemon(parse())[0] == folder / place / "control.sock"


def test_the_daemon_of_a_configuration(door: FakeDoor, folder: Path) -> None:
    path = config(folder, folder / "mine")
    door.store = folder / "mine"
    with WebServer(door, folder / "mine" / "control.sock"):
        assert control_client.find_daemon(parse("-c", str(path)))[0] == folder / "mine" / "control.sock"
    # a service has its socket in /run
    with WebServer(door, folder / "installed" / "control.sock"):
        assert control_client.find_daemon(parse("-c", str(path)))[0] == folder / "installed" / "control.sock"
        door.store = folder / "another"
        with pytest.raises(NotThereError, match="serves another store"):
            control_client.find_daemon(parse("-c", str(path)))


def test_a_configuration_that_is_none(folder: Path) -> None:
    with pytest.raises(EdgeError) as caught:
        status_command.run(parse("-c", str(folder / "nowhere.toml")))
    assert caught.value.exit_code == 2
    with pytest.raises(SystemExit):
        parse("-c", "x", "--socket", "y")
    with pytest.raises(SystemExit):
        parse("--json", "--watch")


@pytest.mark.parametrize("closed", ["socket", "folder"])
def test_who_may_ask_is_said(server: WebServer, control: Path, monkeypatch: pytest.MonkeyPatch, closed: str) -> None:
    if os.getuid() == 0:  # root is let in everywhere

        def connect(*_: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(control_client._UnixConnection, "connect", connect)
    else:
        (control if closed == "socket" else control.parent).chmod(0)
    with pytest.raises(EdgeError) as caught:
        status_command.run(parse("--socket", str(control)))
    control.parent.chmod(0o750)
    assert (caught.value.code, caught.value.exit_code) == ("permission_denied", 1)
    assert "group" in caught.value.message
    assert "usermod" in (caught.value.remedy or "")


def test_an_error_of_the_daemon_is_ours(server: WebServer, control: Path, door: FakeDoor) -> None:
    def fail() -> None:
        raise UsageError("snapshots are off", code="off", remedy="turn\x1b them on")

    door.before_snapshot = fail
    with pytest.raises(EdgeError) as caught:
        status_command.run(parse("--socket", str(control)))
    assert (caught.value.code, caught.value.remedy) == ("off", "turn? them on")


@pytest.mark.parametrize("reply", [b"", b"hello\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]"])
def test_what_is_no_daemon(folder: Path, reply: bytes) -> None:
    import threading

    path = folder / "odd.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def answer() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.recv(4096)
                sock.sendall(reply)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(EdgeError) as caught:
            status_command.run(parse("--socket", str(path)))
        thread.join()
    assert caught.value.code == "no_answer"
    wait_until(lambda: not thread.is_alive())


def test_it_imports_nothing_heavy() -> None:
    program = "import sys; import edge_runtime.cli.status; print([m for m in sys.modules if m.split('.')[0] in " + (
        "('uvicorn', 'starlette', 'prometheus_client', 'pydantic', 'numpy', 'asyncio')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert done.stdout.strip() == "[]"
