"""Proof of a model in a process of its own, before it comes near the cameras that run.

A model can hang, crash or eat the memory of whoever loads it. So a child does it first (`app.proof_child`), and all
that its end can do to this process is to be reported. The child says on a pipe which stage it is in; here each stage
has its time, the child's memory is watched, and whatever happens, the child is gone when `prove` returns.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_runtime.children import ChildOutput, kill_child, signal_name, start_child
from edge_runtime.engine.bundle import Bundle
from edge_runtime.engine.manifest import Backend
from edge_runtime.errors import BundleError, CameraError, EdgeError, EngineError, RefusedError
from edge_runtime.hardware.memory import resident_bytes

log = logging.getLogger(__name__)

_TICK_S = 0.05
"""How often a child's memory and a wish to cancel are looked at."""
_WAITED_TIMES = 5
_RUNS = ("running", "golden", "timing", "closing")
"""Stages in which every line of the child stands for one run."""
_BEFORE_THE_MODEL = ("starting", "verifying")
_ENDED_BY_OTHERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_KINDS: Mapping[str, type[EdgeError]] = {
    kind.__name__: kind for kind in (BundleError, CameraError, EngineError, RefusedError)
}
_KEPT = "the engine before it stays in use"


@dataclass(frozen=True, slots=True)
class Proof:
    """What is known of a model that was proved.

    `engine`: its digest. `batches`: the only batch sizes it runs, None for any. `memory_bytes`: what the process grew
    by with the engine loaded and all lanes run at once; `peak_bytes`: the most it grew by until then. `golden`: what
    the golden check said. `load_s`: loading and warming up. `took_s`: the whole proof.

    `inference_ms` and `slowest_ms` are the median and the longest of single runs on one lane, at low priority beside
    whatever else ran. `cpu_ms` is the median CPU time of these runs, which other load distorts little: slowness is
    judged by it. With TensorRT it is the shortest time of a run: the processors only wait for the GPU.
    """

    engine: str
    variant: str
    load_s: float
    inference_ms: float
    slowest_ms: float
    cpu_ms: float
    batches: tuple[int, ...] | None
    memory_bytes: int
    peak_bytes: int
    golden: str
    took_s: float


def prove(
    bundle: Bundle,
    variant: str,
    *,
    backend: Backend = "onnxruntime",
    plan: Path | None = None,
    sessions: Path | None = None,
    lanes: int,
    places: int,
    within_s: float = 120.0,
    run_within_s: float = 10.0,
    memory_bytes: int | None = None,
    cancel: threading.Event | None = None,
    nice: int = 10,
) -> Proof:
    """Load, check, run and time a variant in a child process of low priority; blocks until that is done.

    The child reads and verifies the bundle again from its folder. `plan`: the file of its plan, where the backend is
    TensorRT. `sessions`: the folder of models as ONNX Runtime has optimised them, which this one is put into. `lanes`
    run batches of `places` at once. The whole proof has `within_s` seconds, each run `run_within_s` (five times that
    where other load leaves it little CPU time); the child may grow by `memory_bytes`; `cancel`, once set, ends the
    proof within 0.5 s. When this returns or raises, the child and its pipes are gone.

    Raises what load_bundle, load_engine and probe raise, and (`where`: the bundle):
        RefusedError: "model_crashed", "model_hangs", "model_memory" or "non_finite": the model is to blame. It is
            retryable where the device may be: others took the memory or the processors.
        EngineError: "proof_failed": it could not be carried out; "cancelled".
    """
    started = time.monotonic()
    name = bundle.variant(variant, backend).name
    order = {
        "root": str(bundle.root.resolve()),
        "digest": bundle.digest,
        "variant": name,
        "backend": backend,
        "plan": None if plan is None else str(plan.resolve()),
        "sessions": None if sessions is None else str(sessions.resolve()),
        "lanes": lanes,
        "places": places,
        "nice": nice,
        "parent": os.getpid(),
    }
    process = _start(order, str(bundle.root))
    watch = _Watch(process, str(bundle.root), within_s, run_within_s, memory_bytes, cancel)
    try:
        measured = watch.until_done()
    finally:
        kill_child(process, "proved a model")
        watch.close()
    try:
        batches = None if (sizes := measured.pop("batches")) is None else tuple(sizes)
        proof = Proof(**measured, batches=batches, took_s=time.monotonic() - started)
    except (KeyError, TypeError) as error:
        raise watch.failed(f"its last line cannot be read: {error!r}") from None
    if memory_bytes is not None and proof.peak_bytes > memory_bytes:
        raise watch.too_large(proof.peak_bytes)  # a peak between two looks
    log.info("%s %s proved in %.1f s: %s", bundle.name, proof.variant, proof.took_s, proof.golden)
    return proof


