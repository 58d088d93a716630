"""Has plans built, each in a process of its own (build_child.py), and says what it does meanwhile."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edge_runtime.children import ChildOutput, kill_child, signal_name, start_child
from edge_runtime.engine.bundle import Bundle
from edge_runtime.engine.tensorrt.network import Settings
from edge_runtime.engine.tensorrt.preflight import FREE_MEMORY
from edge_runtime.engine.tensorrt.probe import Here
from edge_runtime.errors import BundleError, EdgeError, EngineError, RefusedError

log = logging.getLogger(__name__)

MODULE = "edge_runtime.engine.tensorrt.build_child"
WITHIN_S = 3600.0
"""A large model on the smallest module takes tens of minutes; one that takes longer hangs."""
LOOK_WITHIN_S = 60.0
_TICK_S = 0.1
_UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError)
"""What reading the lines of a process that went wrong may raise."""
_KINDS: Mapping[str, type[EdgeError]] = {kind.__name__: kind for kind in (BundleError, EngineError, RefusedError)}
_WORDS = {
    "starting": "starting",
    "looking": "looking at this device",
    "verifying": "verifying the bundle",
    "parsing": "reading the model",
    "building": "building",
    "reading back": "reading the plan back",
    "saving": "saving the plan",
}
_BEFORE_THE_MODEL = ("starting", "looking")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a build is. `phase`: in words; `percent` of that phase, None where it has none. `expected_s`: how long
    all of it took the last time, None where nobody knows."""

    phase: str
    percent: float | None
    elapsed_s: float
    expected_s: float | None


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class BuildFacts:
    """What a build was. `on_gpu`: layers that the DLA did not take; `notes`: what was not as wanted, in words."""

    here: Here
    plan_bytes: int
    peak_bytes: int | None
    build_s: float
    layers: int
    on_gpu: tuple[str, ...]
    notes: tuple[str, ...]
    took_s: float


def look_at_device(*, cancel: threading.Event | None = None, within_s: float = LOOK_WITHIN_S) -> Here:
    """What this device is to TensorRT, without a GPU of its own being opened in this process.

    Raises EngineError: see gpu.open_gpu.
    """
    order = {"task": "look", "nice": 0, "parent": os.getpid()}
    return _here(_run(order, "this device", within_s, cancel, None))


def build_plan(
    bundle: Bundle,
    variant: str,
    settings: Settings,
    *,
    max_batch: int,
    plan: Path,
    cache: Path,
    on_progress: OnProgress | None = None,
    expected_s: float | None = None,
    cancel: threading.Event | None = None,
    within_s: float = WITHIN_S,
    nice: int = 10,
) -> BuildFacts:
    """Build a variant's plan in a child process; blocks until that is done. The plan's file and its sidecar are on disk
    then, and have been read back by TensorRT; nobody has run it yet.

    `plan` is a file in an empty folder, `cache` the timing cache's. `max_batch`: what was asked for, for the sidecar.
    `cancel`, once set, ends the build within a second. When this returns or raises, the child is gone.

    Raises what network.Network.build and load_bundle raise, and (`where`: the ONNX file): RefusedError "build_crashed",
    "build_hangs", "build_memory"; EngineError "build_failed", "cancelled", "store_write_failed".
    """
    where = str(bundle.artefact(variant, "tensorrt").path)
    started = time.monotonic()
    order = {
        "task": "build",
        "root": str(bundle.root.resolve()),
        "digest": bundle.digest,
        "variant": variant,
        "batches": list(settings.batches),
        "best": settings.best,
        "max_batch": max_batch,
        "workspace_bytes": settings.workspace_bytes,
        "dram_bytes": settings.dram_bytes,
        "dla_core": settings.dla_core,
        "level": settings.level,
        "cache": str(cache.resolve()),
        "plan": str(plan.resolve()),
        "nice": nice,
        "parent": os.getpid(),
    }

    def hear(stage: str, line: Mapping[str, Any]) -> None:
        if on_progress is None:
            return
        phase = _WORDS.get(stage, stage)
        percent = line.get("percent")
        if stage == "building" and isinstance(line.get("phase"), str):
            phase = f"{phase}: {line['phase'][:60]}"
        on_progress(
            Progress(
                phase,
                float(percent) if isinstance(percent, (int, float)) else None,
                time.monotonic() - started,
                expected_s,
            )
        )

    facts = _run(order, where, within_s, cancel, hear)
    try:
        return BuildFacts(
            here=_here(facts),
            plan_bytes=int(facts["plan_bytes"]),
            peak_bytes=None if facts["peak_bytes"] is None else int(facts["peak_bytes"]),
            build_s=float(facts["build_s"]),
            layers=int(facts["layers"]),
            on_gpu=tuple(map(str, facts["on_gpu"])),
            notes=tuple(map(str, facts["notes"])),
            took_s=time.monotonic() - started,
        )
    except _UNREADABLE as error:
        raise _failed(where, f"its last line cannot be read: {error!r}") from None


