"""The GPU of this process, opened once: TensorRT, the thread that owns CUDA, and what this device is to both."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edge_runtime.engine.bundle import Bundle
from edge_runtime.engine.tensorrt.api import TensorRt
from edge_runtime.engine.tensorrt.cuda import Cuda, open_cuda
from edge_runtime.engine.tensorrt.owner import GpuOwner
from edge_runtime.engine.tensorrt.plan import read_sidecar
from edge_runtime.engine.tensorrt.probe import Here, import_tensorrt, look, require_driver
from edge_runtime.engine.tensorrt.runtime import BACKEND, TensorRtEngine, load_plan
from edge_runtime.engine.tensorrt.scaler import Letterbox, Scaler
from edge_runtime.errors import EngineError

log = logging.getLogger(__name__)

_STOP_S = 5.0


@dataclass(frozen=True, slots=True)
class Gpu:
    """Made by `open_gpu`. `here`: what a plan has to be built for to run on it. `scaler`: None where nothing is to be
    scaled on it."""

    trt: TensorRt
    owner: GpuOwner
    here: Here
    scaler: Scaler | None = None

    def load(
        self,
        bundle: Bundle,
        variant: str,
        plan: Path,
        *,
        letterbox: Letterbox = "auto",
        opened: Callable[[], None] = lambda: None,
    ) -> TensorRtEngine:
        """An engine of the plan in this file, whose sidecar lies beside it. Raises as runtime.load_plan and
        Scaler.kernel_for do, and EngineError (code "plan_sidecar", or "plan_unreadable")."""
        sidecar = read_sidecar(plan)
        started = time.monotonic()
        try:
            data = plan.read_bytes()
        except OSError as error:
            raise EngineError(
                f"the plan cannot be read: {error.strerror}",
                code="plan_unreadable",
                where=str(plan),
                remedy="check owner and rights, and the disk (dmesg), or build it again: edge-runtime build BUNDLE",
            ) from None
        kernel = None
        if self.scaler is not None:
            spec = bundle.input_spec(bundle.variant(variant, BACKEND).name)
            kernel = self.scaler.kernel_for(spec, letterbox, f"{bundle.name} {variant}")
        engine = load_plan(
            self.owner,
            self.trt,
            bundle,
            variant,
            data,
            sidecar,
            here=self.here,
            where=str(plan),
            kernel=kernel,
            opened=opened,
        )
        if kernel is not None:
            log.info("%s %s: pictures larger than its input are scaled on the GPU", bundle.name, variant)
        told = ", ".join(f"{step} {took_s:.2f} s" for step, took_s in engine.timings_s.items())
        log.info("%s %s: plan loaded in %.2f s (%s)", bundle.name, variant, time.monotonic() - started, told)
        return engine

    def free_bytes(self) -> int:
        """Memory of the GPU that is free. Raises EngineError."""
        return self.owner.call(self.owner.cuda.memory)[0]

    def is_integrated(self) -> bool:
        """Whether it shares its memory with the CPU, as on every Jetson. Raises EngineError."""
        return self.owner.call(self.owner.cuda.integrated)

    def stop(self, deadline_s: float = _STOP_S) -> list[str]:
        """End the thread; its name where it did not end. Idempotent."""
        return self.owner.stop(deadline_s)


def open_gpu(
    on_fatal: Callable[[str], None] | None = None,
    root: Path = Path("/"),
    *,
    kernels: Path | None = None,
    open_door: Callable[[], Cuda] = open_cuda,
) -> Gpu:
    """TensorRT and the GPU, ready to load plans. `on_fatal`: see owner.GpuOwner. `root`: see probe.look. `kernels`: a
    folder for compiled kernels; without it nothing is scaled on the GPU. `open_door`: gives a door that is not started.

    Raises EngineError: "tensorrt_missing", "tensorrt_old", "no_gpu_driver", "cuda_missing", and what CUDA says.
    """
    trt = import_tensorrt()
    require_driver()
    owner = GpuOwner(open_door(), on_fatal)
    owner.start()
    try:
        here = owner.call(lambda: look(trt, owner.cuda, root))
    except BaseException:
        owner.stop(_STOP_S)
        raise
    log.info(
        "TensorRT %s on %s (compute capability %s, driver for CUDA %s, L4T %s) through %s",
        here.tensorrt,
        here.device,
        here.compute_capability,
        here.driver,
        here.l4t or "none",
        owner.cuda.name,
    )
    return Gpu(trt, owner, here, None if kernels is None else Scaler(owner, here, kernels))
