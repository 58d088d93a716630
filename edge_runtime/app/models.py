"""Models from the configuration: bundles verified, engines loaded and warmed up, lanes and batches decided."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from edge_runtime.bundled import SCHEME, bundled_engine
from edge_runtime.config import ModelConfig
from edge_runtime.engine.bundle import Bundle, load_bundle
from edge_runtime.engine.manifest import Backend
from edge_runtime.engine.onnxrt import load_engine
from edge_runtime.engine.protocol import Engine
from edge_runtime.engine.slot import Resident
from edge_runtime.errors import EdgeError, EngineError
from edge_runtime.records.governing import VariantSite
from edge_runtime.vision.decode import build_decoder
from edge_runtime.vision.pixels import fill_level

log = logging.getLogger(__name__)

BATCH_CANDIDATES = (2, 4, 8)
BATCH_GAIN = 1.2
"""A larger batch is taken where it brings at least this factor in frames per second: more than noise brings."""
_BATCH_RUNS = 5
_COST_RUNS = 3

Wrap = Callable[[Engine], Engine]
"""Makes an engine that answers what the given one does, otherwise: as slowly as a simulated module would."""

Load = Callable[[Bundle, str], Engine]
"""Makes an engine of a bundle's variant, warm; raises BundleError or EngineError."""


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def lanes_for(models: Sequence[ModelConfig]) -> dict[str, int]:
    """Lanes per model: as configured, else the cores shared out evenly, at least one each.

    n single-thread lanes beat one n-thread session on small networks, and more lanes than cores beat nobody.
    """
    auto = [model for model in models if model.lanes == "auto"]
    left = cores() - sum(model.lanes for model in models if isinstance(model.lanes, int))
    share, rest = divmod(max(len(auto), left), len(auto)) if auto else (0, 0)
    lanes = {}
    for model in models:
        if isinstance(model.lanes, int):
            lanes[model.name] = model.lanes
        else:
            lanes[model.name] = share + (1 if rest > 0 else 0)
            rest -= 1
    return lanes


def open_bundle(source: Path | str) -> Bundle:
    """The bundle that a configuration names: a folder, or `bundled:NAME`. Raises BundleError."""
    if isinstance(source, str) and source.startswith(SCHEME):
        return load_bundle(bundled_engine(source.removeprefix(SCHEME)))
    return load_bundle(Path(source))


def load_variant(
    bundle: Bundle,
    variant: str,
    config: ModelConfig,
    *,
    lanes: int,
    streams: int,
    wrap: Wrap | None = None,
    load: Load = load_engine,
) -> Resident:
    """A variant of the bundle loaded and warm, with lanes and buffers, for `streams` cameras.

    `wrap`: what is made of the engine before it runs frames. `load`: by which backend.
    Raises BundleError or EngineError; anything that a library may raise becomes one (code `load_failed`).
    """
    started = time.monotonic()
    try:
        engine = load(bundle, variant)
        try:
            info = engine.info
            decoder = build_decoder(info.output, info.input, info.output_shapes)
            # a matter of the engine alone, whatever clock a simulated module has now
            places = choose_batch(engine, config.max_batch, streams)
            engine = engine if wrap is None else wrap(engine)
            resident = Resident(engine, decoder, lanes=lanes, places=places, buffers=2 * lanes + 1)
        except BaseException:
            engine.close()
            raise
    except EdgeError:
        raise
    except Exception as error:
        log.exception("model %s could not be loaded", config.name)
        message = f"it could not be loaded: {error!r}"
        raise EngineError(message, where=config.name, code="load_failed") from error
    log.info(
        "model %s: %s %s on %s, lanes: %d, largest batch: %d, loaded and warm in %.2f s",
        config.name,
        info.variant,
        info.digest[:19],
        info.backend,
        lanes,
        resident.places,
        time.monotonic() - started,
    )
    return resident


def ladder_of(bundle: Bundle, config: ModelConfig, variant: str, backend: Backend = "onnxruntime") -> tuple[str, ...]:
    """The variants to keep loaded: `variant` (or what "auto" means), then the configured others that the bundle has."""
    first = bundle.variant(variant, backend).name
    has = bundle.variants_for(backend)
    return (first, *(each for each in config.ladder if each in has and each != first))


