"""Configurations: right ones, and wrong ones with the place, the key, the value and what would be right."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.config import (
    DEFAULT_CONFIG,
    Config,
    check_camera,
    config_reference,
    default_device_id,
    load_config,
    parse_config,
)
from edge_runtime.config_rules import NOT_YET
from edge_runtime.errors import EXIT_USAGE, ConfigError, ConfigProblem, EdgeError

BASE = Path("/etc/edge-runtime")

GOOD = """\
[device]
id = "gate-07"

[[camera]]
name = "gate"
url = "bundled:vtest"

[[camera]]
name = "yard"
url = "http://10.0.0.9/stream.mjpg"

[[model]]
name = "detector"
bundle = "bundled:centernet"
"""


def parse(text: str) -> Config:
    return parse_config(text, "c.toml", BASE)


def problems(text: str) -> list[ConfigProblem]:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert caught.value.exit_code == EXIT_USAGE
    return caught.value.problems


def only(text: str) -> ConfigProblem:
    found = problems(text)
    assert len(found) == 1, [str(problem) for problem in found]
    return found[0]


# ---- right ones


def test_the_default_configuration_loads_as_it_stands() -> None:
    config = load_config(DEFAULT_CONFIG)
    assert config.cameras[0].source.kind == "bundled"
    assert config.cameras[0].models == ("detector",)
    assert config.models[0].bundle == "bundled:centernet"
    assert config.mqtt is None


def test_what_the_default_configuration_comments_out_is_valid_too() -> None:
    lines = DEFAULT_CONFIG.read_text().splitlines()
    loud = [
        line.removeprefix("# ") if line.startswith(("# [", "# id", "# model", "# priority")) or " = " in line else line
        for line in lines
        if not line.startswith("# fps")
    ]
    config = parse("\n".join(line for line in loud if "edge-runtime check" not in line))
    assert config.mqtt is not None
    assert config.mqtt.cert_file == BASE / "device.pem"


def test_defaults() -> None:
    config = parse(GOOD)
    camera, model = config.cameras[0], config.models[0]
    assert (camera.fps, camera.min_fps, camera.pace, camera.loop, camera.priority) == (None, None, "realtime", True, 0)
    assert (model.variant, model.backend, model.max_batch, model.lanes) == ("auto",) * 4
    assert (model.batch_timeout_ms, model.timeout_s) == (20.0, 10.0)
    assert (model.cache, model.cache_max_age_s) == ("off", 10.0)
    assert model.letterbox == "auto"
    assert (config.device.hardware, config.device.store) == ("auto", Path("/var/lib/edge-runtime"))
    assert config.telemetry.window_s == 10.0
    assert (config.mqtt, config.web, config.budget, config.update) == (None, None, None, None)
    assert parse(GOOD.replace('[device]\nid = "gate-07"', "")).device.id.startswith("edge-")


def test_mqtt_defaults() -> None:
    mqtt = parse(GOOD + '[mqtt]\nhost = "broker.local"\n').mqtt
    assert mqtt is not None
    assert (mqtt.port, mqtt.protocol, mqtt.results, mqtt.keepalive_s, mqtt.queue) == (1883, "auto", False, 30, 1000)
    assert (mqtt.broker, mqtt.username, mqtt.password_file, mqtt.ca_file) == (None, None, None, None)


def test_relative_paths_count_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "conf"
    folder.mkdir()
    text = GOOD.replace("bundled:vtest", "file:clips/a b.mp4").replace("bundled:centernet", "../engines/centernet")
    text = text.replace("[device]", '[device]\nstore = "state"')
    text += '[mqtt]\nhost = "::1"\nusername = "u"\npassword_file = "secret"\nca_file = "/etc/ca.pem"\n'
    (folder / "c.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    config = load_config(Path("conf/c.toml"))
    assert config.cameras[0].source.location == str(folder / "clips/a b.mp4")
    assert config.models[0].bundle == folder / "../engines/centernet"
    assert config.device.store == folder / "state"
    assert config.mqtt is not None
    assert config.mqtt.password_file == folder / "secret"
    assert config.mqtt.ca_file == Path("/etc/ca.pem")


def test_a_camera_may_name_several_models() -> None:
    text = GOOD.replace('url = "b', 'model = ["faces", "detector"]\nurl = "b').replace(
        'url = "h', 'model = "faces"\nurl = "h'
    )
    config = parse(text + '[[model]]\nname = "faces"\nbundle = "faces"\n')
    assert [camera.models for camera in config.cameras] == [("faces", "detector"), ("faces",)]


def test_digest_is_of_the_text(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_bytes(GOOD.encode())
    assert load_config(path).digest == "sha256:" + hashlib.sha256(GOOD.encode()).hexdigest()
    assert parse(GOOD + "#").digest != parse(GOOD).digest


def test_a_configuration_is_frozen() -> None:
    config = parse(GOOD)
    with pytest.raises(ValueError, match="frozen"):
        setattr(config.device, "id", "other")  # noqa: B010  (the type checker refuses it plainly written)


def test_inline_and_dotted_forms_are_the_same_configuration() -> None:
    text = """\
        device.id = "gate-07"
        camera = [{name = "gate", url = "bundled:vtest"}, {name = "yard", "url" = "http://10.0.0.9/stream.mjpg"}]
        model = [{name = "detector", bundle = "bundled:centernet"}]
        """
    assert parse(dedent(text)).model_dump() == parse(GOOD).model_dump()


@pytest.mark.parametrize(
    ("machine_id", "host", "expected"),
    [
        ("0123456789abcdef0123456789abcdef\n", "h", "edge-0123456789ab"),
        ("uninitialized\n", "gate 7.örtlich", "edge-gate-7.-rtlich"),
        ("", "-.-", "edge-device"),
        (None, "x" * 200, "edge-" + "x" * 48),
    ],
)
def test_default_device_id(tmp_path: Path, machine_id: str | None, host: str, expected: str) -> None:
    path = tmp_path / "machine-id"
    if machine_id is not None:
        path.write_text(machine_id)
    assert default_device_id(path, host) == expected
    parse(GOOD.replace("gate-07", expected))


# ---- wrong ones: (what replaces what in GOOD, or is appended), line, key, part of the message, part of the remedy

CAM1, CAM2, MODEL = 'url = "bundled:vtest"', 'url = "http://10.0.0.9/stream.mjpg"', 'bundle = "bundled:centernet"'
URL2 = '"http://10.0.0.9/stream.mjpg"'
MQTT = '[mqtt]\nhost = "h"\n'

PLANTED: list[tuple[str, str, int | None, str | None, str, str]] = [
    # unknown keys
    (CAM2, f"{CAM2}\nfsp = 3", 11, "camera[2].fsp", "unknown key", "did you mean fps?"),
    (CAM2, f"{CAM2}\nwindow_s = 3", 11, "camera[2].window_s", "unknown key", "belongs below [telemetry]"),
    (CAM2, f"{CAM2}\nzzz = 3", 11, "camera[2].zzz", "unknown key", "known here: name, url"),
    (CAM2, f"{CAM2}\n'odd key' = 3", 11, 'camera[2]."odd key"', "unknown key", "known here"),
    ("[device]", "[devise]", 1, "devise", "unknown key", "did you mean [device]?"),
    ("", "[[cameras]]\nname = 1\n", 15, "cameras", "unknown key", "did you mean [[camera]]?"),
    (MODEL, f"{MODEL}\nmax-batch = 2", 15, "model[1].max-batch", "unknown key", "did you mean max_batch?"),
    ("", MQTT + 'password = "hunter2"\n', 17, "mqtt.password", "unknown key", "did you mean password_file?"),
    # missing
    (CAM2, "", 8, "camera[2].url", "is missing", "add url ="),
    ('name = "yard"', "", 8, "camera[2].name", "is missing", "add name ="),
    (MODEL, "", 12, "model[1].bundle", "is missing", "add bundle ="),
    # kinds of values
    (CAM2, f'{CAM2}\nfps = "fast"', 11, "camera[2].fps", '"fast" is text', "a number above 0"),
    (CAM2, f"{CAM2}\nfps = true", 11, "camera[2].fps", "true is true or false", "a number above 0"),
    (CAM2, f"{CAM2}\nfps = nan", 11, "camera[2].fps", "nan is no finite number", "a number above 0"),
    (CAM2, f"{CAM2}\nfps = 1e999", 11, "camera[2].fps", "inf is no finite number", "a number above 0"),
    (CAM2, f"{CAM2}\nfps = 0x{'f' * 9000}", 11, "camera[2].fps", "a huge number", "a number above 0"),
    (CAM1, f'{CAM1}\nloop = "yes"', 7, "camera[1].loop", '"yes" is text', "true or false"),
    (CAM2, f"{CAM2}\npriority = 1.5", 11, "camera[2].priority", "1.5 is a number", "a whole number"),
    (CAM2, f"{CAM2}\nfps = 2026-01-01", 11, "camera[2].fps", "2026-01-01 is a date", "a number above 0"),
    (CAM2, f"{CAM2}\nfps = [1, 2]", 11, "camera[2].fps", "[1, 2] is a list", "a number above 0"),
    (CAM2, f"{CAM2}\nname2.x = 1", 11, "camera[2].name2", "unknown key", "did you mean name?"),
    (CAM2, "url = 7", 10, "camera[2].url", "7 is not text", "an address"),
    (MODEL, "bundle = 7", 14, "model[1].bundle", "7 is not text", "path of a bundle"),
    ("", MQTT + "protocol = 5\n", 17, "mqtt.protocol", "5 is a number, not text", 'protocol = "5"'),
    ("", "telemetry = 5\n", None, None, "not checked here", ""),
    # ranges
    (CAM2, f"{CAM2}\nfps = 0", 11, "camera[2].fps", "0 is out of range", "above 0"),
    (CAM2, f"{CAM2}\nfps = -2.5", 11, "camera[2].fps", "-2.5 is out of range", "above 0"),
    (MODEL, f"{MODEL}\nmax_batch = 0", 15, "model[1].max_batch", "0 is out of range", "from 1 to 256"),
    (MODEL, f"{MODEL}\nmax_batch = true", 15, "model[1].max_batch", "true is neither", "from 1 to 256"),
    (MODEL, f'{MODEL}\nlanes = "many"', 15, "model[1].lanes", '"many" is neither', "from 1 to 64"),
    (MODEL, f"{MODEL}\ntimeout_s = 0", 15, "model[1].timeout_s", "0 is out of range", "at most 600"),
    (MODEL, f'{MODEL}\ncache = "scenes"', 15, "model[1].cache", '"scenes" is not one', 'mean "scene"?'),
    (MODEL, f'{MODEL}\ncache = "scene"\ncache_max_age_s = 0', 16, "model[1].cache_max_age_s", "0 is out", "3600"),
    (MODEL, f'{MODEL}\ncache = "exact"\ncache_max_age_s = 5', 16, "model[1].cache_max_age_s", "5 has no", "scene"),
    (MODEL, f'{MODEL}\nletterbox = "dla"', 15, "model[1].letterbox", "dla", 'one of "auto", "cpu", "gpu"'),
    (MODEL, f'{MODEL}\nletterbox = "gpu"\ncache = "scene"', 15, "model[1].letterbox", "scaled pictures", "off"),
    (
        MODEL,
        f'{MODEL}\nletterbox = "gpu"\nbackend = "onnxruntime"',
        15,
        "model[1].letterbox",
        "no meaning",
        "another backend",
    ),
    (MODEL, f"{MODEL}\ncache_max_age_s = 5", 15, "model[1].cache_max_age_s", "5 has no meaning", 'cache = "scene"'),
    (MODEL, f"{MODEL}\nbatch_timeout_ms = -1", 15, "model[1].batch_timeout_ms", "-1 is out", "from 0"),
    ("", "[telemetry]\nwindow_s = 0.1\n", 16, "telemetry.window_s", "0.1 is out of range", "from 0.2 to 3600"),
    ("", MQTT + "port = 70000\n", 17, "mqtt.port", "70000 is out of range", "from 1 to 65535"),
    ("", MQTT + "queue = 0\n", 17, "mqtt.queue", "0 is out of range", "from 1 to"),
    # choices
    ('id = "g', 'hardware = "sim:orin-nano"\nid = "g', 2, "device.hardware", '"sim:orin-nano" is', 'n "sim:orin-nano-'),
    (CAM1, f'{CAM1}\npace = "fast"', 7, "camera[1].pace", '"fast" is not one', '"realtime", "max"'),
    (MODEL, f'{MODEL}\nbackend = "onnx"', 15, "model[1].backend", '"onnx" is not one', '"onnxruntime"'),
    ("", '[mqtt]\nbroker = "extern"\n', 16, "mqtt.broker", '"extern" is not one', '"embedded"'),
    # names
    ('"gate"', '"gate 1/x"', 5, "camera[1].name", '"gate 1/x" cannot stand', '"gate-1-x"'),
    ('"gate"', '"gate\\t1"', 5, "camera[1].name", '"gate\\t1" cannot stand', '"gate-1"'),
    ('"gate"', '""', 5, "camera[1].name", '"" cannot stand', "up to 64"),
    ('"gate"', f'"{"g" * 65}"', 5, "camera[1].name", "cannot stand", "up to 64"),
    ('"gate-07"', '"+"', 2, "device.id", '"+" cannot stand', "up to 64"),
    ('"yard"', '"gate"', 9, "camera[2].name", '"gate" is already the name of camera[1]', "own"),
    ("", '[[model]]\nname = "detector"\nbundle = "x"\n', 16, "model[2].name", "name of model[1]", "own"),
    # models of cameras
    (CAM2, f'{CAM2}\nmodel = "detectr"', 11, "camera[2].model", '"detectr" is no', 'mean "detector"?'),
    (CAM2, f'{CAM2}\nmodel = [\n"detector",\n"x"]', 13, "camera[2].model[2]", '"x" is no', 'one of "detector"'),
    (CAM2, f"{CAM2}\nmodel = []", 11, "camera[2].model", "[] names no model", "leave the key out"),
    (CAM2, f'{CAM2}\nmodel = ["detector", "detector"]', 11, "camera[2].model", "twice", "once"),
    # rules over several keys
    (CAM1, f'{CAM1}\npace = "max"\nfps = 5', 8, "camera[1].fps", "5 has no meaning", 'pace = "realtime"'),
    (CAM2, f'{CAM2}\npace = "max"', 11, "camera[2].pace", '"max" has no meaning', "leave it out"),
    (CAM2, f"{CAM2}\nloop = false", 11, "camera[2].loop", "false has no meaning", "leave it out"),
    (CAM1, 'url = "synthetic:"\nloop = true', 7, "camera[1].loop", "this is synthetic", "leave it out"),
    ("", MQTT + 'broker = "embedded"\n', 17, "mqtt.broker", 'host = "h" exclude', "keep host"),
    ("", MQTT + 'cert_file = "c"\n', 17, "mqtt.cert_file", '"c" is of no use', "add key_file"),
    ("", MQTT + 'password_file = "p"\n', 17, "mqtt.password_file", '"p" is of no use', "add username"),
    ("", '[mqtt]\nbroker = "embedded"\nca_file = "p"\n', 17, "mqtt.ca_file", "no meaning", "leave it out"),
    ("", '[mqtt]\nhost = "mqtt://h"\n', 16, "mqtt.host", '"mqtt://h" is an address', "only the host"),
    ("", '[mqtt]\nhost = "h:1883"\n', 16, "mqtt.host", '"h:1883" is a host and more', "the port goes to port"),
    ("", '[mqtt]\nhost = "a b"\n', 16, "mqtt.host", '"a b" is no host', "without mqtt://"),
    # addresses and paths
    (URL2, '"htp://x/y"', 10, "camera[2].url", '"htp://x/y" is no address', "did you mean http:?"),
    (URL2, '"ftp2:x"', 10, "camera[2].url", "is no address", "write one of rtsp://"),
    (URL2, '"http:///x"', 10, "camera[2].url", "names no host", "http://HOST"),
    (URL2, '"http//h/x"', 10, "camera[2].url", '":" is missing', "http://HOST"),
    (URL2, '"http://h:99999/x"', 10, "camera[2].url", "host or port", "%40"),
    (URL2, '"10.0.0.9:554/x"', 10, "camera[2].url", "no scheme", "rtsp://"),
    (URL2, '""', 10, "camera[2].url", "empty", "write one of"),
    (URL2, '"file:"', 10, "camera[2].url", "names no file", "file:PATH"),
    (URL2, '"file:~/a.mp4"', 10, "camera[2].url", "starts with ~", "in full"),
    (URL2, '"file://nas/a.mp4"', 10, "camera[2].url", "names a host", "file:PATH"),
    (URL2, '"bundled:vtset"', 10, "camera[2].url", '"vtset"', "bundled:vtest"),
    (MODEL, 'bundle = "bundled:centrenet"', 14, "model[1].bundle", '"bundled:centrenet"', "bundled:centernet"),
    (MODEL, 'bundle = "~/x"', 14, "model[1].bundle", '"~/x" starts with ~', "in full"),
    (MODEL, 'bundle = "a\\u0000b"', 14, "model[1].bundle", '"a\\u0000b" is no path', "path of a bundle"),
    # the shape of the document
    ("[[model]]", "[model]", 12, "model", "written as a single table", "[[model]], with two brackets"),
    # known, but not built yet
    ("", "[budget]\nmax_power_w = 15.0\n", 15, "budget", "holds nothing", "give it power_w"),
    ("", "[budget]\n", 15, "budget", "holds nothing", "leave the table out"),
    ("", "[budget]\npower_w = 0\n", 16, "budget.power_w", "0 is out of range", "above 0"),
    ("", "[budget]\npower_w = nan\n", 16, "budget.power_w", "no finite number", "above 0"),
    ("", "[budget]\ntemperature_c = 20\n", 16, "budget.temperature_c", "20 is out of range", "30 to 110"),
    ("", "[budget]\nlatency_p99_ms = true\n", 16, "budget.latency_p99_ms", "true is true or false", "a number"),
    ("", "[budget]\ntemperature_c = 85\nprofile = 3\n", 17, "budget.profile", "3 is not text", "path of a file"),
    ("", '[web]\nlisten = "0.0.0.0:8080"\n', 16, "web.listen", "open to other machines", "token_file"),
    (URL2, '"gst:"', 10, "camera[2].url", "no elements", "gst:"),
    (URL2, '"csi:left"', 10, "camera[2].url", "no sensor", "csi:0"),
    (URL2, '"file:a.mp4"\ntransport = "udp"', 11, "camera[2].transport", "only RTSP cameras", "leave it out"),
    (URL2, '"file:a.mp4"\nstall_s = 3', 11, "camera[2].stall_s", "only live sources", "leave it out"),
    (URL2, '"rtsp://h/1"\nca_file = "ca.pem"', 11, "camera[2].ca_file", "without encryption", "rtsps://"),
    (URL2, '"csi:0"\nbackend = "pyav"', 11, "camera[2].backend", "cannot read csi", "gstreamer"),
    (URL2, '"bundled:vtest"\nbackend = "gstreamer"', 11, "camera[2].backend", "cannot read bundled", "auto"),
    (URL2, '"rtsp://h/1"\nisolation = "container"', 11, "camera[2].isolation", "not one of", "thread"),
    (URL2, '"rtsp://h/1"\nstall_s = 0.1', 11, "camera[2].stall_s", "out of range", "0.5"),
    # not TOML
    (CAM2, f"{CAM2}\nfps: 5", 11, None, "expected '='", "key = value"),
    (CAM2, "url = http://x", 10, None, "invalid value", "quotes"),
    (CAM2, f"{CAM2}\nloop = True", 11, None, "invalid value", "lower case"),
    (CAM2, 'url = "http://x', 10, None, "not TOML", 'a second "'),
    (CAM2, "url = \u201chttp://x\u201d", 10, None, "invalid value", "straight quotes"),
    (CAM2, f"{CAM2}\nf\tps = 5", 11, None, "expected '='", "tab"),
    (CAM2, f"{CAM2}\nfps\u00a0= 5", 11, None, "not TOML", "invisible space"),
    (CAM2, f"{CAM2}\nfps = 1,5", 11, None, "not TOML", "decimal point"),
    (CAM2, 'url = "C:\\cam"', 10, None, "not TOML", "single quotes"),
    (CAM2, f"{CAM2}\nfps =", 11, None, "invalid value", "give the key a value"),
    (CAM2, 'url = """http://x', 10, None, "not TOML", ""),
    (CAM2, f"{CAM2}\n{CAM2}", 11, "camera[2].url", "given twice, first on line 10", "keep one"),
    ("[[camera]]", "[camera]", 8, "camera", "given twice, first on line 4", "[[camera]]"),
    ("", '[camera]\nname = "x"\n', 15, "camera", "given twice, first on line 4", "[[camera]]"),
    ("[device]", "[device", 1, None, "not TOML", "close the header"),
]
PLANTED = [row for row in PLANTED if row[4] != "not checked here"]


