"""The fake TensorRT's half that builds: parser, network, configuration, and a plan that holds the ONNX."""

from __future__ import annotations

import ctypes
import hashlib
import json
import threading
from collections.abc import Callable
from typing import Any

import onnx

from tests.engine.tensorrt.fake_machine import Machine
from tests.engine.tensorrt.fake_plan import make_plan
from tests.engine.tensorrt.fake_trt_types import Dims, Explicit, Log, Owned

STEPS = 3
_TYPES = {1: "FLOAT", 2: "UINT8", 3: "INT8", 6: "INT32", 7: "INT64", 9: "BOOL", 10: "HALF"}


def add_builder(trt: Any, machine: Machine, version: str, touch: Callable[[str], Any]) -> None:
    """Put the building classes into the module. `touch` is the way into every call."""
    major = int(version.partition(".")[0])

    class IHostMemory:
        """Bytes of the library's; `memory_of` gives one that shows them."""

        @property
        def nbytes(self) -> int:
            return ctypes.sizeof(self)  # type: ignore[arg-type]

        @property
        def dtype(self) -> Any:
            return trt.DataType.UINT8

    def memory_of(data: bytes) -> Any:
        kind = type("IHostMemory", (IHostMemory, ctypes.c_ubyte * len(data)), {})
        return kind.from_buffer_copy(data)  # type: ignore[attr-defined]

    class ITensor:
        __slots__ = ("_dtype", "_name", "_shape")

        def __init__(self, value: Any) -> None:
            kind = value.type.tensor_type
            self._name = value.name
            self._dtype = trt.DataType[_TYPES[kind.elem_type]]
            self._shape = [d.dim_value if d.HasField("dim_value") else -1 for d in kind.shape.dim]

        @property
        def name(self) -> str:
            return str(self._name)

        @property
        def shape(self) -> Dims:
            return Dims(self._shape)

        @property
        def dtype(self) -> Any:
            return self._dtype

    class ILayer:
        __slots__ = ("_node",)

        def __init__(self, node: Any) -> None:
            self._node = node

        @property
        def name(self) -> str:
            return str(self._node.name or self._node.op_type)

    class INetworkDefinition(Owned):
        __slots__ = ("_flags", "_model")

        def __init__(self, flags: int) -> None:
            self._flags, self._model = flags, b""
            self._born(machine)

        def _graph(self) -> Any:
            return onnx.load_from_string(self._model).graph

        @property
        def name(self) -> str:
            return "fake"

        @property
        def num_inputs(self) -> int:
            return len(self._graph().input)

        @property
        def num_outputs(self) -> int:
            return len(self._graph().output)

        @property
        def num_layers(self) -> int:
            return len(self._graph().node)

        @property
        def flags(self) -> int:
            return self._flags

        def get_flag(self, flag: Any) -> bool:
            return bool(self._flags >> int(flag) & 1)

        def get_input(self, index: int) -> ITensor:
            return ITensor(self._graph().input[index])

        def get_output(self, index: int) -> ITensor:
            return ITensor(self._graph().output[index])

        def get_layer(self, index: int) -> ILayer:
            return ILayer(self._graph().node[index])

    class ParserError:
        __slots__ = ("_code", "_node", "_operator", "_words")

        def __init__(self, words: str, node: str = "", operator: str = "", code: str = "INVALID_GRAPH") -> None:
            self._words, self._node, self._operator, self._code = words, node, operator, code

        def code(self) -> Any:
            return trt.ErrorCode[self._code]

        def desc(self) -> str:
            return self._words

        def node(self) -> int:
            return 0

        def node_name(self) -> str:
            return self._node

        def node_operator(self) -> str:
            return self._operator

        def line(self) -> int:
            return 0

        def file(self) -> str:
            return "ModelImporter.cpp"

        def func(self) -> str:
            return "parseNode"

        def __str__(self) -> str:
            return f"In node 0 with name: {self._node} and operator: {self._operator} (parseNode): {self._words}"

    class OnnxParser(Owned):
        __slots__ = ("_errors", "_log", "_network")

        def __init__(self, network: Any, logger: Any) -> None:
            touch("OnnxParser")
            self._network, self._log = network, Log(logger, machine)
            self._errors: list[ParserError] = []
            self._born(machine)

        def parse(self, model: Any, path: str | None = None) -> bool:
            fault = touch("OnnxParser.parse")
            data = bytes(memoryview(model))
            try:
                loaded = onnx.load_from_string(data)
            except Exception:  # noqa: BLE001  whatever protobuf raises
                self._errors.append(ParserError("Failed to parse ONNX model from buffer"))
                return False
            if fault is not None:
                self._errors.append(ParserError(str(fault)))
            for node in loaded.graph.node:
                if not onnx.defs.has(node.op_type, node.domain):
                    words = f"No importer registered for op: {node.op_type}"
                    self._errors.append(ParserError(words, node.name, node.op_type, "UNSUPPORTED_NODE"))
            for error in self._errors:
                self._log("ERROR", error.desc())
            self._network._model = data
            return not self._errors

        @property
        def num_errors(self) -> int:
            return len(self._errors)

        def get_error(self, index: int) -> ParserError:
            return self._errors[index]

        def clear_errors(self) -> None:
            self._errors.clear()

        def supports_operator(self, op_name: str) -> bool:
            return bool(onnx.defs.has(op_name))

    class IOptimizationProfile:
        __slots__ = ("_shapes",)

        def __init__(self) -> None:
            self._shapes: dict[str, Any] = {}

        def set_shape(self, input: str, min: Any, opt: Any, max: Any) -> None:  # noqa: A002  the real names
            shapes = [tuple(int(size) for size in each) for each in (min, opt, max)]
            if any(not a <= b <= c for a, b, c in zip(*shapes, strict=True)):
                raise ValueError("The shape provided for min, opt and max is not consistent")
            self._shapes[input] = tuple(shapes)

        def get_shape(self, input: str) -> list[Dims]:  # noqa: A002
            return [Dims(each) for each in self._shapes.get(input, ())]

        def __bool__(self) -> bool:
            return True

    class ITimingCache(Owned):
        __slots__ = ("_known",)

        def __init__(self, data: bytes) -> None:
            self._known = set(json.loads(data)["known"]) if data else set()
            self._born(machine)

        def serialize(self) -> Any:
            touch("ITimingCache.serialize")
            return memory_of(json.dumps({"version": version, "known": sorted(self._known)}).encode())

        def combine(self, input_cache: Any, ignore_mismatch: bool) -> bool:
            self._known |= input_cache._known
            return True

        def reset(self) -> bool:
            self._known.clear()
            return True

    class IProgressMonitor(metaclass=Explicit):
        __slots__ = ("__dict__", "__weakref__", "_ready")

        def __init__(self) -> None:
            self._ready = True

        def phase_start(self, phase_name: str, parent_phase: Any, num_steps: int) -> None:
            raise RuntimeError("pure virtual")

        def step_complete(self, phase_name: str, step: int) -> bool:
            raise RuntimeError("pure virtual")

        def phase_finish(self, phase_name: str) -> None:
            raise RuntimeError("pure virtual")

    class IBuilderConfig(Owned):
        __slots__ = ("_cache", "_flags", "_log", "_pools", "_profiles", "_values")

        def __init__(self, logger: Any) -> None:
            self._log = logger
            self._pools: dict[Any, int] = {}
            self._profiles: list[IOptimizationProfile] = []
            self._flags, self._cache = 0, None
            self._values: dict[str, Any] = {
                "builder_optimization_level": 3,
                "hardware_compatibility_level": trt.HardwareCompatibilityLevel.NONE,
                "progress_monitor": None,
                "profiling_verbosity": trt.ProfilingVerbosity.LAYER_NAMES_ONLY,
                "max_aux_streams": -1,
                "default_device_type": trt.DeviceType.GPU,
                "DLA_core": -1,
                "avg_timing_iterations": 1,
            }
            self._born(machine)

        def set_memory_pool_limit(self, pool: Any, pool_size: int) -> None:
            touch("IBuilderConfig.set_memory_pool_limit")
            self._pools[pool] = pool_size

        def get_memory_pool_limit(self, pool: Any) -> int:
            return self._pools.get(pool, machine.total_bytes)

        @property
        def flags(self) -> int:
            return self._flags

        def set_flag(self, flag: Any) -> None:
            self._flags |= 1 << int(flag)

        def clear_flag(self, flag: Any) -> None:
            self._flags &= ~(1 << int(flag))

        def get_flag(self, flag: Any) -> bool:
            return bool(self._flags >> int(flag) & 1)

        def can_run_on_DLA(self, layer: Any) -> bool:  # noqa: N802
            return layer._node.op_type not in machine.gpu_only

        def add_optimization_profile(self, profile: Any) -> int:
            if touch("IBuilderConfig.add_optimization_profile") is not None:
                return -1
            self._profiles.append(profile)
            return len(self._profiles) - 1

        @property
        def num_optimization_profiles(self) -> int:
            return len(self._profiles)

        def create_timing_cache(self, serialized_timing_cache: Any) -> Any:
            if touch("IBuilderConfig.create_timing_cache") is not None:
                return None
            return ITimingCache(bytes(memoryview(serialized_timing_cache)))

        def set_timing_cache(self, cache: Any, ignore_mismatch: bool) -> bool:
            if touch("IBuilderConfig.set_timing_cache") is not None:
                return False
            self._cache = cache
            return True

        def get_timing_cache(self) -> Any:
            return self._cache

    def value(name: str) -> property:
        def read(self: Any) -> Any:
            return self._values[name]

        def write(self: Any, given: Any) -> None:
            self._values[name] = given

        return property(read, write)

    for name in (
        "builder_optimization_level",
        "hardware_compatibility_level",
        "progress_monitor",
        "profiling_verbosity",
        "max_aux_streams",
        "default_device_type",
        "DLA_core",
        "avg_timing_iterations",
    ):
        setattr(IBuilderConfig, name, value(name))

    class Builder(Owned):
        __slots__ = ("_log", "_threads")

        def __init__(self, logger: Any) -> None:
            if touch("Builder") is not None:
                raise TypeError("pybind11::init(): factory function returned nullptr")
            self._log, self._threads = Log(logger, machine), 1
            self._born(machine)

        @property
        def num_DLA_cores(self) -> int:  # noqa: N802
            return machine.dla_cores

        @property
        def max_threads(self) -> int:
            return self._threads

        @max_threads.setter
        def max_threads(self, count: int) -> None:
            self._threads = count

        def create_network(self, flags: int = 0) -> Any:
            if touch("Builder.create_network") is not None:
                return None
            if major < 11 and not flags >> int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED) & 1:
                machine.violated("a network that is not strongly typed")
            return INetworkDefinition(flags)

        def create_builder_config(self) -> Any:
            return None if touch("Builder.create_builder_config") is not None else IBuilderConfig(self._log)

        def create_optimization_profile(self) -> Any:
            touch("Builder.create_optimization_profile")
            return IOptimizationProfile()

        def build_serialized_network(self, network: Any, config: Any) -> Any:
            fault = touch("Builder.build_serialized_network")
            if fault is not None:
                return self._fail(str(fault))
            profiles = [each._shapes for each in config._profiles]
            for index in range(network.num_inputs):
                tensor = network.get_input(index)
                if -1 in list(tensor.shape[:]) and not all(tensor.name in each for each in profiles or [{}]):
                    return self._fail(
                        "Error Code 4: API Usage Error (Network has dynamic or shape inputs, but no optimization "
                        "profile has been defined.)"
                    )
            if config.progress_monitor is not None and not _walk(config.progress_monitor):
                return self._fail("Error Code 8: Cancelled")
            if config._cache is not None:
                config._cache._known.add(hashlib.sha256(network._model).hexdigest())
            return memory_of(
                make_plan(network._model, version=version, capability=machine.capability, profiles=profiles)
            )

        def _fail(self, words: str) -> None:
            self._log("ERROR", f"IBuilder::buildSerializedNetwork: {words}")

    def _walk(monitor: Any) -> bool:
        """The phases of a build, as told from a thread of the library's."""
        answers: list[bool] = []

        def run() -> None:
            monitor.phase_start("Building engine", None, STEPS)
            for step in range(STEPS):
                answers.append(bool(monitor.step_complete("Building engine", step)))
                if not answers[-1]:
                    break
            monitor.phase_finish("Building engine")

        thread = threading.Thread(target=run, name="library")
        thread.start()
        thread.join()
        return bool(answers) and answers[-1]

    class EngineInspector(Owned):
        __slots__ = ("_engine",)

        def __init__(self, engine: Any) -> None:
            self._engine = engine
            self._born(machine)

        def get_engine_information(self, format: Any) -> str:  # noqa: A002
            touch("EngineInspector.get_engine_information")
            return json.dumps({"Layers": ["fake"], "Bindings": list(self._engine._dtypes)})

        def get_layer_information(self, layer_index: int, format: Any) -> str:  # noqa: A002
            return json.dumps({"Name": "fake"})

    for each in (
        Builder,
        EngineInspector,
        IBuilderConfig,
        IHostMemory,
        ILayer,
        INetworkDefinition,
        IOptimizationProfile,
        IProgressMonitor,
        ITensor,
        ITimingCache,
        OnnxParser,
        ParserError,
    ):
        setattr(trt, each.__name__, each)
