"""Cameras that GStreamer reads: real streams, files and pipelines, the same pictures as PyAV gives of them."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from edge_runtime.camera import gstreamer
from edge_runtime.camera.gst_pipelines import SOFTWARE, SOFTWARE_SCALED, plan_for
from edge_runtime.camera.gst_session import GstSession
from edge_runtime.camera.gstreamer import GstCamera, hardware_decoder, hardware_missing, have_element, load, unavailable
from edge_runtime.camera.media import AvCamera
from edge_runtime.camera.options import CameraOptions
from edge_runtime.camera.pacing import RateCap
from edge_runtime.camera.session import Alone
from edge_runtime.camera.synthetic import read_number
from edge_runtime.clock import SystemClock
from edge_runtime.errors import CameraError
from edge_runtime.records.frames import Frame
from edge_runtime.records.spec import InputSpec
from tests.awaiting import wait_until
from tests.camera.clips import encode, image, numbered
from tests.camera.gst import gst_camera, gst_missing, tasks, warm_up
from tests.camera.http_streams import HttpStreams
from tests.camera.rtsp import Codec, RtspServer, gstreamer_missing

needs_gst = pytest.mark.skipif(gst_missing() is not None, reason=str(gst_missing()))
needs_server = pytest.mark.skipif(gstreamer_missing() is not None, reason=str(gstreamer_missing()))

CLIP = Path(__file__).parents[2] / "media" / "vtest.mp4"
_sessions = itertools.count()
CHILD = Path(__file__).with_name("gst_jetson_child.py")


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """Before the first test counts descriptors."""
    if gst_missing() is None:
        warm_up()


def read(camera: GstCamera | AvCamera, count: int | None = None, within_s: float = 10.0) -> list[Frame]:
    """`count` frames, or all there are; the camera is left open."""
    frames: list[Frame] = []
    guard = threading.Timer(within_s, camera.stop)
    guard.start()
    try:
        while count is None or len(frames) < count:
            frame = camera.read()
            if frame is None:
                break
            frames.append(frame)
    finally:
        guard.cancel()
        guard.join()
    return frames


def wait_for_state(camera: GstCamera, state: str) -> None:
    wait_until(lambda: camera.status().state == state, 5, state)


def every(camera: GstCamera | AvCamera) -> list[NDArray[np.uint8]]:
    pictures = [frame.pixels.to_rgb() for frame in read(camera)]
    camera.close()
    return pictures


def of_file(path: Path, **options: Any) -> GstCamera:
    return gst_camera("file", f"file:{path}", pace="max", loop=False, **options)


# --- the door


def test_the_door_says_what_is_missing_and_raises_nothing_for_who_only_asks() -> None:
    if unavailable() is None:
        assert load() is load()
    else:
        with pytest.raises(CameraError, match="GStreamer is not available: ") as missing:
            load()
        assert missing.value.retryable
        assert "python3-gi" in str(missing.value)
    assert hardware_decoder() is None
    assert hardware_missing() is not None


def test_without_gi_a_camera_is_down_and_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gstreamer, "_library", None)
    monkeypatch.setattr(gstreamer, "_distribution_paths", list)
    for name in [name for name in sys.modules if name == "gi" or name.startswith("gi.")]:
        monkeypatch.delitem(sys.modules, name)
    camera = gst_camera("cam", "rtsp://127.0.0.1:9/")
    thread = threading.Thread(target=camera.read)
    thread.start()
    wait_until(lambda: camera.status().state == "down", 10, "a state")
    assert camera.status().reason == "GStreamer is not available: there is no Python package gi (install python3-gi)"
    assert thread.is_alive()
    camera.stop()
    thread.join()
    camera.close()


@needs_gst
def test_nothing_of_the_distribution_but_gi_can_be_imported() -> None:
    code = (
        "import sys; from edge_runtime.camera.gstreamer import load; before = list(sys.path); load();"
        "assert sys.path == before; import gi, numpy; print(gi.__file__); print(numpy.__file__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    gi, numpy = done.stdout.splitlines()
    assert numpy == np.__file__
    assert gi != numpy


# --- pictures

KINDS: dict[str, dict[str, Any]] = {
    "h264": {},
    "h264 with B-frames": {"options": {"bf": "3", "g": "12"}},
    "h264 full range": {"pix_fmt": "yuvj420p"},
    "h264 BT.709": {"options": {"x264-params": "colormatrix=bt709:colorprim=bt709:transfer=bt709"}},
    "h264 4:2:2": {"pix_fmt": "yuv422p"},
    "h264 4:4:4": {"pix_fmt": "yuv444p"},
    "h264 grey": {"pix_fmt": "gray"},
    "h265": {"codec": "libx265", "options": {"x265-params": "log-level=none"}},
    "mjpeg": {"codec": "mjpeg", "pix_fmt": "yuvj420p"},
    "mjpeg 4:2:2": {"codec": "mjpeg", "pix_fmt": "yuvj422p"},
}


@needs_gst
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(192, 96), (190, 94)], ids=str)
def test_the_same_pictures_as_pyav_gives(kind: str, size: tuple[int, int], tmp_path: Path) -> None:
    clip = encode(tmp_path / "clip.mp4", numbered(14, *size), **KINDS[kind])
    camera = of_file(clip)
    ours = every(camera)
    theirs = every(AvCamera(CameraOptions("file", f"file:{clip}", pace="max", loop=False)))
    assert [read_number(picture) for picture in ours] == list(range(14))
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
        assert np.abs(one.astype(int) - other).mean() < 0.5
    assert (camera.status().state, camera.status().reason) == ("stopped", "end of file")
    assert camera.source().decoded == 14
    assert camera.effort().backend == "gstreamer"
    assert camera.effort().decode_cpu_ns > 0


@needs_gst
def test_an_unlabelled_hd_picture_has_the_colours_that_pyav_gives_it(tmp_path: Path) -> None:
    clip = encode(tmp_path / "clip.mp4", numbered(2, 1280, 720))
    ours = every(of_file(clip))
    theirs = every(AvCamera(CameraOptions("file", f"file:{clip}", pace="max", loop=False)))
    assert np.abs(ours[0].astype(int) - theirs[0]).mean() < 0.5


@needs_gst
def test_a_rotated_file_is_turned(tmp_path: Path) -> None:
    upright = encode(tmp_path / "upright.mp4", numbered(3))
    data = upright.read_bytes()
    # The matrix of the track header (tkhd), from unity to a quarter turn clockwise.
    unity = b"".join(n.to_bytes(4, "big") for n in (0x10000, 0, 0, 0, 0x10000, 0, 0, 0, 0x40000000))
    quarter = b"".join(n.to_bytes(4, "big") for n in (0, 0x10000, 0, 0xFFFF0000, 0, 0, 96 << 16, 0, 0x40000000))
    at = data.index(unity, data.index(b"tkhd"))
    turned = tmp_path / "turned.mp4"
    turned.write_bytes(data[:at] + quarter + data[at + 36 :])
    ours = every(of_file(turned))
    plain = every(of_file(upright))
    assert ours[0].shape == (192, 96, 3)
    assert np.abs(ours[0].astype(int) - np.rot90(plain[0], -1)).mean() < 1.0


@needs_gst
@needs_server
@pytest.mark.parametrize("codec", ["h264", "h265", "mjpeg"])
def test_numbered_pictures_over_rtsp_in_order_and_just_now(codec: Codec, tmp_path: Path) -> None:
    clip = encode(tmp_path / "clip.mp4", numbered(60))
    with RtspServer() as server:
        server.add(codec=codec, clip=clip, width=192, height=96, fps=25, gop=10)
        camera = gst_camera("cam", server.url())
        numbers, ages_s = [], []
        for frame in read(camera, 20):
            ages_s.append((time.monotonic_ns() - frame.t_capture_ns) / 1e9)
            numbers.append(read_number(frame.pixels.to_rgb()))
        camera.stop()
        camera.close()
    assert len(numbers) == 20
    assert all((b - a) % 60 == 1 for a, b in itertools.pairwise(numbers))
    assert all(0 <= age_s < 5 for age_s in ages_s)
    source = camera.source()
    assert (source.decoded, source.corrupt) == (20, 0)


@needs_gst
@needs_server
def test_another_size_in_the_middle_of_a_connection() -> None:
    with RtspServer() as server:
        server.add(width=320, height=240, fps=25, gop=5)
        camera = gst_camera("cam", server.url())
        assert read(camera, 3)[-1].pixels.width == 320
        server.resize(width=190, height=94)
        sizes = [(frame.pixels.width, frame.pixels.height) for frame in read(camera, 40)]
        camera.stop()
        camera.close()
    assert set(sizes) <= {(320, 240), (190, 94)}
    assert sizes[-1] == (190, 94)
    assert sizes == sorted(sizes, reverse=True)
    assert camera.effort().opened == 1


@needs_gst
@needs_server
def test_pictures_are_scaled_where_it_costs_nothing_and_stay_the_cameras() -> None:
    """With the generic chain and a scaler in the place of the Jetson's."""
    spec = InputSpec(104, 104)
    with RtspServer() as server:
        server.add(width=320, height=240, fps=25, gop=5)
        camera = gst_camera("cam", server.url(), chain=SOFTWARE_SCALED)
        frame = read(camera, 1)[0]
        assert (frame.pixels.width, frame.pixels.frame.width) == (320, 320)  # type: ignore[attr-defined]
        camera.expect([spec])
        frame = read(camera, 12)[-1]
        assert (frame.pixels.width, frame.pixels.height) == (320, 240)
        assert (frame.pixels.frame.width, frame.pixels.frame.height) == (104, 78)  # type: ignore[attr-defined]
        place = np.full(spec.shape, -1, np.float32)
        transform = frame.pixels.write_into(place, spec)
        assert (transform.src_width, transform.src_height, transform.resized_width) == (320, 240, 104)
        server.resize(width=640, height=160)
        seen = {
            (frame.pixels.width, frame.pixels.height): frame.pixels.frame.width  # type: ignore[attr-defined]
            for frame in read(camera, 40)
        }
        assert seen[(640, 160)] == 104
        camera.expect([])
        assert read(camera, 12)[-1].pixels.frame.width == 640  # type: ignore[attr-defined]
        camera.stop()
        camera.close()


