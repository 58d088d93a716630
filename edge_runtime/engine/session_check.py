"""Whether an ONNX Runtime session takes and gives what its bundle says: by its declared types, then by one inference.

Sessions come from `onnxrt.open_session`; nothing here imports the library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from edge_runtime.engine.modelfile import plain_message
from edge_runtime.errors import BundleError
from edge_runtime.records.frames import InputArray
from edge_runtime.records.spec import InputSpec
from edge_runtime.vision.pixels import fill_level

DTYPES: Mapping[str, type[np.generic]] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(double)": np.float64,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(int8)": np.int8,
    "tensor(uint8)": np.uint8,
    "tensor(bool)": np.bool_,
}
"""NumPy's type for each of ONNX Runtime's type words that a model may have."""


@dataclass(slots=True)
class _Model:
    """What is known of a session's inputs and outputs once they are proved to fit the bundle."""

    input_name: str
    batch: int | None
    outputs: dict[str, type[np.generic]]


def _check_model(session: Any, spec: InputSpec, where: str) -> _Model:
    """Prove by the declared types and shapes that the model takes what the bundle says. Raises BundleError."""

    def refuse(message: str, remedy: str) -> BundleError:
        return BundleError(message, code="input_mismatch", where=where, remedy=remedy)

    inputs = session.get_inputs()
    told = ", ".join(f"{i.name} {_type_word(i.type)} {_dims(i.shape)}" for i in inputs) or "none"
    wanted = "one float32 input [batch, 3, height, width]"
    fused = spec.pixel != "float32"
    if fused:
        wanted = f"one uint8 input [batch, {', '.join(map(str, spec.shape))}] for {spec.pixel}"
    if len(inputs) != 1:
        raise refuse(f"has {len(inputs)} inputs ({told}), and {wanted} is needed", "export it with the picture alone")
    (only,) = inputs
    shape = list(only.shape)
    if fused:
        sides = zip(shape[1:], spec.shape, strict=False)
        if (
            only.type != "tensor(uint8)"
            or len(shape) != len(spec.shape) + 1
            or any(isinstance(has, int) and has != want for has, want in sides)
        ):
            raise refuse(
                f"takes {told}, and {wanted} is needed",
                'correct size and pixel of the variant (pixel = "float32" for a model without preprocessing), or make '
                "the model with `edge-runtime prepare fuse`",
            )
        return _Model(only.name, _batch_of(shape), _output_types(session, refuse))
    if only.type != "tensor(float)":
        hint = "export it with a float32 input"
        if only.type == "tensor(uint8)":
            hint = f'{hint}, or say with pixel = "bgr24", "rgba" or "nv12" which bytes its graph takes'
        raise refuse(f"takes {told}, and {wanted} is needed", hint)
    if len(shape) != 4:
        raise refuse(f"takes {told}: {len(shape)} axes, and {wanted} is needed", "export it for pictures, NCHW")
    if isinstance(shape[1], int) and shape[1] != 3:
        hint = "export it in NCHW order: this one is NHWC" if shape[3] == 3 else "a model of three colours is needed"
        raise refuse(f"takes {told}: {shape[1]} channels, and {wanted} is needed", hint)
    for axis, word, size in ((2, "high", spec.height), (3, "wide", spec.width)):
        if isinstance(shape[axis], int) and shape[axis] != size:
            fixed = f"{shape[3]}x{shape[2]}"
            message = f"takes pictures {shape[axis]} px {word} only ({told}), and the variant says {size}"
            raise refuse(message, f"write size = [{shape[3]}, {shape[2]}]" if "None" not in fixed else "correct size")
    return _Model(only.name, _batch_of(shape), _output_types(session, refuse))


def _batch_of(shape: list[Any]) -> int | None:
    return shape[0] if isinstance(shape[0], int) and shape[0] > 0 else None


def _output_types(session: Any, refuse: Callable[[str, str], BundleError]) -> dict[str, type[np.generic]]:
    outputs = {}
    for output in session.get_outputs():
        if output.type not in DTYPES:
            raise refuse(f"has an output {output.name!r} of type {output.type}", "export it with float32 outputs")
        outputs[output.name] = DTYPES[output.type]
    return outputs


def _type_word(kind: str) -> str:
    return {"tensor(float)": "float32", "tensor(double)": "float64"}.get(kind, kind.removeprefix("tensor(").rstrip(")"))


def _dims(shape: list[Any]) -> str:
    return f"[{', '.join('any' if d is None else str(d) for d in shape)}]"


def grey_picture(spec: InputSpec, batch: int) -> InputArray:
    """[batch, *spec.shape] of `spec.dtype`: a mid-grey picture as preprocessing would give it."""
    picture = np.empty((batch, *spec.shape), spec.dtype)
    fill_level(picture, spec, 128.0)
    return picture


def output_shapes(session: Any, spec: InputSpec, where: str) -> tuple[dict[str, tuple[int, ...]], int | None]:
    """Prove a session with one inference over a grey picture of the spec's size.

    Returns each output's shape for a batch of one, and the fixed batch size (None: any). Raises BundleError
    (code "input_mismatch", "output_mismatch" or "non_finite").
    """
    model = _check_model(session, spec, where)
    batch = model.batch or 1
    try:
        results = session.run(None, {model.input_name: grey_picture(spec, batch)})
    except Exception as error:  # noqa: BLE001  see onnxrt.open_session
        raise BundleError(
            f"cannot take a picture of {spec.width}x{spec.height}: {plain_message(error)}",
            code="input_mismatch",
            where=where,
            remedy=_sizes_it_takes(session, model, spec),
        ) from None
    shapes = {}
    for name, result in zip(model.outputs, results, strict=True):
        if result.ndim < 1 or result.shape[0] != batch:
            raise BundleError(
                f"its output {name!r} is {list(result.shape)} for a batch of {batch}: the first axis is not the batch",
                code="output_mismatch",
                where=where,
                remedy="export it without the steps that join the pictures of a batch (NMS inside the graph)",
            )
        if result.dtype.kind == "f" and not np.isfinite(result).all():
            bad = int(result.size - np.isfinite(result).sum())
            raise BundleError(
                f"answers a grey picture with {bad} of {result.size} values of {name!r} not finite (NaN or infinite)",
                code="non_finite",
                where=where,
                remedy="the weights are damaged, or overflow in this precision: export it again, or use fp32",
            )
        shapes[name] = (1, *result.shape[1:])
    return shapes, model.batch


def _sizes_it_takes(session: Any, model: _Model, spec: InputSpec) -> str:
    """Try the nearest multiples of 32, which most detectors want, to be able to say what would work."""
    works = []
    for up in (0, 1):
        width, height = (max(side // 32 + up * bool(side % 32), 1) * 32 for side in (spec.width, spec.height))
        shape = replace(spec, width=width, height=height).shape
        try:
            session.run(None, {model.input_name: np.zeros((model.batch or 1, *shape), spec.dtype)})
        except Exception:  # noqa: BLE001, S112  a size that does not work is simply not named
            continue
        works.append(f"{width}x{height}")
    if works:
        return f"it takes multiples of 32, such as {' or '.join(dict.fromkeys(works))}"
    return "set the variant's size to the one that the model was exported for"
