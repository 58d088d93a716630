"""A budget in a running daemon: set by a command, shown everywhere, taken back by the configuration."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.cli.main import run as edge_runtime
from tests.awaiting import wait_until
from tests.e2e.daemon import DaemonProcess, write_config
from tests.e2e.test_daemon import ask, is_up

CAMERA = 'name = "gate"\nurl = "synthetic:?width=320&height=240&fps=10"\nmin_fps = 2'
BUDGET = "[budget]\npower_w = 12\nmax_power_w = 14\ntemperature_c = 85\n"


def told(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = edge_runtime(["budget", "-c", str(folder / "config.toml"), *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_power_budget_without_sensors_is_said_to_be_none_that_can_be_held(tmp_path: Path) -> None:
    config = write_config(tmp_path, camera=CAMERA, hardware="auto", more="[budget]\npower_w = 12\n")
    store = tmp_path / "store"
    with DaemonProcess(config) as daemon:
        daemon.wait_for("power budget of 12 W cannot be held: no sensors: ")
        wait_until(lambda: is_up(store), 20, "the daemon is up")
        wait_until(lambda: ask(store, "GET", "/healthz")[1]["status"] == "degraded", 5, "it is degraded")
        health = ask(store, "GET", "/healthz")[1]
        assert any(each.startswith("power budget of 12 W cannot be held: ") for each in health["reasons"])
        refused = ask(store, "POST", "/api/command/set-budget", {"args": {"power_w": 5}})[1]
        assert refused["error"]["code"] == "not_measured"
        config.write_text(config.read_text(encoding="utf-8").replace("power_w = 12", "latency_p99_ms = 80"), "utf-8")
        daemon.process.send_signal(signal.SIGHUP)
        daemon.wait_for("the budget is p99 80 ms, by the configuration")

        def reasons() -> str:
            return "; ".join(ask(store, "GET", "/healthz")[1]["reasons"])

        # a machine that is busy may be derated for its latency
        wait_until(lambda: "cannot be held" not in reasons() and "safe point" not in reasons(), 10, "it is held")


def test_a_budget_by_command_and_by_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path, camera=CAMERA, more=BUDGET)
    store = tmp_path / "store"
    with DaemonProcess(config) as daemon:
        wait_until(lambda: is_up(store), 20, "the daemon is up")

        def status() -> dict[str, Any]:
            return dict(ask(store, "GET", "/api/status")[1])

        assert told(tmp_path, capsys) == (0, "budget: 12 W, 85 C, set by the configuration\n", "")
        code, out, _ = told(tmp_path, capsys, "--power-w", "9.5", "--temperature-c", "none", "--json")
        assert (code, json.loads(out)["power_w"], json.loads(out)["temperature_c"]) == (0, 9.5, None)
        assert told(tmp_path, capsys) == (0, "budget: 9.5 W, set by the command\n", "")
        # what is too much is refused, what is nonsense is wrong usage
        code, _, err = told(tmp_path, capsys, "--power-w", "14.5")
        assert (code, "at most 14" in err) == (3, True)
        assert told(tmp_path, capsys, "--power-w", "none")[0] == 3
        assert told(tmp_path, capsys, "--power-w", "-3")[0] == 2
        with pytest.raises(SystemExit) as caught:
            told(tmp_path, capsys, "--latency-p99-ms", "nan")
        assert caught.value.code == 2
        assert status()["budget"]["power_w"] == 9.5
        # the windows judge it from the first one on that had it all along
        wait_until(lambda: (status()["window"] or {}).get("budget", {}).get("violated_s") is not None, 10)
        window = status()["window"]
        assert (window["budget"]["power_w"], window["budget"]["reason"]) == (9.5, None)
        # a file that says the same leaves the command's; another one is taken over at once
        daemon.process.send_signal(signal.SIGHUP)
        daemon.wait_for("the configuration was read again and is in force")
        assert status()["budget"]["set_by"] == "command"
        config.write_text(config.read_text(encoding="utf-8").replace("power_w = 12", "power_w = 11"), encoding="utf-8")
        daemon.process.send_signal(signal.SIGHUP)
        daemon.wait_for("the budget is 11 W, 85 degC, by the configuration")
        assert status()["budget"]["power_w"] == 11
        assert daemon.stop()[0] == 0
        assert "needs a restart" not in daemon.log
    assert told(tmp_path, capsys)[0] == 4
