"""What comes out of a damaged stream: pictures that were sent, bit for bit, or none."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from edge_runtime.camera.av_pixels import AvPixels
from edge_runtime.camera.nals import NalReader
from edge_runtime.camera.synthetic import SyntheticPixels, read_number
from edge_runtime.records.cameras import SourceCounters
from tests.camera.clips import av_camera, encode, numbered, textured
from tests.camera.relay import FaultRelay, RtpPacket
from tests.camera.rtsp import RtspServer, gstreamer_missing

# Few bits would be nearly as good wrong.
X264 = "keyint=15:scenecut=0:b-adapt=0:qp=14"
X265 = "keyint=15:min-keyint=15:scenecut=0:b-adapt=0:log-level=none:pools=none:repeat-headers=1"
STREAMS: dict[str, tuple[str, dict[str, str]]] = {
    "h264": ("libx264", {"preset": "veryfast", "x264-params": f"{X264}:bframes=0"}),
    "h264 b": ("libx264", {"preset": "veryfast", "x264-params": f"{X264}:bframes=2:b-pyramid=normal"}),
    "h264 slices": ("libx264", {"preset": "veryfast", "tune": "zerolatency", "x264-params": f"{X264}:slices=4"}),
    "h264 open": ("libx264", {"preset": "veryfast", "x264-params": f"{X264}:bframes=2:open-gop=1"}),
    "h264 refresh": ("libx264", {"preset": "veryfast", "x264-params": f"{X264}:bframes=0:intra-refresh=1"}),
    "h265": ("libx265", {"preset": "ultrafast", "x265-params": f"{X265}:bframes=0"}),
    "h265 open": ("libx265", {"preset": "ultrafast", "x265-params": f"{X265}:bframes=2:open-gop=1"}),
}
COUNT = 75
Planes = NDArray[np.uint8]
Edit = Callable[[int, bytes], bytes]


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, pictures = tmp_path_factory.mktemp("streams"), textured(COUNT)
    return {
        name: encode(folder / f"{index}.ts", pictures, codec=codec, options=options)
        for index, (name, (codec, options)) in enumerate(STREAMS.items())
    }


def read(path: Path) -> tuple[dict[int, Planes], SourceCounters]:
    """Every picture by its presentation time."""
    camera = av_camera(name="a", url=str(path), pace="max", loop=False)
    pictures: dict[int, Planes] = {}
    for frame in iter(camera.read, None):
        assert isinstance(frame.pixels, AvPixels)
        picture = frame.pixels.frame
        assert picture.pts is not None
        pictures[picture.pts] = picture.to_ndarray().astype(np.uint8, copy=False)
        if camera.status().state == "down":
            break
    camera.close()
    return pictures, camera.source()


def edited(source: Path, target: Path, edit: Edit) -> Path:
    """Every packet as `edit` leaves it; empty ones are gone."""
    with av.open(str(source)) as container, av.open(str(target), "w") as out:
        video = container.streams.video[0]
        stream = out.add_stream_from_template(video)
        packets = [packet for packet in container.demux(video) if packet.size]
        for index, packet in enumerate(packets):
            if data := edit(index, bytes(packet)):
                changed = av.Packet(data)
                changed.pts, changed.dts, changed.time_base = packet.pts, packet.dts, packet.time_base
                changed.stream, changed.is_keyframe = stream, packet.is_keyframe
                out.mux(changed)
    return target


def nals(data: bytes) -> list[bytes]:
    return [b"\0\0\1" + nal for nal in data.split(b"\0\0\1")[1:]]


def without_nal(data: bytes, rng: random.Random) -> bytes:
    """The access unit delimiter, which is first, goes with the last one: two pictures would be one then."""
    units = nals(data)
    del units[rng.randrange(1, len(units))]
    return b"".join(units) if len(units) > 1 else b""


def with_hole(data: bytes, rng: random.Random) -> bytes:
    """As the network's packets would leave it: some 1400 bytes are missing within one slice."""
    units = nals(data)
    at = max(range(len(units)), key=lambda index: len(units[index]))
    slice_, size = units[at], min(1400, len(units[at]) // 3)
    start = rng.randrange(20, max(21, len(slice_) - size))
    units[at] = slice_[:start] + slice_[start + size :]
    return b"".join(units)


DAMAGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "lost": lambda *_: b"",
    "without a nal": without_nal,
    "hole": with_hole,
    "cut": lambda data, rng: data[: rng.randrange(len(data) // 4, len(data))],
}


@pytest.mark.parametrize(
    ("kind", "damage"),
    [(k, d) for k in STREAMS for d in DAMAGES if not (k.startswith("h265") and d in ("hole", "cut"))],
)
def test_what_comes_out_was_sent(streams: dict[str, Path], tmp_path: Path, kind: str, damage: str) -> None:
    """FFmpeg's H.265 decoder does not notice a slice that ends early: over RTP and TS others do, see below."""
    whole, source = read(streams[kind])
    assert (len(whole), source.corrupt, source.pre_key) == (COUNT, 0, 0)
    for seed in range(5):
        rng = random.Random(f"{kind} {damage} {seed}")
        chosen = set(rng.sample(range(5, COUNT), 3))
        path = edited(
            streams[kind],
            tmp_path / "damaged.ts",
            lambda index, data, rng=rng, chosen=chosen: DAMAGES[damage](data, rng) if index in chosen else data,  # type: ignore[misc]
        )
        pictures, source = read(path)
        for pts, picture in pictures.items():
            np.testing.assert_array_equal(picture, whole[pts])
        assert len(pictures) + source.corrupt + source.pre_key <= COUNT + 1
        # Three groups of 15 are hit at worst, and with pictures that are renewed bit by bit the two after each.
        assert len(pictures) >= (5 if kind == "h264 refresh" else 25)


@pytest.mark.parametrize("kind", [kind for kind in STREAMS if kind != "h264 refresh"])
def test_who_comes_in_the_middle_sees_nothing_before_a_key_frame(
    streams: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    whole, _ = read(streams[kind])
    path = edited(streams[kind], tmp_path / "late.ts", lambda index, data: data if index >= 20 else b"")
    pictures, source = read(path)
    assert 40 <= len(pictures) <= 45
    assert source.pre_key + source.corrupt >= 10
    for pts, picture in pictures.items():
        np.testing.assert_array_equal(picture, whole[pts])


def test_packets_that_come_twice_are_decoded_once(streams: dict[str, Path], tmp_path: Path) -> None:
    whole, _ = read(streams["h264"])
    with av.open(str(streams["h264"])) as container, av.open(str(tmp_path / "twice.mkv"), "w") as out:
        video = container.streams.video[0]
        stream = out.add_stream_from_template(video)
        for index, packet in enumerate(container.demux(video)):
            for _ in range(2 if index % 7 == 3 and packet.size else 1):
                if packet.size:
                    copy = av.Packet(bytes(packet))
                    copy.pts, copy.dts, copy.time_base = packet.pts, packet.dts, packet.time_base
                    copy.stream, copy.is_keyframe = stream, packet.is_keyframe
                    out.mux(copy)
    pictures, source = read(tmp_path / "twice.mkv")
    assert len(pictures) == COUNT
    assert source.corrupt == 0
    assert source.duplicate == len([index for index in range(COUNT) if index % 7 == 3])
    for one, other in zip(pictures.values(), whole.values(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_jpeg_that_breaks_off_is_no_picture(tmp_path: Path) -> None:
    path = encode(tmp_path / "a.mkv", numbered(20), codec="mjpeg", pix_fmt="yuvj420p")
    cut = edited(path, tmp_path / "cut.mkv", lambda index, data: data[: len(data) // 2] if index % 4 == 1 else data)
    pictures, source = read(cut)
    assert (len(pictures), source.corrupt) == (15, 5)


@pytest.mark.parametrize(("codec", "pix_fmt"), [("libx264", "yuv420p"), ("libx264", "yuv444p"), ("libx265", "yuv422p")])
def test_another_size_and_format_in_the_stream(tmp_path: Path, codec: str, pix_fmt: str) -> None:
    """The stream goes on with another encoder's: nothing of the one before is seen again."""
    sizes, parts = [(192, 96), (320, 176), (98, 50)], []
    options = {"preset": "ultrafast"} | ({"x265-params": "log-level=none:pools=none"} if codec == "libx265" else {})
    suffix = "h264" if codec == "libx264" else "hevc"
    for index, (width, height) in enumerate(sizes):
        pictures = [SyntheticPixels(10 * index + number, width, height).to_rgb() for number in range(10)]
        form = "yuv420p" if index == 1 else pix_fmt
        parts.append(
            encode(tmp_path / f"{index}.{suffix}", pictures, codec=codec, pix_fmt=form, options=options).read_bytes()
        )
    path = tmp_path / f"all.{suffix}"
    path.write_bytes(b"".join(parts))
    camera = av_camera(name="a", url=str(path), pace="max", loop=False)
    frames = [frame.pixels for frame in iter(camera.read, None)]
    camera.close()
    assert [(pixels.width, pixels.height) for pixels in frames] == [size for size in sizes for _ in range(10)]
    assert [read_number(pixels.to_rgb()) for pixels in frames] == list(range(30))


def test_an_encoder_that_cannot_count_is_not_taken_for_a_lossy_network() -> None:
    """frame_num stands still: after some pictures that is how this stream is."""
    with_counts = b"\0\0\0\1\x67\x42\xc0\x1e\xd9\x00\xa0\x47\xfe\xc8\0\0\0\1\x68\xce\x3c\x80"
    reader = NalReader("h264", with_counts)
    assert not reader.look(memoryview(b"\0\0\0\1\x65\x88\x84\x00\x10\xff\xff")).gap
    slice_ = memoryview(b"\0\0\0\1\x41\x9a\x86\x00\x10\xff\xff")
    gaps = [reader.look(slice_).gap for _ in range(200)]
    assert any(gaps[:40])
    assert not any(gaps[-40:])


# --- over a network that loses packets


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RtspServer]:
    """Mounts with numbered pictures, half of each noise, so that a picture needs many packets."""
    if reason := gstreamer_missing():
        pytest.skip(reason)
    pictures, rng = numbered(60, 480, 272), np.random.default_rng(1)
    for picture in pictures:
        picture[48:, 240:] = rng.integers(0, 256, picture[48:, 240:].shape)
    clip = encode(tmp_path_factory.mktemp("rtsp") / "clip.mp4", pictures, options={"preset": "ultrafast", "crf": "20"})
    with RtspServer() as server:
        media = {"width": 480, "height": 272, "fps": 25, "gop": 10, "clip": clip}
        server.add("h264", codec="h264", **media)  # type: ignore[arg-type]
        server.add("h265", codec="h265", **media)  # type: ignore[arg-type]
        server.add("h265b", codec="h265", bframes=2, **media)  # type: ignore[arg-type]
        server.add("mjpeg", codec="mjpeg", **media)  # type: ignore[arg-type]
        yield server


FULL = pytest.mark.full


@pytest.mark.parametrize(
    "mount",
    ["h264", pytest.param("h265", marks=FULL), pytest.param("h265b", marks=FULL), pytest.param("mjpeg", marks=FULL)],
)
def test_lost_rtp_packets_cost_pictures_and_change_none(server: RtspServer, mount: str) -> None:
    colours = {number: SyntheticPixels(number, 32, 16).to_rgb()[-1, 0].astype(int) for number in range(60)}
    with FaultRelay(server.host, server.port) as relay:
        camera = av_camera(name="a", url=relay.url_of(server.url(mount)))
        assert camera.read() is not None
        rng = random.Random(4)

        def lose(packet: RtpPacket) -> bool:
            return rng.random() < 0.004

        relay.drop(lose)
        end = time.monotonic() + 15
        count = 0
        while count < 50 or relay.dropped < 3:
            assert time.monotonic() < end
            frame = camera.read()
            assert frame is not None
            rgb = frame.pixels.to_rgb()
            colour = colours[read_number(rgb)]
            assert (np.abs(rgb[44:, :224].astype(int) - colour).max(axis=2) > 40).mean() < 0.002
            count += 1
        camera.stop()
        camera.close()
        if mount != "mjpeg":  # FFmpeg drops those before it gives them out
            assert camera.source().corrupt > 0