@pytest.mark.parametrize(("old", "new", "line", "key", "message", "remedy"), PLANTED, ids=lambda value: str(value)[:30])
def test_planted_error(old: str, new: str, line: int | None, key: str | None, message: str, remedy: str) -> None:
    assert not old or old in GOOD
    problem = only(GOOD.replace(old, new) if old else GOOD + new)
    assert (problem.file, problem.line, problem.key) == ("c.toml", line, key), str(problem)
    assert message in problem.message
    assert remedy in (problem.remedy or "")


def test_every_problem_is_reported_at_once_in_the_order_of_the_file() -> None:
    text = """\
        [device]
        id = "a/b"
        [[camera]]
        name = "gate"
        url = "nope:1"
        fps = -1
        [[camera]]
        name = "gate"
        url = "rtsp:/h/1"
        modle = "x"
        min_fps = 8
        fps = 4
        [[model]]
        name = "detector"
        bundle = 5
        [telemetry]
        window_s = 99999
        """
    assert [(found.line, found.key) for found in problems(dedent(text))] == [
        (2, "device.id"),
        (5, "camera[1].url"),
        (6, "camera[1].fps"),
        (8, "camera[2].name"),
        (9, "camera[2].url"),
        (10, "camera[2].modle"),
        (11, "camera[2].min_fps"),
        (15, "model[1].bundle"),
        (17, "telemetry.window_s"),
    ]


