"""The window report, `edge.window/1`: what one span of time brought and what it cost."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from edge_runtime.records.cameras import CameraState
from edge_runtime.records.governing import GovernorWord, LimitWord


class Payload(BaseModel):
    """Base of every payload: closed and frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    def to_json(self) -> bytes:
        """The payload as it is published: UTF-8 JSON."""
        return self.model_dump_json(by_alias=True).encode()


class Stamped(Payload):
    """What every message carries: who, which start, which message, when."""

    device: str
    boot: str = Field(description="The kernel's boot id.")
    session: str = Field(description="Random, new at every start of the daemon.")
    seq: int = Field(ge=0, description="Counts up per lane of messages.")
    clock_synced: bool = Field(description="Whether wall time could be trusted when this was written.")


class FrameCounts(Payload):
    """carried_in + captured = completed + cached + stale + dropped + failed + in_flight, always."""

    carried_in: int = Field(ge=0, description="In flight when the window opened.")
    captured: int = Field(ge=0, description="Decoded, intact and wanted by the camera's cap.")
    completed: int = Field(ge=0)
    cached: int = Field(ge=0)
    stale: int = Field(ge=0, description="Replaced by a newer frame before use.")
    dropped: dict[str, int] = Field(description="Never used, by reason.")
    failed: int = Field(ge=0)
    in_flight: int = Field(ge=0, description="Neither done nor given up when the window closed.")


class SourceCounts(Payload):
    """What the source delivered and never became a captured frame, in this window."""

    decoded: int = Field(ge=0)
    skipped_rate: int = Field(ge=0)
    skipped_codec: int = Field(ge=0)
    corrupt: int = Field(ge=0)
    pre_key: int = Field(ge=0)
    duplicate: int = Field(ge=0)


class DecodeWindow(Payload):
    """What reading and decoding a camera cost in this window."""

    cpu_s: float = Field(ge=0, description="CPU time of decoding, wherever it is done.")
    saved_cpu_s: float = Field(
        ge=0, description="Estimate of what the packets in skipped_codec would have cost beyond that."
    )
    opened: int = Field(ge=0, description="How often the source was opened.")
    backend: str | None = Field(
        description="What reads it, with what decodes in brackets where that is hardware; null: not opened yet."
    )


class Latency(Payload):
    """Durations in ms; p50 and p99 are null when nothing completed.

    `buckets` are [upper bound in ms, count], each value in one bucket; the last bound is null (no bound).
    """

    p50: float | None
    p99: float | None
    buckets: list[tuple[float | None, int]]


class CameraWindow(Payload):
    """One camera on one model."""

    name: str
    model: str
    state: CameraState
    reason: str | None
    since_s: float | None = Field(
        default=None,
        ge=0,
        description="Seconds in this state when the window closed; null: nobody knows, as where its model is down.",
    )
    frames: FrameCounts
    source: SourceCounts
    decode: DecodeWindow | None = Field(default=None, description="Null where nothing is decoded.")
    fps: float = Field(ge=0, description="Completed frames per second.")
    latency_ms: Latency


class CacheCounts(Payload):
    """What was asked of a model's cache: hits + misses = lookups, always."""

    lookups: int = Field(default=0, ge=0)
    hits: int = Field(default=0, ge=0, description="An earlier answer was given again, unless the frame had failed.")
    misses: int = Field(default=0, ge=0)
    bypassed: int = Field(default=0, ge=0, description="Frames for which nobody asked: that had not been worth it.")


class ModelWindow(Payload):
    """One engine of one model. A model that changed its engine in the window has two of these."""

    name: str
    engine: str = Field(description="sha256:... over bundle digest, variant, backend, artefact.")
    variant: str
    backend: str
    frames: FrameCounts
    batch_mean: float | None = Field(description="Frames per batch; null when nothing ran.")
    latency_ms: Latency
    inference_ms: Latency
    cache: CacheCounts | None = Field(default=None, description="Null where no cache had a part.")


