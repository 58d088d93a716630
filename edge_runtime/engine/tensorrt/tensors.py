"""An engine's inputs and outputs as arrays: names, types and shapes, by name and never by order."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.engine.tensorrt.api import TensorRt, TrtEngine
from edge_runtime.engine.tensorrt.plan import PlanTensor
from edge_runtime.errors import BundleError, EngineError
from edge_runtime.records.spec import InputSpec

_DTYPES: Mapping[str, type[np.generic]] = {
    "FLOAT": np.float32,
    "HALF": np.float16,
    "INT8": np.int8,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT8": np.uint8,
    "BOOL": np.bool_,
}
"""TensorRT's types that numpy has, too. Others (BF16, FP8, INT4, ...) are refused."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input or output. `shape` has -1 where a side is free; `word` is TensorRT's own word for the type."""

    name: str
    mode: str
    word: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of an array of this type and that shape."""
        return math.prod(shape) * self.dtype.itemsize

    @property
    def told(self) -> str:
        """For messages: "images FLOAT [-1, 3, 416, 416]"."""
        return f"{self.name} {self.word} {list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Tensors:
    """The one input, and the outputs by name."""

    input: Tensor
    outputs: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Batches:
    """What the engine takes. `allowed` ascends; `largest` is the most it could, and so the largest buffer."""

    allowed: tuple[int, ...]
    largest: int
    dynamic: bool


def read_tensors(trt: TensorRt, engine: TrtEngine, where: str) -> Tensors:
    """The I/O of an ICudaEngine. `where` names the plan.

    Raises BundleError (code "input_mismatch" or "output_mismatch") where there is not one input and a number of
    outputs on the device, in plain order, and of a type that numpy has.
    """
    inputs, outputs = [], {}
    for index in range(int(engine.num_io_tensors)):
        name = str(engine.get_tensor_name(index))
        is_input = engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
        code = "input_mismatch" if is_input else "output_mismatch"
        word = str(engine.get_tensor_dtype(name).name)
        side = "input" if is_input else "output"
        if word not in _DTYPES:
            raise _refuse(code, where, f"its {side} {name!r} is {word}", "export it with float32 inputs and outputs")
        if engine.get_tensor_location(name) != trt.TensorLocation.DEVICE:
            raise _refuse(code, where, f"its {side} {name!r} is a shape that lives on the CPU", "export it without")
        if engine.get_tensor_format(name) != trt.TensorFormat.LINEAR:
            told = str(engine.get_tensor_format(name))
            raise _refuse(code, where, f"its {side} {name!r} is in the order {told}", "build it with linear I/O")
        shape = tuple(int(side) for side in engine.get_tensor_shape(name))
        tensor = Tensor(name, side, word, np.dtype(_DTYPES[word]), shape)
        if is_input:
            inputs.append(tensor)
        else:
            outputs[name] = tensor
    if len(inputs) != 1 or not outputs:
        told = ", ".join(each.told for each in (*inputs, *outputs.values())) or "nothing"
        message = f"has {len(inputs)} inputs and {len(outputs)} outputs ({told}), and one picture in is needed"
        raise _refuse("input_mismatch", where, message, "export it with the picture alone")
    return Tensors(inputs[0], outputs)


def check_declared(tensors: Tensors, declared: tuple[PlanTensor, ...], where: str) -> None:
    """Prove that the engine has the inputs and outputs that its sidecar says. Raises EngineError ("plan_mismatch")."""
    found = {each.name: (each.mode, each.word, each.shape) for each in (tensors.input, *tensors.outputs.values())}
    if found != {each.name: (each.mode, each.dtype, each.shape) for each in declared}:
        told = ", ".join(f"{each.name} {each.dtype} {list(each.shape)}" for each in declared)
        has = ", ".join(each.told for each in (tensors.input, *tensors.outputs.values()))
        raise EngineError(
            f"the plan has {has}, and its sidecar says {told}",
            code="plan_mismatch",
            where=where,
            remedy="build it on this device: edge-runtime build BUNDLE",
        )


def check_input(tensor: Tensor, spec: InputSpec, where: str) -> None:
    """Prove that the input takes what the bundle says. Raises BundleError (code "input_mismatch")."""
    dtype, wanted = spec.dtype, spec.shape
    fits = len(tensor.shape) == len(wanted) + 1 and all(
        has in (-1, want) for has, want in zip(tensor.shape[1:], wanted, strict=True)
    )
    if tensor.dtype != dtype or not fits:
        message = f"takes {tensor.told}, and the variant wants {dtype} [batch, {', '.join(map(str, wanted))}]"
        raise _refuse("input_mismatch", where, message, "correct size and pixel in the bundle, or export it anew")


def read_batches(engine: TrtEngine, tensor: Tensor, spec: InputSpec, declared: tuple[int, ...], where: str) -> Batches:
    """The batch sizes of an ICudaEngine: those it was built for (`declared`), as far as its first profile goes.

    Raises EngineError (code "plan_mismatch") where its profile does not take them.
    """
    free = [axis for axis, side in enumerate(tensor.shape) if side < 0]
    if not free:
        low = high = tensor.shape
    else:
        profile = engine.get_tensor_profile_shape(tensor.name, 0)
        low, high = (tuple(int(side) for side in profile[place]) for place in (0, 2))
    picture = spec.shape
    takes = all(small <= side <= large for small, side, large in zip(low[1:], picture, high[1:], strict=True))
    if not takes or not all(low[0] <= batch <= high[0] for batch in declared):
        raise EngineError(
            f"its profile takes {list(low)} to {list(high)}, and its sidecar says batches of "
            f"{', '.join(map(str, declared))} of {list(picture)}",
            code="plan_mismatch",
            where=where,
            remedy="build it on this device: edge-runtime build BUNDLE",
        )
    return Batches(declared, declared[-1], bool(free))


def prove_outputs(outputs: Mapping[str, NDArray[Any]], batch: int, where: str) -> dict[str, tuple[int, ...]]:
    """Each output's shape for a batch of one, from the answers to `batch` grey pictures.

    Raises BundleError: code "output_mismatch" where the first axis is not the batch, "non_finite".
    """
    shapes = {}
    for name, array in outputs.items():
        if array.ndim < 1 or array.shape[0] != batch:
            message = (
                f"its output {name!r} is {list(array.shape)} for a batch of {batch}: the first axis is not the batch"
            )
            remedy = "export it without the steps that join the pictures of a batch (NMS inside the graph)"
            raise _refuse("output_mismatch", where, message, remedy)
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            bad = int(array.size - np.isfinite(array).sum())
            message = (
                f"answers a grey picture with {bad} of {array.size} values of {name!r} not finite (NaN or infinite)"
            )
            remedy = "the weights are damaged, or overflow in this precision: export it again, or use fp32"
            raise _refuse("non_finite", where, message, remedy)
        shapes[name] = (1, *array.shape[1:])
    return shapes


def _refuse(code: str, where: str, message: str, remedy: str) -> BundleError:
    return BundleError(message, code=code, where=where, remedy=remedy)