NO_HARDWARE = GOOD.replace("[device]", '[device]\nhardware = "none"')


def test_a_budget_that_nothing_could_tell_is_refused() -> None:
    text = NO_HARDWARE + "[budget]\npower_w = 15\ntemperature_c = 85\nlatency_p99_ms = 80\n"
    found = problems(text)
    assert [problem.key for problem in found] == ["budget.power_w", "budget.temperature_c"]
    assert 'with hardware = "none" nothing tells the watts' in found[0].message
    assert found[1].remedy == 'leave temperature_c out, or set [device] hardware = "auto" or "jetson"'
    assert parse_config(NO_HARDWARE + "[budget]\nlatency_p99_ms = 80\n", "c.toml", Path.cwd()).budget is not None


def test_a_budget_and_the_rates_that_it_has_to_keep() -> None:
    text = GOOD.replace(CAM2, f"{CAM2}\nmin_fps = 5") + "[budget]\ntemperature_c = 85\nmax_power_w = 20\n"
    config = parse_config(text + 'profile = "p.toml"\n', "c.toml", Path("/etc/edge"))
    assert config.cameras[1].min_fps == 5
    assert config.budget is not None
    assert (config.budget.power_w, config.budget.max_power_w, config.budget.temperature_c) == (None, 20, 85)
    assert config.budget.profile == Path("/etc/edge/p.toml")
    # at full pace there is a lowest rate too
    full = '[[camera]]\nname = "x"\nurl = "file:a.mp4"\npace = "max"\nmin_fps = 3\n'
    assert parse_config(full + text, "c.toml", Path.cwd()).cameras[0].min_fps == 3


