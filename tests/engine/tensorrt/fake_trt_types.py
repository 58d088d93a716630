"""Enumerations and small types of the fake TensorRT, per version as the real bindings have them."""

from __future__ import annotations

import enum
import weakref
from typing import Any

import numpy as np

from tests.engine.tensorrt.fake_machine import Machine

_SHARED: dict[str, dict[str, int]] = {
    "TensorIOMode": {"NONE": 0, "INPUT": 1, "OUTPUT": 2},
    "TensorLocation": {"DEVICE": 0, "HOST": 1},
    "TensorFormat": {
        "LINEAR": 0,
        "CHW2": 1,
        "HWC8": 2,
        "CHW4": 3,
        "CHW16": 4,
        "CHW32": 5,
        "DHWC8": 6,
        "CDHW32": 7,
        "HWC": 8,
        "DLA_LINEAR": 9,
        "DLA_HWC4": 10,
        "HWC16": 11,
        "DHWC": 12,
    },
    "ExecutionContextAllocationStrategy": {"STATIC": 0, "ON_PROFILE_CHANGE": 1, "USER_MANAGED": 2},
    "DeviceType": {"GPU": 0, "DLA": 1},
    "ErrorCode": {
        "SUCCESS": 0,
        "INTERNAL_ERROR": 1,
        "MEM_ALLOC_FAILED": 2,
        "MODEL_DESERIALIZE_FAILED": 3,
        "INVALID_VALUE": 4,
        "INVALID_GRAPH": 5,
        "INVALID_NODE": 6,
        "UNSUPPORTED_GRAPH": 7,
        "UNSUPPORTED_NODE": 8,
    },
    "LayerInformationFormat": {"ONELINE": 0, "JSON": 1},
    "ProfilingVerbosity": {"LAYER_NAMES_ONLY": 0, "NONE": 1, "DETAILED": 2},
}
_TYPES = {"FLOAT": 0, "HALF": 1, "INT8": 2, "INT32": 3, "BOOL": 4, "UINT8": 5, "FP8": 6, "BF16": 7, "INT64": 8}
_BY_MAJOR: dict[int, dict[str, dict[str, int]]] = {
    10: {
        "DataType": {**_TYPES, "INT4": 9},
        "NetworkDefinitionCreationFlag": {"EXPLICIT_BATCH": 0, "STRONGLY_TYPED": 1},
        "BuilderFlag": {
            "FP16": 0,
            "INT8": 1,
            "DEBUG": 2,
            "GPU_FALLBACK": 3,
            "REFIT": 4,
            "DISABLE_TIMING_CACHE": 5,
            "TF32": 6,
            "SPARSE_WEIGHTS": 7,
            "SAFETY_SCOPE": 8,
            "OBEY_PRECISION_CONSTRAINTS": 9,
            "PREFER_PRECISION_CONSTRAINTS": 10,
            "DIRECT_IO": 11,
            "REJECT_EMPTY_ALGORITHMS": 12,
            "VERSION_COMPATIBLE": 13,
            "EXCLUDE_LEAN_RUNTIME": 14,
            "FP8": 15,
            "ERROR_ON_TIMING_CACHE_MISS": 16,
            "BF16": 17,
            "DISABLE_COMPILATION_CACHE": 18,
            "STRIP_PLAN": 19,
            "REFIT_IDENTICAL": 20,
            "WEIGHT_STREAMING": 21,
            "INT4": 22,
            "REFIT_INDIVIDUAL": 23,
        },
        "MemoryPoolType": {
            "WORKSPACE": 0,
            "DLA_MANAGED_SRAM": 1,
            "DLA_LOCAL_DRAM": 2,
            "DLA_GLOBAL_DRAM": 3,
            "TACTIC_DRAM": 4,
            "TACTIC_SHARED_MEMORY": 5,
        },
        "HardwareCompatibilityLevel": {"NONE": 0, "AMPERE_PLUS": 1},
    },
    11: {
        "DataType": {**_TYPES, "INT4": 9, "FP4": 10, "E8M0": 11},
        "NetworkDefinitionCreationFlag": {
            "STRONGLY_TYPED": 0,
            "PREFER_JIT_PYTHON_PLUGINS": 1,
            "PREFER_AOT_PYTHON_PLUGINS": 2,
        },
        "BuilderFlag": {
            "DEBUG": 2,
            "GPU_FALLBACK": 3,
            "REFIT": 4,
            "DISABLE_TIMING_CACHE": 5,
            "TF32": 6,
            "SPARSE_WEIGHTS": 7,
            "SAFETY_SCOPE": 8,
            "DIRECT_IO": 11,
            "VERSION_COMPATIBLE": 12,
            "EXCLUDE_LEAN_RUNTIME": 13,
            "ERROR_ON_TIMING_CACHE_MISS": 15,
            "DISABLE_COMPILATION_CACHE": 17,
            "STRIP_PLAN": 18,
            "REFIT_IDENTICAL": 19,
            "WEIGHT_STREAMING": 20,
            "REFIT_INDIVIDUAL": 22,
            "STRICT_NANS": 23,
            "MONITOR_MEMORY": 24,
            "EDITABLE_TIMING_CACHE": 26,
            "DISTRIBUTIVE_INDEPENDENCE": 27,
        },
        "MemoryPoolType": {
            "WORKSPACE": 0,
            "DLA_MANAGED_SRAM": 1,
            "DLA_LOCAL_DRAM": 2,
            "DLA_GLOBAL_DRAM": 3,
            "TACTIC_DRAM": 4,
            "TACTIC_SHARED_MEMORY": 5,
        },
        "HardwareCompatibilityLevel": {"NONE": 0, "AMPERE_PLUS": 1, "SAME_COMPUTE_CAPABILITY": 2},
    },
}
SEVERITIES = {"INTERNAL_ERROR": 0, "ERROR": 1, "WARNING": 2, "INFO": 3, "VERBOSE": 4}


