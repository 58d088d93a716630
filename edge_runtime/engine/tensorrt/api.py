"""Names for the types of the vendors' libraries, which are not there where the code is checked.

Every value that comes from TensorRT, PyCUDA or cuda.bindings is annotated with one of these where it enters (a
parameter, an attribute); what its methods give follows from that. Here all are Any. tests/engine/tensorrt/
test_contract.py puts the types of the real bindings in their place and lets mypy check every name, argument and
keyword that is used on them: what is annotated `Any` instead escapes it.
"""

from __future__ import annotations

from typing import Any, TypeAlias

__all__ = [
    "CudaDriver",
    "CudaLibrary",
    "NvrtcLibrary",
    "PyCudaContext",
    "PyCudaDevice",
    "PyCudaDriver",
    "PyCudaEvent",
    "PyCudaFunction",
    "PyCudaHostArray",
    "PyCudaMemory",
    "PyCudaModule",
    "PyCudaStream",
    "TensorRt",
    "TrtBuilder",
    "TrtBuilderConfig",
    "TrtContext",
    "TrtDataType",
    "TrtDims",
    "TrtEngine",
    "TrtHostMemory",
    "TrtInspector",
    "TrtLogger",
    "TrtNetwork",
    "TrtOutputAllocator",
    "TrtParser",
    "TrtProfile",
    "TrtProgressMonitor",
    "TrtRuntime",
    "TrtTimingCache",
]

TensorRt: TypeAlias = Any
"""The module `tensorrt`."""
TrtBuilder: TypeAlias = Any
TrtBuilderConfig: TypeAlias = Any
TrtContext: TypeAlias = Any
TrtDataType: TypeAlias = Any
TrtDims: TypeAlias = Any
TrtEngine: TypeAlias = Any
TrtHostMemory: TypeAlias = Any
TrtInspector: TypeAlias = Any
TrtLogger: TypeAlias = Any
TrtNetwork: TypeAlias = Any
TrtOutputAllocator: TypeAlias = Any
TrtParser: TypeAlias = Any
TrtProfile: TypeAlias = Any
TrtProgressMonitor: TypeAlias = Any
TrtRuntime: TypeAlias = Any
TrtTimingCache: TypeAlias = Any

PyCudaDriver: TypeAlias = Any
"""The module `pycuda.driver`."""
PyCudaContext: TypeAlias = Any
PyCudaDevice: TypeAlias = Any
PyCudaEvent: TypeAlias = Any
PyCudaFunction: TypeAlias = Any
PyCudaHostArray: TypeAlias = Any
"""What `pagelocked_empty` gives."""
PyCudaMemory: TypeAlias = Any
"""A DeviceAllocation."""
PyCudaModule: TypeAlias = Any
PyCudaStream: TypeAlias = Any
CudaDriver: TypeAlias = Any
"""The module `cuda.bindings.driver` (older layout: `cuda.cuda`)."""
CudaLibrary: TypeAlias = Any
"""The driver's own shared library, through ctypes."""
NvrtcLibrary: TypeAlias = Any
"""NVRTC's shared library, through ctypes."""
