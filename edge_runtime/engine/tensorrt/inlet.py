"""How a lane's input comes to the GPU: what cameras wrote is copied, whole pictures are scaled into their places."""

from __future__ import annotations

from collections.abc import Sequence

from edge_runtime.engine.tensorrt.cuda import DeviceMemory, HostMemory, Stream, try_free
from edge_runtime.engine.tensorrt.letterbox import source_of
from edge_runtime.engine.tensorrt.model import Model
from edge_runtime.engine.tensorrt.pictures import Waiting
from edge_runtime.errors import EngineError


class Inlet:
    """A lane's, on the owner's thread. One picture at a time lies in its memory on the GPU: the stream keeps order."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._cuda = model.owner.cuda
        self._picture: DeviceMemory | None = None

    def grow(self, pictures: Sequence[Waiting]) -> None:
        """Have memory for the largest. Nothing is running on this lane. Raises CudaError."""
        nbytes = max((each.layout.nbytes for each in pictures if each.host.device_address is None), default=0)
        if nbytes <= (0 if self._picture is None else self._picture.nbytes):
            return
        self.free()
        self._picture = self._cuda.allocate(nbytes)

    def enqueue(
        self, address: int, host: HostMemory, place_bytes: int, count: int, pictures: Sequence[Waiting], stream: Stream
    ) -> None:
        """Enqueue what fills the first `count` places, of `place_bytes` each, of the input at `address`.

        `host` holds those that were written; `pictures`, by place, are those that were not. Raises CudaError.
        """
        if host.device_address is None:
            self._copy_written(address, host, place_bytes, count, pictures, stream)
        for each in pictures:
            self._scale(each, address + each.index * place_bytes, stream)

    def free(self) -> None:
        """Idempotent."""
        if self._picture is not None:
            memory, self._picture = self._picture, None
            try_free(self._cuda.free, memory)

    def _copy_written(
        self, address: int, host: HostMemory, place_bytes: int, count: int, pictures: Sequence[Waiting], stream: Stream
    ) -> None:
        """Stretches between pictures, each in one copy."""
        first = 0
        for end in (*(each.index for each in pictures), count):
            if end > first:
                start = first * place_bytes
                self._cuda.copy_in(address + start, host, (end - first) * place_bytes, stream, start)
            first = end + 1

    def _scale(self, picture: Waiting, place: int, stream: Stream) -> None:
        kernel = self._model.kernel
        if kernel is None:
            raise EngineError("a whole picture for an engine that scales none", code="engine_state")
        address = picture.host.device_address
        if address is None:
            assert self._picture is not None
            address = self._picture.address
            self._cuda.copy_in(address, picture.host, picture.layout.nbytes, stream)
        kernel.enqueue(source_of(picture.layout, address), place, self._model.spec, stream, picture.transform)