class _Enum(enum.Enum):
    """As pybind11's: turns into an int, equals none."""

    def __int__(self) -> int:
        return int(self.value)

    def __index__(self) -> int:
        return int(self.value)


_made: Any = _Enum


def enums(major: int) -> dict[str, Any]:
    """Name -> enumeration, for a version."""
    return {name: _made(name, members) for name, members in {**_SHARED, **_BY_MAJOR[major]}.items()}


Severity: Any = _made("Severity", SEVERITIES)


class Dims:
    """Looks like a tuple, and compares with tuples and lists only."""

    __slots__ = ("_sizes",)
    MAX_DIMS = 8

    def __init__(self, shape: Any = ()) -> None:
        self._sizes = [int(size) for size in shape]

    def __len__(self) -> int:
        return len(self._sizes)

    def __getitem__(self, index: Any) -> Any:
        return tuple(self._sizes[index]) if isinstance(index, slice) else self._sizes[index]

    def __setitem__(self, index: int, value: int) -> None:
        self._sizes[index] = int(value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (tuple, list)):
            raise TypeError(f"__eq__(): incompatible function arguments. Invoked with: {self}, {other}")
        return self._sizes == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        return str(tuple(self._sizes))

    __repr__ = __str__


NUMPY = {
    "FLOAT": np.float32,
    "HALF": np.float16,
    "INT8": np.int8,
    "INT32": np.int32,
    "INT64": np.int64,
    "BOOL": np.bool_,
    "UINT8": np.uint8,
}
ONNX_TYPES = {
    "tensor(float)": "FLOAT",
    "tensor(float16)": "HALF",
    "tensor(int8)": "INT8",
    "tensor(int32)": "INT32",
    "tensor(int64)": "INT64",
    "tensor(bool)": "BOOL",
    "tensor(uint8)": "UINT8",
}


class Explicit(type):
    """As pybind11: a subclass whose __init__ does not call the base's own one is refused."""

    def __call__(cls, *arguments: Any, **keywords: Any) -> Any:
        made = super().__call__(*arguments, **keywords)
        if not getattr(made, "_ready", False):
            raise TypeError(f"{cls.__mro__[-2].__name__}.__init__() must be called when overriding __init__")
        return made


class Owned:
    """Something of the library's: counted, and destroyed where and when it is allowed."""

    __slots__ = ("__weakref__", "_machine")
    _held = 0

    def _born(self, machine: Machine) -> None:
        self._machine = machine
        machine.objects[type(self).__name__] += 1
        machine.hidden_bytes += self._held

    def _dying(self) -> None:
        pass

    def __del__(self) -> None:
        machine = getattr(self, "_machine", None)
        if machine is not None and machine.gone(f"an {type(self).__name__}"):
            machine.objects[type(self).__name__] -= 1
            machine.hidden_bytes -= self._held
            self._dying()


class ILogger(metaclass=Explicit):
    __slots__ = ("__dict__", "__weakref__", "_ready")

    def __init__(self) -> None:
        self._ready = True

    def log(self, severity: Any, msg: str) -> None:
        raise RuntimeError('Tried to call pure virtual function "ILogger::log"')


ILogger.Severity = Severity  # type: ignore[attr-defined]
for each in Severity:
    setattr(ILogger, each.name, each)


class IOutputAllocator(metaclass=Explicit):
    __slots__ = ("__dict__", "__weakref__", "_ready")

    def __init__(self) -> None:
        self._ready = True


class Log:
    """The logger as the library holds it: without keeping it alive."""

    def __init__(self, logger: Any, machine: Machine) -> None:
        self._machine = machine
        if not isinstance(logger, ILogger):
            raise TypeError("__init__(): incompatible constructor arguments: logger")
        self._to = weakref.ref(logger)

    def __call__(self, severity: str, words: str) -> None:
        logger = self._to()
        if logger is None:
            raise self._machine.segfault("the logger is gone while the library still logs to it")
        logger.log(Severity[severity], words)