class EnergyWindow(Payload):
    """Energy of the window, by the trapezoid rule between readings; `net_joules` is without idle power."""

    source: str = Field(description="Several, joined by +, where the source changed in the window.")
    rails: list[str] = Field(description="What module power is the sum of.")
    joules: float
    net_joules: float | None = Field(description="Without idle_w; null where that is not known.")
    mean_w: float
    peak_w: float = Field(description="The highest single reading.")
    samples: int
    rate_hz: float = Field(description="How often readings came.")
    quantum_w: float | None = Field(description="The step of a reading, the coarsest of the sources'; 0: none.")
    idle_w: float | None = Field(description="Power of the module without load, in the same power mode.")
    mode: str | None = Field(description="The power mode (nvpmodel).")
    reasons: dict[str, str] = Field(description="Why a field is null, by its name.")


class ThermalWindow(Payload):
    """Temperatures in degC at the end of the window; a zone that is not available is absent."""

    tj_c: float = Field(description="The hottest junction.")
    zones: dict[str, float]
    throttling: bool | None = Field(description="Whether the hardware slows itself down; null: not known.")
    source: str
    over_current: dict[str, int] = Field(
        description="How often each over-current input has triggered since the start; empty: not known."
    )
    reasons: dict[str, str] = Field(description="Why something is null or absent: throttling, zone NAME, ...")


class OperatingPointWindow(Payload):
    """What runs how, at the end of the window."""

    variants: dict[str, str] = Field(description="The variant that runs, by model.")
    fps: dict[str, float | None] = Field(description="The most that a camera may have; null: its source's own rate.")
    batch: dict[str, int] = Field(description="Most frames in a run, by model.")
    limits: dict[str, LimitWord] = Field(
        default_factory=dict, description="Why a camera is held back, by name; one that is not is absent."
    )
    batch_timeout_ms: dict[str, float] = Field(
        default_factory=dict, description="How long a frame waits for others, by model; absent: as configured."
    )
    gpu_hz: float | None = Field(default=None, description="Cap of the GPU's clock, Hz; null: none.")


class GovernorWindow(Payload):
    """What the governor does, at the end of the window."""

    state: GovernorWord
    because: str = Field(description="In words, for people.")
    changes: int = Field(default=0, ge=0, description="How often the operating point changed in the window.")
    estimates: dict[str, float] = Field(
        default_factory=dict, description="What is estimated and not measured, by name; empty: nothing is."
    )


class BudgetWindow(Payload):
    """The budget at the end of the window; null: no such budget.

    `violated_s`: seconds (of one-second means) above the power budget by more than 3 %.
    """

    power_w: float | None
    temperature_c: float | None
    latency_p99_ms: float | None = None
    violated_s: float | None
    reason: str | None = Field(
        default=None, description="Why violated_s is null, or for which seconds of the window it is not known."
    )


class WindowReport(Stamped):
    """What one window brought and cost. `fps_per_watt` = completed frames / joules."""

    schema_: Literal["edge.window/1"] = Field(default="edge.window/1", alias="schema")
    uptime_s: float
    t_start_utc: str
    t_end_utc: str
    t_utc: str = Field(description="When this was written.")
    duration_s: float
    frames: FrameCounts
    fps: float
    latency_ms: Latency
    cameras: list[CameraWindow]
    models: list[ModelWindow]
    energy: EnergyWindow | None
    energy_reason: str | None = Field(default=None, description="Why energy is null; null when it is not.")
    fps_per_watt: float | None
    fps_per_watt_reason: str | None
    mixed: bool = Field(description="Whether some model had two engines in this window.")
    thermal: ThermalWindow | None
    thermal_reason: str | None = Field(default=None, description="Why thermal is null; null when it is not.")
    operating_point: OperatingPointWindow | None
    governor: GovernorWindow | None
    budget: BudgetWindow | None
