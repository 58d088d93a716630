"""The status report as Prometheus text. Base units: seconds, joules, watts. What is not known has no sample."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import get_args

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from edge_runtime.records.cameras import CameraState
from edge_runtime.records.governing import GovernorWord
from edge_runtime.records.status import CameraNow, HealthState, LatencyTotals, ModelNow, StatusReport

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_STREAM = ("camera", "model")


class StatusCollector(Collector):
    """The metric families of one status report."""

    def __init__(self, report: StatusReport) -> None:
        self._report = report

    def collect(self) -> Iterator[Metric]:
        report = self._report
        yield from _daemon(report)
        yield from _frames(report.cameras)
        yield from _cameras(report.cameras)
        yield from _models(report.models)
        yield from _energy(report)
        yield from _governor(report)
        yield from _mqtt(report)
        yield from _spool(report)


def render_metrics(report: StatusReport) -> bytes:
    """`report` in the text format 0.0.4, UTF-8."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StatusCollector(report))
    return generate_latest(registry)


def _gauge(name: str, meaning: str, value: float | None) -> Iterator[Metric]:
    if value is not None:
        yield GaugeMetricFamily(name, meaning, value=value)


def _state(
    name: str, meaning: str, labels: tuple[str, ...], rows: Iterable[tuple[tuple[str, ...], str]], of: object
) -> Metric:
    family = GaugeMetricFamily(name, meaning, labels=[*labels, "state"])
    for values, current in rows:
        for state in get_args(of):
            family.add_metric([*values, state], float(state == current))
    return family


def _daemon(report: StatusReport) -> Iterator[Metric]:
    build = {"version": report.version, "device": report.device, "session": report.session}
    yield InfoMetricFamily("edge_build", "Who is speaking.", value=build)
    yield GaugeMetricFamily("edge_uptime_seconds", "Seconds since the daemon started.", value=report.uptime_s)
    meaning = "Faults of the GPU that ended the daemon, over all its starts."
    yield CounterMetricFamily("edge_gpu_faults", meaning, value=report.gpu_faults)
    yield GaugeMetricFamily("edge_clock_synced", "Whether wall time can be trusted.", value=float(report.clock_synced))
    meaning = "1 for the state that the daemon is in."
    yield _state("edge_health_state", meaning, (), [((), report.health.state)], HealthState)


def _frames(cameras: Iterable[CameraNow]) -> Iterator[Metric]:
    captured = CounterMetricFamily("edge_frames_captured", "Frames taken in.", labels=_STREAM)
    frames = CounterMetricFamily("edge_frames", "Frames by what became of them.", labels=(*_STREAM, "outcome"))
    dropped = CounterMetricFamily("edge_frames_dropped", "Dropped frames by reason.", labels=(*_STREAM, "reason"))
    in_flight = GaugeMetricFamily("edge_frames_in_flight", "Frames neither done nor given up.", labels=_STREAM)
    latency = HistogramMetricFamily("edge_latency_seconds", "From capture to result.", labels=_STREAM)
    for camera in cameras:
        stream, counts = (camera.name, camera.model), camera.frames
        captured.add_metric(stream, counts.captured)
        outcomes = {
            "completed": counts.completed,
            "cached": counts.cached,
            "stale": counts.stale,
            "dropped": sum(counts.dropped.values()),
            "failed": counts.failed,
        }
        for outcome, count in outcomes.items():
            frames.add_metric((*stream, outcome), count)
        for reason, count in sorted(counts.dropped.items()):
            dropped.add_metric((*stream, reason), count)
        in_flight.add_metric(stream, counts.in_flight)
        if camera.latency is not None:
            _add_latency(latency, stream, camera.latency)
    yield from (captured, frames, dropped, in_flight, latency)