def test_without_cameras_and_models() -> None:
    first, second = problems('[device]\nid = "x"\n')
    assert (first.line, second.line) == (None, None)
    assert "no camera" in first.message
    assert "no model" in second.message
    assert first.remedy == "add a [[camera]] table"
    assert problems("\ncamera = []\nmodel = []\n")[0].line == 2


def test_a_camera_must_choose_among_several_models() -> None:
    found = problems(GOOD + '[[model]]\nname = "faces"\nbundle = "x"\n')
    assert [(problem.line, problem.key) for problem in found] == [(4, "camera[1].model"), (8, "camera[2].model")]
    assert 'one of "detector", "faces"' in (found[0].remedy or "")


@pytest.mark.parametrize(
    ("text", "line", "key"),
    [
        ("device = 5\n", 1, "device"),
        ("camera = [5]\n", 1, "camera[1]"),
        ('model = "x"\n', 1, "model"),
        ("mqtt = []\n", 1, "mqtt"),
        ('[update]\nrepository = "ftp://u:hunter2@h"\n', 2, "update.repository"),
        ("[update]\n", 1, "update.controller_key"),
        ('[web]\nlisten = "8080"\n', 2, "web.listen"),
        ("[budget]\npower_w = 20\nmax_power_w = 15\n", 2, "budget.power_w"),
    ],
)
def test_tables_of_the_wrong_shape(text: str, line: int, key: str) -> None:
    found = problems(text)
    assert (line, key) in [(problem.line, problem.key) for problem in found]
    assert "hunter2" not in "".join(str(problem) for problem in found)


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n", "\r\n# nothing"])
def test_an_empty_file(text: str) -> None:
    problem = only(text)
    assert "holds no configuration" in problem.message
    assert "default.toml" in (problem.remedy or "")


