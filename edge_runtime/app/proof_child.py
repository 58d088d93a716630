"""The process in which `app.proof` proves a model: it loads, runs and times it, and says how far it came.

`python -m edge_runtime.app.proof_child ORDER`, where ORDER is a JSON object: `root`, `digest`, `variant`, `backend`,
`plan` (the path of a plan, for TensorRT), `sessions` (the folder of optimised models, or null), `lanes`, `places`,
`nice`, `parent` (the process id of who asks). On standard output comes a JSON object a line, with `stage` and
`resident_bytes`, as each stage begins; `picture` before each picture is run. The last line has either `proof`, what was
measured (`stage` "done"), or `kind` and `error`: the class and payload of an EdgeError.

Nothing heavy is imported before the first line, so that a start that fails is told from a model that does.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_runtime.children import Report, settle
from edge_runtime.errors import BundleError, EdgeError, EngineError, RefusedError
from edge_runtime.hardware.memory import peak_resident_bytes, resident_bytes

if TYPE_CHECKING:
    from edge_runtime.engine.bundle import Bundle
    from edge_runtime.engine.protocol import Engine
    from edge_runtime.engine.slot import Resident
    from edge_runtime.engine.tensorrt.gpu import Gpu
    from edge_runtime.records.frames import InputArray, Pixels
    from edge_runtime.records.spec import InputSpec

_PICTURES = ("the black picture", "the white picture", "noise", "more noise", "the last noise")
_RUNS = 5
_MORE_RUNS = 50
_MORE_RUNS_S = 0.5
"""Further runs are timed, up to this number and for this long: a small model's are over at once."""


class _Report(Report):
    def __call__(self, stage: str, **facts: object) -> None:
        self.line(stage, {"resident_bytes": resident_bytes(), **facts})

    def fail(self, error: EdgeError) -> None:
        self(self.stage, kind=type(error).__name__, error=error.as_payload())


def main() -> None:
    """Carry out the order in sys.argv[1]. Ends the process by itself: a library's own end can hang or crash."""
    order = json.loads(sys.argv[1])
    settle(order["nice"], order["parent"])
    report = _Report()
    report("starting")
    try:
        _prove(order, report)
    except EdgeError as error:
        report.fail(_judged(error, order["root"]))
    except MemoryError:
        remedy = "close other engines, or use a smaller variant"
        message = f"there was not enough memory ({report.stage})"
        report.fail(RefusedError(message, code="model_memory", where=order["root"], remedy=remedy, retryable=True))
    except Exception as error:  # noqa: BLE001  told to who asks, with the traceback in its log
        traceback.print_exc()
        message = f"the proof itself failed ({report.stage}): {error!r}"
        report.fail(EngineError(message, code="proof_failed", where=order["root"], remedy="report this as a fault"))
    os._exit(0)


def _judged(error: EdgeError, where: str) -> EdgeError:
    """The error as it is told: what ends all work on the GPU is a crash, and the model's fault."""
    if error.code != "gpu_fatal":
        return error
    remedy = "the engine before it stays in use; build the plan again, or export the model again"
    return RefusedError(f"the model crashed the GPU: {error.message}", code="model_crashed", where=where, remedy=remedy)


def _prove(order: Mapping[str, Any], report: _Report) -> None:
    from edge_runtime.engine.bundle import load_bundle
    from edge_runtime.engine.probe import probe
    from edge_runtime.engine.slot import Resident
    from edge_runtime.vision.decode import build_decoder

    report("verifying")
    bundle = load_bundle(Path(order["root"]))
    if bundle.digest != order["digest"]:
        raise BundleError(
            f"is another bundle than the one that was verified: {bundle.digest[:19]}, and not {order['digest'][:19]}",
            code="digest_mismatch",
            where=order["root"],
            remedy="somebody changed it meanwhile: try again when that is done",
            retryable=True,
        )
    variant = bundle.variant(order["variant"], order["backend"])
    # here, so that the memory of CUDA's own context is not counted as the model's: the daemon has one already
    gpu = _open_gpu(order)
    if variant.golden is not None:
        import edge_runtime.camera.av  # noqa: F401  here, so that its memory is not counted as the model's

    before = resident_bytes() or 0
    gpu_before = 0 if gpu is None else gpu.free_bytes()
    report("loading")
    start = time.monotonic()
    engine = _load(
        order, bundle, variant.name, gpu, lambda: report("running", picture="the grey picture that warms it up")
    )
    load_s = time.monotonic() - start
    info = engine.info
    decoder = build_decoder(info.output, info.input, info.output_shapes)
    resident = Resident(engine, decoder, lanes=order["lanes"], places=order["places"], buffers=order["lanes"])
    _run_all(resident, report, order["root"])
    growth = (resident_bytes() or 0) - before
    if gpu is not None and gpu.is_integrated():
        # what the driver allocates is in no process's resident memory, and missing there all the same
        growth = max(growth, gpu_before - gpu.free_bytes())
    peak = (peak_resident_bytes() or 0) - before

    report("golden")

    def read_image(path: Path) -> Pixels:
        from edge_runtime.camera.media import open_images

        report("golden", picture=f"the golden picture {path.name}")
        ((_, pixels),) = open_images([path])
        return pixels

    golden = probe(engine, resident.lanes[0], bundle, variant.name, read_image)
    times = _time(resident, report)
    report("closing")
    resident.close()
    facts = {
        "engine": info.digest,
        "variant": info.variant,
        "load_s": load_s,
        "batches": engine.allowed_batches,
        "memory_bytes": max(growth, 0),
        "peak_bytes": max(peak, growth, 0),
        "golden": str(golden),
    }
    report("done", proof={**facts, **times})


