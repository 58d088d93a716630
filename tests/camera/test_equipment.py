"""The cameras and faults that other tests use: do they do what they say?"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import av
import av.error
import pytest

from edge_runtime.camera.synthetic import SyntheticPixels, read_number
from tests.awaiting import wait_until
from tests.camera.clips import encode, image, numbered
from tests.camera.http_streams import Hls, HttpStreams, SegmentType
from tests.camera.relay import H264_KEY, H264_PARAMETERS, H265_KEY, H265_PARAMETERS, FaultRelay, RtpPacket
from tests.camera.rtsp import Codec, RtspServer, gstreamer_missing

# Whether it does what it says shows in every test that uses it; the details are looked at with `full`.
pytestmark = pytest.mark.full
NEEDS_GSTREAMER = pytest.mark.skipif(gstreamer_missing() is not None, reason=str(gstreamer_missing()))
OPTIONS = {"rtsp_transport": "tcp", "tls_verify": "0"}
LOSSLESS = {"qp": "0", "preset": "ultrafast"}


class Watch:
    """A stream that is open, read with `av` itself."""

    def __init__(self, url: str, read_s: float = 5.0) -> None:
        self._container: Any = av.open(url, options=OPTIONS, timeout=(5.0, read_s))
        self.stream = self._container.streams.video[0]
        self.codec: str = self.stream.codec_context.name
        self._packets: Iterator[Any] = self._container.demux(self.stream)

    def packet(self) -> Any:
        """The next one; ends in StopIteration or an error of av's."""
        packet = next(self._packets)
        if packet.size == 0:
            raise StopIteration
        return packet

    def frames(self, count: int) -> list[Any]:
        """So many pictures; whatever cannot be decoded is passed over."""
        frames: list[Any] = []
        while len(frames) < count:
            with contextlib.suppress(av.error.InvalidDataError):
                frames += self.packet().decode()
        return frames[:count]

    def end(self) -> BaseException:
        """Read until it ends."""
        try:
            while True:
                self.packet()
        except (StopIteration, av.error.FFmpegError) as error:
            return error

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self._container.close()


@pytest.fixture(scope="module")
def server() -> Iterator[RtspServer]:
    with RtspServer() as server:
        server.add("cam", fps=50, gop=10)
        server.add("h265", codec="h265", fps=50, gop=10)
        server.add("mjpeg", codec="mjpeg", fps=50)
        server.add("sdp", fps=50, gop=10, inband_headers=False)
        server.add("sdp265", codec="h265", fps=50, gop=10, inband_headers=False)
        yield server


@pytest.fixture
def relay(server: RtspServer) -> Iterator[FaultRelay]:
    with FaultRelay(server.host, server.port) as relay:
        yield relay


@NEEDS_GSTREAMER
@pytest.mark.parametrize(("mount", "codec"), [("cam", "h264"), ("h265", "hevc"), ("mjpeg", "mjpeg"), ("sdp", "h264")])
@pytest.mark.parametrize("relayed", [False, True])
def test_streams_of_every_codec_come_as_they_are(
    server: RtspServer, relay: FaultRelay, mount: str, codec: str, relayed: bool
) -> None:
    url = relay.url_of(server.url(mount)) if relayed else server.url(mount)
    with Watch(url) as watch:
        frames = watch.frames(12)
        assert watch.codec == codec
        assert server.clients() == 1
        assert relay.connections == int(relayed)
    assert {(frame.width, frame.height) for frame in frames} == {(320, 240)}
    assert len({bytes(frame.planes[0]) for frame in frames}) == 12
    wait_until(lambda: server.clients() == 0)


@NEEDS_GSTREAMER
@pytest.mark.parametrize("codec", ["h264", "h265"])
def test_b_frames(server: RtspServer, codec: Codec) -> None:
    server.add("b", codec=codec, fps=50, gop=12, bframes=2)
    with Watch(server.url("b")) as watch:
        kinds = "".join("?IPB"[int(frame.pict_type)] for frame in watch.frames(12))
    assert "IBBPBB" in kinds


@NEEDS_GSTREAMER
def test_a_clip_comes_whole_in_order_again_and_again(server: RtspServer, tmp_path: Path) -> None:
    clip = encode(tmp_path / "clip.mp4", numbered(10), options=LOSSLESS)
    server.add("clip", clip=clip, width=192, height=96, fps=50)
    with Watch(server.url("clip")) as watch:
        frames = watch.frames(25)
    assert [read_number(frame.to_ndarray(format="rgb24")) for frame in frames] == [at % 10 for at in range(25)]


