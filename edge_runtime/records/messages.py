"""The other payloads: presence, and detections per frame."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from edge_runtime.records.window import Payload, Stamped


class Presence(Payload):
    """Retained. The will and a graceful exit say `online: false` with the boot and session of the start."""

    online: bool
    device: str
    boot: str
    session: str
    version: str
    seq: int = Field(ge=0, description="Counts the state messages of this session.")
    clock_synced: bool
    t_utc: str | None = Field(description="When this was written; null in the will, which the broker publishes for us.")


class Detection(Payload):
    """One object: `box` is x1, y1, x2, y2 in camera px; null for a class of the whole picture."""

    label: str
    class_id: int = Field(ge=0)
    score: float = Field(ge=0, le=1)
    box: tuple[float, float, float, float] | None


class FrameDetections(Stamped):
    """What a model found in one frame. QoS 0: one that cannot be sent at once is lost and counted."""

    schema_: Literal["edge.result/1"] = Field(default="edge.result/1", alias="schema")
    camera: str
    model: str
    engine: str
    variant: str
    frame_id: int
    t_utc: str
    latency_ms: float
    width: int
    height: int
    cached: bool = Field(default=False, description="Whether an earlier answer was given again without a run.")
    detections: list[Detection]
