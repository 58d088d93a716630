"""Damaged video files, made from seeds: the same seed gives the same bytes, every kind of damage meets every source.

`mutant(seed, folder)` writes one. Kinds come in turn, and for each kind the sources it fits, so that any run of a few
hundred seeds has them all. The clips are small: some 2 s, or less, of pictures from media/vtest.mp4.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from tests.camera.containers import TICKS_PER_S, Sample, Track, nal_type, write
from tests.camera.intact import REAL, Clip
from tests.camera.intact import SOURCES as SOURCES
from tests.camera.intact import Source as Source
from tests.camera.intact import clip_of as clip_of
from tests.camera.intact import sources as sources

JUMP = 36_000 * TICKS_PER_S
# Of slices: what is before this is the slice's header, and of pictures their tables.
_SLICE_HEADER_BYTES = 12
_JPEG_HEADER_BYTES = 640

_KEYS = {"h264": frozenset({5}), "h265": frozenset(range(16, 22)), "mjpeg": frozenset[int]()}
_PARAMETERS = {"h264": frozenset({7, 8}), "h265": frozenset({32, 33, 34}), "mjpeg": frozenset[int]()}
_SLICES = {"h264": frozenset(range(1, 6)), "h265": frozenset(range(32)), "mjpeg": frozenset({-1})}


# Damage to the bytes of a file.


def _flip(data: bytes | bytearray, rng: random.Random, count: int, first: int = 0, end: int | None = None) -> bytes:
    """`count` bits between `first` and `end`."""
    out = bytearray(data)
    end = len(out) if end is None else end
    for _ in range(count if first < end else 0):
        out[rng.randrange(first, end)] ^= 1 << rng.randrange(8)
    return bytes(out)


def few_bits(data: bytes, rng: random.Random) -> bytes:
    return _flip(data, rng, rng.randint(1, 8))


def sparse_bits(data: bytes, rng: random.Random) -> bytes:
    return _flip(data, rng, max(1, len(data) // 2000))


def dense_bits(data: bytes, rng: random.Random) -> bytes:
    return _flip(data, rng, len(data) // rng.choice((20, 60, 200)))


def container_bits(data: bytes, rng: random.Random) -> bytes:
    """Where containers keep what they say of themselves: around their first and their last kilobyte."""
    size = min(1024, len(data) // 2)
    at_start = rng.random() < 0.5
    first, end = (0, size) if at_start else (len(data) - size, len(data))
    return _flip(data, rng, rng.choice((1, 4, 16, 64)), first, end)


def truncated(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randint(0, len(data))]


def hole(data: bytes, rng: random.Random) -> bytes:
    """Sectors that were never written."""
    at, size = rng.randrange(len(data)), rng.choice((16, 512, 4096, 16384))
    return data[:at] + bytes(min(size, len(data) - at)) + data[at + size :]


def lost_bytes(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + data[at + rng.choice((1, 3, 188, 1000, 5000)) :]


# Damage to packets.

Samples = list[Sample]


def _each(clip: Clip, change: Callable[[Sample, bytes], bytes], rate: float, rng: random.Random) -> Samples:
    """Change the slices of this share of the packets, of one at least."""
    kinds, codec = _SLICES[clip.track.codec], clip.track.codec
    chosen = _chosen(clip, rate, rng)

    def one(at: int, sample: Sample) -> Sample:
        if at not in chosen:
            return sample
        return replace(
            sample, nals=tuple(change(sample, nal) if nal_type(codec, nal) in kinds else nal for nal in sample.nals)
        )

    return [one(at, sample) for at, sample in enumerate(clip.samples)]


def _chosen(clip: Clip, rate: float, rng: random.Random) -> set[int]:
    count = len(clip.samples)
    return {rng.randrange(count), *(at for at in range(count) if rng.random() < rate)}


def slice_bits(clip: Clip, rng: random.Random) -> tuple[Track, Samples]:
    """Nothing but the coded picture: every header is intact."""
    first = _JPEG_HEADER_BYTES if clip.track.codec == "mjpeg" else _SLICE_HEADER_BYTES
    per, rate = rng.choice((30, 200, 1500)), rng.choice((0.1, 0.5, 1.0))
    return clip.track, _each(clip, lambda _, nal: _flip(nal, rng, max(1, len(nal) // per), first=first), rate, rng)


def header_bits(clip: Clip, rng: random.Random) -> tuple[Track, Samples]:
    """Nothing but parameter sets and the headers of slices, or of pictures."""
    codec = clip.track.codec
    end = _JPEG_HEADER_BYTES if codec == "mjpeg" else _SLICE_HEADER_BYTES

    def broken(nal: bytes, last: int) -> bytes:
        return _flip(nal, rng, rng.randint(1, 3), end=min(last, len(nal)))

    if codec != "mjpeg" and rng.random() < 0.7:
        track = replace(clip.track, parameters=tuple(broken(nal, len(nal)) for nal in clip.track.parameters))
        kinds = _PARAMETERS[codec]
        return track, [
            replace(
                sample,
                nals=tuple(broken(nal, len(nal)) if nal_type(codec, nal) in kinds else nal for nal in sample.nals),
            )
            for sample in clip.samples
        ]
    return clip.track, _each(clip, lambda _, nal: broken(nal, end), rng.choice((0.1, 0.5)), rng)


def cut_packets(clip: Clip, rng: random.Random) -> tuple[Track, Samples]:
    """Pictures whose second part is missing."""
    return clip.track, _each(
        clip, lambda _, nal: nal[: rng.randint(1, max(1, len(nal)))], rng.choice((0.05, 0.3, 1.0)), rng
    )


def spliced(clip: Clip, rng: random.Random, other: Clip) -> tuple[Track, Samples]:
    """Another clip of another size goes on in the same stream, with or without its parameter sets, and perhaps back."""
    at = rng.randrange(1, len(clip.samples))
    start = rng.choice((0, rng.randrange(len(other.samples))))
    tail = list(other.samples[start:])
    if rng.random() < 0.7 and clip.track.codec != "mjpeg":
        tail[0] = replace(tail[0], nals=other.track.parameters + tail[0].nals)
    if rng.random() < 0.5:
        tail += clip.samples[at:]
    return clip.track, _timed([*clip.samples[:at], *tail], clip.track.interval)


def _timed(samples: Sequence[Sample], interval: int) -> Samples:
    """Steady times, in the order given."""
    return [replace(one, pts=(at + 2) * interval, dts=at * interval) for at, one in enumerate(samples)]


def no_parameters(clip: Clip, rng: random.Random) -> tuple[Track, Samples]:
    """Without SPS, PPS or VPS, one kind or all, everywhere or everywhere but at the start."""
    codec = clip.track.codec
    kinds = _PARAMETERS[codec]
    gone = rng.choice([frozenset({kind}) for kind in sorted(kinds)] + [kinds])
    in_band = any(nal_type(codec, nal) in kinds for nal in clip.samples[0].nals)
    if not in_band or rng.random() < 0.7:
        kept = tuple(nal for nal in clip.track.parameters if nal_type(codec, nal) not in gone)
        track = replace(clip.track, parameters=kept)
    else:
        track = clip.track
    return track, _without(clip, gone)


def _without(clip: Clip, gone: frozenset[int], first: int = 0) -> Samples:
    codec = clip.track.codec
    return [
        replace(sample, nals=tuple(nal for nal in sample.nals if nal_type(codec, nal) not in gone))
        if at >= first
        else sample
        for at, sample in enumerate(clip.samples)
    ]


def no_idr(clip: Clip, rng: random.Random) -> tuple[Track, Samples]:
    """The key frames' slices are gone, from some packet on; what else is in their packets stays."""
    first = rng.choice((0, 1, len(clip.samples) // 2))
    return clip.track, _without(clip, _KEYS[clip.track.codec], first)


def only_non_key(clip: Clip, rng: random.Random) -> tuple[Track, Samples]:
    """Only what refers to key frames that nobody has; or it begins in the middle, and one comes later."""
    if rng.random() < 0.5:
        return clip.track, [sample for sample in clip.samples if not sample.key]
    return clip.track, list(clip.samples[rng.randint(1, min(20, len(clip.samples) - 1)) :])


def pts_one(clip: Clip, rng: random.Random) -> tuple[Track, Samples]:
    """One frame is 36,000 s off."""
    return clip.track, _moved(clip, rng, only_one=True)


def pts_from(clip: Clip, rng: random.Random) -> tuple[Track, Samples]:
    """All are 36,000 s off, from a frame on."""
    return clip.track, _moved(clip, rng, only_one=False)


def _moved(clip: Clip, rng: random.Random, only_one: bool) -> Samples:
    by, chosen = rng.choice((JUMP, -JUMP, JUMP // 10, -JUMP // 4)), rng.randrange(len(clip.samples))
    return moved(clip.samples, by, chosen, only_one, dts_too=rng.random() < 0.5)


def moved(samples: Sequence[Sample], by: int, first: int, only_one: bool, dts_too: bool) -> Samples:
    """`by` is added to the times of that sample, or of all that are shown after it as well."""

    def one(at: int, sample: Sample) -> Sample:
        pts_moves = at == first if only_one else sample.pts >= samples[first].pts
        dts_moves = dts_too and (at == first if only_one else at >= first)
        return replace(sample, pts=sample.pts + by * pts_moves, dts=sample.dts + by * dts_moves)

    return [one(at, sample) for at, sample in enumerate(samples)]


def pts_back(clip: Clip, rng: random.Random) -> tuple[Track, Samples]:
    """Times that run backwards, all the way or from frame to frame."""
    last = clip.samples[-1].pts
    if rng.random() < 0.5:
        return clip.track, [replace(one, pts=last - one.pts, dts=last - one.dts) for one in clip.samples]
    wide = rng.choice((2, 10, 100)) * max(1, clip.track.interval)
    return clip.track, [replace(one, pts=one.pts + rng.randint(-wide, wide)) for one in clip.samples]


def pts_equal(clip: Clip, rng: random.Random) -> tuple[Track, Samples]:
    """Runs of frames with the same time."""
    run = rng.choice((2, 5, len(clip.samples)))
    firsts = [clip.samples[at - at % run] for at in range(len(clip.samples))]
    return clip.track, [
        replace(one, pts=first.pts, dts=first.dts) for one, first in zip(clip.samples, firsts, strict=True)
    ]


def twice(clip: Clip, rng: random.Random) -> tuple[Track, Samples]:
    """Packets that come two or three times, with the same time or the next."""
    rate, same = rng.choice((0.1, 0.5)), rng.random() < 0.5
    chosen = _chosen(clip, rate, rng)
    samples = [
        copy for at, one in enumerate(clip.samples) for copy in [one] * (rng.choice((2, 3)) if at in chosen else 1)
    ]
    return clip.track, samples if same else _timed(samples, clip.track.interval)


def empty_packets(clip: Clip, rng: random.Random) -> tuple[Track, Samples]:
    """Packets of no bytes, instead of others or between them."""
    rate, instead = rng.choice((0.05, 0.3)), rng.random() < 0.5
    return clip.track, _mixed(clip, rng, rate, instead, lambda: b"")


def garbage_packets(clip: Clip, rng: random.Random) -> tuple[Track, Samples]:
    """Packets of random bytes, of zeros, or of one byte, instead of others or between them."""
    rate, instead = rng.choice((0.05, 0.3)), rng.random() < 0.5

    def garbage() -> bytes:
        size = rng.choice((1, 3, 4, 50, 3000))
        return rng.choice((rng.randbytes(size), bytes(size), b"\0\0\0\1" * (size // 4 + 1)))

    return clip.track, _mixed(clip, rng, rate, instead, garbage)


def _mixed(clip: Clip, rng: random.Random, rate: float, instead: bool, make: Callable[[], bytes]) -> Samples:
    samples: Samples = []
    chosen = _chosen(clip, rate, rng)
    for at, one in enumerate(clip.samples):
        if at in chosen:
            samples.append(replace(one, loose=make()))
            if instead:
                continue
        samples.append(one)
    return samples


def shuffled(clip: Clip, rng: random.Random) -> tuple[Track, Samples]:
    """Packets in another order, near their places or anywhere; their times stay with them, or with the places."""
    reach, keep = rng.choice((2, 8, 1000)), rng.random() < 0.5
    order = sorted(range(len(clip.samples)), key=lambda at: at + rng.uniform(0, reach))
    samples = [clip.samples[at] for at in order]
    return clip.track, samples if keep else _timed(samples, clip.track.interval)


BYTE_KINDS: dict[str, Callable[[bytes, random.Random], bytes]] = {
    one.__name__: one for one in (few_bits, sparse_bits, dense_bits, container_bits, truncated, hole, lost_bytes)
}
PACKET_KINDS: dict[str, Callable[[Clip, random.Random], tuple[Track, Samples]]] = {
    one.__name__: one
    for one in (
        *(slice_bits, header_bits, cut_packets, no_parameters, no_idr, only_non_key, pts_one, pts_from, pts_back),
        *(pts_equal, twice, empty_packets, garbage_packets, shuffled),
    )
}
KINDS = (*BYTE_KINDS, *PACKET_KINDS, spliced.__name__)


def fits(kind: str, source: Source) -> bool:
    if kind.startswith("pts_"):
        return source.has_times
    if kind in ("no_parameters", "no_idr", "only_non_key"):
        return source.codec != "mjpeg"
    # A raw stream has nothing but its packets.
    return kind not in ("container_bits", "empty_packets") or source.container != "raw"


def choice(seed: int, clips: Sequence[Path] = ()) -> tuple[str, Source]:
    """The kind of damage and the source of a seed."""
    turn, at = divmod(seed, len(KINDS))
    fitting = [source for source in sources(clips) if fits(KINDS[at], source)]
    return KINDS[at], fitting[turn % len(fitting)]


def describe(seed: int, clips: Sequence[Path] = ()) -> str:
    kind, source = choice(seed, clips)
    return f"seed {seed}: {kind} of {source.name}"


def mutant(seed: int, folder: Path, clips: Sequence[Path] = ()) -> Path:
    """Write the file of this seed. `clips`, further real H.264 clips, change which sources there are."""
    kind, source = choice(seed, clips)
    clip, rng = clip_of(source), random.Random(f"{seed} {kind} {source.name}")
    if kind in BYTE_KINDS:
        data = BYTE_KINDS[kind](clip.data, rng)
    else:
        if kind in PACKET_KINDS:
            track, samples = PACKET_KINDS[kind](clip, rng)
        else:
            track, samples = spliced(clip, rng, _other(source))
        data = write(source.container, track, samples)
    path = folder / f"{seed:05d}-{kind}-{source.name}.{source.suffix}"
    path.write_bytes(data)
    return path


def _other(source: Source) -> Clip:
    """Of the same codec, another size."""
    return clip_of(replace(source, first=120, count=20, size=(144, 176), fps=25, copied=False, real=REAL))


def intact(source: Source, folder: Path) -> Path:
    """The undamaged file."""
    path = folder / f"intact-{source.name}.{source.suffix}"
    path.write_bytes(clip_of(source).data)
    return path