def run_cpu_s(resident: Resident) -> float:
    """CPU time in seconds of a run of one picture: what it takes from the cores, whatever else they do meanwhile, and
    whatever clock a simulated module has, which lets lanes sleep. With TensorRT the time of the run: the processors
    only wait for the GPU.

    Measured once: a lane lasts as long as its engine. Raises EngineError.
    """
    if resident.run_cpu_s is None:
        resident.run_cpu_s = _measure_cpu_s(resident)
    return resident.run_cpu_s


def _measure_cpu_s(resident: Resident) -> float:
    engine = resident.engine
    batch = resident.sizes[0]
    now = time.thread_time if engine.info.backend == "onnxruntime" else time.perf_counter
    buffer = engine.allocate(batch)
    try:
        fill_level(buffer.array, engine.info.input, 0.0)
        lane = engine.open_lane()
        times = []
        for _ in range(_COST_RUNS):
            start = now()
            lane.submit(buffer, batch)
            lane.collect()
            times.append(now() - start)
        return min(times) / batch
    finally:
        engine.release(buffer)


def measure(ladder: Sequence[Resident]) -> None:
    """Let it be known what a run of each costs, where there is a choice. Those that do not run stay unknown."""
    for each in ladder if len(ladder) > 1 else ():
        _try_measure(each)


def _try_measure(resident: Resident) -> None:
    try:
        run_cpu_s(resident)
    except EngineError as error:
        log.warning("what %s costs cannot be measured: %s", resident.info.variant, error)


def offered(ladder: Sequence[Resident], wanted: str) -> tuple[VariantSite, ...]:
    """The variants that can be switched to at once, of the bundle that runs: the wanted one first, then those that
    cost less, the lightest last. One whose cost is not known cannot be told to be lighter."""
    costs_s = {each.info.variant: each.run_cpu_s for each in ladder if each.info.bundle == ladder[0].info.bundle}
    if not costs_s:
        return (VariantSite(wanted),)
    first = wanted if wanted in costs_s else ladder[0].info.variant
    most_s = costs_s.pop(first)
    lighter = [(cost_s, name) for name, cost_s in costs_s.items() if cost_s and most_s and cost_s < most_s]
    return VariantSite(first, most_s), *(VariantSite(name, cost_s) for cost_s, name in sorted(lighter, reverse=True))


def choose_batch(engine: Engine, wanted: int | str, streams: int) -> int:
    """How many frames a batch may hold: as configured, or measured (`auto`).

    Measured on this engine, now: each candidate up to the number of cameras, as long as it brings
    BATCH_GAIN over the one before. On a CPU that usually ends at 1.
    """
    if isinstance(wanted, int):
        return wanted
    allowed = engine.allowed_batches
    best = 1 if allowed is None else allowed[0]
    candidates = BATCH_CANDIDATES if allowed is None else _doubling(allowed)
    if streams <= best:
        return best
    best_s = _seconds_per_frame(engine, best)
    for candidate in candidates:
        if candidate > max(streams, best):
            break
        seconds = _seconds_per_frame(engine, candidate)
        log.debug("batch of %d: %.2f ms a frame, batch of %d: %.2f", best, best_s * 1e3, candidate, seconds * 1e3)
        if seconds * BATCH_GAIN > best_s:
            break
        best, best_s = candidate, seconds
    return best


def _doubling(allowed: Sequence[int]) -> Sequence[int]:
    """Of the allowed sizes, ascending, those beyond the first that are at least twice the one before."""
    found = [allowed[0]]
    for size in allowed[1:]:
        if size >= 2 * found[-1]:
            found.append(size)
    return found[1:]


def _seconds_per_frame(engine: Engine, batch: int) -> float:
    buffer = engine.allocate(batch)
    try:
        fill_level(buffer.array, engine.info.input, 114.0)
        lane = engine.open_lane()
        times = []
        for _ in range(_BATCH_RUNS + 1):
            start = time.perf_counter()
            lane.submit(buffer, batch)
            lane.collect()
            times.append(time.perf_counter() - start)
        # the first run of a size plans its memory
        return min(times[1:]) / batch
    finally:
        engine.release(buffer)