def test_deep_nesting_is_a_problem_not_a_crash() -> None:
    for depth in (50, 200, 400, 5000):
        found = problems(GOOD.replace("[device]", f"[device]\nstore = {'[' * depth}{']' * depth}"))
        assert found[0].line == 2


def test_a_number_of_too_many_digits() -> None:
    problem = problems(GOOD.replace("[device]", f"[device]\nid = {'9' * 5000}"))[0]
    assert problem.line == 2


def test_every_row_of_what_is_not_built_is_a_key() -> None:
    known = {row.key for row in config_reference()} | {row.key.split(".")[0] for row in config_reference()}
    assert {row.split(" = ")[0] for row in NOT_YET} <= known


SECRET_URLS = [
    "http://admin:hunter2@h:99999/x",
    "http://admin:hun/ter2hunter2@h/x",
    "http:/admin:hunter2@h/x",
    "http//admin:hunter2@h/x",
    "rtsp://admin:hunter2@h/x",
    "rstp://admin:hunter2@h/x",
    "rtsp://h/user=admin&password=hunter2&channel=1",
    "admin:hunter2@10.0.0.9/x",
    "hunter2@10.0.0.9:554/x",
    "10.0.0.9:554/x?token=hunter2",
    "//admin:hunter2@h/x",
    "file://admin:hunter2@h/x",
    "http://admin:hunter2@[h/x",
    "http://admin:hunter2@h/a b",
    "http://admin:hunter2@",
    "csi:admin:hunter2@x",
]


