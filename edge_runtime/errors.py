"""Errors for the operator: what, where, why, and what to do about it.

Foreign exceptions become one of these at the one door that talks to the foreign library.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_REFUSED = 3
EXIT_NOT_THERE = 4
EXIT_INTERRUPTED = 130


class EdgeError(Exception):
    """Base of every error that reaches an operator.

    `code` is a stable snake_case word for machines; `where` names the file, camera, model or key;
    `remedy` says what to do; `retryable` tells whether the same thing may work later unchanged.
    """

    exit_code: ClassVar[int] = EXIT_FAILED
    default_code: ClassVar[str] = "failed"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        where: str | None = None,
        remedy: str | None = None,
        retryable: bool = False,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.where = where
        self.remedy = remedy
        self.retryable = retryable

    def __str__(self) -> str:
        text = f"{self.where}: {self.message}" if self.where else self.message
        return f"{text} ({self.remedy})" if self.remedy else text

    def as_payload(self) -> dict[str, object]:
        """The error object of the MQTT and HTTP contracts."""
        return {
            "code": self.code,
            "message": self.message,
            "where": self.where,
            "remedy": self.remedy,
            "retryable": self.retryable,
        }


class UsageError(EdgeError):
    """A command was called in a way it can't be called."""

    exit_code = EXIT_USAGE
    default_code = "usage"


@dataclass(frozen=True, slots=True)
class ConfigProblem:
    """One thing that is wrong in a configuration or manifest file.

    `line` counts from 1 and is None where no line exists (the file as a whole).
    """

    file: str
    line: int | None
    key: str | None
    message: str
    remedy: str | None = None

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        key = f" {self.key}:" if self.key else ""
        remedy = f" ({self.remedy})" if self.remedy else ""
        return f"{place}:{key} {self.message}{remedy}"


class ConfigError(EdgeError):
    """A configuration that cannot be parsed or validated: every problem found, at once."""

    exit_code = EXIT_USAGE
    default_code = "config_invalid"

    def __init__(self, problems: list[ConfigProblem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = problems


class BundleError(EdgeError):
    """A model bundle that is missing, damaged, foreign, or says what its model does not do."""

    exit_code = EXIT_USAGE
    default_code = "bundle_invalid"


class EngineError(EdgeError):
    """An engine failed to load, warm up or run."""

    default_code = "engine_failed"


class CameraError(EdgeError):
    """A camera cannot be opened or read; `retryable` says whether trying again may help."""

    default_code = "camera_failed"


class MqttError(EdgeError):
    """The broker connection cannot be set up as configured."""

    default_code = "mqtt_failed"


class RefusedError(EdgeError):
    """A gate, check or trial said no."""

    exit_code = EXIT_REFUSED
    default_code = "refused"


class NotThereError(EdgeError):
    """What the command needs does not exist here: no daemon, no device."""

    exit_code = EXIT_NOT_THERE
    default_code = "not_there"
