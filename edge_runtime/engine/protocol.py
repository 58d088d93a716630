"""What every backend implements: an Engine (a loaded model) with Lanes (execution contexts).

A Lane is `submit`/`collect` over buffers and small descriptors, so that an engine can live in this
process (ONNX Runtime), behind one GPU owner thread (TensorRT), or in a worker process, without the
pipeline knowing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from edge_runtime.records.frames import InputArray, Pixels, Transform
from edge_runtime.records.spec import InputSpec, OutputSpec


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Who an engine is. `digest` ("sha256:...") is the hash of (bundle digest, variant, backend, artefact);
    `bundle` is the bundle's digest."""

    digest: str
    bundle: str
    variant: str
    backend: str
    precision: str
    input: InputSpec
    output: OutputSpec
    output_shapes: Mapping[str, tuple[int, ...]]
    """Per output name, its shape for a batch of one."""


class PicturePlaces(Protocol):
    """Whole pictures beside the places of an input buffer: a run scales them into their places, on the GPU.

    A place belongs to one thread at a time. A run takes the pictures: for the next one they have to be brought anew.
    """

    def take(self, index: int, pixels: Pixels) -> Transform | None:
        """Let a picture be scaled into place `index`: copies it whole, and says how it will lie there. None where it is
        to be written by `write_into`, as a small one is."""
        ...

    def clear(self, index: int) -> None:
        """The place is written by `write_into`."""
        ...


@dataclass(slots=True, eq=False)
class InputBuffer:
    """A reusable batch input, [max_batch, *spec.shape] of `spec.dtype` (float32, or uint8 where preprocessing is in the
    graph), 64-byte aligned; page-locked with TensorRT. `pictures`: where the engine scales, None where it does not."""

    index: int
    array: InputArray
    pictures: PicturePlaces | None = None


class Lane(Protocol):
    """One execution context. Used by one thread at a time."""

    def submit(self, buffer: InputBuffer, count: int) -> None:
        """Start a run over the first `count` places (an allowed batch size). Raises EngineError."""
        ...

    def collect(self) -> Mapping[str, NDArray[Any]]:
        """Wait for the submitted run: output name -> [count, ...]. The arrays are the lane's own and are
        overwritten by its next run. Raises EngineError."""
        ...


class Engine(Protocol):
    """A loaded model. States: load -> warm_up -> (lanes run) -> close; a call out of order raises EngineError."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def allowed_batches(self) -> tuple[int, ...] | None:
        """The only batch sizes it can run, ascending; None when any size from 1 works."""
        ...

    def open_lane(self) -> Lane: ...

    def allocate(self, max_batch: int) -> InputBuffer:
        """A new input buffer, by and for this engine."""
        ...

    def release(self, buffer: InputBuffer) -> None:
        """Give a buffer's memory back; nobody may write into it any more."""
        ...

    def close(self) -> None:
        """Free everything; idempotent. Lanes of it are dead afterwards."""
        ...