@pytest.mark.parametrize("url", SECRET_URLS)
@pytest.mark.parametrize("key", ["url", "name", "model", "fps", "pace"])
def test_no_credentials_in_messages(url: str, key: str) -> None:
    text = f"[[camera]]\n{key} = '{url}'\n[[model]]\nname = 'm'\nbundle = 'x'\n"
    with pytest.raises(ConfigError) as caught:
        parse(text)
    said = str(caught.value)
    if key == "url" or ":" in url.split("@")[0] or "=" in url:
        assert "hunter2" not in said
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


def test_no_credentials_in_the_configurations_own_text() -> None:
    config = parse(GOOD.replace("http://10", "http://admin:hunter2@10"))
    assert config.cameras[1].source.location == "http://admin:hunter2@10.0.0.9/stream.mjpg"
    assert "hunter2" not in repr(config) + str(config) + config.cameras[1].source.shown


# ---- files


def file_problem(path: Path) -> ConfigProblem:
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    (problem,) = caught.value.problems
    assert problem.file == str(path)
    return problem


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "does not exist" in file_problem(tmp_path / "none.toml").message
    assert "directory" in file_problem(tmp_path).message
    assert "cannot be read" in file_problem(tmp_path / ("n" * 300)).message
    assert "larger than 1 MiB" in file_problem(Path("/dev/zero")).message
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert "cannot be read" in file_problem(loop).message