@NEEDS_GSTREAMER
@pytest.mark.parametrize("scheme", ["digest", "basic"])
def test_passwords(server: RtspServer, scheme: Literal["digest", "basic"]) -> None:
    try:
        server.require("vi@ewer", "p@ss/word", scheme=scheme)
        with Watch(server.url(user="vi@ewer", password="p@ss/word")) as watch:
            assert watch.frames(1)
        for url in (server.url(), server.url(user="vi@ewer", password="wrong"), server.url(user="x", password="p@ss")):
            with pytest.raises(av.error.HTTPUnauthorizedError):
                Watch(url)
    finally:
        server.require(None)
    with Watch(server.url()) as watch:
        assert watch.frames(1)


@NEEDS_GSTREAMER
def test_tls_with_a_password() -> None:
    with RtspServer(tls=True) as server:
        server.add(fps=50)
        server.require("viewer", "secret")
        url = server.url(user="viewer", password="secret")
        assert url.startswith("rtsps://")
        with FaultRelay(server.host, server.port) as relay, Watch(relay.url_of(url)) as watch:
            assert watch.frames(2)


@NEEDS_GSTREAMER
def test_mounts_are_replaced_resized_and_removed(server: RtspServer) -> None:
    server.add("other", fps=50)
    with Watch(server.url("other")) as watch:
        assert watch.frames(1)[0].width == 320
        server.replace("other", width=160, codec="h265")
        assert isinstance(watch.end(), (StopIteration, av.error.FFmpegError))
    with Watch(server.url("other")) as watch:
        assert (watch.frames(1)[0].width, watch.codec) == (160, "hevc")
        server.resize("other", width=200, height=120)
        while (frame := watch.frames(1)[0]).width != 200:
            pass
        assert (frame.width, frame.height) == (200, 120)
    assert server.plays("other") == 2
    server.remove("other")
    with pytest.raises(av.error.HTTPNotFoundError):
        Watch(server.url("other"))


@NEEDS_GSTREAMER
def test_killed_frozen_and_restarted() -> None:
    with RtspServer() as server:
        server.add(fps=50)
        server.require("viewer", "secret")
        url, port = server.url(user="viewer", password="secret"), server.port
        with Watch(url) as watch:
            watch.frames(1)
            server.kill()
            watch.end()
        with pytest.raises(av.error.ConnectionRefusedError):
            Watch(url)
        server.restart()
        assert (server.port, server.clients()) == (port, 0)
        with Watch(url, read_s=0.3) as watch:
            watch.frames(1)
            server.freeze()
            with pytest.raises(RuntimeError, match="frozen"):
                server.clients()
            assert isinstance(watch.end(), (StopIteration, av.error.ExitError))
            server.thaw()
        with Watch(url) as watch:
            watch.frames(1)
            server.stop()
            watch.end()


@NEEDS_GSTREAMER
def test_what_the_server_refuses_is_an_error_here(server: RtspServer, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="codec 'av1'"):
        server.add("bad", codec="av1")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="no pictures"):
        server.add("bad", clip=tmp_path / "absent.mp4")


def test_without_gstreamer_ci_fails_and_others_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.camera import rtsp

    monkeypatch.setattr(rtsp, "_missing", lambda: "no gi")
    monkeypatch.delenv("CI", raising=False)
    assert gstreamer_missing() == "no gi"
    monkeypatch.setenv("CI", "true")
    assert gstreamer_missing() is None
    with pytest.raises(RuntimeError, match="no gi"):
        RtspServer()


# The relay.


@NEEDS_GSTREAMER
def test_refused_reset_and_back(server: RtspServer, relay: FaultRelay) -> None:
    url = relay.url_of(server.url())
    with Watch(url) as watch:
        relay.refuse()
        with pytest.raises(av.error.ConnectionRefusedError):
            Watch(url)
        assert watch.frames(2)
        relay.reset()
        watch.end()
    wait_until(lambda: relay.connections == 0 and server.clients() == 0)
    relay.ok()
    with Watch(url) as watch:
        assert watch.frames(1)
    assert relay.accepted == 2


@NEEDS_GSTREAMER
def test_frozen_connections_stay_open_and_go_on(server: RtspServer, relay: FaultRelay) -> None:
    with Watch(relay.url_of(server.url()), read_s=0.3) as watch:
        watch.frames(2)
        relay.freeze()
        sent = relay.forwarded_bytes
        assert isinstance(watch.end(), (StopIteration, av.error.ExitError))
        assert relay.forwarded_bytes == sent
        assert relay.connections == 1
        assert relay.accepted == 1
    relay.ok()
    wait_until(lambda: relay.connections == 0)


