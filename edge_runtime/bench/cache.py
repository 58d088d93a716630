"""What the caches save, and what they cost in detections: frame by frame, in one thread, with nothing left to chance.

Every frame is inferred, and every cache is asked as well. So what a cache gives again stands beside what the model
would have said of that very frame.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_runtime.camera.av import decode_image
from edge_runtime.camera.media import probe
from edge_runtime.camera.open import open_camera
from edge_runtime.camera.options import CameraOptions
from edge_runtime.engine.bundle import Bundle
from edge_runtime.engine.onnxrt import load_engine
from edge_runtime.engine.slot import Resident, Tally
from edge_runtime.pipeline.cache import AnswerCache
from edge_runtime.pipeline.ledger import Ledger, Stream
from edge_runtime.prepare.evidence import overlap
from edge_runtime.records.activity import CacheMode, CacheOutcome
from edge_runtime.records.frames import Classification, Output, Pixels
from edge_runtime.vision.decode import build_decoder

MODES: tuple[CacheMode, ...] = ("exact", "scene")
NOISES = (2.0, 4.0)
"""Standard deviations of a sensor's noise, levels: by day, and in the evening."""
STILL_AT = 0.5
"""The still scene is the picture at this part of the first clip."""
MIN_IOU = 0.5
FPS = 10.0
"""Of scenes that are made here, and of a clip that does not say."""


@dataclass(frozen=True, slots=True)
class CacheRow:
    """One cache on one scene. `saved`: share of the frames that were not inferred. `recall`: of the detections of every
    frame when each is inferred, the share that the cache's answers hold too (class, IoU 0.5); `recall_given`: the same
    of those frames alone that got an earlier answer; `repeated`: the share that the model itself, without any cache,
    finds again in the next frame. None where there are none. `look_us`: median of a look-up."""

    scene: str
    cache: CacheMode
    frames: int
    saved: float
    bypassed: float
    detections: int
    recall: float | None
    recall_given: float | None
    repeated: float | None
    look_us: float | None


@dataclass(frozen=True, slots=True)
class CacheBench:
    """All of them, and the median of a run of the model, ms."""

    bundle: str
    variant: str
    max_age_s: float
    infer_ms: float
    rows: list[CacheRow]

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def measure_cache(
    bundle: Bundle,
    variant: str,
    clips: list[Path],
    *,
    frames: int = 200,
    max_age_s: float = 10.0,
    progress: Callable[[str], None] = lambda _: None,
) -> CacheBench:
    """Whole `clips`, then `frames` pictures each of: one picture of the first clip, the same with a sensor's noise, and
    nothing but noise. Raises CameraError where a clip cannot be read."""
    engine = load_engine(bundle, variant)
    info = engine.info
    decoder = build_decoder(info.output, info.input, info.output_shapes)
    resident = Resident(engine, decoder, lanes=1, places=1, buffers=1)
    picture = _picture_of(clips[0])
    scenes: list[tuple[str, float, Iterable[Pixels]]] = [(clip.stem, _fps(clip), _played(clip)) for clip in clips]
    scenes.append(("still", FPS, _noisy(picture, 0, frames)))
    scenes += [(f"still, noise {noise:g}", FPS, _noisy(picture, noise, frames)) for noise in NOISES]
    scenes.append(("noise alone", FPS, _noise_alone(picture.shape, frames)))
    rows: list[CacheRow] = []
    runs_s: list[float] = []
    try:
        for name, fps, pictures in scenes:
            progress(name)
            trials = [_Trial(mode, max_age_s) for mode in MODES]
            _play(resident, pictures, fps, trials, runs_s)
            rows += [trial.row(name) for trial in trials]
    finally:
        resident.close()
    return CacheBench(bundle.name, info.variant, max_age_s, float(np.median(runs_s)) * 1e3, rows)


class _Trial:
    """One cache on one scene."""

    def __init__(self, mode: CacheMode, max_age_s: float) -> None:
        self.mode = mode
        self.cache = AnswerCache(mode, max_age_s)
        self.stream: Stream = Ledger().open_stream("camera", "model", lambda _: None)
        self.outcomes: dict[CacheOutcome, int] = {"hit": 0, "miss": 0, "bypassed": 0}
        self.looks_s: list[float] = []
        self.wanted = self.found = 0
        self.wanted_given = self.found_given = 0
        self.wanted_again = self.found_again = 0
        self.before: Output | None = None

    def count(self, own: Output, given: Output | None) -> None:
        """What the model said of a frame, and what the cache gave in its place."""
        self.wanted += len(own)
        self.found += len(own) if given is None else found_in(own, given)
        if given is not None:
            self.wanted_given += len(own)
            self.found_given += found_in(own, given)
        if self.before is not None:
            self.wanted_again += len(self.before)
            self.found_again += found_in(self.before, own)
        self.before = own

    def row(self, scene: str) -> CacheRow:
        frames = sum(self.outcomes.values())
        return CacheRow(
            scene=scene,
            cache=self.mode,
            frames=frames,
            saved=self.outcomes["hit"] / frames,
            bypassed=self.outcomes["bypassed"] / frames,
            detections=self.wanted,
            recall=_share(self.found, self.wanted),
            recall_given=_share(self.found_given, self.wanted_given),
            repeated=_share(self.found_again, self.wanted_again),
            look_us=float(np.median(self.looks_s)) * 1e6 if self.looks_s else None,
        )


