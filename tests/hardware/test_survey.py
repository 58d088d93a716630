"""What `status --sensors` tells: every source, what was chosen and why; on a machine without any, that."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from edge_runtime.hardware.feed import Candidate
from edge_runtime.hardware.protocol import SensorError
from edge_runtime.hardware.survey import survey, text
from edge_runtime.hardware.sysfs import SysfsSource
from tests.hardware.fake_source import FakeSource
from tests.hardware.trees import build


def broken() -> FakeSource:
    raise SensorError("the service is not there: no /run/jtop.sock")


def test_a_jetson_is_told_with_its_module_its_values_and_why_each_source_is_used_or_not(tmp_path: Path) -> None:
    tree = build(tmp_path, "orin-nx-16gb")
    other = FakeSource("tegrastats")
    report = survey(
        tmp_path,
        [Candidate("ina3221", lambda: SysfsSource(tmp_path)), Candidate("jtop", broken), other.candidate()],
    )
    assert report.module == "Jetson Orin NX 16GB"
    assert "p3767-0000" in report.module_reason
    assert (report.power_source, report.power_reason) == ("ina3221", None)
    assert (report.temperature_source, report.temperature_reason) == ("ina3221", None)
    kernel, jtop, tegrastats = report.sources
    assert kernel.watts == pytest.approx(tree.board.watts)
    assert (kernel.module_rails, kernel.quantum_w, kernel.rate_hz, kernel.mode) == (["VDD_IN"], 0.04, 10.0, "15W")
    assert set(kernel.rails) == {"VDD_IN", "VDD_CPU_GPU_CV", "VDD_SOC"}
    assert kernel.tj_c == pytest.approx(48.9)
    assert kernel.used_for == ["power", "temperature"]
    assert (jtop.used_for, jtop.watts, jtop.rate_hz) == ([], None, None)
    assert jtop.power_reason == jtop.temperature_reason == "the service is not there: no /run/jtop.sock"
    assert (tegrastats.used_for, tegrastats.watts) == ([], 5.0)
    assert tegrastats.power_reason == "it is good, but ina3221 comes first"
    told = text(report)
    assert told.startswith("module: Jetson Orin NX 16GB (compatible ")
    assert "power: 5.30 W from ina3221 (VDD_IN, in steps of 0.04 W)" in told
    assert "temperature: Tj 48.9 degC from ina3221" in told
    assert "jtop: not used\n  neither power nor temperature from it: the service is not there" in told
    assert json.loads(report.to_json())["schema"] == "edge.sensors/1"
    assert other.closed == 1


def test_power_and_temperature_may_come_from_different_sources_and_both_are_told(tmp_path: Path) -> None:
    power, heat = FakeSource("ina3221"), FakeSource("tegrastats")
    power.tj_c, power.reasons = None, {"tj": "no zone on the die can be read"}
    heat.watts, heat.reasons = None, {"power": "VDD_IN is missing"}
    report = survey(tmp_path, [power.candidate(), heat.candidate()])
    assert (report.power_source, report.temperature_source) == ("ina3221", "tegrastats")
    told = text(report)
    assert "ina3221: used for power, " in told
    assert "  no temperature from it: no zone on the die can be read" in told
    assert "tegrastats: used for temperature, " in told


def test_a_machine_without_sensors_says_so_for_every_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    report = survey(tmp_path)
    assert (report.module, report.power_source, report.temperature_source) == (None, None, None)
    assert report.power_reason is not None
    assert [source.name for source in report.sources] == ["ina3221", "jtop", "tegrastats"]
    assert all(source.power_reason and source.temperature_reason for source in report.sources)
    told = text(report)
    assert told.splitlines()[:2] == [
        "module: unknown (no device tree below /proc/device-tree: this is not a Jetson)",
        "no sensor was found on this machine; what was tried:",
    ]
    assert "tegrastats: not used\n  neither power nor temperature from it: there is no such program" in told


def test_a_source_that_blocks_is_told_in_time(tmp_path: Path) -> None:
    source, other = FakeSource("ina3221"), FakeSource("tegrastats")
    source.gate.clear()
    start_s = time.monotonic()
    report = survey(tmp_path, [source.candidate(), other.candidate()], wait_s=0.3)
    assert time.monotonic() - start_s < 2.0
    assert report.power_source == "tegrastats"
    assert report.sources[0].power_reason == "no reading yet"
    source.gate.set()
