"""`device-check`: the checks that need a real device, in order, and what each would do where there is none."""

from __future__ import annotations

import tempfile
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from edge_runtime.app.building import PLANS, Need, PlanMaker
from edge_runtime.app.device_check_children import CHECK_WITHIN_S, Job, carry_out_job
from edge_runtime.app.device_check_host import CHECKS, Host
from edge_runtime.app.device_check_report import CheckSkipped, Found, Outcome, carry_out
from edge_runtime.app.engines import KERNELS
from edge_runtime.app.proof import prove
from edge_runtime.engine.bundle import Bundle
from edge_runtime.engine.tensorrt.build import OnProgress
from edge_runtime.engine.tensorrt.plans import PlanStore
from edge_runtime.engine.tensorrt.probe import Here
from edge_runtime.errors import EdgeError
from edge_runtime.hardware.memory import available_bytes

WOULD: Mapping[str, str] = {
    "versions": "say which JetPack, TensorRT, driver, libraries, module and power mode these are",
    "sensors": "read the module's power and temperature from every source",
    "gstreamer": "look for the elements of the hardware's decoder, its converter and CSI cameras",
    "memory": "compare the memory that is free with what a build takes",
    "plan": "build the variant's plan, or take the one that the store has, and prove it with the golden pictures",
    "load": "load the plan, warm it up, run and close it",
    "parity": "compare its answers with ONNX Runtime's on the golden pictures",
    "reloads": "load and close it many times, and see whether memory stays",
    "stall": "measure how long Python's other threads stand still while a plan is deserialised",
    "threads": "run several lanes at once, and compare their answers with those they give alone",
    "shares": "measure what part of a run is copied, launched and computed",
    "buffers": "compare input that is copied to the GPU with input that it reads in place",
    "letterbox": "compile the scaling kernel, compare it with numpy, and measure it against the CPU",
    "graphs": "capture CUDA graphs through cuda.bindings, and compare their answers with plain runs",
    "dla": "build a plan for DLA core 0 where TensorRT can, run it and compare its answers",
}
"""Every check, in order, and what it does."""
_ON_GPU = ("load", "parity", "reloads", "stall", "threads", "shares", "buffers", "letterbox")
_BINDINGS = "cuda.bindings"


@dataclass(frozen=True, slots=True)
class DeviceCheck:
    """What is checked. `store` is a folder that can be written; its plan is used where it has one that fits.

    `host` stands in for where the checks without a GPU look. `on_progress` hears of builds.
    """

    bundle: Bundle
    variant: str
    store: Path
    here: Here
    reloads: int
    host: Host | None = None
    on_progress: OnProgress | None = None
    within_s: float = CHECK_WITHIN_S

    def run(self) -> Generator[Outcome, None, None]:
        """Carry out every check; each outcome as it comes. A check that fails stops none of the others.

        Where this is closed or interrupted, no process is left.
        """
        for name, check in CHECKS.items():
            yield carry_out(name, partial(check, self._host()))
        plans: list[Path] = []
        yield carry_out("plan", partial(self._plan, plans))
        if plans:
            yield from carry_out_job(self._job(_ON_GPU, plans[0]), within_s=self.within_s)
            graphs = replace(self._job(("graphs",), plans[0]), door=_BINDINGS)
            yield from carry_out_job(graphs, within_s=self.within_s)
        else:
            for name in (*_ON_GPU, "graphs"):
                yield Outcome(name, "skipped", "there is no plan to run")
        yield from self._on_dla()

    def _host(self) -> Host:
        if self.host is not None:
            return self.host
        onnx = self.bundle.artefact(self.variant, "tensorrt").path
        return Host(self.here, onnx.stat().st_size)

    def _job(self, checks: tuple[str, ...], plan: Path, variant: str | None = None) -> Job:
        return Job(checks, self.bundle, variant or self.variant, plan, self.store / KERNELS, self.reloads)

    def _plan(self, plans: list[Path]) -> Found:
        made = self._maker(self.store).make(Need(self.bundle, self.variant), self.here, on_progress=self.on_progress)
        plans.append(made.plan.path)
        numbers: dict[str, object] = {
            "how": made.how,
            "bytes": made.plan.sidecar.plan_bytes,
            "batches": list(made.plan.sidecar.batches),
        }
        if made.facts is None or made.proof is None:
            return Found("the store has one that fits", numbers)
        numbers |= {"build_s": made.facts.build_s, "peak_bytes": made.facts.peak_bytes, "layers": made.facts.layers}
        return Found(f"built in {made.facts.build_s:.1f} s; {made.proof.golden}", numbers)

    def _on_dla(self) -> Iterator[Outcome]:
        # in a folder of its own: in the daemon's store the daemon would take it
        with tempfile.TemporaryDirectory(prefix="edge-runtime-dla-") as folder:
            plans: list[Path] = []
            half = [each.name for each in self.bundle.manifest.variant if each.precision == "fp16"]
            takes = self.bundle.variants_for("tensorrt")
            variant = next((name for name in half if name in takes), self.variant)
            outcome = carry_out("dla", partial(self._dla_plan, variant, Path(folder), plans))
            if not plans:
                yield outcome
                return
            yield from carry_out_job(self._job(("dla",), plans[0], variant), within_s=self.within_s)

    def _dla_plan(self, variant: str, folder: Path, plans: list[Path]) -> Found:
        need = Need(self.bundle, variant, 1, 0)
        try:
            made = self._maker(folder).make(need, self.here, on_progress=self.on_progress)
        except EdgeError as error:
            if error.code in ("dla_unsupported", "no_dla"):  # an Orin Nano has none
                raise CheckSkipped(error.message) from None
            raise
        plans.append(made.plan.path)
        return Found("built")

    def _maker(self, store: Path) -> PlanMaker:
        return PlanMaker(PlanStore(store / PLANS), prove=prove, free_bytes=available_bytes, nice=0)


@contextmanager
def writable_store(wanted: Path) -> Iterator[Path]:
    """The daemon's store where it can be written to, else a folder that is gone at the end."""
    try:
        wanted.mkdir(mode=0o750, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=wanted):
            pass
    except OSError:
        with tempfile.TemporaryDirectory(prefix="edge-runtime-check-") as folder:
            yield Path(folder)
        return
    yield wanted