def _start(order: Mapping[str, object], where: str) -> subprocess.Popen[bytes]:
    """The child; it dies with the thread that starts it, which waits for it in `prove`."""
    try:
        return start_child("edge_runtime.app.proof_child", order)
    except OSError as error:
        raise EngineError(
            f"the model cannot be proved: no process can be started: {error}",
            code="proof_failed",
            where=where,
            remedy=f"see to memory and limits of this device; {_KEPT}",
            retryable=True,
        ) from error


def _cpu_s(pid: int) -> float:
    """CPU time of a process in seconds; 0 where it has ended. As clock_getcpuclockid(3), which Python lacks."""
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0


class _Watch:
    """Reads what the child says and keeps to the limits; `where` names the bundle in messages."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        where: str,
        within_s: float,
        run_within_s: float,
        memory_bytes: int | None,
        cancel: threading.Event | None,
    ) -> None:
        self._process = process
        self._output = ChildOutput(process)
        self._where = where
        self._since, self._since_cpu_s = time.monotonic(), 0.0
        self._within_s, self._end = within_s, self._since + within_s
        self._run_within_s = run_within_s
        self._memory_bytes = memory_bytes
        self._cancel = cancel
        self._stage = "starting"
        self._picture: str | None = None
        self._before_bytes: int | None = None

    def until_done(self) -> dict[str, Any]:
        """What the child measured. Raises what it raised, and what `prove` says."""
        ticking = self._memory_bytes is not None or self._cancel is not None
        while True:
            left_s = self._check()
            try:
                lines = self._output.read(min(left_s, _TICK_S) if ticking else left_s)
            except ValueError as error:
                raise self.failed(str(error)) from None
            if lines is None:
                raise self._ended()
            for raw in lines:
                if (measured := self._hear(raw)) is not None:
                    return measured

    def _check(self) -> float:
        """Seconds until the nearest limit. Raises where one is passed, or `cancel` is set."""
        if self._cancel is not None and self._cancel.is_set():
            message = f"its proof was cancelled {self._doing()}"
            raise EngineError(message, code="cancelled", where=self._where, retryable=True)
        if self._memory_bytes is not None and self._before_bytes is not None:
            now_bytes = resident_bytes(self._process.pid)
            if now_bytes is not None and now_bytes - self._before_bytes > self._memory_bytes:
                raise self.too_large(now_bytes - self._before_bytes)
        now = time.monotonic()
        left_s = self._end - now
        if self._stage in _RUNS:
            left_s = min(left_s, self._run_left_s(now))
        if left_s <= 0:
            raise self._late(now)
        return left_s

    def _run_left_s(self, now: float) -> float:
        """Of the run. One that has had little of the processors may have waited for others, and has longer."""
        left_s = self._since + self._run_within_s - now
        if left_s > 0 or _cpu_s(self._process.pid) - self._since_cpu_s >= self._run_within_s / 2:
            return left_s
        return min(_TICK_S, left_s + (_WAITED_TIMES - 1) * self._run_within_s)

    def _hear(self, raw: bytes) -> dict[str, Any] | None:
        """Take in a line; of the last one, returns what was measured or raises the error that it tells of."""
        try:
            facts = json.loads(raw)
            self._stage, self._picture = str(facts["stage"]), facts.get("picture")
            if self._stage == "loading":
                self._before_bytes = int(facts["resident_bytes"] or 0)
            measured = dict(facts["proof"]) if self._stage == "done" else None
            error = _KINDS.get(facts["kind"], EngineError)(**facts["error"]) if "error" in facts else None
        except (ValueError, TypeError, KeyError, AttributeError):
            raise self.failed(f"its process wrote {raw[:80]!r}") from None
        self._since, self._since_cpu_s = time.monotonic(), _cpu_s(self._process.pid)
        log.debug("%s: %s %s", self._where, self._stage, self._picture or "")
        if error is not None:
            raise error
        return measured

    def _doing(self) -> str:
        words = {
            "starting": "while its process started",
            "verifying": "while its files were verified",
            "loading": "while it was loaded",
            "closing": "while it was closed",
        }
        return words.get(self._stage, f"while it ran {self._picture or 'golden pictures'} ({self._stage})")

    def _late(self, now: float) -> EdgeError:
        alone = self._stage in _RUNS and now < self._end
        limit = f"{self._run_within_s:g} s for one run" if alone else f"{self._within_s:g} s for all of it"
        took_s, cpu_s = now - self._since, _cpu_s(self._process.pid) - self._since_cpu_s
        what = f"did not come to an end {self._doing()}: {took_s:.1f} s ({cpu_s:.1f} s of CPU), and it had {limit}"
        if self._stage in _BEFORE_THE_MODEL:
            return self.failed(what, retryable=True)
        remedy = "export it again without endless loops, or use a smaller variant"
        # with little CPU time it may only have had to wait for others
        return self._refused("model_hangs", what, remedy, retryable=cpu_s < took_s / 2)

    def too_large(self, grown_bytes: int) -> RefusedError:
        """The refusal of a model that took `grown_bytes`."""
        assert self._memory_bytes is not None
        took, free = grown_bytes / 2**20, self._memory_bytes / 2**20
        what = f"took {took:.0f} MiB {self._doing()}, and {free:.0f} MiB are free for it"
        return self._refused("model_memory", what, "use a smaller variant, fewer lanes or a smaller batch")

    def _ended(self) -> EdgeError:
        """Why the child ended without a last line."""
        code = self._output.exit_code()
        if code is None:
            return self.failed("it closed its standard output and went on")
        last = f"; it said: {said}" if (said := self._output.last_words) else ""
        name = signal_name(code)
        if -code in _ENDED_BY_OTHERS:
            return self.failed(f"{name} ended it from outside {self._doing()}", retryable=True)
        how = f"{f'{name} ended its process' if code < 0 else f'its process ended with {code}'} {self._doing()}{last}"
        if self._stage in _BEFORE_THE_MODEL:
            return self.failed(how, retryable=True)
        if -code == signal.SIGKILL:
            what = f"was killed {self._doing()}, and not by us: the kernel does so where memory runs out"
            return self._refused("model_memory", what, "use a smaller variant, or close other engines", retryable=True)
        return self._refused("model_crashed", f"crashed: {how}", "export it again, or with other operators")

    def _refused(self, code: str, what: str, remedy: str, *, retryable: bool = False) -> RefusedError:
        remedy = f"{_KEPT}; {remedy}"
        return RefusedError(f"the model {what}", code=code, where=self._where, remedy=remedy, retryable=retryable)

    def failed(self, reason: str, *, retryable: bool = False) -> EngineError:
        """The proof was not carried out, which says nothing about the model."""
        return EngineError(
            f"the model could not be proved: {reason}",
            code="proof_failed",
            where=self._where,
            remedy=f"{_KEPT}; the log has what the proof's process wrote",
            retryable=retryable,
        )

    def close(self) -> None:
        """Close the pipes, and log what the child wrote to standard error: its last 2 KB."""
        if text := self._output.close():
            log.warning("%s: the process that proved it wrote: %s", self._where, text)
