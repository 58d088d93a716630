"""Damaged files through the PyAV backend: no crash, no hang, no leak, and no picture that nobody filmed.

What is right is known from the intact file: a picture that comes out is one of its pictures, bit for bit. Where bits of
the pictures themselves were changed that cannot be asked for: H.264, H.265 and MJPEG have no check sum, and a wrong bit
often reads as well as the right one. FFmpeg's H.265 decoder does not even notice a slice that ends early. Such damage
is bounded here, not excluded; on the way over a network it is found by others (TCP, RTP's and TS's counters).
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import multiprocessing
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import av
import numpy as np
import psutil
import pytest

from edge_runtime.camera.av import ContainerSession
from edge_runtime.camera.av_pixels import AvPixels
from edge_runtime.camera.options import CameraOptions
from edge_runtime.camera.pacing import RateCap
from edge_runtime.camera.session import Alone
from edge_runtime.camera.streams import stream_of
from edge_runtime.clock import SystemClock
from edge_runtime.errors import CameraError
from edge_runtime.records.frames import Pixels
from edge_runtime.records.spec import InputSpec
from tests.camera.clips import av_camera
from tests.camera.containers import write
from tests.camera.mutants import Source, _other, choice, describe, intact, mutant

T = TypeVar("T")
Seen = tuple[bytes, float]
"""Of a picture: its digest, and what share of it is blank."""
SPEC = InputSpec(96, 64)
CLIP_S = 10.0
# Bits of pictures, or of what says how they are coded, are changed or missing. All others must be exact.
_BITS = {"few_bits", "sparse_bits", "dense_bits", "slice_bits", "header_bits", "cut_packets", "hole", "lost_bytes"}
UNDETECTABLE = {
    # A key frame may go unmissed where 16 pictures, as far as frame_num counts, lie between it and the last one; and
    # slices of another clip without its parameter sets are read by those of the clip before.
    "h264": _BITS | {"container_bits", "no_idr", "spliced"},
    "h265": _BITS | {"container_bits", "truncated", "spliced"},
    "mjpeg": _BITS | {"container_bits"},
}


@dataclass
class Found:
    """What came of a clip: pictures, how many of them are not in the intact clip, how many lack a part."""

    pictures: int = 0
    changed: int = 0
    blank: int = 0
    exact: bool = True


def digest(pixels: Pixels) -> bytes:
    assert isinstance(pixels, AvPixels)
    return hashlib.sha1(pixels.frame.to_ndarray().tobytes()).digest()


def blank_share(pixels: Pixels) -> float:
    """Share of the picture that is the one grey, or the one green, of a decoder that had nothing to draw."""
    assert isinstance(pixels, AvPixels)
    frame = pixels.frame
    if frame.format.name not in ("yuv420p", "yuvj420p"):
        return 0.0
    luma, cb, cr = (
        np.frombuffer(memoryview(plane), np.uint8).reshape(-1, plane.line_size)[: plane.height, : plane.width]
        for plane in frame.planes
    )
    luma = luma[: cb.shape[0] * 2 : 2, : cb.shape[1] * 2 : 2]
    cb, cr = cb[: luma.shape[0], : luma.shape[1]], cr[: luma.shape[0], : luma.shape[1]]
    grey = (luma == 128) & (cb == 128) & (cr == 128)
    green = (luma == 0) & (cb == 0) & (cr == 0)
    return float((grey | green).mean())


def look(pixels: Pixels) -> Seen:
    return digest(pixels), blank_share(pixels)


def good(source: Source, folder: Path) -> frozenset[bytes]:
    """Every picture of the intact clip."""
    path = folder / f"good-{abs(hash(source))}"
    path.mkdir(exist_ok=True)
    with av.open(str(intact(source, path))) as container:
        return frozenset(digest(AvPixels(frame)) for frame in container.decode(video=0))


def other_good(source: Source, folder: Path) -> frozenset[bytes]:
    """Every picture of the clip that is spliced into those of `source`."""
    other = _other(source)
    path = folder / f"other-{abs(hash(source))}.{source.suffix}"
    path.write_bytes(write(source.container, other.track, other.samples))
    with av.open(str(path)) as container:
        return frozenset(digest(AvPixels(frame)) for frame in container.decode(video=0))


def read(path: Path) -> list[Seen]:
    """All pictures, through a camera, with everything that must hold about it."""
    camera = av_camera(name="a", url=str(path), pace="max", loop=False)
    seen: list[Seen] = []
    times = [-1]

    def work() -> None:
        place = np.empty(SPEC.shape, np.float32)
        while (frame := camera.read()) is not None:
            assert frame.t_capture_ns > times[-1]
            times.append(frame.t_capture_ns)
            frame.pixels.write_into(place, SPEC)
            assert np.isfinite(place).all()
            seen.append(look(frame.pixels))

    thread = threading.Thread(target=work, name="corpus")
    thread.start()
    end = time.monotonic() + CLIP_S
    while thread.is_alive() and camera.status().state != "down":
        assert time.monotonic() < end, "it hangs"
        thread.join(0.002)
    camera.stop()
    thread.join(CLIP_S)
    assert not thread.is_alive(), "it does not stop"
    camera.close()
    status, source = camera.status(), camera.source()
    assert status.state in ("down", "stopped")
    assert status.reason
    assert source.decoded == len(seen) + source.duplicate
    assert (source.skipped_rate, source.skipped_codec) == (0, 0)
    assert len(times) == len(seen) + 1
    return seen


class Capped(Alone):
    """A camera whose file is read as if it came live, and that wants few of its pictures."""

    def __init__(self, fps: float) -> None:
        super().__init__(SystemClock())
        self.cap = RateCap(fps)

    def early(self, pts_ns: int | None, t_packet_ns: int, skipped: int = 0) -> tuple[int, int]:
        return (0 if pts_ns is None else self.cap.early_ns(pts_ns)), self.cap.step_ns


def read_capped(path: Path, fps: float) -> list[Seen]:
    """Those pictures that a cap lets be decoded: what is skipped must not harm what is not."""
    intake = Capped(fps)
    seen: list[Seen] = []
    stream = stream_of(CameraOptions(name="a", url=str(path)))
    try:
        session = ContainerSession(stream, intake, intake.ledger._clock)
    except CameraError:
        return []
    try:
        for picture in session.pictures():
            seen.append(look(picture.pixels))
            if picture.pts_ns is not None:
                intake.cap.wants(picture.pts_ns)
    except CameraError:
        pass
    finally:
        session.close()
    return seen


class Maker:
    """Makes the damaged clips and knows what is right, in a process of its own where it has a pool: encoders take
    memory that this test is not about."""

    def __init__(self, folder: Path, pool: ProcessPoolExecutor | None = None) -> None:
        self._folder = folder
        self._pool = pool
        self._known: dict[tuple[Callable[..., frozenset[bytes]], Source], frozenset[bytes]] = {}

    def _run(self, function: Callable[..., T], *arguments: object) -> T:
        if self._pool is None:
            return function(*arguments, self._folder)
        return self._pool.submit(function, *arguments, self._folder).result()

    def mutant(self, seed: int) -> Path:
        return self._run(mutant, seed)

    def known(self, kind: str, source: Source) -> frozenset[bytes]:
        known: frozenset[bytes] = frozenset()
        for function in (good, other_good) if kind == "spliced" else (good,):
            if (function, source) not in self._known:
                self._known[function, source] = self._run(function, source)
            known |= self._known[function, source]
        return known


def examine(seed: int, maker: Maker) -> Found:
    kind, source = choice(seed)
    path = maker.mutant(seed)
    known = maker.known(kind, source)
    try:
        pictures = read(path)
        pictures += read_capped(path, (1.0, 3.0, 8.0)[seed % 3])
    finally:
        path.unlink()
    found = Found(len(pictures), exact=kind not in UNDETECTABLE[source.codec])
    for picture, blank in pictures:
        if picture not in known:
            found.changed += 1
            # FFmpeg's H.265 decoder leaves out what a slice that ends early should have had, and does not say so.
            found.blank += source.codec != "h265" and blank > 0.25
    if found.exact:
        assert found.changed == 0, f"{found.changed} of {found.pictures} pictures are none that was encoded"
    return found


def battery(seeds: range, folder: Path) -> Found:
    total, maker = Found(), Maker(folder)
    for seed in seeds:
        try:
            found = examine(seed, maker)
        except BaseException as error:
            raise AssertionError(describe(seed)) from error
        total.pictures += found.pictures
        total.changed += found.changed
        total.blank += found.blank
    return total


def test_damaged_clips_give_their_own_pictures_or_none(tmp_path: Path) -> None:
    total = battery(range(60), tmp_path)
    assert total.pictures > 1000
    assert total.blank <= total.pictures * 0.01
    assert total.changed <= total.pictures * 0.25


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_a_thousand_damaged_clips(tmp_path: Path) -> None:
    """In a process of its own: a crash in the decoder would take pytest with it, and its memory is its own."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.camera.test_corpus", "0", "1000", str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as child:
        assert child.stdout is not None
        lines = [json.loads(line) for line in child.stdout]
    last = lines[-1]["seed"] if lines else None
    assert child.wait(30) == 0, f"ended with {child.returncode} after {last}, at {describe((last or 0) + 1)}"
    assert [line["error"] for line in lines if line["error"]] == []
    assert len(lines) == 1000
    pictures, changed, blank = (sum(line[key] for line in lines) for key in ("pictures", "changed", "blank"))
    # A block of some MB comes and goes with what malloc puts behind it: the floor tells what stays.
    grown_mb = (min(line["rss"] for line in lines[-300:]) - lines[100]["rss"]) / 1e6
    print(f"{pictures} pictures, {changed} changed, {blank} with blank parts, {grown_mb:.1f} MB grown")
    assert blank <= pictures * 0.01
    assert changed <= pictures * 0.25
    assert grown_mb <= 10


def main() -> None:
    first, last, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        maker = Maker(folder, pool)
        for seed in range(first, last):
            error, found = "", Found()
            try:
                found = examine(seed, maker)
            except Exception as fault:  # noqa: BLE001
                error = f"{describe(seed)}: {type(fault).__name__}: {fault}"
            # What the allocator keeps of a large picture for the next one is no leak.
            ctypes.CDLL(None).malloc_trim(0)
            rss = psutil.Process().memory_info().rss
            counts = {"pictures": found.pictures, "changed": found.changed, "blank": found.blank}
            print(json.dumps({"seed": seed, "error": error, "rss": rss} | counts), flush=True)


if __name__ == "__main__":
    main()
