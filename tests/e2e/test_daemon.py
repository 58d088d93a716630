"""The daemon as an operator leaves it running: status, commands, the spool over kills, and stops whatever hangs."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.records.events import Event, Reported
from edge_runtime.records.status import StatusReport
from edge_runtime.records.window import WindowReport
from tests.awaiting import wait_until
from tests.e2e.daemon import CENTERNET, VTEST, DaemonProcess, write_config
from tests.mosquitto import Mosquitto, Subscriber, free_port

ROOT = "edge/v1/test-device"
SYNTHETIC = 'name = "gate"\nurl = "synthetic:?width=64&height=48&fps=20"'

STUCK_LANE = """
import sys, threading
from edge_runtime.app import health
from edge_runtime.engine import onnxrt
health.STALL_LIMIT_S = 2.0
count, collect = [0], onnxrt.OnnxRuntimeLane.collect
def stuck(lane):
    count[0] += 1
    if count[0] > 20:
        print("a lane is stuck", file=sys.stderr, flush=True)
        threading.Event().wait()
    return collect(lane)
onnxrt.OnnxRuntimeLane.collect = stuck
from edge_runtime.cli.main import run
sys.exit(run(sys.argv[1:]))
"""
"""The daemon, with an engine whose runs never come back after the twentieth."""


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=5)
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(5)
        self.sock.connect(self._path)


def ask(store: Path, method: str, path: str, body: object = None) -> tuple[int, Any]:
    connection = UnixConnection(store / "control.sock")
    try:
        connection.request(method, path, None if body is None else json.dumps(body))
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def is_up(store: Path) -> bool:
    try:
        return ask(store, "GET", "/healthz")[0] == 200
    except (FileNotFoundError, ConnectionRefusedError):  # it is bound before it listens
        return False


def soon(seconds: float = 60) -> str:
    return (datetime.now(timezone.utc) + timedelta(seconds=seconds)).isoformat()


def test_status_over_the_socket_and_as_a_command(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    with DaemonProcess(config) as daemon:
        daemon.wait_for("window 2:")
        status, document = ask(tmp_path / "store", "GET", "/api/status")
        assert status == 200
        report = StatusReport.model_validate(document)
        assert report.health.state == "ok"
        assert (report.cameras[0].state, report.models[0].variant) == ("up", "fp32-320")
        assert report.cameras[0].frames.completed > 0
        assert report.window is not None
        assert report.power is not None
        assert report.power.source == "simulated"
        _, windows = ask(tmp_path / "store", "GET", "/api/windows?last=2")
        assert [window["seq"] for window in windows["windows"]][-1] >= report.window.seq
        command = [sys.executable, "-m", "edge_runtime", "status", "-c", str(config), "--json"]
        told = subprocess.run(command, capture_output=True, text=True, check=True)
        assert StatusReport.model_validate_json(told.stdout).session == report.session
        assert daemon.stop()[0] == 0
    gone = subprocess.run(command, capture_output=True, text=True, check=False)
    assert gone.returncode == 4
    assert not (tmp_path / "store" / "control.sock").exists()


def test_a_camera_is_paused_capped_and_resumed_and_every_frame_is_still_counted(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with DaemonProcess(write_config(tmp_path, camera=SYNTHETIC, hardware="none")) as daemon:
        daemon.wait_for("window 1:")

        def camera(action: str, **more: object) -> int:
            return ask(store, "POST", "/api/command/camera", {"args": {"name": "gate", "action": action, **more}})[0]

        def now() -> dict[str, Any]:
            found: dict[str, Any] = ask(store, "GET", "/api/status")[1]["cameras"][0]
            return found

        assert camera("pause") == 200
        wait_until(lambda: now()["state"] == "paused")
        seen = now()["frames"]["captured"]
        daemon.wait_for(f"window {daemon.windows() + 2}:")
        assert now()["frames"]["captured"] <= seen + 2
        assert camera("resume") == 200
        wait_until(lambda: now()["state"] == "up")
        assert camera("cap", fps=5) == 200
        wait_until(lambda: now()["fps"] is not None and 3 <= now()["fps"] <= 7, what="a capped rate")
        assert now()["fps_wanted"] == 5
        assert camera("cap", fps=None) == 200
        wait_until(lambda: now()["fps"] > 15, what="the whole rate")
        assert camera("cap") == 400
        status, reply = ask(store, "POST", "/api/command/camera", {"args": {"name": "gat", "action": "pause"}})
        assert status == 400
        assert (reply["error"]["code"], "gate" in reply["error"]["remedy"]) == ("unknown_camera", True)
        assert ask(store, "POST", "/api/command/camra", {})[0] == 404
        for window in ask(store, "GET", "/api/windows?last=100")[1]["windows"]:
            frames = WindowReport.model_validate(window).frames
            ended = frames.completed + frames.cached + frames.stale + sum(frames.dropped.values()) + frames.failed
            assert frames.carried_in + frames.captured == ended + frames.in_flight
        assert daemon.stop()[0] == 0


def test_commands_over_mqtt_are_answered_once_and_retained_or_unsynced_ones_refused(tmp_path: Path) -> None:
    with (
        Mosquitto(tmp_path / "broker") as broker,
        Subscriber(broker, f"{ROOT}/#") as subscriber,
    ):
        subscriber.publish(f"{ROOT}/cmd/ping", json.dumps({"id": "old", "expires_utc": soon()}).encode(), retain=True)
        with DaemonProcess(write_config(tmp_path, mqtt=f"port = {broker.port}")) as daemon:
            daemon.wait_for("window 0:")
            subscriber.wait_for(lambda _: subscriber.payloads(f"{ROOT}/reply/old"))
            refused = json.loads(subscriber.payloads(f"{ROOT}/reply/old")[0])
            assert refused["error"]["code"] == "retained"
            for _ in range(2):
                payload = json.dumps({"id": "p1", "expires_utc": soon(), "args": {}}).encode()
                subscriber.publish(f"{ROOT}/cmd/ping", payload)
            subscriber.wait_for(lambda _: len(subscriber.payloads(f"{ROOT}/reply/p1")) == 2)
            replies = [json.loads(payload) for payload in subscriber.payloads(f"{ROOT}/reply/p1")]
            assert replies[0]["id"] == "p1"
            if replies[0]["ok"]:
                assert replies[0]["result"]["version"]
            else:  # this machine's clock is not synchronised, and the daemon will not be told otherwise
                assert replies[0]["error"]["code"] == "clock_unsynced"
            reported = Reported.model_validate_json(subscriber.payloads(f"{ROOT}/reported")[-1])
            assert reported.models[0].state == "up"
            assert daemon.stop()[0] == 0


@pytest.mark.full
def test_windows_made_while_the_broker_is_away_arrive_in_order_over_a_kill(tmp_path: Path) -> None:
    port = free_port()
    config = write_config(tmp_path, camera=SYNTHETIC, hardware="none", mqtt=f"port = {port}", window_s=0.2)
    with DaemonProcess(config) as daemon:
        daemon.wait_for("window 10:")
        daemon.process.kill()
        daemon.process.wait(10)
        made_before = daemon.windows()
    with DaemonProcess(config) as daemon:
        daemon.wait_for("did not end cleanly")
        daemon.wait_for("window 10:")
        broker = Mosquitto(tmp_path / "broker", start=False)
        broker.port = port
        (tmp_path / "broker" / "mosquitto.conf").write_text(
            f"listener {port} 127.0.0.1\nallow_anonymous true\nuser root\n", encoding="utf-8"
        )
        broker.start()
        try:
            with Subscriber(broker, f"{ROOT}/#") as subscriber:
                subscriber.wait_for(
                    lambda _: len(subscriber.payloads(f"{ROOT}/telemetry/window")) >= made_before + 8, 60
                )
                assert daemon.stop()[0] == 0
                reports = [
                    WindowReport.model_validate_json(payload)
                    for payload in subscriber.payloads(f"{ROOT}/telemetry/window")
                ]
                events = [
                    Event.model_validate_json(payload) for payload in subscriber.payloads(f"{ROOT}/event/unclean-start")
                ]
        finally:
            broker.kill()
    seqs = [report.seq for report in reports]
    assert seqs == sorted(seqs)
    assert len(set(seqs)) == len(seqs)
    assert seqs == list(range(seqs[0], seqs[-1] + 1)), "a number is missing"
    sessions = [report.session for report in reports]
    first = sessions.count(sessions[0])
    assert sessions == [sessions[0]] * first + [sessions[-1]] * (len(sessions) - first)
    # lost at most what the last commit interval of 0.5 s holds: three windows of 0.2 s
    assert first >= made_before - 4
    assert len(events) == 1
    assert events[0].data["last_seq_telemetry"] == first - 1
    assert events[0].data["previous_session"] == sessions[0]


@pytest.mark.full
def test_an_hour_of_windows_waits_on_disk_and_arrives_in_order(tmp_path: Path) -> None:
    """360 reports of a real size, as an hour makes them, put while no broker is there."""
    from edge_runtime.app.identity import make_identity
    from edge_runtime.clock import SystemClock
    from edge_runtime.mqtt.link import MqttLink
    from edge_runtime.mqtt.settings import BrokerSettings
    from edge_runtime.telemetry.spool import TELEMETRY, Spool

    body = b"x" * 3000
    spool = Spool(tmp_path, make_identity("test-device"), SystemClock())
    spool.start()
    for _ in range(360):
        spool.append(TELEMETRY, f"{ROOT}/telemetry/window", lambda seq: b"%d %s" % (seq, body))
    assert spool.flush(10)
    assert spool.close(5)
    spool = Spool(tmp_path, make_identity("test-device"), SystemClock())
    spool.start()
    with Mosquitto(tmp_path / "broker") as broker, Subscriber(broker, f"{ROOT}/#") as subscriber:
        link = MqttLink(BrokerSettings("127.0.0.1", broker.port), lanes=spool.lanes)
        link.start()
        try:
            topic = f"{ROOT}/telemetry/window"
            subscriber.wait_for(lambda _: len(subscriber.payloads(topic)) >= 360, 30)
            assert [int(payload.split()[0]) for payload in subscriber.payloads(topic)] == list(range(360))
        finally:
            assert link.close(5)
            assert spool.close(5)


def stuck_daemon(tmp_path: Path, config: Path) -> DaemonProcess:
    script = tmp_path / "stuck.py"
    script.write_text(STUCK_LANE, encoding="utf-8")
    return DaemonProcess(config, program=[sys.executable, str(script)])


def test_a_wedged_lane_is_503_within_the_stall_limit_and_the_stop_still_comes(tmp_path: Path) -> None:
    model = f'name = "detector"\nbundle = "{CENTERNET}"\nvariant = "fp32-320"\nlanes = 2\ntimeout_s = 1.0'
    store = tmp_path / "store"
    with stuck_daemon(tmp_path, write_config(tmp_path, camera=SYNTHETIC, model=model)) as daemon:
        wait_until(lambda: is_up(store), 20)
        # stuck after some 1 s of frames, a limit of 2 s, a look every 0.5 s
        wait_until(lambda: ask(store, "GET", "/healthz")[0] == 503, 8, "503")
        _, document = ask(store, "GET", "/healthz")
        assert document["status"] == "wedged"
        assert "model detector" in document["reasons"][0]
        daemon.wait_for("health: wedged")
        daemon.wait_for("Thread 0x")  # the stacks
        code, took = daemon.stop()
        assert took < 5
        assert code == 0  # asked to stop, it stops
        assert "did not end in time: lane-detector" in daemon.log


@pytest.mark.parametrize(
    "broker",
    [pytest.param("up", marks=pytest.mark.full), "frozen", pytest.param("unreachable", marks=pytest.mark.full)],
)
def test_sigterm_ends_within_five_seconds_with_a_stuck_lane_and_any_broker(tmp_path: Path, broker: str) -> None:
    with Mosquitto(tmp_path / "broker") as mosquitto:
        port = 9 if broker == "unreachable" else mosquitto.port
        config = write_config(tmp_path, camera=SYNTHETIC, mqtt=f"port = {port}")
        with stuck_daemon(tmp_path, config) as daemon:
            daemon.wait_for("a lane is stuck")
            daemon.wait_for("window 2:")
            if broker == "frozen":
                mosquitto.freeze()
            code, took = daemon.stop(signal.SIGTERM)
            mosquitto.thaw()
            assert (code, took < 5) == (0, True), daemon.log


@pytest.mark.full
def test_with_every_camera_gone_it_is_degraded_and_lives_on(tmp_path: Path) -> None:
    store = tmp_path / "store"
    clip = tmp_path / "clip.mp4"
    os.link(VTEST, clip) if VTEST.stat().st_dev == tmp_path.stat().st_dev else clip.write_bytes(VTEST.read_bytes())
    config = write_config(tmp_path, camera=f'name = "gate"\nurl = "file:{clip}"', more="")
    clip.rename(tmp_path / "elsewhere.mp4")
    with DaemonProcess(config) as daemon:
        daemon.wait_for("window 1:")
        wait_until(lambda: ask(store, "GET", "/healthz")[1]["status"] == "degraded")
        status, document = ask(store, "GET", "/healthz")
        assert status == 200
        assert "gate" in document["reasons"][0]
        t_end = time.monotonic() + 6
        wait_until(lambda: time.monotonic() > t_end or daemon.process.poll() is not None)
        assert daemon.process.poll() is None
        # and it comes back by itself
        (tmp_path / "elsewhere.mp4").rename(clip)
        wait_until(lambda: ask(store, "GET", "/healthz")[1]["status"] == "ok", 40, "ok")
        assert daemon.stop()[0] == 0


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system that takes no writes."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount")
    folder = tmp_path / "read-only"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,ro", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_takes_no_writes_is_an_alarm_and_no_end(tmp_path: Path, read_only: Path) -> None:
    with Mosquitto(tmp_path / "broker") as broker, Subscriber(broker, f"{ROOT}/#") as subscriber:
        config = write_config(tmp_path, mqtt=f"port = {broker.port}")
        text = config.read_text(encoding="utf-8").replace(str(tmp_path / "store"), str(read_only))
        config.write_text(text, encoding="utf-8")
        with DaemonProcess(config) as daemon:
            daemon.wait_for("Read-only file system")
            daemon.wait_for("health: degraded")
            subscriber.wait_for(lambda _: len(subscriber.payloads(f"{ROOT}/telemetry/window")) >= 3, 30)
            assert daemon.stop()[0] == 0


def test_sigterm_while_it_loads_is_heeded(tmp_path: Path) -> None:
    models = "".join(f'[[model]]\nname = "m{n}"\nbundle = "{CENTERNET}"\nvariant = "fp32-512"\n' for n in range(1, 30))
    model = f'name = "m0"\nbundle = "{CENTERNET}"'
    camera = f'name = "gate"\nurl = "file:{VTEST}"\nmodel = "m0"'
    with DaemonProcess(write_config(tmp_path, camera=camera, model=model, more=models)) as daemon:
        daemon.wait_for("model m0:")
        code, took = daemon.stop()
        assert (code, took < 5) == (0, True), daemon.log
        assert "is running" not in daemon.log
