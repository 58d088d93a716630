"""What a camera costs on this very machine: CPU of decoding and of everything else per completed frame, and memory.

For each load a whole daemon in a process of its own, so that memory begins anew; real decoding, real inference. Files
play as if they were live: what the cap has no use for is not decoded where the codec allows that.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edge_runtime.app.daemon import Daemon, Observers
from edge_runtime.config import parse_config
from edge_runtime.engine.bundle import Bundle
from edge_runtime.errors import EdgeError
from edge_runtime.hardware.memory import peak_resident_bytes, resident_bytes, uncached
from edge_runtime.records.frames import FrameResult

WARM_UP_S = 3.0
"""Before what is measured: two groups of pictures, from which the cameras learn what they may leave out."""
STOP_S = 60.0
"""What a child may take beside its warm-up and its seconds."""


@dataclass(frozen=True, slots=True)
class Load:
    """`cameras` that show the same clip, `fps` wanted of each (None: all that there is)."""

    cameras: int
    fps: float | None

    def __str__(self) -> str:
        return f"{self.cameras} x {'all' if self.fps is None else f'{self.fps:g} fps'}"


@dataclass(frozen=True, slots=True)
class Cost:
    """What a load cost over `seconds`.

    `least_share`, `most_share`: of the cameras, completed over wanted frames; null where all are wanted. CPU in us per
    completed frame: of decoding, and of the rest of the process. `decode_cores`: CPU of decoding, in cores.
    `not_decoded`: share of the packets. Memory in MB of 2^20 bytes.
    """

    load: Load
    seconds: float
    completed: int
    least_share: float | None
    most_share: float | None
    decode_us: float
    rest_us: float
    decode_cores: float
    not_decoded: float
    rss_mb: float
    peak_rss_mb: float


@dataclass(frozen=True, slots=True)
class CamerasBench:
    """Medians over `repeats` runs of each load, in turn."""

    bundle: str
    variant: str
    repeats: int
    costs: tuple[Cost, ...]

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "rss_mb_per_camera": self.rss_mb_per_camera()}

    def rss_mb_per_camera(self) -> float | None:
        """Resident memory of one camera more, between the smallest and the largest load of the same rate; null where
        there are no two."""
        most = max(self.costs, key=lambda each: each.load.cameras)
        least = min((each for each in self.costs if each.load.fps == most.load.fps), key=lambda each: each.load.cameras)
        more = most.load.cameras - least.load.cameras
        return round((most.rss_mb - least.rss_mb) / more, 2) if more else None


@dataclass(frozen=True, slots=True)
class Plan:
    """`isolation`: where cameras are read, as in a configuration. `warm_up_s`: before what is measured."""

    loads: Sequence[Load]
    variant: str
    seconds: float = 15.0
    repeats: int = 3
    isolation: str = "thread"
    warm_up_s: float = WARM_UP_S


def measure_cameras(
    bundle: Bundle, clip: Path, plan: Plan, *, progress: Callable[[str], None] = lambda _: None
) -> CamerasBench:
    """Each load in turn, `repeats` times. Raises EdgeError where a child fails."""
    found: dict[Load, list[Cost]] = {load: [] for load in plan.loads}
    for repeat in range(plan.repeats):
        for load in plan.loads:
            progress(f"{load} ({repeat + 1} of {plan.repeats})")
            found[load].append(_measured_apart(bundle, clip, plan, load))
    return CamerasBench(
        bundle.name, plan.variant, plan.repeats, tuple(_median(load, costs) for load, costs in found.items())
    )


def _median(load: Load, costs: Sequence[Cost]) -> Cost:
    def of(name: str) -> Any:
        values = [value for cost in costs if (value := getattr(cost, name)) is not None]
        return round(statistics.median(values), 4) if values else None

    names = [name for name in Cost.__dataclass_fields__ if name != "load"]
    return Cost(load=load, **{name: of(name) for name in names})


def _measured_apart(bundle: Bundle, clip: Path, plan: Plan, load: Load) -> Cost:
    with tempfile.TemporaryDirectory(prefix="edge-runtime-bench-") as store:
        order = {
            "config": _config(Path(store), bundle, clip, plan, load),
            "store": store,
            "seconds": plan.seconds,
            "warm_up_s": plan.warm_up_s,
            "fps": load.fps,
        }
        try:
            done = subprocess.run(
                [sys.executable, "-m", __name__],
                input=json.dumps(order),
                capture_output=True,
                text=True,
                timeout=plan.warm_up_s + plan.seconds + STOP_S,
                check=False,
                # as `edge-runtime run` has it
                env=uncached(os.environ) or os.environ,
            )
        except subprocess.TimeoutExpired as error:
            raise EdgeError(f"the daemon with {load} did not end in time", code="bench_failed") from error
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["without a word"]
        raise EdgeError(f"the daemon with {load} ended with {done.returncode}: {last[0]}", code="bench_failed")
    return Cost(load=load, **json.loads(done.stdout))


def _config(store: Path, bundle: Bundle, clip: Path, plan: Plan, load: Load) -> str:
    rate = "" if load.fps is None else f"fps = {load.fps}\n"
    text = f"""
