"""Addresses of every kind, as FFmpeg is told to open them: what comes, what does not, and what is said of it."""

from __future__ import annotations

import contextlib
import errno
import gc
import http.server
import itertools
import logging
import os
import random
import re
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import av
import psutil
import pytest

from edge_runtime.backoff import Backoff
from edge_runtime.camera import gstreamer
from edge_runtime.camera.av import ContainerSession
from edge_runtime.camera.av_decoding import Decoding
from edge_runtime.camera.media import AvCamera, probe
from edge_runtime.camera.open import open_camera
from edge_runtime.camera.options import CameraOptions
from edge_runtime.camera.session import REFUSED
from edge_runtime.camera.streams import Stream, stream_of
from edge_runtime.camera.synthetic import SyntheticPixels
from edge_runtime.errors import CameraError
from tests.awaiting import wait_until
from tests.camera.clips import encode, image, numbered
from tests.camera.http_streams import Hls, HttpStreams
from tests.camera.relay import H264_KEY, H265_KEY, FaultRelay
from tests.camera.rtsp import Codec, RtspServer, gstreamer_missing

needs_rtsp = pytest.mark.skipif(gstreamer_missing() is not None, reason=str(gstreamer_missing()))

USER, PASSWORD = "op@r", "p@ss:w/o?r#d%é"
SECRETS = (USER, "op%40r", PASSWORD, "p%40ss", "w%2Fo")


class Quick(Backoff):
    """A back-off that is short, and counts how often it was asked."""

    def __init__(self, limit_s: float = 0.02) -> None:
        super().__init__(base_s=limit_s, limit_s=limit_s, rng=random.Random(1))
        self.asked = 0

    def next_delay_s(self, at_least_s: float = 0.0) -> float:
        self.asked += 1
        return super().next_delay_s(at_least_s)


class Reading:
    """A camera that is read on a thread, as a pipeline does."""

    def __init__(self, url: str, *, backoff: Backoff | None = None, refused_s: float = 0.05, **options: Any) -> None:
        options = {"stall_s": 1.0, "open_s": 3.0, **options}
        self.camera = AvCamera(CameraOptions("gate", url, **options), backoff=backoff or Quick(), refused_s=refused_s)
        self.url = url
        self.times_ns: list[int] = []
        self.late_ns: list[int] = []
        self.sizes: set[tuple[int, int]] = set()
        self.started_s = time.monotonic()
        self._thread = threading.Thread(target=self._read, name="cam-gate")

    def _read(self) -> None:
        while (frame := self.camera.read()) is not None:
            self.times_ns.append(frame.t_capture_ns)
            self.late_ns.append(time.monotonic_ns() - frame.t_capture_ns)
            self.sizes.add((frame.pixels.width, frame.pixels.height))
        self.camera.close()

    def __enter__(self) -> Reading:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self, within_s: float = 10.0) -> float:
        """Returns how long it took."""
        start_s = time.monotonic()
        self.camera.stop()
        self._thread.join(within_s)
        assert not self._thread.is_alive()
        return time.monotonic() - start_s

    def until(self, state: str, reason: str = "", within_s: float = 5.0) -> str:
        """Wait for a state whose reason matches; returns the reason."""
        seen: dict[tuple[str, str | None], None] = {}

        def shows() -> bool:
            status = self.camera.status()
            seen[status.state, status.reason] = None
            return status.state == state and re.search(reason, status.reason or "") is not None

        try:
            wait_until(shows, within_s)
        except AssertionError:
            raise AssertionError(f"not {state!r} for {reason!r} within {within_s} s, but {list(seen)}") from None
        return [reason or "" for _, reason in seen][-1]

    def frames(self, count: int, within_s: float = 5.0) -> None:
        wait_until(lambda: len(self.times_ns) >= count, within_s, f"{count} frames")


# --- options


def options_of(url: str, **changed: Any) -> Stream:
    return stream_of(CameraOptions("gate", url, **changed))


