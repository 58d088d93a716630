"""The daemon as the web room sees it: what it does now, its windows, and commands."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from edge_runtime.app.budget import BudgetKeeper
from edge_runtime.app.cameras import CameraKeeper
from edge_runtime.app.gpu_faults import GpuFaults
from edge_runtime.app.health import Health as Judgement
from edge_runtime.app.identity import clock_synced
from edge_runtime.app.keeper import ModelKeeper
from edge_runtime.app.messaging import Messaging
from edge_runtime.app.shelf import Shelf
from edge_runtime.clock import Clock, utc_text
from edge_runtime.control.dispatcher import Dispatcher
from edge_runtime.engine.archive import bundle_bytes
from edge_runtime.engine.upload import Upload
from edge_runtime.hardware.sampler import Sampler
from edge_runtime.pipeline.pipeline import Pipeline
from edge_runtime.records.governing import Operating
from edge_runtime.records.identity import Identity
from edge_runtime.records.status import (
    BudgetNow,
    CameraNow,
    DecodeTotals,
    FrameTotals,
    Health,
    LatencyTotals,
    ModelNow,
    PowerNow,
    StatusReport,
)
from edge_runtime.records.window import CacheCounts, CameraWindow, SourceCounts, WindowReport
from edge_runtime.telemetry.operating import ModelView, governor_now, operating_point
from edge_runtime.web.door import Entry, StoredBundle

KEPT_WINDOWS = 360
STATUS_OF = {
    "forbidden": 403,
    "unknown_command": 404,
    "in_progress": 409,
    "internal": 500,
    "interrupted": 500,
    "busy": 503,
    "cancelled": 503,
    "clock_unsynced": 503,
    "stopping": 503,
}
"""HTTP status by error code of a command; 400 for all others."""


@dataclass(slots=True)
class _Total:
    """One camera on one model, since the start."""

    frames: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    in_flight: int = 0
    buckets: list[tuple[float | None, int]] = field(default_factory=list)
    fps: float | None = None


@dataclass(slots=True)
class _Source:
    """One camera, since it was added: it may have been replaced by another one of its name."""

    counts: SourceCounts
    decode: DecodeTotals | None


_SOURCE = tuple(SourceCounts.model_fields)
_NOTHING = _Source(SourceCounts(**dict.fromkeys(_SOURCE, 0)), None)


class History:
    """The last windows, and totals over all of them. Written by the windows' thread, read by any.

    A camera that no window has any more is forgotten: one that comes back under its name begins anew.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._windows: deque[WindowReport] = deque(maxlen=KEPT_WINDOWS)
        self._totals: dict[tuple[str, str], _Total] = {}
        self._sources: dict[str, _Source] = {}
        self._caches: dict[str, CacheCounts] = {}
        self._joules = 0.0
        self._violated_s = 0.0

    def add(self, report: WindowReport) -> None:
        with self._lock:
            self._windows.append(report)
            if report.energy is not None:
                self._joules += report.energy.joules
            if report.budget is not None:
                self._violated_s += report.budget.violated_s or 0.0
            there = {(camera.name, camera.model): camera for camera in report.cameras}
            self._totals = {key: total for key, total in self._totals.items() if key in there}
            for camera in report.cameras:
                self._count(camera)
            # the same for every model of a camera
            sources = {camera.name: camera for camera in report.cameras}
            self._sources = {name: self._count_source(camera) for name, camera in sources.items()}
            for model in report.models:
                if model.cache is not None:
                    before = self._caches.get(model.name, CacheCounts()).model_dump()
                    now = {key: before[key] + count for key, count in model.cache.model_dump().items()}
                    self._caches[model.name] = CacheCounts(**now)

    def _count(self, camera: CameraWindow) -> None:
        total = self._totals.setdefault((camera.name, camera.model), _Total())
        for key in ("captured", "completed", "cached", "stale", "failed"):
            total.frames[key] = total.frames.get(key, 0) + getattr(camera.frames, key)
        for reason, count in camera.frames.dropped.items():
            total.dropped[reason] = total.dropped.get(reason, 0) + count
        total.in_flight = camera.frames.in_flight
        total.fps = camera.fps
        old = dict(total.buckets)
        total.buckets = [(bound, old.get(bound, 0) + count) for bound, count in camera.latency_ms.buckets]

    def _count_source(self, camera: CameraWindow) -> _Source:
        before = self._sources.get(camera.name, _NOTHING)
        counts = {key: getattr(before.counts, key) + getattr(camera.source, key) for key in _SOURCE}
        decode = before.decode
        if (now := camera.decode) is not None:
            so_far = decode or DecodeTotals(cpu_s=0, saved_cpu_s=0, opened=0, backend=None)
            decode = DecodeTotals(
                cpu_s=round(so_far.cpu_s + now.cpu_s, 6),
                saved_cpu_s=round(so_far.saved_cpu_s + now.saved_cpu_s, 6),
                opened=so_far.opened + now.opened,
                backend=now.backend,
            )
        return _Source(SourceCounts(**counts), decode)

    def renumber(self, report: WindowReport) -> None:
        """The same window, with the number under which it is published."""
        with self._lock:
            for index in range(len(self._windows) - 1, -1, -1):
                if self._windows[index].t_end_utc == report.t_end_utc:
                    self._windows[index] = report
                    return

    def windows(self, last: int) -> list[WindowReport]:
        with self._lock:
            return list(self._windows)[-last:]

    def joules(self) -> float:
        with self._lock:
            return self._joules

    def violated_s(self) -> float:
        """Seconds above the power budget."""
        with self._lock:
            return self._violated_s

    def cache(self, model: str) -> CacheCounts | None:
        """What was asked of a model's cache; None where it has none."""
        with self._lock:
            return self._caches.get(model)

    def source(self, name: str) -> tuple[SourceCounts | None, DecodeTotals | None]:
        """What a camera's source gave, None before a window; and what that cost, None where nothing is decoded."""
        with self._lock:
            found = self._sources.get(name)
            return (None, None) if found is None else (found.counts, found.decode)

    def camera(self, name: str, model: str) -> tuple[FrameTotals, LatencyTotals, float | None]:
        """Frames, latencies and the newest rate of a camera on a model."""
        with self._lock:
            total = self._totals.get((name, model), _Total())
            frames = FrameTotals(**total.frames, dropped=dict(total.dropped), in_flight=total.in_flight)
            return frames, LatencyTotals(buckets=list(total.buckets)), total.fps