def _open_gpu(order: Mapping[str, Any]) -> Gpu | None:
    """The GPU, where the order is for TensorRT. Raises EngineError."""
    if order["backend"] != "tensorrt":
        return None
    from edge_runtime.engine.tensorrt.gpu import open_gpu

    if order["plan"] is None:
        raise EngineError("no plan was named to be proved", code="proof_failed", where=order["root"])
    return open_gpu()


def _load(
    order: Mapping[str, Any], bundle: Bundle, variant: str, gpu: Gpu | None, opened: Callable[[], None]
) -> Engine:
    """The engine. Raises as the backends' loaders do."""
    if gpu is not None:
        return gpu.load(bundle, variant, Path(order["plan"]), opened=opened)
    from edge_runtime.engine.onnxrt import load_engine
    from edge_runtime.engine.onnxrt_cache import SessionCache

    cache = None if order["sessions"] is None else SessionCache(Path(order["sessions"]))
    return load_engine(bundle, variant, opened=opened, cache=cache)


def _run_all(resident: Resident, report: _Report, where: str) -> None:
    """Run every kind of picture on all lanes at once, as in service: what they need at once is what they cost.

    Raises RefusedError (code "non_finite") and EngineError.
    """
    from concurrent.futures import ThreadPoolExecutor

    from edge_runtime.engine.probe import check_finite
    from edge_runtime.vision.geometry import plan

    spec = resident.info.input
    transform = plan(spec.width, spec.height, spec)
    count = resident.sizes[-1]

    def run(lane: int, picture: str) -> None:
        buffer = resident.free[lane]
        for place in range(count):
            _paint(buffer.array[place], picture, (lane, place), spec)
        resident.lanes[lane].submit(buffer, count)
        outputs = resident.lanes[lane].collect()
        check_finite(outputs, picture, where)
        for place in range(count):
            resident.decoder(outputs, place, transform)

    lanes = range(len(resident.lanes))
    with ThreadPoolExecutor(len(lanes)) as pool:
        for picture in _PICTURES:
            report("running", picture=picture)
            list(pool.map(run, lanes, [picture] * len(lanes)))


def _paint(place: InputArray, picture: str, seed: tuple[int, int], spec: InputSpec) -> None:
    """Fill a place (as `spec` declares it) with a picture, as preprocessing would give it."""
    import numpy as np

    from edge_runtime.camera.place import fill_picture
    from edge_runtime.vision.pixels import fill_level

    if picture in ("the black picture", "the white picture"):
        fill_level(place, spec, 0.0 if picture == "the black picture" else 255.0)
        return
    planes = np.random.default_rng((_PICTURES.index(picture), *seed)).integers(0, 256, spec.shape, np.uint8)
    if spec.pixel != "float32":  # any bytes are a picture
        place[:] = planes
        return
    whole = (slice(0, spec.height), slice(0, spec.width))
    fill_picture(place, list(planes), 1.0, spec, whole, whole)


def _time(resident: Resident, report: _Report) -> dict[str, float]:
    """Time runs of the smallest batch on one lane, while the other lanes rest."""
    lane, buffer, count = resident.lanes[0], resident.free[0], resident.sizes[0]
    wall_s: list[float] = []
    cpu_s: list[float] = []
    end = time.monotonic() + _MORE_RUNS_S
    while len(wall_s) < _RUNS or (len(wall_s) < _MORE_RUNS and time.monotonic() < end):
        report("timing", picture=f"the timed picture {len(wall_s) + 1}")
        cpu, wall = time.thread_time(), time.perf_counter()
        lane.submit(buffer, count)
        lane.collect()
        wall_s.append(time.perf_counter() - wall)
        cpu_s.append(time.thread_time() - cpu)
    # The processors only wait for a GPU, and while others have them, a median says more about those than about it.
    on_cpu = resident.info.backend == "onnxruntime"
    return {
        "inference_ms": statistics.median(wall_s) * 1e3,
        "slowest_ms": max(wall_s) * 1e3,
        "cpu_ms": (statistics.median(cpu_s) if on_cpu else min(wall_s)) * 1e3,
    }


if __name__ == "__main__":
    main()
