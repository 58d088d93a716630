"""Files, folders and HTTP streams through AvCamera: real clips, real sockets, real faults."""

from __future__ import annotations

import http.server
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from edge_runtime.backoff import Backoff
from edge_runtime.camera.av import ContainerSession
from edge_runtime.camera.av_decoding import Decoding
from edge_runtime.camera.media import AvCamera, open_images, probe
from edge_runtime.camera.options import CameraOptions
from edge_runtime.camera.session import INTERRUPTED, Alone
from edge_runtime.camera.synthetic import SyntheticPixels, read_number
from edge_runtime.clock import SystemClock
from edge_runtime.errors import CameraError
from edge_runtime.records.frames import Frame
from tests.camera.clips import HEIGHT, WIDTH, av_camera, encode, image, numbered, sound

GOP_10 = {"g": "10", "keyint_min": "10", "sc_threshold": "0", "preset": "ultrafast"}
WAIT_S = 20.0


def at_once() -> Backoff:
    return Backoff(base_s=0.01, limit_s=0.02)


def drain(camera: AvCamera, limit: int | None = None) -> list[Frame]:
    frames: list[Frame] = []
    try:
        while (limit is None or len(frames) < limit) and (frame := camera.read()) is not None:
            frames.append(frame)
    finally:
        camera.close()
    return frames


def numbers(frames: list[Frame]) -> list[int]:
    return [read_number(frame.pixels.to_rgb()) for frame in frames]


def steps_ms(frames: list[Frame]) -> list[float]:
    return [(b.t_capture_ns - a.t_capture_ns) / 1e6 for a, b in pairwise(frames)]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.005)


def stopped_after(camera: AvCamera, condition: Callable[[], bool]) -> list[Frame]:
    """Read in a thread until `condition`; stop() must end the read within half a second."""
    frames: list[Frame] = []

    def work() -> None:
        while (frame := camera.read()) is not None:
            frames.append(frame)
        camera.close()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        until(condition)
    finally:
        camera.stop()
        thread.join(0.5)
        assert not thread.is_alive()
    return frames


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """50 numbered pictures at 25 fps, with B-frames."""
    return encode(tmp_path_factory.mktemp("clips") / "clip.mp4", numbered(50), options={"bf": "2", "g": "10"})


@pytest.mark.parametrize("url", ["file:{}", "file://{}", "{}"])
def test_every_picture_once_in_order(clip: Path, url: str) -> None:
    camera = av_camera(name="gate", url=url.format(clip), pace="max", loop=False)
    assert camera.status().state == "starting"
    frames = drain(camera)
    assert numbers(frames) == list(range(50))
    assert [frame.frame_id for frame in frames] == list(range(50))
    assert all(step > 0 for step in steps_ms(frames))
    assert {(frame.camera, frame.pixels.width, frame.pixels.height) for frame in frames} == {("gate", WIDTH, HEIGHT)}
    assert (camera.status().state, camera.status().reason) == ("stopped", "end of file")
    assert camera.source().decoded == 50
    assert camera.read() is None


def test_mjpeg_too(tmp_path: Path) -> None:
    path = encode(tmp_path / "clip.avi", numbered(12), codec="mjpeg", pix_fmt="yuvj420p")
    assert numbers(drain(av_camera(name="a", url=str(path), pace="max", loop=False))) == list(range(12))


def test_realtime_frames_are_captured_when_due(tmp_path: Path) -> None:
    path = encode(tmp_path / "fast.mp4", numbered(60), rate=100)
    camera = av_camera(name="a", url=str(path), loop=False)
    frames: list[Frame] = []
    while (frame := camera.read()) is not None:
        assert time.monotonic_ns() >= frame.t_capture_ns
        frames.append(frame)
    camera.close()
    assert len(frames) == 60
    assert steps_ms(frames) == pytest.approx([10.0] * 59, abs=0.2)


def test_a_slow_reader_moves_the_schedule(clip: Path, caplog: pytest.LogCaptureFixture) -> None:
    camera = av_camera(name="a", url=str(clip), loop=False)
    assert camera.read()
    time.sleep(1.2)
    with caplog.at_level(logging.WARNING):
        late = camera.read()
    assert late
    assert time.monotonic_ns() - late.t_capture_ns < 0.2e9
    assert camera.reanchored == 1
    assert "behind" in caplog.text
    camera.close()


