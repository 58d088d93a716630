"""What `device-check` reports: a check's outcome, and the file that can be sent."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from edge_runtime import __version__
from edge_runtime.durable import write_atomic
from edge_runtime.errors import EdgeError

SCHEMA = "edge.device-check/1"

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
    outcomes: Sequence[Outcome], device: Facts | None, bundle: Facts, *, complete: bool, now: Callable[[], float]
) -> dict[str, Any]:
    """The report. `device`: what it is, None where it is none. `complete`: whether every check was carried out.

    It names no host, no address and no user: what it says of files begins at the home folder.
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
    }
    clean: dict[str, Any] = json.loads(json.dumps(report, default=str).replace(json.dumps(str(Path.home()))[1:-1], "~"))
    return clean


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
