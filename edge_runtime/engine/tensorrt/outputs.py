"""The outputs of a lane: memory on the device and page-locked memory to copy it to, made once and kept."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from edge_runtime.engine.tensorrt.api import TensorRt, TrtDims, TrtOutputAllocator
from edge_runtime.engine.tensorrt.cuda import Cuda, DeviceMemory, HostMemory, Stream, try_free
from edge_runtime.engine.tensorrt.tensors import Tensor
from edge_runtime.errors import EngineError

_LEAST_BYTES = 256
_GROWTH = 1.5


class Output:
    """One output of one lane. On the owner's thread, but for the arrays that it gave.

    `let_go` gives page-locked memory back: it is freed once nobody views it.
    """

    def __init__(self, tensor: Tensor, cuda: Cuda, let_go: Callable[[HostMemory], None]) -> None:
        self.tensor = tensor
        self.shape: tuple[int, ...] = ()
        """Of the run that is enqueued, or was last."""
        self._cuda = cuda
        self._let_go = let_go
        self._device: DeviceMemory | None = None
        self._host: HostMemory | None = None
        self._views: dict[tuple[int, ...], NDArray[Any]] = {}

    @property
    def address(self) -> int:
        """Where TensorRT writes it."""
        assert self._device is not None
        return self._device.address

    @property
    def nbytes(self) -> int:
        """How much memory it has on the device."""
        return 0 if self._device is None else self._device.nbytes

    def grow(self, nbytes: int, room: float = 1.0) -> None:
        """Have at least so much memory on the device, and where it has to be made, `room` times as much. What was
        there is gone then. Nothing may be running."""
        if self._device is not None and self._device.nbytes >= nbytes:
            return
        if self._device is not None:
            device, self._device = self._device, None
            try_free(self._cuda.free, device)
        self._device = self._cuda.allocate(max(int(nbytes * room), _LEAST_BYTES))

    def copy_out(self, stream: Stream) -> None:
        """Enqueue the copy of what the run gives, of the shape that it is known to have."""
        nbytes = self.tensor.nbytes(self.shape)
        assert self._device is not None
        if self._host is None or self._host.nbytes < nbytes:
            self._release_host()
            self._host = self._cuda.host(self._device.nbytes)
        if nbytes:
            self._cuda.copy_out(self._host, self._device.address, nbytes, stream)

    def array(self) -> NDArray[Any]:
        """The last run's output, in the lane's own memory, which the next run overwrites."""
        view = self._views.get(self.shape)
        if view is None:
            assert self._host is not None
            nbytes = self.tensor.nbytes(self.shape)
            view = self._host.array[:nbytes].view(self.tensor.dtype).reshape(self.shape)
            if len(self._views) > 64:  # shapes that depend on the picture are many
                self._views.clear()
            self._views[self.shape] = view
        return view

    def free(self) -> None:
        """Free its memory; arrays that it gave keep theirs. Idempotent."""
        self._release_host()
        if self._device is not None:
            device, self._device = self._device, None
            try_free(self._cuda.free, device)

    def _release_host(self) -> None:
        self._views.clear()
        if self._host is not None:
            host, self._host = self._host, None
            self._let_go(host)


class Allocation:
    """What an IOutputAllocator of one context knows: the outputs whose shapes only the run itself tells."""

    def __init__(self) -> None:
        self.outputs: dict[str, Output] = {}
        self.error: EngineError | None = None
        self.missing: set[str] = set()
        """Those whose shape the run has not told yet."""

    def begin(self) -> None:
        """A run is about to be enqueued."""
        self.error = None
        self.missing.update(self.outputs)

    def reallocate(self, name: str, nbytes: int, alignment: int) -> int:
        """An address with so many bytes; 0 where there is none, and then `error` says why. Raises nothing: TensorRT
        is what calls it."""
        try:
            output = self.outputs[name]
            output.grow(nbytes, _GROWTH)
            if alignment and output.address % alignment:
                raise EngineError(f"{name!r} is to be aligned to {alignment} bytes", code="gpu_memory")
            return output.address
        except EngineError as error:
            self.error = error.with_traceback(None)  # its frames would keep this run's callers
        except Exception as error:  # noqa: BLE001  nothing may be raised into TensorRT
            self.error = EngineError(f"{name!r} has no memory: {error!r}", code="gpu_memory")
        return 0

    def notify(self, name: str, shape: TrtDims) -> None:
        """The shape that an output has in this run. Raises nothing."""
        with contextlib.suppress(Exception):
            self.outputs[name].shape = plain(shape)
            self.missing.discard(name)


def make_allocator(trt: TensorRt, allocation: Allocation) -> TrtOutputAllocator:
    """An IOutputAllocator over `allocation`; one a context, which keeps it until its own end."""

    class OutputAllocator(trt.IOutputAllocator):  # type: ignore[misc]  # the module is only known at run time
        def __init__(self) -> None:
            trt.IOutputAllocator.__init__(self)

        def reallocate_output(self, tensor_name: str, memory: Any, size: int, alignment: int) -> int:  # noqa: ARG002
            return allocation.reallocate(tensor_name, size, alignment)

        def reallocate_output_async(
            self,
            tensor_name: str,
            memory: Any,  # noqa: ARG002
            size: int,
            alignment: int,
            stream: Any,  # noqa: ARG002  the lane's own: it is idle but for this run
        ) -> int:
            return allocation.reallocate(tensor_name, size, alignment)

        def notify_shape(self, tensor_name: str, shape: TrtDims) -> None:
            allocation.notify(tensor_name, shape)

    return OutputAllocator()


def plain(shape: TrtDims) -> tuple[int, ...]:
    """A Dims as a tuple: Dims cannot be compared."""
    return tuple(int(side) for side in shape)