def _share(found: int, wanted: int) -> float | None:
    return found / wanted if wanted else None


def _play(
    resident: Resident, pictures: Iterable[Pixels], fps: float, trials: list[_Trial], runs_s: list[float]
) -> None:
    lane, buffer, spec = resident.lanes[0], resident.free[0], resident.info.input
    place = buffer.array[0]
    # a new scene finds the engine as a new one
    resident.tally = Tally(1)
    for index, pixels in enumerate(pictures):
        transform = pixels.write_into(place, spec)
        t_capture_ns = int(index / fps * 1e9)
        looks = []
        for trial in trials:
            start = time.perf_counter()
            look = trial.cache.look(trial.stream, t_capture_ns, place, transform, resident)
            took_s = time.perf_counter() - start
            assert look is not None
            trial.outcomes[look.outcome] += 1
            if look.outcome != "bypassed":
                trial.looks_s.append(took_s)
            looks.append(look)
        start = time.perf_counter()
        lane.submit(buffer, 1)
        outputs = lane.collect()
        runs_s.append(time.perf_counter() - start)
        own = resident.decoder(outputs, 0, transform)
        resident.tally.ran(0, 1, 0)
        for trial, look in zip(trials, looks, strict=True):
            if look.memo is not None:
                look.memo.keep(own)
            trial.count(own, look.output)


def found_in(wanted: Output, given: Output) -> int:
    """How many of the detections of `wanted` are in `given`: of the same class and with an IoU of at least 0.5, each
    used once, best scores first. Of classes of a whole picture, how many are the same."""
    if isinstance(wanted, Classification) or isinstance(given, Classification):
        return len(set(wanted.class_ids.tolist()) & set(given.class_ids.tolist()))
    overlaps = overlap(wanted.boxes, given.boxes)
    overlaps[wanted.class_ids[:, np.newaxis] != given.class_ids] = 0
    found = 0
    for row in overlaps if overlaps.shape[1] else ():
        best = int(row.argmax())
        if row[best] >= MIN_IOU:
            found += 1
            overlaps[:, best] = 0
    return found


# --- scenes


def _fps(clip: Path) -> float:
    return probe(f"file:{clip.resolve()}").fps or FPS


def _played(clip: Path) -> Iterator[Pixels]:
    camera = open_camera(CameraOptions(name="clip", url=f"file:{clip.resolve()}", pace="max", loop=False))
    try:
        while (frame := camera.read()) is not None:
            yield frame.pixels
    finally:
        camera.stop()
        camera.close()


def _picture_of(clip: Path) -> NDArray[np.uint8]:
    count = sum(1 for _ in _played(clip))
    return next(pixels for index, pixels in enumerate(_played(clip)) if index == int(count * STILL_AT)).to_rgb()


def _noisy(picture: NDArray[np.uint8], noise: float, frames: int) -> Iterator[Pixels]:
    random = np.random.default_rng(1)
    for _ in range(frames):
        levels = picture + random.normal(0, noise, picture.shape) if noise else picture
        yield _pixels(np.clip(np.rint(levels), 0, 255).astype(np.uint8))


def _noise_alone(shape: tuple[int, ...], frames: int) -> Iterator[Pixels]:
    random = np.random.default_rng(2)
    for _ in range(frames):
        yield _pixels(random.integers(0, 256, shape, np.uint8))


def _pixels(rgb: NDArray[np.uint8]) -> Pixels:
    """[height, width, 3] uint8 RGB as a decoded picture, by way of a BMP file: the daemon's own scaler is to see it."""
    height, width, _ = rgb.shape
    lines = np.zeros((height, (width * 3 + 3) // 4 * 4), np.uint8)
    lines[:, : width * 3] = rgb[::-1, :, ::-1].reshape(height, width * 3)
    head = struct.pack(
        "<2sIHHIIiiHHIIiiII", b"BM", 54 + lines.size, 0, 0, 54, 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0
    )
    return decode_image(head + lines.tobytes())
