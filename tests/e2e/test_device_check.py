"""The real `device-check` command and its processes: on fakes of the libraries, and where there is no device."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.app.device_check import WOULD
from edge_runtime.cli.main import run
from tests.awaiting import wait_until
from tests.engine.graphs import classifier
from tests.engine.tensorrt.fake_process import FakeDevice
from tests.engine.tensorrt.rigs import TENSORRT, Rig


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    made = FakeDevice(tmp_path / "device", bindings=True)
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    return made


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return Rig(TENSORRT[0], tmp_path).bundle(classifier()).root


def arguments(tmp_path: Path, bundle: Path) -> list[str]:
    report = ["--report", str(tmp_path / "report.json")]
    return ["device-check", "--bundle", str(bundle), "--store", str(tmp_path / "store"), "--reloads", "2", *report]


def checked(tmp_path: Path, bundle: Path) -> tuple[int, dict[str, Any]]:
    """(exit code, report): the one that was printed is the one that was written."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = run([*arguments(tmp_path, bundle), "--json"])
    report: dict[str, Any] = json.loads(out.getvalue())
    assert report == json.loads((tmp_path / "report.json").read_text())
    return code, report


def statuses(report: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each["status"] for each in report["checks"]}


@pytest.mark.full
def test_all_of_it_on_a_device(device: FakeDevice, bundle: Path, tmp_path: Path) -> None:
    code, report = checked(tmp_path, bundle)
    assert code == 0, report
    found = statuses(report)
    assert list(found) == list(WOULD)
    # no Jetson, and a variant in fp32
    assert {name for name, status in found.items() if status != "passed"} == {"sensors", "gstreamer", "dla"}
    assert report["complete"] is True
    assert report["device"]["tensorrt"] == "10.3.0"
    assert str(Path.home()) not in json.dumps(report)
    assert device.builds() == 1
    device.check()


@pytest.mark.full
def test_a_gpu_that_dies_fails_what_it_died_of_and_no_more(device: FakeDevice, bundle: Path, tmp_path: Path) -> None:
    assert checked(tmp_path, bundle)[0] == 0
    code, report = checked(tmp_path, bundle)
    assert (code, device.builds()) == (0, 1)
    assert next(each for each in report["checks"] if each["name"] == "plan")["numbers"]["how"] == "there"
    device.become(bindings=True, faults=[["device:execute", 700, 8, 1]])
    code, report = checked(tmp_path, bundle)
    assert code == 3
    failed = [each for each in report["checks"] if each["status"] == "failed"]
    assert failed
    assert {each["numbers"]["code"] for each in failed} == {"gpu_fatal"}
    assert statuses(report)["versions"] == "passed"
    assert list(statuses(report)) == list(WOULD)


@pytest.mark.full
def test_what_cannot_be_built_leaves_the_other_checks(device: FakeDevice, bundle: Path, tmp_path: Path) -> None:
    device.become(bindings=True, crash=int(signal.SIGSEGV))
    code, report = checked(tmp_path, bundle)
    found = statuses(report)
    assert code == 3
    assert found["plan"] == "failed"
    assert found["memory"] == "passed"
    assert found["load"] == found["graphs"] == "skipped"


def test_without_a_device_it_says_what_it_would_do(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Really: no libraries here, and no GPU."""
    assert run(arguments(tmp_path, bundle)) == 4
    out = capsys.readouterr()
    for name, what in WOULD.items():
        assert f"{name}: would {what}" in out.out
    assert "docs/jetson.md" in out.err
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["device"], report["complete"], report["error"]["code"]) == (None, False, "tensorrt_missing")


@pytest.mark.full
def test_interrupted_it_keeps_what_was_done(device: FakeDevice, bundle: Path, tmp_path: Path) -> None:
    device.become(bindings=True, gate="open")
    command = [sys.executable, "-m", "edge_runtime", *arguments(tmp_path, bundle)]
    process = subprocess.Popen(command, env=os.environ | device.environment, stdout=subprocess.PIPE)
    try:
        wait_until(lambda: device.builds() == 1, 60, "the build")
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["complete"] is False
    assert list(statuses(report)) == ["versions", "sensors", "gstreamer", "memory"]
    assert b"versions: passed" in out
