"""A strict fake of `cuda.bindings.driver` and `cuda.bindings.runtime` over a Machine: tuples whose first is an error.

Nothing raises and nothing frees itself: an error that is not looked at goes by unseen, and the next call gets None.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from types import ModuleType
from typing import Any

from tests.engine.tensorrt.fake_machine import Machine
from tests.engine.tensorrt.fake_parts import ERRORS, CudaFault

# As in cuda.h and driver_types.h.
_CAPTURE_MODES = {"GLOBAL": 0, "THREAD_LOCAL": 1, "RELAXED": 2}
_ATTRIBUTES = {
    "INTEGRATED": 18,
    "CAN_MAP_HOST_MEMORY": 19,
    "UNIFIED_ADDRESSING": 41,
    "COMPUTE_CAPABILITY_MAJOR": 75,
    "COMPUTE_CAPABILITY_MINOR": 76,
}
_RUNTIME_NAMES = {
    0: "cudaSuccess",
    1: "cudaErrorInvalidValue",
    2: "cudaErrorMemoryAllocation",
    3: "cudaErrorInitializationError",
    100: "cudaErrorNoDevice",
    201: "cudaErrorDeviceUninitialized",
    214: "cudaErrorECCUncorrectable",
    400: "cudaErrorInvalidResourceHandle",
    600: "cudaErrorNotReady",
    700: "cudaErrorIllegalAddress",
    702: "cudaErrorLaunchTimeout",
    714: "cudaErrorHardwareStackError",
    715: "cudaErrorIllegalInstruction",
    716: "cudaErrorMisalignedAddress",
    719: "cudaErrorLaunchFailure",
    900: "cudaErrorStreamCaptureUnsupported",
    901: "cudaErrorStreamCaptureInvalidated",
    999: "cudaErrorUnknown",
}


_int_enum: Any = enum.IntEnum


class _Handle:
    """CUstream, CUevent and the like: a number in a box."""

    __slots__ = ("_value",)

    def __init__(self, init_value: object = 0) -> None:
        self._value = int(init_value)  # type: ignore[call-overload]

    def __int__(self) -> int:
        number: int = self._value
        return number

    def __index__(self) -> int:
        return int(self)


def _handles(names: tuple[str, ...]) -> dict[str, type[_Handle]]:
    return {name: type(name, (_Handle,), {"__slots__": ()}) for name in names}


class _Core:
    """What both modules are made of. Results are (code, value) or (code,)."""

    def __init__(self, machine: Machine, errors: Any, handles: dict[str, type[_Handle]], prefix: str) -> None:
        self.machine, self.errors, self.handles, self.prefix = machine, errors, handles, prefix

    def call(self, name: str, run: Callable[[str], Any], *, values: int = 1, context: bool = True) -> tuple[Any, ...]:
        call = f"{self.prefix}{name}"
        try:
            self.machine.enter(call, context=context)
            result = run(call)
        except CudaFault as fault:
            return (self.errors(fault.code), *[None] * values)
        if values == 0:
            return (self.errors(0),)
        return (self.errors(0), *(result if values > 1 else (result,)))


def _set(module: ModuleType, functions: list[Callable[..., Any]]) -> None:
    for function in functions:
        setattr(module, function.__name__, function)


def make_driver(machine: Machine) -> Any:
    """A module like `cuda.bindings.driver`."""
    driver: Any = ModuleType("cuda.bindings.driver")
    result = _int_enum("CUresult", {name: code for code, (name, _) in ERRORS.items()})
    kinds = _handles(
        (
            "CUcontext",
            "CUdevice",
            "CUdeviceptr",
            "CUevent",
            "CUfunction",
            "CUgraph",
            "CUgraphExec",
            "CUmodule",
            "CUstream",
        )
    )
    core = _Core(machine, result, kinds, "")
    call = core.call
    for name, kind in kinds.items():
        setattr(driver, name, kind)
    driver.CUresult = result
    driver.CUdevice_attribute = _int_enum(
        "CUdevice_attribute", {f"CU_DEVICE_ATTRIBUTE_{name}": value for name, value in _ATTRIBUTES.items()}
    )
    driver.CUstreamCaptureMode = _int_enum(
        "CUstreamCaptureMode", {f"CU_STREAM_CAPTURE_MODE_{name}": value for name, value in _CAPTURE_MODES.items()}
    )
    driver.CUstream_flags = _int_enum("CUstream_flags", {"CU_STREAM_DEFAULT": 0, "CU_STREAM_NON_BLOCKING": 1})
    driver.CUevent_flags = _int_enum(
        "CUevent_flags", {"CU_EVENT_DEFAULT": 0, "CU_EVENT_BLOCKING_SYNC": 1, "CU_EVENT_DISABLE_TIMING": 2}
    )
    for name, value in (("PORTABLE", 1), ("DEVICEMAP", 2), ("WRITECOMBINED", 4)):
        setattr(driver, f"CU_MEMHOSTALLOC_{name}", value)

    def cuInit(Flags: int) -> Any:  # noqa: N802, N803
        return call("cuInit", lambda _: None, values=0, context=False)

    def cuDriverGetVersion() -> Any:  # noqa: N802
        return call("cuDriverGetVersion", lambda _: machine.driver_version, context=False)

    def cuDeviceGet(ordinal: int) -> Any:  # noqa: N802
        return call("cuDeviceGet", lambda _: kinds["CUdevice"](ordinal), context=False)

    def cuDeviceGetCount() -> Any:  # noqa: N802
        return call("cuDeviceGetCount", lambda _: 1, context=False)

    def cuDeviceGetName(length: int, dev: Any) -> Any:  # noqa: N802
        name = machine.name.encode()[: length - 1]
        return call("cuDeviceGetName", lambda _: name + bytes(length - len(name)), context=False)

    def cuDeviceGetAttribute(attrib: Any, dev: Any) -> Any:  # noqa: N802
        values = {18: int(machine.integrated), 19: 1, 41: 1, 75: machine.capability[0], 76: machine.capability[1]}
        return call("cuDeviceGetAttribute", lambda _: values[int(attrib)], context=False)

    def cuDevicePrimaryCtxRetain(dev: Any) -> Any:  # noqa: N802
        def run(_: str) -> Any:
            machine.retain()
            return kinds["CUcontext"](0xC0)

        return call("cuDevicePrimaryCtxRetain", run, context=False)

    def cuDevicePrimaryCtxRelease(dev: Any) -> Any:  # noqa: N802
        if machine.sticky:
            machine.release()
        return call("cuDevicePrimaryCtxRelease", lambda _: machine.release(), values=0, context=False)

    def cuCtxPushCurrent(ctx: Any) -> Any:  # noqa: N802
        return call("cuCtxPushCurrent", lambda _: machine.push(), values=0, context=False)

    def cuCtxPopCurrent() -> Any:  # noqa: N802
        def run(name: str) -> Any:
            machine.pop(name)
            return kinds["CUcontext"](0xC0)

        if machine.sticky and machine.current():
            machine.pop("cuCtxPopCurrent")
        return call("cuCtxPopCurrent", run, context=False)

    def cuCtxSynchronize() -> Any:  # noqa: N802
        def run(name: str) -> None:
            for stream in list(machine._streams.values()):
                machine.drain(stream)
            machine.raise_sticky(name)

        return call("cuCtxSynchronize", run, values=0)

    def cuMemGetInfo() -> Any:  # noqa: N802
        free = machine.total_bytes - machine.used_bytes()
        return call("cuMemGetInfo", lambda _: (free, machine.total_bytes), values=2)

    def cuMemAlloc(bytesize: int) -> Any:  # noqa: N802
        return call("cuMemAlloc", lambda name: kinds["CUdeviceptr"](machine.allocate(name, bytesize).address))

    def cuMemFree(dptr: Any) -> Any:  # noqa: N802
        return call("cuMemFree", lambda name: machine.free(name, int(dptr), "device"), values=0)

    def cuMemHostAlloc(bytesize: int, Flags: int) -> Any:  # noqa: N802, N803
        return call("cuMemHostAlloc", lambda name: machine.allocate_host(name, bytesize, bool(Flags & 2)).address)

    def cuMemFreeHost(p: Any) -> Any:  # noqa: N802
        return call("cuMemFreeHost", lambda name: machine.free(name, int(p), "host"), values=0)

    def cuMemHostGetDevicePointer(p: Any, Flags: int) -> Any:  # noqa: N802, N803
        def run(name: str) -> Any:
            block = machine.blocks.get(int(p))
            if block is None or block.mapped is None:
                raise CudaFault(name, 1)
            return kinds["CUdeviceptr"](block.mapped)

        return call("cuMemHostGetDevicePointer", run)

    def cuMemcpyHtoDAsync(dstDevice: Any, srcHost: Any, ByteCount: int, hStream: Any) -> Any:  # noqa: N802, N803
        def run(name: str) -> None:
            stream = machine.find_stream(name, int(hStream))
            machine.copy_in(int(dstDevice), int(srcHost), ByteCount, stream)

        return call("cuMemcpyHtoDAsync", run, values=0)

    def cuMemcpyDtoHAsync(dstHost: Any, srcDevice: Any, ByteCount: int, hStream: Any) -> Any:  # noqa: N802, N803
        def run(name: str) -> None:
            stream = machine.find_stream(name, int(hStream))
            machine.copy_out(int(dstHost), int(srcDevice), ByteCount, stream)

        return call("cuMemcpyDtoHAsync", run, values=0)

    def cuStreamCreate(Flags: int) -> Any:  # noqa: N802, N803
        return call("cuStreamCreate", lambda _: kinds["CUstream"](machine.stream().handle))

    def cuStreamDestroy(hStream: Any) -> Any:  # noqa: N802, N803
        def run(name: str) -> None:
            machine.destroy_stream(machine.find_stream(name, int(hStream)))

        return call("cuStreamDestroy", run, values=0)

    def cuStreamSynchronize(hStream: Any) -> Any:  # noqa: N802, N803
        def run(name: str) -> None:
            machine.drain(machine.find_stream(name, int(hStream)))
            machine.raise_sticky(name)

        return call("cuStreamSynchronize", run, values=0)

    def cuEventCreate(Flags: int) -> Any:  # noqa: N802, N803
        timed = not int(Flags) & 2
        return call("cuEventCreate", lambda _: kinds["CUevent"](machine.event(timed=timed).handle))

    def cuEventElapsedTime(hStart: Any, hEnd: Any) -> Any:  # noqa: N802, N803
        def run(name: str) -> Any:
            start, end = machine.find_event(name, int(hStart)), machine.find_event(name, int(hEnd))
            return machine.elapsed_ms(start, end, name)

        return call("cuEventElapsedTime", run)

    functions: dict[int, str] = {}

    def cuModuleLoadData(image: bytes) -> Any:  # noqa: N802
        return call("cuModuleLoadData", lambda name: kinds["CUmodule"](machine.load_module(image, name)))

    def cuModuleGetFunction(hmod: Any, name: bytes) -> Any:  # noqa: N802
        def run(made: str) -> Any:
            functions[int(hmod)] = machine.find_kernel(int(hmod), name.decode(), made)
            return kinds["CUfunction"](int(hmod))

        return call("cuModuleGetFunction", run)

    def cuModuleUnload(hmod: Any) -> Any:  # noqa: N802
        return call("cuModuleUnload", lambda _: machine.unload_module(int(hmod)), values=0)

    def cuLaunchKernel(  # noqa: N802
        f: Any, gridDimX: int, gridDimY: int, gridDimZ: int, blockDimX: int, blockDimY: int, blockDimZ: int,  # noqa: N803
        sharedMemBytes: int, hStream: Any, kernelParams: Any, extra: int,  # noqa: N803
    ) -> Any:  # fmt: skip
        def run(name: str) -> None:
            values = [kind(value).value or 0 for value, kind in zip(*kernelParams, strict=True)]
            grid, block = (gridDimX, gridDimY, gridDimZ), (blockDimX, blockDimY, blockDimZ)
            stream = machine.find_stream(name, int(hStream))
            machine.run_kernel(int(f), functions[int(f)], grid, block, values, stream)

        return call("cuLaunchKernel", run, values=0)

    def cuEventDestroy(hEvent: Any) -> Any:  # noqa: N802, N803
        def run(name: str) -> None:
            machine.destroy_event(machine.find_event(name, int(hEvent)))

        return call("cuEventDestroy", run, values=0)

    def cuEventRecord(hEvent: Any, hStream: Any) -> Any:  # noqa: N802, N803
        def run(name: str) -> None:
            machine.record(machine.find_event(name, int(hEvent)), machine.find_stream(name, int(hStream)))

        return call("cuEventRecord", run, values=0)

    def cuEventQuery(hEvent: Any) -> Any:  # noqa: N802, N803
        def run(name: str) -> None:
            if not machine.query(machine.find_event(name, int(hEvent)), name):
                raise CudaFault(name, 600)

        return call("cuEventQuery", run, values=0)

    def cuEventSynchronize(hEvent: Any) -> Any:  # noqa: N802, N803
        return call(
            "cuEventSynchronize", lambda name: machine.wait(machine.find_event(name, int(hEvent)), name), values=0
        )

    def cuGetErrorName(error: Any) -> Any:  # noqa: N802
        return (result(0), ERRORS[int(error)][0].encode())

    def cuGetErrorString(error: Any) -> Any:  # noqa: N802
        return (result(0), ERRORS[int(error)][1].encode())

    _set(driver, [value for name, value in list(locals().items()) if name.startswith("cu") and callable(value)])
    _set(driver, _graph_calls(core, "cu", "CUgraph", "CUgraphExec", "cuGraphInstantiate"))
    return driver


def make_runtime(machine: Machine) -> Any:
    """A module like `cuda.bindings.runtime`: what captures graphs, and the errors."""
    runtime: Any = ModuleType("cuda.bindings.runtime")
    errors = _int_enum("cudaError_t", {name: code for code, name in _RUNTIME_NAMES.items()})
    kinds = _handles(("cudaEvent_t", "cudaGraphExec_t", "cudaGraph_t", "cudaStream_t"))
    for name, kind in kinds.items():
        setattr(runtime, name, kind)
    runtime.cudaError_t = errors
    runtime.cudaStreamCaptureMode = _int_enum(
        "cudaStreamCaptureMode",
        {"cudaStreamCaptureModeGlobal": 0, "cudaStreamCaptureModeThreadLocal": 1, "cudaStreamCaptureModeRelaxed": 2},
    )

    def cudaGetErrorName(error: Any) -> Any:  # noqa: N802
        return (errors(0), _RUNTIME_NAMES[int(error)].encode())

    def cudaGetErrorString(error: Any) -> Any:  # noqa: N802
        return (errors(0), ERRORS[int(error)][1].encode())

    core = _Core(machine, errors, kinds, "")
    _set(runtime, [cudaGetErrorName, cudaGetErrorString])
    _set(runtime, _graph_calls(core, "cuda", "cudaGraph_t", "cudaGraphExec_t", "cudaGraphInstantiate"))
    return runtime


def _graph_calls(core: _Core, prefix: str, graph: str, executable: str, instantiate: str) -> list[Callable[..., Any]]:
    """Capture, instantiate, launch and destroy, of either module: only their prefix differs."""
    machine, call, kinds = core.machine, core.call, core.handles

    def begin(hStream: Any, mode: Any) -> Any:  # noqa: N803
        def run(name: str) -> None:
            machine.begin_capture(machine.find_stream(name, int(hStream)), name)

        return call(f"{prefix}StreamBeginCapture", run, values=0)

    def end(hStream: Any) -> Any:  # noqa: N803
        def run(name: str) -> Any:
            return kinds[graph](machine.end_capture(machine.find_stream(name, int(hStream)), name).handle)

        return call(f"{prefix}StreamEndCapture", run)

    def make(hGraph: Any, flags: int) -> Any:  # noqa: N803
        def run(name: str) -> Any:
            return kinds[executable](machine.instantiate(machine.find_graph(name, int(hGraph))).handle)

        return call(instantiate, run)

    def launch(hGraphExec: Any, hStream: Any) -> Any:  # noqa: N803
        def run(name: str) -> None:
            found = machine.find_graph(name, int(hGraphExec))
            if not found.executable:
                raise CudaFault(name, 1)
            machine.launch(found, machine.find_stream(name, int(hStream)))

        return call(f"{prefix}GraphLaunch", run, values=0)

    def destroy(hGraph: Any) -> Any:  # noqa: N803
        def run(name: str) -> None:
            machine.destroy_graph(machine.find_graph(name, int(hGraph)))

        return call(f"{prefix}GraphDestroy", run, values=0)

    def destroy_exec(hGraphExec: Any) -> Any:  # noqa: N803
        def run(name: str) -> None:
            machine.destroy_graph(machine.find_graph(name, int(hGraphExec)))

        return call(f"{prefix}GraphExecDestroy", run, values=0)

    names = ("StreamBeginCapture", "StreamEndCapture", "GraphInstantiate", "GraphLaunch", "GraphDestroy")
    functions: list[Any] = [begin, end, make, launch, destroy, destroy_exec]
    for function, name in zip(functions, (*names, "GraphExecDestroy"), strict=True):
        function.__name__ = f"{prefix}{name}"
    return functions
