"""CUDA through NVIDIA's own `cuda.bindings` (older layout: `cuda.cuda`): where PyCUDA cannot be had, and for graphs.

Its functions return a tuple, the result first. They raise nothing where CUDA refuses, but do so where the driver's
library, or a function in it, is not there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, ParamSpec

from edge_runtime.engine.tensorrt.api import CudaDriver
from edge_runtime.engine.tensorrt.cuda import DeviceMemory, Door, Event, Graph, HostMemory, Kernel, Stream
from edge_runtime.errors import EngineError

P = ParamSpec("P")

_NAME_BYTES = 256
_KINDS: Mapping[str, Any] = {"P": ctypes.c_void_p, "i": ctypes.c_int, "f": ctypes.c_float}


class CudaBindingsDoor(Door):
    """The door over `cuda.bindings.driver`, which is passed in. See cuda.Cuda."""

    name: ClassVar[str] = "cuda.bindings"

    def __init__(self, driver: CudaDriver) -> None:
        super().__init__()
        self._driver = driver
        self._device: Any = None

    @property
    def graphs(self) -> bool:
        return True

    def start(self) -> None:
        self._begin()
        try:
            self._do(self._driver.cuInit, 0)
            device = self._get(self._driver.cuDeviceGet, 0)
            context = self._get(self._driver.cuDevicePrimaryCtxRetain, device)
            try:
                self._do(self._driver.cuCtxPushCurrent, context)
            except BaseException:
                self._driver.cuDevicePrimaryCtxRelease(device)
                raise
        except BaseException:
            self._thread = None
            raise
        self._device = device

    def stop(self) -> None:
        device = self._device
        if device is None:
            return
        if self._dead is None:
            self._check()
        self._device = self._thread = None
        popped = self._driver.cuCtxPopCurrent()
        if self._dead is not None:
            return
        # With page-locked memory that somebody still views, the context stays retained: its end would unmap it.
        released = None if self._hosts else self._driver.cuDevicePrimaryCtxRelease(device)
        self._judge("cuCtxPopCurrent", popped)
        if released is not None:
            self._judge("cuDevicePrimaryCtxRelease", released)

    def stream(self) -> Stream:
        flags = int(self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        native = self._get(self._driver.cuStreamCreate, flags)
        return Stream(int(native), native)

    def free_stream(self, stream: Stream) -> None:
        if stream.native is not None:
            native = self._native(stream)
            stream.native = None
            self._do(self._driver.cuStreamDestroy, native)

    def event(self) -> Event:
        flags = int(self._driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        return Event(self._get(self._driver.cuEventCreate, flags))

    def timer(self) -> Event:
        flags = int(self._driver.CUevent_flags.CU_EVENT_DEFAULT)
        return Event(self._get(self._driver.cuEventCreate, flags))

    def elapsed_ms(self, start: Event, end: Event) -> float:
        return float(self._get(self._driver.cuEventElapsedTime, self._native(start), self._native(end)))

    def free_event(self, event: Event) -> None:
        if event.native is not None:
            native = self._native(event)
            event.native = None
            self._do(self._driver.cuEventDestroy, native)

    def record(self, event: Event, stream: Stream) -> None:
        self._do(self._driver.cuEventRecord, self._native(event), self._native(stream))

    def query(self, event: Event) -> bool:
        answer = self._ask(self._driver.cuEventQuery, self._native(event))
        if answer[0] == self._driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        self._judge("cuEventQuery", answer)
        return True

    def synchronise(self, stream: Stream) -> None:
        self._do(self._driver.cuStreamSynchronize, self._native(stream))

    def allocate(self, nbytes: int) -> DeviceMemory:
        native = self._get(self._driver.cuMemAlloc, nbytes)
        return DeviceMemory(int(native), nbytes, native)

    def free(self, memory: DeviceMemory) -> None:
        if memory.native is not None:
            native = self._native(memory)
            memory.native = None
            self._do(self._driver.cuMemFree, native)

    def host(self, nbytes: int, mapped: bool = False) -> HostMemory:
        flags = int(self._driver.CU_MEMHOSTALLOC_DEVICEMAP) if mapped else 0
        address = self._get(self._driver.cuMemHostAlloc, nbytes, flags)
        try:
            ctypes.memset(address, 0, nbytes)
            seen = None
            if mapped:
                seen = int(self._get(self._driver.cuMemHostGetDevicePointer, address, 0))
        except BaseException:
            self._driver.cuMemFreeHost(address)
            raise
        self._hosts += 1
        return HostMemory(int(address), nbytes, address, seen)

    def free_host(self, memory: HostMemory) -> None:
        if memory.native is not None:
            address = self._native(memory)
            memory.native = None
            self._hosts -= 1
            self._do(self._driver.cuMemFreeHost, address)

    def copy_in(self, to: int, source: HostMemory, nbytes: int, stream: Stream, start: int = 0) -> None:
        address = self._native(source) + start
        self._do(self._driver.cuMemcpyHtoDAsync, to, address, nbytes, self._native(stream))

    def copy_out(self, to: HostMemory, source: int, nbytes: int, stream: Stream) -> None:
        self._do(self._driver.cuMemcpyDtoHAsync, self._native(to), source, nbytes, self._native(stream))

    def memory(self) -> tuple[int, int]:
        answer = self._do(self._driver.cuMemGetInfo)
        return int(answer[1]), int(answer[2])

    def compute_capability(self) -> tuple[int, int]:
        names = self._driver.CUdevice_attribute
        return (
            self._attribute(names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
            self._attribute(names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
        )

    def driver_version(self) -> int:
        return int(self._get(self._driver.cuDriverGetVersion))

    def device_name(self) -> str:
        name = self._get(self._driver.cuDeviceGetName, _NAME_BYTES, self._device)
        return bytes(name).partition(b"\0")[0].decode("utf-8", "replace")

    def integrated(self) -> bool:
        return bool(self._attribute(self._driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_INTEGRATED))

    def begin_capture(self, stream: Stream) -> None:
        # Of this thread alone: what other threads of the process do with CUDA does not break it.
        mode = self._driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._do(self._driver.cuStreamBeginCapture, self._native(stream), mode)

    def end_capture(self, stream: Stream) -> Graph:
        graph = self._get(self._driver.cuStreamEndCapture, self._native(stream))
        try:
            return Graph(self._get(self._driver.cuGraphInstantiate, graph, 0))
        finally:
            self._driver.cuGraphDestroy(graph)

    def launch(self, graph: Graph, stream: Stream) -> None:
        self._do(self._driver.cuGraphLaunch, self._native(graph), self._native(stream))

    def free_graph(self, graph: Graph) -> None:
        if graph.native is not None:
            native = self._native(graph)
            graph.native = None
            self._do(self._driver.cuGraphExecDestroy, native)

    def load_kernel(self, image: bytes, name: str) -> Kernel:
        module = self._get(self._driver.cuModuleLoadData, image)
        try:
            return Kernel(self._get(self._driver.cuModuleGetFunction, module, name.encode()), module)
        except BaseException:
            self._driver.cuModuleUnload(module)
            raise

    def run_kernel(
        self,
        kernel: Kernel,
        grid: tuple[int, int],
        block: tuple[int, int],
        stream: Stream,
        kinds: str,
        values: Sequence[int | float],
    ) -> None:
        native, lane = self._native(kernel), self._native(stream)
        arguments = (tuple(values), tuple(_KINDS[each] for each in kinds))
        launch = self._driver.cuLaunchKernel
        self._do(launch, native, grid[0], grid[1], 1, block[0], block[1], 1, 0, lane, arguments, 0)

    def free_kernel(self, kernel: Kernel) -> None:
        if kernel.native is not None:
            self._native(kernel)
            module = kernel.module
            kernel.native = kernel.module = None
            self._do(self._driver.cuModuleUnload, module)

    def _attribute(self, which: Any) -> int:
        return int(self._get(self._driver.cuDeviceGetAttribute, which, self._device))

    def _get(self, function: Callable[P, tuple[Any, ...]], *arguments: P.args, **named: P.kwargs) -> Any:
        """What a call gives beside its result. Raises as cuda.Cuda says."""
        return self._do(function, *arguments, **named)[1]

    def _do(self, function: Callable[P, tuple[Any, ...]], *arguments: P.args, **named: P.kwargs) -> tuple[Any, ...]:
        """The whole answer of a call that succeeded. Raises as cuda.Cuda says."""
        answer = self._ask(function, *arguments, **named)
        self._judge(function.__name__, answer)
        return answer

    def _ask(self, function: Callable[P, tuple[Any, ...]], *arguments: P.args, **named: P.kwargs) -> tuple[Any, ...]:
        """The answer of a call, whatever it is.

        Raises as _check does, and EngineError (code "cuda_missing") where the bindings raise: they do so where the
        driver's library is not there, or is older than they are and does not have the function.
        """
        self._check()
        try:
            return function(*arguments, **named)
        except Exception as error:  # noqa: BLE001  of their own kinds
            said = str(error)
        raise EngineError(
            f"{function.__name__} cannot be called: {said}",
            code="cuda_missing",
            where=self.name,
            remedy="install the cuda-bindings of the driver's own major version of CUDA: docs/jetson.md",
        )

    def _judge(self, call: str, answer: tuple[Any, ...]) -> None:
        """Raises as cuda.Cuda says where the answer of a call is no success."""
        number = int(answer[0])
        if number:
            _, text = self._driver.cuGetErrorString(answer[0])
            words = text.decode("utf-8", "replace") if isinstance(text, bytes) else str(answer[0])
            self._fail(call, number, words)