def _add_latency(family: HistogramMetricFamily, stream: tuple[str, str], latency: LatencyTotals) -> None:
    buckets, total = [], 0
    for bound_ms, count in latency.buckets:
        total += count
        if bound_ms is not None:
            buckets.append((repr(bound_ms / 1e3), float(total)))
    # +Inf, which the text format wants, is everything
    family.add_metric(stream, [*buckets, ("+Inf", float(total))], None)
    labels = dict(zip(_STREAM, stream, strict=True))
    family.add_sample(f"{family.name}_count", labels, total)
    if latency.sum_ms is not None:
        family.add_sample(f"{family.name}_sum", labels, latency.sum_ms / 1e3)


def _cameras(cameras: list[CameraNow]) -> Iterator[Metric]:
    rows = [((camera.name, camera.model), str(camera.state)) for camera in cameras]
    yield _state("edge_camera_state", "1 for the state that the camera is in.", _STREAM, rows, CameraState)
    fps = GaugeMetricFamily("edge_fps", "Completed frames per second in the last window.", labels=_STREAM)
    for camera in cameras:
        if camera.fps is not None:
            fps.add_metric((camera.name, camera.model), camera.fps)
    yield fps
    meaning = "Seconds in the state that the camera is in."
    since = GaugeMetricFamily("edge_camera_state_seconds", meaning, labels=_STREAM)
    for camera in cameras:
        since.add_metric((camera.name, camera.model), camera.since_s)
    yield since
    yield from _sources({camera.name: camera for camera in cameras}.values())


def _sources(cameras: Iterable[CameraNow]) -> Iterator[Metric]:
    """What a source gave and what that cost: once for each camera, however many models it has."""
    source = CounterMetricFamily(
        "edge_camera_source", "Pictures by what became of them before they were frames.", labels=("camera", "reason")
    )
    opens = CounterMetricFamily("edge_camera_opens", "How often the source was opened.", labels=("camera",))
    cpu = CounterMetricFamily("edge_camera_decode_cpu_seconds", "CPU time of decoding.", labels=("camera",))
    saved = CounterMetricFamily(
        "edge_camera_decode_saved_cpu_seconds",
        "Estimate of the CPU time that packets which were not decoded would have taken.",
        labels=("camera",),
    )
    for camera in cameras:
        if camera.delivered is not None:
            for reason, count in camera.delivered.model_dump().items():
                source.add_metric((camera.name, reason), count)
        if (decode := camera.decode) is not None:
            opens.add_metric((camera.name,), decode.opened)
            cpu.add_metric((camera.name,), decode.cpu_s)
            saved.add_metric((camera.name,), decode.saved_cpu_s)
    yield from (source, opens, cpu, saved)


def _models(models: list[ModelNow]) -> Iterator[Metric]:
    up = GaugeMetricFamily("edge_model_up", "Whether the model is loaded.", labels=("model",))
    info = InfoMetricFamily("edge_model", "What runs.", labels=("model",))
    for model in models:
        up.add_metric((model.name,), float(model.engine is not None))
        if model.engine is not None:
            what = {"engine": model.engine, "variant": model.variant or "", "backend": model.backend or ""}
            info.add_metric((model.name,), what)
    yield from (up, info)
    lookups = CounterMetricFamily(
        "edge_cache_lookups", "Frames for which the cache was asked.", labels=("model", "outcome")
    )
    bypassed = CounterMetricFamily(
        "edge_cache_bypassed", "Frames for which it was not, since that had not been worth it.", labels=("model",)
    )
    for model in models:
        if model.cache is not None:
            lookups.add_metric((model.name, "hit"), model.cache.hits)
            lookups.add_metric((model.name, "miss"), model.cache.misses)
            bypassed.add_metric((model.name,), model.cache.bypassed)
    yield from (lookups, bypassed)


def _energy(report: StatusReport) -> Iterator[Metric]:
    if (power := report.power) is not None:
        watts = GaugeMetricFamily("edge_power_watts", "Power of the module.", labels=("source",))
        if power.watts is not None:
            watts.add_metric((power.source,), power.watts)
        joules = CounterMetricFamily("edge_energy_joules", "Energy since the start.", labels=("source",))
        joules.add_metric((power.source,), power.joules_total)
        yield from (watts, joules)
    if (thermal := report.thermal) is not None:
        zones = GaugeMetricFamily(
            "edge_temperature_celsius", "Temperature by zone; tj is the hottest.", labels=["zone"]
        )
        zones.add_metric(("tj",), thermal.tj_c)
        for zone, value in thermal.zones.items():
            if zone != "tj":
                zones.add_metric((zone,), value)
        yield zones
        throttling = None if thermal.throttling is None else float(thermal.throttling)
        yield from _gauge("edge_throttling", "Whether the hardware slows itself down.", throttling)
    if report.window is not None:
        meaning = "Completed frames per joule in the last window."
        yield from _gauge("edge_fps_per_watt", meaning, report.window.fps_per_watt)


