"""Has the GPU's checks of `device-check` carried out in processes of their own, one after the other.

Where one crashes, hangs or leaves the GPU unusable, that check failed, and the next ones get a new process.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_runtime.app.device_check_child import BROKEN, DONE
from edge_runtime.app.device_check_report import Outcome, Status
from edge_runtime.children import ChildOutput, kill_child, signal_name, start_child
from edge_runtime.engine.bundle import Bundle

log = logging.getLogger(__name__)

MODULE = "edge_runtime.app.device_check_child"
CHECK_WITHIN_S = 120.0
RELOAD_WITHIN_S = 10.0
"""A reload takes so long at most, on top of that."""
_MAX_LINE_BYTES = 1024 * 1024
_OPENING = "opening"


@dataclass(frozen=True, slots=True)
class Job:
    """Checks with one plan through one door (None: whichever there is). `kernels`: the folder of compiled ones."""

    checks: tuple[str, ...]
    bundle: Bundle
    variant: str
    plan: Path
    kernels: Path
    reloads: int
    door: str | None = None


def carry_out_job(job: Job, *, within_s: float = CHECK_WITHIN_S) -> Iterator[Outcome]:
    """The outcome of each check, in order, as it comes. When this ends, however it does, no process is left."""
    left = list(job.checks)
    while left:
        before = len(left)
        for outcome in _one_process(job, left, within_s):
            left.remove(outcome.name)
            yield outcome
        if len(left) == before:  # it told nothing of any check: another one would not either
            for name in left:
                yield Outcome(name, "failed", "the process for it could not be started")
            return


def _one_process(job: Job, checks: list[str], within_s: float) -> Iterator[Outcome]:
    order = {
        "parent": os.getpid(),
        "nice": 0,
        "root": str(job.bundle.root.resolve()),
        "digest": job.bundle.digest,
        "variant": job.variant,
        "plan": str(job.plan.resolve()),
        "kernels": str(job.kernels.resolve()),
        "checks": checks,
        "reloads": job.reloads,
        "door": job.door,
    }
    try:
        process = start_child(MODULE, order)
    except OSError as error:
        yield from (Outcome(name, "failed", f"no process can be started: {error}") for name in checks)
        return
    child = _Child(process, tuple(checks))
    try:
        yield from child.outcomes(within_s, job.reloads)
    finally:
        kill_child(process, "checked the device")
        child.close()


class _Child:
    """Reads what the process says, and keeps to the time of each check."""

    def __init__(self, process: subprocess.Popen[bytes], checks: tuple[str, ...]) -> None:
        self._output = ChildOutput(process, _MAX_LINE_BYTES)
        self._left = list(checks)
        self._stage = _OPENING
        self._begun = False
        self._since = time.monotonic()

    def outcomes(self, within_s: float, reloads: int) -> Iterator[Outcome]:
        """Of those checks that the process came to."""
        while True:
            limit_s = within_s + (reloads * RELOAD_WITHIN_S if self._stage == "reloads" else 0.0)
            left_s = self._since + limit_s - time.monotonic()
            if left_s <= 0:
                yield self._failed(f"it did not come to an end within {limit_s:.0f} s")
                return
            try:
                lines = self._output.read(left_s)
            except ValueError as error:
                yield self._failed(str(error))
                return
            if lines is None:
                yield self._failed(self._ended())
                return
            done = yield from self._hear(lines)
            if done:
                return

    def _hear(self, lines: Sequence[bytes]) -> Generator[Outcome, None, bool]:
        """Take in lines; True after the last one."""
        for raw in lines:
            facts: dict[str, Any] = json.loads(raw)
            stage = str(facts["stage"])
            if stage == DONE:
                return True
            if stage == BROKEN:
                yield from self._broken(facts["error"])
                return True
            if "outcome" in facts:
                self._stage = _OPENING
                self._begun = True
                self._left.remove(stage)
                yield Outcome(**facts["outcome"])
            else:
                self._stage = stage
            self._since = time.monotonic()
        return False

    def _broken(self, error: Mapping[str, Any]) -> Iterator[Outcome]:
        """The GPU cannot be had, so no check can be made; or not any more, and the check that did it has said so."""
        if self._begun:
            return
        told = f"{error['message']} ({error['remedy']})" if error["remedy"] else str(error["message"])
        status: Status = "skipped" if error["code"] == "cuda_missing" else "failed"
        yield from (Outcome(name, status, told, {"code": error["code"]}) for name in self._left)

    def _failed(self, reason: str) -> Outcome:
        under_way = self._stage in self._left
        took_s = round(time.monotonic() - self._since, 3)
        said = self._output.last_words
        words = ("" if under_way else "before it began, ") + reason + (f"; it said: {said}" if said else "")
        return Outcome(self._stage if under_way else self._left[0], "failed", words, {}, took_s)

    def _ended(self) -> str:
        code = self._output.exit_code()
        if code is None:
            return "its process closed its standard output and went on"
        if code >= 0:
            return f"its process ended with {code}"
        if -code == signal.SIGKILL:
            return "its process was killed, and not by us: the kernel does so where memory runs out"
        return f"{signal_name(code)} ended its process"

    def close(self) -> None:
        """Close the pipes, and log what the process wrote to standard error: its last 2 KB."""
        if text := self._output.close():
            log.info("the process that checked the device wrote: %s", text)
