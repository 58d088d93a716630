"""The status report, `edge.status/1`: what the daemon does now, and its totals since the start."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from edge_runtime.records.cameras import CameraState
from edge_runtime.records.governing import GovernorWord
from edge_runtime.records.window import (
    CacheCounts,
    OperatingPointWindow,
    Payload,
    SourceCounts,
    ThermalWindow,
    WindowReport,
)

HealthState = Literal["ok", "degraded", "wedged"]


class Health(Payload):
    """Whether it works. `degraded` works with less than it should; `wedged` wants a restart."""

    state: HealthState
    reasons: list[str] = Field(description="Sentences, empty when ok; without credentials.")


class FrameTotals(Payload):
    """Frames since the start, by outcome. They only grow, all but `in_flight`."""

    captured: int = Field(default=0, ge=0)
    completed: int = Field(default=0, ge=0)
    cached: int = Field(default=0, ge=0)
    stale: int = Field(default=0, ge=0)
    dropped: dict[str, int] = Field(default_factory=dict, description="By reason.")
    failed: int = Field(default=0, ge=0)
    in_flight: int = Field(default=0, ge=0)


class LatencyTotals(Payload):
    """Every latency since the start, in ms: `buckets` as in a window report, each value in one bucket."""

    buckets: list[tuple[float | None, int]] = Field(description="[upper bound in ms, count]; the last bound is null.")
    sum_ms: float | None = Field(default=None, ge=0, description="Sum of all of them; null when it is not kept.")


class DecodeTotals(Payload):
    """What reading and decoding a camera has cost since the start, or since it was added."""

    cpu_s: float = Field(ge=0, description="CPU time of decoding.")
    saved_cpu_s: float = Field(ge=0, description="Estimate of what packets that were not decoded would have cost.")
    opened: int = Field(ge=0, description="How often the source was opened.")
    backend: str | None = Field(description="What reads it; null: not opened yet.")


CameraOrigin = Literal["configuration", "overlay"]
"""Where a camera's keys come from: the file alone, or also a command, which holds until it is reset."""


class CameraNow(Payload):
    """One camera on one model. Of totals there is what windows have told so far."""

    name: str
    model: str
    state: CameraState
    reason: str | None = Field(description="Why it is not up; null when it is.")
    since_s: float = Field(ge=0, description="Seconds in this state.")
    fps: float | None = Field(ge=0, description="Completed frames per second of the last window; null before one.")
    fps_wanted: float | None = Field(default=None, description="Null: the source's own rate.")
    source: CameraOrigin = Field(default="configuration", description="Who wanted it as it is.")
    address: str | None = Field(default=None, description="Its url without credentials; null: not known.")
    paused: bool = Field(default=False, description="Whether a command has paused it.")
    cap_fps: float | None = Field(default=None, description="The most that a command lets it bring; null: no cap.")
    frames: FrameTotals = Field(default_factory=FrameTotals)
    latency: LatencyTotals | None = None
    delivered: SourceCounts | None = Field(
        default=None, description="What its source gave, the same for every model; null before a window."
    )
    decode: DecodeTotals | None = Field(default=None, description="Null where nothing is decoded.")


class ModelNow(Payload):
    """One model; `engine` is null while it is down for `reason`."""

    name: str
    engine: str | None
    bundle: str | None = Field(default=None, description="sha256:... of bundle.toml.")
    source: Literal["configuration", "reload", "desired"] = Field(
        default="configuration", description="Who wanted this model."
    )
    ladder: list[str] = Field(
        default_factory=list, description="Variants that are loaded and can be switched to at once."
    )
    variant: str | None
    backend: str | None
    max_batch: int | None = None
    lanes: int | None = None
    backend_reason: str | None = Field(
        default=None,
        description="Why it does not run on a TensorRT plan of this device; null where it does, or need not.",
    )
    cache: CacheCounts | None = Field(default=None, description="Since the start; null where no cache had a part.")
    reason: str | None = None


