"""Windows: cut by time alone, each a report of what was done and what it cost."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

import numpy as np

from edge_runtime.clock import Clock, utc_text
from edge_runtime.records.activity import (
    LATENCY_BUCKETS_MS,
    CacheCounters,
    Counters,
    EngineCounters,
    LedgerCut,
    Samples,
    StreamCut,
)
from edge_runtime.records.cameras import REMOVED, STOPPED_ON_REQUEST, CameraEffort, CameraState, CameraView
from edge_runtime.records.governing import Operating
from edge_runtime.records.identity import Identity
from edge_runtime.records.power import Energy, Exceeded, ThermalReading, Unavailable
from edge_runtime.records.window import (
    CacheCounts,
    CameraWindow,
    DecodeWindow,
    EnergyWindow,
    FrameCounts,
    Latency,
    ModelWindow,
    SourceCounts,
    ThermalWindow,
    WindowReport,
)
from edge_runtime.telemetry.operating import GoverningReport, ModelView, operating_point
from edge_runtime.threads import ThreadGroup

log = logging.getLogger(__name__)

MIN_JOULES = 1e-3
"""Below this energy a ratio says nothing."""

MAX_FRAMES_PER_JOULE = 1e5
"""No such device does more: an AGX Orin brings about 150 ResNet-50 inferences per joule (MLPerf Inference v3.0). The
field has seen a report of 3,448,436."""


@dataclass(frozen=True, slots=True)
class WindowSources:
    """Where a window's parts come from. Called on the windows' thread.

    `cameras`: those of the last cut, the removed ones first; several may have the same name.
    """

    cut: Callable[[], LedgerCut]
    cameras: Callable[[], Sequence[CameraView]]
    models: Callable[[], Sequence[ModelView]]
    energy: Callable[[int, int], Energy | Unavailable]
    thermal: Callable[[], ThermalReading | Unavailable]
    clock_synced: Callable[[], bool]
    fps_wanted: Callable[[], Mapping[str, float | None]]
    operating: Callable[[], Operating]
    seconds_above: Callable[[int, int, float], Exceeded | Unavailable]


class WindowBuilder:
    """Makes reports of consecutive windows."""

    def __init__(self, identity: Identity, sources: WindowSources, clock: Clock) -> None:
        self._identity = identity
        self._sources = sources
        self._clock = clock
        self._seq = 0
        self._start_ns = clock.monotonic_ns()
        self._last: dict[tuple[str, int], CameraView] = {}
        self._governing = GoverningReport(sources.operating, sources.seconds_above)

    def build(self) -> WindowReport:
        """Close the window that has been open since the last call and report it."""
        cut = self._sources.cut()
        end_ns, now_utc = self._clock.monotonic_ns(), self._clock.utc()
        start_ns, self._start_ns = self._start_ns, end_ns
        duration_s = (end_ns - start_ns) / 1e9
        energy = self._sources.energy(start_ns, end_ns)
        thermal = self._sources.thermal()

        total, latency = Counters(), Samples()
        for stream in cut.streams:
            total.add(stream.counters)
            latency.merge(stream.latency)
            if stream.failures:
                log.warning(
                    "camera %s on model %s: frames failed: %s", stream.camera, stream.model, _reasons(stream.failures)
                )
        ratio, reason = _fps_per_watt(total.completed, energy)
        models = self._sources.models()
        # after the energy, which waits for the window's last reading
        operating, governor, budget = self._governing.build(start_ns, end_ns)
        report = WindowReport(
            device=self._identity.device,
            boot=self._identity.boot,
            session=self._identity.session,
            seq=self._seq,
            clock_synced=self._sources.clock_synced(),
            uptime_s=round((end_ns - self._identity.t_start_ns) / 1e9, 3),
            t_start_utc=utc_text(now_utc - timedelta(seconds=duration_s)),
            t_end_utc=utc_text(now_utc),
            t_utc=utc_text(self._clock.utc()),
            duration_s=round(duration_s, 6),
            frames=_counts(total),
            fps=_rate(total.completed, duration_s),
            latency_ms=_latency(latency),
            cameras=self._cameras(cut, duration_s, end_ns, {model.name: model for model in models}),
            models=[self._model(name, digest, engine) for (name, digest), engine in cut.engines.items() if digest],
            energy=_energy(energy),
            energy_reason=_reason(energy),
            fps_per_watt=ratio,
            fps_per_watt_reason=reason,
            mixed=self._mixed(cut),
            thermal=_thermal(thermal),
            thermal_reason=_reason(thermal),
            operating_point=operating_point(operating, models, self._sources.fps_wanted()),
            governor=governor,
            budget=budget,
        )
        self._seq += 1
        return report

    @staticmethod
    def _mixed(cut: LedgerCut) -> bool:
        names = [name for (name, digest), engine in cut.engines.items() if digest and engine.batches]
        return len(names) != len(set(names))

    def _cameras(
        self, cut: LedgerCut, duration_s: float, end_ns: int, models: Mapping[str, ModelView]
    ) -> list[CameraWindow]:
        found = self._sources.cameras()
        views = {view.name: view for view in found}
        source, decode = self._delivered(found)
        windows = []
        for stream in _merged(cut.streams):
            view = views.get(stream.camera)
            model = models.get(stream.model)
            state: CameraState = "stopped"
            reason: str | None = REMOVED
            since_s: float | None = None
            if view is not None:
                state, reason = view.status.state, view.status.reason
                since_s = round(max(0, end_ns - view.status.since_ns) / 1e9, 3)
            if model is not None and model.down_reason is not None:
                state, reason, since_s = "down", f"model {model.name}: {model.down_reason}", None
            windows.append(
                CameraWindow(
                    name=stream.camera,
                    model=stream.model,
                    state=state,
                    reason=reason,
                    since_s=since_s,
                    frames=_counts(stream.counters),
                    source=source.get(stream.camera, _NO_SOURCE),
                    decode=decode.get(stream.camera),
                    fps=_rate(stream.counters.completed, duration_s),
                    latency_ms=_latency(stream.latency),
                )
            )
        return windows

    def _delivered(self, views: Sequence[CameraView]) -> tuple[dict[str, SourceCounts], dict[str, DecodeWindow]]:
        """What each camera's source gave in this window and what that cost, by name: one that was removed and one that
        came under its name are the same to whoever adds up."""
        last, self._last = self._last, {(view.name, view.serial): view for view in views}
        counts: dict[str, dict[str, int]] = {}
        efforts: dict[str, CameraEffort] = {}
        for key, view in self._last.items():
            before = last.get(key)
            new = _since(asdict(view.source), None if before is None else asdict(before.source))
            sums = counts.setdefault(view.name, dict.fromkeys(new, 0))
            for reason, count in new.items():
                sums[reason] += count
            effort = _effort_since(view.effort, None if before is None else before.effort)
            efforts[view.name] = _effort_sum(efforts.get(view.name, CameraEffort()), effort)
        source = {name: SourceCounts(**sums) for name, sums in counts.items()}
        decode = {name: _decode(effort) for name, effort in efforts.items() if effort.backend is not None}
        return source, decode

    def _model(self, name: str, digest: str, engine: EngineCounters) -> ModelWindow:
        return ModelWindow(
            name=name,
            engine=digest,
            variant=engine.variant,
            backend=engine.backend,
            frames=_counts(engine.counters),
            batch_mean=round(engine.places / engine.batches, 3) if engine.batches else None,
            latency_ms=_latency(engine.latency),
            inference_ms=_latency(engine.inference),
            cache=None if engine.cache == CacheCounters() else CacheCounts(**asdict(engine.cache)),
        )


def _merged(streams: Sequence[StreamCut]) -> list[StreamCut]:
    """One for each camera and model: a camera that was removed and one that was added under its name in the same window
    have one each, and the frame identity holds for their sum as it does for both."""
    found: dict[tuple[str, str], StreamCut] = {}
    for stream in streams:
        into = found.get((stream.camera, stream.model))
        if into is None:
            found[stream.camera, stream.model] = stream
            continue
        both = Counters()
        for each in (into, stream):
            both.add(each.counters)
        into.latency.merge(stream.latency)
        reasons = into.failures | stream.failures
        failures = {reason: into.failures.get(reason, 0) + stream.failures.get(reason, 0) for reason in reasons}
        found[stream.camera, stream.model] = StreamCut(stream.camera, stream.model, both, into.latency, failures)
    return list(found.values())


def _since(now: dict[str, int], before: dict[str, int] | None) -> dict[str, int]:
    """How much each of the counters has grown."""
    if before is None or any(value < before[key] for key, value in now.items()):
        return now  # another camera: its counters began anew
    return {key: value - before[key] for key, value in now.items()}


def _effort_since(now: CameraEffort, before: CameraEffort | None) -> CameraEffort:
    if before is None or now.decode_cpu_ns < before.decode_cpu_ns or now.opened < before.opened:
        return now
    # an estimate may be corrected downwards
    saved_ns = max(0, now.saved_cpu_ns - before.saved_cpu_ns)
    return CameraEffort(now.decode_cpu_ns - before.decode_cpu_ns, saved_ns, now.opened - before.opened, now.backend)


def _effort_sum(one: CameraEffort, other: CameraEffort) -> CameraEffort:
    return CameraEffort(
        one.decode_cpu_ns + other.decode_cpu_ns,
        one.saved_cpu_ns + other.saved_cpu_ns,
        one.opened + other.opened,
        other.backend or one.backend,
    )


def _decode(effort: CameraEffort) -> DecodeWindow:
    return DecodeWindow(
        cpu_s=round(effort.decode_cpu_ns / 1e9, 6),
        saved_cpu_s=round(effort.saved_cpu_ns / 1e9, 6),
        opened=effort.opened,
        backend=effort.backend,
    )


_NO_SOURCE = SourceCounts(decoded=0, skipped_rate=0, skipped_codec=0, corrupt=0, pre_key=0, duplicate=0)


def _counts(counters: Counters) -> FrameCounts:
    return FrameCounts(**asdict(counters))


def _rate(count: int, duration_s: float) -> float:
    return round(count / duration_s, 3) if duration_s > 0 else 0.0


def _latency(samples: Samples) -> Latency:
    bounds: list[float | None] = [*LATENCY_BUCKETS_MS, None]
    p50 = p99 = None
    if samples.values_ns:
        p50, p99 = (round(float(value) / 1e6, 3) for value in np.percentile(samples.values_ns, (50, 99)))
    return Latency(p50=p50, p99=p99, buckets=list(zip(bounds, samples.buckets(), strict=True)))


def _energy(energy: Energy | Unavailable) -> EnergyWindow | None:
    if isinstance(energy, Unavailable):
        return None
    return EnergyWindow(
        source=energy.source,
        rails=list(energy.rails),
        joules=round(energy.joules, 6),
        net_joules=None if energy.net_joules is None else round(energy.net_joules, 6),
        mean_w=round(energy.mean_w, 4),
        peak_w=round(energy.peak_w, 4),
        samples=energy.samples,
        rate_hz=round(energy.rate_hz, 3),
        quantum_w=energy.quantum_w,
        idle_w=None if energy.idle_w is None else round(energy.idle_w, 4),
        mode=energy.mode,
        reasons=dict(energy.reasons),
    )


def _thermal(reading: ThermalReading | Unavailable) -> ThermalWindow | None:
    if isinstance(reading, Unavailable):
        return None
    return ThermalWindow(
        tj_c=round(reading.tj_c, 2),
        zones={zone: round(value, 2) for zone, value in reading.zones_c.items()},
        throttling=reading.throttling,
        source=reading.source,
        over_current=dict(reading.over_current),
        reasons=dict(reading.reasons),
    )


def _reason(found: Energy | ThermalReading | Unavailable) -> str | None:
    return found.reason if isinstance(found, Unavailable) else None


def _fps_per_watt(completed: int, energy: Energy | Unavailable) -> tuple[float | None, str | None]:
    """Frames per joule, and why there is none."""
    if isinstance(energy, Unavailable):
        return None, energy.reason
    if energy.joules < MIN_JOULES:
        return None, f"{energy.joules:g} J is no energy to divide by"
    if (ratio := completed / energy.joules) > MAX_FRAMES_PER_JOULE:
        return None, f"{ratio:g} frames per joule cannot be: the readings are wrong, or in another unit"
    return round(ratio, 4), None


def _reasons(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in counts.items())


def describe(report: WindowReport) -> str:
    """The window in one line, for the log and a terminal."""
    frames = report.frames
    parts = [f"window {report.seq}: {frames.completed} frames, {report.fps:.1f} fps"]
    if report.latency_ms.p50 is not None and report.latency_ms.p99 is not None:
        parts.append(f"p50 {report.latency_ms.p50:.1f} ms, p99 {report.latency_ms.p99:.1f} ms")
    if frames.cached:
        parts.append(f"{frames.cached} cached")
    lost = {"stale": frames.stale, "failed": frames.failed, **frames.dropped}
    if any(lost.values()):
        parts.append(_reasons({reason: count for reason, count in lost.items() if count}))
    if report.energy is not None and report.fps_per_watt is not None:
        word = " (simulated)" if report.energy.source == "simulated" else ""
        parts.append(f"{report.energy.mean_w:.2f} W, {report.fps_per_watt:.2f} fps/W{word}")
    else:
        parts.append(f"no watts: {report.fps_per_watt_reason}")
    if report.governor is not None and report.governor.state in ("derating", "safe"):
        parts.append(f"{report.governor.state}: {report.governor.because}")
    if report.budget is not None and report.budget.violated_s:
        parts.append(f"above the power budget for {report.budget.violated_s:.1f} s")
    bad = sorted(
        {
            f"{camera.name} {camera.state}"
            for camera in report.cameras
            if camera.state != "up" and camera.reason not in (STOPPED_ON_REQUEST, REMOVED)
        }
    )
    if bad:
        parts.append("cameras: " + ", ".join(bad))
    return "; ".join(parts)


class WindowLoop:
    """The `windows` thread: a report every `window_s` seconds, and a last one at the stop.

    A report that a consumer cannot take is logged; the next window comes all the same.
    """

    def __init__(
        self,
        builder: WindowBuilder,
        consume: Callable[[WindowReport], None],
        window_s: float,
        on_death: Callable[[str, BaseException], None] | None = None,
    ) -> None:
        self._builder = builder
        self._consume = consume
        self._window_s = window_s
        self._stop = threading.Event()
        self._threads = ThreadGroup(on_death)
        self.tick_ns = time.monotonic_ns()

    def start(self) -> None:
        self._threads.spawn("windows", self._loop)

    def stop(self, deadline_s: float = 1.0) -> list[str]:
        """Cut the last window and end; the thread's name where it did not."""
        self._stop.set()
        return self._threads.join(deadline_s)

    def _loop(self) -> None:
        due = time.monotonic() + self._window_s
        while not self._stop.wait(max(0.0, due - time.monotonic())):
            self._report()
            # a window that came late is longer; the ones after it keep to the grid
            due += self._window_s * max(1, -(-(time.monotonic() - due) // self._window_s))
        self._report()

    def _report(self) -> None:
        self.tick_ns = time.monotonic_ns()
        try:
            self._consume(self._builder.build())
        except Exception:
            log.exception("a window report failed")
