"""The benchmarks run, add up, and refuse what cannot be measured. What they measure is for quiet machines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from edge_runtime.bench.cache import found_in
from edge_runtime.bench.overhead import measure_overhead
from edge_runtime.bench.pipeline import STAGES
from edge_runtime.cli.main import run as edge_runtime
from edge_runtime.errors import EXIT_USAGE
from edge_runtime.records.frames import Classification, Detections


def bench(*arguments: str, timeout_s: float = 110) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "edge_runtime", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)


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


def boxes(*rows: tuple[int, float, float]) -> Detections:
    """Squares of 10 px at (x, y), of a class."""
    at = np.array([(x, y, x + 10, y + 10) for _, x, y in rows], np.float32).reshape(-1, 4)
    return Detections(at, np.ones(len(rows), np.float32), np.array([kind for kind, _, _ in rows], np.int32))


def test_what_is_found_again_has_its_class_and_its_place_and_is_used_once() -> None:
    wanted = boxes((0, 0, 0), (1, 50, 50), (0, 90, 0))
    assert found_in(wanted, wanted) == 3
    assert found_in(wanted, boxes((0, 3, 0), (1, 54, 50))) == 1, "3 px of 10 are an IoU of 0.54, 4 px one of 0.43"
    assert found_in(wanted, boxes((1, 0, 0), (0, 50, 50))) == 0
    assert found_in(boxes((0, 0, 0), (0, 1, 0)), boxes((0, 0, 0))) == 1
    assert found_in(wanted, boxes()) == found_in(boxes(), wanted) == 0
    one, other = (Classification(np.ones(2, np.float32), np.array(ids, np.int32)) for ids in ((3, 5), (5, 7)))
    assert found_in(one, other) == 1


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_scene_cache_saves_runs_where_nothing_moves_and_loses_nothing_where_something_does() -> None:
    found = bench("cache", "--variant", "fp32-320", "--json", timeout_s=500)
    assert found.returncode == 0, found.stderr
    rows = {(row["scene"], row["cache"]): row for row in json.loads(found.stdout)["rows"]}
    assert rows["vtest", "scene"]["recall"] >= 0.99
    assert rows["vtest", "exact"]["recall"] == rows["still", "exact"]["recall"] == 1
    for scene in ("still", "still, noise 2", "still, noise 4"):
        # all but a new engine's first frames, one look, and one more every ten seconds
        assert rows[scene, "scene"]["saved"] >= 0.88, scene
    assert rows["noise alone", "scene"]["saved"] == rows["noise alone", "exact"]["saved"] == 0
    for row in rows.values():
        assert row["look_us"] < 2_000


@pytest.mark.parametrize(
    "arguments",
    [
        ("overhead", "--repeats", "0"),
        ("overhead", "--fps", "0"),
        ("overhead", "--seconds", "-1"),
        ("pipeline", "--lanes", "-1"),
        ("pipeline", "--clip", "no-such-clip.mp4"),
        ("pipeline", "--bundle", "no-such-bundle"),
        ("cache", "--clip", "no-such-clip.mp4"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert answer("bench", *arguments) == EXIT_USAGE
    assert capsys.readouterr().err


def answer(*arguments: str) -> object:
    """The exit code of a command, in this process; argparse has one of its own."""
    try:
        return edge_runtime(arguments)
    except SystemExit as error:
        return error.code
