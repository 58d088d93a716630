"""A service that speaks as jetson-stats' own does, for its real client, with data that a test chooses.

It is a `multiprocessing` manager behind a socket, with a dictionary (the data), an event (new data) and a queue: the
client asks for an interval through the queue and gets back what the service is. It runs in a process of its own:

    python jtop_service.py SOCKET SCENARIO.json

SCENARIO: `data` what is published; `version`; `interval` what it says of its rate, s; `frozen_after` the number of
publications after which it goes on without a change (what a hung service looks like); `mute` to answer no client.
The data may be changed while it runs by replacing the file.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jtop
import jtop.service

from tests.awaiting import wait_until

AGX_ORIN: dict[str, Any] = {
    "power": {
        "rail": {
            name: {"volt": 19000, "curr": 100, "power": mw, "avg": mw + 7, "online": True, "type": "INA3221"}
            for name, mw in (
                ("VDDQ_VDD2_1V8AO", 301),
                ("VDD_CPU_CV", 390),
                ("VDD_GPU_SOC", 2340),
                ("VIN_SYS_5V0", 4025),
                ("0-00081", 0),
            )
        },
        "tot": {"power": 7056, "avg": 7000},
    },
    "temperature": {
        "CPU": {"temp": 44.562, "online": True},
        "GPU": {"temp": -256, "online": False},
        "CV0": {"temp": -256, "online": False},
        "Tboard": {"temp": 52.0, "online": True},
        "tj": {"temp": 44.343, "online": True},
        "nvme Composite": {"temp": 61.85, "max": 84.8, "crit": 87.8, "online": True},
    },
    "gpu": {
        "ga10b": {
            "type": "integrated",
            "status": {"railgate": False, "load": 37.5},
            "freq": {"governor": "nvhost_podgov", "cur": 816000, "min": 306000, "max": 1300500},
            "power_control": "auto",
        }
    },
    "fan": {"pwmfan": {"speed": [25.0], "rpm": [1200], "profile": "quiet"}},
    "nvp": {"status": [True], "thread": False, "model": {"name": "MODE_30W", "id": 2}},
    "jc": {"enable": False, "boot": False, "config": False, "thread": None},
    "mem": {"RAM": {"tot": 62_000_000, "used": 4_000_000}},
    "cpu": {"total": {}, "cpu": []},
    "engines": {},
    "processes": [],
}


def nano(power_mw: int) -> dict[str, Any]:
    """Data of an Orin Nano, whose VDD_IN the service takes out of the rails and calls the total."""
    rails = {
        name: {"volt": 4900, "curr": 100, "power": mw, "avg": mw, "online": True}
        for name, mw in (("VDD_CPU_GPU_CV", 560), ("VDD_SOC", 1484))
    }
    total = {"volt": 4900, "curr": 949, "power": power_mw, "avg": 4600, "online": True, "name": "VDD_IN"}
    zones = {"cpu": {"temp": 47.875, "online": True}, "gpu": {"temp": 50.218, "online": True}}
    return AGX_ORIN | {"power": {"rail": rails, "tot": total}, "temperature": zones}


class Service:
    """The process, to be started, killed and started again behind the same socket."""

    def __init__(self, folder: Path, data: dict[str, Any], **scenario: Any) -> None:
        self.socket = folder / "jtop.sock"
        self._scenario = folder / "scenario.json"
        self._log = folder / "service.log"
        self.say({"version": jtop.__version__, "interval": 0.05, "data": data, **scenario})
        self._process: subprocess.Popen[bytes] | None = None

    def say(self, scenario: dict[str, Any]) -> None:
        new = self._scenario.with_suffix(".new")
        new.write_text(json.dumps(scenario), encoding="utf-8")
        new.replace(self._scenario)

    def start(self) -> Service:
        """Returns when it listens."""
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(self.socket), str(self._scenario)], env=environment, stderr=log
            )
        wait_until(self._listens, what="the service")
        return self

    def _listens(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self._log.read_text(encoding="utf-8")
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(self.socket)) == 0

    def kill(self) -> None:
        """SIGKILL: its socket stays behind."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(10)

    def signal(self, signum: int) -> None:
        assert self._process is not None
        self._process.send_signal(signum)

    def __enter__(self) -> Service:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()


def serve(address: Path, scenario_file: Path) -> None:
    scenario: dict[str, Any] = json.loads(scenario_file.read_text(encoding="utf-8"))
    commands: queue.Queue[dict[str, Any]] = queue.Queue()
    data: dict[str, Any] = {}
    event = threading.Event()
    jtop.service.JTOP_PIPE = str(address)
    jtop.service.JtopManager.register("get_queue", callable=lambda: commands)
    jtop.service.JtopManager.register("sync_data", callable=lambda: data)
    jtop.service.JtopManager.register("sync_event", callable=lambda: event)

    def publish() -> None:
        t0 = time.monotonic()
        published = 0
        while True:
            now: dict[str, Any] = json.loads(scenario_file.read_text(encoding="utf-8"))
            published += 1
            if published <= now.get("frozen_after", published):
                data.clear()
                data.update(now["data"], uptime=now.get("uptime", 1000.0 + time.monotonic() - t0))
                if data["uptime"] is None:
                    del data["uptime"]
            event.set()
            time.sleep(now["interval"])

    def answer() -> None:
        while True:
            command = commands.get()
            if "interval" in command:
                init = {
                    "version": scenario["version"],
                    "board": {"hardware": {}},
                    "interval": scenario["interval"],
                    "memory": "/",
                    "fan": {},
                    "jc": "jc" in scenario["data"],
                }
                if "nvp" in scenario["data"]:
                    init["nvpmodel"] = {"models": ["MAXN", "MODE_30W"], "default": {"name": "MODE_30W", "id": 2}}
                commands.put({"init": init})
                # the client takes it from the same queue; one that has given up never does
                end = time.monotonic() + 2.0
                while not commands.empty() and time.monotonic() < end:
                    time.sleep(0.001)
            # an init that comes back here is one that nobody took

    threading.Thread(target=publish, daemon=True).start()
    if not scenario.get("mute"):
        threading.Thread(target=answer, daemon=True).start()
    address.unlink(missing_ok=True)
    jtop.service.JtopManager().get_server().serve_forever()


if __name__ == "__main__":
    serve(Path(sys.argv[1]), Path(sys.argv[2]))