@NEEDS_GSTREAMER
def test_trickling(server: RtspServer, relay: FaultRelay) -> None:
    with Watch(relay.url_of(server.url("mjpeg"))) as watch:
        watch.frames(2)
        relay.trickle(20_000)
        start, sent = time.monotonic(), relay.forwarded_bytes
        wait_until(lambda: relay.forwarded_bytes >= sent + 10_000)
        assert 0.3 < time.monotonic() - start < 2.0
        relay.ok()
        watch.frames(5)


@NEEDS_GSTREAMER
def test_cut_in_the_middle(server: RtspServer, relay: FaultRelay) -> None:
    with Watch(relay.url_of(server.url("mjpeg"))) as watch:
        watch.frames(1)
        sent = relay.forwarded_bytes
        relay.cut_after(20_001)
        watch.end()
        assert 0 <= relay.forwarded_bytes - sent - 20_001 < 65536
    wait_until(lambda: relay.connections == 0)
    relay.cut_after(100)
    with pytest.raises(av.error.FFmpegError):  # new ones too
        Watch(relay.url_of(server.url("mjpeg")))


@NEEDS_GSTREAMER
@pytest.mark.parametrize(("mount", "key"), [("cam", H264_KEY), ("h265", H265_KEY)])
def test_without_key_frames_nothing_can_be_begun(
    server: RtspServer, relay: FaultRelay, mount: str, key: frozenset[int]
) -> None:
    with Watch(relay.url_of(server.url(mount))) as watch:
        packets = [watch.packet() for _ in range(15)]
        assert any(packet.is_keyframe for packet in packets)
        relay.drop_nals(key)
        without = 0
        for _ in range(150):  # some are on their way
            without = 0 if watch.packet().is_keyframe else without + 1
            if without > 30:
                break
        assert without > 30
        relay.ok()
        while not watch.packet().is_keyframe:
            pass


@NEEDS_GSTREAMER
@pytest.mark.parametrize(
    ("mount", "types", "first", "each"),
    [
        ("cam", H264_PARAMETERS, 2, 2),
        ("sdp", H264_PARAMETERS, 0, 0),
        ("h265", H265_PARAMETERS, 3, 3),
        ("sdp265", H265_PARAMETERS, 3, 0),
    ],
)
def test_parameter_sets_are_in_band_or_in_the_sdp_alone(
    server: RtspServer, relay: FaultRelay, mount: str, types: frozenset[int], first: int, each: int
) -> None:
    relay.drop_nals(types)
    with Watch(relay.url_of(server.url(mount))) as watch:
        watch.frames(31)
    assert first + 2 * each <= relay.dropped <= first + 8 * each