KINDS = {
    "http": options_of("http://127.0.0.1:9/x"),
    "https": options_of("https://127.0.0.1:9/x", ca_file="/ca.pem"),
    "rtsp": options_of("rtsp://127.0.0.1:9/x"),
    "rtsp over udp": options_of("rtsp://127.0.0.1:9/x", transport="udp"),
    "rtsps": options_of("rtsps://127.0.0.1:9/x", ca_file="/ca.pem"),
    "v4l2": options_of("v4l2:/dev/video77"),
}
# Any text is good for this one, and a test of its own shows that it is read.
ANY_TEXT = {"ca_file"}
# Without TLS nobody asks for it; with it this very test shows that it is known.
NOT_HERE = {("http", "tls_verify")}


@pytest.mark.parametrize(
    ("kind", "option"), [(kind, option) for kind, stream in KINDS.items() for option in stream.options]
)
def test_ffmpeg_knows_every_option(kind: str, option: str) -> None:
    """PyAV says nothing of options that nobody has read, but one that is read refuses what makes no sense."""
    if option in ANY_TEXT or (kind, option) in NOT_HERE:
        return
    stream = KINDS[kind]

    def opens_with(options: dict[str, str]) -> int:
        with pytest.raises(av.error.FFmpegError) as caught:
            av.open(stream.target, format=stream.format, options=options, timeout=(5, 5))
        return caught.value.errno or 0

    assert opens_with(stream.options) == (errno.ENOENT if kind == "v4l2" else errno.ECONNREFUSED)
    assert opens_with(stream.options | {option: "makes no sense"}) == errno.EINVAL


def test_this_ffmpeg_reads_devices() -> None:
    assert "video4linux2,v4l2" in av.formats_available


# --- RTSP


@pytest.fixture(scope="module")
def server() -> Iterator[RtspServer]:
    with RtspServer() as server:
        for codec in ("h264", "h265", "mjpeg"):
            server.add(codec, codec=codec)
        yield server


@needs_rtsp
@pytest.mark.parametrize(
    ("codec", "transport"), [("h264", "tcp"), ("h265", "tcp"), ("mjpeg", "tcp"), ("h264", "udp"), ("mjpeg", "udp")]
)
def test_rtsp_brings_its_first_picture_quickly(server: RtspServer, codec: str, transport: str) -> None:
    with Reading(server.url(codec), transport=transport) as reading:
        reading.frames(1)
        first_s = time.monotonic() - reading.started_s
        # FFmpeg's own defaults take 2 s with H.264, and pictures that have waited in its buffer come all at once
        assert first_s < 1.9
        reading.frames(10)
        assert reading.sizes == {(320, 240)}
        assert reading.camera.source().corrupt == 0
        assert reading.stop() < 0.5
        steps_s = [(b - a) / 1e9 for a, b in itertools.pairwise(reading.times_ns)]
        assert sum(steps_s) == pytest.approx(len(steps_s) / 15, abs=0.4)
    assert reading.camera.status().state == "stopped"
    assert (reading.camera.effort().backend, reading.camera.effort().opened) == ("pyav", 1)


@needs_rtsp
@pytest.mark.parametrize(("codec", "name"), [("h264", "h264"), ("h265", "hevc"), ("mjpeg", "mjpeg")])
def test_probe_of_rtsp(server: RtspServer, codec: str, name: str) -> None:
    found = probe(server.url(codec))
    assert (found.width, found.height, found.codec, found.frames) == (320, 240, name, None)


@needs_rtsp
@pytest.mark.parametrize(
    ("codec", "seconds"),
    [("h264", 1), *(pytest.param(codec, 20, marks=pytest.mark.full) for codec in ("h264", "h265"))],
)
def test_a_camera_with_rare_key_frames_starts_and_comes_up(server: RtspServer, codec: str, seconds: int) -> None:
    with FaultRelay(server.host, server.port) as relay:
        relay.drop_nals(H264_KEY if codec == "h264" else H265_KEY)
        with Reading(relay.url_of(server.url(codec)), stall_s=0.5, open_s=2.0) as reading:
            reading.until("starting", "waits for its first key frame", 3)
            end_s = time.monotonic() + seconds
            wait_until(lambda: reading.camera.status().state != "starting" or time.monotonic() > end_s, seconds + 1)
            assert (reading.camera.status().state, reading.times_ns) == ("starting", [])
            relay.ok()
            reading.until("up")
            assert reading.camera.effort().opened == 1


