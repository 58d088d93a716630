"""CUDA as the TensorRT backend needs it: what a door offers, its handles and its errors.

A door is used by one thread, the owner of the GPU: see owner.py. It refuses every other thread, what was freed, and
everything once a sticky error has poisoned the process.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from edge_runtime.errors import EngineError

log = logging.getLogger(__name__)

OUT_OF_MEMORY = 2
_MOST_VIEWS = 64

STICKY: dict[int, str] = {
    214: "uncorrectable ECC error encountered",
    220: "uncorrectable NVLink error detected during the execution",
    226: "Invalid access of peer GPU memory over nvlink or a hardware error",
    700: "an illegal memory access was encountered",
    702: "the launch timed out and was terminated",
    709: "context is destroyed",
    710: "device-side assert triggered",
    714: "hardware stack error",
    715: "an illegal instruction was encountered",
    716: "misaligned address",
    717: "operation not supported on global/shared address space",
    718: "invalid program counter",
    719: "unspecified launch failure",
    721: "tensor memory not completely freed",
    810: "the MPS client has been terminated by the server",
    911: "an async error has occured in external entity outside of CUDA",
    999: "unknown error",
}
"""CUDA's errors after which nothing works any more in this process, and the driver's own words for them: PyCUDA and
TensorRT pass on the words only."""


def sticky_in(text: str) -> int | None:
    """The number of the sticky error that a message of PyCUDA or TensorRT tells of, or None."""
    return next((number for number, words in STICKY.items() if words in text), None)


class CudaError(EngineError):
    """A CUDA call failed. `call` is its name, `number` CUDA's own number where it is known, `text` its words."""

    default_code = "cuda_failed"

    def __init__(self, call: str, number: int | None, text: str) -> None:
        memory = number == OUT_OF_MEMORY
        super().__init__(
            f"{call} failed: {text}" if number is None else f"{call} failed: {text} (CUDA error {number})",
            code="gpu_memory" if memory else None,
            where="GPU",
            remedy="use a smaller variant or batch, fewer lanes, or stop what else uses this memory"
            if memory
            else "see the log; `edge-runtime doctor` tells what this device is",
            retryable=memory,
        )
        self.call = call
        self.number = number
        self.text = text


class CudaFatal(CudaError):
    """A sticky error: the process has to end."""

    default_code = "gpu_fatal"

    def __init__(self, call: str, number: int | None, text: str) -> None:
        super().__init__(call, number, text)
        self.code = "gpu_fatal"
        self.remedy = "nothing but a new process helps: the daemon ends after a flush, and systemd starts it again"
        self.retryable = False


@dataclass(slots=True, eq=False)
class Stream:
    """A CUDA stream; `handle` is its address, as TensorRT takes it. `native` is None once it is freed."""

    handle: int
    native: Any


@dataclass(slots=True, eq=False)
class Event:
    """A CUDA event; one of `timer` keeps the time. `native` is None once it is freed."""

    native: Any


@dataclass(slots=True, eq=False)
class DeviceMemory:
    """Memory of the GPU. `native` is None once it is freed."""

    address: int
    nbytes: int
    native: Any


@dataclass(slots=True, eq=False)
class Graph:
    """A captured CUDA graph, ready to be launched. `native` is None once it is freed."""

    native: Any


@dataclass(slots=True, eq=False)
class Kernel:
    """A function on the GPU, with the module that holds it. `native` is None once it is freed."""

    native: Any
    module: Any


