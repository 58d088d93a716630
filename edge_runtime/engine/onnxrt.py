"""ONNX Runtime on the CPU: the one door to `onnxruntime` on the frame's way.

One session per engine, shared by all its lanes; every lane runs on the thread that calls it. Measured on two
cores with two lanes (yolox_nano_416 / centernet_416, onnxruntime 1.32): sessions of their own were not faster
(both within the noise) and cost 5 / 20 MB more; the memory pattern cost 4 / 20 MB and brought nothing; without
the CPU arena the peak rose by 28 / 150 MB. So: shared, arena on, memory pattern off.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edge_runtime.engine.bundle import Bundle
from edge_runtime.engine.manifest import Backend
from edge_runtime.engine.modelfile import foreign_model, plain_message, refused_model
from edge_runtime.engine.onnxrt_cache import SessionCache
from edge_runtime.engine.protocol import EngineInfo, InputBuffer
from edge_runtime.engine.session_check import DTYPES, output_shapes
from edge_runtime.errors import BundleError, EdgeError, EngineError
from edge_runtime.records.frames import InputArray
from edge_runtime.vision.decode import build_decoder

__all__ = ["OnnxRuntimeEngine", "OnnxRuntimeLane", "load_engine", "open_session"]

log = logging.getLogger(__name__)

BACKEND: Backend = "onnxruntime"
_ALIGNMENT = 64
_MAX_BOUND = 64
_SETTINGS: Mapping[str, Any] = {
    "intra_op_num_threads": 1,
    "inter_op_num_threads": 1,
    "execution_mode": ort.ExecutionMode.ORT_SEQUENTIAL,
    "enable_cpu_mem_arena": True,
    "enable_mem_pattern": False,
    "log_severity_level": 4,
}
_ENTRIES: Mapping[str, str] = {
    "session.intra_op.allow_spinning": "0",
    "session.inter_op.allow_spinning": "0",
    # Weights in a second file would not be covered by the bundle's sha256. By default they would be looked for
    # in the working directory; below a device file nothing can exist.
    "session.model_external_initializers_file_folder_path": "/dev/null",
}

# Building sessions concurrently is reported racy; running them is not.
_building = threading.Lock()
# What is wrong becomes an exception of ours; the library's own lines on standard error only repeat it.
ort.set_default_logger_severity(4)


def open_session(model: bytes, where: str, cache: SessionCache | None = None, *, sha256: str | None = None) -> Any:
    """An onnxruntime.InferenceSession over the model's bytes: one thread, CPU provider. `where` names the file.

    cache: where the model as it is optimised for this CPU is found, or put for the next time. The session is then made
    of that in either case: what one process has proved is what another runs. `sha256` of the model, 64 hex digits,
    where it is known already; else it is computed for the cache.

    Raises BundleError (code "model_invalid", "model_unsupported" or "model_external_data").
    """
    if (refusal := foreign_model(model, where)) is not None:
        raise refusal
    session = None
    if cache is not None:
        session = _cached_session(model, sha256 or hashlib.sha256(model).hexdigest(), where, cache)
    if session is None:
        session = _session(model, _options(), where)
    if session.get_providers() != ["CPUExecutionProvider"]:
        raise EngineError(f"runs on {session.get_providers()}, not on the CPU provider", where=where)
    return session


def _cached_session(model: bytes, sha256: str, where: str, cache: SessionCache) -> Any:
    """A session of the optimised model; None where there is none to be had, for whatever reason: one of `model` itself
    is then to be made, which says what is wrong with it."""
    library = _library()
    plain: list[Any] = []

    def make(path: Path) -> None:
        options = _options()
        options.optimized_model_filepath = str(path)
        plain.append(_session(model, options, where))

    optimised = cache.find(sha256, library)
    try:
        if optimised is None and (optimised := cache.keep(sha256, len(model), library, make)) is None:
            return plain.pop() if plain else None
    except BundleError as error:
        # the library does not tell a disk that takes nothing from a model that is wrong
        log.info("no optimised model of %s is kept: %s", where, error.message)
        return None
    options = _options()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    plain.clear()
    try:
        return _session(optimised, options, where)
    except BundleError as error:
        log.warning("what was kept of %s cannot be used: %s", where, error.message)
        cache.drop(sha256, library)
        return None


def _library() -> str:
    """What an optimised model depends on besides the model and the CPU: this very build, and how it is told to work."""
    return "\n".join((f"onnxruntime {ort.__version__}", ort.get_build_info(), *map(repr, (_SETTINGS, _ENTRIES))))


def _options() -> Any:
    options = ort.SessionOptions()
    for name, value in _SETTINGS.items():
        setattr(options, name, value)
    for name, entry in _ENTRIES.items():
        options.add_session_config_entry(name, entry)
    return options


def _session(model: bytes, options: Any, where: str) -> Any:
    try:
        with _building:
            return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # noqa: BLE001  its exceptions have no other common base
        raise refused_model(error, where, f"onnxruntime {ort.__version__}") from None


@dataclass(slots=True)
class _Bound:
    """Input and outputs of one (buffer, count), bound once. Holds the arrays whose addresses the binding has."""

    binding: Any
    source: InputArray
    outputs: Mapping[str, NDArray[Any]]


class OnnxRuntimeLane:
    """One execution context. The run happens in `collect`, on the calling thread, without the GIL."""

    def __init__(self, engine: OnnxRuntimeEngine) -> None:
        self._engine = engine
        self._outputs: dict[str, NDArray[Any]] = {}
        self._bound: dict[tuple[int, int], _Bound] = {}
        self._pending: tuple[InputBuffer, int] | None = None

    def submit(self, buffer: InputBuffer, count: int) -> None:
        """Note a run over the first `count` places of the buffer.

        Raises EngineError: engine closed, a run not collected yet, a buffer of another engine's shape, or a
        batch size that the engine cannot run.
        """
        engine = self._engine
        engine.session()
        if self._pending is not None:
            raise EngineError("a lane was given a second run before the first was collected", code="engine_state")
        array = buffer.array
        spec = engine.info.input
        if array.shape[1:] != spec.shape or array.dtype != spec.dtype or not array.flags.c_contiguous:
            raise EngineError(
                f"a buffer of {array.dtype} {list(array.shape)} is not one of this engine's", code="buffer"
            )
        allowed = engine.allowed_batches
        if not 1 <= count <= array.shape[0] or (allowed is not None and count not in allowed):
            can = "any size" if allowed is None else f"batches of {', '.join(map(str, allowed))}"
            raise EngineError(
                f"a batch of {count} in a buffer of {array.shape[0]} cannot be run: the model takes {can}", code="batch"
            )
        self._pending = (buffer, count)

    def collect(self) -> Mapping[str, NDArray[Any]]:
        """Run what was submitted: output name -> [count, ...], the lane's own arrays, valid until its next run.

        Raises EngineError: nothing submitted, engine closed, or the run failed.
        """
        if self._pending is None:
            raise EngineError("nothing was submitted to this lane", code="engine_state")
        (buffer, count), self._pending = self._pending, None
        session = self._engine.session()  # held here: a close in between only takes effect after this run
        if self._engine.outputs_fixed:
            bound = self._bind(session, buffer, count)
            try:
                session.run_with_iobinding(bound.binding)
                return bound.outputs
            except Exception:  # noqa: BLE001, S110  see open_session; run anew below, where a real fault shows again
                pass
        return self._run_unbound(session, buffer, count)

    def _run_unbound(self, session: Any, buffer: InputBuffer, count: int) -> Mapping[str, NDArray[Any]]:
        """Run with outputs that the library allocates: for models whose outputs' shapes depend on the picture."""
        engine = self._engine
        try:
            results = session.run(None, {engine.input_name: buffer.array[:count]})
        except Exception as error:  # noqa: BLE001  see open_session
            raise EngineError(
                f"inference failed: {plain_message(error)}", where=engine.where, code="inference_failed"
            ) from None
        outputs = dict(zip(engine.output_types, results, strict=True))
        for name, array in outputs.items():
            if array.shape[:1] != (count,):
                message = f"output {name!r} is {list(array.shape)} for a batch of {count}"
                raise EngineError(message, where=engine.where, code="output_mismatch")
            if array.shape[1:] != engine.info.output_shapes[name][1:]:
                engine.outputs_fixed = False
                self.forget()
        return outputs

    def _bind(self, session: Any, buffer: InputBuffer, count: int) -> _Bound:
        key = (id(buffer.array), count)  # the entry holds the array, so that its id stays its own
        bound = self._bound.get(key)
        if bound is not None:
            return bound
        engine = self._engine
        if len(self._bound) >= _MAX_BOUND:
            self._bound.clear()
        outputs = {name: self._output(name, count, shape) for name, shape in engine.info.output_shapes.items()}
        source = buffer.array[:count]
        binding = session.io_binding()
        binding.bind_input(engine.input_name, "cpu", 0, source.dtype.type, source.shape, source.ctypes.data)
        for name, array in outputs.items():
            binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        bound = self._bound[key] = _Bound(binding, buffer.array, outputs)
        return bound

    def _output(self, name: str, count: int, shape: tuple[int, ...]) -> NDArray[Any]:
        """The first `count` places of the lane's one array for this output, grown where it is too small."""
        whole = self._outputs.get(name)
        if whole is None or whole.shape[0] < count:
            whole = self._outputs[name] = np.zeros((count, *shape[1:]), self._engine.output_types[name])
            # Bindings to the smaller array stay right, and would keep its memory.
            self._bound = {key: bound for key, bound in self._bound.items() if name not in bound.outputs}
        return whole[:count]

    def forget(self, array: InputArray | None = None) -> None:
        """Drop what is bound to an input array, or everything. Called by the engine."""
        if array is None:
            self._bound, self._outputs = {}, {}
            return
        self._bound = {key: bound for key, bound in self._bound.items() if bound.source is not array}