def _here(facts: Mapping[str, Any]) -> Here:
    try:
        here = Here(**facts["here"])
        if not all(isinstance(value, str) or (name == "l4t" and value is None) for name, value in asdict(here).items()):
            raise TypeError(here)
    except _UNREADABLE as error:
        raise _failed("this device", f"its last line cannot be read: {error!r}") from None
    return here


def _run(
    order: Mapping[str, object],
    where: str,
    within_s: float,
    cancel: threading.Event | None,
    hear: Callable[[str, Mapping[str, Any]], None] | None,
) -> dict[str, Any]:
    """The facts of the child's last line. Raises what it says, and what `build_plan` says."""
    try:
        process = start_child(MODULE, order)
    except OSError as error:
        raise _failed(where, f"no process can be started: {error}", retryable=True) from error
    child = _Child(process, where, within_s, hear)
    try:
        return child.until_done(cancel)
    finally:
        kill_child(process, "built a plan")
        child.close()


class _Child:
    """Reads what the child says, and keeps to its time."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        where: str,
        within_s: float,
        hear: Callable[[str, Mapping[str, Any]], None] | None,
    ) -> None:
        self._output = ChildOutput(process)
        self._where = where
        self._within_s, self._end = within_s, time.monotonic() + within_s
        self._hear = hear
        self._stage = "starting"

    def until_done(self, cancel: threading.Event | None) -> dict[str, Any]:
        """What its last line says. Raises EdgeError."""
        while True:
            if cancel is not None and cancel.is_set():
                raise EngineError(
                    f"the build was cancelled while {self._doing}", code="cancelled", where=self._where, retryable=True
                )
            if time.monotonic() >= self._end:
                raise RefusedError(
                    f"the build did not come to an end within {self._within_s:.0f} s, and was {self._doing}",
                    code="build_hangs",
                    where=self._where,
                    remedy="use a smaller variant, or see whether something else takes all of this device",
                    retryable=True,
                )
            try:
                lines = self._output.read(_TICK_S)
            except ValueError as error:
                raise _failed(self._where, str(error)) from None
            if lines is None:
                raise self._ended()
            for raw in lines:
                if (facts := self._take(raw)) is not None:
                    return facts

    @property
    def _doing(self) -> str:
        return _WORDS.get(self._stage, self._stage)

    def _take(self, raw: bytes) -> dict[str, Any] | None:
        try:
            line = json.loads(raw)
            stage = str(line["stage"])
            error = _error_of(line) if "error" in line else None
            if error is None and stage != "done" and self._hear is not None:
                self._hear(stage, line)
        except _UNREADABLE:
            raise _failed(self._where, f"its process wrote {raw[:80]!r}") from None
        if error is not None:
            raise error
        if stage == "done":
            return dict(line)
        self._stage = stage
        return None

    def _ended(self) -> EdgeError:
        """Why the child ended without a last line."""
        code = self._output.exit_code()
        if code is None:
            return _failed(self._where, "it closed its standard output and went on")
        last = f"; it said: {said}" if (said := self._output.last_words) else ""
        if -code == signal.SIGKILL:
            return RefusedError(
                f"the build was killed while {self._doing}, and not by us: the kernel does so where memory runs out",
                code="build_memory",
                where=self._where,
                remedy=FREE_MEMORY,
                retryable=True,
            )
        how = f"{signal_name(code)} ended its process" if code < 0 else f"its process ended with {code}"
        if -code in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            return _failed(self._where, f"{how} from outside while {self._doing}", retryable=True)
        if self._stage in _BEFORE_THE_MODEL:
            return _failed(self._where, f"{how} while {self._doing}{last}", retryable=True)
        return RefusedError(
            f"the build crashed: {how} while {self._doing}{last}",
            code="build_crashed",
            where=self._where,
            remedy="export the model again, or with other operators; the log has what the process wrote",
        )

    def close(self) -> None:
        """Close the pipes, and log what the child wrote to standard error: its last 2 KB."""
        if text := self._output.close():
            log.info("%s: the process that built it wrote: %s", self._where, text)


def _error_of(line: Mapping[str, Any]) -> EdgeError:
    """The error that a process tells of. Raises one of _UNREADABLE."""
    error = _KINDS.get(line["kind"], EngineError)(**line["error"])
    if not isinstance(error.message, str) or not isinstance(error.code, str):
        raise TypeError(line["error"])
    return error


def _failed(where: str, reason: str, *, retryable: bool = False) -> EngineError:
    return EngineError(
        f"the plan could not be built: {reason}",
        code="build_failed",
        where=where,
        remedy="the log has what the build's process wrote",
        retryable=retryable,
    )