@needs_rtsp
@pytest.mark.parametrize(
    ("bframes", "codec", "gop", "cap"),
    [
        (0, "h264", 10, 2.5),
        pytest.param(2, "h264", 10, 2.5, marks=pytest.mark.full),
        *(
            pytest.param(n, codec, 25, 1, marks=pytest.mark.full)
            for n, codec in ((0, "h264"), (2, "h264"), (0, "h265"))
        ),
    ],
)
def test_a_capped_live_camera_decodes_what_it_shows_and_no_more(bframes: int, codec: Codec, gop: int, cap: int) -> None:
    with RtspServer() as server:
        server.add("cam", codec=codec, fps=25, gop=gop, bframes=bframes)
        with Reading(server.url(), fps=cap) as capped, Reading(server.url()) as whole:
            capped.until("up")
            # until two key intervals are known
            wait_until(lambda: capped.camera.source().skipped_codec > 2 * gop, 6 + 3 / cap, "skipping")
            before, shown, all_shown = capped.camera.source(), len(capped.times_ns), len(whole.times_ns)
            effort_ns, whole_ns = capped.camera.effort().decode_cpu_ns, whole.camera.effort().decode_cpu_ns
            whole.frames(all_shown + 4 * round(25 / cap), 8 / cap)
            after = capped.camera.source()
            assert abs(len(capped.times_ns) - shown - 4) <= 1
            assert after.decoded - before.decoded <= 6
            assert after.skipped_codec - before.skipped_codec >= 3 * (gop - 2)
            share = (capped.camera.effort().decode_cpu_ns - effort_ns) / (
                whole.camera.effort().decode_cpu_ns - whole_ns
            )
            print(f"{share:.1%} of decoding all")
            assert share <= 0.4
            assert capped.camera.status().state == "up"
            # nothing, and everything again
            capped.camera.set_cap(0)
            time.sleep(0.3)
            shown = len(capped.times_ns)
            time.sleep(1.2 * gop / 25)
            assert (len(capped.times_ns), capped.camera.status().state) == (shown, "up")
            capped.camera.set_base(None)
            capped.camera.set_cap(None)
            capped.frames(shown + 10, (gop + 10) / 25 + 0.3)
            whole.stop()
            capped.stop()
            for reading in (capped, whole):
                source = reading.camera.source()
                assert len(reading.times_ns) == source.decoded - source.skipped_rate - source.duplicate
                assert (source.corrupt, source.duplicate) == (0, 0)
                assert all(a < b for a, b in itertools.pairwise(reading.times_ns))


