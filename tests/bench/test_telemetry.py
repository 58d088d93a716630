"""The telemetry benchmark adds up, and frames do not notice the broker; figures of the issue with the full run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from edge_runtime.bench.telemetry import Plan, measure_telemetry
from edge_runtime.bench.telemetry_faults import FAULTS, window_of
from edge_runtime.bench.telemetry_figures import measure_backlog, measure_cap, measure_wear
from edge_runtime.cli import bench_telemetry
from edge_runtime.cli.main import run as edge_runtime

ONE_RUN_BYTES = 64 << 10
LOG_BYTES = 4 << 20
"""ADR 8: of the file above its cap, and of the write-ahead log beside it."""


def test_frames_go_on_while_the_broker_is_dead_and_what_was_measured_is_kept() -> None:
    told: list[str] = []

    def progress(what: str) -> None:
        told.append(what)
        if what == "windows":
            raise KeyboardInterrupt

    bench = measure_telemetry(Plan(faults=("killed",), seconds=0.6), progress=progress)
    assert told == ["a daemon starts", "broker fine", "broker killed", "broker fine", "windows"]
    assert bench.interrupted
    assert bench.backlog is None
    faults = bench.faults
    assert faults is not None
    assert [each.name for each in faults.phases] == ["fine", "killed", "fine"]
    # one frame more or less is 6 % of so short a phase
    assert all(each.of_fine > 0.75 for each in faults.phases), faults
    assert faults.dropped > 0
    assert 0 <= faults.untold < faults.dropped, faults
    json.dumps(bench.as_dict())
    assert "interrupted" in bench_telemetry.table(bench)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_no_fault_of_the_broker_slows_the_frames() -> None:
    faults = measure_telemetry(Plan(seconds=20.0, rows=0, windows=0, cap=False)).faults
    assert faults is not None
    print(faults)
    assert {each.name for each in faults.phases} == {"fine", *FAULTS}
    assert all(0.98 <= each.of_fine <= 1.02 for each in faults.phases)
    assert faults.made > faults.arrived > 0
    assert faults.untold >= 0


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_backlog_costs_no_time_at_the_start_and_delays_nothing_that_is_new(tmp_path: Path) -> None:
    backlog = measure_backlog(tmp_path, window_of(tmp_path / "window", 1), rows=100_000, seconds=30.0)
    print(backlog)
    assert backlog.start_s <= 1.0
    assert backlog.drained_hz == pytest.approx(100.0, rel=0.1)
    assert backlog.live_ms is not None
    assert backlog.live_ms[1] <= 1000.0
    assert backlog.live_lost == 0
    assert backlog.event_ms is not None
    assert backlog.event_ms[1] <= 1000.0


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_day_writes_at_most_200_mb_and_a_full_file_stays_in_its_cap(tmp_path: Path) -> None:
    reports = [(cameras, window_of(tmp_path / f"window-{cameras}", cameras)) for cameras in (1, 16)]
    wear = measure_wear(tmp_path, reports, windows=60)
    print(wear)
    assert [(each.cameras, each.broker) for each in wear] == [(1, "there"), (1, "away"), (16, "there"), (16, "away")]
    for each in wear:
        assert each.written_mb_a_day is None or each.written_mb_a_day <= 200.0
        assert (each.uplink_bytes is None) == (each.broker == "away")
        # a topic, a packet id and lengths beside the payload
        assert each.uplink_bytes is None or each.payload_bytes <= each.uplink_bytes <= each.payload_bytes + 100
    filled = measure_cap(tmp_path, reports[1][1])
    print(filled)
    assert filled.file_bytes <= filled.cap_bytes + ONE_RUN_BYTES
    assert filled.log_bytes <= LOG_BYTES


def test_the_description_is_readable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        edge_runtime(["bench", "telemetry", "--help"])
    assert "swallows" in capsys.readouterr().out


def test_a_fault_that_is_none_and_a_broker_that_is_not_there_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert edge_runtime(["bench", "telemetry", "--faults", "angry"]) == 2
    assert "any of killed, frozen" in capsys.readouterr().err
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    assert edge_runtime(["bench", "telemetry", "--quick"]) == 4
    assert "apt-get install mosquitto" in capsys.readouterr().err
