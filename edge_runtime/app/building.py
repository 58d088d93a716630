"""Plans for this device: found in the store, or built, proved and only then kept; in the daemon by a thread of its own.

A build is a child process (engine.tensorrt.build), and so is the proof of what it made (app.proof): the golden
pictures run through TensorRT before a plan counts.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

from edge_runtime.app.brought import brought_plans
from edge_runtime.app.proof import Proof
from edge_runtime.engine.bundle import Bundle
from edge_runtime.engine.manifest import Backend
from edge_runtime.engine.signing import PlanKeys
from edge_runtime.engine.tensorrt.build import BuildFacts, OnProgress, build_plan
from edge_runtime.engine.tensorrt.network import Settings
from edge_runtime.engine.tensorrt.onnxfile import read_onnx
from edge_runtime.engine.tensorrt.plan import PlanKey
from edge_runtime.engine.tensorrt.plans import PLAN, Lookup, Plan, PlanStore
from edge_runtime.engine.tensorrt.preflight import (
    RESERVE_BYTES,
    batches_of,
    check_dla,
    check_file,
    check_memory,
    estimate,
)
from edge_runtime.engine.tensorrt.probe import Here
from edge_runtime.errors import EdgeError, EngineError
from edge_runtime.threads import ThreadGroup

log = logging.getLogger(__name__)

PLANS = "plans"
"""The folder of the plan store, in the daemon's store."""
AUTO_BATCH = 8
"""What a plan is built for at most where `max_batch` is "auto": how many of these pay is measured at warm-up."""
_DISK_TIMES = 2
"""A plan is at most about so many times its ONNX file."""
_RUN_WITHIN_S = 30.0
_EXPECTED = ("plan_keys_missing", "plan_elsewhere")
"""Why a plan of a bundle is not used, where nothing is wrong: nobody asked for such plans, or it is another's."""


@dataclass(frozen=True, slots=True)
class Need:
    """A plan that is wanted: for batches of 1 to `max_batch`. `dla_core` None: for the GPU."""

    bundle: Bundle
    variant: str
    max_batch: int = AUTO_BATCH
    dla_core: int | None = None

    def key(self, here: Here, *, on_any: bool = False) -> PlanKey:
        """What the plan depends on. `on_any`: one for a DLA will do as well as one for the GPU."""
        spec = self.bundle.input_spec(self.variant)
        most = self.max_batch
        return PlanKey(
            onnx_sha256=self.onnx_sha256,
            variant=self.variant,
            size=(spec.width, spec.height),
            batches=tuple(range(1, most + 1)) if self.dla_core is None and not on_any else (most,),
            here=here,
            options={} if on_any else {"dla_core": self.dla_core},
        )

    @property
    def onnx_sha256(self) -> str:
        """Of the file that it is built from."""
        return self.bundle.artefact(self.variant, "tensorrt").sha256

    @property
    def told(self) -> str:
        """For messages: "centernet fp16-512"."""
        return f"{self.bundle.name} {self.variant}"


@dataclass(frozen=True, slots=True)
class Made:
    """A plan in the store, and how it came there. `facts` and `proof`: of one that was built."""

    plan: Plan
    how: Literal["built", "there", "brought"]
    facts: BuildFacts | None = None
    proof: Proof | None = None


class Prove(Protocol):
    """Runs a variant in a process of its own; see app.proof.prove."""

    def __call__(
        self,
        bundle: Bundle,
        variant: str,
        *,
        backend: Backend,
        plan: Path,
        lanes: int,
        places: int,
        run_within_s: float,
        cancel: threading.Event | None,
        nice: int,
    ) -> Proof: ...


