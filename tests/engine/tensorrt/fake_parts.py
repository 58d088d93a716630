"""The parts of a machine with a GPU that is not there: memory, streams, events, and the driver's error codes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

POISON = 0xFF  # of float32: NaN
DEVICE_BASE = 0x7_0000_0000
MAPPED_BASE = 0x5_0000_0000
ALIGNMENT = 256
PAGE = 4096

SUCCESS, INVALID_VALUE, OUT_OF_MEMORY, NO_DEVICE, INVALID_CONTEXT = 0, 1, 2, 100, 201
INVALID_HANDLE, NOT_READY, ILLEGAL_ADDRESS = 400, 600, 700
CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED = 900, 901
INVALID_IMAGE, NOT_FOUND = 200, 500
CUBIN = b"\x7fELF fake kernel "
"""What an image for these machines begins with; the kernel's name follows."""
ERRORS = {
    SUCCESS: ("CUDA_SUCCESS", "no error"),
    INVALID_VALUE: ("CUDA_ERROR_INVALID_VALUE", "invalid argument"),
    OUT_OF_MEMORY: ("CUDA_ERROR_OUT_OF_MEMORY", "out of memory"),
    3: ("CUDA_ERROR_NOT_INITIALIZED", "initialization error"),
    NO_DEVICE: ("CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"),
    INVALID_IMAGE: ("CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"),
    NOT_FOUND: ("CUDA_ERROR_NOT_FOUND", "named symbol not found"),
    INVALID_CONTEXT: ("CUDA_ERROR_INVALID_CONTEXT", "invalid device context"),
    214: ("CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error encountered"),
    INVALID_HANDLE: ("CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"),
    NOT_READY: ("CUDA_ERROR_NOT_READY", "device not ready"),
    ILLEGAL_ADDRESS: ("CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"),
    702: ("CUDA_ERROR_LAUNCH_TIMEOUT", "the launch timed out and was terminated"),
    714: ("CUDA_ERROR_HARDWARE_STACK_ERROR", "hardware stack error"),
    715: ("CUDA_ERROR_ILLEGAL_INSTRUCTION", "an illegal instruction was encountered"),
    716: ("CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"),
    719: ("CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"),
    CAPTURE_UNSUPPORTED: (
        "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
        "operation not permitted when stream is capturing",
    ),
    CAPTURE_INVALIDATED: (
        "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
        "operation failed due to a previous error during capture",
    ),
    999: ("CUDA_ERROR_UNKNOWN", "unknown error"),
}
STICKY = (214, ILLEGAL_ADDRESS, 702, 714, 715, 716, 719, 999)


class Segfault(RuntimeError):
    """What would have ended the process. The violation is recorded as well, for whoever catches this."""


class CudaFault(Exception):
    """A driver call that failed with a code; the fakes of the bindings make of it what theirs make of it."""

    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"{call} failed: {ERRORS[code][1]}")
        self.call, self.code = call, code


@dataclass(eq=False)
class Block:
    """Memory at an address: on the device, or page-locked on the host (`mapped`: the device's address of it)."""

    address: int
    data: NDArray[np.uint8]
    kind: str
    mapped: int | None = None
    freed: bool = False


@dataclass(eq=False)
class Stream:
    handle: int
    queue: deque[tuple[str, Callable[[], None]]] = field(default_factory=deque)
    capturing: list[tuple[str, Callable[[], None]]] | None = None
    spoilt: bool = False
    alive: bool = True


@dataclass(eq=False)
class Event:
    handle: int
    recorded: Stream | None = None
    done: bool = True
    lag: int = 0
    records: int = 0
    alive: bool = True
    timed: bool = False
    at_ms: float = 0.0


@dataclass(eq=False)
class Graph:
    handle: int
    operations: list[tuple[str, Callable[[], None]]]
    executable: bool = False
    alive: bool = True
