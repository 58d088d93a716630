"""One execution context with its stream, its memory and its outputs: what a TensorRT lane is on the thread "gpu"."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from numpy.typing import NDArray

from edge_runtime.engine.tensorrt.api import TrtContext, TrtOutputAllocator
from edge_runtime.engine.tensorrt.cuda import (
    Cuda,
    CudaFatal,
    DeviceMemory,
    Event,
    Graph,
    HostMemory,
    Stream,
    try_free,
)
from edge_runtime.engine.tensorrt.inlet import Inlet
from edge_runtime.engine.tensorrt.model import Model
from edge_runtime.engine.tensorrt.outputs import Allocation, Output, make_allocator, plain
from edge_runtime.engine.tensorrt.owner import Watch, without_frames
from edge_runtime.engine.tensorrt.pictures import Waiting
from edge_runtime.engine.tensorrt.tensors import Tensor
from edge_runtime.errors import EngineError

log = logging.getLogger(__name__)


class GpuLane:
    """Runs one batch at a time. `submit` and `collect` are for one thread at a time, the rest for the owner's thread.

    The context is given its addresses once, and anew only where the batch size changes, or, with mapped memory, the
    buffer. A CUDA graph is captured of a run that was run once as it is, and belongs to that very state of the
    context: TensorRT forbids to change the context under it. Copies stay outside of it.
    """

    def __init__(self, model: Model, context: TrtContext) -> None:
        self._model = model
        self._cuda: Cuda = model.owner.cuda
        self._context: TrtContext | None = context
        self._opened: tuple[Stream, Event] | None = None
        self._watch = Watch(self._look, self._finish)
        self._input: DeviceMemory | None = None
        self._inlet = Inlet(model)
        self._capacity = 0
        self._outputs = {
            name: Output(each, self._cuda, self._give_back) for name, each in model.tensors.outputs.items()
        }
        self._allocation = Allocation()
        self._allocator: TrtOutputAllocator | None = None
        self._state: tuple[int, int] | None = None  # (count, address of the input) that the context is set to
        self._proved = False  # a run in this state went well
        self._graph: Graph | None = None
        self._graphs = model.graphs
        self._results: dict[int, Mapping[str, NDArray[Any]]] = {}
        self._host: HostMemory | None = None
        self._array: NDArray[Any] | None = None
        self._pictures: tuple[Waiting, ...] = ()
        self._count = 0
        self._enqueued = False
        # for the thread that submits and collects
        self.running = False
        self._done = threading.Semaphore(0)
        self._error: EngineError | None = None
        self._result: Mapping[str, NDArray[Any]] | None = None
        self._start: Callable[[], None] = self._enqueue
        self._refused: Callable[[EngineError], None] = self._finish

    def open(self) -> None:
        """Make its stream and event. On the owner's thread. Raises EngineError; then end_context and free."""
        stream = self._cuda.stream()
        try:
            self._opened = (stream, self._cuda.event())
        except EngineError:
            try_free(self._cuda.free_stream, stream)
            raise
        self._select_profile()

    # --- on the lane's thread

    def submit(self, host: HostMemory, array: NDArray[Any], count: int, pictures: tuple[Waiting, ...] = ()) -> None:
        """Let the first `count` places of `array`, which lies in `host`, be run; into those of `pictures` these are
        scaled before. What is wrong, `collect` says."""
        self._host, self._array, self._count, self._pictures = host, array, count, pictures
        self.running = True
        self._model.owner.post(self._start, self._refused)

    def collect(self) -> Mapping[str, NDArray[Any]]:
        """Wait for its end. Raises EngineError."""
        self._done.acquire()
        self.running = False
        error, self._error = self._error, None
        result, self._result = self._result, None
        if error is not None:
            raise error
        assert result is not None
        return result

    @property
    def has_graph(self) -> bool:
        """Whether its runs are launches of a captured graph now."""
        return self._graph is not None

    # --- on the owner's thread

    def _finish(self, error: EngineError | None) -> None:
        """The run has ended, or never will begin."""
        self._enqueued = False
        if error is None:
            try:
                self._result = self._gather()
            except EngineError as failed:
                error = failed
            except Exception as failed:  # noqa: BLE001  whoever waits for the results has to hear of it
                error = EngineError(f"the results cannot be read: {failed!r}", where=self._model.where)
        self._proved = error is None
        self._error = None if error is None else without_frames(error)
        self._host = self._array = None
        self._pictures = ()
        self._done.release()

    def _look(self) -> bool:
        """Whether what is enqueued has ended. Raises CudaError, and then it has ended as well."""
        try:
            return self._cuda.query(self._event)
        except CudaFatal:
            raise
        except EngineError:
            self._settle()
            raise

    def _gather(self) -> Mapping[str, NDArray[Any]]:
        if self._allocation.outputs:
            outputs = {name: output.array() for name, output in self._outputs.items()}
            for name, array in outputs.items():
                if array.shape[:1] != (self._count,):
                    message = f"output {name!r} is {list(array.shape)} for a batch of {self._count}"
                    raise EngineError(message, where=self._model.where, code="output_mismatch")
            return outputs
        result = self._results.get(self._count)
        if result is None:
            arrays = {name: output.array() for name, output in self._outputs.items()}
            result = self._results[self._count] = MappingProxyType(arrays)
        return result

    def _enqueue(self) -> None:
        error: EngineError
        mark = self._model.lines.mark()
        try:
            self._begin_run(mark)
            return
        except CudaFatal:
            raise
        except EngineError as failed:
            error = failed
        except Exception as failed:  # noqa: BLE001  pybind's exceptions have no common base
            error = self._model.failed(f"the run could not be started: {failed}", mark)
        self._state = None
        self._settle()
        self._finish(error)

    def _settle(self) -> None:
        """Wait for what is enqueued: it reads the input and writes the outputs. Raises CudaFatal alone."""
        if not self._enqueued:
            return
        try:
            self._cuda.synchronise(self._stream)
        except CudaFatal:
            raise
        except EngineError as error:
            log.warning("%s: a run could not be waited for: %s", self._model.where, str(error))

    def _begin_run(self, mark: int) -> None:
        if self._context is None:
            raise self._closed()
        host, count, stream = self._host, self._count, self._stream
        assert host is not None
        if count > self._capacity:
            self._grow(max(count, min(self._model.places(), self._model.batches.largest)), mark)
        if host.device_address is None:
            assert self._input is not None
            address = self._input.address
        else:
            address = host.device_address
        if self._state != (count, address):
            self._set(count, address, mark)
        elif self._graphs and self._proved and self._graph is None:
            self._capture(mark)
        self._inlet.grow(self._pictures)
        place_bytes = self._model.tensors.input.nbytes(self._picture())
        self._enqueued = True
        self._inlet.enqueue(address, host, place_bytes, count, self._pictures, stream)
        if self._graph is not None:
            self._cuda.launch(self._graph, stream)
        else:
            self._execute(mark)
        for output in self._outputs.values():
            output.copy_out(stream)
        self._cuda.record(self._event, stream)
        self._model.owner.watch(self._watch)

    def _execute(self, mark: int) -> None:
        self._allocation.begin()
        ran = self._live.execute_async_v3(self._stream.handle)
        if self._allocation.error is not None:
            raise self._allocation.error
        if not ran:
            raise self._failed("TensorRT could not run the batch", mark)
        if missing := self._allocation.missing:
            raise self._failed(f"TensorRT did not tell the shapes of {', '.join(sorted(missing))}", mark)

    def _failed(self, what: str, mark: int) -> EngineError:
        """Also where only CUDA itself knows of a sticky error. Raises CudaFatal then."""
        error = self._model.failed(what, mark)
        self._cuda.record(self._event, self._stream)
        self._cuda.query(self._event)
        return error

    @property
    def _live(self) -> TrtContext:
        """The context. Raises EngineError (code "engine_closed") where there is none any more."""
        if self._context is None:
            raise self._closed()
        return self._context

    def _closed(self) -> EngineError:
        return EngineError("the engine is closed", code="engine_closed", where=self._model.where)

    @property
    def _stream(self) -> Stream:
        return self._made()[0]

    @property
    def _event(self) -> Event:
        return self._made()[1]

    def _made(self) -> tuple[Stream, Event]:
        if self._opened is None:
            raise self._closed()
        return self._opened

    def _picture(self) -> tuple[int, ...]:
        assert self._array is not None
        return self._array.shape[1:]

    # --- the state of the context

    def _select_profile(self) -> None:
        if self._model.batches.dynamic and self._live.active_optimization_profile != 0:
            mark = self._model.lines.mark()
            if not self._live.set_optimization_profile_async(0, self._stream.handle):
                raise self._model.failed("TensorRT could not select the plan's profile", mark, "engine_failed")
            self._cuda.synchronise(self._stream)

    def _grow(self, places: int, mark: int) -> None:
        """Have memory for batches of so many. Nothing is running on this lane."""
        self._forget()
        self._capacity = 0
        tensor = self._model.tensors.input
        if self._input is not None:
            memory, self._input = self._input, None
            try_free(self._cuda.free, memory)
        host = self._host
        if host is not None and host.device_address is None:
            self._input = self._cuda.allocate(tensor.nbytes((places, *self._picture())))
        for name, shape in self._shapes(places, mark).items():
            output = self._outputs[name]
            if -1 in shape:
                self._let_allocate(output, mark)
            else:
                output.grow(output.tensor.nbytes(shape))
        self._capacity = places

    def _let_allocate(self, output: Output, mark: int) -> None:
        """An output whose shape depends on the picture: TensorRT asks for its memory while it runs."""
        name = output.tensor.name
        if name in self._allocation.outputs:
            return
        if self._allocator is None:
            self._allocator = make_allocator(self._model.trt, self._allocation)
        self._allocation.outputs[name] = output
        self._graphs = False
        if not self._live.set_output_allocator(name, self._allocator):
            raise self._failed(f"TensorRT takes no memory for output {name!r}", mark)

    def _shapes(self, count: int, mark: int) -> dict[str, tuple[int, ...]]:
        """The outputs' shapes for a batch of so many; -1 where only the run tells."""
        tensor: Tensor = self._model.tensors.input
        if not self._live.set_input_shape(tensor.name, (count, *self._picture())):
            raise self._failed(f"TensorRT does not take a batch of {count}", mark)
        if missing := list(self._live.infer_shapes()):
            raise self._failed(f"TensorRT does not know the shapes of {', '.join(map(str, missing))}", mark)
        return {name: plain(self._live.get_tensor_shape(name)) for name in self._outputs}

    def _set(self, count: int, address: int, mark: int) -> None:
        self._forget()
        for name, shape in self._shapes(count, mark).items():
            output = self._outputs[name]
            if name in self._allocation.outputs:
                continue
            if -1 in shape or output.tensor.nbytes(shape) > output.nbytes:
                raise self._failed(f"output {name!r} is {list(shape)} for a batch of {count}, which was not so", mark)
            output.shape = shape
            self._address(name, output.address, mark)
        self._address(self._model.tensors.input.name, address, mark)
        self._state = (count, address)

    def _address(self, name: str, address: int, mark: int) -> None:
        if not self._live.set_tensor_address(name, address):
            raise self._failed(f"TensorRT does not take an address for {name!r}", mark)

    def _forget(self) -> None:
        """The context is about to change."""
        self._state = None
        self._proved = False
        if self._graph is not None:
            graph, self._graph = self._graph, None
            try_free(self._cuda.free_graph, graph)

    def _capture(self, mark: int) -> None:
        """Make a graph of the very run that went well before. Where that cannot be done, runs go on without."""
        self._graphs = False
        graph: Graph | None = None
        reason = ""
        try:
            self._cuda.begin_capture(self._stream)
            try:
                captured = bool(self._live.execute_async_v3(self._stream.handle))
            finally:
                graph = self._cuda.end_capture(self._stream)  # whatever happened, the stream has to leave this mode
        except CudaFatal:
            raise
        except Exception as error:  # noqa: BLE001  pybind's exceptions have no common base
            captured, reason = False, f"{error}; "
        if captured:
            self._graph, self._graphs = graph, True
            return
        if graph is not None:
            try_free(self._cuda.free_graph, graph)
        said = self._model.lines.tail(mark)
        log.info("%s: runs without a CUDA graph: %s%s", self._model.where, reason, said)

    # --- its end

    def forget_buffer(self, host: HostMemory) -> None:
        """A buffer is given back: no graph and no address of it stays."""
        if self._state is not None and host.device_address == self._state[1]:
            self._forget()

    def end_context(self) -> None:
        """Wait for what runs, then let go of the context. Idempotent."""
        if self._enqueued:
            self._settle()
            self._model.owner.unwatch(self._watch)
            self._finish(None)
        self._forget()
        self._context = None
        self._allocator = None

    def free(self) -> None:
        """Free what the context used, which is gone. Idempotent."""
        self._results.clear()
        for output in self._outputs.values():
            output.free()
        self._inlet.free()
        if self._input is not None:
            memory, self._input = self._input, None
            try_free(self._cuda.free, memory)
        if self._opened is not None:
            (stream, event), self._opened = self._opened, None
            try_free(self._cuda.free_event, event)
            try_free(self._cuda.free_stream, stream)

    def bury(self) -> None:
        """After a sticky error: keep the context for ever, since it cannot be destroyed."""
        self._model.owner.bury(self._context, self._allocator, self)
        self._context = None

    def _give_back(self, host: HostMemory) -> None:
        self._results.clear()
        owner, cuda = self._model.owner, self._cuda
        host.let_go(lambda: owner.post(lambda: try_free(cuda.free_host, host)))