class PlanMaker:
    """Finds plans in a store, and has those built that are not there. Any thread; one build at a time.

    `free_bytes`: memory that is free now, None where nobody knows. `nice`: of the processes that build and prove.
    `plan_keys`: public keys of those whose plans are taken from a bundle. Raises UsageError for what is none.
    """

    def __init__(
        self,
        store: PlanStore,
        *,
        prove: Prove,
        free_bytes: Callable[[], int | None],
        nice: int = 10,
        plan_keys: Sequence[str] = (),
    ) -> None:
        self.store = store
        self._keys = PlanKeys(plan_keys)
        self._told: set[str] = set()
        self._prove = prove
        self._free_bytes = free_bytes
        self._nice = nice

    def find(self, need: Need, here: Here) -> Lookup:
        """What the store has for it, built for whatever core somebody chose. Raises EdgeError."""
        return self.store.find(need.key(here, on_any=True))

    def check(self, need: Need) -> None:
        """Refuse what cannot be built anywhere, before anything is begun. Raises RefusedError, BundleError."""
        artefact = need.bundle.artefact(need.variant, "tensorrt")
        file = read_onnx(need.bundle.read_artefact(need.variant, "tensorrt"), str(artefact.path))
        check_file(file, need.bundle.input_spec(need.variant), str(artefact.path))

    def make(
        self,
        need: Need,
        here: Here,
        *,
        workspace_bytes: int | None = None,
        trust_plans: bool = False,
        on_progress: OnProgress | None = None,
        cancel: threading.Event | None = None,
        wait: bool = False,
    ) -> Made:
        """The plan: that of the store, or one that came with the bundle, or one that is built now.

        One that came is taken where a key of `plan_keys` has signed it for just this device, or with `trust_plans`.
        `here`: what this device is. `workspace_bytes`: the cap of an engine's scratch memory. `cancel` ends it. `wait`
        for another build that is under way.

        Raises RefusedError where it cannot be built or does not compute what the bundle promises, EngineError where it
        was not carried out, EdgeError for the store. Nothing half-made is left.
        """
        self.check(need)
        where = str(need.bundle.artefact(need.variant, "tensorrt").path)
        with self.store.building(cancel, wait=wait):
            found = self.store.find(need.key(here))
            if found.plan is not None and found.fits:
                self.store.touch(found.plan)
                return Made(found.plan, "there")
            brought = self._bring(need, here, None if trust_plans else self._keys, cancel)
            if brought is not None:
                return brought
            return self._build(need, here, where, workspace_bytes, on_progress, cancel)

    def _build(
        self,
        need: Need,
        here: Here,
        where: str,
        workspace_bytes: int | None,
        on_progress: OnProgress | None,
        cancel: threading.Event | None,
    ) -> Made:
        key, spec = need.key(here), need.bundle.input_spec(need.variant)
        onnx = need.bundle.read_artefact(need.variant, "tensorrt")
        file = read_onnx(onnx, where)
        if need.dla_core is not None:
            check_dla(file, need.bundle.variant(need.variant).precision, here.tensorrt, where)
        expected_s, peak_bytes = self.store.last_build(need.onnx_sha256, (spec.width, spec.height))
        available = self._free_bytes()
        wanted = estimate(len(onnx), available, workspace_bytes=workspace_bytes, peak_bytes=peak_bytes)
        check_memory(wanted, available, where)
        self.store.check_space(_DISK_TIMES * len(onnx))
        batches = batches_of(file, need.max_batch, need.dla_core)
        del onnx
        settings = Settings(
            batches=batches,
            best=batches[0] if need.max_batch == AUTO_BATCH else batches[-1],
            workspace_bytes=wanted.workspace_bytes,
            dram_bytes=None if available is None else max(available - RESERVE_BYTES, wanted.workspace_bytes),
            dla_core=need.dla_core,
        )
        told = "how long it takes is not known" if expected_s is None else f"the last time it took {expected_s:.0f} s"
        log.info("%s: the plan for this device is built (%s); %s", need.told, wanted.told, told)
        with self.store.aside() as folder:
            facts = build_plan(
                need.bundle,
                need.variant,
                settings,
                max_batch=need.max_batch,
                plan=folder / PLAN,
                cache=self.store.timing_cache(here),
                on_progress=on_progress,
                expected_s=expected_s,
                cancel=cancel,
                nice=self._nice,
            )
            if facts.here != here:
                message = f"the device changed while it was built: {here} became {facts.here}"
                raise EngineError(message, code="plan_mismatch", where=where, remedy="try again", retryable=True)
            proof = self._proved(need, cancel, folder / PLAN)
            plan = self.store.place(folder, key)
        for note in facts.notes:
            log.warning("%s: %s", need.told, note)
        log.info(
            "%s: plan built in %.1f s (%.1f MB, %d layers), and right: %s",
            need.told,
            facts.build_s,
            facts.plan_bytes / 1e6,
            facts.layers,
            proof.golden,
        )
        return Made(plan, "built", facts, proof)

    def _bring(self, need: Need, here: Here, keys: PlanKeys | None, cancel: threading.Event | None) -> Made | None:
        """A plan that came with the bundle, if one fits this device exactly, is vouched for and is right."""
        key = need.key(here)
        for each in brought_plans(need.bundle, need.variant, here, keys, partial(self._not_used, need)):
            try:
                placed = self.store.put(each.plan, each.sidecar, key, partial(self._proved, need, cancel))
            except EdgeError as error:
                if error.code == "cancelled":
                    raise
                self._not_used(need, error)
                continue
            who = "from a bundle that is trusted" if each.key is None else f"signed with the key {each.key}"
            log.info("%s: the plan of the bundle is used, %s, and is right", need.told, who)
            return Made(placed, "brought")
        return None

    def _not_used(self, need: Need, error: EdgeError) -> None:
        """Say so, once for each reason, however often somebody asks for the plan."""
        text = f"{need.told}: a plan of the bundle is not used, one is built: {error}"
        if text not in self._told:
            self._told.add(text)
            log.log(logging.INFO if error.code in _EXPECTED else logging.WARNING, "%s", text)

    def _proved(self, need: Need, cancel: threading.Event | None, plan: Path) -> Proof:
        return self._prove(
            need.bundle,
            need.variant,
            backend="tensorrt",
            plan=plan,
            lanes=1,
            places=1,
            run_within_s=_RUN_WITHIN_S,
            cancel=cancel,
            nice=self._nice,
        )