@needs_rtsp
@pytest.mark.parametrize(("bframes", "most_ms"), [(0, 25), pytest.param(2, 400, marks=pytest.mark.full)])
def test_capture_is_when_the_packet_came_and_nothing_waits_without_need(bframes: int, most_ms: int) -> None:
    with RtspServer() as server:
        server.add("cam", fps=10, gop=10, bframes=bframes)
        with Reading(server.url()) as reading:
            reading.frames(25, 8)
        late_ms = sorted(late_ns / 1e6 for late_ns in reading.late_ns[5:])
        middle_ms = late_ms[len(late_ms) // 2]
        # One picture late would be 100 ms. Reordered ones wait for two others, and their capture is not made younger.
        assert (100 if bframes else 0) <= middle_ms <= most_ms


@needs_rtsp
def test_faults_leave_nothing_that_only_the_collector_frees() -> None:
    def alive() -> int:
        return sum(isinstance(each, (ContainerSession, Decoding, CameraError)) for each in gc.get_objects())

    with RtspServer() as server, FaultRelay(server.host, server.port) as relay:
        server.add("cam", gop=5)
        gc.collect()
        before = alive()
        gc.disable()
        try:
            with Reading(relay.url_of(server.url()), stall_s=0.4) as reading:
                for faults, state in (
                    ([relay.freeze], "stalled"),
                    ([relay.reset], "down|starting|up"),
                    ([relay.refuse, relay.reset], "down"),
                ):
                    reading.until("up")
                    opened = reading.camera.effort().opened
                    for fault in faults:
                        fault()
                    wait_until(lambda state=state: reading.camera.status().state in state)  # type: ignore[misc]
                    time.sleep(0.2)
                    relay.ok()
                    wait_until(lambda opened=opened: reading.camera.effort().opened > opened)  # type: ignore[misc]
                reading.until("up")
            assert alive() == before
        finally:
            gc.enable()


@needs_rtsp
def test_a_password_of_special_characters(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with RtspServer() as server:
        server.add("cam", width=160, height=120)
        url = server.url("cam", USER, PASSWORD)
        for scheme in ("basic", "digest"):
            server.require(USER, PASSWORD, scheme=scheme)
            with Reading(url) as reading:
                reading.frames(1)
        with Reading(server.url("cam", USER, "wrong"), refused_s=0.3) as reading:
            reason = reading.until("down", "user or password refused.*401")
            assert "%40 for @" in reason
            before = server.accepted()
            time.sleep(0.25)
            assert server.accepted() == before  # a camera may lock the account
            server.require(USER, "wrong")
            reading.until("up")
        with pytest.raises(CameraError) as caught:
            probe(url, timeout_s=2)
        assert caught.value.code == REFUSED
    told = f"{caplog.text} {reading.camera.status()} {CameraOptions('gate', url)} {stream_of(CameraOptions('g', url))}"
    error: BaseException | None = caught.value
    while error is not None:
        told += f"{error!r} {error.__dict__} {error.__cause__!r}"
        error = error.__context__
    assert not [secret for secret in SECRETS if secret in told]


@needs_rtsp
def test_no_such_stream(server: RtspServer) -> None:
    with Reading(server.url("nowhere")) as reading:
        assert "manual" in reading.until("down", "nothing at this path: .*404")
        server.add("nowhere", width=160, height=120)
        reading.until("up")
        server.remove("nowhere")
        reading.until("down", "404")


@needs_rtsp
def test_tls_is_verified_with_a_ca_file_and_taken_as_it_is_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with RtspServer(tls=True) as server, RtspServer(tls=True) as other:
        server.add("cam", width=160, height=120)
        ours, theirs = tmp_path / "ours.pem", tmp_path / "theirs.pem"
        for file, its in ((ours, server), (theirs, other)):
            assert its._certificate is not None
            file.write_bytes(its._certificate.read_bytes())
        with Reading(server.url()) as reading:
            reading.frames(2)
            assert caplog.text.count("its certificate is not verified") == 1
        with Reading(server.url(), ca_file=str(ours)) as reading:
            reading.frames(2)
        with Reading(server.url(), ca_file=str(theirs)) as reading:
            assert "ca_file" in reading.until("down", "no TLS connection")
        with Reading(server.url(), ca_file=str(tmp_path / "none.pem")) as reading:
            reading.until("down", "no TLS connection")
        assert caplog.text.count("its certificate is not verified") == 1
        with Reading(server.url().replace("rtsps:", "rtsp:")) as reading:
            assert "rtsps://" in reading.until("down")
    with HttpStreams() as plain, Reading(f"rtsps://127.0.0.1:{plain.port}/x") as reading:
        assert "rtsp://" in reading.until("down", "no TLS connection")


class ScriptedRtsp:
    """Answers RTSP requests with what a test wants, and sends no picture."""

    def __init__(self, sdp: str = "", describe: bytes | None = None) -> None:
        scripted = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                scripted.connections += 1
                while True:
                    request = b""
                    while not request.endswith(b"\r\n\r\n"):
                        if not (line := self.rfile.readline()):
                            return
                        request += line
                    method = request.split(b" ")[0]
                    number = re.search(rb"CSeq: *(\d+)", request)
                    head = b"RTSP/1.0 200 OK\r\nCSeq: " + (number[1] if number else b"0") + b"\r\n"
                    body = b""
                    if method == b"DESCRIBE":
                        if describe is not None:
                            self.wfile.write(describe)
                            option = b"\x01\0\0\0\0\0\0\0"
                            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, option)
                            return
                        body = sdp.encode()
                        head += b"Content-Type: application/sdp\r\nContent-Length: %d\r\n" % len(body)
                    elif method == b"SETUP":
                        transport = re.search(rb"Transport: *([^\r]+)", request)
                        assert transport is not None
                        ports = b";server_port=50000-50001" if b"client_port" in transport[1] else b""
                        head += b"Session: 1\r\nTransport: " + transport[1] + ports + b"\r\n"
                    self.wfile.write(head + b"\r\n" + body)

        self.connections = 0
        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = False
        self.url = f"rtsp://127.0.0.1:{self._server.server_address[1]}/cam"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), name="scripted-rtsp")

    def __enter__(self) -> ScriptedRtsp:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def sdp(media: str) -> str:
    return f"v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\ns=x\r\nc=IN IP4 0.0.0.0\r\nt=0 0\r\n{media}a=control:trackID=0\r\n"


