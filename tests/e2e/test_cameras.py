"""Cameras that come, go and change while the daemon runs: by SIGHUP, by command, over starts and kills."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from edge_runtime.cli.main import run as edge_runtime
from edge_runtime.records.commands import CameraResult
from edge_runtime.records.events import Reported
from edge_runtime.records.status import StatusReport
from edge_runtime.records.window import WindowReport
from tests.awaiting import wait_until
from tests.e2e.daemon import CENTERNET, VTEST, DaemonProcess, write_config
from tests.e2e.test_daemon import ask, is_up, soon
from tests.e2e.test_reload import SYNCED
from tests.mosquitto import Mosquitto, Subscriber, free_port

GATE = 'name = "gate"\nurl = "synthetic:?width=64&height=48&fps=20"\n'
MODEL = f'name = "detector"\nbundle = "{CENTERNET}"\nvariant = "fp32-320"\n'
SECRET = "hunter2"
URL = f"rtsp://admin:{SECRET}@127.0.0.1:9/main"
TOKEN = "correct-horse-battery-staple"


class Host:
    """A daemon's store, its configuration with further cameras, and `edge-runtime camera` for it."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str], **options: Any) -> None:
        self.folder, self.store, self._capsys, self._options = folder, folder / "store", capsys, options
        self.said: list[str] = []
        self.config = self.write()

    def write(self, *cameras: str, gate: str = GATE) -> Path:
        more = "".join(f"[[camera]]\n{each}\n" for each in cameras)
        options = {"model": MODEL, "hardware": "none", **self._options}
        return write_config(self.folder, camera=gate, **{**options, "more": more + options.get("more", "")})

    def start(self, program: Sequence[str] = ()) -> DaemonProcess:
        daemon = DaemonProcess(self.config, program=program)
        wait_until(lambda: is_up(self.store) or daemon.process.poll() is not None, 30, "the daemon is up")
        return daemon

    def camera(self, *arguments: str) -> tuple[int, Any, str]:
        """Exit code, JSON document (None where there is none), and what went to standard error."""
        self._capsys.readouterr()
        action, *rest = arguments
        code = edge_runtime(["camera", action, "-c", str(self.config), "--json", *rest])
        out, err = self._capsys.readouterr()
        self.said += [out, err]
        return code, json.loads(out) if out else None, err

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = ask(self.store, "GET", "/api/status")[1]
        self.said.append(json.dumps(found))
        return found

    def cameras(self) -> dict[str, dict[str, Any]]:
        return {each["name"]: each for each in self.status()["cameras"]}

    def flows(self, *names: str) -> None:
        """Until each of these has had frames in the last window."""
        wait_until(lambda: all((self.cameras().get(name) or {}).get("fps") for name in names), 10, f"frames of {names}")

    def sighup(self, daemon: DaemonProcess, text: str) -> None:
        """Have the configuration read again, until the log says `text` once more."""
        before = daemon.log.count(text)
        daemon.process.send_signal(signal.SIGHUP)
        wait_until(lambda: daemon.log.count(text) > before, 10, text)


def windows_of(host: Host) -> list[WindowReport]:
    windows = ask(host.store, "GET", "/api/windows?last=360")[1]["windows"]
    host.said.append(json.dumps(windows))
    return [WindowReport.model_validate(each) for each in windows]


def check_windows(windows: Sequence[WindowReport]) -> None:
    """The frame identity holds, in total, for every camera, and from window to window."""
    open_before: dict[str, int] = {}
    for window in windows:
        names = [(each.name, each.model) for each in window.cameras]
        assert len(set(names)) == len(names), names
        for counts in [window.frames, *(each.frames for each in window.cameras)]:
            ended = counts.completed + counts.cached + counts.stale + sum(counts.dropped.values()) + counts.failed
            assert counts.carried_in + counts.captured == ended + counts.in_flight
        for each in window.cameras:
            assert each.frames.carried_in == open_before.get(each.name, 0)
        open_before = {each.name: each.frames.in_flight for each in window.cameras}


