"""A surge of frames on this very machine: what the latency tuner and the ladder make of it, beside doing without.

A whole daemon in this process, real inference. Cameras bring decoded pictures at a rate that follows a script, in
shares of what the heaviest variant was measured to manage under the same cameras: 10 %, then 100 %, 200 %, and back.
"""

from __future__ import annotations

import gc
import json
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

from edge_runtime.app.daemon import Daemon, Observers
from edge_runtime.bench.scripted import Pace, decoded, scripted_camera
from edge_runtime.camera.protocol import Camera
from edge_runtime.config import CameraConfig, parse_config
from edge_runtime.engine.bundle import Bundle
from edge_runtime.pipeline.desk import Desk
from edge_runtime.records.commands import VariantArgs
from edge_runtime.records.frames import FrameResult, Pixels

MODEL = "detector"
BASE, SURGES = 0.1, (1.0, 2.0)
"""Offered load, in capacities of the heaviest variant."""
SETTLE_S = 2.0
"""Of each phase, left out: what a governor has to find its way."""
OVERLOAD = 1.5
"""Offered while capacity is measured: every lane always has something to do."""
LEAST_SHARE = 0.4
"""`min_fps` of a camera, as a share of what it brings at 100 %."""
IMPORTANT = 4
"""Every fourth camera has a higher priority."""
PICTURES = 24


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of a run, but for its first `SETTLE_S`.

    `of_capacity`: completed over what could have been: the capacity of the variants that ran, or what was offered where
    that is less. `least_fps`: the worst camera's rate over its `min_fps`, or over what it brought where that is less.
    `busy`: share of lane time. `variants`: share of the frames on each. `because`: the governor's last word.
    """

    name: str
    offered_hz: float
    completed_hz: float
    p50_ms: float | None
    p99_ms: float | None
    of_capacity: float
    least_fps: float
    busy: float
    variants: Mapping[str, float]
    because: str


@dataclass(frozen=True, slots=True)
class SurgeRun:
    """`surge_p99_ms`: of all frames of both surges. `late`: share of them above the budget. `through_p99_ms`: with the
    beginning of the second surge, too, so that only that of the first one is left out."""

    name: str
    phases: tuple[Phase, ...]
    surge_p99_ms: float | None
    late: float
    through_p99_ms: float | None


@dataclass(frozen=True, slots=True)
class SurgeBench:
    """Capacities in frames per second, by variant, the heaviest first; `min_fps` of each camera."""

    bundle: str
    cameras: int
    lanes: int
    budget_ms: float
    min_fps: float
    capacity_hz: Mapping[str, float]
    runs: tuple[SurgeRun, ...]

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run: `seconds` of each surge, half as long before it and three quarters after it."""

    variants: Sequence[str]
    cameras: int = 8
    budget_ms: float = 80.0
    seconds: float = 20.0
    warm_up_s: float = 1.0

    def phases(self) -> list[tuple[str, float, float]]:
        """Name, offered share of capacity, seconds."""
        surges = [(f"surge {share:.0%}", share, self.seconds) for share in SURGES]
        return [("base", BASE, self.seconds / 2), *surges, ("back", BASE, 0.75 * self.seconds)]


