"""What the documents say holds: commands exist, configurations load and run, examples and schemas fit the code."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pkgutil
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from importlib import import_module
from importlib.machinery import SourceFileLoader
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, get_args

import jsonschema
import pytest
from pydantic import JsonValue

from edge_runtime import records
from edge_runtime.app.identity import make_identity
from edge_runtime.cli.control import request
from edge_runtime.cli.main import build_parser
from edge_runtime.clock import SystemClock
from edge_runtime.config import DEFAULT_CONFIG, Config, check_camera, load_config, parse_config
from edge_runtime.config_rules import NOT_YET
from edge_runtime.control.commands import CommandSpec, camera, ping, reload, set_budget, variant
from edge_runtime.control.dispatcher import Dispatcher
from edge_runtime.records.commands import (
    CameraAction,
    CameraResult,
    ReloadArgs,
    ReloadResult,
    SetBudgetArgs,
    VariantArgs,
)
from edge_runtime.records.events import EventKind
from edge_runtime.records.governing import Budget
from edge_runtime.records.messages import Presence
from edge_runtime.records.window import FrameCounts, Payload, Stamped, WindowReport
from tests.e2e.daemon import DaemonProcess
from tests.mosquitto import Subscriber

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
OPERATIONS = DOCS / "operations.md"
BROKER = DOCS / "mqtt.md"
GENERATOR = ROOT / "scripts" / "generate-docs"
PAGES = [README, *sorted(DOCS.glob("*.md")), *sorted((DOCS / "adr").glob("*.md")), ROOT / "CHANGELOG.md"]
WHERE = "edge/v1/gate-07"


class Block(NamedTuple):
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}-{self.line}"


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, match.start()) + 1, match[1], match[2])
        for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]


def prose_of(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```\w*\n.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
TOML = [block for block in BLOCKS if block.language == "toml"]
README_CONFIG = next(block for block in TOML if block.page == README)
README_REPORT = next(block for block in BLOCKS if block.page == README and block.language == "json")
SHELL_LINES = [
    (str(block), line) for block in BLOCKS if block.language == "sh" for line in block.text.splitlines() if line.strip()
]
OURS = re.compile(r"(?:\S*/)?(edge-runtime|scripts/[\w-]+)(?:\s|$)")
OTHERS = ("python3", "pip", "mosquitto_sub", "mosquitto_pub", "mosquitto_rr", "curl", "systemctl", "systemd-sysusers",
          "systemd-tmpfiles", "journalctl", "install", "tar", "apt-get", "env", "usermod", "docker")  # fmt: skip
SPANS = [
    (page.name, " ".join(span.split()))
    for page in PAGES
    for span in re.findall(r"`([^`]+)`", prose_of(page))
    if OURS.match(span)
]


# ---- commands


def options_of(arguments: list[str]) -> tuple[argparse.ArgumentParser, list[str]]:
    """The parser of the (sub-)command that `arguments` name, and what is left of them."""
    parser, rest = build_parser(), list(arguments)
    while rest and not rest[0].startswith("-"):
        choices: Any = next((action.choices for action in parser._actions if action.choices), None)
        if not isinstance(choices, dict):
            break
        assert rest[0] in choices, f"there is no command {rest[0]!r}; there is {', '.join(choices)}"
        parser = choices[rest.pop(0)]
    return parser, rest


def check_command(words: list[str]) -> None:
    """The script is there and can be run; the command and its options exist."""
    program, *rest = words
    if "scripts/" in program:
        script = ROOT / "scripts" / program.rpartition("/")[2]
        assert script.is_file(), f"there is no {script.name} in scripts/"
        assert os.access(script, os.X_OK), f"scripts/{script.name} is not executable"
        if script.name != "demo":
            return
        rest = ["demo", *rest]
    parser, rest = options_of(rest)
    for word in rest:
        if word.startswith("-"):
            assert word.partition("=")[0] in parser._option_string_actions, f"{parser.prog} has no option {word}"


@pytest.mark.parametrize(("page", "span"), sorted(set(SPANS)))
def test_commands_in_prose_exist(page: str, span: str) -> None:
    check_command(span.split())


@pytest.mark.parametrize(("place", "line"), SHELL_LINES)
def test_command_lines_can_be_typed(place: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(line, comments=True)
    if words[0] == "sudo":
        words = words[1:]
    if not OURS.match(words[0]):
        assert Path(words[0]).name in OTHERS or words[0] == ".", f"{place}: what is {words[0]}?"
        return
    check_command(words)
    if "scripts/" not in words[0]:
        build_parser().parse_args(words[1:])  # exits, and so fails, where it does not fit


def test_the_readme_shows_both_commands_and_says_what_is_missing() -> None:
    lines = {line for place, line in SHELL_LINES if place.startswith("README")}
    assert {"scripts/demo", "scripts/test"} <= lines
    missing = README.read_text(encoding="utf-8").partition("## What this version does not do")[2]
    for word in (
        "TensorRT", "governor", "V4L2", "CSI", "[update]", "[budget]", "Jetson", "Simulated", "status page",
        "previews", "reload", "No watt", "golden pictures",
    ):  # fmt: skip
        assert word in missing, f"the README does not say what holds for {word}"


def test_only_missing_commands_are_called_missing() -> None:
    text = README.read_text(encoding="utf-8")
    missing = re.search(r"the commands (.*?), the rest of", text, re.DOTALL)
    assert missing is not None
    commands = next(action.choices for action in build_parser()._actions if isinstance(action.choices, dict))
    assert not set(re.findall(r"`([\w-]+)`", missing[1])) & set(commands)


# ---- configurations


def whole(text: str) -> str:
    """A fragment with what it lacks of a configuration."""
    if "[[camera]]" not in text:
        text += '\n[[camera]]\nname = "gate"\nurl = "bundled:vtest"\n'
    if "[[model]]" not in text:
        text += '\n[[model]]\nname = "detector"\nbundle = "bundled:centernet"\n'
    return text


@pytest.mark.parametrize("block", TOML, ids=str)
def test_configurations_are_valid(block: Block, tmp_path: Path) -> None:
    assert isinstance(parse_config(whole(block.text), str(block), tmp_path), Config)


def test_check_config_accepts_the_readmes_configuration_and_says_what_the_readme_says(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(README_CONFIG.text, encoding="utf-8")
    assert load_config(tmp_path / "config.toml").device.store == tmp_path / "store"
    done = subprocess.run(
        [sys.executable, "-m", "edge_runtime", "check-config", "config.toml"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert f"`{done.stdout.strip()}`" in README.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[bytes]]:
    """What the README's configuration publishes when it is run, by topic; only the port is another one."""
    folder = tmp_path_factory.mktemp("readme")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
    assert "port = 1883" in README_CONFIG.text
    config = folder / "config.toml"
    config.write_text(README_CONFIG.text.replace("port = 1883", f"port = {port}"), encoding="utf-8")
    socket_path = folder / "store" / "control.sock"
    with DaemonProcess(config) as daemon:
        daemon.wait_for("is running")
        with Subscriber(("127.0.0.1", port), f"{WHERE}/#") as subscriber:
            subscriber.wait_for(lambda _: len(subscriber.payloads(f"{WHERE}/telemetry/window")) >= 1, 30)
            asked = {
                "status": request(socket_path, "GET", "/api/status"),
                "windows": request(socket_path, "GET", "/api/windows?last=1"),
                "health": request(socket_path, "GET", "/healthz"),
                "metrics": request(socket_path, "GET", "/metrics"),
                "error": request(socket_path, "GET", "/api/nothing"),
                "reply": request(socket_path, "POST", "/api/command/camera", CAP.encode()),
                "table": told_by_status(config),
            }
            subscriber.wait_for(lambda _: subscriber.payloads(f"{WHERE}/event/command"), 10, "the command's event")
            seen = subscriber.seen()
        assert daemon.stop()[0] == 0, daemon.log
    topics = {
        "window": "telemetry/window",
        "presence": "presence",
        "result": "results/gate",
        "reported": "reported",
        "event": "event/command",
    }
    found = {
        name: [each.payload for each in seen if each.topic == f"{WHERE}/{topic}"] for name, topic in topics.items()
    }
    return {
        **found,
        **{name: [body] for name, (_, body) in asked.items()},
        "topics": [each.topic.encode() for each in seen],
    }