@needs_gst
@needs_server
def test_a_scaled_picture_is_the_same_picture(tmp_path: Path) -> None:
    clip = encode(tmp_path / "clip.mp4", numbered(40, 640, 320))
    with RtspServer() as server:
        server.add(clip=clip, width=640, height=320, fps=25, gop=5)
        camera = gst_camera("cam", server.url(), chain=SOFTWARE_SCALED)
        camera.expect([InputSpec(256, 256)])
        frames = read(camera, 20)
        camera.stop()
        camera.close()
    assert (frames[-1].pixels.frame.width, frames[-1].pixels.width) == (256, 640)  # type: ignore[attr-defined]
    numbers = [read_number(frame.pixels.to_rgb()) for frame in frames]
    assert all(a is not None and b is not None and (b - a) % 40 == 1 for a, b in itertools.pairwise(numbers))


@needs_gst
def test_mjpeg_over_http_and_its_faults(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    jpegs = [image(rgb, "mjpeg", "yuvj420p") for rgb in numbered(20)]
    with HttpStreams(jpegs, fps=25) as server:
        server.require("me", "hush/@")
        camera = gst_camera("cam", server.url(user="me", password="hush/@"), stall_s=0.6)
        numbers = [read_number(frame.pixels.to_rgb()) for frame in read(camera, 8)]
        assert numbers == [number % 20 for number in range(numbers[0], numbers[0] + 8)]
        for fault, state in ((server.stall, "stalled"), (server.cut, "down")):
            reader = threading.Thread(target=lambda: read(camera, 30))
            reader.start()
            fault()
            wait_for_state(camera, state)
            server.resume()
            wait_until(lambda: camera.status().state == "up", 5, "up")
            reader.join()
        camera.stop()
        camera.close()
        refused = gst_camera("cam", server.url(user="me", password="hush"))
        reader = threading.Thread(target=refused.read)
        reader.start()
        wait_until(lambda: refused.status().state == "down", 5, "down")
        refused.stop()
        reader.join()
        refused.close()
    assert str(refused.status().reason).startswith("stopped")
    assert "user or password refused" in caplog.text
    assert "hush" not in caplog.text


# --- damage


@needs_gst
@pytest.mark.parametrize("codec", ["libx264", "libx265"])
def test_damage_is_dropped_up_to_the_next_key_frame(codec: str, tmp_path: Path) -> None:
    options = {
        "g": "10",
        "bf": "0",
        "sc_threshold": "0",
        "x265-params": "log-level=none:keyint=10:min-keyint=10:bframes=0:scenecut=0",
    }
    noise = np.random.default_rng(5).integers(-16, 17, (40, 96, 192, 1))
    noisy = [np.clip(rgb + more, 0, 255).astype(np.uint8) for rgb, more in zip(numbered(40), noise, strict=True)]
    clip = encode(tmp_path / "clip.mkv", noisy, codec=codec, options=options)
    intact = every(of_file(clip))
    damaged = tmp_path / "damaged.mkv"
    with av.open(str(clip)) as source, av.open(str(damaged), "w") as out:
        stream = out.add_stream_from_template(source.streams.video[0])
        for number, packet in enumerate(source.demux(video=0)):
            data = bytearray(packet)
            if number == 13:
                del data[len(data) // 2 :]
            if data:
                copy = av.Packet(bytes(data))
                copy.pts, copy.dts, copy.time_base = packet.pts, packet.dts, packet.time_base
                copy.is_keyframe, copy.stream = packet.is_keyframe, stream
                out.mux(copy)
    camera = of_file(damaged)
    shown = {read_number(picture): picture for picture in every(camera)}
    assert sorted(number for number in shown if number is not None) == [*range(13), *range(20, 40)]
    assert camera.source().corrupt == 7
    for number, picture in shown.items():
        assert number is not None
        assert np.abs(picture.astype(int) - intact[number]).max() == 0


@needs_gst
def test_a_jpeg_that_is_cut_off_is_dropped() -> None:
    jpegs = [image(rgb, "mjpeg", "yuvj420p") for rgb in numbered(4)]
    jpegs[2] = jpegs[2][: len(jpegs[2]) * 2 // 3]
    with HttpStreams(jpegs, fps=100) as server:
        camera = gst_camera("cam", server.url())
        numbers = [read_number(frame.pixels.to_rgb()) for frame in read(camera, 60)]
        camera.stop()
        camera.close()
    assert numbers == [0, 1, 3] * 20
    source = camera.source()
    assert (source.decoded, source.duplicate, camera.effort().opened) == (60, 0, 1)
    assert source.corrupt in (19, 20)


@needs_gst
def test_a_truncated_file_ends_early_and_a_file_of_nothing_is_down(tmp_path: Path) -> None:
    clip = encode(tmp_path / "clip.mkv", numbered(30))
    clip.write_bytes(clip.read_bytes()[: clip.stat().st_size // 2])
    assert 3 < len(every(of_file(clip))) < 30
    clip.write_bytes(b"\0" * 5000)
    camera = of_file(clip)
    reader = threading.Thread(target=camera.read)
    reader.start()
    wait_until(lambda: camera.status().state == "down", 5, "down")
    camera.stop()
    reader.join()
    camera.close()


# --- time


@needs_gst
@pytest.mark.parametrize("offset_s", [36_000, 0])
def test_wrong_presentation_times_move_no_capture_time(offset_s: int) -> None:
    source = f"videotestsrc is-live=true timestamp-offset={offset_s * 10**9} ! video/x-raw,framerate=50/1"
    camera = gst_camera("cam", f"gst:{source}")
    for frame in read(camera, 10):
        assert 0 <= time.monotonic_ns() - frame.t_capture_ns < 200_000_000
    camera.stop()
    camera.close()
    assert camera.source().decoded == 10


@needs_gst
def test_the_capture_time_is_when_a_picture_came_and_not_when_it_was_read() -> None:
    camera = gst_camera("cam", "gst:videotestsrc is-live=true ! video/x-raw,framerate=20/1")
    read(camera, 3)
    time.sleep(0.3)
    frame = read(camera, 1)[0]
    assert time.monotonic_ns() - frame.t_capture_ns > 150_000_000
    camera.stop()
    camera.close()


@needs_gst
@needs_server
@pytest.mark.parametrize("transport", ["udp", pytest.param("tcp", marks=pytest.mark.full)])
def test_with_udp_too_a_picture_is_captured_when_it_comes(transport: str) -> None:
    """Times out of a jitter buffer are late by what the first packets were early, 50 ms and more here."""
    with RtspServer() as server:
        server.add(width=320, height=240, fps=25, gop=10)
        camera = gst_camera("cam", server.url(), transport=transport)
        ages_ms = []
        read(camera, 3)
        for _ in range(9):
            frame = read(camera, 1)[0]
            ages_ms.append((time.monotonic_ns() - frame.t_capture_ns) / 1e6)
        assert 0 <= sorted(ages_ms)[4] < 20
        time.sleep(0.3)
        late = read(camera, 1)[0]
        assert 200 < (time.monotonic_ns() - late.t_capture_ns) / 1e6 < 400
        camera.stop()
        camera.close()


# --- what need not be decoded


class Capped(Alone):
    """An intake that keeps `fps` pictures a second of the media's own time."""

    def __init__(self, fps: float) -> None:
        super().__init__(SystemClock())
        self.cap = RateCap(fps)

    def early(self, pts_ns: int | None, t_packet_ns: int, skipped: int = 0) -> tuple[int, int]:
        return (0 if pts_ns is None else self.cap.early_ns(pts_ns)), self.cap.step_ns


def thinned(clip: Path, fps: float, read: bool = True) -> tuple[list[int], Capped]:
    """(the numbers of the pictures that the cap keeps, what was counted)."""
    intake, options = Capped(fps), CameraOptions("cam", f"file:{clip}")
    plan = plan_for(options, SOFTWARE, have_element, thread=f"t{next(_sessions)}x")
    session = GstSession(load(), plan, options, intake, SystemClock(), [])
    numbers = []
    for picture in session.pictures():
        assert picture.pts_ns is not None
        if intake.cap.wants(picture.pts_ns) and read:
            numbers.append(read_number(picture.pixels.to_rgb()))
    session.close()
    return numbers, intake


@needs_gst
@pytest.mark.parametrize("codec", ["libx264", "libx265"])
def test_at_a_low_cap_only_key_frames_are_decoded(codec: str, tmp_path: Path) -> None:
    options = {"g": "25", "bf": "0", "x265-params": "log-level=none:keyint=25:min-keyint=25:scenecut=0:bframes=0"}
    options |= {"x264-params": "scenecut=0", "preset": "ultrafast"}
    clip = encode(tmp_path / "clip.mkv", numbered(300, 320, 160), codec=codec, options=options)
    for fps in (25.0, 1.0):
        numbers, intake = thinned(clip, fps)
        corrupt, _, skipped = intake.ledger.damage()
        assert corrupt == 0
        if fps == 1.0:
            # The cap's own choice until the interval of key frames is known, then they alone.
            assert numbers[3:] == list(range(75, 300, 25))
            # Two intervals are watched first, and the gate is set when a picture comes out.
            assert 190 <= skipped <= 264
            assert intake.ledger.effort().saved_cpu_ns > 0
        else:
            assert numbers == list(range(300))
            assert skipped == 0


@needs_gst
@pytest.mark.full
def test_what_is_not_decoded_costs_nothing(tmp_path: Path) -> None:
    with av.open(str(CLIP)) as real:
        pictures = [
            frame.to_ndarray(format="rgb24").astype(np.uint8, copy=False)
            for frame in itertools.islice(real.decode(video=0), 250)
        ]
    options = {"g": "25", "bf": "0", "x264-params": "scenecut=0", "preset": "ultrafast"}
    clip = encode(tmp_path / "clip.mkv", pictures, options=options)
    every_one, keys_alone = (thinned(clip, fps, read=False)[1].ledger.effort().decode_cpu_ns for fps in (25.0, 1.0))
    # The first fifth is decoded whole, to learn how far apart key frames are.
    assert keys_alone < 0.45 * every_one


# --- pipelines of operators

WRONG = {
    "videotestsrc foo=1": r'wrong at character 14: no property "foo" in element "videotestsrc"',
    "videotestsrc ! ! identity": "wrong at character 16: syntax error",
    "videotestsrc ! audioconvert": r"wrong at character \d+: could not link",
    "rtspsrc user-pw=hush latency=x": r"wrong at character 22: could not set property .latency.",
    "rtspsrc user-pw=hush protocols=hush": r'could not set property "protocols" in element "rtspsrc" to "\*\*\*"',
}


@needs_gst
@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_pipeline_is_down_for_good_with_its_position(text: str) -> None:
    camera = gst_camera("cam", f"gst:{text}")
    assert camera.read() is None
    camera.close()
    assert camera.status().state == "down"
    reason = str(camera.status().reason)
    assert re.search(WRONG[text], reason)
    assert "hush" not in reason


@needs_gst
def test_a_missing_element_is_named_with_its_package_and_tried_again() -> None:
    for text, reason in (
        ("nosuchthing ! identity", "GStreamer has no element nosuchthing (install the plugin that brings it)"),
        ("nvarguscamerasrc", "GStreamer has no element nvarguscamerasrc (package nvidia-l4t-gstreamer)"),
    ):
        camera = gst_camera("cam", f"gst:{text}")
        reader = threading.Thread(target=camera.read)
        reader.start()
        wait_for_state(camera, "down")
        assert str(camera.status().reason).startswith(reason)
        assert reader.is_alive()
        camera.stop()
        reader.join()
        camera.close()


@needs_gst
@pytest.mark.parametrize(
    "text",
    [
        "videotestsrc is-live=true ! video/x-raw,width=190,height=94",
        "videotestsrc is-live=true ! video/x-raw,format=NV12,width=190,height=94 ! appsink name=sink",
        "videotestsrc is-live=true ! video/x-raw,format=I420_10LE,width=190,height=94",
        "videotestsrc is-live=true ! video/x-raw,width=190,height=94 ! appsink drop=true max-buffers=1",
    ],
)
def test_any_pipeline_gives_pictures(text: str) -> None:
    camera = gst_camera("cam", f"gst:{text}")
    pictures = [frame.pixels.to_rgb() for frame in read(camera, 3)]
    camera.stop()
    camera.close()
    assert [picture.shape for picture in pictures] == [(94, 190, 3)] * 3
    # The first two of SMPTE's bars: white and yellow.
    assert np.abs(pictures[-1][20, 10].astype(int) - (255, 255, 255)).max() < 6
    assert np.abs(pictures[-1][20, 38].astype(int) - (255, 255, 0)).max() < 16


# --- ends


@needs_gst
@needs_server
@pytest.mark.parametrize("count", [8, pytest.param(50, marks=pytest.mark.full)])
def test_opening_again_and_again_leaves_no_thread(count: int) -> None:
    levels = []
    with RtspServer() as server:
        server.add(width=160, height=120, fps=25, gop=5)
        for _ in range(count):
            camera = gst_camera("cam", server.url())
            assert len(read(camera, 1)) == 1
            camera.stop()
            camera.close()
            assert not any(thread.name == "gst-close" for thread in threading.enumerate())
            levels.append(tasks())
    # GLib keeps threads that are done for the next one who needs some, for a while.
    assert max(levels[count // 2 :]) <= max(levels[: count // 2]) + 2


# --- the Jetson


@needs_gst
def test_the_jetsons_pipelines_build_and_run_with_elements_of_its_names(tmp_path: Path) -> None:
    """Elements of ours under NVIDIA's names, in a process of their own: syntax, properties, and pictures through them.

    What NVIDIA's do is to be seen on a device.
    """
    clips = {}
    for name, codec, pix_fmt in (
        ("h264", "libx264", "yuv420p"),
        ("h265", "libx265", "yuv420p"),
        ("mjpeg", "mjpeg", "yuvj420p"),
    ):
        options = {"x265-params": "log-level=none"}
        clips[name] = str(encode(tmp_path / f"{name}.mp4", numbered(6), codec=codec, pix_fmt=pix_fmt, options=options))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, str(CHILD), json.dumps(clips)], capture_output=True, text=True, timeout=60, env=environment
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["decoder"] == "nvv4l2decoder"
    for name in clips:
        assert answer[name] == {
            "backend": "gstreamer (nvv4l2decoder)",
            "numbers": list(range(6)),
            "format": "nv12",
            "interpolation": 3,
            "corrupt": 0,
        }
    assert answer["csi"]["backend"] == "gstreamer (nvarguscamerasrc)"
    assert answer["csi"]["sensor"] == 1
    assert answer["csi"]["camera"] == [640, 360]
    assert answer["csi"]["scaled"] == [160, 90]
    assert answer["own"] == {"format": "nv12", "sensor": 2}
    assert answer["mjpeg=1"] == "mjpeg_decoder"
    assert answer["rtsp"] == ["h264", "h265", "mjpeg"]


@pytest.fixture(autouse=True)
def no_chatter(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """GLib prints what a program does wrong with it."""
    yield
    assert not re.search(r"CRITICAL|WARNING \*\*", capfd.readouterr().err)
