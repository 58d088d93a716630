"""An ONNX model into a plan, through TensorRT's builder. On one thread, with a CUDA context current on it.

One way for 10.3 to 11: the network is strongly typed, so that every precision is the ONNX's own: INT8 is its Q/DQ,
FP16 its casts. No flag and no calibrator adds to that.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from edge_runtime.engine.tensorrt.api import (
    TensorRt,
    TrtBuilder,
    TrtBuilderConfig,
    TrtHostMemory,
    TrtLogger,
    TrtNetwork,
    TrtParser,
    TrtProgressMonitor,
    TrtTimingCache,
)
from edge_runtime.engine.tensorrt.log import Lines
from edge_runtime.engine.tensorrt.onnxfile import OnnxFile
from edge_runtime.engine.tensorrt.preflight import FREE_MEMORY
from edge_runtime.errors import EdgeError, EngineError, RefusedError
from edge_runtime.records.spec import InputSpec

log = logging.getLogger(__name__)

OPTIMISATION_LEVEL = 3
"""TensorRT's own default: higher ones build for much longer, lower ones give slower engines."""
_NAMED = 10
"""So many nodes of an operator, and layers off the DLA, are named; of the others it is said how many."""
_UNKNOWN = re.compile(r"No importer registered for op|Plugin not found|UNSUPPORTED_NODE\b|[Uu]nsupported op", re.I)
_NO_KERNELS = re.compile(r"Target GPU SM \d+ is not supported|no kernel image is available", re.I)
_NO_MEMORY = re.compile(r"OutOfMemory|out of memory|insufficient (?:device )?memory|Requested size was", re.I)

OnProgress = Callable[[str, float], None]
"""Takes the phase and how much of it is done, 0-1. On TensorRT's threads."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the builder is told. `batches` ascend; `best` is the one that it is optimised for. `dram_bytes`: the most
    that a tactic may take while it is tried."""

    batches: tuple[int, ...]
    best: int
    workspace_bytes: int
    dram_bytes: int | None = None
    dla_core: int | None = None
    level: int = OPTIMISATION_LEVEL


@dataclass(frozen=True, slots=True)
class Built:
    """`plan` and `cache` (the timing cache) are TensorRT's bytes. `on_gpu`: layers that the DLA does not take.
    `notes`: what was not as it was wanted, in words."""

    plan: bytes
    cache: bytes | None
    on_gpu: tuple[str, ...]
    layers: int
    notes: tuple[str, ...]


