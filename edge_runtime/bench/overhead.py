"""What the framework itself costs: process CPU per completed frame, with no pixels and no inference."""

from __future__ import annotations

import gc
import statistics
import sys
import threading
import time
from collections import deque
from dataclasses import asdict, dataclass

from edge_runtime.app.daemon import SWEEP_PERIOD_S, SWITCH_INTERVAL_S
from edge_runtime.app.identity import make_identity
from edge_runtime.bench.nothing import NothingEngine, find_nothing, nothing_camera
from edge_runtime.clock import SystemClock
from edge_runtime.engine.slot import Resident
from edge_runtime.pipeline.pipeline import Pipeline
from edge_runtime.records.governing import Budget, Operating
from edge_runtime.records.power import Unavailable
from edge_runtime.records.window import WindowReport
from edge_runtime.telemetry.windows import WindowBuilder, WindowLoop, WindowSources

WARM_UP_S = 1.0
WINDOW_S = 10.0
"""The daemon's default."""


@dataclass(frozen=True, slots=True)
class OverheadResult:
    """CPU (user and system, all threads) per completed frame in us; one value a repeat, and their median.

    `handoff_us_median`: the same, measured in turn, of as many threads that wake at the same rate and wake one of
    as many others through a Condition, and do nothing else: what the operating system and the interpreter
    take for two wake-ups on this machine, now. It is part of `cpu_us`.
    """

    cameras: int
    fps: float
    lanes: int
    seconds: float
    completed: int
    captured: int
    cpu_us: list[float]
    cpu_us_median: float
    handoff_us_median: float

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def measure_overhead(
    *, cameras: int, fps: float = 10.0, lanes: int = 2, seconds: float = 10.0, repeats: int = 5
) -> OverheadResult:
    """`cameras` cameras at `fps` through capture threads, claim, lanes, tickets, ledger and windows.

    Real-time pace, 768 x 576 px frames, results in order to a consumer, windows as JSON, the
    supervisor's sweep. The engine answers at once and no pixel is touched.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    values, floors, completed, captured = [], [], 0, 0
    for _ in range(repeats):
        floors.append(_handoff(cameras, fps, lanes, seconds / 2))
        cpu_us, done, taken = _once(cameras, fps, lanes, seconds)
        values.append(cpu_us)
        completed += done
        captured += taken
    return OverheadResult(
        cameras=cameras,
        fps=fps,
        lanes=lanes,
        seconds=seconds,
        completed=completed,
        captured=captured,
        cpu_us=[round(value, 1) for value in values],
        cpu_us_median=round(statistics.median(values), 1),
        handoff_us_median=round(statistics.median(floors), 1),
    )


def _handoff(producers: int, fps: float, consumers: int, seconds: float) -> float:
    """CPU us per item of nothing but wake-ups: timer -> producer -> Condition -> consumer."""
    waiting: deque[None] = deque()
    changed = threading.Condition(threading.Lock())
    ending = threading.Event()
    done = [0]

    def produce(offset_s: float) -> None:
        due = time.monotonic() + offset_s
        while not ending.wait(max(0.0, due - time.monotonic())):
            due += 1 / fps
            with changed:
                waiting.append(None)
                changed.notify()

    def consume() -> None:
        while True:
            with changed:
                while not waiting:
                    if ending.is_set():
                        return
                    changed.wait()
                waiting.popleft()
                done[0] += 1

    offsets = [index / fps / producers for index in range(producers)]
    threads = [threading.Thread(target=produce, args=(offset,), daemon=True) for offset in offsets]
    threads += [threading.Thread(target=consume, daemon=True) for _ in range(consumers)]
    for thread in threads:
        thread.start()
    time.sleep(WARM_UP_S)
    before, cpu = done[0], time.process_time()
    time.sleep(seconds)
    cpu, items = time.process_time() - cpu, done[0] - before
    ending.set()
    with changed:
        changed.notify_all()
    for thread in threads:
        thread.join()
    return cpu / max(1, items) * 1e6


def _once(cameras: int, fps: float, lanes: int, seconds: float) -> tuple[float, int, int]:
    count = [0] * cameras
    index_of = {f"camera-{index}": index for index in range(cameras)}

    def take(result: object) -> None:
        count[index_of[result.camera]] += 1  # type: ignore[attr-defined]

    pipeline = Pipeline(take)
    resident = Resident(NothingEngine(), find_nothing, lanes=lanes, places=1, buffers=2 * lanes + 1)
    pipeline.add_model("nothing", resident, lanes=lanes)
    for name in index_of:
        pipeline.add_camera(nothing_camera(name, fps), ["nothing"])
    reports: list[WindowReport] = []
    sizes: list[int] = []

    def consume(report: WindowReport) -> None:
        reports.append(report)
        sizes.append(len(report.to_json()))

    sources = WindowSources(
        cut=pipeline.cut,
        cameras=pipeline.cameras,
        models=list,
        energy=lambda _, __: Unavailable("not measured here"),
        thermal=lambda: Unavailable("not measured here"),
        clock_synced=lambda: True,
        fps_wanted=dict,
        operating=lambda: Operating(Budget()),
        seconds_above=lambda _, __, ___: Unavailable("not measured here"),
    )
    windows = WindowLoop(WindowBuilder(make_identity("bench"), sources, SystemClock()), consume, WINDOW_S)
    ending = threading.Event()

    def supervise() -> None:
        while not ending.wait(SWEEP_PERIOD_S):
            pipeline.sweep()

    supervisor = threading.Thread(target=supervise, name="supervisor", daemon=True)
    gc.collect()
    gc.freeze()
    pipeline.start()
    windows.start()
    supervisor.start()
    time.sleep(WARM_UP_S)
    before, cpu = sum(count), time.process_time()
    time.sleep(seconds)
    cpu, done = time.process_time() - cpu, sum(count) - before
    ending.set()
    pipeline.stop()
    windows.stop()
    supervisor.join()
    pipeline.close()
    gc.unfreeze()
    for report in reports:
        frames = report.frames
        ended = frames.completed + frames.cached + frames.stale + sum(frames.dropped.values()) + frames.failed
        assert frames.carried_in + frames.captured == ended + frames.in_flight
    return cpu / max(1, done) * 1e6, done, sum(report.frames.captured for report in reports)
