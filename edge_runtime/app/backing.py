"""By what each model runs and why, what it waits for, and which plans of the store that makes needed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from edge_runtime.app.building import Need, PlanMaker
from edge_runtime.app.engines import Choice, Engines, PlanMissing
from edge_runtime.app.swap import Wish
from edge_runtime.config import ModelConfig
from edge_runtime.engine.bundle import Bundle
from edge_runtime.errors import EdgeError
from edge_runtime.records.commands import ReloadArgs, VariantArgs

log = logging.getLogger(__name__)

Want = Callable[[str, Sequence[Need]], None]
"""Takes the plans that a model wants built, all of them; see building.Builder.want."""


class Backing:
    """Of every model: the choice in force, and why a plan that it wants could not be had. Any thread.

    `want` has plans built; `maker` has the store that is cleared up. Both None where there is no TensorRT.
    """

    def __init__(self, engines: Engines, *, want: Want | None = None, maker: PlanMaker | None = None) -> None:
        self._engines = engines
        self._want = want
        self._maker = maker
        self._lock = threading.Lock()
        self._choices: dict[str, Choice] = {}
        self._unbuilt: dict[str, str] = {}
        self._models: set[str] = set()

    def wish(
        self,
        config: ModelConfig,
        bundle: Bundle,
        variant: str,
        asking: ReloadArgs | VariantArgs | None = None,
    ) -> Wish:
        """A variant of a bundle by the backend that can run it now. Raises as Engines.choose.

        `asking`: somebody waits for it. A model that runs on TensorRT does not go back to the CPU then for as long as
        a build takes, unless that is allowed: PlanMissing, and the build begins.
        """
        pause, slow = (False, False) if asking is None else (asking.allow_pause, asking.allow_slow)
        try:
            choice = self._engines.choose(config, bundle, variant)
            if (
                asking is not None
                and choice.needs
                and choice.backend != "tensorrt"
                and not slow
                and self._on_gpu(config)
            ):
                raise PlanMissing(choice.reason or "", config.name, choice.needs)
        except PlanMissing as missing:
            if asking is not None and self._want is not None:
                self.begin(config.name, missing)
                missing.remedy = "it is being built now: ask again when an event says that it is there" + (
                    ", or let the CPU run it meanwhile (--allow-slow)" if config.backend == "auto" else ""
                )
            raise
        return Wish(bundle, variant, pause, slow, choice)

    def _on_gpu(self, config: ModelConfig) -> bool:
        choice = self._choices.get(config.name)
        return choice is not None and choice.backend == "tensorrt"

    def is_new(self, model: str, choice: Choice) -> bool:
        """Whether this runs other plans than those in force, or by another backend."""
        now = self._choices.get(model)
        return now is None or (now.backend, now.plans) != (choice.backend, choice.plans)

    def taken(self, model: str, wish: Wish) -> None:
        """This runs from now on; what it still lacks is to be built."""
        choice = wish.choice
        with self._lock:
            before = self._choices.get(model)
            self._choices[model] = choice
            self._unbuilt.pop(model, None)
            self._models |= _onnx(wish.bundle)
        if choice.reason is not None and (before is None or before.reason != choice.reason):
            log.info("model %s runs on %s: %s", model, choice.backend, choice.reason)
        if self._want is not None:
            self._want(model, choice.needs)

    def waits(self, model: str, bundle: Bundle, missing: PlanMissing) -> None:
        """It cannot run before these are built."""
        with self._lock:
            self._choices.pop(model, None)
            self._models |= _onnx(bundle)
        log.warning("model %s waits: %s", model, missing.message)
        self.begin(model, missing)

    def begin(self, model: str, missing: PlanMissing) -> None:
        """Have these built, while it runs what it runs."""
        if self._want is not None:
            self._want(model, missing.needs)

    def failed(self, model: str, what: str) -> None:
        """A plan that it wants cannot be had, in words; until it wants another."""
        with self._lock:
            self._unbuilt[model] = f"model {model}: {what}"

    def reason(self, model: str) -> str | None:
        """Why it does not run on the plan that it wants; None where it does, or nothing was chosen for it."""
        with self._lock:
            choice, unbuilt = self._choices.get(model), self._unbuilt.get(model)
        if unbuilt is not None:
            return unbuilt.removeprefix(f"model {model}: ")
        return None if choice is None else choice.reason

    def alarms(self) -> list[str]:
        """What is not as it was wanted."""
        with self._lock:
            return list(self._unbuilt.values())

    def collect(self) -> None:
        """Remove plans that no model needs any more. Raises nothing: what cannot be removed is removed later."""
        if self._maker is None or not self._engines.has_gpu:
            return
        with self._lock:
            needed = {Path(each).parent.name for choice in self._choices.values() for each in choice.plans}
            models = set(self._models)
        store = self._maker.store
        try:
            with store.building():
                for key in store.collect(needed, models):
                    log.info("plan %s is no longer needed and was removed from the store", key[:12])
        except (EdgeError, OSError) as error:
            log.info("plans that are no longer needed stay for now: %s", error)


def _onnx(bundle: Bundle) -> set[str]:
    return {bundle.artefact(name, "tensorrt").sha256 for name in bundle.variants_for("tensorrt")}
