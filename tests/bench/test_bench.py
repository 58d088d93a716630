"""The benchmarks run, add up, and refuse what cannot be measured. What they measure is for quiet machines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from edge_runtime.bench.overhead import measure_overhead
from edge_runtime.bench.pipeline import STAGES


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "edge_runtime", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)


@pytest.mark.full
def test_pipeline_as_json_and_as_a_table() -> None:
    short = ("pipeline", "--variant", "fp32-320", "--seconds", "0.5", "--repeats", "1")
    found = bench(*short, "--json")
    assert found.returncode == 0, found.stderr
    result = json.loads(found.stdout)
    assert result["engine_fps"] > 0
    assert result["pipeline_to_engine"] == pytest.approx(result["pipeline_fps"] / result["engine_fps"])
    assert result["pipeline_to_sequential"] == pytest.approx(result["pipeline_fps"] / result["sequential_fps"])
    assert set(result["stages_ms"]) == set(STAGES)
    assert all(value > 0 for value in result["stages_ms"].values())
    table = bench(*short)
    assert "b/a" in table.stdout
    assert "decode" in table.stdout


@pytest.mark.full
def test_the_heavy_model_is_the_same_everywhere_and_finds_nothing(tmp_path: Path) -> None:
    from edge_runtime.prepare.heavy import build_heavy_model

    for name in ("a.onnx", "b.onnx"):
        build_heavy_model(tmp_path / name, blocks=1)
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()
    found = bench("pipeline", "--heavy", "--seconds", "0.5", "--repeats", "1", "--json")
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["bundle"] == "heavy"


@pytest.mark.full
def test_overhead_counts_what_it_completes() -> None:
    result = measure_overhead(cameras=3, fps=50, seconds=0.5, repeats=2)
    assert result.completed == pytest.approx(3 * 50 * 0.5 * 2, rel=0.2)
    assert len(result.cpu_us) == 2
    assert result.cpu_us_median > 0
    assert result.handoff_us_median > 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("overhead", "--repeats", "0"),
        ("overhead", "--fps", "0"),
        ("overhead", "--seconds", "-1"),
        ("pipeline", "--lanes", "-1"),
        ("pipeline", "--clip", "no-such-clip.mp4"),
        ("pipeline", "--bundle", "no-such-bundle"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: tuple[str, ...]) -> None:
    found = bench(*arguments)
    assert found.returncode == 2
    assert "Traceback" not in found.stderr
