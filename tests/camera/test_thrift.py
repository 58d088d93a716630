"""Skipping: which packets need not be decoded, that no picture is lost by it, and what it saves."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from edge_runtime.bundled import bundled_media
from edge_runtime.camera.av_pixels import AvPixels
from edge_runtime.camera.nals import NalReader
from edge_runtime.camera.pacing import NEVER_NS, RateCap
from edge_runtime.camera.thrift import DecodeCosts, Thrift, Verdict
from edge_runtime.records.frames import Frame
from tests.awaiting import wait_until
from tests.camera.clips import av_camera, encode, repeated

MS = 1_000_000
S = 1_000_000_000


@dataclass(frozen=True)
class Packet:
    pts_ns: int
    t_ns: int
    key: bool
    disposable: bool


def stream(
    gops: Sequence[int], fps: float = 25.0, jitter_ms: float = 0.0, disposable: int = 0, seed: int = 1
) -> list[Packet]:
    """Groups of so many pictures; of each `disposable` + 1 in a row that are no key frames, the first ones are."""
    rng, packets = random.Random(seed), list[Packet]()
    for gop in gops:
        for index in range(gop):
            pts_ns = round(len(packets) * S / fps)
            t_ns = pts_ns + round(rng.uniform(0, jitter_ms) * MS)
            if packets:
                t_ns = max(t_ns, packets[-1].t_ns + 1)
            spare = index > 0 and index % (disposable + 1) != 0 if disposable else False
            packets.append(Packet(pts_ns, t_ns, index == 0, spare))
    return packets


class Reader:
    """A live camera's loop around a Thrift, with a decoder that knows what it may decode."""

    def __init__(self, fps: float | None, intra: bool = False) -> None:
        self.cap = RateCap(fps)
        self.thrift = Thrift()
        self.kept: list[int] = []
        self.decoded = 0
        self._whole = intra
        self._held: list[Packet] = []
        self._began = 0

    def read(self, packet: Packet) -> None:
        verdict = self.thrift.judge(
            packet.pts_ns,
            self.cap.early_ns(packet.t_ns),
            self.cap.step_ns,
            key=packet.key,
            disposable=packet.disposable,
        )
        if packet.key:
            self._whole = self._whole and not self._held
            self._held.clear()
        if verdict is Verdict.SKIP:
            assert packet.disposable
            return
        if verdict is Verdict.HOLD:
            self._held.append(packet)
            return
        if verdict is Verdict.REPLAY:
            assert self._held
            self._whole = self._whole or self._held[0].key
            self.decoded += len(self._held)
            self._held.clear()
        self._whole = self._whole or packet.key
        assert self._whole
        assert not self._held
        self.decoded += 1
        if self.cap.wants(packet.t_ns):
            self.kept.append(packet.t_ns)


def full(packets: Sequence[Packet], fps: float) -> list[int]:
    cap = RateCap(fps)
    return [packet.t_ns for packet in packets if cap.wants(packet.t_ns)]


def share(packets: Sequence[Packet], fps: float, intra: bool = False) -> float:
    """Decoded packets of all; checks that the rate is kept."""
    reader = Reader(fps, intra)
    for packet in packets:
        reader.read(packet)
    assert abs(len(reader.kept) - len(full(packets, fps))) <= 1
    return reader.decoded / len(packets)


