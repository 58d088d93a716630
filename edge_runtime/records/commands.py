"""Commands (`cmd/{name}`, and the control door) and the replies to them (`reply/{id}`)."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AwareDatetime, BeforeValidator, Field, JsonValue, StringConstraints, model_validator

from edge_runtime.records.window import Payload, Stamped

CommandId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]+$", min_length=1, max_length=64)]

_MOMENT = re.compile(r"\d{4}-\d{2}-\d{2}[Tt ]\d{2}:\d{2}(:\d{2}(\.\d+)?)?([Zz]|[+-]\d{2}:?\d{2})")


def _moment_text(value: object) -> object:
    # pydantic would take numbers too, as seconds of an epoch that the sender may not have meant
    if not isinstance(value, str) or not _MOMENT.fullmatch(value):
        raise ValueError('must be ISO 8601 with a time zone, such as "2026-01-31T12:00:00Z"')
    return value


Moment = Annotated[AwareDatetime, BeforeValidator(_moment_text, json_schema_input_type=str)]


class Command(Payload):
    """A wish. Over MQTT `id` and `expires_utc` are required, at the control door they are not."""

    id: CommandId | None = Field(default=None, description="Obeyed once, until it expires.")
    expires_utc: Moment | None = Field(default=None, description="Not to be obeyed at or after this time.")
    args: dict[str, JsonValue] = Field(default_factory=dict, description="Depends on the command.")


class CommandError(Payload):
    """Why not: a stable code, words, the field or thing it is about, and what to do."""

    code: str
    message: str
    where: str | None
    remedy: str | None
    retryable: bool = Field(description="Whether the same command may be obeyed later.")


class Reply(Stamped):
    """What became of a command. `seq` counts the replies of this session."""

    id: CommandId | None
    t_utc: str = Field(description="When this was written.")
    ok: bool
    error: CommandError | None
    result: JsonValue


class PingArgs(Payload):
    """`ping` takes no arguments."""


CameraAction = Literal["pause", "resume", "cap", "add", "remove", "change", "reset"]


class CameraArgs(Payload):
    """`camera`: pause, resume or cap a camera. On the control socket also: add, change or remove one, or reset what
    commands did to one, or to all."""

    name: str | None = Field(
        default=None, description="A camera's name. Not with `add`; may be left out with `reset`, which means all."
    )
    action: CameraAction
    fps: float | None = Field(
        default=None,
        gt=0,
        le=1000,
        allow_inf_nan=False,
        description="With `cap`, and required there: frames per second at most; null lifts the cap.",
    )

    camera: dict[str, JsonValue] | None = Field(
        default=None,
        description="With `add` the keys of [[camera]], with `change` those that change; null takes a key out.",
    )

    @model_validator(mode="after")
    def _name(self) -> CameraArgs:
        if self.action == "add" and self.name is not None:
            raise ValueError('with "add" the name is one of the keys of "camera"')
        if self.action not in ("add", "reset") and self.name is None:
            raise ValueError(f'"name" is missing: which camera to {self.action}')
        return self

    @model_validator(mode="after")
    def _camera_goes_with_add_and_change(self) -> CameraArgs:
        if (self.action in ("add", "change")) != bool(self.camera):
            raise ValueError('"camera" goes with "add" and "change", and has to be there: keys of [[camera]]')
        return self

    @model_validator(mode="after")
    def _fps_goes_with_cap(self) -> CameraArgs:
        if (self.action == "cap") != ("fps" in self.model_fields_set):
            raise ValueError('"fps" goes with "cap", and has to be there: a number, or null to lift the cap')
        return self


class CameraResult(Payload):
    """The answer to `camera`."""

    name: str | None = Field(description="Null: all.")
    action: CameraAction
    fps: float | None = Field(description="The cap of a command that is in force; null: none.")
    done: list[str] = Field(description="What was changed, a sentence each; empty: it was so already.")
    persisted: bool = Field(description="Whether the next start knows of it.")
    notes: list[str]


class SetBudgetArgs(Payload):
    """`set-budget`: other budgets, until the next start or until the configuration's are changed. What is absent stays
    as it is, null lifts it."""

    power_w: float | None = Field(
        default=None,
        gt=0,
        le=1000,
        strict=True,
        allow_inf_nan=False,
        description="Watts of the module; at most the configuration's max_power_w.",
    )
    temperature_c: float | None = Field(
        default=None,
        ge=30,
        le=110,
        strict=True,
        allow_inf_nan=False,
        description="Degrees Celsius of the hottest junction.",
    )
    latency_p99_ms: float | None = Field(
        default=None,
        gt=0,
        le=60_000,
        strict=True,
        allow_inf_nan=False,
        description="From capture to result, 99th percentile.",
    )

    @model_validator(mode="after")
    def _anything(self) -> SetBudgetArgs:
        if not self.model_fields_set:
            raise ValueError('one of "power_w", "temperature_c" and "latency_p99_ms" has to be there')
        return self


Digest = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]


class ReloadArgs(Payload):
    """`reload`: another bundle for a model, from this device's store; or back to the configuration's."""

    model: str = Field(description="A configured model's name.")
    bundle: Digest | None = Field(default=None, description="Digest of a bundle that is in the store.")
    variant: str = Field(default="auto", description="One of the bundle's; auto: the first.")
    reset: bool = Field(default=False, description="Instead of a bundle: what the configuration says.")
    allow_pause: bool = Field(
        default=False, description="Where both engines do not fit into memory, stop the old one first."
    )
    allow_slow: bool = Field(default=False, description="Take a model that cannot keep up with its cameras.")

    @model_validator(mode="after")
    def _bundle_or_reset(self) -> ReloadArgs:
        if (self.bundle is None) != self.reset:
            raise ValueError('either "bundle" or "reset": true has to be there, and not both')
        return self


class VariantArgs(Payload):
    """`variant`: another variant of the bundle that runs, until the next start."""

    model: str = Field(description="A configured model's name.")
    variant: str = Field(description="One of the bundle's variants.")
    allow_pause: bool = Field(
        default=False, description="Where both engines do not fit into memory, stop the old one first."
    )
    allow_slow: bool = Field(default=False, description="Take a variant that cannot keep up with its cameras.")


class ProofResult(Payload):
    """What a model showed in a process of its own, before it came near the cameras."""

    took_s: float
    load_s: float
    inference_ms: float = Field(description="Median run of one picture, beside everything else that runs here.")
    cpu_ms: float = Field(description="CPU time of that run.")
    memory_mb: float = Field(description="Memory that the loaded engine takes, in MB.")
    golden: str = Field(description="What the golden check found, in words.")


class ReloadResult(Payload):
    """The answer to `reload` and `variant`: what runs now, and what the change cost."""

    model: str
    engine: str
    bundle: str
    variant: str
    backend: str
    source: Literal["configuration", "reload", "desired"] = Field(description="Who wanted this model.")
    changed: bool = Field(description="False: it ran already.")
    previous: str | None = Field(description="The engine before; null where the model was down.")
    took_s: float
    proof: ProofResult | None = Field(description="Null where the engine was loaded already.")
    exchange_ms: float | None = Field(description="How long the exchange held up the model's lanes.")
    gap_ms: float | None = Field(
        description="Longest time between two results of one camera during all of it; null without results."
    )
    lost: dict[str, int] = Field(description="Frames of this model that were stale, dropped or failed meanwhile.")
    judged: int = Field(description="Frames that the new engine was watched on before the old one went.")
    pause_ms: float | None = Field(description="How long the model was stopped for want of memory; null: not at all.")
    persisted: bool = Field(description="Whether the next start begins with this model.")
    notes: list[str]
