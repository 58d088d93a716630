"""Plans as engines: `load_plan` gives an Engine (see engine.protocol) whose lanes run on the thread "gpu"."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.engine.bundle import Bundle
from edge_runtime.engine.manifest import Backend
from edge_runtime.engine.protocol import EngineInfo, InputBuffer
from edge_runtime.engine.tensorrt.api import TensorRt, TrtEngine, TrtRuntime
from edge_runtime.engine.tensorrt.cuda import HostMemory, try_free
from edge_runtime.engine.tensorrt.lane import GpuLane
from edge_runtime.engine.tensorrt.letterbox import LetterboxKernel
from edge_runtime.engine.tensorrt.log import capture
from edge_runtime.engine.tensorrt.model import Model
from edge_runtime.engine.tensorrt.owner import GpuOwner
from edge_runtime.engine.tensorrt.pictures import PictureMemory, Pictures
from edge_runtime.engine.tensorrt.plan import Sidecar, verify
from edge_runtime.engine.tensorrt.probe import Here
from edge_runtime.engine.tensorrt.tensors import (
    check_declared,
    check_input,
    prove_outputs,
    read_batches,
    read_tensors,
)
from edge_runtime.errors import BundleError, EdgeError, EngineError
from edge_runtime.records.spec import InputSpec
from edge_runtime.vision.decode import build_decoder
from edge_runtime.vision.pixels import fill_level

log = logging.getLogger(__name__)

BACKEND: Backend = "tensorrt"
_GREY = 128.0
_BUILD = "build it on this device: edge-runtime build BUNDLE"


class TensorRtLane:
    """One execution context of an engine. When it is let go of, the next `open_lane` gets its context."""

    def __init__(self, engine: TensorRtEngine, lane: GpuLane) -> None:
        self._engine = engine
        self._lane = lane

    def submit(self, buffer: InputBuffer, count: int) -> None:
        """Enqueue a run over the first `count` places of the buffer; what goes wrong then is raised by `collect`.

        Raises EngineError: engine closed, a run not collected yet, a buffer that is not this engine's or was given
        back, a batch size that the engine cannot run, or a sticky error of the GPU.
        """
        engine = self._engine
        engine.require_open()
        if self._lane.running:
            raise EngineError("a lane was given a second run before the first was collected", code="engine_state")
        host, pictures = engine.memory_of(buffer)
        places = buffer.array.shape[0]
        if not 1 <= count <= places or count not in engine.allowed_batches:
            raise EngineError(
                f"a batch of {count} in a buffer of {places} cannot be run: the model takes batches of "
                f"{', '.join(map(str, engine.allowed_batches))}",
                code="batch",
            )
        self._lane.submit(host, buffer.array, count, () if pictures is None else pictures.begin_run(count))

    def collect(self) -> Mapping[str, NDArray[Any]]:
        """Wait for the run: output name -> [count, ...], the lane's own arrays, valid until its next run.

        Raises EngineError: nothing submitted, or the run failed; CudaFatal (code "gpu_fatal") where nothing on the GPU
        will work any more.
        """
        if not self._lane.running:
            raise EngineError("nothing was submitted to this lane", code="engine_state")
        return self._lane.collect()


class TensorRtEngine:
    """A plan, deserialised; made by `load_plan`. Lanes may run concurrently, each on a thread of its own.

    `remarks`: what changed since the plan was built, though it still runs. `timings_s`: how long its load took, by
    step; while "deserialize" lasted, TensorRT up to 10.10 let no other Python thread run. `kernel` scales pictures that
    are larger than the input, None where the CPU does.
    """

    def __init__(
        self,
        owner: GpuOwner,
        trt: TensorRt,
        where: str,
        *,
        prefer_mapped: bool,
        graphs: bool,
        kernel: LetterboxKernel | None = None,
    ) -> None:
        self.where = where
        self.remarks: tuple[str, ...] = ()
        self.timings_s: dict[str, float] = {}
        self._trt = trt
        self._owner = owner
        self._logger, self._lines = capture(trt)
        self._prefer_mapped = prefer_mapped
        self._graphs = graphs
        self._kernel = kernel
        self._picture_memory: PictureMemory | None = None
        self._mapped = False
        self._runtime: TrtRuntime | None = None
        self._engine: TrtEngine | None = None
        self._model: Model | None = None
        self._info: EngineInfo | None = None
        self._spec: InputSpec | None = None
        self._lanes: list[GpuLane] = []
        self._idle: deque[GpuLane] = deque()
        self._memory: dict[int, tuple[HostMemory, NDArray[Any], Pictures | None]] = {}
        self._buffers = 0
        self._places = 1
        self._lock = threading.Lock()
        self._closed = False

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None
        return self._info

    @property
    def allowed_batches(self) -> tuple[int, ...]:
        assert self._model is not None
        return self._model.batches.allowed

    @property
    def mapped(self) -> bool:
        """Whether the GPU reads input buffers where they are, without a copy."""
        return self._mapped

    @property
    def captured(self) -> bool:
        """Whether a lane of it runs by a CUDA graph now."""
        return any(lane.has_graph for lane in self._lanes)

    def require_open(self) -> None:
        """Raises EngineError (code "engine_closed") after `close`, CudaFatal after a sticky error."""
        self._owner.require_alive()
        if self._closed:
            raise EngineError("the engine is closed", code="engine_closed", where=self.where)

    def open_lane(self) -> TensorRtLane:
        """A new lane. Raises EngineError after `close`, and where its memory cannot be had."""
        self.require_open()
        try:
            gpu_lane = self._idle.popleft()
        except IndexError:
            gpu_lane = self._owner.call(self._make_lane)
        else:
            if gpu_lane.running:  # it was let go of with a run that nobody collected
                try:
                    gpu_lane.collect()
                except EngineError as error:
                    log.info("%s: a run that nobody collected failed: %s", self.where, str(error))
        lane = TensorRtLane(self, gpu_lane)
        # a deque takes it without a lock: this may run inside of a garbage collection
        weakref.finalize(lane, self._idle.append, gpu_lane).atexit = False
        return lane

    def allocate(self, max_batch: int) -> InputBuffer:
        """[max_batch, ...] of the input's type and shape, page-locked zeros. Raises EngineError after `close`."""
        self.require_open()
        assert self._model is not None
        assert self._spec is not None
        if max_batch < 1:
            raise EngineError(f"a buffer of {max_batch} places cannot be made", code="batch")
        tensor = self._model.tensors.input
        shape = (max_batch, *self._spec.shape)
        nbytes = tensor.nbytes(shape)
        host = self._owner.call(lambda: self._owner.cuda.host(nbytes, self._mapped))
        array = host.array.view(tensor.dtype).reshape(shape)
        pictures = None
        if self._picture_memory is not None:
            pictures = Pictures(self._picture_memory, self._spec, max_batch)
        with self._lock:
            index = self._buffers
            self._buffers += 1
            self._places = max(self._places, max_batch)
            self._memory[index] = (host, array, pictures)
        return InputBuffer(index, array, pictures)

    def memory_of(self, buffer: InputBuffer) -> tuple[HostMemory, Pictures | None]:
        """The memory of a buffer, and the pictures beside it.

        Raises EngineError (code "buffer") where it is not this engine's, or was released.
        """
        known = self._memory.get(buffer.index)
        if known is None or known[1] is not buffer.array:
            array = buffer.array
            message = f"a buffer of {array.dtype} {list(array.shape)} is not one of this engine's"
            raise EngineError(message, code="buffer")
        return known[0], known[2]

    def release(self, buffer: InputBuffer) -> None:
        """Give a buffer back, also after `close`: its memory is freed when the last array that views it is gone.

        The buffer's own array is empty from then on. Raises EngineError (code "buffer"): see memory_of.
        """
        host, pictures = self.memory_of(buffer)
        with self._lock:
            del self._memory[buffer.index]
        owner = self._owner
        buffer.array = np.zeros((0, *buffer.array.shape[1:]), buffer.array.dtype)
        buffer.pictures = None
        if pictures is not None:
            pictures.release()
        self._let_go(host)
        with contextlib.suppress(EngineError):  # the owner ends, or has: then no lane remembers anything
            owner.call(lambda: self._forget_buffer(host))

    def close(self) -> None:
        """Free contexts, engine and memory, in this order; runs in progress end first. Idempotent.

        Buffers that were not released stay: whoever writes into one may still do so.
        """
        with self._lock:
            again, self._closed = self._closed, True
        if again and not self._owner.on_thread:  # an owner that ends may be faster than who was closing this
            return
        try:
            self._end()
        finally:
            # Of a stuck writer's, which nobody will release: freed when it lets go, never under it by a collection.
            for host, _, pictures in list(self._memory.values()):
                if pictures is not None:
                    pictures.release()
                self._let_go(host)

    def _let_go(self, host: HostMemory) -> None:
        owner = self._owner
        with self._lock:  # a late release and the close may meet
            host.let_go(lambda: owner.post(lambda: try_free(owner.cuda.free_host, host)))

    def _end(self) -> None:
        if self._owner.ended:
            return  # it closed this engine before it ended, or nothing of it was ever made
        if self._owner.is_dead():
            self._bury()
            return
        try:
            self._owner.call(self._close)
        except EngineError as error:
            if not self._owner.is_dead():
                if self._runtime is None:  # it was closed by the owner, which ended meanwhile
                    return
                raise
            log.warning("%s: it could not be closed any more: %s", self.where, str(error))
            self._bury()

    # --- on the thread "gpu"

    def open(self, plan: memoryview, sidecar: Sidecar, spec: InputSpec) -> None:
        """Deserialise a verified plan. Raises EngineError or BundleError; then `close` is to follow."""
        mark = self._lines.mark()
        trt = self._trt
        started = time.perf_counter()
        if not trt.init_libnvinfer_plugins(self._logger, ""):
            raise self._refused("TensorRT's own plugins cannot be loaded", mark, "tensorrt_failed")
        self._owner.adopt(self)
        try:
            self._runtime = trt.Runtime(self._logger)
        except TypeError as error:  # without a driver the factory returns nothing
            raise self._refused(f"TensorRT does not start ({error})", mark, "tensorrt_failed") from None
        # A plan can carry code for the host; ours never do, and this one may not.
        if self._runtime.engine_host_code_allowed:
            raise self._refused("TensorRT would run host code of a plan", mark, "tensorrt_failed")
        if sidecar.dla_core is not None:
            self._runtime.DLA_core = sidecar.dla_core
        engine = self._runtime.deserialize_cuda_engine(plan)
        if engine is None:
            raise self._refused("TensorRT does not take this plan", mark, "plan_refused")
        self._engine = engine
        self.timings_s["deserialize"] = time.perf_counter() - started
        tensors = read_tensors(trt, engine, self.where)
        check_declared(tensors, sidecar.tensors, self.where)
        check_input(tensors.input, spec, self.where)
        batches = read_batches(engine, tensors.input, spec, sidecar.batches, self.where)
        cuda = self._owner.cuda
        self._mapped = self._prefer_mapped and cuda.integrated()
        self._spec = spec
        if self._kernel is not None:
            self._picture_memory = PictureMemory(self._owner, self.where, mapped=self._mapped)
        self._model = Model(
            trt=trt,
            owner=self._owner,
            lines=self._lines,
            tensors=tensors,
            batches=batches,
            spec=spec,
            where=self.where,
            graphs=self._graphs and cuda.graphs and sidecar.dla_core is None,
            places=lambda: self._places,
            kernel=self._kernel,
        )

    def _make_lane(self) -> GpuLane:
        self.require_open()
        assert self._model is not None
        mark = self._lines.mark()
        assert self._engine is not None
        context = self._engine.create_execution_context()
        if context is None:
            error = self._model.failed("TensorRT has no memory for another lane", mark, "gpu_memory")
            error.remedy = "use fewer lanes, a smaller variant or batch, or stop what else uses this memory"
            raise error
        lane = GpuLane(self._model, context)
        try:
            lane.open()
        except BaseException:
            lane.end_context()
            lane.free()
            raise
        self._lanes.append(lane)
        return lane

    def _forget_buffer(self, host: HostMemory) -> None:
        for lane in self._lanes:
            lane.forget_buffer(host)

    def _close(self) -> None:
        for lane in self._lanes:
            lane.end_context()
        self._engine = None
        self._runtime = None
        for lane in self._lanes:
            lane.free()
        self._lanes = []
        self._idle.clear()
        self._owner.disown(self)

    def _bury(self) -> None:
        for lane in self._lanes:
            lane.bury()
        self._owner.bury(self._engine, self._runtime)
        self._engine = self._runtime = None

    def _refused(self, what: str, mark: int, code: str) -> EngineError:
        said = self._lines.tail(mark)
        remedy = _BUILD if code == "plan_refused" else "see the log; `edge-runtime doctor` tells what this device is"
        return EngineError(f"{what}: {said}", code=code, where=self.where, remedy=remedy)

    # --- its load

    def prove(self, bundle: Bundle, variant: str) -> None:
        """One run over grey pictures proves its shapes, its numbers and its layout. Raises BundleError, EngineError."""
        assert self._spec is not None
        spec, output = self._spec, bundle.output_spec()
        batch = self.allowed_batches[0]
        started = time.perf_counter()
        lane = self.open_lane()
        buffer = self.allocate(batch)
        try:
            fill_level(buffer.array, spec, _GREY)
            lane.submit(buffer, batch)
            shapes = prove_outputs(lane.collect(), batch, self.where)
        finally:
            self.release(buffer)
        try:
            build_decoder(output, spec, shapes)
        except EdgeError as error:
            raise BundleError(error.message, code=error.code, where=self.where, remedy=error.remedy) from None
        self.timings_s["warm_up"] = time.perf_counter() - started
        table = bundle.variant(variant, BACKEND)
        self._info = EngineInfo(
            digest=bundle.engine_digest(table.name, BACKEND),
            bundle=bundle.digest,
            variant=table.name,
            backend=BACKEND,
            precision=table.precision,
            input=spec,
            output=output,
            output_shapes=shapes,
        )


