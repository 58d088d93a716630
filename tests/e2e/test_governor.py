"""A budget held by a whole daemon on a simulated module: real models and cameras, real time, simulated watts."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.app.daemon import Daemon
from edge_runtime.app.machine import Machine, choose_machine, simulated
from edge_runtime.config import load_config
from edge_runtime.governor.controller import Controller
from edge_runtime.governor.loop import PERIOD_S
from edge_runtime.hardware.sources import Sensors
from edge_runtime.pipeline.pipeline import Pipeline
from edge_runtime.records.power import SensorSwitch
from edge_runtime.records.window import WindowReport
from edge_runtime.sim.sensors import Fault
from tests.awaiting import wait_until
from tests.e2e.daemon import CENTERNET, DaemonProcess, write_config
from tests.e2e.test_daemon import ask, is_up
from tests.mosquitto import Mosquitto, Subscriber

CAMERAS = "\n[[camera]]\n".join(
    f'name = "{name}"\nurl = "synthetic:?width=320&height=240&fps=15"\nmin_fps = 1' for name in ("gate", "yard")
)
MODEL = f'name = "detector"\nbundle = "{CENTERNET}"\nvariant = "fp32-416"\nladder = ["fp32-320"]'
LOW_W, HIGH_W = 5.5, 15.0
"""Idle is 4.65 W; two cameras at 15 frames a second take about 7 W."""
BUDGET = f"[budget]\npower_w = {LOW_W}\nmax_power_w = {HIGH_W}\n"


def configured(folder: Path, more: str = BUDGET, **options: Any) -> Path:
    return write_config(folder, camera=CAMERAS, model=MODEL, more=more, **options)


def governor(store: Path) -> dict[str, Any]:
    status: dict[str, Any] = ask(store, "GET", "/api/status")[1]
    return {**status["governor"], "limits": status["operating_point"]["limits"]}


def set_power(store: Path, watts: float) -> None:
    assert ask(store, "POST", "/api/command/set-budget", {"args": {"power_w": watts}})[0] == 200


def test_a_load_above_a_power_budget_is_derated_and_one_below_it_is_not(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with DaemonProcess(configured(tmp_path)) as daemon:
        wait_until(lambda: is_up(store), 20, "the daemon is up")
        wait_until(lambda: governor(store)["state"] == "derating", 20, "derating")
        wait_until(lambda: governor(store)["limits"], 20, "a camera is held back")
        found = governor(store)
        assert set(found["limits"].values()) <= {"power", "caution"}
        assert f"of {LOW_W:.1f} W" in found["because"]
        set_power(store, HIGH_W)
        wait_until(lambda: governor(store)["state"] == "holding", 20, "holding")
        assert governor(store)["limits"] == {}
        code, took_s = daemon.stop()
        assert code == 0
        assert took_s < 5
        assert "Traceback" not in daemon.log


def mean_w(windows: list[dict[str, Any]]) -> float:
    reports = [WindowReport.model_validate(each) for each in windows]
    energies = [each.energy for each in reports if each.energy is not None]
    return sum(each.joules for each in energies) / sum(each.duration_s for each in reports if each.energy is not None)


@pytest.mark.full
def test_a_power_budget_is_held_set_anew_and_told(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with (
        Mosquitto(tmp_path / "broker") as broker,
        Subscriber(broker, "edge/v1/test-device/event/governor") as subscriber,
    ):
        config = configured(tmp_path, window_s=1.0, mqtt=f"port = {broker.port}")
        with DaemonProcess(config) as daemon:
            daemon.wait_for("window 24:", 60)
            windows = ask(store, "GET", "/api/windows?last=10")[1]["windows"]
            assert mean_w(windows) <= 1.03 * LOW_W
            assert {each["governor"]["state"] for each in windows} <= {"derating", "raising"}
            assert all(each["governor"]["because"] for each in windows)
            assert any(each["operating_point"]["limits"] for each in windows)
            done = sum(each["frames"]["completed"] for each in windows)
            assert done >= 2 * 0.9 * 10  # both cameras' min_fps, in 10 s
            set_power(store, HIGH_W)
            wait_until(lambda: governor(store)["state"] == "holding", 40, "holding")
            set_power(store, LOW_W)
            wait_until(lambda: governor(store)["state"] == "derating", 20, "derating again")
            text = config.read_text(encoding="utf-8")
            config.write_text(text.replace(f"power_w = {LOW_W}", "power_w = 14.0", 1), encoding="utf-8")
            daemon.process.send_signal(signal.SIGHUP)
            wait_until(lambda: governor(store)["state"] == "holding", 40, "holding by the configuration")
            code, took_s = daemon.stop()
            assert (code, took_s < 5) == (0, True)
        events = [json.loads(payload) for payload in subscriber.payloads("edge/v1/test-device/event/governor")]
        states = [each["data"].get("state") for each in events]
        assert {"derating", "holding"} <= set(states)
        told = next(each for each in events if each["data"].get("state") == "derating")
        assert told["data"]["budget_power_w"] == LOW_W


def test_without_a_budget_nothing_is_governed(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with DaemonProcess(configured(tmp_path, more="")) as daemon:
        daemon.wait_for("window 1:")
        status = ask(store, "GET", "/api/status")[1]
        assert (status["governor"]["state"], status["governor"]["changes"]) == ("off", 0)
        point = status["operating_point"]
        assert (point["variants"], point["limits"], point["gpu_hz"]) == ({"detector": "fp32-416"}, {}, None)
        assert point["fps"] == {"gate": None, "yard": None}
        assert status["health"]["state"] == "ok"
        assert daemon.stop()[0] == 0
        assert "governor" not in daemon.log


# --- with what goes wrong inside: the daemon's own object, in this process


@contextmanager
def running(config: Path, choose: Callable[..., Machine] = choose_machine) -> Iterator[Daemon]:
    (config.parent / "store").mkdir(exist_ok=True)
    daemon = Daemon(load_config(config), choose=choose)
    try:
        daemon.start()
        yield daemon
    finally:
        daemon.stop()


def state(daemon: Daemon) -> str | None:
    decision = daemon.operating().decision
    return None if decision is None else decision.state


def reasons(daemon: Daemon) -> str:
    return "; ".join(daemon.health().reasons)


@pytest.mark.full
def test_a_lost_sensor_is_the_safe_point_within_three_periods_and_is_over_when_it_is_back(tmp_path: Path) -> None:
    began_s: list[float] = []
    start_s, end_s = 6.0, 9.0

    def choose(
        hardware: str,
        pipeline: Pipeline,
        *,
        on_switch: Callable[[SensorSwitch], None],
        on_death: Callable[[str, BaseException], None],
    ) -> Machine:
        began_s.append(time.monotonic())
        fault = Fault("missing", start_s, end_s)
        module = hardware.removeprefix("sim:")
        return simulated(module, pipeline, on_switch=on_switch, on_death=on_death, faults=[fault])

    with running(configured(tmp_path), choose) as daemon:
        assert isinstance(daemon._machine.sensors, Sensors)
        wait_until(lambda: state(daemon) not in (None, "safe"), 8, "it is governed")
        wait_until(lambda: time.monotonic() >= began_s[0] + start_s, 10)
        assert state(daemon) != "safe"
        wait_until(lambda: state(daemon) == "safe", 3, "the safe point")
        # the reading before the fault is as old as a period of the sensor, and threads come late on a busy machine
        took_s = time.monotonic() - (began_s[0] + start_s)
        assert took_s <= 3 * PERIOD_S + 0.5
        decision = daemon.operating().decision
        assert decision is not None
        assert decision.point.fps == {"gate": 1.0, "yard": 1.0}
        assert decision.point.variants == {"detector": "fp32-320"}
        wait_until(lambda: "the safe point is in force: no reading of power" in reasons(daemon), 3, "an alarm")
        wait_until(lambda: state(daemon) != "safe", end_s - start_s + 30, "it is back")
        wait_until(lambda: not daemon.health().reasons, 3, "no alarm any more")


@pytest.mark.full
def test_a_governor_that_hangs_loses_its_lease_and_then_the_watchdog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang, free = threading.Event(), threading.Event()
    step = Controller.step

    def hanging(self: Controller, *args: Any) -> Any:
        if hang.is_set():
            free.wait(30)
        return step(self, *args)

    monkeypatch.setattr(Controller, "step", hanging)
    with running(configured(tmp_path, more=BUDGET.replace(str(LOW_W), "14"))) as daemon:
        wait_until(lambda: state(daemon) == "holding", 30, "every wish is granted")
        camera = daemon.pipeline.camera("gate")
        assert camera is not None
        hang.set()
        wait_until(lambda: "the governor does not answer" in reasons(daemon), 5, "the lease has lapsed")
        assert (daemon.health().state, state(daemon)) == ("degraded", "safe")
        skipped = camera.source().skipped_rate
        wait_until(lambda: camera.source().skipped_rate > skipped + 5, 5, "the camera is capped")
        wait_until(lambda: daemon.health().wedged, 8, "the supervisor gives up on it")
        assert "loop governor has been silent" in reasons(daemon)
        start_s = time.monotonic()
        assert not daemon.stop()
        assert time.monotonic() - start_s < 5
        free.set()