@NEEDS_GSTREAMER
def test_corrupt_payloads_in_a_stream_that_stays_whole(server: RtspServer, relay: FaultRelay) -> None:
    with Watch(relay.url_of(server.url("mjpeg"))) as watch:
        good = bytes(watch.packet())
        relay.corrupt(0.01, seed=5)
        wait_until(lambda: relay.corrupted > 50)
        packets = [bytes(watch.packet()) for _ in range(10)]
        assert any(packet != good for packet in packets)
        assert {len(packet) // 20_000 for packet in packets} == {len(good) // 20_000}
        relay.ok()
        flipped = relay.corrupted
        watch.frames(3)
        assert relay.corrupted == flipped


def packet(codec: str, payload: bytes) -> RtpPacket:
    return RtpPacket(0, codec, 96, False, 1, 2, memoryview(payload))


def test_nal_types_of_packets() -> None:
    def unit(data: bytes) -> bytes:
        return len(data).to_bytes(2, "big") + data

    assert packet("H264", b"\x65\x88").nals == {5}
    assert packet("H264", b"\x78" + unit(b"\x67ab") + unit(b"\x68c")).nals == {7, 8}
    assert packet("H264", b"\x7c\x85\x88").nals == {5}
    assert packet("H264", b"\x7c\x05\x88").nals == {5}
    assert packet("H265", b"\x26\x01\x88").nals == {19}
    assert packet("H265", b"\x60\x01" + unit(b"\x40\x01a") + unit(b"\x42\x01bc")).nals == {32, 33}
    assert packet("H265", b"\x62\x01\x93\x88").nals == {19}
    assert packet("JPEG", b"\x65\x88").nals == set()
    assert packet("H264", b"").nals == set()


def test_addresses_through_the_relay() -> None:
    with FaultRelay("127.0.0.1", 9) as relay:
        end = f"@127.0.0.1:{relay.port}/a/b?c=d"
        assert relay.url_of("rtsp://me:p%40ss@10.0.0.9/a/b?c=d") == f"rtsp://me:p%40ss{end}"
        assert relay.url_of("http://cam.local:8080/x") == f"http://127.0.0.1:{relay.port}/x"
        socket.create_connection((relay.host, relay.port)).close()  # nobody is behind it
        wait_until(lambda: relay.accepted == 1 and relay.connections == 0)


# HTTP.


@pytest.fixture(scope="module")
def jpegs() -> list[bytes]:
    return [image(SyntheticPixels(number, 192, 96).to_rgb(), "mjpeg", "yuvj444p") for number in range(5)]


def numbers(watch: Watch, count: int) -> list[int | None]:
    return [read_number(frame.to_ndarray(format="rgb24")) for frame in watch.frames(count)]


def test_mjpeg_over_http(jpegs: list[bytes]) -> None:
    with HttpStreams(jpegs, fps=50) as streams:
        with Watch(streams.url()) as watch:
            assert numbers(watch, 12) == [at % 5 for at in range(12)]
            assert streams.clients == 1
        streams.require("viewer", "p@ss")
        with Watch(streams.url(user="viewer", password="p@ss")) as watch:
            assert numbers(watch, 2) == [0, 1]
        with pytest.raises(av.error.HTTPUnauthorizedError):
            Watch(streams.url(user="viewer", password="no"))
        with pytest.raises(av.error.HTTPNotFoundError):
            Watch(streams.url("/none", user="viewer", password="p@ss"))
        assert streams.requests[0] == "/cam.mjpg"


def test_mjpeg_stalls_and_is_cut(jpegs: list[bytes]) -> None:
    with HttpStreams(jpegs, fps=50) as streams, FaultRelay(streams.host, streams.port) as relay:
        with Watch(streams.url(), read_s=0.3) as watch:
            watch.frames(2)
            streams.stall()
            watch.end()
            assert streams.clients == 1
        streams.resume()
        wait_until(lambda: streams.clients == 0)
        with Watch(relay.url_of(streams.url())) as watch:
            watch.frames(2)
            streams.cut()
            watch.end()
        with Watch(relay.url_of(streams.url())) as watch:
            watch.frames(1)
            relay.cut_after(100)
            watch.end()


def test_a_client_that_reads_nothing_does_not_hold_the_server_up(jpegs: list[bytes]) -> None:
    with HttpStreams(jpegs * 50, fps=1e6) as streams:
        silent = socket.create_connection((streams.host, streams.port))
        other = socket.create_connection((streams.host, streams.port))
        other.sendall(b"GET /cam.mjpg HTTP/1.0\r\n\r\n")
        wait_until(lambda: streams.clients == 1)
    silent.close()
    other.close()


@pytest.mark.parametrize("kind", ["ts", "fmp4"])
def test_live_hls(tmp_path: Path, kind: SegmentType) -> None:
    clip = encode(tmp_path / "clip.mp4", numbered(30), options=LOSSLESS)
    hls = Hls(clip, tmp_path / "hls", kind, fps=10, width=192, height=96)
    assert len(hls.segments) == 3
    with HttpStreams(hls=hls) as streams, Watch(streams.url("/live.m3u8")) as watch:
        got = numbers(watch, 20)
        assert got == [(got[0] + at) % 30 for at in range(20)]  # type: ignore[operator]
        streams.hold_playlist()
        first = hls.playlist(100.0)
    assert "#EXT-X-MEDIA-SEQUENCE:100\n" in first
    assert "#EXT-X-DISCONTINUITY\n" in first
    assert ("#EXT-X-MAP" in first) == (kind == "fmp4")


def test_the_playlist_slides_and_can_be_held(tmp_path: Path) -> None:
    clip = encode(tmp_path / "clip.mp4", numbered(20), options=LOSSLESS)
    hls = Hls(clip, tmp_path / "hls", fps=10, width=192, height=96)
    lines: Callable[[float], list[str]] = lambda age_s: hls.playlist(age_s).splitlines()  # noqa: E731
    assert lines(0.0) == lines(0.9)
    assert [line for line in lines(0.0) if line.endswith(".ts")] == ["part0.ts", "part1.ts", "part0.ts", "part1.ts"]
    assert "#EXT-X-MEDIA-SEQUENCE:1" in lines(1.0)
    assert "#EXT-X-DISCONTINUITY-SEQUENCE:1" in lines(3.0)