@dataclass(slots=True, eq=False)
class HostMemory:
    """Page-locked memory. `device_address`: where the GPU sees it, where it is mapped.

    Its bytes are seen through `array` and views of it. It is given back with `let_go`, and then freed when the last
    view is gone: whoever still holds an array made of it holds its memory.
    """

    address: int
    nbytes: int
    native: Any
    device_address: int | None = None
    _array: NDArray[np.uint8] | None = field(init=False)
    _anchor: Any = field(init=False)
    _views: dict[tuple[int, int], NDArray[np.uint8]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        # every view's chain of bases ends at this object, and numpy keeps it for them
        self._anchor = (ctypes.c_uint8 * self.nbytes).from_address(self.address)
        self._array = np.frombuffer(self._anchor, np.uint8)

    @property
    def array(self) -> NDArray[np.uint8]:
        """[nbytes] uint8. Raises EngineError after `let_go`."""
        if self._array is None:
            raise EngineError("page-locked memory is used after it was given back", code="engine_state")
        return self._array

    def first(self, nbytes: int) -> NDArray[np.uint8]:
        """[nbytes] uint8: its first bytes; made once for each size."""
        return self.part(0, nbytes)

    def part(self, start: int, nbytes: int) -> NDArray[np.uint8]:
        """[nbytes] uint8 from byte `start` on; the same array again and again."""
        view = self._views.get((start, nbytes))
        if view is None:
            if len(self._views) >= _MOST_VIEWS:  # a camera whose pictures are never of the same size
                self._views.clear()
            view = self._views[start, nbytes] = self.array[start : start + nbytes]
        return view

    def let_go(self, free: Callable[[], object]) -> None:
        """Give it back: `free` is called when nothing views it any more, on the thread that lets go last. Idempotent.

        `free` may take no lock that this thread may hold: it can run inside of a garbage collection.
        """
        if self._array is None:
            return
        finalizer = weakref.finalize(self._anchor, free)
        finalizer.atexit = False
        self._views.clear()
        self._array = self._anchor = None


class Cuda(Protocol):
    """What a door offers. Everything but `name` and `graphs` is for the owner's thread, between start and stop.

    Every call raises CudaError where CUDA refuses, CudaFatal where it can never work again, and EngineError (code
    "engine_state") where it is called on another thread, before `start`, after `stop`, or with what was freed.
    """

    @property
    def name(self) -> str: ...

    @property
    def graphs(self) -> bool:
        """Whether it can capture CUDA graphs."""
        ...

    def start(self) -> None:
        """Retain the primary context of device 0 and make it current on this thread, which is the owner from now on."""
        ...

    def stop(self) -> None:
        """Undo `start`. Idempotent."""
        ...

    def stream(self) -> Stream: ...

    def free_stream(self, stream: Stream) -> None: ...

    def event(self) -> Event: ...

    def timer(self) -> Event:
        """An event that keeps the time of its record, for `elapsed_ms`."""
        ...

    def elapsed_ms(self, start: Event, end: Event) -> float:
        """Between the records of two timers, both of which are done."""
        ...

    def free_event(self, event: Event) -> None: ...

    def record(self, event: Event, stream: Stream) -> None: ...

    def query(self, event: Event) -> bool:
        """Whether everything before the event's last record is done."""
        ...

    def synchronise(self, stream: Stream) -> None:
        """Wait until the stream is empty."""
        ...

    def allocate(self, nbytes: int) -> DeviceMemory: ...

    def free(self, memory: DeviceMemory) -> None: ...

    def host(self, nbytes: int, mapped: bool = False) -> HostMemory:
        """Page-locked memory, zeroed; `mapped`: also with an address for the GPU."""
        ...

    def free_host(self, memory: HostMemory) -> None:
        """Free what `HostMemory.let_go` says that nobody views any more."""
        ...

    def copy_in(self, to: int, source: HostMemory, nbytes: int, stream: Stream, start: int = 0) -> None:
        """Enqueue a copy of bytes of `source`, from `start` on, to an address on the device."""
        ...

    def copy_out(self, to: HostMemory, source: int, nbytes: int, stream: Stream) -> None:
        """Enqueue a copy from an address on the device to the first bytes of `to`."""
        ...

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes of device memory."""
        ...

    def compute_capability(self) -> tuple[int, int]: ...

    def driver_version(self) -> int:
        """The newest CUDA version that the driver supports, as 1000 * major + 10 * minor."""
        ...

    def device_name(self) -> str: ...

    def integrated(self) -> bool:
        """Whether the GPU shares its memory with the CPU, as on every Jetson."""
        ...

    def begin_capture(self, stream: Stream) -> None: ...

    def end_capture(self, stream: Stream) -> Graph: ...

    def launch(self, graph: Graph, stream: Stream) -> None: ...

    def free_graph(self, graph: Graph) -> None: ...

    def load_kernel(self, image: bytes, name: str) -> Kernel:
        """The function `name` of a cubin or PTX."""
        ...

    def run_kernel(
        self,
        kernel: Kernel,
        grid: tuple[int, int],
        block: tuple[int, int],
        stream: Stream,
        kinds: str,
        values: Sequence[int | float],
    ) -> None:
        """Enqueue it. `kinds`: of its arguments, each "P" (an address), "i" or "f" (32 bits)."""
        ...

    def free_kernel(self, kernel: Kernel) -> None: ...

    def poison(self, call: str, number: int, text: str) -> None:
        """Raises CudaFatal, now and at every later call: another library met this sticky error."""
        ...


def open_cuda(prefer: str | None = None, *, load: Callable[[str], Any] = importlib.import_module) -> Cuda:
    """A door, not started: over PyCUDA, or over cuda.bindings where PyCUDA cannot be imported.

    `prefer` ("pycuda" or "cuda.bindings") allows that one only. `load` imports a module by its name.
    Raises EngineError (code "cuda_missing").
    """
    from edge_runtime.engine.tensorrt.bindings_door import CudaBindingsDoor  # both import this module
    from edge_runtime.engine.tensorrt.pycuda_door import PyCudaDoor

    doors: tuple[tuple[str, tuple[str, ...], Callable[[Any], Cuda]], ...] = (
        (PyCudaDoor.name, ("pycuda.driver",), PyCudaDoor),
        (CudaBindingsDoor.name, ("cuda.bindings.driver", "cuda.cuda"), CudaBindingsDoor),
    )
    reasons = []
    for name, modules, door in doors:
        if prefer not in (None, name):
            continue
        for module in modules:
            try:
                driver = load(module)
            except Exception as error:  # noqa: BLE001  a missing driver raises errors of the library's own here
                reasons.append(f"{module}: {error}")
                continue
            return door(driver)
    raise EngineError(
        f"the GPU cannot be reached from Python: {'; '.join(reasons) or f'there is no door {prefer!r}'}",
        code="cuda_missing",
        where="CUDA",
        remedy="install PyCUDA or cuda-python for JetPack's own CUDA, and make the venv with --system-site-packages: "
        "docs/jetson.md has the packages",
    )


H = TypeVar("H")


def try_free(free: Callable[[H], None], handle: H) -> None:
    """Free it; where CUDA refuses, say so and go on with the rest. Raises CudaFatal alone."""
    try:
        free(handle)
    except CudaFatal:
        raise
    except EngineError as error:
        # its words alone: whoever keeps the record would keep the frames, and what they hold of TensorRT's
        log.warning("a %s could not be freed: %s", type(handle).__name__, str(error))


class Door:
    """What every door keeps: its thread, its state, and the error that ended it."""

    name: ClassVar[str] = ""

    def __init__(self) -> None:
        self._thread: int | None = None
        self._dead: CudaFatal | None = None
        self._hosts = 0

    def _begin(self) -> None:
        self._check_alive()
        if self._thread is not None:
            raise EngineError("the GPU is taken already", code="engine_state")
        self._thread = threading.get_ident()

    def _check(self) -> None:
        """Raises where nothing may be called: see Cuda."""
        self._check_alive()
        if self._thread != threading.get_ident():
            what = "was not started" if self._thread is None else "belongs to another thread"
            raise EngineError(f"the GPU {what}", code="engine_state")

    def _check_alive(self) -> None:
        if (dead := self._dead) is not None:
            raise CudaFatal(dead.call, dead.number, dead.text)

    def _native(self, handle: Stream | Event | DeviceMemory | Graph | HostMemory | Kernel) -> Any:
        """The library's own object. Raises as _check does, and where it was freed."""
        self._check()
        if handle.native is None:
            raise EngineError(f"a freed {type(handle).__name__} is used", code="engine_state")
        return handle.native

    def _fail(self, call: str, number: int | None, text: str) -> NoReturn:
        number = sticky_in(text) if number is None else number
        if number in STICKY:
            self._dead = CudaFatal(call, number, text)
            raise self._dead
        raise CudaError(call, number, text)

    def poison(self, call: str, number: int, text: str) -> None:
        """A sticky error that TensorRT met: this call and every later one raises it."""
        if self._dead is None:
            self._dead = CudaFatal(call, number, text)
        self._check_alive()
