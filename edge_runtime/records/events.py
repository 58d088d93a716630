"""What happened (`event/{kind}`, `edge.event/1`), and what runs (`reported`, `edge.reported/1`)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from edge_runtime.records.status import CameraOrigin
from edge_runtime.records.window import Payload, Stamped

EventKind = Literal[
    "unclean-start",
    "spool",
    "spool-gap",
    "broker",
    "camera",
    "model",
    "command",
    "config",
    "sensor",
    "governor",
    "gpu",
]
"""The kinds of this version. They are the last level of a topic."""

Severity = Literal["info", "warning", "error"]

Scalar = str | int | float | bool | None
"""A JSON value that is neither array nor object."""

KindName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9]*(-[a-z0-9]+)*$", max_length=32)]


class Event(Stamped):
    """Something that an operator may want to know of later. From the spool, in order."""

    schema_: Literal["edge.event/1"] = Field(default="edge.event/1", alias="schema")
    kind: KindName
    severity: Severity
    message: str = Field(description="In words, for people.")
    t_utc: str = Field(description="When it happened.")
    uptime_s: float = Field(ge=0, description="Since the start of the daemon.")
    data: dict[str, Scalar] = Field(description="The same for machines; keys depend on the kind.")


class ReportedModel(Payload):
    """One model as it runs now; engine to backend are null while nothing of it is loaded."""

    name: str
    engine: str | None = Field(description="sha256:... over bundle digest, variant, backend, artefact.")
    bundle: str | None = Field(description="sha256:... of bundle.toml.")
    variant: str | None
    backend: str | None
    state: Literal["up", "down"]
    source: Literal["configuration", "reload", "desired"] = Field(description="Who wanted this model.")
    backend_reason: str | None = Field(
        default=None,
        description="Why it does not run on a TensorRT plan of this device; null where it does, or need not.",
    )


class ReportedCamera(Payload):
    """One camera that is to run."""

    name: str
    models: list[str]
    source: CameraOrigin = Field(description="Who wanted it as it is.")
    paused: bool = Field(description="Whether a command has paused it.")
    cap_fps: float | None = Field(description="The most that a command lets it bring; null: no cap.")


class Reported(Payload):
    """Retained: what this device runs, and where its update stands."""

    schema_: Literal["edge.reported/1"] = Field(default="edge.reported/1", alias="schema")
    device: str
    boot: str
    session: str
    version: str
    seq: int = Field(ge=0, description="Counts the state messages of this session.")
    t_utc: str = Field(description="When this was written.")
    clock_synced: bool
    models: list[ReportedModel]
    cameras: list[ReportedCamera] = Field(
        default_factory=list, description="Those in force: the configuration's, and what commands made of them."
    )
    config_digest: str = Field(description="sha256:... of the configuration in force.")
    generation: int | None = Field(default=None, description="Of the desired state that runs; null without one.")
    update: None = Field(default=None, description="State of an update; none is built yet.")