def load_plan(
    owner: GpuOwner,
    trt: TensorRt,
    bundle: Bundle,
    variant: str,
    plan: bytes,
    sidecar: Sidecar,
    *,
    here: Here,
    where: str,
    prefer_mapped: bool = False,
    graphs: bool = True,
    kernel: LetterboxKernel | None = None,
    opened: Callable[[], None] = lambda: None,
) -> TensorRtEngine:
    """Load a plan of a verified bundle's variant and warm it up: one run proves its shapes and its layout.

    `plan` is the file's content, `where` its name in messages; `here` is what probe.look said. `prefer_mapped`: let an
    integrated GPU read input buffers in place. `graphs`: capture CUDA graphs where it can be done. `kernel`: let it
    scale pictures that are larger than the input. `opened` is called between loading and warming up. Not to be called
    on the thread "gpu".

    Raises EngineError: "plan_mismatch", "plan_damaged", "plan_invalid" before anything is deserialised; "plan_refused"
    with TensorRT's own words; "gpu_memory", "gpu_fatal", "inference_failed" and others. BundleError where the engine
    is not what the bundle says: "input_mismatch", "output_mismatch", "non_finite", or what its decoder says. Nothing
    stays of a load that failed.
    """
    table = bundle.variant(variant, BACKEND)
    onnx = bundle.artefact(table.name, BACKEND).sha256
    if sidecar.onnx_sha256 != onnx:
        message = f"the plan was built from the model {sidecar.onnx_sha256[:12]}..., and the bundle has {onnx[:12]}..."
        raise EngineError(message, code="plan_mismatch", where=where, remedy=_BUILD)
    stripped, remarks = verify(plan, sidecar, here, where)
    spec = bundle.input_spec(table.name)
    engine = TensorRtEngine(owner, trt, where, prefer_mapped=prefer_mapped, graphs=graphs, kernel=kernel)
    try:
        owner.call(lambda: engine.open(stripped, sidecar, spec))
        opened()
        engine.prove(bundle, table.name)
    except BaseException:
        engine.close()
        raise
    engine.remarks = remarks
    for remark in remarks:
        log.warning("%s: %s", where, remark)
    return engine