def test_a_file_without_the_right_to_read() -> None:
    # not below tmp_path, which is root's alone where root runs the tests
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        path = Path(folder) / "c.toml"
        path.touch(0)
        user = os.geteuid()
        if user == 0:  # root may read everything: be somebody else for a moment
            os.seteuid(65534)
        try:
            message = file_problem(path).message
        finally:
            os.seteuid(user)
    assert "may not be read" in message


def test_encodings(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_bytes(GOOD.encode().replace(b"[[model]]", b"# caf\xe9\n[[model]]"))
    problem = file_problem(path)
    assert (problem.line, problem.message) == (12, "byte 0xe9 is not UTF-8 text")
    path.write_text(GOOD, encoding="utf-16")
    assert "UTF-16" in file_problem(path).message
    path.write_text(GOOD, encoding="utf-8-sig")
    assert load_config(path).device.id == "gate-07"
    path.write_bytes(GOOD.replace("\n", "\r\n").encode())
    assert load_config(path).device.id == "gate-07"


# ---- the reference


def test_the_reference_has_every_key_with_type_default_and_meaning() -> None:
    rows = {row.key: row for row in config_reference()}
    assert len(rows) == len(config_reference())
    for row in rows.values():
        assert all(row), row
        assert row.meaning.endswith("."), row
    assert rows["camera.model"].default == "the only model"
    assert rows["model.batch_timeout_ms"].default == "20.0"
    assert rows["camera.url"].default == "required"
    assert rows["device.store"].default == '"/var/lib/edge-runtime"'
    assert {"mqtt.keepalive_s", "update.controller_key", "web.listen", "budget.latency_p99_ms"} <= set(rows)


NOISE = st.lists(st.sampled_from(["", "# fsp = 1", "# [[camera]]", "\t", '# """']), max_size=3)
PLANTS = st.sampled_from(
    [
        ("fsp = 3", "fsp"),
        ('fps = "3"', "fps"),
        ("fps = [\n1,\n2]", "fps"),
        ("loop = 0", "loop"),
        ('model = """\nx"""', "model"),
        ("pace.x = 1", "pace"),
        ("'priority' = 1e3", "priority"),
    ]
)


@settings(max_examples=150, deadline=None)
@given(cameras=st.lists(st.tuples(NOISE, NOISE, st.one_of(st.none(), PLANTS)), min_size=1, max_size=6))
def test_planted_errors_among_many_cameras(cameras: list[Any]) -> None:
    text = '[[model]]\nname = "m"\nbundle = "bundled:centernet"\n'
    expected = []
    for index, (before, between, plant) in enumerate(cameras):
        text += "".join(f"{line}\n" for line in before)
        text += f'[[camera]]\nname = "c{index}"\n' + "".join(f"{line}\n" for line in between)
        if plant is not None:
            expected.append((text.count("\n") + 1, f"camera[{index + 1}].{plant[1]}"))
            text += plant[0] + "\n"
        text += 'url = """\\\n   bundled:vtest"""\n'
    if not expected:
        assert len(parse(text).cameras) == len(cameras)
        return
    found = {(problem.line, problem.key) for problem in problems(text)}
    assert found == set(expected)


# ---- a camera that comes from no file


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"url": "clip.mp4"}, 'camera.url: "clip.mp4" is a relative path'),
        ({"url": "file:clips/a.mp4"}, 'camera.url: "file:clips/a.mp4" is a relative path'),
        ({"url": "rtsps://h/x", "ca_file": "ca.pem"}, 'camera.ca_file: "ca.pem" is a relative path'),
        ({"url": "synthetic:", "modle": "detector"}, "camera.modle: unknown key (did you mean model?)"),
        ({"url": "synthetic:", "model": "detecter"}, 'camera.model: "detecter" is no configured model'),
        ({"url": "synthetic:", "fps": "5"}, 'camera.fps: "5" is text'),
        ({"url": "synthetic:", "pace": "max"}, 'camera.pace: "max" has no meaning here'),
        ({"url": "rtsp:admin:hunter2@h"}, "camera.url: "),
        ({"url": "synthetic:", "rtsp://admin:hunter2@h/": 1}, "unknown key"),
        ({"url": ["rtsp://admin:hunter2@h/"], "fps": {"a": 1}}, 'camera.url: ["rtsp://***@h/"] is not text'),
    ],
)
def test_a_camera_without_a_file_goes_by_the_same_rules(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(EdgeError) as caught:
        check_camera({"name": "gate", "model": "detector", **keys}, ["detector", "faces"], where="args.camera")
    error = caught.value
    assert (error.code, error.where) == ("invalid", "args.camera")
    assert words in str(error)
    assert "hunter2" not in str(error)
    assert error.__cause__ is None


def test_the_only_model_need_not_be_named_and_one_of_several_has_to_be() -> None:
    assert check_camera({"name": "gate", "url": "synthetic:"}, ["detector"]).models == ("detector",)
    with pytest.raises(EdgeError, match=r"camera\.model: is missing, and there are several models"):
        check_camera({"name": "gate", "url": "synthetic:"}, ["detector", "faces"])