class Network:
    """One build. `where` names the ONNX file. Its methods raise EdgeError in plain words, with what TensorRT said."""

    def __init__(self, trt: TensorRt, logger: TrtLogger, lines: Lines, where: str) -> None:
        self._trt = trt
        self._logger = logger
        self._lines = lines
        self._where = where

    def build(
        self, onnx: bytes, file: OnnxFile, spec: InputSpec, settings: Settings, cache: bytes, progress: OnProgress
    ) -> Built:
        """Parse and build. `cache`: a timing cache of before, or nothing.

        Raises RefusedError ("unknown_operators", "model_invalid", "no_sm", "build_memory", "no_dla") and EngineError
        ("build_failed", "tensorrt_failed").
        """
        trt, mark = self._trt, self._lines.mark()
        if not trt.init_libnvinfer_plugins(self._logger, ""):
            raise self._failed("TensorRT's own plugins cannot be loaded", mark, "tensorrt_failed")
        try:
            builder: TrtBuilder = trt.Builder(self._logger)
        except TypeError as error:  # the factory returns nothing
            raise self._failed(f"TensorRT's builder does not start ({error})", mark) from None
        flags = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        network = builder.create_network(flags)
        config = builder.create_builder_config()
        if network is None or config is None:
            raise self._failed("TensorRT's builder does not start", mark)
        # the weights are the parser's, and the network only points at them: it lives until the build is over
        parser = self._parse(network, onnx, file)
        self._configure(builder, network, config, spec, settings)
        notes: list[str] = []
        kept = self._with_cache(config, cache, notes)
        on_gpu = () if settings.dla_core is None else self._dla(builder, network, config, settings.dla_core)
        monitor = _monitor_class(trt)(Phases(progress))
        config.progress_monitor = monitor
        mark = self._lines.mark()
        memory: TrtHostMemory | None = builder.build_serialized_network(network, config)
        if memory is None:
            raise self._failed("TensorRT cannot build it", mark)
        plan = _bytes_of(memory)
        saved = None if kept is None else _bytes_of(kept.serialize())
        del parser
        return Built(plan, saved, on_gpu, int(network.num_layers), tuple(notes))

    # --- steps

    def _parse(self, network: TrtNetwork, onnx: bytes, file: OnnxFile) -> TrtParser:
        mark = self._lines.mark()
        parser: TrtParser = self._trt.OnnxParser(network, self._logger)
        parsed = parser.parse(onnx)
        count = int(parser.num_errors)
        if parsed and count == 0:
            return parser
        unknown: dict[tuple[str, str, int | None], list[str]] = {}
        other: list[str] = []
        domains = {node.operator: node.domain for node in file.nodes}
        for index in range(count):
            error = parser.get_error(index)
            words, operator, node = str(error.desc()), str(error.node_operator()), str(error.node_name())
            if _UNKNOWN.search(f"{words} {error.code()}"):
                operator = operator or words.rpartition(":")[2].strip()
                domain = domains.get(operator, "")
                unknown.setdefault((operator, domain, file.opset_of(domain)), []).append(node or "without a name")
            else:
                other.append(f"{operator} {node!r}: {words}" if operator else words)
        if unknown:
            raise RefusedError(
                f"TensorRT {self._trt.__version__} does not know {_operators(unknown)}",
                code="unknown_operators",
                where=self._where,
                remedy="export the model with standard operators of ONNX opset 13 to 17, or without these steps",
            )
        said = "; ".join(dict.fromkeys(other)) or self._lines.tail(mark)
        raise RefusedError(
            f"TensorRT {self._trt.__version__} cannot read it: {said}",
            code="model_invalid",
            where=self._where,
            remedy="export the model again, with fixed sizes where that can be",
        )

    def _configure(
        self, builder: TrtBuilder, network: TrtNetwork, config: TrtBuilderConfig, spec: InputSpec, settings: Settings
    ) -> None:
        trt, mark = self._trt, self._lines.mark()
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, settings.workspace_bytes)
        if settings.dram_bytes is not None:
            config.set_memory_pool_limit(trt.MemoryPoolType.TACTIC_DRAM, settings.dram_bytes)
        config.builder_optimization_level = settings.level
        if int(network.num_inputs) != 1:
            raise self._failed(f"TensorRT finds {network.num_inputs} inputs in it, and one picture is needed", mark)
        picture = network.get_input(0)
        shape = tuple(int(side) for side in picture.shape)
        if all(side >= 0 for side in shape):
            return
        low, best, high = (
            tuple(has if has >= 0 else wanted for has, wanted in zip(shape, (batch, *spec.shape), strict=True))
            for batch in (settings.batches[0], settings.best, settings.batches[-1])
        )
        profile = builder.create_optimization_profile()
        try:
            profile.set_shape(picture.name, low, best, high)
        except ValueError as error:
            raise self._failed(f"TensorRT does not take {low} to {high} for {picture.name!r} ({error})", mark) from None
        if int(config.add_optimization_profile(profile)) < 0:
            raise self._failed(f"TensorRT does not take a profile of {low} to {high}", mark)

    def _with_cache(self, config: TrtBuilderConfig, data: bytes, notes: list[str]) -> TrtTimingCache | None:
        """The timing cache in use; None where there can be none, which only costs time."""
        for each in dict.fromkeys((data, b"")):
            mark = self._lines.mark()
            try:
                cache: TrtTimingCache | None = config.create_timing_cache(each)
                if cache is not None and config.set_timing_cache(cache, False):
                    return cache
                reason = self._lines.tail(mark)
            except Exception as error:  # noqa: BLE001  of the library's own kinds; what it kept of old is not worth a build
                reason = repr(error)
            notes.append(f"the timing cache is not used: {reason}")
        return None

    def _dla(self, builder: TrtBuilder, network: TrtNetwork, config: TrtBuilderConfig, core: int) -> tuple[str, ...]:
        """Put the network on a DLA, with the GPU for what it does not take; returns the names of those layers."""
        trt, cores = self._trt, int(builder.num_DLA_cores)
        if core >= cores:
            has = f"has {cores} DLA cores, numbered from 0" if cores else "has no DLA"
            remedy = "leave --dla out: the GPU takes every variant" if not cores else f"use --dla 0 to {cores - 1}"
            raise RefusedError(f"this device {has}: there is no core {core}", code="no_dla", where="DLA", remedy=remedy)
        config.default_device_type = trt.DeviceType.DLA
        config.DLA_core = core
        config.set_flag(trt.BuilderFlag.GPU_FALLBACK)
        layers = [network.get_layer(index) for index in range(int(network.num_layers))]
        on_gpu = tuple(str(layer.name) for layer in layers if not config.can_run_on_DLA(layer))
        if len(on_gpu) == len(layers):
            raise RefusedError(
                f"the DLA takes none of its {len(layers)} layers: {named(on_gpu)}",
                code="dla_unsupported",
                where=self._where,
                remedy="leave --dla out: the GPU takes every variant",
            )
        return on_gpu

    def _failed(self, what: str, mark: int, code: str = "build_failed") -> EdgeError:
        """The error, in the words that fit what TensorRT said after `mark`."""
        said = "; ".join(self._lines.since(mark)) or self._lines.tail(mark)
        version, where = self._trt.__version__, self._where
        if _NO_KERNELS.search(said):
            return RefusedError(
                f"this TensorRT {version} was built without this device's GPU: {said}",
                code="no_sm",
                where="tensorrt",
                remedy="those from PyPI know no Jetson: take JetPack's apt packages and make the venv with "
                "--system-site-packages: docs/jetson.md has the packages",
            )
        if _NO_MEMORY.search(said):
            return RefusedError(
                f"there was too little memory to build it: {said}",
                code="build_memory",
                where=where,
                remedy=FREE_MEMORY,
                retryable=True,
            )
        remedy = "export the model again, or use another variant; the log has all that TensorRT said"
        return EngineError(f"{what}: {self._lines.tail(mark)}", code=code, where=where, remedy=remedy)