def test_the_cap_keeps_a_steady_share(tmp_path: Path) -> None:
    path = encode(tmp_path / "fast.mp4", numbered(100), rate=250)
    camera = av_camera(name="a", url=str(path), fps=150, loop=False)
    frames = drain(camera)
    source = camera.source()
    assert abs(len(frames) - 60) <= 1
    assert source.decoded == 100
    assert source.skipped_rate == 100 - len(frames)
    assert numbers(frames) == sorted(numbers(frames))


def test_a_loop_goes_on_counting(clip: Path) -> None:
    frames = drain(av_camera(name="a", url=str(clip), pace="max", loop=True), 120)
    assert numbers(frames) == [index % 50 for index in range(120)]
    assert [frame.frame_id for frame in frames] == list(range(120))


def test_a_paced_loop_keeps_its_distance_over_the_seam(tmp_path: Path) -> None:
    path = encode(tmp_path / "fast.mp4", numbered(8), rate=50)
    frames = drain(av_camera(name="a", url=str(path), loop=True), 20)
    assert steps_ms(frames) == pytest.approx([20.0] * 19, abs=0.5)


def test_stop_ends_a_waiting_read(tmp_path: Path) -> None:
    path = encode(tmp_path / "slow.mp4", numbered(3), rate=1)
    camera = av_camera(name="a", url=str(path))
    stopped_after(camera, lambda: camera.source().decoded == 1)
    assert camera.status().state == "stopped"


def test_times_that_jump_neither_wedge_nor_reorder(tmp_path: Path) -> None:
    times = [0, 40, 80, 37_600_000, 37_600_040, 37_600_080, 37_640_000]
    path = encode(tmp_path / "jump.mkv", numbered(7), codec="mjpeg", pix_fmt="yuvj420p", times_ms=times)
    frames = drain(av_camera(name="a", url=str(path), loop=False))
    assert numbers(frames) == list(range(7))
    assert sum(steps_ms(frames)) < 400


def test_a_raw_stream_without_times(tmp_path: Path) -> None:
    path = encode(tmp_path / "raw.h264", numbered(20), options=GOP_10)
    frames = drain(av_camera(name="a", url=str(path), loop=False))
    assert numbers(frames) == list(range(20))
    assert max(steps_ms(frames)) < 100


def test_nothing_before_the_first_key_frame(tmp_path: Path) -> None:
    raw = encode(tmp_path / "raw.h264", numbered(30), options=GOP_10 | {"bf": "0", "x264-params": "aud=1"}).read_bytes()
    units = raw.split(b"\x00\x00\x00\x01\x09")
    cut = tmp_path / "cut.h264"
    cut.write_bytes(b"".join(b"\x00\x00\x00\x01\x09" + unit for unit in units[4:]))
    camera = av_camera(name="a", url=str(cut), pace="max", loop=False)
    assert numbers(drain(camera)) == list(range(10, 30))
    assert camera.source().pre_key == 7


def test_damage_is_dropped_until_a_key_frame_and_decoding_goes_on(tmp_path: Path) -> None:
    pictures = numbered(60, 320, 240)
    noise = np.random.default_rng(1)
    for picture in pictures:
        picture[60:] = noise.integers(0, 256, picture[60:].shape)
    path = encode(tmp_path / "a.mp4", pictures, options=GOP_10 | {"bf": "0"})
    whole = {
        read_number(f.pixels.to_rgb()): f.pixels.to_rgb()
        for f in drain(av_camera(name="a", url=str(path), pace="max", loop=False))
    }
    data = bytearray(path.read_bytes())
    start, end = int(len(data) * 0.35), int(len(data) * 0.38)
    data[start:end] = random.Random(3).randbytes(end - start)
    path.write_bytes(data)
    camera = av_camera(name="a", url=str(path), pace="max", loop=False)
    frames = drain(camera)
    source = camera.source()
    assert source.corrupt > 0
    assert source.corrupt + len(frames) == 60
    assert len(frames) >= 35
    for frame in frames:
        rgb = frame.pixels.to_rgb()
        np.testing.assert_array_equal(rgb, whole[read_number(rgb)])


def test_a_cut_off_recording_gives_what_it_has(tmp_path: Path) -> None:
    path = encode(tmp_path / "a.ts", numbered(50), options=GOP_10)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    camera = av_camera(name="a", url=str(path), pace="max", loop=False)
    frames = drain(camera)
    assert 10 < len(frames) < 50
    assert camera.status().state == "stopped"


