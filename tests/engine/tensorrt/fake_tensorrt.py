"""A strict fake of the module `tensorrt`: the run-time half. fake_builder.py has the other.

It computes through ONNX Runtime, on memory of a Machine that only its own "device" may touch. Its members are checked
against the real bindings of the same version (test_contract.py). It is stricter than they are where they let a fault
go by: objects have to be dropped context first, then engine, then runtime, on a thread with the context current.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from edge_runtime.engine.onnxrt import open_session
from tests.engine.tensorrt.fake_builder import add_builder
from tests.engine.tensorrt.fake_machine import Machine
from tests.engine.tensorrt.fake_parts import ALIGNMENT, CudaFault
from tests.engine.tensorrt.fake_plan import BadPlan, read_plan
from tests.engine.tensorrt.fake_trt_types import NUMPY, ONNX_TYPES, Dims, ILogger, IOutputAllocator, Log, Owned, enums

WEIGHTS_BYTES = 1 << 20
SCRATCH_BYTES = 1 << 19


def make_tensorrt(machine: Machine, version: str = "10.3.0") -> Any:
    """A module like `tensorrt` of that version."""
    trt: Any = ModuleType("tensorrt")
    major = int(version.partition(".")[0])
    kinds = enums(major)
    DataType, TensorIOMode, TensorLocation = kinds["DataType"], kinds["TensorIOMode"], kinds["TensorLocation"]  # noqa: N806
    Strategy = kinds["ExecutionContextAllocationStrategy"]  # noqa: N806
    for name, kind in kinds.items():
        setattr(trt, name, kind)

    def touch(site: str) -> Any:
        """The way into every call. Returns what was injected for it."""
        if not machine.driver_present:
            raise machine.segfault(f"{site} without a driver")
        if not machine.current():
            machine.violated(f"{site} on a thread without a context")
        return machine.fault(site)

    class Bomb:
        """What 11.x gives for a runtime where there is no driver."""

        def __getattribute__(self, name: str) -> Any:
            raise machine.segfault(f"Runtime.{name} without a driver")

        def __del__(self) -> None:
            machine.violated("segmentation fault: a Runtime that was made without a driver is destroyed")

    class Runtime(Owned):
        __slots__ = ("_core", "_engines", "_host_code", "_log")

        def __new__(cls, logger: Any) -> Any:  # noqa: ARG004
            if not machine.driver_present:
                if major < 11:
                    raise TypeError("pybind11::init(): factory function returned nullptr")
                return Bomb()
            return super().__new__(cls)

        def __init__(self, logger: Any) -> None:
            if touch("Runtime") is not None:
                raise TypeError("pybind11::init(): factory function returned nullptr")
            self._log = Log(logger, machine)
            self._engines: weakref.WeakSet[Any] = weakref.WeakSet()
            self._host_code = False
            self._core = -1
            self._born(machine)

        def _dying(self) -> None:
            if list(self._engines):
                machine.violated("a Runtime was destroyed before its engines")

        @property
        def engine_host_code_allowed(self) -> bool:
            return self._host_code

        @engine_host_code_allowed.setter
        def engine_host_code_allowed(self, value: bool) -> None:
            if value:
                machine.violated("code inside of plans was allowed")
            self._host_code = value

        @property
        def num_DLA_cores(self) -> int:  # noqa: N802
            return machine.dla_cores

        @property
        def DLA_core(self) -> int:  # noqa: N802
            return self._core

        @DLA_core.setter
        def DLA_core(self, core: int) -> None:  # noqa: N802
            if core >= machine.dla_cores:
                machine.violated(f"DLA core {core} of {machine.dla_cores}")
            self._core = core

        def deserialize_cuda_engine(self, serialized_engine: Any) -> Any:
            fault = touch("Runtime.deserialize_cuda_engine")
            data = bytes(memoryview(serialized_engine))
            try:
                if machine.sticky:
                    raise BadPlan(f"Error Code 1: Cuda Runtime (error {machine.sticky})")
                if fault is not None:
                    raise BadPlan(str(fault))
                header, onnx = read_plan(data, version, machine.capability)
                if machine.used_bytes() + WEIGHTS_BYTES > machine.total_bytes:
                    raise BadPlan("Error Code 2: OutOfMemory (Requested size was 1048576 bytes.)")
            except BadPlan as reason:
                self._log("ERROR", str(reason))
                return None
            self._log("INFO", f"Loaded engine size: {len(data) // 2**20} MiB")
            engine = ICudaEngine(self._log, open_session(onnx, "fake plan"), header)
            self._engines.add(engine)
            return engine

    class ICudaEngine(Owned):
        __slots__ = ("_contexts", "_dtypes", "_inputs", "_log", "_names", "_outputs", "_profiles", "_session")
        _held = WEIGHTS_BYTES

        def __init__(self, log: Log, session: Any, header: Any) -> None:
            self._log, self._session, self._profiles = log, session, list(header.profiles)
            self._inputs = {each.name: list(each.shape) for each in session.get_inputs()}
            self._outputs = {each.name: list(each.shape) for each in session.get_outputs()}
            every = [*session.get_inputs(), *session.get_outputs()]
            self._dtypes = {each.name: DataType[ONNX_TYPES[each.type]] for each in every}
            # Neither the order of the ONNX nor that of the engine before.
            self._names = machine.random.sample(list(self._dtypes), len(self._dtypes))
            self._contexts: weakref.WeakSet[Any] = weakref.WeakSet()
            self._born(machine)

        def _dying(self) -> None:
            if list(self._contexts):
                machine.violated("an ICudaEngine was destroyed before its contexts")

        @property
        def name(self) -> str:
            return "fake"

        @property
        def num_io_tensors(self) -> int:
            return len(self._names)

        @property
        def num_optimization_profiles(self) -> int:
            return max(1, len(self._profiles))

        @property
        def num_layers(self) -> int:
            return 1

        @property
        def device_memory_size_v2(self) -> int:
            return SCRATCH_BYTES

        def get_device_memory_size_for_profile_v2(self, profile_index: int) -> int:
            return SCRATCH_BYTES

        def get_tensor_name(self, index: int) -> str:
            touch("ICudaEngine.get_tensor_name")
            name: str = self._names[index]
            return name

        def _known(self, name: str) -> bool:
            if name in self._dtypes:
                return True
            self._log("ERROR", f"Error Code 3: API Usage Error (Given invalid tensor name: {name}.)")
            return False

        def get_tensor_mode(self, name: str) -> Any:
            touch("ICudaEngine.get_tensor_mode")
            if not self._known(name):
                return TensorIOMode.NONE
            return TensorIOMode.INPUT if name in self._inputs else TensorIOMode.OUTPUT

        def get_tensor_dtype(self, name: str) -> Any:
            injected = touch("ICudaEngine.get_tensor_dtype")
            if injected is not None:
                return DataType[injected]
            return self._dtypes[name] if self._known(name) else DataType.FLOAT

        def get_tensor_shape(self, name: str) -> Dims:
            touch("ICudaEngine.get_tensor_shape")
            shape = {**self._inputs, **self._outputs}.get(name, [])
            return Dims([size if isinstance(size, int) else -1 for size in shape])

        def get_tensor_location(self, name: str) -> Any:
            injected = touch("ICudaEngine.get_tensor_location")
            return TensorLocation[injected] if injected is not None else TensorLocation.DEVICE

        def get_tensor_format(self, name: str, profile_index: int = 0) -> Any:
            injected = touch("ICudaEngine.get_tensor_format")
            return kinds["TensorFormat"][injected or "LINEAR"]

        def get_tensor_format_desc(self, name: str, profile_index: int = 0) -> str:
            return "Row-major linear format (kLINEAR)"

        def get_tensor_vectorized_dim(self, name: str, profile_index: int = 0) -> int:
            return -1

        def is_shape_inference_io(self, name: str) -> bool:
            return False

        def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[Dims]:
            touch("ICudaEngine.get_tensor_profile_shape")
            if name not in self._inputs or profile_index >= self.num_optimization_profiles:
                self._log("ERROR", f"Error Code 3: API Usage Error (no profile {profile_index} of input {name})")
                return [Dims(), Dims(), Dims()]
            if not self._profiles or name not in self._profiles[profile_index]:
                return [self.get_tensor_shape(name)] * 3
            return [Dims(shape) for shape in self._profiles[profile_index][name]]

        def create_execution_context(self, strategy: Any = Strategy.STATIC) -> Any:
            fault = touch("ICudaEngine.create_execution_context")
            short = machine.used_bytes() + SCRATCH_BYTES > machine.total_bytes
            if fault is not None or short or machine.sticky:
                self._log("ERROR", str(fault or "Error Code 2: OutOfMemory (Requested size was 524288 bytes.)"))
                return None
            context = IExecutionContext(self)
            self._contexts.add(context)
            return context

        def create_engine_inspector(self) -> Any:
            touch("ICudaEngine.create_engine_inspector")
            return trt.EngineInspector(self)

    class IExecutionContext(Owned):
        __slots__ = ("_addresses", "_allocators", "_engine", "_pending", "_profile", "_ran", "_shapes")
        _held = SCRATCH_BYTES

        def __init__(self, engine: Any) -> None:
            self._engine = weakref.ref(engine)
            self._shapes = {n: tuple(s) for n, s in engine._inputs.items() if all(isinstance(d, int) for d in s)}
            self._addresses: dict[str, int] = {}
            self._allocators: dict[str, Any] = {}
            self._profile, self._pending = 0, {"runs": 0, "stream": 0}
            self._ran: set[Any] = set()
            self._born(machine)

        def _dying(self) -> None:
            if self._pending["runs"]:
                machine.violated("an IExecutionContext was destroyed while it ran")

        def _of(self, site: str) -> Any:
            engine = self._engine()
            if engine is None:
                raise machine.segfault(f"{site} after the engine was destroyed")
            return engine

        @property
        def active_optimization_profile(self) -> int:
            return self._profile

        @property
        def all_binding_shapes_specified(self) -> bool:
            return not self._missing()

        def _missing(self) -> list[str]:
            engine = self._of("IExecutionContext.infer_shapes")
            return [name for name in engine._inputs if name not in self._shapes]

        def _refuse(self, words: str) -> bool:
            self._of("IExecutionContext")._log("ERROR", f"Error Code 3: API Usage Error ({words})")
            return False

        def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
            if touch("IExecutionContext.set_optimization_profile_async") is not None:
                return self._refuse("the profile cannot be set")
            if profile_index >= self._of("set_optimization_profile_async").num_optimization_profiles:
                return self._refuse(f"there is no profile {profile_index}")
            machine.find_stream("set_optimization_profile_async", int(stream_handle))
            self._profile = profile_index
            return True

        def set_input_shape(self, name: str, shape: Any) -> bool:
            if touch("IExecutionContext.set_input_shape") is not None:
                return self._refuse(f"Set dimension of {name} failed")
            engine, wanted = self._of("IExecutionContext.set_input_shape"), tuple(int(size) for size in shape)
            declared = engine._inputs.get(name)
            if declared is None:
                return self._refuse(f"Given invalid tensor name: {name}")
            if len(wanted) != len(declared):
                return self._refuse(f"{name} has {len(declared)} dimensions, and {len(wanted)} were given")
            for fixed, size in zip(declared, wanted, strict=True):
                if isinstance(fixed, int) and fixed != size:
                    return self._refuse(f"Static dimension mismatch while setting input shape for {name}: {wanted}")
            low, _, high = (tuple(each) for each in engine.get_tensor_profile_shape(name, self._profile))
            if any(d is not None and not isinstance(d, int) for d in declared) and not all(
                a <= size <= b for a, size, b in zip(low, wanted, high, strict=True)
            ):
                return self._refuse(f"{wanted} of {name} is not in the range of the profile: {low} to {high}")
            self._shapes[name] = wanted
            return True

        def infer_shapes(self) -> list[str]:
            fault = touch("IExecutionContext.infer_shapes")
            return list(fault) if fault is not None else self._missing()

        def get_tensor_shape(self, name: str) -> Dims:
            touch("IExecutionContext.get_tensor_shape")
            engine = self._of("IExecutionContext.get_tensor_shape")
            if name in engine._inputs:
                return Dims(self._shapes.get(name, [d if isinstance(d, int) else -1 for d in engine._inputs[name]]))
            known = {
                symbol: size
                for given, shape in self._shapes.items()
                for symbol, size in zip(engine._inputs[given], shape, strict=True)
                if isinstance(symbol, str)
            }
            return Dims([d if isinstance(d, int) else known.get(d, -1) for d in engine._outputs[name]])

        def set_tensor_address(self, name: str, memory: int) -> bool:
            if touch("IExecutionContext.set_tensor_address") is not None:
                return self._refuse(f"the address of {name} cannot be set")
            engine, address = self._of("IExecutionContext.set_tensor_address"), int(memory)
            if name not in engine._dtypes:
                return self._refuse(f"Given invalid tensor name: {name}")
            if address % ALIGNMENT:
                machine.violated(f"{name} is bound to {address:#x}, which is not at a multiple of {ALIGNMENT}")
            self._addresses[name] = address
            return True

        def get_tensor_address(self, name: str) -> int:
            return self._addresses.get(name, 0)

        def set_output_allocator(self, name: str, output_allocator: Any) -> bool:
            if touch("IExecutionContext.set_output_allocator") is not None:
                return self._refuse(f"the allocator of {name} cannot be set")
            if not isinstance(output_allocator, IOutputAllocator):
                raise TypeError("set_output_allocator(): incompatible function arguments")
            if name not in self._of("IExecutionContext.set_output_allocator")._outputs:
                return self._refuse(f"Given invalid tensor name: {name}")
            self._allocators[name] = output_allocator
            return True

        def get_output_allocator(self, name: str) -> Any:
            return self._allocators.get(name)

        def get_max_output_size(self, name: str) -> int:
            return 1 << 20

        def execute_async_v3(self, stream_handle: int) -> bool:
            fault = touch("IExecutionContext.execute_async_v3")
            engine = self._of("IExecutionContext.execute_async_v3")
            stream = machine.find_stream("execute_async_v3", int(stream_handle))
            if machine.sticky:
                engine._log("ERROR", f"Error Code 1: Cuda Runtime ({CudaFault('', machine.sticky)})")
                return False
            if fault is not None:
                return self._refuse(str(fault))
            if missing := self._missing():
                return self._refuse(f"Not all shapes are specified: {', '.join(missing)}")
            deciding = [n for n in engine._outputs if -1 in list(self.get_tensor_shape(n)[:])]
            for name in engine._dtypes:
                if name in deciding and name not in self._allocators:
                    return self._refuse(f"{name} has a shape that the data decides, and no output allocator")
                if name not in deciding and not self._addresses.get(name):
                    return self._refuse(f"Address is not set for tensor {name}")
            shapes, addresses = dict(self._shapes), dict(self._addresses)
            key = tuple(sorted(shapes.items()))
            if stream.capturing is not None and (deciding or key not in self._ran):
                stream.spoilt = True
                return self._refuse("a run that has to wait for the device cannot be captured")
            if self._pending["runs"] and self._pending["stream"] != stream.handle:
                machine.violated("a context was enqueued on two streams at once")
            self._ran.add(key)
            pending, engine_of = self._pending, self._engine
            pending["stream"] = stream.handle
            if deciding:  # the real one waits for the device as well: only it knows how much is needed
                machine.drain(stream)
                return self._allocated(engine, compute(engine, shapes, addresses), addresses, stream)
            me, counted = weakref.ref(self), stream.capturing is None
            pending["runs"] += counted
            machine.put(stream, "execute", lambda: run_later(me, engine_of, shapes, addresses, pending, counted))
            return True

        def _allocated(self, engine: Any, results: dict[str, Any], addresses: dict[str, int], stream: Any) -> bool:
            for name, value in results.items():
                if name in self._allocators:
                    allocator = self._allocators[name]
                    old, size = addresses.get(name, 0), max(value.nbytes, 1)
                    if hasattr(allocator, "reallocate_output_async"):
                        given = allocator.reallocate_output_async(name, old, size, ALIGNMENT, stream.handle)
                    else:
                        given = allocator.reallocate_output(name, old, size, ALIGNMENT)
                    if not given:
                        return self._refuse(f"the allocator of {name} gave nothing")
                    addresses[name] = int(given)
                    allocator.notify_shape(name, Dims(value.shape))
            machine.put(stream, "execute", lambda: store(results, addresses))
            return True

    def compute(engine: Any, shapes: dict[str, Any], addresses: dict[str, int]) -> dict[str, Any]:
        """Read the inputs where they are now, and run."""
        feeds = {}
        for name, shape in shapes.items():
            kind = np.dtype(NUMPY[engine._dtypes[name].name])
            nbytes = int(np.prod(shape)) * kind.itemsize
            feeds[name] = machine.memory(addresses[name], nbytes, what=name).view(kind).reshape(shape).copy()
        return dict(zip(engine._outputs, engine._session.run(None, feeds), strict=True))

    def store(results: dict[str, Any], addresses: dict[str, int]) -> None:
        for name, value in results.items():
            whole = np.ascontiguousarray(value)
            if whole.nbytes:
                target = machine.memory(addresses[name], whole.nbytes, what=name)
                target[:] = whole.view(np.uint8).reshape(-1)

    def run_later(
        context: Callable[[], Any],
        engine_of: Callable[[], Any],
        shapes: dict[str, Any],
        addresses: dict[str, int],
        pending: dict[str, int],
        counted: bool,
    ) -> None:
        """What the device does when it comes to it: with the addresses of then, and the bytes of now."""
        pending["runs"] -= counted
        engine = engine_of()
        if context() is None or engine is None:
            raise machine.segfault("a run, or a graph, whose execution context or engine was destroyed")
        store(compute(engine, shapes, addresses), addresses)

    def nptype(trt_type: Any) -> Any:
        if trt_type.name not in NUMPY:
            raise TypeError("Could not resolve TensorRT datatype to an equivalent numpy datatype.")
        return NUMPY[trt_type.name]

    def init_libnvinfer_plugins(logger: Any, namespace: str) -> bool:
        fault = touch("init_libnvinfer_plugins")
        Log(logger, machine)
        return fault is None

    trt.init_libnvinfer_plugins = init_libnvinfer_plugins
    for value in (Runtime, ICudaEngine, IExecutionContext, ILogger, IOutputAllocator, Dims):
        setattr(trt, value.__name__, value)
    trt.nptype = nptype
    trt.__version__ = version
    add_builder(trt, machine, version, touch)
    return trt
