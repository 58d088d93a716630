"""What the endpoints answer, over real sockets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from prometheus_client.parser import text_string_to_metric_families

from edge_runtime.errors import UsageError
from edge_runtime.records.status import ErrorReport, Health, HealthReport, StatusReport, WindowList
from edge_runtime.web.server import WebServer
from tests.awaiting import wait_until
from tests.web.doors import FakeDoor, Gate, ask, dial, say

Address = tuple[str, int]
JSON = "application/json"


def assert_error(answer: Any, status: int, code: str) -> None:
    assert answer.status == status
    jsonschema.validate(answer.json(), ErrorReport.model_json_schema())
    assert answer.json()["code"] == code


@pytest.mark.parametrize(
    ("health", "status"),
    [
        (Health(state="ok", reasons=[]), 200),
        (Health(state="degraded", reasons=["camera yard is down"]), 200),
        (Health(state="wedged", reasons=["lane detector hangs for 12 s"]), 503),
    ],
)
def test_healthz_says_what_the_daemon_says(
    server: WebServer, control: Path, tcp: Address, door: FakeDoor, health: Health, status: int
) -> None:
    door.current = health
    for where in (control, tcp):
        answer = ask(where, "/healthz")
        assert answer.status == status
        assert answer.json() == {"status": health.state, "reasons": health.reasons}


def test_a_daemon_whose_health_hangs_is_wedged(
    server: WebServer, control: Path, door: FakeDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_runtime.web.api.HEALTH_S", 0.1)
    gate = Gate()
    door.before_health = gate
    try:
        for _ in range(3):  # however often: it costs one thread
            answer = ask(control, "/healthz")
            assert (answer.status, answer.json()["status"]) == (503, "wedged")
            assert gate.waiting == 1
    finally:
        gate.open()
    wait_until(lambda: ask(control, "/healthz").status == 200)


def test_health_answers_while_snapshots_hang(
    server: WebServer, control: Path, door: FakeDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_runtime.web.api.READ_S", 0.2)
    gate = Gate()
    door.before_snapshot = gate
    try:
        for _ in range(4):
            assert_error(ask(control, "/api/status"), 503, "busy")
        assert gate.waiting <= 2
        assert ask(control, "/healthz").status == 200
        assert ask(control, "/api/command/ping", "POST", b"{}").status == 200
    finally:
        gate.open()


def test_status_is_the_snapshot(server: WebServer, control: Path, tcp: Address, door: FakeDoor) -> None:
    for where in (control, tcp):
        answer = ask(where, "/api/status")
        assert answer.status == 200
        assert answer.json() == json.loads(door.snapshot().to_json())
        jsonschema.validate(answer.json(), StatusReport.model_json_schema())


def test_windows(server: WebServer, control: Path, door: FakeDoor) -> None:
    answer = ask(control, "/api/windows?last=3")
    jsonschema.validate(answer.json(), WindowList.model_json_schema())
    assert [each["seq"] for each in answer.json()["windows"]] == [397, 398, 399]
    assert len(ask(control, "/api/windows").json()["windows"]) == 60
    assert len(ask(control, "/api/windows?last=360").json()["windows"]) == 360
    door.count = 2
    assert len(ask(control, "/api/windows?last=360").json()["windows"]) == 2


@pytest.mark.parametrize(
    "query", ["last=0", "last=361", "last=-1", "last=", "last=1.5", "last=%D9%A3", "last=1&last=2", "x=1", "last"]
)
def test_a_wrong_query_is_refused(server: WebServer, control: Path, query: str) -> None:
    assert_error(ask(control, f"/api/windows?{query}"), 400, "bad_request")


def test_a_command_reaches_the_daemon_and_its_reply_comes_back(
    server: WebServer, control: Path, door: FakeDoor
) -> None:
    answer = ask(control, "/api/command/set-budget", "POST", b'{"id": "1"}')
    assert (answer.status, answer.json()["ok"]) == (200, True)
    assert door.executed == [("set-budget", b'{"id": "1"}', "socket")]


@pytest.mark.parametrize("name", ["Ping", "a" * 33, "9", "a.b", "..%2f..%2fetc", "a%00"])
def test_a_command_that_is_no_name_is_not_there(server: WebServer, control: Path, door: FakeDoor, name: str) -> None:
    assert_error(ask(control, f"/api/command/{name}", "POST", b"{}"), 404, "not_found")
    assert door.executed == []


def test_too_many_commands_at_a_time_are_refused(server: WebServer, control: Path, door: FakeDoor) -> None:
    gate = Gate()
    door.before_execute = gate
    waiting = []
    try:
        for _ in range(4):
            sock = dial(control)
            sock.sendall(b"POST /api/command/reload HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}")
            waiting.append(sock)
        wait_until(lambda: gate.waiting == 4)
        assert_error(ask(control, "/api/command/reload", "POST", b"{}"), 503, "busy")
        assert ask(control, "/api/status").status == 200
    finally:
        gate.open()
    for sock in waiting:
        with sock:
            assert sock.recv(1000).startswith(b"HTTP/1.1 200 ")


def test_what_goes_wrong_in_the_daemon_is_an_error_object(
    server: WebServer, control: Path, door: FakeDoor, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise UsageError("nonsense", code="nonsense", where="here", remedy="don't")

    def break_() -> None:
        raise ValueError("secret: hunter2")

    door.before_execute = fail
    assert_error(ask(control, "/api/command/ping", "POST", b"{}"), 500, "nonsense")
    door.before_snapshot = break_
    answer = ask(control, "/api/status")
    assert_error(answer, 500, "internal")
    assert b"hunter2" not in answer.body
    assert "hunter2" in caplog.text


@pytest.mark.parametrize(
    "path", ["/", "/healthz/", "/api", "/api/command/", "/docs", "/%2e%2e/etc/passwd", "//healthz"]
)
def test_what_is_not_there(server: WebServer, control: Path, path: str) -> None:
    assert_error(ask(control, path), 404, "not_found")


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/healthz"), ("DELETE", "/api/status"), ("GET", "/api/command/ping"), ("OPTIONS", "/api/status")],
)
def test_another_method_is_refused(server: WebServer, control: Path, method: str, path: str) -> None:
    answer = ask(control, path, method)
    assert_error(answer, 405, "method_not_allowed")
    assert answer.headers["allow"]


def test_head_has_no_body(server: WebServer, control: Path) -> None:
    answer = ask(control, "/healthz", "HEAD")
    assert (answer.status, answer.body) == (200, b"")


def test_every_answer_has_the_safe_headers(server: WebServer, control: Path, tcp: Address) -> None:
    for where in (control, tcp):
        for path in ("/healthz", "/metrics", "/api/status", "/nowhere", "/api/windows?last=x"):
            headers = ask(where, path).headers
            assert headers["cache-control"] == "no-store"
            assert headers["x-content-type-options"] == "nosniff"
            assert not [name for name in headers if name.lower().startswith("access-control-")]
            assert "server" not in headers
    refused = say(control, b"what?\r\n\r\n")
    assert refused.startswith(b"HTTP/1.1 400 ")
    assert b"nosniff" in refused


def scrape(where: Path) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    answer = ask(where, "/metrics?collect[]=x")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = list(text_string_to_metric_families(answer.body.decode()))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    samples = [sample for family in families for sample in family.samples]
    found = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}
    assert len(found) == len(samples)  # none twice
    return found


def test_metrics_parse_back(server: WebServer, control: Path, door: FakeDoor) -> None:
    found = scrape(control)

    def value(name: str, **labels: str) -> float:
        return found[name, frozenset(labels.items())]

    gate = {"camera": "gate", "model": "detector"}
    assert value("edge_frames_total", **gate, outcome="completed") == 100
    assert value("edge_frames_total", **gate, outcome="dropped") == 2
    assert value("edge_frames_dropped_total", **gate, reason="stopping") == 2
    assert value("edge_frames_captured_total", **gate) == 113
    assert value("edge_fps", **gate) == 14.8
    assert value("edge_latency_seconds_bucket", **gate, le="0.005") == 1
    assert value("edge_latency_seconds_bucket", **gate, le="0.01") == 98
    assert value("edge_latency_seconds_bucket", **gate, le="+Inf") == 100
    assert value("edge_latency_seconds_count", **gate) == 100
    assert value("edge_latency_seconds_sum", **gate) == pytest.approx(0.9)
    assert value("edge_power_watts", source="simulated") == 12.5
    assert value("edge_energy_joules_total", source="simulated") == 10150
    assert value("edge_temperature_celsius", zone="tj") == 61.5
    assert value("edge_camera_state", camera="yard", model="detector", state="down") == 1
    assert value("edge_camera_state", camera="yard", model="detector", state="up") == 0
    assert value("edge_camera_state_seconds", camera="yard", model="detector") == 3700
    assert value("edge_camera_source_total", camera="gate", reason="decoded") == 120
    assert value("edge_camera_source_total", camera="gate", reason="skipped_codec") == 30
    assert value("edge_camera_opens_total", camera="gate") == 3
    assert value("edge_camera_decode_cpu_seconds_total", camera="gate") == 4.5
    assert value("edge_camera_decode_saved_cpu_seconds_total", camera="gate") == 1.25
    assert ("edge_camera_opens_total", frozenset({"camera": "yard"}.items())) not in found
    assert value("edge_mqtt_connected") == 0
    assert value("edge_mqtt_queued") == 3
    assert value("edge_mqtt_results_dropped_total") == 4
    assert value("edge_spool_queued", lane="event") == 2
    assert value("edge_model_up", model="other") == 0
    assert value("edge_cache_lookups_total", model="detector", outcome="hit") == 25
    assert value("edge_cache_lookups_total", model="detector", outcome="miss") == 5
    assert value("edge_cache_bypassed_total", model="detector") == 70
    assert ("edge_cache_bypassed_total", frozenset({"model": "other"}.items())) not in found
    assert value("edge_build_info", version="9.9", device="gate-07", session="session") == 1
    assert value("edge_health_state", state="ok") == 1
    assert (value("edge_budget_watts"), value("edge_budget_latency_seconds")) == (15.0, 0.08)
    assert value("edge_budget_violated_seconds_total") == 2.5
    assert (value("edge_governor_state", state="derating"), value("edge_governor_state", state="off")) == (1, 0)
    assert value("edge_governor_changes_total") == 5
    assert value("edge_camera_fps_limit", camera="gate") == 7.5
    # what is not limited, or not budgeted, has no sample
    assert ("edge_camera_fps_limit", frozenset({"camera": "yard"}.items())) not in found
    assert ("edge_budget_celsius", frozenset()) not in found
    # no window yet, so no rate; and never a 0 in its place
    assert ("edge_fps", frozenset({"camera": "yard", "model": "detector"}.items())) not in found


def test_a_source_counts_once_however_many_models_see_it(control: Path, server: WebServer, door: FakeDoor) -> None:
    before = scrape(control)
    door.two_models = True
    after = scrape(control)
    for name in ("edge_camera_source_total", "edge_camera_opens_total", "edge_camera_decode_cpu_seconds_total"):
        assert {key: value for key, value in after.items() if key[0] == name} == {
            key: value for key, value in before.items() if key[0] == name
        }
    assert after["edge_camera_state_seconds", frozenset({"camera": "gate", "model": "other"}.items())] == 90


def test_counters_only_grow(server: WebServer, control: Path, door: FakeDoor) -> None:
    before = scrape(control)
    door.frames += 50
    after = scrape(control)
    grows = [key for key in before if key[0].endswith(("_total", "_bucket", "_count", "_sum"))]
    assert len(grows) > 10
    assert all(after[key] >= before[key] for key in grows)
    assert sum(after[key] - before[key] for key in grows if key[0] == "edge_frames_total") == 50


def test_metrics_of_a_daemon_without_anything(server: WebServer, control: Path, door: FakeDoor) -> None:
    door.bare = True
    names = {name for name, _ in scrape(control)}
    assert not [name for name in names if name.startswith(("edge_power", "edge_energy", "edge_mqtt", "edge_spool"))]


@pytest.mark.parametrize("payload", [StatusReport, WindowList, HealthReport, ErrorReport])
def test_schemas_are_closed(payload: Any) -> None:
    schema = payload.model_json_schema()
    for each in [schema, *schema.get("$defs", {}).values()]:
        if each.get("type") == "object":
            assert each["additionalProperties"] is False, each["title"]