@pytest.mark.parametrize("kind", ["garbage", "empty", "cut", "missing", "fifo", "folder"])
def test_what_cannot_be_opened_is_down_with_a_reason_and_does_not_spin(tmp_path: Path, clip: Path, kind: str) -> None:
    path = tmp_path / "x.mp4"
    if kind == "garbage":
        path.write_bytes(random.Random(1).randbytes(100_000))
    elif kind == "empty":
        path.touch()
    elif kind == "cut":
        path.write_bytes(clip.read_bytes()[:2000])
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    camera = av_camera(name="a", url=str(path))
    assert stopped_after(camera, lambda: camera.status().state == "down") == []
    with pytest.raises(CameraError):
        probe(str(path))


def test_a_file_that_appears_is_taken(tmp_path: Path, clip: Path) -> None:
    path = tmp_path / "late.mp4"
    camera = av_camera(name="a", url=str(path), backoff=at_once())

    def up() -> bool:
        if camera.status().state == "down" and not path.exists():
            assert str(path) in (camera.status().reason or "")
            (tmp_path / "part").write_bytes(clip.read_bytes())
            (tmp_path / "part").rename(path)
        return camera.status().state == "up"

    assert stopped_after(camera, up)


def test_a_file_without_video_is_down_for_good(tmp_path: Path) -> None:
    path = sound(tmp_path / "sound.mp4")
    camera = av_camera(name="a", url=str(path))
    assert drain(camera) == []
    assert (camera.status().state, camera.status().reason) == ("down", "holds no video stream (name a video)")
    with pytest.raises(CameraError, match="no video") as caught:
        probe(str(path))
    assert caught.value.code == "no_video"


def test_a_loop_without_a_picture_backs_off(tmp_path: Path, clip: Path) -> None:
    data = clip.read_bytes()
    body = data.index(b"mdat") + 4
    end = data.index(b"moov") - 4
    path = tmp_path / "hollow.mp4"
    path.write_bytes(data[:body] + bytes([0xFF]) * (end - body) + data[end:])
    camera = av_camera(name="a", url=str(path), pace="max", loop=True)
    assert stopped_after(camera, lambda: camera.status().state == "down") == []
    assert camera.source().corrupt + camera.source().pre_key > 0


def test_a_folder_of_images(tmp_path: Path) -> None:
    for number, (width, height) in enumerate([(64, 48), (640, 480), (33, 17)]):
        (tmp_path / f"{number}.PNG").write_bytes(image(SyntheticPixels(number, width, height).to_rgb()))
    (tmp_path / "1a.jpg").write_bytes(b"\xff\xd8\xff no picture")
    (tmp_path / "notes.txt").write_text("not one")
    camera = av_camera(name="a", url=f"file:{tmp_path}", pace="max", loop=False)
    frames = drain(camera)
    assert numbers(frames) == [0, 1, 2]
    assert [(frame.pixels.width, frame.pixels.height) for frame in frames] == [(64, 48), (640, 480), (33, 17)]
    assert (camera.source().decoded, camera.source().corrupt) == (3, 1)
    assert probe(str(tmp_path)).frames == 4
    frames = drain(av_camera(name="a", url=str(tmp_path), fps=50, loop=True), 7)
    assert numbers(frames) == [0, 1, 2, 0, 1, 2, 0]
    assert steps_ms(frames) == pytest.approx([20.0] * 6)


@pytest.mark.parametrize("end", ["resume", "stop"])
def test_a_pause_does_not_wait_for_the_picture_in_hand(tmp_path: Path, end: str) -> None:
    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(image(SyntheticPixels(number, 64, 48).to_rgb()))
    camera = av_camera(name="a", url=str(tmp_path), fps=0.1)
    first = camera.read()
    assert first is not None
    frames: list[Frame | None] = []
    thread = threading.Thread(target=lambda: frames.append(camera.read()))
    thread.start()
    time.sleep(0.1)
    camera.pause()
    until(lambda: camera.status().state == "paused")
    assert frames == []
    getattr(camera, end)()
    thread.join(2)
    assert not thread.is_alive()
    if end == "resume":
        frame = frames[0]
        assert frame is not None
        assert numbers([frame]) == [1]
        assert first.t_capture_ns < frame.t_capture_ns <= time.monotonic_ns()
    else:
        assert frames == [None]
    camera.close()


