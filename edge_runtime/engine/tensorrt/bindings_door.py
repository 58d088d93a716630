"""CUDA through NVIDIA's own `cuda.bindings` (older layout: `cuda.cuda`): where PyCUDA cannot be had, and for graphs.

Its functions return a tuple, the result first, and raise nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from edge_runtime.engine.tensorrt.api import CudaDriver
from edge_runtime.engine.tensorrt.cuda import DeviceMemory, Door, Event, Graph, HostMemory, Kernel, Stream

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
        driver = self._driver
        try:
            self._do("cuInit", driver.cuInit(0))
            device = self._get("cuDeviceGet", driver.cuDeviceGet(0))
            context = self._get("cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(device))
            try:
                self._do("cuCtxPushCurrent", driver.cuCtxPushCurrent(context))
            except BaseException:
                driver.cuDevicePrimaryCtxRelease(device)
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
        # With page-locked memory that somebody still views, the context stays retained: its end would unmap it.
        if self._dead is None and not self._hosts:
            released = self._driver.cuDevicePrimaryCtxRelease(device)
            self._do("cuCtxPopCurrent", popped)
            self._do("cuDevicePrimaryCtxRelease", released)

    def stream(self) -> Stream:
        self._check()
        flags = int(self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        native = self._get("cuStreamCreate", self._driver.cuStreamCreate(flags))
        return Stream(int(native), native)

    def free_stream(self, stream: Stream) -> None:
        if stream.native is not None:
            native = self._native(stream)
            stream.native = None
            self._do("cuStreamDestroy", self._driver.cuStreamDestroy(native))

    def event(self) -> Event:
        self._check()
        flags = int(self._driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        return Event(self._get("cuEventCreate", self._driver.cuEventCreate(flags)))

    def timer(self) -> Event:
        self._check()
        flags = int(self._driver.CUevent_flags.CU_EVENT_DEFAULT)
        return Event(self._get("cuEventCreate", self._driver.cuEventCreate(flags)))

    def elapsed_ms(self, start: Event, end: Event) -> float:
        answer = self._driver.cuEventElapsedTime(self._native(start), self._native(end))
        return float(self._get("cuEventElapsedTime", answer))

    def free_event(self, event: Event) -> None:
        if event.native is not None:
            native = self._native(event)
            event.native = None
            self._do("cuEventDestroy", self._driver.cuEventDestroy(native))

    def record(self, event: Event, stream: Stream) -> None:
        self._do("cuEventRecord", self._driver.cuEventRecord(self._native(event), self._native(stream)))

    def query(self, event: Event) -> bool:
        answer = self._driver.cuEventQuery(self._native(event))
        if answer[0] == self._driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        self._do("cuEventQuery", answer)
        return True

    def synchronise(self, stream: Stream) -> None:
        self._do("cuStreamSynchronize", self._driver.cuStreamSynchronize(self._native(stream)))

    def allocate(self, nbytes: int) -> DeviceMemory:
        self._check()
        native = self._get("cuMemAlloc", self._driver.cuMemAlloc(nbytes))
        return DeviceMemory(int(native), nbytes, native)

    def free(self, memory: DeviceMemory) -> None:
        if memory.native is not None:
            native = self._native(memory)
            memory.native = None
            self._do("cuMemFree", self._driver.cuMemFree(native))

    def host(self, nbytes: int, mapped: bool = False) -> HostMemory:
        self._check()
        flags = int(self._driver.CU_MEMHOSTALLOC_DEVICEMAP) if mapped else 0
        address = self._get("cuMemHostAlloc", self._driver.cuMemHostAlloc(nbytes, flags))
        try:
            ctypes.memset(address, 0, nbytes)
            seen = None
            if mapped:
                answer = self._driver.cuMemHostGetDevicePointer(address, 0)
                seen = int(self._get("cuMemHostGetDevicePointer", answer))
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
            self._do("cuMemFreeHost", self._driver.cuMemFreeHost(address))

    def copy_in(self, to: int, source: HostMemory, nbytes: int, stream: Stream) -> None:
        answer = self._driver.cuMemcpyHtoDAsync(to, self._native(source), nbytes, self._native(stream))
        self._do("cuMemcpyHtoDAsync", answer)

    def copy_out(self, to: HostMemory, source: int, nbytes: int, stream: Stream) -> None:
        answer = self._driver.cuMemcpyDtoHAsync(self._native(to), source, nbytes, self._native(stream))
        self._do("cuMemcpyDtoHAsync", answer)

    def memory(self) -> tuple[int, int]:
        self._check()
        answer = self._driver.cuMemGetInfo()
        self._do("cuMemGetInfo", answer)
        return int(answer[1]), int(answer[2])

    def compute_capability(self) -> tuple[int, int]:
        names = self._driver.CUdevice_attribute
        return (
            self._attribute(names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
            self._attribute(names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
        )

    def driver_version(self) -> int:
        self._check()
        return int(self._get("cuDriverGetVersion", self._driver.cuDriverGetVersion()))

    def device_name(self) -> str:
        self._check()
        name = self._get("cuDeviceGetName", self._driver.cuDeviceGetName(_NAME_BYTES, self._device))
        return bytes(name).partition(b"\0")[0].decode("utf-8", "replace")

    def integrated(self) -> bool:
        return bool(self._attribute(self._driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_INTEGRATED))

    def begin_capture(self, stream: Stream) -> None:
        # Of this thread alone: what other threads of the process do with CUDA does not break it.
        mode = self._driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._do("cuStreamBeginCapture", self._driver.cuStreamBeginCapture(self._native(stream), mode))

    def end_capture(self, stream: Stream) -> Graph:
        graph = self._get("cuStreamEndCapture", self._driver.cuStreamEndCapture(self._native(stream)))
        try:
            return Graph(self._get("cuGraphInstantiate", self._driver.cuGraphInstantiate(graph, 0)))
        finally:
            self._driver.cuGraphDestroy(graph)

    def launch(self, graph: Graph, stream: Stream) -> None:
        self._do("cuGraphLaunch", self._driver.cuGraphLaunch(self._native(graph), self._native(stream)))

    def free_graph(self, graph: Graph) -> None:
        if graph.native is not None:
            native = self._native(graph)
            graph.native = None
            self._do("cuGraphExecDestroy", self._driver.cuGraphExecDestroy(native))

    def load_kernel(self, image: bytes, name: str) -> Kernel:
        self._check()
        module = self._get("cuModuleLoadData", self._driver.cuModuleLoadData(image))
        try:
            answer = self._driver.cuModuleGetFunction(module, name.encode())
            return Kernel(self._get("cuModuleGetFunction", answer), module)
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
        answer = self._driver.cuLaunchKernel(native, *grid, 1, *block, 1, 0, lane, arguments, 0)
        self._do("cuLaunchKernel", answer)

    def free_kernel(self, kernel: Kernel) -> None:
        if kernel.native is not None:
            self._native(kernel)
            module = kernel.module
            kernel.native = kernel.module = None
            self._do("cuModuleUnload", self._driver.cuModuleUnload(module))

    def _attribute(self, which: Any) -> int:
        self._check()
        return int(self._get("cuDeviceGetAttribute", self._driver.cuDeviceGetAttribute(which, self._device)))

    def _do(self, call: str, answer: tuple[Any, ...]) -> None:
        """Raises as cuda.Cuda says where the answer of a call is no success."""
        number = int(answer[0])
        if number:
            _, text = self._driver.cuGetErrorString(answer[0])
            words = text.decode("utf-8", "replace") if isinstance(text, bytes) else str(answer[0])
            self._fail(call, number, words)

    def _get(self, call: str, answer: tuple[Any, ...]) -> Any:
        self._do(call, answer)
        return answer[1]