@dataclass(frozen=True, slots=True)
class StoreUpload:
    """Implements the web room's BundleUpload over the store's."""

    upload: Upload
    shelf: Shelf

    def write(self, chunk: bytes) -> None:
        self.upload.write(chunk)

    def finish(self) -> StoredBundle:
        bundle = self.shelf.finish(self.upload)
        return StoredBundle(
            digest=bundle.digest,
            name=bundle.name,
            version=bundle.manifest.bundle.version,
            variants=bundle.variants,
            size_bytes=bundle_bytes(bundle),
            new=self.upload.new,
        )

    def abort(self) -> None:
        self.upload.abort()


@dataclass(frozen=True, slots=True)
class DaemonDoor:
    """Implements the web room's Door over the parts of a daemon."""

    identity: Identity
    clock: Clock
    store: Path
    pipeline: Pipeline
    messaging: Messaging
    sampler: Sampler
    dispatcher: Dispatcher
    history: History
    judgement: Callable[[], Judgement]
    models: Callable[[], Sequence[ModelView]]
    cameras: CameraKeeper
    keeper: ModelKeeper
    shelf: Shelf
    budget: BudgetKeeper
    operating: Callable[[], Operating]
    gpu_faults: GpuFaults

    def health(self) -> Health:
        judged = self.judgement()
        return Health(state=judged.state, reasons=list(judged.reasons))

    def windows(self, last: int) -> Sequence[WindowReport]:
        return self.history.windows(last)

    def execute(self, name: str, body: bytes, door: Entry) -> tuple[int, bytes]:
        reply = self.dispatcher.handle(name, body or b"{}", door=door)
        status = 200 if reply.error is None else STATUS_OF.get(reply.error.code, 400)
        return status, reply.to_json()

    def open_upload(self) -> StoreUpload:
        return StoreUpload(self.shelf.bundles.open_upload(), self.shelf)

    def snapshot(self) -> StatusReport:
        now_ns = time.monotonic_ns()
        newest = self.history.windows(1)
        window = newest[0] if newest else None
        models = list(self.models())
        operating = self.operating()
        down = {model.name: model.down_reason for model in models if model.down_reason is not None}
        return StatusReport(
            device=self.identity.device,
            boot=self.identity.boot,
            session=self.identity.session,
            version=self.identity.version,
            pid=os.getpid(),
            store=str(self.store),
            t_utc=utc_text(self.clock.utc()),
            clock_synced=clock_synced(),
            uptime_s=round((now_ns - self.identity.t_start_ns) / 1e9, 3),
            health=self.health(),
            cameras=self._cameras(now_ns, down),
            cameras_removed=self.cameras.removed(),
            models=[self._model(model) for model in models],
            power=self._power(window),
            power_reason=self._power_reason(window),
            thermal=None if window is None else window.thermal,
            budget=self._budget(),
            governor=governor_now(operating),
            operating_point=operating_point(operating, models, self.cameras.wanted()),
            mqtt=self.messaging.mqtt_now(),
            spool=self.messaging.spool_now(),
            window=window,
            gpu_faults=self.gpu_faults.count,
        )

    def _cameras(self, now_ns: int, down: dict[str, str]) -> list[CameraNow]:
        wanted = self.cameras.wanted()
        tables = {each.name: each for each in self.cameras.cameras()}
        said = {each.name: each for each in self.cameras.reported()}
        cameras = []
        for view in self.pipeline.cameras():
            table, switches = tables.get(view.name), said.get(view.name)
            if table is None or switches is None:
                continue  # it comes or goes just now
            delivered, decode = self.history.source(view.name)
            for model in view.models:
                frames, latency, fps = self.history.camera(view.name, model)
                state, reason = view.status.state, view.status.reason
                if model in down:
                    state, reason = "down", f"model {model}: {down[model]}"
                cameras.append(
                    CameraNow(
                        name=view.name,
                        model=model,
                        state=state,
                        reason=reason,
                        since_s=round(max(0, now_ns - view.status.since_ns) / 1e9, 3),
                        fps=fps,
                        fps_wanted=wanted.get(view.name),
                        source=switches.source,
                        address=table.source.shown,
                        paused=switches.paused,
                        cap_fps=switches.cap_fps,
                        frames=frames,
                        latency=latency if latency.buckets else None,
                        delivered=delivered,
                        decode=decode,
                    )
                )
        return cameras

    def _model(self, model: ModelView) -> ModelNow:
        up = model.engine is not None
        desk = self.pipeline.models[model.name].desk
        ladder = [each.info for each in desk.ladder()]
        return ModelNow(
            name=model.name,
            engine=model.engine,
            bundle=ladder[0].bundle if ladder else None,
            source=self.keeper.source(model.name),
            ladder=[info.variant for info in ladder],
            variant=model.variant if up else None,
            backend=model.backend if up else None,
            max_batch=model.max_batch if up else None,
            lanes=desk.lanes,
            backend_reason=self.keeper.backend_reason(model.name),
            cache=self.history.cache(model.name),
            reason=model.down_reason,
        )

    def _budget(self) -> BudgetNow:
        budget, set_by, max_power_w = self.budget.in_force()
        return BudgetNow(
            power_w=budget.power_w,
            temperature_c=budget.temperature_c,
            latency_p99_ms=budget.latency_p99_ms,
            max_power_w=max_power_w,
            set_by=set_by,
            violated_s=round(self.history.violated_s(), 3),
        )

    def _power_reason(self, window: WindowReport | None) -> str | None:
        if window is None:
            return self.sampler.none_reason or "no window has been cut yet"
        return None if window.energy is not None else window.fps_per_watt_reason

    def _power(self, window: WindowReport | None) -> PowerNow | None:
        energy = None if window is None else window.energy
        if energy is None:
            return None
        return PowerNow(
            source=energy.source, rails=energy.rails, watts=self.sampler.watts(), joules_total=self.history.joules()
        )