def test_what_is_wrong_with_files_is_told_once_not_in_every_round(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "0.png").write_bytes(image(SyntheticPixels(0, 64, 48).to_rgb()))
    (tmp_path / "1.jpg").write_bytes(b"\xff\xd8\xff no picture")
    camera = av_camera(name="a", url=str(tmp_path), pace="max", loop=True)
    assert len(drain(camera, 5)) == 5
    assert camera.source().corrupt == 4
    assert [r.getMessage() for r in caplog.records if "damaged" in r.getMessage()] == [
        f"camera a: {tmp_path / '1.jpg'}: damaged picture: Invalid data found when processing input"
    ]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        OSError(5, "I/O error", "rtsp://op:secret@cam"),
    ],
)
def test_whatever_opening_raises_is_a_fault_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, clip: Path, error: Exception
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("edge_runtime.camera.av.av.open", fails)
    with pytest.raises(CameraError, match=r"cannot open: ") as caught:
        probe(str(clip))
    assert caught.value.retryable
    assert "secret" not in str(caught.value)


B_FRAMES = {"preset": "veryfast", "x264-params": "keyint=25:min-keyint=25:scenecut=0:bframes=3:b-adapt=0"}


@pytest.mark.full
def test_reordered_pictures_without_times_of_their_own_keep_their_pace(tmp_path: Path) -> None:
    """AVI knows no presentation times."""
    path = encode(tmp_path / "a.avi", numbered(100), options=B_FRAMES)
    camera = av_camera(name="a", url=str(path), pace="max", loop=False)
    assert numbers(drain(camera)) == list(range(100))
    assert (camera.source().corrupt, camera.source().duplicate) == (0, 0)
    camera = av_camera(name="a", url=str(path), fps=10, loop=False)
    frames = drain(camera)
    assert 39 <= len(frames) <= 44
    assert camera.source().corrupt == 0
    assert (frames[-1].t_capture_ns - frames[0].t_capture_ns) / 1e9 == pytest.approx(4, abs=0.6)