class OnnxRuntimeEngine:
    """A model in an ONNX Runtime session on the CPU; made by `load_engine`. Lanes may run concurrently."""

    def __init__(self, session: Any, info: EngineInfo, batch: int | None, where: str) -> None:
        self._session: Any = session
        self._info = info
        self._batches = None if batch is None else (batch,)
        self._lanes: list[OnnxRuntimeLane] = []
        self._buffers = 0
        self._lock = threading.Lock()
        self.where = where
        self.input_name: str = session.get_inputs()[0].name
        self.output_types = {output.name: DTYPES[output.type] for output in session.get_outputs()}
        self.outputs_fixed = True  # until a picture gives another shape than the warm-up did

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def allowed_batches(self) -> tuple[int, ...] | None:
        return self._batches

    def session(self) -> Any:
        """The session. Raises EngineError (code "engine_closed") after `close`."""
        session = self._session
        if session is None:
            raise EngineError("the engine is closed", code="engine_closed", where=self.where)
        return session

    def open_lane(self) -> OnnxRuntimeLane:
        """A new lane. Raises EngineError after `close`."""
        self.session()
        lane = OnnxRuntimeLane(self)
        with self._lock:
            self._lanes.append(lane)
        return lane

    def allocate(self, max_batch: int) -> InputBuffer:
        """[max_batch, *spec.shape] zeros of `spec.dtype` at a 64-byte boundary. Raises EngineError after `close`."""
        self.session()
        if max_batch < 1:
            raise EngineError(f"a buffer of {max_batch} places cannot be made", code="batch")
        spec = self._info.input
        shape = (max_batch, *spec.shape)
        size = int(np.prod(shape)) * spec.dtype.itemsize
        raw = np.zeros(size + _ALIGNMENT, np.uint8)  # pages that are never written cost nothing
        start = -raw.ctypes.data % _ALIGNMENT
        array = raw[start : start + size].view(spec.dtype).reshape(shape)
        with self._lock:
            self._buffers += 1
            return InputBuffer(self._buffers - 1, array)

    def release(self, buffer: InputBuffer) -> None:
        """Let go of a buffer: its memory is freed with the caller's last reference."""
        with self._lock:
            lanes = list(self._lanes)
        for lane in lanes:
            lane.forget(buffer.array)

    def close(self) -> None:
        """Free session, lanes' arrays and bindings; idempotent. A run in progress ends first, then frees its own."""
        with self._lock:
            lanes, self._lanes = self._lanes, []
        for lane in lanes:
            lane.forget()
        self._session = None
        _give_memory_back()