def measure_surge(
    bundle: Bundle,
    clip: Path,
    plan: Plan,
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> SurgeBench:
    """Capacities first, then the same script with tuner and ladder, and without."""
    pictures = decoded(clip, PICTURES)
    with tempfile.TemporaryDirectory(prefix="edge-runtime-bench-") as folder:
        progress("capacity")
        capacity_hz, lanes = _capacities(Path(folder) / "capacity", bundle, plan, pictures)
        heaviest_hz = capacity_hz[plan.variants[0]]
        min_fps = round(LEAST_SHARE * heaviest_hz / plan.cameras, 2)
        runs = []
        for name in ("governed", "off"):
            progress(name)
            with _Run(Path(folder) / name, bundle, plan, pictures, min_fps=min_fps, governed=name == "governed") as run:
                runs.append(_script(run, name, plan, capacity_hz, min_fps))
    return SurgeBench(bundle.name, plan.cameras, lanes, plan.budget_ms, min_fps, capacity_hz, tuple(runs))


def _capacities(store: Path, bundle: Bundle, plan: Plan, pictures: Sequence[Pixels]) -> tuple[dict[str, float], int]:
    """Completed frames per second of each variant, with more offered than it can take; and how many lanes there are."""
    with _Run(store, bundle, plan, pictures, min_fps=0.1, governed=False, ladder=True) as run:
        found: dict[str, float] = {}
        costs_s = {each.info.variant: each.run_cpu_s or 0.01 for each in run.desk().ladder()}
        for variant in plan.variants:
            run.daemon.keeper.switch(VariantArgs(model=MODEL, variant=variant, allow_slow=True))
            run.pace.set(OVERLOAD * run.desk().lanes / costs_s[variant])
            run.daemon.wait(plan.warm_up_s)
            # in two halves, so that one thing that holds everything up is seen in one of them only
            halves = []
            for _ in range(2):
                mark = run.mark()
                run.daemon.wait(plan.seconds / 8)
                halves.append(run.since(mark).completed_hz)
            found[variant] = round(max(halves), 2)
        return found, run.desk().lanes


def _script(run: _Run, name: str, plan: Plan, capacity_hz: Mapping[str, float], min_fps: float) -> SurgeRun:
    heaviest_hz = capacity_hz[plan.variants[0]]
    phases = []
    surge_ms: list[float] = []
    through_ms: list[float] = []
    begun: _Mark | None = None
    for phase, share, seconds in plan.phases():
        run.pace.set(share * heaviest_hz)
        run.daemon.wait(min(SETTLE_S, seconds / 2))
        mark = run.mark()
        run.daemon.wait(seconds - min(SETTLE_S, seconds / 2))
        seen = run.since(mark)
        phases.append(_judged(phase, seen, capacity_hz, min_fps, run.because()))
        if share in SURGES:
            surge_ms += seen.latencies_ms
            begun = begun or mark
            through_ms = run.since(begun).latencies_ms
    late = sum(each > plan.budget_ms for each in surge_ms) / max(1, len(surge_ms))
    return SurgeRun(name, tuple(phases), _percentile(surge_ms, 99), round(late, 4), _percentile(through_ms, 99))


def _judged(name: str, seen: _Seen, capacity_hz: Mapping[str, float], min_fps: float, because: str) -> Phase:
    frames = sum(seen.variants.values())
    shares = {variant: round(count / frames, 3) for variant, count in seen.variants.items()}
    # lane time is what adds up: of variants in turn, the harmonic mean
    per_frame_s = sum(share / capacity_hz[variant] for variant, share in shares.items())
    capacity = 1 / per_frame_s if per_frame_s else 0.0
    could_hz = min(capacity, seen.offered_hz)
    least = min((fps / wanted for fps, offered in seen.cameras if (wanted := min(min_fps, offered)) > 0), default=0.0)
    return Phase(
        name,
        round(seen.offered_hz, 2),
        round(seen.completed_hz, 2),
        _percentile(seen.latencies_ms, 50),
        _percentile(seen.latencies_ms, 99),
        round(seen.completed_hz / could_hz, 3) if could_hz else 0.0,
        round(least, 3),
        round(seen.busy, 3),
        shares,
        because,
    )


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return round(float(np.percentile(values, percent)), 1) if values else None


@dataclass(frozen=True, slots=True)
class _Mark:
    t_ns: int
    results: int
    decoded: dict[str, int]
    busy_ns: int


@dataclass(frozen=True, slots=True)
class _Seen:
    """What came of a span. `cameras`: each one's completed and offered frames per second."""

    offered_hz: float
    completed_hz: float
    latencies_ms: list[float]
    variants: Counter[str]
    cameras: list[tuple[float, float]]
    busy: float


class _Run:
    """A daemon under scripted cameras, as a context."""

    def __init__(
        self,
        store: Path,
        bundle: Bundle,
        plan: Plan,
        pictures: Sequence[Pixels],
        *,
        min_fps: float,
        governed: bool,
        ladder: bool = False,
    ) -> None:
        store.mkdir(parents=True)
        self.pace = Pace(1.0)
        self._warm_up_s = plan.warm_up_s
        self._results: list[tuple[str, str, float]] = []
        self._lock = threading.Lock()
        names = [f"camera-{number}" for number in range(plan.cameras)]

        def open_source(config: CameraConfig) -> Camera:
            return scripted_camera(config.name, names.index(config.name), len(names), self.pace, pictures)

        text = _config(store, bundle, plan, min_fps, governed=governed, ladder=ladder or governed)
        self.daemon = Daemon(parse_config(text, "bench", store), Observers(result=self._take), open_source=open_source)

    def __enter__(self) -> _Run:
        self.daemon.start()
        self.daemon.wait(self._warm_up_s)
        gc.collect()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.daemon.stop()

    def desk(self) -> Desk:
        return self.daemon.pipeline.models[MODEL].desk

    def because(self) -> str:
        """The governor's state and reason, and how many cameras it holds back."""
        decision = self.daemon.operating().decision
        if decision is None:
            return "off"
        held = Counter(decision.limits.values())
        return f"{decision.because} ({', '.join(f'{count} for {word}' for word, count in held.items()) or 'none held'})"

    def mark(self) -> _Mark:
        """From here on."""
        with self._lock:
            results = len(self._results)
        return _Mark(time.monotonic_ns(), results, self._decoded(), self.daemon.pipeline.busy_ns())

    def since(self, mark: _Mark) -> _Seen:
        """What came since then."""
        now_ns, decoded_now, busy_ns = time.monotonic_ns(), self._decoded(), self.daemon.pipeline.busy_ns()
        with self._lock:
            results = self._results[mark.results :]
        span_s = (now_ns - mark.t_ns) / 1e9
        done = Counter(camera for camera, _, _ in results)
        offered = {name: count - mark.decoded[name] for name, count in decoded_now.items()}
        return _Seen(
            sum(offered.values()) / span_s,
            len(results) / span_s,
            [latency_ms for _, _, latency_ms in results],
            Counter(variant for _, variant, _ in results),
            [(done[name] / span_s, count / span_s) for name, count in offered.items()],
            (busy_ns - mark.busy_ns) / 1e9 / (span_s * self.desk().lanes),
        )

    def _take(self, result: FrameResult) -> None:
        latency_ms = (result.timings.t_result_ns - result.t_capture_ns) / 1e6
        with self._lock:
            self._results.append((result.camera, result.variant, latency_ms))

    def _decoded(self) -> dict[str, int]:
        return {view.name: view.source.decoded for view in self.daemon.pipeline.cameras()}


def _config(store: Path, bundle: Bundle, plan: Plan, min_fps: float, *, governed: bool, ladder: bool) -> str:
    first, *others = plan.variants
    text = f"""
[device]
id = "bench"
hardware = "none"
store = {json.dumps(str(store))}
[[model]]
name = "{MODEL}"
bundle = {json.dumps(str(bundle.root))}
variant = "{first}"
ladder = {json.dumps(others if ladder else [])}
[telemetry]
window_s = 2.0
"""
    if governed:
        text += f"[budget]\nlatency_p99_ms = {plan.budget_ms}\n"
    for number in range(plan.cameras):
        priority = 1 if number % IMPORTANT == 0 else 0
        text += f'[[camera]]\nname = "camera-{number}"\nurl = "synthetic:"\n'
        text += f"min_fps = {min_fps}\npriority = {priority}\n"
    return text
