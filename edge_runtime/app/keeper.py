"""Which bundle each model runs, who wanted it, and every change of it: at the start, by command, by SIGHUP.

What runs after a start: the last local `reload` (persisted), else what the configuration says.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from edge_runtime.app.backing import Backing
from edge_runtime.app.engines import PlanMissing
from edge_runtime.app.loader import Loader
from edge_runtime.app.models import ladder_of, lanes_for, load_variant, measure, offered, open_bundle
from edge_runtime.app.outcome import Source, describe, outcome, passing
from edge_runtime.app.shelf import Shelf
from edge_runtime.app.swap import Swapper, Target, Wish
from edge_runtime.config import CameraConfig, Config, ModelConfig
from edge_runtime.engine.bundle import Bundle
from edge_runtime.engine.manifest import Backend
from edge_runtime.engine.slot import Resident
from edge_runtime.errors import EXIT_USAGE, BundleError, EdgeError, EngineError
from edge_runtime.pipeline.pipeline import Pipeline
from edge_runtime.records.commands import ReloadArgs, ReloadResult, VariantArgs
from edge_runtime.records.events import ReportedModel, Scalar, Severity
from edge_runtime.records.governing import ModelSite

log = logging.getLogger(__name__)

Tell = Callable[[Severity, str, Mapping[str, Scalar]], None]
"""Takes an event about a model: how bad, in words, and for machines."""

_GIVEN_UP = ("cancelled", "stopping")


@dataclass(slots=True)
class _Kept:
    """One configured model. `bundle` and `variant` are what is to run, or ran last; None while it is down for `error`.
    The governor may let a lighter variant run meanwhile. `asked`: the variant as it was asked for, which may be "auto".

    `loaded`: the configuration that it was loaded by, where `config` could not be taken over yet.
    `fallback`: why it does not run what was reloaded last. `previous`: the digest of the bundle before, for a way back.
    `left_out`: why a variant of its ladder was not loaded at the start.
    """

    config: ModelConfig
    lanes: int
    streams: int
    loaded: ModelConfig
    bundle: Bundle | None = None
    variant: str = "auto"
    asked: str = "auto"
    source: Source = "configuration"
    error: EdgeError | None = None
    fallback: str | None = None
    left_out: str | None = None
    previous: str | None = None


class ModelKeeper:
    """Loads, exchanges and remembers the models of a daemon.

    `tell` gets events, `changed` is called when what runs has changed; both on the thread that changes it. `backing`
    knows by what each model runs; who builds plans for it tells `plans_made` and `plans_failed`.
    """

    def __init__(
        self,
        config: Config,
        pipeline: Pipeline,
        shelf: Shelf,
        swapper: Swapper,
        loader: Loader,
        *,
        tell: Tell,
        changed: Callable[[], None],
        backing: Backing | None = None,
    ) -> None:
        self._backing = backing or Backing(swapper.engines)
        self._pipeline = pipeline
        self._shelf = shelf
        self._swapper = swapper
        self._loader = loader
        self._tell = tell
        self._changed = changed
        self._lock = threading.Lock()
        self._under_change: set[str] = set()
        lanes = lanes_for(config.models)
        self._kept = {each.name: _Kept(each, lanes[each.name], 0, each) for each in config.models}
        self.count_cameras(config.cameras)

    def count_cameras(self, cameras: Sequence[CameraConfig]) -> None:
        """From now on these feed the models: what is loaded next is loaded for so many. Any thread."""
        for name, kept in self._kept.items():
            kept.streams = sum(name in camera.models for camera in cameras)

    # --- the start

    def load(self, keep_going: Callable[[], bool]) -> None:
        """Load every model and add it to the pipeline, up or down. Stops early when `keep_going` says no.

        Raises BundleError or EngineError where not one could be loaded.
        """
        chosen = self._shelf.chosen()
        for name, kept in self._kept.items():
            if not keep_going():
                return
            ladder: Sequence[Resident] = ()
            if (choice := chosen.get(name)) is not None:
                ladder = self._load_choice(kept, choice.bundle, choice.variant)
                if not ladder and not keep_going():
                    return
            if not ladder and not isinstance(kept.error, PlanMissing):
                ladder = self._load_configured(kept)
            if ladder and kept.bundle is not None:
                kept.variant = ladder[0].info.variant
                if (note := _missing(kept.bundle, kept.config, ladder[0])) is not None:
                    log.warning("model %s: %s", name, note)
            measure(ladder)
            self._pipeline.add_model(
                name,
                ladder[0] if ladder else None,
                lanes=kept.lanes,
                batch_timeout_s=kept.config.batch_timeout_ms / 1e3,
                timeout_s=kept.config.timeout_s,
                down_reason=None if kept.error is None else str(kept.error),
                others=ladder[1:],
                cache=kept.config.cache,
                cache_max_age_s=kept.config.cache_max_age_s,
            )
        errors = [kept.error for kept in self._kept.values() if kept.error is not None]
        # one whose plan is being built comes up then
        if errors and len(errors) == len(self._kept) and not any(isinstance(each, PlanMissing) for each in errors):
            raise errors[0] if len(errors) == 1 and errors[0].exit_code == EXIT_USAGE else _no_model(errors)
        for name, kept in self._kept.items():
            if kept.error is not None:
                log.error("model %s is down: %s", name, kept.error)

    def alarms(self) -> list[str]:
        """What is not as it was wanted, until it is."""
        kept = self._kept.values()
        found = (self._shelf.trouble, *(each.fallback for each in kept), *(each.left_out for each in kept))
        return [*(each for each in found if each), *self._backing.alarms()]

    def tell_start(self) -> None:
        """An event for everything that is not as it was wanted; once events can be sent."""
        for text in self.alarms():
            self._tell("error", text, {"state": "fallback"})
        for name, kept in self._kept.items():
            if kept.error is not None:
                text = f"model {name} is down: {kept.error}"
                self._tell("error", text, {"model": name, "state": "down", "code": kept.error.code})

    def _load_choice(self, kept: _Kept, digest: str, variant: str) -> Sequence[Resident]:
        """What was reloaded last, proved again: a newer runtime may crash on it. Empty where it cannot run."""
        name = kept.config.name
        try:
            bundle = self._shelf.open(digest)
            wish = self._backing.wish(kept.config, bundle, variant)
            ladder = self._swapper.load_proved(kept.config, wish, lanes=kept.lanes, streams=kept.streams)
        except PlanMissing as missing:
            kept.bundle, kept.asked, kept.source = bundle, variant, "reload"
            self._wait_for_plan(kept, bundle, missing)
            return ()
        except EdgeError as error:
            if error.code in _GIVEN_UP:
                return ()
            kept.fallback = f"model {name}: what was reloaded last cannot run ({error}); the configuration decides"
            log.error("%s", kept.fallback)
            return ()
        kept.bundle, kept.asked, kept.source = bundle, variant, "reload"
        self._backing.taken(name, wish)
        return ladder

    def _load_configured(self, kept: _Kept) -> Sequence[Resident]:
        try:
            kept.bundle = bundle = open_bundle(kept.config.bundle)
            kept.asked = kept.config.variant
            wish = self._backing.wish(kept.config, bundle, kept.asked)
            first, *others = ladder_of(bundle, kept.config, kept.asked, wish.backend)
            resident = load_variant(
                bundle,
                first,
                kept.config,
                lanes=kept.lanes,
                streams=kept.streams,
                wrap=self._swapper.wrap,
                load=self._swapper.loader(kept.config, wish.backend),
            )
            self._backing.taken(kept.config.name, wish)
            return [resident, *self._load_others(kept, wish, others)]
        except PlanMissing as missing:
            self._wait_for_plan(kept, bundle, missing)
            return ()
        except EdgeError as error:
            kept.bundle, kept.error = None, _bare(error)
            return ()

    def _wait_for_plan(self, kept: _Kept, bundle: Bundle, missing: PlanMissing) -> None:
        self._backing.waits(kept.config.name, bundle, missing)
        kept.error = _bare(missing)

    def _load_others(self, kept: _Kept, wish: Wish, variants: Sequence[str]) -> list[Resident]:
        """The rest of a ladder at the start. One that cannot be is left out: it must not cost the one that runs."""
        found = [self._load_other(kept, replace(wish, variant=each)) for each in variants]
        return [each for each in found if each is not None]

    def _load_other(self, kept: _Kept, wish: Wish) -> Resident | None:
        try:
            return self._swapper.load_beside(kept.config, wish, lanes=kept.lanes, streams=kept.streams)
        except EdgeError as error:
            kept.left_out = f"model {kept.config.name}: {wish.variant} is not on its ladder: {error}"
            log.error("%s", kept.left_out)
            return None

    def forget_proofs(self) -> None:
        """Prove again whatever comes, also what ran before; for measurements."""
        self._swapper.forget()

    # --- commands; each waits for its outcome

    def reload(self, args: ReloadArgs) -> ReloadResult:
        """Implements control.commands.ModelControl. Raises EdgeError; the model runs what it ran then."""
        kept = self._find(args.model)
        what = f"model {args.model}: {'reset' if args.reset else 'reload'}"
        return self._loader.call(what, lambda: self._tried(kept, what, lambda: self._reload(kept, args)))

    def switch(self, args: VariantArgs) -> ReloadResult:
        """Implements control.commands.ModelControl. Lasts until the next start or reload."""
        kept = self._find(args.model)
        what = f"model {args.model}: variant {args.variant}"
        return self._loader.call(what, lambda: self._tried(kept, what, lambda: self._switch(kept, args)))

    def apply(self, config: Config) -> list[str]:
        """Take over changed [[model]] tables and bundles of a configuration read anew. On the loader's thread.

        Returns what could not be taken over, in words.
        """
        left: list[str] = []
        wanted = {each.name: each for each in config.models}
        if set(wanted) != set(self._kept):
            new, gone = sorted(set(wanted) - set(self._kept)), sorted(set(self._kept) - set(wanted))
            left += [f"model {name}: new, needs a restart" for name in new]
            left += [f"model {name}: no longer configured, needs a restart" for name in gone]
        lanes = lanes_for(config.models)
        # where lanes become fewer first: the cores of one model go to another
        for name in sorted(set(self._kept) & set(wanted), key=lambda each: lanes[each] - self._kept[each].lanes):
            left += self._applied(self._kept[name], wanted[name], lanes[name])
        return left

    # --- plans for this device; who builds them calls these, on a thread of its own

    def plans_made(self, model: str) -> None:
        """What a model wanted is there: let it run that, as after a reload."""
        what = f"model {model}: its plan for this device"
        self._loader.post(what, lambda: self._take_plans(self._kept[model], what))

    def plans_failed(self, model: str, error: EdgeError) -> None:
        """What a model wanted cannot be had: it goes on as it is, or stays down for this reason."""
        kept, what = self._kept[model], f"its plan for this device cannot be had: {error}"
        self._backing.failed(model, what)
        if isinstance(kept.error, PlanMissing):
            kept.error = error
            self._pipeline.models[model].desk.exchange(None, what)
        self._tell("error", f"model {model}: {what}", {"model": model, "state": "plan", "code": error.code})
        self._changed()

    def _take_plans(self, kept: _Kept, what: str) -> None:
        """On the loader's thread. Raises nothing: nobody waits."""
        name = kept.config.name
        try:
            if kept.bundle is None:
                return
            wish = self._backing.wish(kept.config, kept.bundle, kept.asked)
            if wish.backend != "tensorrt" or not self._backing.is_new(name, wish.choice):
                self._tell("info", f"{what} is there", {"model": name, "state": "plan"})
                return
            self._tried(kept, what, lambda: self._exchange(kept, wish, kept.source))
        except EdgeError as error:
            if error.code not in _GIVEN_UP:
                self._backing.failed(name, f"its plan for this device is not used: {error}")
                log.error("%s is not used: %s", what, error)
            return
        self._backing.collect()

    # --- the governor

    def site_models(self) -> tuple[ModelSite, ...]:
        """Every model, with the variants that it may run: what people want first, then what costs less. `places` and
        `sizes` are those of the variant that runs now."""
        return tuple(self._site(kept) for name, kept in self._kept.items() if name in self._pipeline.models)

    def changing(self, model: str) -> bool:
        """Whether a command or a configuration is changing what a model runs."""
        with self._lock:
            return model in self._under_change

    def prefer(self, model: str, variant: str) -> bool:
        """Run another variant of the ladder from the next batch on. What people want stays what it is.

        False, and nothing done, while a change of that model is under way, where it is down or has none such loaded.
        """
        with self._lock:  # held over the exchange: a change that begins now finds the ladder as it is then
            pipe = self._pipeline.models.get(model)
            if pipe is None or model in self._under_change:
                return False
            before = pipe.desk.resident()
            if not pipe.desk.choose(variant):
                return False
        if pipe.desk.resident() is not before:
            self._changed()
        return True

    def _site(self, kept: _Kept) -> ModelSite:
        desk = self._pipeline.models[kept.config.name].desk
        ladder = desk.ladder()
        return ModelSite(
            kept.config.name,
            desk.lanes,
            offered(ladder, kept.variant),
            places=ladder[0].places if ladder else 1,
            sizes=ladder[0].engine.allowed_batches if ladder else None,
            batch_timeout_ms=kept.config.batch_timeout_ms,
        )

    # --- on the loader's thread

    def _tried(self, kept: _Kept, what: str, job: Callable[[], ReloadResult]) -> ReloadResult:
        name = kept.config.name
        with self._lock:
            self._under_change.add(name)
        try:
            result = job()
        except EdgeError as error:
            self._tell("warning", f"{what}: refused, {self._running(name)}: {error}",
                       {"model": name, "state": "refused", "code": error.code})  # fmt: skip
            raise
        finally:
            try:
                if not self._loader.cancel.is_set():
                    measure(self._pipeline.models[name].desk.ladder())
            finally:
                with self._lock:
                    self._under_change.discard(name)
            self._changed()
        if result.changed:
            self._tell("info", f"{what}: {describe(result)}", {
                "model": name, "state": "up", "engine": result.engine, "variant": result.variant,
                "source": result.source, "exchange_ms": result.exchange_ms, "gap_ms": result.gap_ms,
                "pause_ms": result.pause_ms, "lost": sum(result.lost.values()),
            })  # fmt: skip
        return result

    def _running(self, name: str) -> str:
        resident = self._pipeline.models[name].desk.resident()
        return "the model stays down" if resident is None else f"{resident.info.variant} runs on"

    def _reload(self, kept: _Kept, args: ReloadArgs) -> ReloadResult:
        if args.reset:
            bundle, variant, source = open_bundle(kept.config.bundle), kept.config.variant, _CONFIGURATION
        else:
            assert args.bundle is not None
            bundle, variant, source = self._shelf.open(args.bundle), args.variant, _RELOAD
        result = self._exchange(kept, self._backing.wish(kept.config, bundle, variant, args), source)
        kept.fallback = None
        name = kept.config.name
        try:
            if args.reset:
                self._shelf.forget(name)
            else:
                self._shelf.choose(name, bundle.digest, result.variant)
        except EdgeError as error:
            result = passing(result, f"it runs, and the next start will not know of it: {error}")
            log.error("model %s: the choice could not be kept: %s", name, error)
        self._collect()
        return result

    def _switch(self, kept: _Kept, args: VariantArgs) -> ReloadResult:
        if kept.bundle is None:
            raise EngineError(
                "the model is down: there is no bundle to take a variant of",
                code="model_down",
                where=args.model,
                remedy="reload it with a bundle that runs",
            )
        result = self._exchange(kept, self._backing.wish(kept.config, kept.bundle, args.variant, args), kept.source)
        return passing(result, "this lasts until the next start; the configuration and `reload` choose for longer")

    def _exchange(self, kept: _Kept, wish: Wish, source: Source, *, applying: bool = False) -> ReloadResult:
        """Let the model run what is wished for, and say what that cost. What is loaded already is only switched to.

        `applying` a configuration, what its other batches or its shorter ladder call for is done, too.
        """
        started_ns = time.monotonic_ns()
        name = kept.config.name
        pipe, ledger = self._pipeline.models[name], self._pipeline.ledger
        ladder = {each.info.digest: each for each in pipe.desk.ladder()}
        running, before_it = [each.info.variant for each in ladder.values()], kept.bundle

        def restore() -> Sequence[Resident]:
            assert before_it is not None  # it ran a moment ago
            return self._swapper.load(kept.config, before_it, running, kept.lanes, kept.streams, backend)

        backend = _backend_of(list(ladder.values()))
        target = Target(kept.config, pipe, kept.lanes, kept.streams, restore)
        digests = [
            wish.bundle.engine_digest(each, wish.backend)
            for each in ladder_of(wish.bundle, kept.config, wish.variant, wish.backend)
        ]
        ledger.begin_gaps(name)
        before = ledger.totals(name)
        anew = self._backing.is_new(name, wish.choice) or (
            applying
            and (
                kept.loaded.max_batch != kept.config.max_batch
                or any(len(each.lanes) != kept.lanes for each in ladder.values())
            )
        )
        # one that was left out at the start cannot be asked for now: it must not cost the others their switch
        complete = set(digests) <= set(ladder) or (kept.left_out is not None and not applying and digests[0] in ladder)
        if complete and not anew:
            shorter = applying and kept.loaded.ladder != kept.config.ladder
            keep = [each for digest, each in ladder.items() if digest in digests or not shorter]
            wanted, current = ladder[digests[0]], pipe.desk.ladder()[0]
            # a file that wants what was wanted before leaves the governor its choice
            same = wanted.info.variant == kept.variant and wanted.info.bundle == current.info.bundle
            stays = applying and same and current in keep
            swapped = self._swapper.switch(target, current if stays else wanted, keep)
            variant = wanted.info.variant
        else:
            swapped = self._swapper.swap(target, wish)
            variant = swapped.resident.info.variant
        if applying or swapped.proof is not None:
            kept.loaded = kept.config
        if before_it is not None and before_it.digest != wish.bundle.digest:
            kept.previous = before_it.digest
        kept.bundle, kept.variant, kept.source, kept.error = wish.bundle, variant, source, None
        kept.asked = wish.variant
        self._backing.taken(name, wish)
        if swapped.proof is not None:
            kept.left_out = None  # all of the ladder was loaded anew
        if (note := _missing(wish.bundle, kept.config, swapped.resident)) is not None:
            swapped.notes.append(note)
            log.warning("model %s: %s", name, note)
        after = ledger.totals(name)
        lost = {
            "stale": after.stale - before.stale,
            "dropped": sum(after.dropped.values()) - sum(before.dropped.values()),
            "failed": after.failed - before.failed,
        }
        gap_ns = ledger.longest_gap_ns(name)
        return outcome(name, source, swapped, (time.monotonic_ns() - started_ns) / 1e9, lost, gap_ns)

    def _applied(self, kept: _Kept, config: ModelConfig, lanes: int) -> list[str]:
        try:
            return self._apply(kept, config, lanes)
        except PlanMissing as missing:
            self._backing.begin(config.name, missing)
            return [f"model {config.name}: {missing}"]
        except EdgeError as error:
            return [f"model {config.name}: {error}"]

    def _apply(self, kept: _Kept, config: ModelConfig, lanes: int) -> list[str]:
        """One model's table, changed or not: its bundle may be another one under the same name."""
        old, name = kept.config, config.name
        left: list[str] = []
        kept.config = config
        pipe = self._pipeline.models[name]
        pipe.timeout_ns = int(config.timeout_s * 1e9)
        pipe.desk.set_batch_timeout(config.batch_timeout_ms / 1e3)
        pipe.cache.configure(config.cache, config.cache_max_age_s)
        wish, source = None, kept.source
        if source == "reload" and (old.bundle, old.variant) != (config.bundle, config.variant):
            left.append(f"model {name}: runs what was reloaded last, until `edge-runtime reload {name} --reset`")
        if source == "configuration":
            wish = self._backing.wish(config, open_bundle(config.bundle), config.variant)
        elif kept.bundle is not None:
            same = (kept.loaded.max_batch, kept.loaded.ladder, kept.lanes) == (config.max_batch, config.ladder, lanes)
            again = self._backing.wish(config, kept.bundle, kept.asked)
            new = self._backing.is_new(name, again.choice)
            if new or not same or pipe.desk.lanes != lanes or pipe.desk.resident() is None:
                wish = again
        if wish is not None:
            what = f"model {name}: new configuration"
            self._tried(kept, what, lambda: self._on_lanes(kept, wish, source, lanes))
        return left

    def _on_lanes(self, kept: _Kept, wish: Wish, source: Source, lanes: int) -> ReloadResult:
        """Exchange what runs for what is configured now, on so many lanes: fewer before it, more after it, so that
        no lane ever comes upon an engine that has no context for it."""
        name, before = kept.config.name, kept.lanes
        desk = self._pipeline.models[name].desk
        old = desk.ladder()
        if lanes < desk.lanes:
            self._pipeline.set_lanes(name, lanes)
        kept.lanes = lanes
        try:
            result = self._exchange(kept, wish, source, applying=True)
        except BaseException:
            if all(len(each.lanes) >= before for each in desk.ladder()):
                kept.lanes = before
                self._pipeline.set_lanes(name, before)
            raise
        if lanes > desk.lanes:
            if not all(each.closed.is_set() or each in desk.ladder() for each in old):
                note = "the old engine still has a batch in hand: more lanes at the next time the configuration is read"
                return result.model_copy(update={"notes": [*result.notes, note]})
            self._pipeline.set_lanes(name, lanes)
        return result

    def _collect(self) -> None:
        """Remove bundles that nothing needs any more, once there is a new one: after a start nobody knows what was
        brought to be reloaded next."""
        running = {kept.bundle.digest for kept in self._kept.values() if kept.bundle is not None}
        self._shelf.collect(running | {kept.previous for kept in self._kept.values() if kept.previous is not None})
        self._backing.collect()

    # --- looking

    def _find(self, name: str) -> _Kept:
        kept = self._kept.get(name)
        if kept is None:
            raise EdgeError(
                f"there is no model {name!r}",
                code="unknown_model",
                where="args.model",
                remedy=f"configured: {', '.join(self._kept)}",
            )
        return kept

    def source(self, name: str) -> Source:
        """Who wanted what the model runs."""
        return self._kept[name].source

    def backend_reason(self, name: str) -> str | None:
        """Why the model does not run on a plan of this device; None where it does, or need not."""
        return self._backing.reason(name)

    def reported(self) -> list[ReportedModel]:
        """Every model, as `reported` has it."""
        models = []
        for name, kept in self._kept.items():
            pipe = self._pipeline.models.get(name)
            resident = None if pipe is None else pipe.desk.resident()
            info = None if resident is None else resident.info
            models.append(
                ReportedModel(
                    name=name,
                    engine=None if info is None else info.digest,
                    bundle=None if info is None else info.bundle,
                    variant=None if info is None else info.variant,
                    backend=None if info is None else info.backend,
                    state="down" if info is None else "up",
                    source=kept.source,
                    backend_reason=self.backend_reason(name),
                )
            )
        return models


_CONFIGURATION: Source = "configuration"
_RELOAD: Source = "reload"


def _missing(bundle: Bundle, config: ModelConfig, resident: Resident) -> str | None:
    """What the ladder was to have and the bundle has not; None where nothing is missing."""
    backend = _backend_of([resident])
    missing = sorted(set(config.ladder) - set(bundle.variants_for(backend)))
    return f"not on the ladder, since the bundle has none for {backend}: {', '.join(missing)}" if missing else None


def _backend_of(ladder: Sequence[Resident]) -> Backend:
    """By what these run; a ladder is of one backend."""
    return "tensorrt" if any(each.info.backend == "tensorrt" for each in ladder) else "onnxruntime"


def _bare(error: EdgeError) -> EdgeError:
    """Without the frames that it came through: they hold the model that could not be loaded."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def _no_model(errors: Sequence[EdgeError]) -> BundleError:
    return BundleError("no model could be loaded:\n" + "\n".join(f"  {error}" for error in errors), code="no_model")
