"""What stays of many clips and connections in the GStreamer backend: nothing. And what skipping saves."""

from __future__ import annotations

import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.backoff import Backoff
from edge_runtime.camera.isolated import IsolatedCamera
from edge_runtime.camera.options import CameraOptions
from tests.awaiting import wait_until
from tests.camera.gst import gst_camera, gst_missing, warm_up
from tests.camera.rtsp import RtspServer, gstreamer_missing

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.skipif(gst_missing() is not None, reason=str(gst_missing())),
    pytest.mark.skipif(gstreamer_missing() is not None, reason=str(gstreamer_missing())),
]


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """Before the first test counts descriptors."""
    warm_up()


def soak(*arguments: object) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.camera.gst_soak", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=900,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, (len(lines), done.stderr[-2000:])
    assert "CRITICAL" not in done.stderr
    assert "** WARNING" not in done.stderr
    assert [line["error"] for line in lines if line["error"]] == []
    return lines


def grown_mb(lines: list[dict[str, Any]]) -> float:
    """A block of some MB comes and goes with what malloc puts behind it: the floor tells what stays."""
    first, last = lines[50:100], lines[-100:]
    floors = [min(int(line["rss"]) for line in part) for part in (first, last)]
    return (floors[1] - floors[0]) / 1e6


def nothing_stays(lines: list[dict[str, Any]]) -> None:
    assert grown_mb(lines) <= 10
    for what, spare in (("descriptors", 2), ("tasks", 2)):
        assert max(line[what] for line in lines[-100:]) <= max(line[what] for line in lines[:100]) + spare


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_a_thousand_damaged_clips(tmp_path: Path) -> None:
    lines = soak("clips", 0, 1000, tmp_path)
    print(f"{sum(line['pictures'] for line in lines)} pictures, {grown_mb(lines):.1f} MB grown")
    assert len(lines) == 1000
    nothing_stays(lines)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_three_hundred_connections() -> None:
    with RtspServer() as server:
        server.add(width=160, height=120, fps=25, gop=5)
        lines = soak("streams", 300, server.url())
    print(f"{grown_mb(lines):.1f} MB grown")
    assert len(lines) == 300
    nothing_stays(lines)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_one_picture_a_second_of_25_takes_a_quarter_of_decoding_all() -> None:
    costs: dict[float | None, list[float]] = {None: [], 1.0: []}
    with RtspServer() as server:
        server.add(clip=ROOT / "media" / "vtest.mp4", width=768, height=576, fps=25, gop=25)
        for fps in (None, 1.0) * 3:
            camera = gst_camera("cam", server.url(), fps=fps)
            spent_ns = []
            for seconds in (4.0, 6.0):  # the first ones show how far apart key frames are
                end_s = time.monotonic() + seconds
                while time.monotonic() < end_s:
                    camera.read()
                spent_ns.append(camera.effort().decode_cpu_ns)
            costs[fps].append((spent_ns[1] - spent_ns[0]) / 1e6)
            camera.stop()
            camera.close()
    every_one, keys_alone = (statistics.median(costs[fps]) for fps in (None, 1.0))
    print(f"{every_one / 6:.1f} and {keys_alone / 6:.1f} ms a second")
    assert keys_alone <= 0.25 * every_one


# --- in a process


@contextmanager
def isolated(url: str, base_s: float = 0.01) -> Iterator[tuple[IsolatedCamera, list[int]]]:
    """A camera that is read all the time, and the ids of its frames. Silence of its process may last for 1.5 s."""
    options = CameraOptions("c", url, backend="gstreamer", open_s=1.0, stall_s=1.0, isolation="process")
    camera = IsolatedCamera(options, backoff=Backoff(base_s=base_s, limit_s=base_s * 2), grace_s=0.5)
    ids: list[int] = []

    def work() -> None:
        while (frame := camera.read()) is not None:
            ids.append(frame.frame_id)

    reader = threading.Thread(target=work)
    reader.start()
    try:
        yield camera, ids
    finally:
        camera.stop()
        reader.join()
        camera.close()


def goes_on(ids: list[int], within_s: float = 5.0) -> None:
    count = len(ids)
    wait_until(lambda: len(ids) > count + 2, within_s, "pictures")


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.full)])
def test_a_process_that_dies_or_does_not_react_is_started_again(number: signal.Signals) -> None:
    with RtspServer() as server:
        server.add(width=160, height=120, fps=25, gop=5)
        with isolated(server.url()) as (camera, ids):
            goes_on(ids)
            before = camera.pid
            assert before is not None
            os.kill(before, number)
            wait_until(lambda: camera.pid not in (None, before), 5, "another process")
            goes_on(ids)
            assert camera.effort().backend == "gstreamer"
        source = camera.source()
    assert source.decoded - source.skipped_rate - source.duplicate == len(ids)
    assert ids == list(range(len(ids)))


@pytest.mark.full
def test_waiting_is_no_wedge() -> None:
    """For a resume, for a slot of a slow cap, ."""
    with RtspServer() as server, ExitStack() as stack:
        server.add(width=160, height=120, fps=25, gop=5)
        (paused, _), (capped, _), (never, _) = cameras = [
            stack.enter_context(isolated(url)) for url in [server.url()] * 3
        ]
        refused, _ = stack.enter_context(isolated("rtsp://127.0.0.1:9/"))
        for _, each in cameras:
            goes_on(each)
        wait_until(lambda: refused.status().state == "down", 5, "down")
        paused.pause()
        capped.set_cap(0.2)
        never.set_cap(0.0)
        wait_until(lambda: paused.status().state == "paused", 5, "paused")
        before = [camera.pid for camera in (paused, capped, never, refused)]
        time.sleep(2.5)
        assert [camera.pid for camera in (paused, capped, never, refused)] == before
        assert None not in before
        paused.resume()
        capped.set_cap(None)
        for _, each in itertools.islice(cameras, 2):
            goes_on(each)
        assert [camera.pid for camera in (paused, capped, never, refused)] == before