H264_SDP = sdp("m=video 0 RTP/AVP 96\r\na=rtpmap:96 H264/90000\r\n")


def test_udp_that_brings_nothing_says_so() -> None:
    with ScriptedRtsp(H264_SDP) as server, Reading(server.url, transport="udp", open_s=0.6) as reading:
        assert 'transport = "tcp"' in reading.until("down", "no data over UDP, within 0.6 s", 1.1)


def test_a_stream_that_plays_and_sends_nothing() -> None:
    with ScriptedRtsp(H264_SDP) as server, Reading(server.url, open_s=0.6) as reading:
        reading.until("down", "no answer within 0.6 s", 1.1)


def test_a_camera_without_video() -> None:
    audio = sdp("m=audio 0 RTP/AVP 0\r\na=rtpmap:0 PCMU/8000\r\n")
    with ScriptedRtsp(audio) as server, Reading(server.url, open_s=0.6) as reading:
        reading.until("down", "holds no video stream", 2)
        wait_until(lambda: server.connections >= 2, what="another try")


# --- addresses where nobody is


@contextlib.contextmanager
def listening(answer: Callable[[socket.socket], None] | None, backlog: int = 16) -> Iterator[int]:
    """A port whose connections are accepted, and given to `answer` on a thread; never accepted where that is None."""
    ended = threading.Event()
    threads: list[threading.Thread] = []
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(backlog)
        listener.settimeout(0.02)

        def serve(client: socket.socket) -> None:
            with client, contextlib.suppress(OSError):
                assert answer is not None
                answer(client)
                ended.wait()

        def accept() -> None:
            while not ended.is_set():
                with contextlib.suppress(TimeoutError):
                    client, _ = listener.accept()
                    threads.append(threading.Thread(target=serve, args=(client,), name="answers"))
                    threads[-1].start()

        if answer is not None:
            threads.append(threading.Thread(target=accept, name="accepts"))
            threads[0].start()
        try:
            yield listener.getsockname()[1]
        finally:
            ended.set()
            for thread in threads:
                thread.join()


def silent(_client: socket.socket) -> None:
    """Nothing."""


def trickled(client: socket.socket) -> None:
    """A header that never ends, a byte at a time."""
    client.settimeout(5)
    client.recv(4096)
    for byte in itertools.cycle(b"RTSP/1.0 200 OK\r\nX: "):
        client.sendall(bytes([byte]))
        time.sleep(0.1)


