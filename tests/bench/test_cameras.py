"""What a camera costs: the benchmark adds up, and with `full` the figures that are promised hold on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from edge_runtime.bench.cameras import CamerasBench, Cost, Load, Plan, measure_cameras
from edge_runtime.bundled import bundled_media
from edge_runtime.cli.main import run as edge_runtime
from edge_runtime.engine.bundle import load_bundle
from tests.camera.clips import encode, numbered
from tests.e2e.daemon import CENTERNET, VTEST

LIGHT = "fp32-320"


def test_a_small_run_adds_up() -> None:
    told: list[str] = []
    plan = Plan([Load(2, 5.0)], LIGHT, seconds=1.0, repeats=1, warm_up_s=0.5)
    (cost,) = measure_cameras(load_bundle(CENTERNET), VTEST, plan, progress=told.append).costs
    assert told == ["2 x 5 fps (1 of 1)"]
    assert 6 <= cost.completed <= 12
    assert cost.least_share is not None
    assert cost.most_share is not None
    assert 0 < cost.least_share <= cost.most_share < 1.5
    assert cost.decode_us > 0
    assert cost.rest_us > cost.decode_us  # inference is in it
    assert 0 < cost.rss_mb <= cost.peak_rss_mb


def test_memory_of_one_camera_more_is_between_loads_of_one_rate() -> None:
    def cost(load: Load, rss_mb: float) -> Cost:
        return Cost(load, 1.0, 1, None, None, 1.0, 1.0, 0.1, 0.0, rss_mb, rss_mb)

    costs = (cost(Load(1, None), 500.0), cost(Load(1, 2.0), 100.0), cost(Load(5, 2.0), 140.0))
    assert CamerasBench("b", "v", 1, costs).rss_mb_per_camera() == 10.0
    assert CamerasBench("b", "v", 1, costs[:2]).rss_mb_per_camera() is None


def test_a_clip_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clip = tmp_path / "clip.mp4"
    clip.write_bytes(b"no video")
    assert edge_runtime(["bench", "cameras", "--clip", str(clip)]) == 2
    assert "give a video file" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.timeout(400)
def test_32_cameras_each_get_their_rate_at_the_cost_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        edge_runtime(["bench", "cameras", "--cameras", "1", "32", "--repeats", "3", "--seconds", "12", "--json"]) == 0
    )
    _, one, many = json.loads(capsys.readouterr().out)["costs"]
    assert many["load"] == {"cameras": 32, "fps": 2.0}
    assert 0.9 <= many["least_share"] <= many["most_share"] <= 1.1
    assert many["rest_us"] <= 1.1 * one["rest_us"]


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_720p_camera_more_takes_18_mb_at_most(tmp_path: Path) -> None:
    clip = encode(tmp_path / "720p.mp4", numbered(150, 1280, 720), rate=25, options={"g": "25"})
    plan = Plan([Load(1, 1.0), Load(17, 1.0)], LIGHT, seconds=6.0, repeats=1)
    more = measure_cameras(load_bundle(CENTERNET), clip, plan).rss_mb_per_camera()
    assert more is not None
    assert more <= 18


@pytest.mark.full
@pytest.mark.timeout(200)
def test_of_what_a_low_rate_has_no_use_for_only_key_frames_are_decoded(tmp_path: Path) -> None:
    """The bundled clip's pictures at 25 fps with a key frame in 25, one wanted a second: a scene so still that a key
    frame costs nine times the others. The quarter that livelier ones take at most is tested in the camera room."""
    import av

    pictures = []
    with av.open(str(bundled_media("vtest"))) as source:
        for frame in source.decode(video=0):
            pictures.append(frame.to_ndarray(format="rgb24").astype(np.uint8, copy=False))
            if len(pictures) == 600:  # longer than the run: at its end a file is looked at anew
                break
    clip = encode(tmp_path / "gop25.mp4", pictures, rate=25, options={"g": "25", "keyint_min": "25"})
    plan = Plan([Load(1, None), Load(1, 1.0)], LIGHT, seconds=16.0, repeats=3)
    everything, few = measure_cameras(load_bundle(CENTERNET), clip, plan).costs
    assert few.not_decoded > 0.95
    assert few.decode_cores <= 0.3 * everything.decode_cores