def _governor(report: StatusReport) -> Iterator[Metric]:
    budget, governor = report.budget, report.governor
    latency_s = None if budget.latency_p99_ms is None else budget.latency_p99_ms / 1e3
    # each is there without a sample too: a budget may come by a command
    for name, meaning, value in (
        ("edge_budget_watts", "Power that may be taken.", budget.power_w),
        ("edge_budget_celsius", "Junction temperature that may be reached.", budget.temperature_c),
        ("edge_budget_latency_seconds", "99th percentile from capture to result that is to be held.", latency_s),
    ):
        family = GaugeMetricFamily(name, meaning)
        if value is not None:
            family.add_metric((), value)
        yield family
    meaning = "Seconds above the power budget by more than 3 %."
    yield CounterMetricFamily("edge_budget_violated_seconds", meaning, value=budget.violated_s)
    meaning = "1 for the state that the governor is in."
    yield _state("edge_governor_state", meaning, (), [((), governor.state)], GovernorWord)
    yield CounterMetricFamily("edge_governor_changes", "Changes of the operating point.", value=governor.changes)
    limits = GaugeMetricFamily("edge_camera_fps_limit", "Frames per second at most, now.", labels=["camera"])
    for camera, fps in report.operating_point.fps.items():
        if fps is not None:
            limits.add_metric((camera,), fps)
    yield limits


def _mqtt(report: StatusReport) -> Iterator[Metric]:
    if (mqtt := report.mqtt) is None:
        return
    yield from _gauge("edge_mqtt_connected", "Whether the broker is there.", float(mqtt.connected))
    yield from _gauge("edge_mqtt_held_lanes", "Lanes whose messages the broker refuses.", len(mqtt.held))
    yield from _gauge("edge_mqtt_queued", "Messages the broker has not acknowledged.", mqtt.queued)
    for name, meaning, count in (
        ("published", "Messages that the broker acknowledged.", mqtt.published),
        ("dropped", "Messages that a full queue lost.", mqtt.dropped),
        ("results_dropped", "Results that never reached the socket.", mqtt.results_dropped),
        ("refused", "Messages that the broker will not take.", mqtt.refused),
        ("reconnects", "Connections after the first.", mqtt.reconnects),
    ):
        yield CounterMetricFamily(f"edge_mqtt_{name}", meaning, value=count)


def _spool(report: StatusReport) -> Iterator[Metric]:
    if (spool := report.spool) is None:
        return
    queued = GaugeMetricFamily("edge_spool_queued", "Stored messages that wait.", labels=["lane"])
    dropped = CounterMetricFamily("edge_spool_dropped", "Stored messages that were lost.", labels=["lane"])
    refused = CounterMetricFamily("edge_spool_refused", "Stored messages that can never be delivered.", labels=["lane"])
    for lane in spool.lanes:
        queued.add_metric((lane.name,), lane.queued)
        dropped.add_metric((lane.name,), lane.dropped)
        refused.add_metric((lane.name,), lane.refused)
    yield from (queued, dropped, refused)
    yield from _gauge("edge_spool_gaps_pending", "Losses that no event tells yet.", spool.gaps_pending)
    yield from _gauge(
        "edge_spool_reserve_touched",
        "Whether the disk is so full that new messages replace old.",
        spool.reserve_touched,
    )
    yield from _gauge("edge_spool_on_disk", "Whether what is stored outlives the process.", spool.where == "disk")
    yield from _gauge("edge_spool_size_bytes", "Size of what is stored.", spool.size_bytes)
