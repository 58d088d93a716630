"""What every lane of a TensorRT engine knows of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edge_runtime.engine.tensorrt.api import TensorRt
from edge_runtime.engine.tensorrt.cuda import sticky_in
from edge_runtime.engine.tensorrt.letterbox import LetterboxKernel
from edge_runtime.engine.tensorrt.log import Lines
from edge_runtime.engine.tensorrt.owner import GpuOwner
from edge_runtime.engine.tensorrt.tensors import Batches, Tensors
from edge_runtime.errors import EngineError
from edge_runtime.records.spec import InputSpec


@dataclass(frozen=True, slots=True)
class Model:
    """`places` tells how large the engine's input buffers are, at most. `kernel` scales whole pictures into places of
    `spec`, None where the CPU does."""

    trt: TensorRt
    owner: GpuOwner
    lines: Lines
    tensors: Tensors
    batches: Batches
    spec: InputSpec
    where: str
    graphs: bool
    places: Callable[[], int]
    kernel: LetterboxKernel | None = None

    def failed(self, what: str, mark: int, code: str = "inference_failed") -> EngineError:
        """An error with what TensorRT said since `mark`. Raises CudaFatal where it tells of a sticky error."""
        said = self.lines.tail(mark)
        for line in self.lines.since(mark):
            # its words for other troubles than CUDA's may be alike
            if "cuda" in line.lower() and (number := sticky_in(line)) is not None:
                self.owner.cuda.poison(what, number, line)
        return EngineError(f"{what}: {said}", code=code, where=self.where)
