"""Which backend runs a model now, and why; and its engines loaded by it.

`backend = "auto"`: TensorRT where it is here and the store has plans of all the variants that are wanted; else ONNX
Runtime, and what is missing is to be built. `"tensorrt"`: that or nothing. A ladder is of one backend.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edge_runtime.app.building import AUTO_BATCH, Need, PlanMaker, with_core_of
from edge_runtime.app.models import ladder_of
from edge_runtime.config import ModelConfig
from edge_runtime.engine.bundle import Bundle
from edge_runtime.engine.manifest import Backend
from edge_runtime.engine.onnxrt import load_engine
from edge_runtime.engine.onnxrt_cache import SessionCache
from edge_runtime.engine.protocol import Engine
from edge_runtime.engine.tensorrt.gpu import Gpu
from edge_runtime.engine.tensorrt.plans import Lookup
from edge_runtime.engine.tensorrt.probe import Here
from edge_runtime.errors import EngineError

log = logging.getLogger(__name__)

KERNELS = "kernels"
"""The folder of compiled kernels, in the store."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What runs a model. `reason`: why it is not the plan that was wanted, None where it is. `needs`: what to build.
    `plans`: the files of the plans that run, in the ladder's order."""

    backend: Backend
    reason: str | None = None
    needs: tuple[Need, ...] = ()
    plans: tuple[str, ...] = ()


ON_CPU = Choice("onnxruntime")


class PlanMissing(EngineError):
    """Nothing can run a model before its plans are built: `needs`."""

    default_code = "plan_missing"

    def __init__(self, message: str, where: str, needs: tuple[Need, ...]) -> None:
        remedy = "wait until it is built, or build it by hand: edge-runtime build BUNDLE"
        super().__init__(message, where=where, remedy=remedy, retryable=True)
        self.needs = needs


class Engines:
    """Chooses backends and loads engines. Any thread, but for `stop`.

    `maker` finds plans; `open_gpu` is called once, when TensorRT is first wanted. Without them there is ONNX Runtime
    alone. `sessions`: where it keeps what it optimised.
    """

    def __init__(
        self,
        maker: PlanMaker | None = None,
        open_gpu: Callable[[], Gpu] | None = None,
        sessions: SessionCache | None = None,
    ) -> None:
        self._maker = maker
        self._sessions = sessions
        self._open_gpu = open_gpu
        self._lock = threading.Lock()
        self._gpu: Gpu | None = None
        self._lack: EngineError | None = None

    @property
    def has_gpu(self) -> bool:
        """Whether TensorRT has been opened."""
        return self._gpu is not None

    def gpu(self) -> Gpu:
        """TensorRT and the GPU; opened now where it was not before. Raises EngineError, again and again."""
        with self._lock:
            if self._gpu is None and self._lack is None:
                self._open()
            if self._gpu is None:
                lack = self._lack
                assert lack is not None
                raise EngineError(lack.message, code=lack.code, where=lack.where, remedy=lack.remedy)
            return self._gpu

    def here(self) -> Here:
        """What this device is to a plan. Raises EngineError."""
        return self.gpu().here

    def choose(self, config: ModelConfig, bundle: Bundle, variant: str) -> Choice:
        """What runs a variant (or "auto") of the bundle now.

        Raises PlanMissing where nothing can before a plan is built, EngineError where `backend = "tensorrt"` cannot be
        had here, BundleError for a variant that is not there, EdgeError for a store that cannot be read.
        """
        if config.backend == "onnxruntime":
            return Choice("onnxruntime")
        runs_on_cpu = has(bundle, variant, "onnxruntime")
        if config.backend == "auto" and runs_on_cpu and self._open_gpu is None:
            return Choice("onnxruntime")
        if config.backend == "auto" and not has(bundle, variant, "tensorrt"):
            return Choice("onnxruntime", "the bundle has no file for TensorRT")
        try:
            here = self.here()
        except EngineError as error:
            if config.backend == "auto" and runs_on_cpu:
                return Choice("onnxruntime", error.message)
            raise
        found = [
            (Need(bundle, each, _most(config)), self._find(bundle, each, config))
            for each in ladder_of(bundle, config, variant, "tensorrt")
        ]
        needs = tuple(with_core_of(need, lookup) for need, lookup in found if not lookup.fits)
        changed = "; ".join(f"{need.variant}: {lookup.told}" for need, lookup in found if not lookup.fits)
        plans = tuple(str(lookup.plan.path) for _, lookup in found if lookup.plan is not None)
        if len(plans) == len(found):
            reason = f"its plan is built anew: {changed}" if needs else None
            return Choice("tensorrt", reason, needs, plans)
        missing = f"its plan for {here.device} has to be built: {changed}"
        if config.backend == "auto" and runs_on_cpu:
            return Choice("onnxruntime", missing, needs)
        raise PlanMissing(missing, config.name, needs)

    def plan(self, config: ModelConfig, bundle: Bundle, variant: str) -> Path:
        """The file of the plan that `load` would load. Raises PlanMissing, EdgeError."""
        lookup = self._find(bundle, variant, config)
        if lookup.plan is None:
            raise PlanMissing(f"{variant}: {lookup.told}", config.name, (Need(bundle, variant, _most(config)),))
        return lookup.plan.path

    def load(self, config: ModelConfig, bundle: Bundle, variant: str, backend: Backend) -> Engine:
        """An engine, loaded and warm. Raises as the backends' loaders and `plan` do."""
        if backend == "onnxruntime":
            return load_engine(bundle, variant, cache=self._sessions)
        plan = self.plan(config, bundle, variant)
        return self.gpu().load(bundle, variant, plan, letterbox=config.letterbox)

    def stop(self, deadline_s: float) -> list[str]:
        """Let the GPU go; once no engine is left. The name of its thread where that did not end."""
        gpu = self._gpu
        return [] if gpu is None else gpu.stop(deadline_s)

    def _find(self, bundle: Bundle, variant: str, config: ModelConfig) -> Lookup:
        assert self._maker is not None  # without it there is no GPU either
        return self._maker.find(Need(bundle, variant, _most(config)), self.here())

    def _open(self) -> None:
        if self._open_gpu is None or self._maker is None:
            self._lack = EngineError("this process runs models on ONNX Runtime alone", code="no_backend")
            return
        try:
            self._gpu = self._open_gpu()
        except EngineError as error:
            self._lack = error.with_traceback(None)
            log.info("there is no TensorRT here: %s", error)


def has(bundle: Bundle, variant: str, backend: Backend) -> bool:
    """Whether the bundle has a file of the variant ("auto": of any) for this backend."""
    names = bundle.variants_for(backend)
    return bool(names) if variant == "auto" else variant in names


def _most(config: ModelConfig) -> int:
    return config.max_batch if isinstance(config.max_batch, int) else AUTO_BATCH