def load_engine(
    bundle: Bundle,
    variant: str = "auto",
    *,
    opened: Callable[[], None] = lambda: None,
    cache: SessionCache | None = None,
) -> OnnxRuntimeEngine:
    """Load a variant of a verified bundle and warm it up: one inference proves its shapes and its layout.

    `opened` is called between the two. `cache`: see `open_session`.

    Raises BundleError when the artefact changed, cannot be loaded, takes other pictures than the bundle says,
    answers with NaN, or does not fit the declared output layout.
    """
    table = bundle.variant(variant, BACKEND)
    artefact = bundle.artefact(table.name, BACKEND)
    where = str(artefact.path)
    spec, output = bundle.input_spec(table.name), bundle.output_spec()
    # The bytes live only in this expression: the session has its own copy of what it needs.
    session = open_session(bundle.read_artefact(table.name, BACKEND), where, cache, sha256=artefact.sha256)
    opened()
    shapes, batch = output_shapes(session, spec, where)
    try:
        build_decoder(output, spec, shapes)
    except EdgeError as error:
        raise BundleError(error.message, code=error.code, where=where, remedy=error.remedy) from None
    info = EngineInfo(
        digest=bundle.engine_digest(table.name, BACKEND),
        bundle=bundle.digest,
        variant=table.name,
        backend=BACKEND,
        precision=table.precision,
        input=spec,
        output=output,
        output_shapes=shapes,
    )
    _give_memory_back()
    return OnnxRuntimeEngine(session, info, batch, where)


def _give_memory_back() -> None:
    """Return what parsing and closing a model freed: glibc keeps it, 11 MB after a load and 30 to 70 after a close."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl has not
    if trim is not None:
        trim(0)