class MqttNow(Payload):
    """The broker connection. Counts are since the start of the daemon."""

    connected: bool
    reason: str | None = Field(description="Why it is not connected; null when it is.")
    since_s: float = Field(ge=0, description="Seconds connected, or not.")
    protocol: str | None = None
    queued: int = Field(ge=0, description="Messages the broker has not acknowledged.")
    dropped: int = Field(ge=0, description="Messages that a full queue lost.")
    results_dropped: int = Field(ge=0, description="Results that never reached the socket.")
    refused: int = Field(ge=0, description="Messages that the broker will not take.")
    published: int = Field(default=0, ge=0)
    reconnects: int = Field(default=0, ge=0)
    held: list[str] = Field(
        default_factory=list, description="Lanes that wait because the broker refuses what they send."
    )


class SpoolLane(Payload):
    """One lane of stored messages."""

    name: str
    queued: int = Field(ge=0)
    dropped: int = Field(ge=0, description="Lost for want of room, or too old.")
    refused: int = Field(default=0, ge=0, description="Can never be delivered; the last 100 are kept aside.")
    last_seq: int | None = Field(default=None, ge=0)


class SpoolNow(Payload):
    """What is kept for the broker. In `memory` it does not outlive the process, for `reason`."""

    where: Literal["disk", "memory"]
    reason: str | None = None
    size_bytes: int | None = Field(default=None, ge=0)
    lanes: list[SpoolLane]
    gaps_pending: int = Field(default=0, ge=0, description="Gaps that no event tells yet.")
    reserve_touched: bool = Field(
        default=False, description="The disk is so full that new messages replace the oldest."
    )


class PowerNow(Payload):
    """Power of the module, and its energy since the start. A simulated source says `simulated`."""

    source: str
    rails: list[str]
    watts: float | None = Field(description="The newest reading; null when it is stale.")
    joules_total: float = Field(ge=0)


class BudgetNow(Payload):
    """What has to be held; null: no such budget."""

    power_w: float | None = Field(description="Of the module.")
    temperature_c: float | None = Field(description="Of the hottest junction.")
    latency_p99_ms: float | None = Field(description="From capture to result.")
    max_power_w: float | None = Field(description="What set-budget may not exceed; null: there is no bound.")
    set_by: Literal["configuration", "command"]
    violated_s: float = Field(
        ge=0, description="Seconds above the power budget by more than 3 %, summed over all windows since the start."
    )


class GovernorNow(Payload):
    """What the governor does."""

    state: GovernorWord
    because: str = Field(description="In words, for people.")
    changes: int = Field(ge=0, description="How often the operating point has changed since the start.")
    estimates: dict[str, float] = Field(description="What is estimated and not measured, by name.")


class StatusReport(Payload):
    """What the daemon does now. A value that is not known is null, never 0."""

    schema_: Literal["edge.status/1"] = Field(default="edge.status/1", alias="schema")
    device: str
    boot: str
    session: str
    version: str
    pid: int
    store: str = Field(description="The folder that this daemon holds.")
    t_utc: str
    clock_synced: bool
    uptime_s: float = Field(ge=0)
    health: Health
    cameras: list[CameraNow]
    cameras_removed: list[str] = Field(
        default_factory=list, description="Configured cameras that a command has removed, until they are reset."
    )
    models: list[ModelNow]
    power: PowerNow | None
    power_reason: str | None = Field(description="Why there is no power; null when there is.")
    thermal: ThermalWindow | None
    budget: BudgetNow
    governor: GovernorNow
    operating_point: OperatingPointWindow
    mqtt: MqttNow | None = Field(description="Null without [mqtt].")
    spool: SpoolNow | None
    window: WindowReport | None = Field(description="The last window; null before the first one.")
    gpu_faults: int = Field(ge=0, description="Faults of the GPU that ended the daemon, over all its starts.")


class WindowList(Payload):
    """The answer of `/api/windows`: the newest windows, oldest first."""

    schema_: Literal["edge.windows/1"] = Field(default="edge.windows/1", alias="schema")
    windows: list[WindowReport]


class HealthReport(Payload):
    """The answer of `/healthz`."""

    status: HealthState
    reasons: list[str]


class ErrorReport(Payload):
    """An error, as MQTT and HTTP say it."""

    code: str
    message: str
    where: str | None
    remedy: str | None
    retryable: bool
