"""Many clips, or many connections, through the GStreamer backend in one process that does nothing else.

`python -m tests.camera.gst_soak clips FIRST LAST FOLDER` or `... streams COUNT URL`. A line of JSON for each.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import psutil

from edge_runtime.backoff import Backoff
from edge_runtime.camera.gstreamer import GstCamera
from edge_runtime.camera.options import CameraOptions
from tests.camera.gst import tasks
from tests.camera.mutants import describe, mutant

CLIP_S = 15.0


def read(url: str, most: int | None = None) -> tuple[int, str]:
    """(how many pictures, what was wrong)."""
    options = CameraOptions("soak", url, backend="gstreamer", pace="max", loop=False, stall_s=2.0, open_s=1.5)
    camera = GstCamera(options, backoff=Backoff(base_s=60.0, limit_s=60.0, jitter=False))
    done = threading.Event()
    errors = []

    def watch() -> None:
        end_s = time.monotonic() + CLIP_S
        while not done.wait(0.002):
            if time.monotonic() > end_s:
                errors.append("it hangs")
            if errors or camera.status().state == "down":
                camera.stop()
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    count = 0
    while (most is None or count < most) and camera.read() is not None:
        count += 1
    done.set()
    watcher.join()
    camera.stop()
    camera.close()
    source = camera.source()
    if source.decoded != count + source.skipped_rate + source.duplicate:
        errors.append(f"{count} pictures, {source}")
    return count, "; ".join(errors)


def clips(first: int, last: int, folder: Path) -> Iterator[tuple[int, str]]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        for seed in range(first, last):
            path = pool.submit(mutant, seed, folder).result()
            count, error = read(f"file:{path}")
            path.unlink()
            yield count, f"{describe(seed)}: {error}" if error else ""


def streams(count: int, url: str) -> Iterator[tuple[int, str]]:
    for _ in range(count):
        pictures, error = read(url, 2)
        yield pictures, error if pictures == 2 else f"{pictures} pictures; {error}"


def main() -> None:
    kind, *rest = sys.argv[1:]
    soak = clips(int(rest[0]), int(rest[1]), Path(rest[2])) if kind == "clips" else streams(int(rest[0]), rest[1])
    me, trim = psutil.Process(), ctypes.CDLL(None).malloc_trim
    for pictures, error in soak:
        # What the allocator keeps of a large picture for the next one is no leak.
        trim(0)
        numbers = {"rss": me.memory_info().rss, "descriptors": me.num_fds(), "tasks": tasks()}
        print(json.dumps({"pictures": pictures, "error": error, **numbers}), flush=True)


if __name__ == "__main__":
    main()
