"""A model's engine exchanged under running cameras: proved, loaded, checked, exchanged, watched; or left as it was.

Whatever fails before the exchange has touched nothing that runs. What fails after it is exchanged back.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from edge_runtime.app.building import AUTO_BATCH
from edge_runtime.app.engines import ON_CPU, Choice, Engines
from edge_runtime.app.models import Load, Wrap, ladder_of, load_variant, run_cpu_s
from edge_runtime.app.proof import Proof
from edge_runtime.app.watch import watch
from edge_runtime.config import ModelConfig
from edge_runtime.engine.bundle import Bundle
from edge_runtime.engine.manifest import Backend
from edge_runtime.engine.probe import ReadImage, probe
from edge_runtime.engine.slot import Resident
from edge_runtime.engine.tensorrt.pictures import expected_bytes
from edge_runtime.errors import EdgeError, EngineError, RefusedError
from edge_runtime.pipeline.pipeline import ModelPipe, Pipeline

log = logging.getLogger(__name__)

MiB = 1024 * 1024
RESERVE_BYTES = 48 * MiB
"""Left free for everything else on this device, at the peak of a load."""
PROOF_BYTES = 96 * MiB
"""What a proof takes besides the model: interpreter and libraries, beside those that run already."""
CLOSE_S = 15.0
"""How long the batches in hand of an old engine may take; after that it is closed by whoever brings them back."""
_CLOSE_LOOK_S = 0.1
_FILE_TIMES = 2
"""An engine takes at least so many times its file while it is loaded."""
KNOWN = 16
"""Proofs of engines that ran, kept for the way back."""
SLOWER = 1.2
"""A model that cannot keep up is refused where it is slower than the one before by more than noise."""


class Prove(Protocol):
    """Runs a variant in a process of its own; see app.proof.prove."""

    def __call__(
        self,
        bundle: Bundle,
        variant: str,
        *,
        backend: Backend,
        plan: Path | None,
        lanes: int,
        places: int,
        run_within_s: float,
        memory_bytes: int | None,
        cancel: threading.Event,
    ) -> Proof: ...


@dataclass(frozen=True, slots=True)
class Wish:
    """What a model is to run, and by what. `allow_pause`, `allow_slow`: see records.commands.ReloadArgs."""

    bundle: Bundle
    variant: str = "auto"
    allow_pause: bool = False
    allow_slow: bool = False
    choice: Choice = ON_CPU

    @property
    def backend(self) -> Backend:
        """By what it is to run."""
        return self.choice.backend


@dataclass(slots=True)
class Swapped:
    """What an exchange cost. `previous` is the engine before, None where the model was down."""

    resident: Resident
    previous: str | None
    proof: Proof | None = None
    exchange_ns: int | None = None
    pause_ns: int | None = None
    watched: int = 0
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Target:
    """The model whose engine is to change. `restore` loads what runs now again, after a pause that brought nothing."""

    config: ModelConfig
    pipe: ModelPipe
    lanes: int
    streams: int
    restore: Callable[[], Sequence[Resident]]


class Swapper:
    """Exchanges engines, on one thread at a time (the loader's). `cancel` ends every wait: the daemon stops.

    `engines` loads them, by either backend. `wrap`: what is made of every engine before it runs frames; its golden
    pictures run on that, too: they have to be right on the very lanes that take over, and time does not matter to them.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        prove: Prove,
        free_bytes: Callable[[], int | None],
        read_image: ReadImage,
        cancel: threading.Event,
        wrap: Wrap | None = None,
        engines: Engines | None = None,
    ) -> None:
        self.wrap = wrap
        self.engines = engines or Engines()
        self._ledger = pipeline.ledger
        self._known: dict[tuple[str, str | None, int, int], Proof] = {}
        self._prove = prove
        self._free_bytes = free_bytes
        self._read_image = read_image
        self._cancel = cancel

    def swap(self, target: Target, wish: Wish) -> Swapped:
        """Let the model run what is wished for. Raises EdgeError where it does not, and then it runs what it ran.

        RefusedError where the new model was judged: `model_crashed`, `model_hangs`, `non_finite`, `golden_mismatch`,
        `too_slow`, `memory`, `rolled_back` and others; BundleError where it cannot be loaded at all.
        """
        desk = target.pipe.desk
        variants = ladder_of(wish.bundle, target.config, wish.variant, wish.backend)
        before = desk.ladder()
        swapped_from = before[0].info.digest if before else None
        pause: _Pause | None = None
        proofs: list[Proof] = []
        try:
            while True:
                try:
                    self._require(_least_bytes(wish.bundle, variants[0], wish.backend))
                    proofs = proofs or self._proofs(target, wish, variants, before)
                    pictures = _picture_bytes(target.config, wish.backend, len(proofs), target.lanes, target.streams)
                    self._require(_need_bytes(proofs) + pictures)
                    break
                except RefusedError as lack:
                    if pause is not None or not self._may_pause(target, wish, lack):
                        raise
                    pause = self._pause(target, lack)
            fresh = self.load(target.config, wish.bundle, variants, target.lanes, target.streams, wish.backend)
        except BaseException:
            if pause is not None:
                self._resume(target)
            raise
        done = Swapped(fresh[0], swapped_from, proofs[0])
        run_s = proofs[0].inference_ms / 1e3
        done.exchange_ns = desk.exchange(fresh[0], others=[*fresh[1:], *(() if pause else before)])
        if pause is not None:
            done.pause_ns = time.monotonic_ns() - pause.started_ns
        try:
            seen = watch(fresh[0], self._cancel, run_s=run_s, timeout_s=target.config.timeout_s)
        except BaseException:
            self._back(target, fresh, before, pause)
            raise
        done.watched = seen.frames
        done.notes += [seen.note] if seen.note is not None else []
        desk.exchange(fresh[0], others=fresh[1:])
        self._await_closed([] if pause else before)
        self._remember(target, wish, proofs)
        return done

    def forget(self) -> None:
        """Prove again whatever comes, also what was proved and ran before."""
        self._known.clear()

    def switch(self, target: Target, resident: Resident, keep: Sequence[Resident]) -> Swapped:
        """Make a resident of the ladder current, and `keep` others of it; the rest is closed."""
        desk = target.pipe.desk
        ladder = desk.ladder()
        done = Swapped(resident, ladder[0].info.digest)
        others = [each for each in keep if each is not resident]
        if (resident, *others) == ladder:
            return done
        held_ns = desk.exchange(resident, others=others)
        if resident is not ladder[0]:
            done.exchange_ns = held_ns
        self._await_closed([each for each in ladder if each is not resident and each not in others])
        return done

    def load_proved(self, config: ModelConfig, wish: Wish, *, lanes: int, streams: int) -> list[Resident]:
        """A ladder for a model that runs nothing yet. Raises as `swap` does."""
        variants = ladder_of(wish.bundle, config, wish.variant, wish.backend)
        pictures = _picture_bytes(config, wish.backend, len(variants), lanes, streams)
        self._require(_need_bytes([self._prove_one(config, wish, each, lanes) for each in variants]) + pictures)
        return self.load(config, wish.bundle, variants, lanes, streams, wish.backend)

    def loader(self, config: ModelConfig, backend: Backend) -> Load:
        """By what a model's engines are loaded."""
        return lambda bundle, variant: self.engines.load(config, bundle, variant, backend)

    def load_beside(self, config: ModelConfig, wish: Wish, *, lanes: int, streams: int) -> Resident:
        """One more for a ladder, checked since it may be switched to at any time. Raises as `swap` does."""
        self._require(_FILE_TIMES * wish.bundle.artefact(wish.variant, wish.backend).path.stat().st_size)
        (resident,) = self.load(config, wish.bundle, [wish.variant], lanes, streams, wish.backend)
        return resident

    # --- steps

    def _proofs(self, target: Target, wish: Wish, variants: Sequence[str], before: Sequence[Resident]) -> list[Proof]:
        start_ns, captured = time.monotonic_ns(), self._ledger.totals(target.config.name).captured
        proofs = [self._prove_one(target.config, wish, variant, target.lanes) for variant in variants]
        elapsed_s = (time.monotonic_ns() - start_ns) / 1e9
        demand = (self._ledger.totals(target.config.name).captured - captured) / elapsed_s
        # what ran before was fast enough, or somebody said that it need not be
        if not wish.allow_slow and proofs[0] not in self._known.values():
            self._check_speed(target, proofs[0], demand, before, wish.backend)
        return proofs

    def _prove_one(self, config: ModelConfig, wish: Wish, variant: str, lanes: int) -> Proof:
        bundle, backend = wish.bundle, wish.backend
        places = config.max_batch if isinstance(config.max_batch, int) else 1
        plan = None if backend == "onnxruntime" else self.engines.plan(config, bundle, variant)
        known = self._known.get((bundle.engine_digest(variant, backend), _text(plan), lanes, places))
        if known is not None:
            return known
        free = self._free_bytes()
        return self._prove(
            bundle,
            variant,
            backend=backend,
            plan=plan,
            lanes=lanes,
            places=places,
            run_within_s=config.timeout_s,
            memory_bytes=None if free is None else max(free - RESERVE_BYTES, MiB),
            cancel=self._cancel,
        )

    def _remember(self, target: Target, wish: Wish, proofs: Sequence[Proof]) -> None:
        """These ran: the way back to them need not be proved again, as long as this process lives. Their files are
        verified at every load, and the golden pictures run again on the engine that is to take over."""
        config, lanes = target.config, target.lanes
        places = config.max_batch if isinstance(config.max_batch, int) else 1
        plans = wish.choice.plans or (None,) * len(proofs)
        for proof, plan in zip(proofs, plans, strict=True):
            self._known[proof.engine, plan, lanes, places] = proof
        while len(self._known) > KNOWN:
            del self._known[next(iter(self._known))]

    def _check_speed(
        self, target: Target, proof: Proof, demand: float, before: Sequence[Resident], backend: Backend = "onnxruntime"
    ) -> None:
        """Refuse what cannot keep up with the frames that came during the proof, `demand` a second, unless it is as
        fast as what runs, or ran `before` a pause."""
        # lanes share one GPU: more of them run no more frames than one that is never idle
        lanes = target.lanes if backend == "onnxruntime" else 1
        run_s = proof.cpu_ms / 1e3
        if demand * run_s <= lanes:
            return
        before_s = _cost_s(before)
        if before_s is not None and run_s <= SLOWER * before_s:
            return  # no worse than what runs now
        words = "" if before_s is None else f"; the model before takes {before_s * 1e3:.0f} ms"
        what = "CPU" if backend == "onnxruntime" else "the GPU"
        raise RefusedError(
            f"it is too slow for its cameras: a picture takes {proof.cpu_ms:.0f} ms of {what}, and {demand:.0f} frames "
            f"a second on {lanes} lanes leave {lanes / demand * 1e3:.0f} ms for each{words}",
            code="too_slow",
            where=str(proof.variant),
            remedy="use a smaller variant, fewer or slower cameras, or allow it (--allow-slow)",
        )

    def _require(self, need: int) -> None:
        """Raises RefusedError where so much memory is not there; not where nobody knows."""
        free = self._free_bytes()
        if free is None or free >= need + RESERVE_BYTES:
            return
        raise RefusedError(
            f"it does not fit into memory beside what runs: it needs {need / MiB:.0f} MiB and "
            f"{RESERVE_BYTES / MiB:.0f} MiB have to stay free, and {free / MiB:.0f} MiB are",
            code="memory",
            where="memory",
            remedy="use a smaller variant or a shorter ladder, or let the old engine go first (--allow-pause)",
        )

    def load(
        self,
        config: ModelConfig,
        bundle: Bundle,
        variants: Sequence[str],
        lanes: int,
        streams: int,
        backend: Backend = "onnxruntime",
    ) -> list[Resident]:
        """Engines of these variants, warm, and right by the bundle's golden pictures. Raises EdgeError."""
        loaded: list[Resident] = []
        load = self.loader(config, backend)
        try:
            for variant in variants:
                self._require_going()
                resident = load_variant(
                    bundle, variant, config, lanes=lanes, streams=streams, wrap=self.wrap, load=load
                )
                loaded.append(resident)
                # the proof was another process: this is the very engine that is going to run
                probe(resident.engine, resident.lanes[0], bundle, variant, self._read_image)
            # what is exchanged after the pipeline was closed would never be closed
            self._require_going()
        except BaseException:
            for each in loaded:
                each.close()
            raise
        return loaded

    def _require_going(self) -> None:
        if self._cancel.is_set():
            raise EngineError("the daemon is stopping", code="stopping", retryable=True)

    def _back(
        self, target: Target, fresh: Sequence[Resident], before: Sequence[Resident], pause: _Pause | None
    ) -> None:
        if pause is not None:
            target.pipe.desk.exchange(None, "the new engine was taken back")
            self._await_closed(fresh)  # there was no room for both
            self._resume(target)
        elif before:
            target.pipe.desk.exchange(before[0], others=before[1:])
        else:
            target.pipe.desk.exchange(None, "the new engine was taken back")

    def _may_pause(self, target: Target, wish: Wish, lack: RefusedError) -> bool:
        """Whether stopping the model may help against what is lacking, and is allowed."""
        allowed = wish.allow_pause or target.config.allow_pause
        return allowed and lack.code in ("memory", "model_memory") and bool(target.pipe.desk.ladder())

    def _pause(self, target: Target, lack: RefusedError) -> _Pause:
        """Stop the model to make room."""
        before = target.pipe.desk.ladder()
        _cost_s(before)  # now or never: the new one is compared with it
        started_ns = time.monotonic_ns()
        log.warning("model %s pauses: %s", target.config.name, lack.message)
        target.pipe.desk.exchange(None, "it makes room in memory for another engine")
        self._await_closed(before)
        return _Pause(started_ns)

    def _resume(self, target: Target) -> None:
        """Load again what ran before the pause, unless the daemon stops."""
        if self._cancel.is_set():
            return
        try:
            again = target.restore()
        except EdgeError as error:
            # whoever asked hears of the first error; of this one everybody does, since the model stays down
            log.error("model %s: what ran before cannot be loaded again: %s", target.config.name, error)
            target.pipe.desk.exchange(None, f"what ran before cannot be loaded again: {error}")
            return
        if self._cancel.is_set():
            for each in again:
                each.close()
            return
        target.pipe.desk.exchange(again[0], others=again[1:])

    def _await_closed(self, residents: Sequence[Resident]) -> None:
        end = time.monotonic() + CLOSE_S
        for each in residents:
            while not each.closed.wait(_CLOSE_LOOK_S):
                if time.monotonic() >= end or self._cancel.is_set():
                    log.warning("engine %s still has a batch in hand and is closed after it", each.info.digest[:19])
                    break