def _monitor_class(trt: TensorRt) -> Callable[[Phases], TrtProgressMonitor]:
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]  # the module is only known at run time
        def __init__(self, phases: Phases) -> None:
            trt.IProgressMonitor.__init__(self)  # without it, the first call crashes the process
            self._phases = phases

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self._phases.start(phase_name, parent_phase, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            self._phases.step(phase_name, step)
            return True

        def phase_finish(self, phase_name: str) -> None:
            self._phases.finish(phase_name)

    return Monitor


class Phases:
    """How much of a build is done, from what TensorRT tells of its phases, which lie in one another.

    Of those that have no other around them the one that goes on is told of. Raises nothing: TensorRT calls this.
    """

    def __init__(self, progress: OnProgress) -> None:
        self._progress = progress
        self._running: dict[str, tuple[str | None, int, int]] = {}

    def start(self, name: str, parent: str | None, steps: int) -> None:
        self._running[name] = (parent, max(1, int(steps)), 0)
        self._tell(name)

    def step(self, name: str, step: int) -> None:
        if (known := self._running.get(name)) is not None:
            self._running[name] = (known[0], known[1], int(step) + 1)
            self._tell(name)

    def finish(self, name: str) -> None:
        parent = self._running.pop(name, (None, 1, 0))[0]
        if parent is not None:
            self._tell(parent)

    def _tell(self, name: str) -> None:
        share, seen = 0.0, set()
        while (known := self._running.get(name)) is not None and name not in seen:
            seen.add(name)
            parent, steps, done = known
            share = min((done + share) / steps, 1.0)
            if parent is None or parent not in self._running:
                break
            name = parent
        try:
            self._progress(name, share)
        except Exception:  # nothing may be raised into TensorRT's own threads
            log.debug("a line of progress was lost", exc_info=True)


def named(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _operators(unknown: Mapping[tuple[str, str, int | None], Sequence[str]]) -> str:
    told = []
    for (operator, domain, opset), nodes in unknown.items():
        origin = f"{domain or 'ONNX'} opset {'unknown' if opset is None else opset}"
        told.append(f"the operator {operator} ({origin}; nodes: {named(nodes)})")
    return "; ".join(told)


def _bytes_of(memory: TrtHostMemory) -> bytes:
    return bytes(memoryview(memory))
