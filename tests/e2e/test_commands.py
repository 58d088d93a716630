"""Commands of the real daemon over its death: what was obeyed is not obeyed again, what came meanwhile is answered."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

from tests.awaiting import wait_until
from tests.e2e.daemon import DaemonProcess, write_config
from tests.e2e.test_daemon import ask, is_up, soon
from tests.e2e.test_reload import SYNCED
from tests.mosquitto import Mosquitto, Subscriber

ROOT = "edge/v1/test-device"


def test_an_id_is_obeyed_once_over_both_doors_and_a_kill(tmp_path: Path) -> None:
    store = tmp_path / "store"
    wish = {"id": "b1", "expires_utc": soon(600), "args": {"power_w": 9.5}}
    with Mosquitto(tmp_path / "broker") as broker, Subscriber(broker, f"{ROOT}/reply/#") as client:

        def reply(command_id: str, number: int) -> dict[str, object]:
            topic = f"{ROOT}/reply/{command_id}"
            client.wait_for(lambda _: len(client.payloads(topic)) > number, 20, topic)
            return dict(json.loads(client.payloads(topic)[number]))

        script = tmp_path / "synced.py"
        script.write_text(SYNCED, encoding="utf-8")
        config = write_config(tmp_path, mqtt=f"port = {broker.port}", more="[budget]\npower_w = 12\n")
        with DaemonProcess(config, program=[sys.executable, str(script)]) as daemon:
            wait_until(lambda: is_up(store), 20, "the daemon is up")
            client.publish(f"{ROOT}/cmd/set-budget", json.dumps(wish).encode())
            first = reply("b1", 0)
            assert first["ok"], first
            assert ask(store, "POST", "/api/command/set-budget", wish)[1] == first
            assert ask(store, "GET", "/api/status")[1]["budget"]["power_w"] == 9.5
            daemon.stop(signal.SIGKILL)
        # nobody is there: the broker keeps these
        client.publish(f"{ROOT}/cmd/set-budget", json.dumps(wish).encode())
        client.publish(f"{ROOT}/cmd/set-budget", b'{"id": 7}')
        # (this one may not know the time: it has not been booted since)
        with DaemonProcess(config) as daemon:
            assert reply("b1", 1) == first
            error = reply("malformed", 0)["error"]
            assert isinstance(error, dict)
            assert (error["code"], error["where"]) == ("invalid", "id")
            assert ask(store, "POST", "/api/command/set-budget", wish)[1] == first
            # what a command sets lasts until the next start
            assert ask(store, "GET", "/api/status")[1]["budget"]["power_w"] == 12
            assert daemon.stop()[0] == 0
            assert "did not end in time" not in daemon.log
