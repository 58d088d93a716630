"""The maker of damaged files: deterministic, even over kinds and sources, quick, and damaging."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import av
import av.error
import pytest

from tests.camera.containers import TICKS_PER_S, Sample, write
from tests.camera.mutants import (
    JUMP,
    KINDS,
    PACKET_KINDS,
    SOURCES,
    Source,
    choice,
    clip_of,
    describe,
    fits,
    intact,
    moved,
    mutant,
    sources,
)

SEEDS = range(2 * len(KINDS))


@dataclass
class Seen:
    """What `av` makes of a file."""

    pictures: list[str] = field(default_factory=list)
    times_s: list[float | None] = field(default_factory=list)
    sizes: set[tuple[int, int]] = field(default_factory=set)
    rate: float | None = None
    errors: int = 0


def look(path: Path) -> Seen:
    seen = Seen()
    try:
        container = av.open(str(path))
    except (av.error.FFmpegError, ValueError, MemoryError):
        seen.errors += 1
        return seen
    with container:
        # PyAV 17 dies of decoding without a decoder.
        for stream in [one for one in container.streams.video if one.codec_context is not None][:1]:
            seen.rate = None if stream.average_rate is None else float(stream.average_rate)
            packets = container.demux(stream)
            while True:
                try:
                    packet = next(packets, None)
                    frames = [] if packet is None else packet.decode()
                # IndexError: a packet of a stream that was found after the file was opened.
                except (av.error.FFmpegError, MemoryError, IndexError):
                    seen.errors += 1
                    if seen.errors > 1000:
                        break
                    continue
                if packet is None:
                    break
                for frame in frames:
                    with contextlib.suppress(ValueError):  # a format that PyAV has no array for
                        seen.pictures.append(hashlib.sha1(frame.to_ndarray().tobytes()).hexdigest())
                    seen.times_s.append(frame.time)
                    seen.sizes.add((frame.width, frame.height))
    return seen


def own(source: Source, folder: Path, samples: list[Sample] | None = None) -> Path:
    """The intact clip, or other samples of it, as the hand-written writer makes it."""
    clip = clip_of(source)
    path = folder / f"own-{source.name}.{source.suffix}"
    path.write_bytes(write(source.container, clip.track, clip.samples if samples is None else samples))
    return path


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_sources_are_whole_by_ffmpegs_writer_and_by_ours(source: Source, tmp_path: Path) -> None:
    by_ffmpeg, by_us = look(intact(source, tmp_path)), look(own(source, tmp_path))
    assert by_ffmpeg.errors == by_us.errors == 0
    assert len(by_us.pictures) == source.count
    assert by_us.pictures == by_ffmpeg.pictures
    size = (768, 576) if source.copied else source.size
    assert by_us.sizes == {size}
    if source.declares_rate:
        assert by_us.rate == by_ffmpeg.rate == source.fps
    if source.has_times and source.declares_rate:
        times_s = [time_s for time_s in by_us.times_s if time_s is not None]
        steps = {round((b - a) * source.fps, 1) for a, b in pairwise(times_s)}
        # What is copied ends amid the pictures that refer to each other.
        assert steps == {1.0, 2.0} if source.copied else {1.0}


def test_a_file_that_declares_no_rate(tmp_path: Path) -> None:
    (video, motion) = (source for source in SOURCES if not source.declares_rate)
    assert look(intact(video, tmp_path)).rate is None
    data = intact(motion, tmp_path).read_bytes()
    at = data.index(b"strh") + 8 + 20
    assert data[at : at + 8] == bytes(8)  # scale and rate


def test_times_are_as_told(tmp_path: Path) -> None:
    for source in SOURCES:
        if not source.has_times or not source.declares_rate or source.codec == "mjpeg":
            continue
        samples = list(clip_of(source).samples)
        for jump in (JUMP, -JUMP):
            jumped = moved(samples, jump, 10, only_one=False, dts_too=False)
            times_s = [one for one in look(own(source, tmp_path, jumped)).times_s if one is not None]
            steps_s = [b - a for a, b in pairwise(times_s)]
            widest_s = max(steps_s, key=abs)
            # MPEG-TS has 33 bits: back is far ahead there.
            wrap_s = 2**33 / TICKS_PER_S if source.container == "ts" and jump < 0 else 0.0
            assert abs(widest_s - jump / TICKS_PER_S - wrap_s) < 1.0, (source.name, jump)


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    first = [mutant(seed, tmp_path).read_bytes() for seed in SEEDS]
    clip_of.cache_clear()
    assert [mutant(seed, tmp_path).read_bytes() for seed in SEEDS] == first
    assert len(set(first)) == len(first)


def test_kinds_and_sources_come_evenly() -> None:
    seeds = range(len(KINDS) * len(SOURCES))
    chosen = Counter(choice(seed) for seed in seeds)
    assert set(chosen) == {(kind, source) for kind in KINDS for source in SOURCES if fits(kind, source)}
    assert set(Counter(kind for kind, _ in chosen.elements()).values()) == {len(SOURCES)}
    per_source = Counter(source for _, source in chosen.elements())
    assert min(per_source.values()) >= 0.6 * len(seeds) / len(SOURCES)
    assert describe(0) == "seed 0: few_bits of h264-mp4-25fps"
    assert len({describe(seed) for seed in seeds}) == len(seeds)


def test_they_are_made_quickly(tmp_path: Path) -> None:
    for source in SOURCES:
        clip_of(source)
    mutant(KINDS.index("spliced"), tmp_path)
    start_s = time.process_time()
    for seed in range(200):
        mutant(seed, tmp_path)
    assert (time.process_time() - start_s) / 200 < 0.1


def test_most_are_damaged_and_many_still_show_something(tmp_path: Path) -> None:
    changed, shown, sizes = Counter[str](), Counter[str](), Counter[str]()
    turns = 4
    for seed in range(turns * len(KINDS)):
        kind, source = choice(seed)
        path = mutant(seed, tmp_path)
        whole = own(source, tmp_path) if kind in PACKET_KINDS else intact(source, tmp_path)
        changed[kind] += path.read_bytes() != whole.read_bytes()
        seen = look(path)
        shown[kind] += bool(seen.pictures)
        sizes[kind] += len(seen.sizes) > 1
    assert set(changed) == set(KINDS)
    assert all(count >= turns - 1 for count in changed.values()), changed
    assert sizes["spliced"] >= turns - 1
    assert {"few_bits", "slice_bits", "cut_packets", "pts_one", "pts_back", "twice", "spliced"} <= set(+shown)
    assert sum(shown.values()) > 0.5 * turns * len(KINDS)


@pytest.mark.assets
def test_further_clips_are_further_sources(assets: Path, tmp_path: Path) -> None:
    clips = sorted((assets / "media").glob("*.mp4"))
    more = sources(clips)[len(SOURCES) :]
    assert len(more) == 2 * len(clips)
    for source in more:
        by_us = look(own(source, tmp_path))
        assert (by_us.errors, len(by_us.pictures)) == (0, source.count)
    seeds = range(len(KINDS) * len(sources(clips)))
    assert {source for seed in seeds for _, source in [choice(seed, clips)]} == set(sources(clips))
    seed = next(seed for seed in seeds if choice(seed, clips)[1] == more[0])
    assert mutant(seed, tmp_path, clips).read_bytes() == mutant(seed, tmp_path, clips).read_bytes()