@pytest.mark.parametrize("host", ["dead", "silent", "trickle"])
def test_a_host_that_does_not_answer_is_down_in_time(host: str) -> None:
    """`dead` drops what comes, as one that is switched off: its queue of connections is full."""
    with contextlib.ExitStack() as stack:
        answers = {"dead": None, "silent": silent, "trickle": trickled}[host]
        port = stack.enter_context(listening(answers, backlog=0 if host == "dead" else 16))
        if host == "dead":
            for _ in range(2):
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(("127.0.0.1", port))
        url = f"://admin:s3cret@127.0.0.1:{port}/live?token=s3cret"
        all_ = [
            stack.enter_context(Reading(scheme + url, open_s=0.6, backoff=Quick(5.0)))
            for scheme in ("rtsp", "http", "https", "rtsps")
        ]
        wait_until(lambda: all(reading.camera.status().state == "down" for reading in all_), 1.1)
        for reading in all_:
            assert "s3cret" not in (reading.camera.status().reason or "")
            # A record of TLS that is none is noticed at once.
            at_once = "|no TLS connection" if host == "trickle" and reading.url.startswith(("https", "rtsps")) else ""
            assert re.match(f"no answer within 0.6 s{at_once}", reading.camera.status().reason or "")
        for reading in all_:
            reading.camera.stop()
            assert reading.stop() < 2


@pytest.mark.parametrize("scheme", ["rtsp", "http"])
def test_a_host_without_an_address(scheme: str) -> None:
    with Reading(f"{scheme}://admin:s3cret@no-such-host.invalid/x") as reading:
        assert "s3cret" not in reading.until("down", "its host name cannot be resolved: .+ \\(check the name")


@pytest.mark.parametrize("scheme", ["rtsp", "rtsps", "http"])
def test_a_port_where_nobody_listens(scheme: str) -> None:
    with Reading(f"{scheme}://127.0.0.1:9/x") as reading:
        reading.until("down", "cannot open: Connection refused \\(check host and port")


def test_many_dead_cameras_do_not_delay_a_good_one(tmp_path: Path) -> None:
    jpeg = image(SyntheticPixels(1, 64, 48).to_rgb(), "mjpeg", "yuvj420p")

    def first_s(url: str) -> float:
        with Reading(url) as reading:
            reading.frames(1)
            return time.monotonic() - reading.started_s

    with (
        HttpStreams([jpeg], fps=25) as server,
        listening(silent, 64) as port,
        contextlib.ExitStack() as all_,
    ):
        alone_s = min(first_s(server.url()) for _ in range(3))
        urls = [f"{scheme}://127.0.0.1:{port}/x" for scheme in ["rtsp", "http"] * 16]
        dead_ones = [all_.enter_context(Reading(url, open_s=1.5)) for url in urls]
        assert min(first_s(server.url()) for _ in range(3)) < alone_s + 0.3
        for reading in dead_ones:
            reading.camera.stop()


# --- HTTP


@pytest.fixture(scope="module")
def jpegs() -> list[bytes]:
    return [image(picture, "mjpeg", "yuvj420p") for picture in numbered(20)]


def test_mjpeg_over_http(jpegs: list[bytes]) -> None:
    with HttpStreams(jpegs, fps=20) as server:
        server.require(USER, PASSWORD)
        with Reading(server.url("/cam.mjpg", USER, PASSWORD), stall_s=0.5) as reading:
            reading.frames(20)
            steps_s = [(b - a) / 1e9 for a, b in itertools.pairwise(reading.times_ns)]
            assert sum(steps_s) / len(steps_s) == pytest.approx(1 / 20, rel=0.2)
            server.stall()
            reading.until("stalled", "no data for 0.5 s")
            server.resume()
            reading.until("up")
            server.cut()
            reading.until("down", "closed the stream|reading failed")
            reading.until("up")
            server.require(USER, "another")
            server.cut()
            reading.until("down", "user or password refused.*401")
        server.require(None)
        found = probe(server.url())
        assert (found.width, found.height, found.fps, found.codec) == (192, 96, None, "mjpeg")


@pytest.fixture(scope="module")
def hls(tmp_path_factory: pytest.TempPathFactory) -> Hls:
    folder = tmp_path_factory.mktemp("hls")
    clip = encode(folder / "clip.mp4", numbered(100), rate=10)
    return Hls(clip, folder / "parts", pictures=100)


def test_hls_plays_at_its_pace_and_not_in_bursts(hls: Hls) -> None:
    with HttpStreams(hls=hls) as server, Reading(server.url("/live.m3u8"), stall_s=1.0) as reading:
        reading.frames(15, 10)
        steps_s = [(b - a) / 1e9 for a, b in itertools.pairwise(reading.times_ns[3:])]
        assert sum(steps_s) / len(steps_s) == pytest.approx(0.1, rel=0.2)
        assert max(steps_s) < 0.5


