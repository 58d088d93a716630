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


class CameraArgs(Payload):
    """`camera`: pause, resume or cap a configured camera."""

    name: str
    action: Literal["pause", "resume", "cap"]
    fps: float | None = Field(
        default=None,
        gt=0,
        le=1000,
        allow_inf_nan=False,
        description="With `cap`, and required there: frames per second at most; null lifts the cap.",
    )

    @model_validator(mode="after")
    def _fps_goes_with_cap(self) -> CameraArgs:
        if (self.action == "cap") != ("fps" in self.model_fields_set):
            raise ValueError('"fps" goes with "cap", and has to be there: a number, or null to lift the cap')
        return self
