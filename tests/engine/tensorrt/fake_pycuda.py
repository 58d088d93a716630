"""A strict fake of `pycuda.driver` over a Machine: its names, its exceptions, and its habit of owning by reference.

Streams and events have no way to be destroyed but to be dropped, on the right thread; memory that is left to the
collector is a violation.
"""

from __future__ import annotations

import struct
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.engine.tensorrt.fake_machine import Machine
from tests.engine.tensorrt.fake_parts import CudaFault
from tests.engine.tensorrt.fake_parts import Stream as Lane

_LAUNCH = (719, 701, 702, 703)
_RUNTIME = (100, 209, 301, 600, 214)


def make_pycuda(machine: Machine) -> Any:
    """A module like `pycuda.driver`."""
    driver = ModuleType("pycuda.driver")

    class Error(Exception):
        pass

    class OutOfMemory(Error, MemoryError):
        pass

    class LogicError(Error):
        pass

    class LaunchError(Error):
        pass

    class OtherError(Error):
        pass

    def translated(fault: CudaFault) -> Error:
        """As its translate_cuda_error does: the code is nowhere but in the words."""
        words = str(fault)
        if fault.code in _LAUNCH:
            return LaunchError(words)
        if fault.code == 2:
            return OutOfMemory(words)
        if fault.code in _RUNTIME:
            return OtherError(words)
        return Error(words) if fault.code == 999 else LogicError(words)

    class guarded:  # noqa: N801  used like a function
        """A driver call: `with guarded("cuMemAlloc"):`."""

        def __init__(self, call: str, *, context: bool = True) -> None:
            self.call, self.context = call, context

        def __enter__(self) -> str:
            try:
                machine.enter(self.call, context=self.context)
            except CudaFault as fault:
                raise translated(fault) from None
            return self.call

        def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
            if isinstance(error, CudaFault):
                raise translated(error) from None

    initialised: list[bool] = []

    def init(flags: int = 0) -> None:
        with guarded("cuInit", context=False):
            initialised.append(True)

    class Context:
        __slots__ = ("_detached",)

        def __init__(self) -> None:
            self._detached = False

        def push(self) -> None:
            with guarded("cuCtxPushCurrent", context=False):
                machine.push()

        @staticmethod
        def pop() -> None:
            with guarded("cuCtxPopCurrent", context=False) as call:
                machine.pop(call)

        def detach(self) -> None:
            if self._detached:
                raise Error("detach failed: invalid device context - cannot detach from invalid context")
            self._detached = True
            if machine.current():
                machine.pop("cuCtxPopCurrent")  # off PyCUDA's own stack, whatever CUDA says of it
            machine.fault("cuDevicePrimaryCtxRelease")
            machine.release()

        @staticmethod
        def synchronize() -> None:
            with guarded("cuCtxSynchronize") as call:
                for stream in list(machine._streams.values()):
                    machine.drain(stream)
                machine.raise_sticky(call)

        @staticmethod
        def get_current() -> object:
            return machine.current() or None

    class Device:
        __slots__ = ("_number",)

        def __init__(self, number: int) -> None:
            if not initialised:
                raise LogicError("cuDeviceGet failed: initialization error")
            with guarded("cuDeviceGet", context=False):
                self._number = number

        @staticmethod
        def count() -> int:
            return 1

        def name(self) -> str:
            return machine.name

        def compute_capability(self) -> tuple[int, int]:
            return machine.capability

        def total_memory(self) -> int:
            return machine.total_bytes

        def get_attribute(self, attribute: object) -> int:
            values = {"INTEGRATED": int(machine.integrated), "CAN_MAP_HOST_MEMORY": 1, "UNIFIED_ADDRESSING": 1}
            return values[str(attribute)]

        def retain_primary_context(self) -> Context:
            with guarded("cuDevicePrimaryCtxRetain", context=False):
                machine.retain()
            return Context()

    class Stream:
        __slots__ = ("_lane",)

        def __init__(self, flags: int = 0) -> None:
            with guarded("cuStreamCreate"):
                self._lane = machine.stream()

        @property
        def handle(self) -> int:
            return self._lane.handle

        def synchronize(self) -> None:
            with guarded("cuStreamSynchronize") as call:
                machine.drain(self._lane)
                machine.raise_sticky(call)

        def is_done(self) -> bool:
            with guarded("cuStreamQuery"):
                return not self._lane.queue

        def __del__(self) -> None:
            lane = getattr(self, "_lane", None)
            if lane is not None and machine.gone("a stream"):
                machine.destroy_stream(lane)

    class Event:
        __slots__ = ("_event",)

        def __init__(self, flags: int = 0) -> None:
            with guarded("cuEventCreate"):
                self._event = machine.event(timed=not flags & event_flags.DISABLE_TIMING)

        def record(self, stream: Stream | None = None) -> Event:
            with guarded("cuEventRecord") as call:
                machine.record(self._event, lane_of(call, stream))
            return self

        def synchronize(self) -> Event:
            with guarded("cuEventSynchronize") as call:
                machine.wait(self._event, call)
            return self

        def query(self) -> bool:
            with guarded("cuEventQuery") as call:
                return machine.query(self._event, call)

        def time_till(self, event: Event) -> float:
            with guarded("cuEventElapsedTime") as call:
                return machine.elapsed_ms(self._event, event._event, call)

        def __del__(self) -> None:
            event = getattr(self, "_event", None)
            if event is not None and machine.gone("an event"):
                machine.destroy_event(event)

    def lane_of(call: str, stream: Stream | None) -> Lane:
        if stream is None:
            machine.violated(f"{call} on the default stream")
            return machine.stream()
        return stream._lane

    class DeviceAllocation:
        __slots__ = ("_address",)

        def __init__(self, address: int) -> None:
            self._address: int | None = address

        def __int__(self) -> int:
            if self._address is None:
                raise machine.segfault("the address of device memory that was freed")
            return self._address

        def __index__(self) -> int:
            return int(self)

        def free(self) -> None:
            if self._address is None:
                raise LogicError("device_allocation::free failed: invalid resource handle")
            address, self._address = self._address, None
            machine.fault("cuMemFree")
            if machine.gone("device memory"):
                machine.free("cuMemFree", address, "device")

        def __del__(self) -> None:
            if self._address is not None and not machine.sticky:
                machine.violated("device memory was left to the collector")

    def mem_alloc(nbytes: int, /) -> DeviceAllocation:
        with guarded("cuMemAlloc") as call:
            return DeviceAllocation(machine.allocate(call, nbytes).address)

    class HostPointer:
        __slots__ = ("__array_interface__", "_block", "_flags")

        def __init__(self, nbytes: int, flags: int, shape: Any, dtype: Any) -> None:
            with guarded("cuMemHostAlloc") as call:
                mapped = bool(flags & host_alloc_flags.DEVICEMAP)
                self._block = machine.allocate_host(call, nbytes, mapped)
            self._flags = flags
            kind = np.dtype(dtype)
            self.__array_interface__ = {
                "data": (self._block.address, False),
                "shape": tuple(shape),
                "typestr": kind.str,
                "version": 3,
            }

        def get_device_pointer(self) -> int:
            with guarded("cuMemHostGetDevicePointer") as call:
                if self._block.mapped is None or self._block.freed:
                    raise CudaFault(call, 1)
                return self._block.mapped

    class PagelockedHostAllocation(HostPointer):
        __slots__ = ()

        def free(self) -> None:
            if self._block.freed:
                raise LogicError("pagelocked_host_allocation::free failed: invalid resource handle")
            machine.fault("cuMemFreeHost")
            if machine.gone("page-locked memory"):
                machine.free("cuMemFreeHost", self._block.address, "host")
            else:
                self._block.freed = True

        def get_flags(self) -> int:
            return self._flags

        def __del__(self) -> None:
            block = getattr(self, "_block", None)
            if block is not None and not block.freed and not machine.sticky:
                machine.violated("page-locked memory was left to the collector")

    def pagelocked_empty(shape: Any, dtype: Any, order: str = "C", mem_flags: int = 0) -> NDArray[Any]:
        dims = (shape,) if isinstance(shape, int) else tuple(shape)
        nbytes = int(np.prod(dims, dtype=np.int64)) * np.dtype(dtype).itemsize
        return np.asarray(PagelockedHostAllocation(nbytes, mem_flags, dims, dtype))

    def address_of(array: Any, *, write: bool) -> tuple[int, int]:
        """What PyObject_AsReadBuffer gives: the array itself is not kept."""
        view = np.asarray(array)
        if not view.flags.c_contiguous:
            raise ValueError("ndarray is not contiguous")
        if write and not view.flags.writeable:
            raise TypeError("cannot use ndarray as modifiable buffer")
        return view.ctypes.data, view.nbytes

    def memcpy_htod_async(dest: Any, src: Any, stream: Stream | None = None) -> None:
        host, nbytes = address_of(src, write=False)
        with guarded("cuMemcpyHtoDAsync") as call:
            machine.copy_in(int(dest), host, nbytes, lane_of(call, stream))

    def memcpy_dtoh_async(dest: Any, src: Any, stream: Stream | None = None) -> None:
        host, nbytes = address_of(dest, write=True)
        with guarded("cuMemcpyDtoHAsync") as call:
            machine.copy_out(host, int(src), nbytes, lane_of(call, stream))

    class Function:
        __slots__ = ("_format", "_module", "_name")

        def __init__(self, module: Module, name: str) -> None:
            self._module, self._name, self._format = module, name, ""

        def prepare(self, arg_types: str, texrefs: Any = ()) -> Function:
            self._format = arg_types
            return self

        def prepared_async_call(self, grid: Any, block: Any, stream: Stream, *args: Any, **kwargs: Any) -> None:
            values = struct.unpack(self._format, struct.pack(self._format, *args))
            with guarded("cuLaunchKernel") as call:
                machine.run_kernel(self._module._handle, self._name, grid, block, values, lane_of(call, stream))

    class Module:
        __slots__ = ("_handle",)

        def __init__(self, handle: int) -> None:
            self._handle = handle

        def get_function(self, name: str) -> Function:
            with guarded("cuModuleGetFunction") as call:
                return Function(self, machine.find_kernel(self._handle, name, call))

        def __del__(self) -> None:
            if machine.gone("a module"):
                machine.unload_module(self._handle)

    def module_from_buffer(buffer: bytes, /) -> Module:
        with guarded("cuModuleLoadData") as call:
            return Module(machine.load_module(buffer, call))

    def mem_get_info() -> tuple[int, int]:
        with guarded("cuMemGetInfo"):
            return machine.total_bytes - machine.used_bytes(), machine.total_bytes

    def get_driver_version() -> int:
        return machine.driver_version

    def get_version() -> tuple[int, int, int]:
        version = machine.driver_version
        return version // 1000, version % 1000 // 10, version % 10

    event_flags = SimpleNamespace(DEFAULT=0, BLOCKING_SYNC=1, DISABLE_TIMING=2)
    host_alloc_flags = SimpleNamespace(PORTABLE=1, DEVICEMAP=2, WRITECOMBINED=4)
    names = {
        "Context": Context,
        "Device": Device,
        "DeviceAllocation": DeviceAllocation,
        "Error": Error,
        "Event": Event,
        "Function": Function,
        "HostAllocation": PagelockedHostAllocation,
        "HostPointer": HostPointer,
        "LaunchError": LaunchError,
        "LogicError": LogicError,
        "MemoryError": OutOfMemory,
        "Module": Module,
        "PagelockedHostAllocation": PagelockedHostAllocation,
        "RuntimeError": OtherError,
        "Stream": Stream,
        "ctx_flags": SimpleNamespace(SCHED_AUTO=0, SCHED_SPIN=1, SCHED_YIELD=2, SCHED_BLOCKING_SYNC=4, MAP_HOST=8),
        "device_attribute": SimpleNamespace(
            INTEGRATED="INTEGRATED",
            CAN_MAP_HOST_MEMORY="CAN_MAP_HOST_MEMORY",
            UNIFIED_ADDRESSING="UNIFIED_ADDRESSING",
        ),
        "event_flags": event_flags,
        "get_driver_version": get_driver_version,
        "get_version": get_version,
        "host_alloc_flags": host_alloc_flags,
        "init": init,
        "mem_alloc": mem_alloc,
        "mem_get_info": mem_get_info,
        "memcpy_dtoh_async": memcpy_dtoh_async,
        "memcpy_htod_async": memcpy_htod_async,
        "module_from_buffer": module_from_buffer,
        "pagelocked_empty": pagelocked_empty,
    }
    for name, value in names.items():
        setattr(driver, name, value)
    return driver
