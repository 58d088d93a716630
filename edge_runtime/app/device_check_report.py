"""What `device-check` reports: a check's outcome, and the file that can be sent."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from edge_runtime import __version__
from edge_runtime.durable import write_atomic
from edge_runtime.errors import EdgeError

SCHEMA = "edge.device-check/1"

_HOMES = re.compile(r'/home/[^/"\\\s]+')
"""Of whom ever: this may run by sudo, from an environment in somebody's folder."""

Status = Literal["passed", "failed", "skipped"]
Facts = Mapping[str, Any]
"""Numbers, words, and tables of them: whatever JSON has."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a check ended: in `words` for a person, in `numbers` for a program."""

    name: str
    status: Status
    words: str
    numbers: Facts = field(default_factory=dict)
    took_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Found:
    """What a check that passed has to say."""

    words: str
    numbers: Facts = field(default_factory=dict)


class CheckFailed(EdgeError):
    """A check found that something is wrong; `numbers` say how."""

    default_code = "check_failed"

    def __init__(self, message: str, numbers: Facts | None = None, *, remedy: str | None = None) -> None:
        super().__init__(message, remedy=remedy)
        self.numbers = dict(numbers or {})


class CheckSkipped(EdgeError):
    """There is nothing here that could be checked, and why."""

    default_code = "check_skipped"


def carry_out(name: str, check: Callable[[], Found]) -> Outcome:
    """Run a check and say how it ended. Raises nothing but what ends a process."""
    started = time.monotonic()

    def ended(status: Status, words: str, numbers: Facts | None = None) -> Outcome:
        return Outcome(name, status, words, dict(numbers or {}), round(time.monotonic() - started, 3))

    try:
        found = check()
    except CheckSkipped as skipped:
        return ended("skipped", str(skipped))
    except CheckFailed as failed:
        return ended("failed", str(failed), failed.numbers)
    except EdgeError as error:
        return ended("failed", str(error), {"code": error.code})
    except Exception as error:  # noqa: BLE001  one check that breaks is no reason to leave out the others
        return ended("failed", f"the check itself broke: {error!r}")
    return ended("passed", found.words, found.numbers)


def document(
    outcomes: Sequence[Outcome],
    device: Facts | None,
    bundle: Facts,
    *,
    complete: bool,
    now: Callable[[], float],
    error: EdgeError | None = None,
) -> dict[str, Any]:
    """The report. `device`: what it is, None where it is none, and then `error` says why. `complete`: whether every
    check was carried out.

    It names no host, no address and no user: what it says of files begins at the home folder. A number that is not
    finite is a text in it.
    """
    counts = {status: sum(each.status == status for each in outcomes) for status in ("passed", "failed", "skipped")}
    report = {
        "schema": SCHEMA,
        "edge_runtime": __version__,
        "t_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now())),
        "device": device,
        "bundle": bundle,
        "complete": complete,
        **counts,
        "checks": [asdict(each) for each in outcomes],
        **({} if error is None else {"error": error.as_payload()}),
    }
    text = json.dumps(_finite(report), default=str)
    if (home := _home()) is not None:
        text = text.replace(json.dumps(home)[1:-1], "~")
    clean: dict[str, Any] = json.loads(_HOMES.sub("~", text))
    return clean


def _home() -> str | None:
    """The user's home folder, where it is one: in a container a user may have none, or "/", which is in every path."""
    try:
        home = str(Path.home())
    except RuntimeError:
        return None
    return home if home.strip("/") else None


def _finite(value: Any) -> Any:
    """JSON has no infinity and no NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, (list, tuple)) else value


def save(report: Mapping[str, Any], path: Path) -> None:
    """Write it. Raises EdgeError (code "report_write_failed")."""
    try:
        write_atomic(path, (json.dumps(report, indent=1) + "\n").encode())
    except OSError as error:
        raise EdgeError(
            f"the report cannot be written: {error.strerror}",
            code="report_write_failed",
            where=str(path),
            remedy="name another file with --report",
        ) from None