[device]
id = "bench"
hardware = "none"
store = {json.dumps(str(store))}
[[model]]
name = "model"
bundle = {json.dumps(str(bundle.root))}
variant = "{plan.variant}"
[telemetry]
window_s = 2.0
"""
    for number in range(load.cameras):
        text += f'[[camera]]\nname = "camera-{number}"\nurl = {json.dumps(f"file:{clip.resolve()}")}\n'
        text += f'isolation = "{plan.isolation}"\n{rate}'
    return text


# ---- in the child


def _measure_here(order: Mapping[str, Any]) -> dict[str, Any]:
    """Run a daemon as ordered, and say what it cost: the fields of a Cost, but for `load`."""
    counts: Counter[str] = Counter()
    lock = threading.Lock()

    def take(result: FrameResult) -> None:
        with lock:
            counts[result.camera] += 1

    daemon = Daemon(parse_config(order["config"], "bench", Path(order["store"])), Observers(result=take))

    def mark() -> tuple[float, float, dict[str, int], int, int, int]:
        views = daemon.pipeline.cameras()
        with lock:
            done = dict(counts)
        return (
            time.monotonic(),
            time.process_time(),
            done,
            sum(view.effort.decode_cpu_ns for view in views),
            sum(view.source.decoded for view in views),
            sum(view.source.skipped_codec for view in views),
        )

    try:
        daemon.start()
        daemon.wait(order["warm_up_s"])
        start_s, cpu_start_s, done_before, decode_before_ns, decoded_before, skipped_before = mark()
        daemon.wait(order["seconds"])
        end_s, cpu_end_s, done, decode_ns, decoded, skipped = mark()
        rss, peak = resident_bytes() or 0, peak_resident_bytes() or 0
        names = [view.name for view in daemon.pipeline.cameras()]
    finally:
        daemon.stop()
    span_s = end_s - start_s
    each = [done.get(name, 0) - done_before.get(name, 0) for name in names]
    completed = sum(each)
    decode_s = (decode_ns - decode_before_ns) / 1e9
    packets = decoded - decoded_before + skipped - skipped_before
    wanted = None if order["fps"] is None else order["fps"] * span_s
    return {
        "seconds": round(span_s, 3),
        "completed": completed,
        "least_share": None if wanted is None else round(min(each) / wanted, 4),
        "most_share": None if wanted is None else round(max(each) / wanted, 4),
        "decode_us": round(1e6 * decode_s / max(1, completed), 1),
        "rest_us": round(1e6 * (cpu_end_s - cpu_start_s - decode_s) / max(1, completed), 1),
        "decode_cores": round(decode_s / span_s, 4),
        "not_decoded": round((skipped - skipped_before) / max(1, packets), 4),
        "rss_mb": round(rss / 2**20, 1),
        "peak_rss_mb": round(peak / 2**20, 1),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_measure_here(json.load(sys.stdin))))
