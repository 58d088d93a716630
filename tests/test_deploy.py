"""The examples in deploy/: Prometheus' own tools say of them what they say, and every name in them is a real one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from edge_runtime.records.cameras import CameraEffort
from edge_runtime.records.events import Event
from edge_runtime.records.governing import Budget, Operating
from edge_runtime.records.power import Unavailable
from edge_runtime.telemetry.topics import Topics
from tests.awaiting import wait_until
from tests.e2e.daemon import DaemonProcess, write_config
from tests.mosquitto import Mosquitto, free_port
from tests.telemetry.test_windows import Device, S, a_cut

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
RULES = PROMETHEUS / "edge-runtime.rules.yml"
RULES_TEST = PROMETHEUS / "edge-runtime.rules.test.yml"
TOKEN = "a-token-of-the-tests"


def program(name: str) -> str:
    """Of Prometheus, installed or fetched by scripts/test."""
    found = shutil.which(name) or shutil.which(name, path=str(ROOT / ".cache" / "prometheus"))
    if found is None:
        raise RuntimeError(
            f"{name} is not installed: apt-get install prometheus, or run scripts/test, which fetches it"
        )
    return found


def promtool(*arguments: str | Path, stdin: bytes | None = None) -> str:
    """What promtool says, which has to be content."""
    done = subprocess.run([program("promtool"), *arguments], input=stdin, capture_output=True, timeout=30, check=False)
    said = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, said
    return said


# --- Prometheus


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The example as it is installed, with a token."""
    copy = tmp_path / "prometheus"
    shutil.copytree(PROMETHEUS, copy)
    (copy / "edge-runtime.token").write_text(TOKEN, encoding="ascii")
    return copy


def test_prometheus_takes_the_example(folder: Path) -> None:
    assert "is valid prometheus config" in promtool("check", "config", folder / "prometheus.yml")
    assert "14 rules found" in promtool("check", "rules", RULES)


def test_every_alert_fires_when_it_should_and_only_then() -> None:
    assert "SUCCESS" in promtool("test", "rules", RULES_TEST)
    alerts = set(re.findall(r"alert: (\w+)", RULES.read_text(encoding="utf-8")))
    healthy, wrong = RULES_TEST.read_text(encoding="utf-8").split("- name: everything is wrong")
    assert len(alerts) == 11
    assert alerts <= set(re.findall(r"alertname: (\w+)", healthy))
    assert alerts == set(re.findall(r"alertname: (\w+)\n +exp_alerts", wrong))


class PrometheusProcess:
    """Prometheus with the configuration of `folder`, on a loopback port."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self._process = subprocess.Popen(
            [
                program("prometheus"),
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{self.port}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, name="test-prometheus", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        self._lines.extend(self._process.stderr)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an instant query; none while it does not answer."""
        assert self._process.poll() is None, "".join(self._lines)
        url = f"http://127.0.0.1:{self.port}/api/v1/query?" + urllib.parse.urlencode({"query": expression})
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                found = json.load(answer)["data"]["result"]
        except OSError:
            return []
        assert isinstance(found, list)
        return found

    def __enter__(self) -> PrometheusProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait(10)
        self._reader.join(5)
        assert self._process.stderr is not None
        self._process.stderr.close()


def names_in_rules() -> set[str]:
    """The metrics that the rules ask for."""
    text = re.sub(r"#.*|(summary|description|record|alert):.*", "", RULES.read_text(encoding="utf-8"))
    return set(re.findall(r"\bedge_\w+", text))


@pytest.mark.full
def test_prometheus_scrapes_a_daemon_with_the_example(folder: Path, tmp_path: Path) -> None:
    port = free_port()
    config = folder / "prometheus.yml"
    text = config.read_text(encoding="utf-8")
    config.write_text(text.replace("15s", "200ms"), encoding="utf-8")
    devices = (folder / "devices.yml").read_text(encoding="utf-8")
    assert "192.0.2.7:8080" in devices
    (folder / "devices.yml").write_text(devices.replace("192.0.2.7:8080", f"127.0.0.1:{port}"), encoding="utf-8")
    broker = Mosquitto(tmp_path / "broker")
    try:
        run = write_config(
            tmp_path,
            camera='name = "gate"\nurl = "synthetic:"\nfps = 10',
            mqtt=f'host = "127.0.0.1"\nport = {broker.port}',
            more=f'[web]\nlisten = "127.0.0.1:{port}"\ntoken_file = "{folder / "edge-runtime.token"}"\n'
            "[budget]\npower_w = 15.0\n",
        )
        with DaemonProcess(run) as daemon, PrometheusProcess(folder) as prometheus:
            daemon.wait_for("window 0:")
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/metrics", headers={"Authorization": f"Bearer {TOKEN}"}
            )
            with urllib.request.urlopen(request, timeout=10) as answer:
                metrics = answer.read()
            promtool("check", "metrics", stdin=metrics)
            exported = set(re.findall(r"^(edge_\w+?)(?:\{| )", metrics.decode(), re.MULTILINE))
            assert names_in_rules() <= exported
            wait_until(
                lambda: (
                    [each["value"][1] for each in prometheus.query('up{job="edge-runtime",device="gate-07"}')] == ["1"]
                ),
                15,
                "a scrape",
            )
            wait_until(lambda: prometheus.query("edge:fps_per_watt:ratio_rate5m"), 15, "a recorded rule")
            (state,) = prometheus.query('edge_camera_state{state="up"}')
            assert state["metric"]["camera"] == "gate"
            assert not prometheus.query('ALERTS{alertstate="firing"}')
    finally:
        broker.stop()


