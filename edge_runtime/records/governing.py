"""What the governor is told, and what it decides: between `governor`, `sim`, `app` and `telemetry`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

GovernorWord = Literal["off", "holding", "derating", "raising", "safe"]
"""off: no budget. holding: every wish is granted. derating: something is held back for a budget. raising: more is
being granted, step by step. safe: at the safe point, since a reading that a budget needs is missing, or a lease ran
out."""

LimitWord = Literal["power", "temperature", "latency", "sensor", "over-current", "throttling", "caution"]
"""For which reason something is held back; caution: nobody knows yet what more would cost."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What has to be held; None: no such budget. Module power in W, Tj in degC, 99th percentile from capture to result
    in ms."""

    power_w: float | None = None
    temperature_c: float | None = None
    latency_p99_ms: float | None = None


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """How things run. Whoever applies it does so until another one comes or its lease runs out.

    `variants`: model -> variant. `fps`: camera -> highest rate, Hz; None: no cap but its configured rate. `batch`:
    model -> most frames in a run. `batch_timeout_ms`: model -> how long after its capture a frame waits for company.
    `gpu_hz`: cap of the GPU's clock; None: none, or there is no such actuator.
    """

    variants: Mapping[str, str]
    fps: Mapping[str, float | None]
    batch: Mapping[str, int]
    batch_timeout_ms: Mapping[str, float]
    gpu_hz: float | None = None


@dataclass(frozen=True, slots=True)
class CameraSite:
    """A configured camera. `wanted_hz` None: as many as its source has. `min_hz` 0: none is configured. `full_pace`: a
    file that plays as fast as its models are; what it offers is what they take."""

    name: str
    models: tuple[str, ...]
    wanted_hz: float | None
    min_hz: float = 0.0
    priority: int = 0
    full_pace: bool = False


@dataclass(frozen=True, slots=True)
class VariantSite:
    """A variant that can be switched to at once, and what one frame on it is known to cost; None: not known.

    `busy_s`: seconds of one lane, alone in a batch, at the highest GPU clock. `joules`: energy beyond idle, J.
    """

    name: str
    busy_s: float | None = None
    joules: float | None = None


@dataclass(frozen=True, slots=True)
class ModelSite:
    """A model. `variants`: the one that is wanted first, then lighter and lighter ones. `places`: how many frames a
    batch may hold at the most, `sizes` the batch sizes that its engine can run (None: any)."""

    name: str
    lanes: int
    variants: tuple[VariantSite, ...]
    places: int = 1
    sizes: tuple[int, ...] | None = None
    batch_timeout_ms: float = 20.0


@dataclass(frozen=True, slots=True)
class Site:
    """What there is to govern. `clocks_hz`: the GPU clocks that can be capped to, ascending; empty: no such actuator.
    `period_s`: how often power and temperature are read."""

    cameras: tuple[CameraSite, ...]
    models: tuple[ModelSite, ...]
    clocks_hz: tuple[float, ...] = ()
    period_s: float = 0.1


@dataclass(frozen=True, slots=True)
class CameraSeen:
    """A camera since the sample before. `offered`: pictures that its source gave, before any cap of ours; at full
    pace, pictures that were taken. `live`: whether it is one that gives pictures now (not down, paused or at its
    end)."""

    offered: int
    live: bool = True


@dataclass(frozen=True, slots=True)
class ModelSeen:
    """A model since the sample before.

    `variant`: what new batches run on, None: down. `busy_s`: seconds of inference, summed over its lanes, runs under
    way included. `frames`: frames that were inferred; `batches`: runs that ended. `latencies_ms`: from capture to
    result, of every frame that completed. `changing`: an exchange of its engine is under way. `cached`: frames that a
    cache answered without a run.
    """

    variant: str | None
    busy_s: float = 0.0
    frames: int = 0
    batches: int = 0
    latencies_ms: tuple[float, ...] = ()
    changing: bool = False
    cached: int = 0


@dataclass(frozen=True, slots=True)
class GovernorSample:
    """One look of the governor at everything, at a monotonic time, `span_s` after the one before.

    `power_w`: mean of the readings since the sample before, W, None with `power_reason` where there is no fresh one.
    `tj_c`: the hottest junction, degC, likewise. `quantum_w`: the step of a power reading. `throttling`: whether the
    hardware slows itself down; None: not known. `over_current`: how often each input has triggered since the sample
    before, by name. `gpu_hz`: the clock that is in force, None: not known.
    """

    t_ns: int
    span_s: float
    power_w: float | None
    tj_c: float | None
    cameras: Mapping[str, CameraSeen]
    models: Mapping[str, ModelSeen]
    power_reason: str | None = None
    tj_reason: str | None = None
    quantum_w: float | None = None
    throttling: bool | None = None
    over_current: Mapping[str, int] = field(default_factory=dict)
    gpu_hz: float | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """What the governor decided and why. `because`: a sentence for an operator. `limits`: for which reason each camera
    is held back; a camera that is not is absent. `changed`: the point is another one than at the decision before."""

    point: OperatingPoint
    state: GovernorWord
    because: str
    limits: Mapping[str, LimitWord]
    changed: bool


@dataclass(frozen=True, slots=True)
class Operating:
    """How this device is governed now. `decision` None: nothing has been decided yet, or there is nothing to decide.

    `changes`: how often the operating point has changed since the start. `estimates`: what is only estimated, by name,
    as the watts that each camera takes.
    """

    budget: Budget
    decision: Decision | None = None
    changes: int = 0
    estimates: Mapping[str, float] = field(default_factory=dict)