@pytest.mark.full
def test_hls_that_stands_still_is_not_shown_again(hls: Hls) -> None:
    with HttpStreams(hls=hls) as server, Reading(server.url("/live.m3u8"), stall_s=1.0) as reading:
        reading.frames(3)
        server.hold_playlist()
        reading.until("stalled", "no data for 1 s", 9)
        # Opened again, the playlist has the same segments: nothing of them is shown twice.
        count, opened = len(reading.times_ns), reading.camera.effort().opened
        wait_until(lambda: reading.camera.effort().opened >= opened + 1, what="another try")
        wait_until(lambda: reading.camera.source().duplicate > 0, what="old pictures")
        assert len(reading.times_ns) == count
        server.release_playlist()
        reading.until("up")


def redirecting(location: str, body: bytes = b"") -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if body else 302)
            if not body:
                self.send_header("Location", location)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


@contextlib.contextmanager
def site(handler: type[http.server.BaseHTTPRequestHandler]) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("scheme", ["file", "concat", "subfile", "rtsp"])
@pytest.mark.parametrize("way", ["redirect", "playlist"])
def test_a_server_cannot_send_it_to_files_and_other_protocols(tmp_path: Path, scheme: str, way: str) -> None:
    clip = encode(tmp_path / "secret.ts", numbered(30), options={"g": "10"})
    with av.open(str(clip)) as container:
        assert sum(1 for _ in container.decode(video=0)) == 30
    spied: list[socket.socket] = []
    with listening(spied.append) as port:
        location = {
            "file": f"file://{clip}",
            "concat": f"concat:{clip}|{clip}",
            "subfile": f"subfile,,start,0,end,{clip.stat().st_size},,:{clip}",
            "rtsp": f"rtsp://127.0.0.1:{port}/x",
        }[scheme]
        playlist = f"#EXTM3U\n#EXT-X-TARGETDURATION:3\n#EXTINF:2.0,\n{location}\n#EXT-X-ENDLIST\n"
        handler = redirecting(location, playlist.encode() if way == "playlist" else b"")
        with site(handler) as url, Reading(f"{url}/live.m3u8", open_s=1.0, stall_s=0.5) as reading:
            reading.until("down", "", 2)
            assert reading.times_ns == []
        assert spied == []


@pytest.mark.full
def test_a_stream_that_is_entered_long_before_a_key_frame(tmp_path: Path) -> None:
    """MPEG-TS has no description: what it is comes with the key frame, long after FFmpeg has stopped analysing."""
    clip = tmp_path / "a.ts"
    options = {"g": "60", "keyint_min": "60", "sc_threshold": "0", "bf": "0", "preset": "ultrafast"}
    encode(clip, numbered(120), rate=10, options=options)
    with av.open(str(clip)) as container:
        ends = [packet.pos for packet in container.demux(video=0) if packet.pos is not None]
    data = clip.read_bytes()
    parts = [data[start:end] for start, end in itertools.pairwise(ends[1:])]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "video/mp2t")
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(data[: 3 * 188])
                for part in parts:
                    self.wfile.write(part)
                    time.sleep(0.03)

        def log_message(self, *_: object) -> None:
            pass

    with site(Handler) as url, Reading(url, stall_s=0.5) as reading:
        reading.until("starting", "waits for its first key frame")
        reading.until("up")
        assert reading.camera.effort().opened == 1
        assert reading.camera.source().pre_key + reading.camera.source().corrupt >= 40


# --- devices


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        ("/dev/video77", r"No such file or directory \(is it plugged in"),
        ("/dev/null", r"\(it is no video device"),
        ("/etc/passwd", r"\(it is no video device"),
    ],
)
def test_a_device_that_is_none(device: str, reason: str) -> None:
    with Reading(f"v4l2:{device}") as reading:
        reading.until("down", f"cannot open: .*{reason}")
    with pytest.raises(CameraError, match="cannot open"):
        probe(f"v4l2:{device}")