# --- Telegraf


def a_window(*, poor: bool = False) -> dict[str, Any]:
    """A real window; `poor`: with everything null that can be."""
    device = Device()
    device.operating = Operating(Budget(power_w=15.0))
    builder = device.builder()
    device.next_cut = a_cut()
    device.effort = CameraEffort(decode_cpu_ns=S, opened=1, backend="pyav")
    if poor:
        device.power, device.heat = Unavailable("no sensor"), Unavailable("no sensor")
    device.clock.now_ns += 10 * S
    window: dict[str, Any] = json.loads(builder.build().to_json())
    return window | ({"governor": None, "budget": None, "operating_point": None} if poor else {})


def an_event() -> dict[str, Any]:
    event = Event(
        device="gate-07", boot="b", session="s", seq=3, clock_synced=True, kind="camera", severity="warning",
        message="camera gate is down", t_utc="2026-11-30T12:00:00.000Z", uptime_s=1.0, data={},
    )  # fmt: skip
    found: dict[str, Any] = json.loads(event.to_json())
    return found


def flat(value: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """As the json_v2 parser names what is nested; arrays are left as they are."""
    found: dict[str, Any] = {}
    for key, each in value.items():
        found |= flat(each, f"{before}{key}_") if isinstance(each, dict) else {before + key: each}
    return found


def at(message: Any, path: str) -> Any:
    """What a path names; KeyError where it is not there."""
    for key in path.split("."):
        if not isinstance(message, dict):
            raise KeyError(path)
        message = message[key]
    return message


TYPES: Mapping[str | None, type | tuple[type, ...]] = {
    None: str, "int": int, "float": (int, float), "bool": bool
}  # fmt: skip


def check_field(field: Mapping[str, Any], message: Mapping[str, Any], *, poor: bool) -> None:
    try:
        value = at(message, field["path"])
    except KeyError:
        assert poor, field
        assert field.get("optional"), field
        return
    assert poor or value is not None, field
    assert value is None or isinstance(value, TYPES[field.get("type")]), field


def check_object(table: Mapping[str, Any], message: Mapping[str, Any]) -> None:
    (one,) = at(message, table["path"])
    values = flat(one)
    assert {*table["tags"], *table["included_keys"]} <= set(values)
    assert all(isinstance(values[key], str) for key in table["tags"])
    assert set(table["fields"]) <= set(table["included_keys"])
    assert {key for key, kind in table["fields"].items() if kind == "int"} == {
        key for key in table["included_keys"] if isinstance(values[key], int)
    }
    assert set(table["renames"]) <= set(table["tags"])


@pytest.mark.parametrize("poor", [False, True])
def test_every_path_for_telegraf_is_in_a_real_message(*, poor: bool) -> None:
    topics = Topics("+")
    messages = {topics.window: a_window(poor=poor), topics.event("+"): an_event()}
    conf = tomllib.loads((DEPLOY / "telegraf" / "edge-runtime.conf").read_text(encoding="utf-8"))
    inputs = conf["inputs"]["mqtt_consumer"]
    assert len({each["client_id"] for each in inputs}) == len(inputs) == 3
    names = []
    for each in inputs:
        assert (each["qos"], each["persistent_session"], each["data_format"]) == (1, True, "json_v2")
        (topic,) = each["topics"]
        message = messages[topic]
        for number, table in enumerate(each["json_v2"]):
            names.append(table["measurement_name"])
            stamp = at(message, table["timestamp_path"])
            assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", stamp)  # the layout of Go
            assert table["timestamp_format"] == "2006-01-02T15:04:05Z07:00"
            assert all(isinstance(at(message, tag["path"]), str) for tag in table["tag"])
            called = [field.get("rename", field["path"]) for field in table.get("field", [])]
            assert len(set(called)) == len(called)
            for field in table.get("field", []):
                check_field(field, message, poor=poor)
            for found in table.get("object", []):
                assert number == 0, "Telegraf multiplies objects with the points of the tables before them"
                check_object(found, message)
    assert names == ["edge_camera", "edge_window", "edge_model", "edge_event"]
