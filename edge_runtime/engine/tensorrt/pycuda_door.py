"""CUDA through PyCUDA.

PyCUDA destroys streams, events and modules with their last reference, and frees memory for good only on the thread
that made it: so everything is let go of here, on the owner's thread. Its exceptions carry the driver's words and no
number.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import ClassVar, ParamSpec, TypeVar

import numpy as np

from edge_runtime.engine.tensorrt.api import (
    PyCudaContext,
    PyCudaDevice,
    PyCudaDriver,
    PyCudaEvent,
    PyCudaFunction,
    PyCudaHostArray,
    PyCudaMemory,
    PyCudaModule,
    PyCudaStream,
)
from edge_runtime.engine.tensorrt.cuda import (
    OUT_OF_MEMORY,
    DeviceMemory,
    Door,
    Event,
    Graph,
    HostMemory,
    Kernel,
    Stream,
)
from edge_runtime.errors import EngineError

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: PyCUDA has no name for it
_kept: list[object] = []
"""Contexts that are never released: somebody still views page-locked memory of theirs."""


class PyCudaDoor(Door):
    """The door over `pycuda.driver`, which is passed in. See cuda.Cuda."""

    name: ClassVar[str] = "pycuda"

    def __init__(self, driver: PyCudaDriver) -> None:
        super().__init__()
        self._driver = driver
        self._device: PyCudaDevice | None = None
        self._context: PyCudaContext | None = None

    @property
    def graphs(self) -> bool:
        return False

    def start(self) -> None:
        self._begin()
        try:
            self._call("cuInit", self._driver.init)
            device: PyCudaDevice = self._call("cuDeviceGet", self._driver.Device, 0)
            self._device = device
            context: PyCudaContext = self._call("cuDevicePrimaryCtxRetain", device.retain_primary_context)
            try:
                self._call("cuCtxPushCurrent", context.push)
            except BaseException:
                context.detach()
                raise
        except BaseException:
            self._thread = self._device = None
            raise
        self._context = context

    def stop(self) -> None:
        context = self._context
        if context is None:
            return
        if self._dead is None:
            self._check()
        self._context = self._thread = self._device = None
        try:
            # A thread that ends with a context on PyCUDA's stack aborts the process.
            context.pop()
        except self._driver.Error as error:
            log.warning("the GPU's context could not be left: %s", str(error))
            context.detach()  # takes it off that stack, too, without raising
            return
        if self._hosts or self._dead is not None:
            _kept.append(context)
        else:
            context.detach()

    def stream(self) -> Stream:
        native: PyCudaStream = self._call("cuStreamCreate", self._driver.Stream, _NON_BLOCKING)
        return Stream(int(native.handle), native)

    def free_stream(self, stream: Stream) -> None:
        if stream.native is not None:
            self._check()
            stream.native = None

    def event(self) -> Event:
        return Event(self._call("cuEventCreate", self._driver.Event, self._driver.event_flags.DISABLE_TIMING))

    def timer(self) -> Event:
        return Event(self._call("cuEventCreate", self._driver.Event, self._driver.event_flags.DEFAULT))

    def elapsed_ms(self, start: Event, end: Event) -> float:
        native: PyCudaEvent = self._native(start)
        return float(self._call("cuEventElapsedTime", native.time_till, self._native(end)))

    def free_event(self, event: Event) -> None:
        if event.native is not None:
            self._check()
            event.native = None

    def record(self, event: Event, stream: Stream) -> None:
        native: PyCudaEvent = self._native(event)
        self._call("cuEventRecord", native.record, self._native(stream))

    def query(self, event: Event) -> bool:
        native: PyCudaEvent = self._native(event)
        return bool(self._call("cuEventQuery", native.query))

    def synchronise(self, stream: Stream) -> None:
        native: PyCudaStream = self._native(stream)
        self._call("cuStreamSynchronize", native.synchronize)

    def allocate(self, nbytes: int) -> DeviceMemory:
        native: PyCudaMemory = self._call("cuMemAlloc", self._driver.mem_alloc, nbytes)
        return DeviceMemory(int(native), nbytes, native)

    def free(self, memory: DeviceMemory) -> None:
        if memory.native is not None:
            native: PyCudaMemory = self._native(memory)
            memory.native = None
            self._call("cuMemFree", native.free)

    def host(self, nbytes: int, mapped: bool = False) -> HostMemory:
        flags = self._driver.host_alloc_flags.DEVICEMAP if mapped else 0
        empty = self._driver.pagelocked_empty
        array: PyCudaHostArray = self._call("cuMemHostAlloc", empty, nbytes, np.uint8, mem_flags=flags)
        try:
            array.fill(0)
            seen = int(self._call("cuMemHostGetDevicePointer", array.base.get_device_pointer)) if mapped else None
        except BaseException:
            array.base.free()
            raise
        self._hosts += 1
        return HostMemory(int(array.ctypes.data), nbytes, array, seen)

    def free_host(self, memory: HostMemory) -> None:
        if memory.native is not None:
            array: PyCudaHostArray = self._native(memory)
            memory.native = None
            self._hosts -= 1
            self._call("cuMemFreeHost", array.base.free)

    def copy_in(self, to: int, source: HostMemory, nbytes: int, stream: Stream, start: int = 0) -> None:
        native = self._native(stream)
        self._call("cuMemcpyHtoDAsync", self._driver.memcpy_htod_async, to, source.part(start, nbytes), native)

    def copy_out(self, to: HostMemory, source: int, nbytes: int, stream: Stream) -> None:
        native = self._native(stream)
        self._call("cuMemcpyDtoHAsync", self._driver.memcpy_dtoh_async, to.first(nbytes), source, native)

    def memory(self) -> tuple[int, int]:
        free, total = self._call("cuMemGetInfo", self._driver.mem_get_info)
        return int(free), int(total)

    def compute_capability(self) -> tuple[int, int]:
        major, minor = self._call("cuDeviceGetAttribute", self._device_of().compute_capability)
        return int(major), int(minor)

    def driver_version(self) -> int:
        return int(self._call("cuDriverGetVersion", self._driver.get_driver_version))

    def device_name(self) -> str:
        return str(self._call("cuDeviceGetName", self._device_of().name))

    def integrated(self) -> bool:
        attribute = self._driver.device_attribute.INTEGRATED
        return bool(self._call("cuDeviceGetAttribute", self._device_of().get_attribute, attribute))

    def begin_capture(self, stream: Stream) -> None:
        raise _no_graphs(stream)

    def end_capture(self, stream: Stream) -> Graph:
        raise _no_graphs(stream)

    def launch(self, graph: Graph, stream: Stream) -> None:
        raise _no_graphs(graph, stream)

    def free_graph(self, graph: Graph) -> None:
        raise _no_graphs(graph)

    def load_kernel(self, image: bytes, name: str) -> Kernel:
        module: PyCudaModule = self._call("cuModuleLoadData", self._driver.module_from_buffer, image)
        native: PyCudaFunction = self._call("cuModuleGetFunction", module.get_function, name)
        return Kernel(native, module)

    def run_kernel(
        self,
        kernel: Kernel,
        grid: tuple[int, int],
        block: tuple[int, int],
        stream: Stream,
        kinds: str,
        values: Sequence[int | float],
    ) -> None:
        native: PyCudaFunction = self._native(kernel)
        self._call("cuFuncPrepare", native.prepare, kinds)
        launch = native.prepared_async_call
        self._call("cuLaunchKernel", launch, (*grid, 1), (*block, 1), self._native(stream), *values)

    def free_kernel(self, kernel: Kernel) -> None:
        if kernel.native is not None:
            self._check()
            kernel.native = kernel.module = None

    def _device_of(self) -> PyCudaDevice:
        self._check()
        assert self._device is not None
        return self._device

    def _call(self, what: str, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Call into PyCUDA. Raises as cuda.Cuda says."""
        self._check()
        try:
            result = function(*arguments, **named)
        except self._driver.Error as error:
            number = OUT_OF_MEMORY if isinstance(error, self._driver.MemoryError) else None
            text = str(error)
        else:
            return result
        # outside of the handler: the foreign exception's frames hold PyCUDA's objects
        return self._fail(what, number, text.partition(" failed: ")[2] or text)


def _no_graphs(*handles: Stream | Graph) -> EngineError:
    del handles
    return EngineError("CUDA graphs are captured through cuda.bindings only", code="engine_state")
