"""What a change of models costs the cameras: reloads under load, against the same load left alone.

A whole daemon in this process: cameras, pipeline, store, proof in a child, watch. Two models take turns; an
undisturbed run of the same length on the same machine follows, and what counts are differences between the two.
"""

from __future__ import annotations

import gc
import logging
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

from edge_runtime.app.daemon import Daemon, Observers
from edge_runtime.config import parse_config
from edge_runtime.engine.bundle import Bundle
from edge_runtime.hardware.memory import resident_bytes
from edge_runtime.records.commands import ReloadArgs, ReloadResult
from edge_runtime.records.frames import FrameResult

log = logging.getLogger(__name__)

MODEL = "detector"
EARLY = 20
"""Memory is compared between so many reloads around this one and the last of them: until then pools and caches fill.
One reading says little: onnxruntime's arena grows by 25 MB in the instant in which two lanes first run at once."""
WARM_UP_S = 3.0


@dataclass(slots=True)
class _Seen:
    """What came out of the daemon: per camera the order and the gaps, per batch the engines."""

    results: int = 0
    out_of_order: int = 0
    mixed_batches: int = 0
    engines: set[str] = field(default_factory=set)
    last_id: dict[str, int] = field(default_factory=dict)
    last_ns: dict[str, int] = field(default_factory=dict)
    longest_ns: int = 0
    runs: dict[tuple[int, int], str] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, result: FrameResult) -> None:
        with self.lock:
            self.results += 1
            self.engines.add(result.engine)
            if result.frame_id <= self.last_id.get(result.camera, -1):
                self.out_of_order += 1
            self.last_id[result.camera] = result.frame_id
            if (last := self.last_ns.get(result.camera)) is not None:
                self.longest_ns = max(self.longest_ns, result.timings.t_result_ns - last)
            self.last_ns[result.camera] = result.timings.t_result_ns
            # frames of one batch were run by one call, between the same two instants
            run = (result.timings.t_run_ns, result.timings.t_inferred_ns)
            if self.runs.setdefault(run, result.engine) != result.engine:
                self.mixed_batches += 1
            if len(self.runs) > 4096:
                self.runs.clear()

    def start(self) -> None:
        """From here on it counts."""
        with self.lock:
            self.results = self.out_of_order = self.mixed_batches = self.longest_ns = 0


@dataclass(frozen=True, slots=True)
class Load:
    """One run of the cameras: frames by outcome, and the longest gap between two results of one camera, ms."""

    seconds: float
    captured: int
    completed: int
    stale: int
    dropped: int
    failed: int
    longest_gap_ms: float

    @property
    def lost(self) -> int:
        return self.stale + self.dropped + self.failed


