"""Which bundle each model runs, who wanted it, and every change of it: at the start, by command, by SIGHUP.

What runs after a start: the last local `reload` (persisted), else what the configuration says.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence

from edge_runtime.app.backing import Backing
from edge_runtime.app.engines import PlanMissing
from edge_runtime.app.exchange import Exchanger
from edge_runtime.app.first_load import GIVEN_UP, FirstLoad, no_model
from edge_runtime.app.kept import Kept, missing_variants
from edge_runtime.app.loader import Loader
from edge_runtime.app.models import lanes_for, measure, offered, open_bundle
from edge_runtime.app.outcome import Source, describe, passing
from edge_runtime.app.shelf import Shelf
from edge_runtime.app.swap import Swapper
from edge_runtime.config import CameraConfig, Config, ModelConfig
from edge_runtime.errors import EXIT_USAGE, EdgeError, EngineError
from edge_runtime.pipeline.pipeline import Pipeline
from edge_runtime.records.commands import ReloadArgs, ReloadResult, VariantArgs
from edge_runtime.records.events import ReportedModel, Scalar, Severity
from edge_runtime.records.governing import ModelSite

log = logging.getLogger(__name__)

Tell = Callable[[Severity, str, Mapping[str, Scalar]], None]
"""Takes an event about a model: how bad, in words, and for machines."""


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
        self._first = FirstLoad(shelf, swapper, self._backing)
        self._exchanger = Exchanger(pipeline, swapper, self._backing)
        self._tell = tell
        self._changed = changed
        self._lock = threading.Lock()
        self._under_change: set[str] = set()
        lanes = lanes_for(config.models)
        self._kept = {each.name: Kept(each, lanes[each.name], 0, each) for each in config.models}
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
            ladder = self._first.load(kept, chosen.get(name), keep_going)
            if ladder is None:
                return
            if ladder and kept.bundle is not None:
                kept.variant = ladder[0].info.variant
                if (note := missing_variants(kept.bundle, kept.config, ladder[0])) is not None:
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
            raise errors[0] if len(errors) == 1 and errors[0].exit_code == EXIT_USAGE else no_model(errors)
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

    def _take_plans(self, kept: Kept, what: str) -> None:
        """On the loader's thread. Raises nothing: nobody waits."""
        name = kept.config.name
        try:
            if kept.bundle is None:
                return
            wish = self._backing.wish(kept.config, kept.bundle, kept.asked)
            if wish.backend != "tensorrt" or not self._backing.is_new(name, wish.choice):
                self._tell("info", f"{what} is there", {"model": name, "state": "plan"})
                return
            self._tried(kept, what, lambda: self._exchanger.exchange(kept, wish, kept.source))
        except EdgeError as error:
            if error.code not in GIVEN_UP:
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

    def _site(self, kept: Kept) -> ModelSite:
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

    def _tried(self, kept: Kept, what: str, job: Callable[[], ReloadResult]) -> ReloadResult:
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

    def _reload(self, kept: Kept, args: ReloadArgs) -> ReloadResult:
        if args.reset:
            bundle, variant, source = open_bundle(kept.config.bundle), kept.config.variant, _CONFIGURATION
        else:
            assert args.bundle is not None
            bundle, variant, source = self._shelf.open(args.bundle), args.variant, _RELOAD
        result = self._exchanger.exchange(kept, self._backing.wish(kept.config, bundle, variant, args), source)
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

    def _switch(self, kept: Kept, args: VariantArgs) -> ReloadResult:
        if kept.bundle is None:
            raise EngineError(
                "the model is down: there is no bundle to take a variant of",
                code="model_down",
                where=args.model,
                remedy="reload it with a bundle that runs",
            )
        result = self._exchanger.exchange(
            kept, self._backing.wish(kept.config, kept.bundle, args.variant, args), kept.source
        )
        return passing(result, "this lasts until the next start; the configuration and `reload` choose for longer")

    def _applied(self, kept: Kept, config: ModelConfig, lanes: int) -> list[str]:
        try:
            return self._apply(kept, config, lanes)
        except PlanMissing as missing:
            self._backing.begin(config.name, missing)
            return [f"model {config.name}: {missing}"]
        except EdgeError as error:
            return [f"model {config.name}: {error}"]

    def _apply(self, kept: Kept, config: ModelConfig, lanes: int) -> list[str]:
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
            before = kept.loaded
            same = (before.max_batch, before.letterbox, before.ladder, kept.lanes) == (
                config.max_batch,
                config.letterbox,
                config.ladder,
                lanes,
            )
            again = self._backing.wish(config, kept.bundle, kept.asked)
            new = self._backing.is_new(name, again.choice)
            if new or not same or pipe.desk.lanes != lanes or pipe.desk.resident() is None:
                wish = again
        if wish is not None:
            what = f"model {name}: new configuration"
            self._tried(kept, what, lambda: self._exchanger.on_lanes(kept, wish, source, lanes))
        return left

    def _collect(self) -> None:
        """Remove bundles that nothing needs any more, once there is a new one: after a start nobody knows what was
        brought to be reloaded next."""
        running = {kept.bundle.digest for kept in self._kept.values() if kept.bundle is not None}
        self._shelf.collect(running | {kept.previous for kept in self._kept.values() if kept.previous is not None})
        self._backing.collect()

    # --- looking

    def _find(self, name: str) -> Kept:
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