def post_tcp(port: int, args: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/api/command/camera",
        json.dumps({"args": args}).encode(),
        {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_cameras_change_under_load_and_the_others_lose_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    token = tmp_path / "token"
    token.write_text(TOKEN, encoding="utf-8")
    token.chmod(0o600)
    more = f'[web]\nlisten = "127.0.0.1:{port}"\ntoken_file = "{token}"\n[budget]\nlatency_p99_ms = 2000\n'
    host = Host(tmp_path, capsys, more=more, hardware="sim:orin-nano-8gb")
    with host.start() as daemon:
        host.flows("gate")
        # the file: added, changed alive, opened anew, removed; none of it wants a restart
        in_force = "the configuration was read again and is in force"
        host.write(
            'name = "yard"\nurl = "synthetic:?width=64&height=48&fps=5"', 'name = "gone"\nurl = "file:/no/such.mp4"'
        )
        host.sighup(daemon, in_force)
        host.flows("gate", "yard")
        wait_until(lambda: host.cameras()["gone"]["state"] == "down", 5, "one that is not there is down")
        assert "no such file" in host.cameras()["gone"]["reason"].lower()
        host.write('name = "yard"\nurl = "synthetic:?width=64&height=48&fps=5"\nfps = 2')
        host.sighup(daemon, in_force)
        assert set(host.cameras()) == {"gate", "yard"}
        assert host.cameras()["yard"]["fps_wanted"] == 2.0
        assert "camera yard: fps changed, by the configuration" in daemon.log
        # a wrong one, and one that asks for a model that needs a restart, change nothing
        host.write(f'name = "yard"\nurl = "{URL}"\nfsp = 2')
        host.sighup(daemon, "was not taken over")
        daemon.wait_for("did you mean fps?")  # a line of its own
        second = f"[[model]]\n{MODEL.replace('detector', 'other')}"
        host.write(f'name = "roof"\nurl = "synthetic:"\nmodel = "other"\n{second}', gate=f'{GATE}model = "detector"\n')
        host.sighup(daemon, "its model other does not run here yet")
        assert set(host.cameras()) == {"gate", "yard"}
        host.write('name = "yard"\nurl = "synthetic:?width=64&height=48&fps=5"\nfps = 2')

        # commands on the control socket
        secret = tmp_path / "url"
        secret.write_text(f"{URL}\n", encoding="utf-8")
        code, result, _ = host.camera("add", "roof", "--url-file", str(secret), "--fps", "3")
        assert (code, result["done"], result["persisted"]) == (0, ["camera roof: added"], True)
        CameraResult.model_validate(result)
        wait_until(lambda: host.cameras()["roof"]["state"] == "down", 10, "nobody is at that address")
        assert host.cameras()["roof"]["address"] == "rtsp://***@127.0.0.1:9/main"
        assert host.camera("add", "lane", "synthetic:?width=64&height=48&fps=30")[0] == 0
        host.flows("lane", "gate")
        assert host.camera("change", "lane", "--fps", "4", "--priority", "2")[1]["done"] == [
            "camera lane: fps, priority changed"
        ]
        assert host.camera("cap", "yard", "1")[1]["done"] == ["camera yard: at most 1 fps"]
        assert host.camera("pause", "lane")[0] == 0
        wait_until(lambda: host.cameras()["lane"]["state"] == "paused", 5, "it is paused")
        assert host.camera("remove", "gate")[0] == 0
        assert host.camera("reset", "gate")[1]["done"] == ["camera gate: added"]
        host.flows("gate")
        listed = {each["name"]: (each["source"], each["paused"], each["cap_fps"]) for each in host.camera("list")[1]}
        assert listed == {
            "gate": ("configuration", False, None), "yard": ("overlay", False, 1.0),
            "roof": ("overlay", False, None), "lane": ("overlay", True, None),
        }  # fmt: skip
        # what is wrong is said by its key, and changes nothing
        for arguments, expected, words in (
            (("add", "gate", "synthetic:"), 3, "there is a camera gate already"),
            (("add", "new", "clip.mp4"), 2, 'camera.url: "clip.mp4" is a relative path'),
            (("add", "new", URL, "--pace", "max"), 2, "camera.pace"),
            (("add", "new", "synthetic:", "--model", "nix"), 2, 'camera.model[1]: "nix" is no configured model'),
            (("add", URL, "synthetic:"), 2, 'camera.name: "rtsp://***@127.0.0.1:9/main" cannot stand'),
            (("remove", URL), 2, "there is no camera 'rtsp://***@127.0.0.1:9/main'"),
            (("change", "gate", "--fps", "0"), 2, "camera.fps"),
            (("change", "nix", "--fps", "1"), 2, "there is no camera 'nix'"),
            (("remove", "nix"), 2, "there are: gate, lane, roof, yard"),
            (("change", "gate"), 2, "nothing is to change"),
            (("add", "new", "--url-file", "/no/such"), 2, "cannot be read"),
        ):
            code, result, err = host.camera(*arguments)
            assert (code, result) == (expected, None), (arguments, err)
            assert words in err
        # over TCP only what no address comes with, token or not
        status, reply = post_tcp(port, {"action": "add", "camera": {"name": "x", "url": f"gst:filesrc {SECRET}"}})
        assert (status, reply["error"]["code"]) == (403, "forbidden")
        assert "start a program" in reply["error"]["message"]
        assert post_tcp(port, {"action": "pause", "name": "yard"})[0] == 200

        StatusReport.model_validate(host.status())
        windows = windows_of(host)
        check_windows(windows)
        with urllib.request.urlopen(
            urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"authorization": f"Bearer {TOKEN}"})
        ) as answer:
            metrics = answer.read().decode()
        assert 'edge_camera_state{camera="lane",model="detector",state="paused"} 1.0' in metrics
        assert 'edge_camera_source_total{camera="lane",reason="decoded"}' in metrics
        assert 'camera="gone"' not in metrics
        kept = (host.store / "cameras.json").read_text(encoding="utf-8")
        assert (host.store / "cameras.json").stat().st_mode & 0o777 == 0o600
        assert SECRET in kept
        wanted = host.cameras()

        # a kill in the middle of changes: the next start has one or the other, and all of the rest
        t_kill = time.monotonic() + random.Random(7).uniform(0.2, 0.5)
        ending = threading.Event()

        def change() -> None:
            number = 1
            while not ending.is_set():
                body = {
                    "args": {"action": "change", "name": "roof", "camera": {"fps": number, "url": f"{URL}/{number}"}}
                }
                try:
                    ask(host.store, "POST", "/api/command/camera", body)
                except (OSError, http.client.HTTPException, ValueError):
                    return  # it was killed meanwhile
                number = number % 100 + 1

        busy = threading.Thread(target=change)
        busy.start()
        time.sleep(max(0.0, t_kill - time.monotonic()))
        daemon.process.kill()
        ending.set()
        busy.join(10)
        daemon.process.wait(10)
        log = daemon.log
    with host.start() as daemon:
        again = host.cameras()
        assert set(again) == set(wanted)
        for name in ("gate", "yard", "lane"):
            for key in ("source", "paused", "cap_fps", "fps_wanted", "address"):
                assert again[name][key] == wanted[name][key], (name, key)
        fps, address = again["roof"]["fps_wanted"], again["roof"]["address"]
        assert address.endswith(f"/main/{fps:g}")
        host.flows("gate")
        wait_until(lambda: host.cameras()["lane"]["state"] == "paused", 5, "it is paused from the start on")
        assert host.camera("reset", "--all")[0] == 0
        assert {each["source"] for each in host.cameras().values()} == {"configuration"}
        assert set(host.cameras()) == {"gate", "yard"}
        # even the last camera may go, under a governor, too
        assert host.camera("remove", "gate")[0] == host.camera("remove", "yard")[0] == 0
        seen = daemon.windows()
        wait_until(lambda: daemon.windows() > seen + 2, 10, "windows go on")
        assert (host.status()["cameras"], host.status()["health"]["state"]) == ([], "ok")
        assert host.camera("reset", "--all")[0] == 0
        host.flows("gate")
        check_windows(windows_of(host))
        assert daemon.stop()[0] == 0
        everything = log + daemon.log + str(host.said) + metrics
    assert SECRET not in everything
    assert "Traceback" not in everything