@dataclass(slots=True)
class _Task:
    model: str
    need: Need
    cancel: threading.Event


class Builder:
    """The thread "builder" of a daemon: builds what models want, one plan at a time, while something else runs them.

    `made(model)`: all that a model wanted is there. `failed(model, error)`: it is not, and is not tried again before
    the model wants something anew. Both on the thread.
    """

    def __init__(
        self,
        maker: PlanMaker,
        here: Callable[[], Here],
        *,
        made: Callable[[str], None],
        failed: Callable[[str, EdgeError], None],
        on_death: Callable[[str, BaseException], None] | None = None,
    ) -> None:
        self._maker = maker
        self._here = here
        self._made = made
        self._failed = failed
        self._threads = ThreadGroup(on_death)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._wanted: dict[str, tuple[Need, ...]] = {}
        self._task: _Task | None = None
        self._stopping = False

    def start(self) -> None:
        """Begin with what is wanted by now."""
        self._threads.spawn("builder", self._run)

    def stop(self, deadline_s: float) -> list[str]:
        """End the build under way, and the thread; its name where it did not end in time."""
        with self._changed:
            self._stopping = True
            if self._task is not None:
                self._task.cancel.set()
            self._changed.notify()
        return self._threads.join(deadline_s)

    def want(self, model: str, needs: Sequence[Need]) -> None:
        """From now on this model wants these, and nothing else; what was built for it alone is ended."""
        with self._changed:
            if needs:
                self._wanted[model] = tuple(needs)
            else:
                self._wanted.pop(model, None)
            task = self._task
            if task is not None and not any(task.need in each for each in self._wanted.values()):
                task.cancel.set()
            self._changed.notify()

    @property
    def building(self) -> str | None:
        """What is built now, in words, for the governor. Any thread."""
        task = self._task
        return None if task is None else f"an engine for this device is being built ({task.need.told})"

    # --- on the thread

    def _run(self) -> None:
        while (task := self._take()) is not None:
            error: EdgeError | None = None
            try:
                self._maker.make(task.need, self._here(), cancel=task.cancel, wait=True)
            except EdgeError as found:
                error = found.with_traceback(None)
            self._end(task, error)

    def _take(self) -> _Task | None:
        with self._changed:
            while True:
                if self._stopping:
                    return None
                for model, needs in self._wanted.items():
                    self._task = _Task(model, needs[0], threading.Event())
                    return self._task
                self._changed.wait()

    def _end(self, task: _Task, error: EdgeError | None) -> None:
        done: list[str] = []
        with self._changed:
            self._task = None
            if self._stopping or (error is not None and task.cancel.is_set()):
                return
            for model, needs in list(self._wanted.items()):
                if task.need not in needs:
                    continue
                left = tuple(each for each in needs if each != task.need)
                if error is not None or not left:
                    del self._wanted[model]
                    done.append(model)
                else:
                    self._wanted[model] = left
        for model in done:
            if error is None:
                self._made(model)
            else:
                self._failed(model, error)


def with_core_of(need: Need, lookup: Lookup) -> Need:
    """The same, on the DLA and for the batch that the plan before it was built for, if it was for one."""
    before = lookup.nearest
    if before is None or before.dla_core is None:
        return need
    return replace(need, dla_core=before.dla_core, max_batch=before.batches[-1])