@pytest.mark.parametrize(
    ("number", "remedy"),
    [(errno.EBUSY, "another program"), (errno.EACCES, "group video"), (errno.ENODEV, "plugged in")],
)
def test_what_to_do_about_a_device(number: int, remedy: str) -> None:
    error = KINDS["v4l2"].fault(number, os.strerror(number))
    assert (error.retryable, remedy in str(error), os.strerror(number) in error.message) == (True, True, True)


# --- failing for long


def rss_kib() -> int:
    return int(psutil.Process().memory_info().rss) // 1024


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def dead(stack: contextlib.ExitStack, kind: str) -> str:
    if kind == "refused":
        return "rtsp://admin:s3cret@127.0.0.1:9/x"
    if kind == "404":
        return stack.enter_context(HttpStreams()).url("/nowhere")
    return stack.enter_context(ScriptedRtsp(describe=b"RTSP/1.0 200 OK\r\nCSeq: 2\r\nContent-")).url


@pytest.mark.parametrize("kind", ["refused", "404", "reset in DESCRIBE"])
@pytest.mark.parametrize("times", [60, pytest.param(1000, marks=[pytest.mark.full, pytest.mark.timeout(300)])])
def test_failing_to_open_costs_nothing(kind: str, times: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    backoff = Quick(0.002)
    with contextlib.ExitStack() as stack:
        url = dead(stack, kind)
        with Reading(url, backoff=backoff) as reading:
            wait_until(lambda: backoff.asked >= times // 2, 60, "half of the tries")
            before_kib, files = rss_kib(), descriptors()
            wait_until(lambda: backoff.asked >= times, 60, "all tries")
            assert rss_kib() - before_kib < 1024
            assert descriptors() - files < 8  # one try may be under way
            assert reading.camera.status().state == "down"
    lines = [record for record in caplog.records if record.name.startswith("edge_runtime.camera")]
    assert len(lines) == 1, "a line per change of state"
    assert "s3cret" not in caplog.text


# --- who reads it


@pytest.mark.parametrize("backend", ["auto", "pyav"])
@pytest.mark.parametrize("url", ["rtsp://cam/1", "https://cam/x", "v4l2:/dev/video0", "file:/clip.mp4"])
def test_pyav_reads_what_it_can_where_there_is_no_hardware(
    monkeypatch: pytest.MonkeyPatch, url: str, backend: Any
) -> None:
    monkeypatch.setattr(gstreamer, "hardware_decoder", lambda: None)
    assert type(open_camera(CameraOptions("gate", url, backend=backend))) is AvCamera


@pytest.mark.parametrize(
    ("url", "backend"),
    [("csi:0", "auto"), ("gst:videotestsrc", "pyav"), ("rtsp://cam/1", "gstreamer"), ("v4l2:/dev/video0", "gstreamer")],
)
def test_gstreamer_reads_what_only_it_can_and_what_it_is_asked_to(url: str, backend: Any) -> None:
    assert type(open_camera(CameraOptions("gate", url, backend=backend))) is gstreamer.GstCamera


def test_hardware_is_used_where_every_element_is_there_and_else_the_log_says_why_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gstreamer, "hardware_decoder", lambda: "nvv4l2decoder")
    monkeypatch.setattr(gstreamer, "have_element", lambda _: True)
    url = "rtsp://admin:s3cret@cam/1"
    assert type(open_camera(CameraOptions("gate", url))) is gstreamer.GstCamera
    assert type(open_camera(CameraOptions("gate", "http://cam/live.m3u8"))) is AvCamera  # it reads no HLS
    assert type(open_camera(CameraOptions("gate", "file:/clip.mp4"))) is AvCamera
    assert type(open_camera(CameraOptions("gate", url, backend="pyav"))) is AvCamera
    caplog.clear()
    monkeypatch.setattr(gstreamer, "have_element", lambda element: element != "rtspsrc")
    assert type(open_camera(CameraOptions("gate", url))) is AvCamera
    assert re.search("camera gate: read by PyAV, not decoded by nvv4l2decoder: .*no element rtspsrc", caplog.text)
    assert "s3cret" not in caplog.text