@pytest.mark.parametrize(
    ("gop", "fps", "below"),
    [
        (25, 1.0, 0.05),
        (25, 0.5, 0.03),
        (25, 0.1, 0.02),
        (50, 1.0, 0.31),
        (12, 2.0, 0.15),
        (250, 1.0, 0.97),
        (1, 5.0, 0.21),
    ],
)
def test_what_a_group_of_pictures_allows(gop: int, fps: float, below: float) -> None:
    packets = stream([gop] * (3000 // gop))
    if gop == 1:
        packets = [Packet(p.pts_ns, p.t_ns, False, True) for p in packets]
    assert share(packets, fps, gop == 1) <= below


def test_jitter_changes_little() -> None:
    assert share(stream([25] * 100, jitter_ms=60), 1.0) <= 0.08


def test_pictures_that_nobody_needs_are_skipped_one_by_one() -> None:
    assert share(stream([250] * 10, disposable=2), 8.0) <= 0.56
    assert share(stream([250] * 10, disposable=2), 25.0) == 1.0


@given(
    gops=st.lists(st.integers(1, 90), min_size=3, max_size=25),
    fps=st.sampled_from([0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 24.0]),
    source=st.sampled_from([10.0, 18.0, 25.0, 60.0]),
    jitter_ms=st.sampled_from([0.0, 5.0, 30.0]),
    disposable=st.integers(0, 3),
    seed=st.integers(0, 100),
)
def test_the_rate_is_that_of_decoding_all(
    gops: list[int], fps: float, source: float, jitter_ms: float, disposable: int, seed: int
) -> None:
    """However long the groups, and however wrong the guess: at no time more than two pictures behind."""
    packets = stream(gops, source, jitter_ms, disposable, seed)
    reader = Reader(fps)
    cap, wanted = RateCap(fps), 0
    for packet in packets:
        wanted += cap.wants(packet.t_ns)
        reader.read(packet)
        assert len(reader.kept) >= wanted - 2
    assert len(reader.kept) <= wanted + 1
    assert reader.decoded <= len(packets)


@given(
    caps=st.lists(st.sampled_from([None, 0.0, 0.3, 1.0, 4.0, 30.0]), min_size=2, max_size=12),
    gop=st.integers(5, 60),
    seed=st.integers(0, 100),
)
def test_a_changed_cap_is_obeyed_at_once(caps: list[float | None], gop: int, seed: int) -> None:
    packets = stream([gop] * 60, jitter_ms=10, seed=seed)
    reader, rate, since_ns, ahead_ns = Reader(caps[0]), caps[0], 0, 0
    for index, packet in enumerate(packets):
        if index % 50 == 0:
            # The grid goes on from the last slot, which may lie half a step ahead.
            ahead_ns = round(S / rate / 2) if rate else ahead_ns
            rate, since_ns = caps[index // 50 % len(caps)], packet.t_ns
            reader.cap.change(rate)
        before, kept = reader.decoded, len(reader.kept)
        reader.read(packet)
        if len(reader.kept) > kept:
            since_ns, ahead_ns = packet.t_ns, 0
        if rate == 0.0:
            assert reader.decoded == before
        elif rate is None:
            assert reader.kept[-1] == packet.t_ns
        else:
            assert packet.t_ns - since_ns <= 2 * S / rate + ahead_ns + 100 * MS


def test_times_that_jump_or_are_missing_cost_decoding_not_pictures() -> None:
    rng = random.Random(5)
    packets = stream([25] * 80)
    reader = Reader(1.0)
    for packet in packets:
        pts_ns = packet.pts_ns + rng.choice([0, 0, 0, 36_000 * S, -36_000 * S])
        reader.read(Packet(pts_ns, packet.t_ns, packet.key, packet.disposable))
    assert abs(len(reader.kept) - 80) <= 1
    thrift = Thrift()
    for packet in packets[:200]:
        assert thrift.judge(None, S, S, key=packet.key, disposable=False) is Verdict.DECODE


def test_nothing_is_skipped_before_two_key_frames_were_seen_and_damage_starts_anew() -> None:
    packets = stream([25] * 6)
    reader = Reader(0.5)
    for packet in packets[:25]:
        reader.read(packet)
    assert reader.decoded == 25
    thrift = Thrift()
    verdicts = []
    for index, packet in enumerate(packets):
        if index == 60:
            thrift.interrupt()
        early = NEVER_NS // 2 if index % 25 else 5 * S
        verdicts.append(thrift.judge(packet.pts_ns, early, 10 * S, key=packet.key, disposable=False))
    assert Verdict.HOLD in verdicts[25:60]
    assert set(verdicts[60:75]) == {Verdict.DECODE}


def test_costs_are_means_of_what_was_lately() -> None:
    costs = DecodeCosts()
    assert costs.mean_ns("key") == 0
    for _ in range(1000):
        costs.add("key", 100)
    for _ in range(2000):
        costs.add("key", 300)
    costs.add("disposable", 7)
    assert 290 <= costs.mean_ns("key") <= 300
    assert costs.mean_ns("disposable") == 7


# --- through the decoder: GOP 25 at a rate of 1000, so that a cap of 40 is what 1 is at 25

RATE = 1000
H264_X = "keyint=25:min-keyint=25:scenecut=0:qp=22"
H265_X = "keyint=25:min-keyint=25:scenecut=0:qp=22:pools=none:log-level=none"
KINDS: dict[str, tuple[str, dict[str, str]]] = {
    "h264": ("libx264", {"preset": "veryfast", "tune": "zerolatency", "x264-params": H264_X}),
    "h264 b": ("libx264", {"preset": "veryfast", "x264-params": f"{H264_X}:bframes=3:b-adapt=0"}),
    "h264 open": ("libx264", {"preset": "veryfast", "x264-params": f"{H264_X}:bframes=3:b-adapt=0:open-gop=1"}),
    "h265": ("libx265", {"preset": "ultrafast", "x265-params": f"{H265_X}:bframes=0"}),
    "h265 open": ("libx265", {"preset": "ultrafast", "x265-params": f"{H265_X}:bframes=3:b-adapt=0:open-gop=1"}),
}


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A real scene, with a sensor's noise put back that its first encoder took out: without it a key frame costs ten
    times what the others do."""
    folder, noise = tmp_path_factory.mktemp("clips"), np.random.default_rng(1).normal(0, 6, (7, 192, 256, 3))
    with av.open(str(bundled_media("vtest"))) as container:
        frames = islice(container.decode(video=0), 200)
        scenes = [frame.reformat(256, 192, "rgb24").to_ndarray() for frame in frames]
    pictures = [np.clip(scene + noise[index % 7], 0, 255).astype(np.uint8) for index, scene in enumerate(scenes)]
    return {
        name: encode(folder / f"{index}.mp4", pictures, rate=RATE, codec=codec, options=options)
        for index, (name, (codec, options)) in enumerate(KINDS.items())
    }


def shown(frame: Frame) -> tuple[int, NDArray[np.uint8]]:
    assert isinstance(frame.pixels, AvPixels)
    picture = frame.pixels.frame
    assert picture.pts is not None
    return picture.pts, picture.to_ndarray().astype(np.uint8, copy=False)


@pytest.fixture(scope="module")
def whole(clips: dict[str, Path]) -> dict[str, dict[int, NDArray[np.uint8]]]:
    """Every picture by its time, with all decoded."""
    pictures = {}
    for kind, path in clips.items():
        camera = av_camera(name="a", url=str(path), pace="max", loop=False)
        pictures[kind] = dict(shown(frame) for frame in iter(camera.read, None))
        camera.close()
        assert len(pictures[kind]) == 200
    return pictures


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cap", [20, 40, 120, 320])
def test_pictures_are_those_of_decoding_all(
    clips: dict[str, Path], whole: dict[str, dict[int, NDArray[np.uint8]]], kind: str, cap: int
) -> None:
    camera = av_camera(name="a", url=str(clips[kind]), fps=cap, loop=False)
    frames = list(iter(camera.read, None))
    camera.close()
    for pts, picture in map(shown, frames):
        np.testing.assert_array_equal(picture, whole[kind][pts])
    assert abs(len(frames) - cap * 200 // RATE) <= 1
    source = camera.source()
    if cap <= 120:
        assert source.skipped_codec > 0
    assert source.decoded + source.skipped_codec == 200
    assert source.decoded == len(frames) + source.skipped_rate
    assert (source.corrupt, source.pre_key, source.duplicate) == (0, 0, 0)
    assert all(a.t_capture_ns < b.t_capture_ns for a, b in pairwise(frames))


@pytest.mark.parametrize(
    "kind", ["h264", pytest.param("h265", marks=pytest.mark.full), pytest.param("h264 b", marks=pytest.mark.full)]
)
def test_one_picture_of_a_group_costs_a_quarter_of_all_at_most(
    clips: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    path = repeated(clips[kind], tmp_path / "long.mkv", 3)

    def cost(cap: float | None) -> float:
        camera = av_camera(name="a", url=str(path), fps=cap, pace="realtime" if cap else "max", loop=False)
        frames = sum(1 for _ in iter(camera.read, None))
        camera.close()
        effort, source = camera.effort(), camera.source()
        assert frames == source.decoded - source.skipped_rate
        assert abs(frames - (24 if cap else 600)) <= 1
        assert not cap or effort.saved_cpu_ns > effort.decode_cpu_ns
        return effort.decode_cpu_ns / (source.decoded + source.skipped_codec)

    ratios = [cost(40) / cost(None) for _ in range(3)]
    print(f"{kind}: {statistics.median(ratios):.1%} of decoding all")
    assert statistics.median(ratios) <= 0.25


def test_a_cap_of_nothing_decodes_nearly_nothing_and_the_file_goes_on(clips: dict[str, Path]) -> None:
    camera = av_camera(name="a", url=str(clips["h264"]))
    first = camera.read()
    assert first is not None
    camera.set_cap(0)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(camera.read)
        wait_until(lambda: camera.source().skipped_codec > 1000, 10, "five rounds")
        before = camera.source()
        # At each beginning of the file one: only then is it known what its times are.
        assert before.decoded <= 2 + (before.decoded + before.skipped_codec) // 200
        camera.set_cap(None)
        frame = reading.result(5)
    assert frame is not None
    assert (frame.t_capture_ns - first.t_capture_ns) / 1e9 >= 1.0
    assert time.monotonic_ns() - first.t_capture_ns >= 0.4e9
    assert camera.status().state == "up"
    camera.close()


@pytest.mark.parametrize("how", ["stop", "pause"])
def test_nothing_to_decode_does_not_keep_it_from_stopping(clips: dict[str, Path], how: str) -> None:
    camera = av_camera(name="a", url=str(clips["h264"]))
    assert camera.read() is not None
    camera.set_cap(0)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(camera.read)
        wait_until(lambda: camera.source().skipped_codec > 0, 5, "skipping")
        if how == "pause":
            camera.pause()
            wait_until(lambda: camera.status().state == "paused", 2, "the pause")
            skipped = camera.source().skipped_codec
            camera.set_cap(None)
            assert not reading.done()
            assert camera.source().skipped_codec <= skipped + 1
            camera.resume()
            assert reading.result(5) is not None
        camera.stop()
        assert how == "pause" or reading.result(2) is None
    camera.close()


def test_what_looking_costs(clips: dict[str, Path]) -> None:
    """Glancing at a packet and asking the policy are small beside decoding even a small picture."""
    data = memoryview(clips["h264"].read_bytes())[:2000]
    reader, thrift = NalReader("h264", None), Thrift()
    unit = memoryview(b"\0\0\0\1\x67\x42\xc0\x1e\xd9\0\0\0\1\x68\xce\x3c\x80\0\0\0\1\x41\x9a" + bytes(data))
    start_ns = time.thread_time_ns()
    for index in range(2000):
        reader.look(unit)
        thrift.judge(index * 40 * MS, 10 * MS, S, key=index % 25 == 0, disposable=False)
    assert (time.thread_time_ns() - start_ns) / 2000 < 200_000