@dataclass(frozen=True, slots=True)
class _Pause:
    started_ns: int


def _cost_s(residents: Sequence[Resident]) -> float | None:
    """CPU time of a run of the first, in seconds; None where there is none, or it does not run."""
    try:
        return run_cpu_s(residents[0]) if residents else None
    except EdgeError as error:
        log.info("what the engine before costs cannot be measured: %s", error)
        return None


def _text(plan: Path | None) -> str | None:
    return None if plan is None else str(plan)


def _least_bytes(bundle: Bundle, variant: str, backend: Backend) -> int:
    """What a proof of this variant takes at the very least, before anything is known of it."""
    return PROOF_BYTES + _FILE_TIMES * bundle.artefact(variant, backend).path.stat().st_size


def _picture_bytes(config: ModelConfig, backend: Backend, engines: int, lanes: int, streams: int) -> int:
    """What cameras' whole pictures will take beside these engines, where the GPU scales them."""
    if backend != "tensorrt" or config.letterbox == "cpu" or config.cache != "off":
        return 0
    most = config.max_batch if isinstance(config.max_batch, int) else min(AUTO_BATCH, max(streams, 1))
    # a batch open or running for each lane and one more, and for each lane the picture that the GPU has
    return engines * expected_bytes((lanes + 1) * most + lanes)


def _need_bytes(proofs: Sequence[Proof]) -> int:
    """All of the ladder loaded, and the highest peak of a load above that."""
    return sum(proof.memory_bytes for proof in proofs) + max(
        max(0, proof.peak_bytes - proof.memory_bytes) for proof in proofs
    )