@pytest.mark.parametrize("seed", range(4))
def test_a_packet_with_a_wrong_time_is_counted_once(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    path = encode(tmp_path / "a.mp4", numbered(100), options=B_FRAMES)
    intake = Alone(SystemClock())
    pictures = 0
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_type = "NONE"
        decoding = Decoding(stream, intake, live=False)
        for packet in container.demux(stream):
            if packet.pts is not None and packet.time_base is not None and rng.random() < 0.08:
                packet.pts += int(rng.choice([-36_000, 36_000]) / packet.time_base)
            pictures += sum(1 for _ in decoding.feed(packet, 0))
        decoding.settle()
    assert (pictures, intake.ledger.counters().corrupt) == (100, 0)


def test_packets_of_streams_that_came_later_do_not_keep_it_from_stopping() -> None:
    class Container:
        def demux(self, _: object) -> Container:
            return self

        def __next__(self) -> object:
            raise IndexError

    class Told(Alone):
        packets = 0

        def arrived(self) -> None:
            self.packets += 1
            if self.packets > 3:
                raise CameraError("to stop", code=INTERRUPTED)

    session: Any = object.__new__(ContainerSession)
    session._container, session._stream, session._read_timeout_s = Container(), None, 1.0
    session._intake = Told(SystemClock())
    with pytest.raises(CameraError, match="to stop"):
        next(session._packets())


def test_open_images_for_evaluation(tmp_path: Path) -> None:
    good, bad = tmp_path / "g.png", tmp_path / "b.png"
    good.write_bytes(image(SyntheticPixels(3, 64, 48).to_rgb()))
    bad.write_bytes(b"no")
    images = open_images([good, bad])
    path, pixels = next(images)
    assert (path, read_number(pixels.to_rgb())) == (good, 3)
    with pytest.raises(CameraError) as caught:
        next(images)
    assert caught.value.where == str(bad)


def test_the_size_may_change_in_the_stream(tmp_path: Path) -> None:
    sizes = [(64, 48), (64, 48), (200, 120), (200, 120), (96, 96)]
    parts = [image(SyntheticPixels(n, w, h).to_rgb(), "mjpeg", "yuvj420p") for n, (w, h) in enumerate(sizes)]
    path = tmp_path / "sizes.mjpeg"
    path.write_bytes(b"".join(parts))
    frames = drain(av_camera(name="a", url=str(path), pace="max", loop=False))
    assert [(frame.pixels.width, frame.pixels.height) for frame in frames] == sizes
    assert numbers(frames) == list(range(5))


def test_probe(clip: Path) -> None:
    found = probe(f"file:{clip}")
    assert (found.width, found.height, found.fps, found.codec, found.frames) == (WIDTH, HEIGHT, 25.0, "h264", 50)


@pytest.mark.assets
@pytest.mark.parametrize(("name", "count"), [("vtest_h264.mp4", 795), ("bikes.mp4", 250)])
def test_real_clips(assets: Path, name: str, count: int) -> None:
    path = assets / "media" / name
    assert probe(str(path)).frames == count
    camera = av_camera(name="a", url=str(path), pace="max", loop=False)
    assert len(drain(camera)) == count
    assert camera.source().decoded == count
    assert camera.source().corrupt == 0


class Site:
    """A server on the loopback whose answers are a script: one entry per connection, the last one repeats."""

    def __init__(self) -> None:
        self.script: list[tuple[int, bytes, bool]] = []
        self.asked = 0
        self.release = threading.Event()
        site = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, body, stall = site.script[min(site.asked, len(site.script) - 1)]
                site.asked += 1
                self.send_response(status)
                self.send_header("Content-Type", "video/mp2t")
                if not stall:
                    self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                try:
                    self.wfile.write(body)
                    if stall:
                        site.release.wait(WAIT_S)
                except OSError:
                    pass

            def log_message(self, *args: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        self.url = f"http://admin:s3cret@127.0.0.1:{self._server.server_port}/live?token=s3cret"

    def close(self) -> None:
        self.release.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def site() -> Iterator[Site]:
    one = Site()
    yield one
    one.close()


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return encode(tmp_path_factory.mktemp("clips") / "a.ts", numbered(40), options=GOP_10).read_bytes()


def http_camera(site: Site) -> AvCamera:
    return av_camera(name="web", url=site.url, open_s=5.0, stall_s=0.4, backoff=at_once())


def test_http_is_live_and_reconnects_at_its_end(site: Site, stream: bytes) -> None:
    site.script = [(200, stream, False)]
    camera = http_camera(site)
    frames = drain(camera, 90)
    assert numbers(frames) == [index % 40 for index in range(90)]
    assert [frame.frame_id for frame in frames] == list(range(90))
    assert site.asked == 3
    assert all(step > 0 for step in steps_ms(frames))
    assert probe(site.url).width == WIDTH


def test_http_refusals_show_no_credentials(site: Site, stream: bytes, caplog: pytest.LogCaptureFixture) -> None:
    site.script = [(404, b"", False), (401, b"", False), (200, stream, False)]
    options = CameraOptions("web", site.url, open_s=5.0, stall_s=0.4)
    camera = AvCamera(options, backoff=at_once(), refused_s=0.05)
    reasons: set[str] = set()
    with caplog.at_level(logging.DEBUG):

        def delivered() -> bool:
            reasons.add(camera.status().reason or "")
            return camera.source().decoded > 0

        assert stopped_after(camera, delivered)
    assert site.asked >= 3
    assert any("404" in record.message for record in caplog.records)
    assert "s3cret" not in caplog.text + " ".join(reasons)
    site.script = [(404, b"", False)]
    with pytest.raises(CameraError) as caught:
        probe(site.url)
    assert "s3cret" not in str(caught.value)


def test_http_that_falls_silent_is_stalled_and_opened_again(site: Site, stream: bytes) -> None:
    site.script = [(200, stream, True), (404, b"", True)]
    camera = av_camera(name="web", url=site.url, open_s=5.0, stall_s=0.4, backoff=Backoff(base_s=0.4, limit_s=0.5))
    seen: list[tuple[str, str | None]] = []

    def stalled() -> bool:
        status = camera.status()
        seen.append((status.state, status.reason))
        return status.state == "stalled"

    frames = stopped_after(camera, stalled)
    assert 20 < len(frames) <= 40
    assert seen[-1] == ("stalled", "no data for 0.4 s")


def test_http_recovers_from_a_stall(site: Site, stream: bytes) -> None:
    site.script = [(200, stream[: len(stream) * 9 // 10], True), (200, stream, False)]
    frames = drain(http_camera(site), 50)
    assert numbers(frames)[-10:] == sorted(numbers(frames)[-10:])
    assert site.asked >= 2


def test_http_that_never_answers_is_down(site: Site) -> None:
    site.script = [(200, b"", True)]
    camera = av_camera(name="web", url=site.url, open_s=0.3, stall_s=0.3, backoff=at_once())
    stopped_after(camera, lambda: camera.status().reason == "no answer within 0.3 s")


def test_http_with_nobody_there(site: Site) -> None:
    camera = av_camera(name="web", url="http://127.0.0.1:9/x", backoff=at_once())
    stopped_after(camera, lambda: camera.status().state == "down")
    assert camera.read() is None
