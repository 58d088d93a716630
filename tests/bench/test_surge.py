"""The surge benchmark adds up; what it measures is for quiet machines."""

from __future__ import annotations

import json
import threading
import time

import pytest

from edge_runtime.bench.scripted import Pace, decoded, scripted_camera
from edge_runtime.bench.surge import Plan, measure_surge
from edge_runtime.cli.main import run as edge_runtime
from edge_runtime.engine.bundle import load_bundle
from tests.e2e.daemon import CENTERNET, VTEST

VARIANTS = ("fp32-416", "fp32-320")


@pytest.mark.full
def test_a_small_surge_adds_up() -> None:
    plan = Plan(VARIANTS, cameras=3, seconds=0.8, warm_up_s=0.3)
    told: list[str] = []
    result = measure_surge(load_bundle(CENTERNET), VTEST, plan, progress=told.append)
    assert told == ["capacity", "governed", "off"]
    assert list(result.capacity_hz) == list(VARIANTS)
    assert all(hz > 0 for hz in result.capacity_hz.values())
    governed, off = result.runs
    assert [(each.name, len(each.phases)) for each in result.runs] == [("governed", 4), ("off", 4)]
    heaviest_hz = result.capacity_hz[VARIANTS[0]]
    for run in result.runs:
        base, whole, double, back = run.phases
        assert [each.name for each in run.phases] == ["base", "surge 100%", "surge 200%", "back"]
        assert double.offered_hz > 1.5 * whole.offered_hz > base.offered_hz
        assert whole.offered_hz == pytest.approx(heaviest_hz, rel=0.2, abs=10)
        assert back.completed_hz <= back.offered_hz + 3 / 0.3
        assert all(0 <= each.busy <= 1.05 for each in run.phases)
        assert run.surge_p99_ms is not None
        assert run.through_p99_ms is not None
    assert all(set(each.variants) <= set(VARIANTS) for each in governed.phases)
    assert all(set(each.variants) <= {VARIANTS[0]} for each in off.phases)
    assert {each.because for each in off.phases} == {"off"}
    assert all(each.because != "off" for each in governed.phases)
    json.dumps(result.as_dict())


def test_the_description_is_readable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        edge_runtime(["bench", "surge", "--help"])
    said = capsys.readouterr().out
    assert "100 %" in said
    assert "%%" not in said


def test_a_variant_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert edge_runtime(["bench", "surge", "--variants", "fp32-9"]) == 2
    assert "any of fp32-512, fp32-416, fp32-320" in capsys.readouterr().err


def test_cameras_follow_the_script_and_end_at_once() -> None:
    pictures = decoded(VTEST, 4)
    pace = Pace(2.0)
    cameras = [scripted_camera(f"c{number}", number, 2, pace, pictures) for number in range(2)]
    stamps: list[list[int]] = [[], []]

    def read(number: int) -> None:
        while (frame := cameras[number].read()) is not None:
            stamps[number].append(frame.t_capture_ns)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    # a camera that waits for a second wakes when the rate rises
    pace.set(200.0)
    start_s = time.monotonic()
    while min(map(len, stamps)) < 40:
        time.sleep(0.005)
    took_s = time.monotonic() - start_s
    assert 0.35 < took_s < 5
    pace.set(0.01)
    for camera in cameras:
        camera.stop()
    for thread in threads:
        thread.join(2)
        assert not thread.is_alive()
    for each in stamps:
        assert each == sorted(set(each))
        assert (each[-2] - each[2]) / 1e9 == pytest.approx((len(each) - 4) / 100, rel=0.1)