CAP = '{"args": {"name": "gate", "action": "cap", "fps": 5}}'


def told_by_status(config: Path) -> tuple[int, bytes]:
    done = subprocess.run(
        [sys.executable, "-m", "edge_runtime", "status", "-c", str(config)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=True,
    )
    return done.returncode, done.stdout


# ---- examples and schemas


def schema(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((DOCS / "schemas" / f"{name}.schema.json").read_text(encoding="utf-8"))
    return loaded


SCHEMAS = sorted(path.name.removesuffix(".schema.json") for path in (DOCS / "schemas").glob("*.json"))


def load_generator() -> ModuleType:
    loader = SourceFileLoader("generate_docs", str(GENERATOR))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    write_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    path = list(sys.path)
    try:
        loader.exec_module(module)
    finally:
        sys.dont_write_bytecode, sys.path[:] = write_bytecode, path
    return module


SAID = ["error", "event", "health", "presence", "reply", "reported", "result", "status", "window", "windows"]


@pytest.mark.parametrize("name", SAID)
def test_what_is_really_published_fits_its_schema(published: dict[str, list[bytes]], name: str) -> None:
    validator = jsonschema.Draft202012Validator(schema(name))
    assert published[name]
    for payload in published[name]:
        validator.validate(json.loads(payload))


def test_a_schema_refuses_what_does_not_belong(published: dict[str, list[bytes]]) -> None:
    validator = jsonschema.Draft202012Validator(schema("window"))
    report = json.loads(published["window"][0])
    assert validator.is_valid(report)
    assert not validator.is_valid({**report, "more": 1})
    assert not validator.is_valid({**report, "frames": {**report["frames"], "lost": 1}})
    assert not validator.is_valid({key: value for key, value in report.items() if key != "fps_per_watt"})
    assert not validator.is_valid({**report, "schema": "edge.window/2"})


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_are_sound_and_closed(name: str) -> None:
    document = schema(name)
    jsonschema.Draft202012Validator.check_schema(document)
    for part in [document, *document.get("$defs", {}).values()]:
        assert part["type"] == "object"
        assert part["additionalProperties"] is False, f"{part['title']} is open"


def test_every_message_has_a_schema() -> None:
    for module in pkgutil.iter_modules(records.__path__, "edge_runtime.records."):
        import_module(module.name)

    def all_of(base: type[Payload]) -> set[type[Payload]]:
        return {base, *(each for child in base.__subclasses__() for each in all_of(child))}

    payloads = {each for each in all_of(Payload) if each.__module__.startswith("edge_runtime.")} - {Payload, Stamped}
    parts = {name for each in payloads for name in each.model_json_schema().get("$defs", {})}
    # what is no part of another is a message; a part may be one too, and then says which schema or message it is
    alone = {each for each in payloads if each.__name__ not in parts}
    also = {each for each in payloads if "schema_" in each.model_fields or issubclass(each, Stamped)}
    assert alone | also == set(load_generator().PAYLOADS.values())


def test_what_we_say_has_every_field_and_what_is_said_to_us_need_not() -> None:
    for name in SCHEMAS:
        document = schema(name)
        for part in [document, *document.get("$defs", {}).values()]:
            required, there = set(part.get("required", [])), set(part.get("properties", {}))
            assert name.startswith("command") or required == there, f"{name}: {there - required}"
    assert "required" not in schema("command")


# ---- commands, as the pages write them


class Noted:
    """Cameras that take note of what is done to them."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, str, float | None]] = []

    def pause(self, name: str) -> CameraResult:
        return self._note("pause", name)

    def resume(self, name: str) -> CameraResult:
        return self._note("resume", name)

    def cap(self, name: str, fps: float | None) -> CameraResult:
        return self._note("cap", name, fps)

    def add(self, table: Mapping[str, JsonValue]) -> CameraResult:
        return self._note("add", check_camera(table, ["detector"]).name)

    def change(self, name: str, keys: Mapping[str, JsonValue]) -> CameraResult:
        check_camera({"name": name, "url": "rtsp://10.0.0.9/stream", **keys}, ["detector"])
        return self._note("change", name)

    def remove(self, name: str) -> CameraResult:
        return self._note("remove", name)

    def reset(self, name: str | None) -> CameraResult:
        return self._note("reset", name or "")

    def _note(self, action: CameraAction, name: str, fps: float | None = None) -> CameraResult:
        self.notes.append((action, name, fps))
        return CameraResult(name=name, action=action, fps=fps, done=[], persisted=True, notes=[])


class Obedient:
    """Models that do what they are told at once."""

    def reload(self, args: ReloadArgs) -> ReloadResult:
        return outcome(args.model, args.variant)

    def switch(self, args: VariantArgs) -> ReloadResult:
        return outcome(args.model, args.variant)


class Willing:
    """A budget that is what it is told to be."""

    def set(self, args: SetBudgetArgs) -> Budget:
        return Budget(args.power_w, args.temperature_c, args.latency_p99_ms)


def outcome(model: str, variant: str) -> ReloadResult:
    return ReloadResult(
        model=model, engine="sha256:e", bundle="sha256:b", variant=variant, backend="onnxruntime", source="reload",
        changed=True, previous=None, took_s=1.0, proof=None, exchange_ms=0.1, gap_ms=None, lost={}, judged=20,
        pause_ms=None, persisted=True, notes=[],
    )  # fmt: skip


SOON = "@SOON@"
"""Stands for a moment a minute ahead, filled in when the test runs and not when it is collected."""


def command_of(line: str) -> tuple[str, str, str] | None:
    """The door, name and body of a command that a line of shell sends; None for another line."""
    words = shlex.split(line)
    for door, place, option in (("mqtt", "/cmd/", "-m"), ("socket", "/api/command/", "-d")):
        name = next((word.rpartition(place)[2] for word in words if place in word), None)
        if name is not None:
            body = words[words.index(option) + 1]
            return door, name, re.sub(r"\$\(date [^)]*\)", SOON, body)
    return None


COMMANDS = [(place, sent) for place, line in SHELL_LINES if (sent := command_of(line)) is not None]


def filled_in(sent: tuple[str, str, str]) -> tuple[str, str, str]:
    soon = datetime.now(timezone.utc) + timedelta(minutes=1)
    return sent[0], sent[1], sent[2].replace(SOON, soon.strftime("%Y-%m-%dT%H:%M:%SZ"))


def obey(sent: tuple[str, str, str]) -> tuple[dict[str, Any], Noted]:
    door, name, body = filled_in(sent)
    cameras = Noted()
    identity, clock = make_identity("gate-07"), SystemClock()
    models = Obedient()
    commands: dict[str, CommandSpec[Any]] = {
        "ping": ping(identity, clock),
        "camera": camera(cameras),
        "reload": reload(models),
        "variant": variant(models),
        "set-budget": set_budget(Willing()),
    }
    dispatcher = Dispatcher(identity, clock, lambda: True, commands)
    reply = dispatcher.handle(name, body.encode(), door="mqtt" if door == "mqtt" else "socket")
    assert reply is not None
    return json.loads(reply.to_json()), cameras


@pytest.mark.parametrize(("place", "sent"), COMMANDS)
def test_commands_of_the_pages_are_obeyed(place: str, sent: tuple[str, str, str]) -> None:
    jsonschema.Draft202012Validator(schema("command")).validate(json.loads(filled_in(sent)[2]))
    reply, _ = obey(sent)
    jsonschema.Draft202012Validator(schema("reply")).validate(reply)
    assert reply["ok"], f"{place}: {reply['error']}"


def test_every_command_is_shown_through_both_doors() -> None:
    shown = {(door, name) for _, (door, name, _) in COMMANDS}
    names = ("ping", "camera", "reload", "variant", "set-budget")
    assert shown >= {(door, name) for door in ("mqtt", "socket") for name in names}


KINDS = {"kind": "event", "ok": "reply", "expires_utc": "command", "retryable": "error", "status": "health"}
"""A key that tells which message an example is, and the schema of that."""


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.language == "json" and block is not README_REPORT], ids=str
)
def test_json_examples_fit_their_schemas(block: Block) -> None:
    document = json.loads(block.text)
    name = next((name for key, name in KINDS.items() if key in document), None)
    assert name is not None, f"{block}: what is this?"
    jsonschema.Draft202012Validator(schema(name)).validate(document)
    if "exchange_ms" in (document.get("result") or {}):
        jsonschema.Draft202012Validator(schema("reload-result")).validate(document["result"])


def test_the_operators_find_every_metric_and_no_other(published: dict[str, list[bytes]]) -> None:
    there = set(re.findall(r"^# TYPE (edge_\w+)", published["metrics"][0].decode(), re.MULTILINE))
    assert set(re.findall(r"`(edge_\w+)", OPERATIONS.read_text(encoding="utf-8"))) == there


def test_the_operators_find_every_kind_of_event() -> None:
    text = BROKER.read_text(encoding="utf-8")
    for kind in get_args(EventKind):
        assert f"`event/{kind}`" in text


@pytest.mark.parametrize("page", [README, BROKER], ids=lambda page: page.name)
def test_every_topic_is_in_the_tables(published: dict[str, list[bytes]], page: Path) -> None:
    listed = [
        re.compile(f"{WHERE}/" + re.sub(r"{\w+}", "[^/]+", topic))
        for topic in re.findall(r"^\| `([a-z/{}-]+)` \| [01], ", page.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert len(listed) == 8
    for topic in {topic.decode() for topic in published["topics"]}:
        assert any(each.fullmatch(topic) for each in listed), f"{page.name} does not list {topic}"


def test_status_prints_what_the_readme_shows(published: dict[str, list[bytes]]) -> None:
    shown = next(block.text for block in blocks_of(README) if "CAMERA  MODEL" in block.text)

    def shape(text: str) -> list[str]:
        """The words without the numbers, which are another machine's, and without what was on its way just then."""
        lines = (re.sub(r"[\d.]+", "0", " ".join(line.split())) for line in text.splitlines())
        return [line.replace(", 0 queued", "") for line in lines]

    # it was asked after the page's own commands, which the page shows below
    capped = "by commands changed: gate (see edge-runtime camera)"
    unsynced = "clock not synchronised: commands over MQTT are refused"  # whatever the clock is here
    assert shape(shown) == [line for line in shape(published["table"][0].decode()) if line not in (capped, unsynced)]


def test_the_readmes_report_is_a_report() -> None:
    document = json.loads(README_REPORT.text)
    jsonschema.Draft202012Validator(schema("window")).validate(document)
    report = WindowReport.model_validate_json(README_REPORT.text)

    def balanced(frames: FrameCounts) -> bool:
        ended = frames.completed + frames.cached + frames.stale + sum(frames.dropped.values()) + frames.failed
        return frames.carried_in + frames.captured == ended + frames.in_flight

    counts = [report.frames, *(camera.frames for camera in report.cameras), *(model.frames for model in report.models)]
    assert all(balanced(frames) for frames in counts)
    assert sum(count for _, count in report.latency_ms.buckets) == report.frames.completed
    assert report.energy is not None
    assert report.fps_per_watt == pytest.approx(report.frames.completed / report.energy.joules, rel=1e-3)
    config = parse_config(README_CONFIG.text, "README.md", ROOT)
    assert report.device == config.device.id
    assert report.duration_s == pytest.approx(config.telemetry.window_s, rel=0.01)


def test_an_offline_presence_fits_its_schema() -> None:
    offline = Presence(
        online=False, device="gate-07", boot="b", session="s", version="0", seq=0, clock_synced=False, t_utc=None
    )
    jsonschema.Draft202012Validator(schema("presence")).validate(json.loads(offline.to_json()))


# ---- generated files


def generate(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(GENERATOR), *map(str, arguments)], capture_output=True, text=True, check=False
    )


def test_generated_documents_are_up_to_date() -> None:
    done = generate("--check")
    assert done.returncode == 0, done.stderr


def test_the_generator_notices_and_repairs_what_is_out_of_date(tmp_path: Path) -> None:
    assert generate("--to", tmp_path).returncode == 0
    assert generate("--check", "--to", tmp_path).returncode == 0
    (tmp_path / "configuration.md").write_text("by hand", encoding="utf-8")
    (tmp_path / "schemas" / "stray.schema.json").write_text("{}", encoding="utf-8")
    (tmp_path / "schemas" / "window.schema.json").unlink()
    found = generate("--check", "--to", tmp_path)
    assert found.returncode == 1
    for name in ("configuration.md", "stray.schema.json", "window.schema.json"):
        assert name in found.stderr
    assert generate("--to", tmp_path).returncode == 0
    assert generate("--check", "--to", tmp_path).returncode == 0


def test_the_configuration_reference_has_every_key_and_what_is_not_built() -> None:
    text = (DOCS / "configuration.md").read_text(encoding="utf-8")
    assert DEFAULT_CONFIG.read_text(encoding="utf-8") in text
    for what in NOT_YET.values():
        assert what in text


# ---- pages


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose_of(page)):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        found = (page.parent / name).resolve() if name else page
        assert found.exists(), f"{page.name}: {target}"
        assert found.is_relative_to(ROOT), f"{page.name}: {target} leaves the repository"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", prose_of(found), re.MULTILINE)
            assert anchor in map(slug, headings), f"{page.name}: {target}"


@pytest.mark.parametrize("page", [README, *sorted(DOCS.glob("*.md"))], ids=lambda page: page.name)
def test_pages_name_no_machine(page: Path) -> None:
    assert not re.search(r"/(work|home|root|tmp)/|[/\\]Users[/\\]", page.read_text(encoding="utf-8"))


def test_the_architecture_names_every_room() -> None:
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    rooms = [path.name for path in (ROOT / "edge_runtime").iterdir() if (path / "__init__.py").is_file()]
    modules = [path.name for path in (ROOT / "edge_runtime").glob("*.py") if not path.name.startswith("__")]
    missing = [name for name in rooms if f"`{name}/`" not in text] + [
        name for name in modules if f"`{name}`" not in text
    ]
    assert not missing


def test_the_changelog_has_a_place_for_what_is_new() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## \[(.+?)\]", text, re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert all(before != after for before, after in pairwise(headings))