def test_over_the_broker_cameras_are_paused_and_capped_and_never_added(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = "edge/v1/test-device"
    with Mosquitto(tmp_path) as broker, Subscriber(broker, f"{root}/#") as subscriber:
        script = tmp_path / "synced.py"
        script.write_text(SYNCED, encoding="utf-8")
        host = Host(tmp_path, capsys, mqtt=f'host = "127.0.0.1"\nport = {broker.port}')
        # one that waits at the broker as a retained one is not obeyed at any start
        early = {"id": "r1", "expires_utc": soon(), "args": {"action": "pause", "name": "gate"}}
        subscriber.publish(f"{root}/cmd/camera", json.dumps(early).encode(), retain=True)
        with host.start([sys.executable, str(script)]) as daemon:
            host.flows("gate")
            wait_until(lambda: "a retained command is never obeyed" in daemon.log, 10, "it is refused")

            def command(number: int, args: dict[str, Any]) -> dict[str, Any]:
                body = json.dumps({"id": f"c{number}", "expires_utc": soon(), "args": args})
                subscriber.publish(f"{root}/cmd/camera", body.encode())
                topic = f"{root}/reply/c{number}"
                subscriber.wait_for(lambda _: subscriber.payloads(topic), 10, topic)
                reply: dict[str, Any] = json.loads(subscriber.payloads(topic)[0])
                return reply

            def reported() -> dict[str, Any]:
                found = Reported.model_validate_json(subscriber.payloads(f"{root}/reported")[-1])
                return {each.name: (each.source, each.paused, each.cap_fps) for each in found.cameras}

            assert reported() == {"gate": ("configuration", False, None)}
            topic = f"{root}/event/camera"
            wait_until(lambda: subscriber.payloads(topic), 5, "it is told that the camera is up")
            assert command(1, {"action": "cap", "name": "gate", "fps": 5})["result"]["done"] == [
                "camera gate: at most 5 fps"
            ]
            assert command(2, {"action": "pause", "name": "gate"})["ok"]
            wait_until(lambda: reported() == {"gate": ("overlay", True, 5.0)}, 5, "it is reported")
            wait_until(lambda: host.cameras()["gate"]["state"] == "paused", 5, "it is paused")
            table = {"name": "roof", "url": URL}
            never: list[dict[str, Any]] = [
                {"action": "add", "camera": table},
                {"action": "change", "name": "gate", "camera": table},
                {"action": "remove", "name": "gate"},
                {"action": "reset"},
            ]
            for number, args in enumerate(never, 10):
                refused = command(number, args)
                assert (refused["ok"], refused["error"]["code"]) == (False, "forbidden")
                assert "edge-runtime camera" in refused["error"]["remedy"]
            assert command(20, {"action": "resume", "name": "nix"})["error"]["code"] == "unknown_camera"
            assert command(21, {"action": "resume", "name": "gate"})["ok"]
            host.flows("gate")
            assert host.camera("add", "roof", "synthetic:?width=8&height=8")[0] == 0
            assert host.camera("change", "roof", "--url", URL)[0] == 0
            wait_until(lambda: reported()["roof"] == ("overlay", False, None), 5, "it is reported")
            assert host.camera("remove", "roof")[0] == 0

            def events() -> list[dict[str, Any]]:
                return [json.loads(each) for each in subscriber.payloads(topic)]

            def told(**wanted: Any) -> list[dict[str, Any]]:
                return [each["data"] for each in events() if wanted.items() <= each["data"].items()]

            wait_until(lambda: told(camera="roof", change="removed"), 5, "it is told")
            assert [each["data"]["change"] for each in events() if "change" in each["data"]] == [
                "added", "replaced", "removed",
            ]  # fmt: skip
            (up, paused, *_) = told(camera="gate")
            assert (up["state"], up["before"]) == ("up", "starting")
            assert (paused["state"], paused["before"], paused["left_out"]) == ("paused", "up", 0)
            assert paused["before_s"] > 0
            assert daemon.stop()[0] == 0
        # what was obeyed lasts
        with host.start([sys.executable, str(script)]) as daemon:
            wait_until(lambda: "a retained command is never obeyed" in daemon.log, 10, "it is refused")
            gate = host.cameras()["gate"]
            assert (gate["paused"], gate["cap_fps"], gate["source"]) == (False, 5.0, "overlay")
            assert daemon.stop()[0] == 0
        sent = b"".join(each.payload for each in subscriber.seen() if "/cmd/" not in each.topic)
        assert SECRET.encode() not in sent


def threads_of(pid: int) -> list[str]:
    names = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it ended meanwhile
            names.append((task / "comm").read_text(encoding="utf-8").strip())
    return names


def test_thirty_cameras_come_and_go_and_the_daemon_is_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    host = Host(tmp_path, capsys)
    with host.start() as daemon:
        process = psutil.Process(daemon.process.pid)

        def round_trip(number: int) -> None:
            name = f"c{number}"
            table = {"name": name, "url": f"file:{VTEST}"}
            for args in ({"action": "add", "camera": table}, {"action": "remove", "name": name}):
                if args["action"] == "remove":
                    wait_until(lambda: host.cameras()[name]["state"] == "up", 10, "it is up")
                assert ask(host.store, "POST", "/api/command/camera", {"args": args})[0] == 200

        def settled() -> tuple[int, int]:
            return process.num_threads(), process.num_fds()

        for number in range(5):
            round_trip(number)
        wait_until(lambda: not any(name.startswith("cam-c") for name in threads_of(process.pid)), 5, "threads end")
        before, rss = settled(), process.memory_info().rss
        for number in range(5, 35):
            round_trip(number)
        wait_until(lambda: all(now <= then for now, then in zip(settled(), before, strict=True)), 5, "all is let go")
        assert process.memory_info().rss - rss < 24 * 1024 * 1024
        assert daemon.stop()[0] == 0