@dataclass(frozen=True, slots=True)
class ReloadBench:
    """Reloads under load and the same load undisturbed. Times in ms are medians and the worst of all reloads."""

    onnxruntime: str
    reloads: int
    refused: int
    models: list[str]
    cameras: int
    fps: float
    disturbed: Load
    undisturbed: Load
    exchange_ms: tuple[float, float]
    took_s: tuple[float, float]
    proof_s: tuple[float, float]
    load_s: tuple[float, float]
    mixed_batches: int
    out_of_order: int
    rss_early_mb: float
    rss_late_mb: float
    threads: tuple[int, int]
    descriptors: tuple[int, int]

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def measure_reload(
    bundles: Sequence[tuple[Bundle, str]],
    *,
    reloads: int = 200,
    cameras: int = 2,
    fps: float = 15.0,
    lanes: int | str = "auto",
    url: str | None = None,
    prove_each: bool = False,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> ReloadBench:
    """`reloads` times the next of `bundles` (with a variant each), under `cameras` at `fps`; then as long without.

    `prove_each`: as if every one of them were new; otherwise each model is proved once.
    """
    with tempfile.TemporaryDirectory(prefix="edge-runtime-bench-") as folder:
        disturbed = _Run(Path(folder) / "disturbed", bundles, cameras, fps, lanes, url)
        with disturbed:
            results, figures = _reload(disturbed, bundles, reloads, prove_each, progress)
        load = disturbed.load()
        alone = _Run(Path(folder) / "alone", bundles, cameras, fps, lanes, url)
        with alone:
            alone.begin()
            alone.daemon.wait(load.seconds)
        changed = [each for each in results if each.exchange_ms is not None]
        return ReloadBench(
            onnxruntime=version("onnxruntime"),
            reloads=len(changed),
            refused=reloads - len(changed),
            models=[f"{bundle.name} {variant}" for bundle, variant in bundles],
            cameras=cameras,
            fps=fps,
            disturbed=load,
            undisturbed=alone.load(),
            exchange_ms=_middle_and_worst([each.exchange_ms or 0.0 for each in changed]),
            took_s=_middle_and_worst([each.took_s for each in changed]),
            proof_s=_middle_and_worst([each.proof.took_s for each in changed if each.proof]),
            load_s=_middle_and_worst([each.proof.load_s for each in changed if each.proof]),
            mixed_batches=disturbed.seen.mixed_batches,
            out_of_order=disturbed.seen.out_of_order,
            rss_early_mb=figures.rss_early_mb,
            rss_late_mb=figures.rss_late_mb,
            threads=figures.threads,
            descriptors=figures.descriptors,
        )


@dataclass(frozen=True, slots=True)
class _Figures:
    rss_early_mb: float
    rss_late_mb: float
    threads: tuple[int, int]
    descriptors: tuple[int, int]


def _reload(
    run: _Run,
    bundles: Sequence[tuple[Bundle, str]],
    reloads: int,
    prove_each: bool,
    progress: Callable[[int, int], None],
) -> tuple[list[ReloadResult], _Figures]:
    keeper = run.daemon.keeper
    results: list[ReloadResult] = []
    digests = [(run.daemon.shelf.add(bundle.root).digest, variant) for bundle, variant in bundles]
    run.begin()
    rss_mb: list[float] = []
    threads, descriptors = threading.active_count(), _descriptors()
    for number in range(1, reloads + 1):
        digest, variant = digests[number % len(digests)]
        if prove_each:
            keeper.forget_proofs()
        try:
            results.append(keeper.reload(ReloadArgs(model=MODEL, bundle=digest, variant=variant)))
        except Exception as error:  # noqa: BLE001  a reload that fails is a figure, too
            log.error("reload %d: %s", number, error)
        gc.collect()
        rss_mb.append((resident_bytes() or 0) / 1e6)
        progress(number, reloads)
    return results, _Figures(
        _median(rss_mb[EARLY // 2 : EARLY // 2 + EARLY] or rss_mb),
        _median(rss_mb[-EARLY:]),
        (threads, threading.active_count()),
        (descriptors, _descriptors()),
    )


class _Run:
    """A daemon with its cameras, as a context."""

    def __init__(
        self,
        store: Path,
        bundles: Sequence[tuple[Bundle, str]],
        cameras: int,
        fps: float,
        lanes: int | str,
        url: str | None,
    ) -> None:
        bundle, variant = bundles[0]
        url = url or f"synthetic:?width=768&height=576&fps={fps:g}"
        text = f"""
[device]
id = "bench"
hardware = "none"
store = {_quoted(store)}
[[model]]
name = "{MODEL}"
bundle = {_quoted(bundle.root)}
variant = "{variant}"
lanes = {lanes if isinstance(lanes, int) else f'"{lanes}"'}
[telemetry]
window_s = 1.0
"""
        for index in range(cameras):
            text += f'[[camera]]\nname = "camera-{index}"\nurl = {_quoted(url)}\nfps = {fps}\n'
        store.mkdir(parents=True)
        self.seen = _Seen()
        self.daemon = Daemon(parse_config(text, "bench", store), Observers(result=self.seen.take))
        self._started_ns = 0
        self._before = (0, 0, 0, 0, 0)
        self._load: Load | None = None

    def __enter__(self) -> _Run:
        self.daemon.start()
        self.daemon.wait(WARM_UP_S)
        return self

    def begin(self) -> None:
        """From here on it is measured."""
        gc.collect()
        self.seen.start()
        self._before = self._counts()
        self._started_ns = time.monotonic_ns()

    def __exit__(self, *_: object) -> None:
        seconds = (time.monotonic_ns() - self._started_ns) / 1e9
        counts = [after - before for after, before in zip(self._counts(), self._before, strict=True)]
        captured, completed, stale, dropped, failed = counts
        self._load = Load(seconds, captured, completed, stale, dropped, failed, self.seen.longest_ns / 1e6)
        self.daemon.stop()

    def _counts(self) -> tuple[int, int, int, int, int]:
        total = self.daemon.pipeline.ledger.totals(MODEL)
        return total.captured, total.completed, total.stale, sum(total.dropped.values()), total.failed

    def load(self) -> Load:
        assert self._load is not None
        return self._load


def _quoted(value: Path | str) -> str:
    return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'


def _median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 2)


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def _middle_and_worst(values: Sequence[float]) -> tuple[float, float]:
    return (round(statistics.median(values), 3), round(max(values), 3)) if values else (0.0, 0.0)
