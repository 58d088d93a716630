"""What can be refused before a build begins: by the model's file, by the device, by memory. Pure functions."""

from __future__ import annotations

import re
from dataclasses import dataclass

from edge_runtime.engine.tensorrt.onnxfile import Input, OnnxFile
from edge_runtime.errors import RefusedError
from edge_runtime.records.spec import InputSpec

MiB = 1024 * 1024
BASE_BYTES = 700 * MiB
"""What a build takes besides the model: interpreter, CUDA's context, TensorRT's libraries and kernels. An estimate:
nothing here was measured on a Jetson. What a build really took is in the plan's sidecar, and counts from then on."""
MODEL_TIMES = 8
"""A build takes about so many times the ONNX file: as read, as parsed, in the layouts that are tried, as a plan."""
RESERVE_BYTES = 256 * MiB
"""Left free for everything else on this device while a build goes on."""
LEAST_WORKSPACE_BYTES = 64 * MiB
MOST_WORKSPACE_BYTES = 2048 * MiB
FREE_MEMORY = "stop what else runs here (the desktop, a daemon), lower --workspace-mb, or use a smaller variant"
WORKSPACE_SHARE = 0.5
"""Of what would be left free, where nobody says how much scratch memory an engine may use."""
_FLOAT, _UINT8 = 1, 2  # TensorProto.DataType
_KINDS = {1: "float32", 2: "uint8", 3: "int8", 6: "int32", 7: "int64", 9: "bool", 10: "float16", 11: "float64"}

Version = tuple[int, ...]


def version_of(text: str) -> Version:
    """(10, 3, 0) of "10.3.0"."""
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def check_file(file: OnnxFile, spec: InputSpec, where: str) -> None:
    """Prove by the file alone that it can be built for the variant's size: one picture in, and a size for every axis.

    Raises RefusedError: code "model_external_data", "input_mismatch" or "dynamic_axes".
    """
    if file.external:
        names = ", ".join(file.external[:3]) + (", ..." if len(file.external) > 3 else "")
        raise RefusedError(
            f"its weights lie in a second file ({len(file.external)} tensors: {names}), and a bundle holds a model in "
            "one file",
            code="model_external_data",
            where=where,
            remedy="`edge-runtime prepare import` joins them",
        )
    pictures = [each for each in file.inputs if each.shape is not None and len(each.shape) == len(spec.shape) + 1]
    others = [each for each in file.inputs if each not in pictures]
    if free := [told for each in others for told in _free_axes(each)]:
        raise RefusedError(
            f"has axes of no size that the bundle says nothing about: {'; '.join(free)}",
            code="dynamic_axes",
            where=where,
            remedy="export it with fixed sizes for everything but the picture, or with the picture alone",
        )
    if len(file.inputs) != 1 or not pictures:
        told = ", ".join(each.told for each in file.inputs) or "none"
        raise _mismatch(where, f"has {len(file.inputs)} inputs ({told})", spec, "export it with the picture alone")
    picture = pictures[0]
    assert picture.shape is not None
    kind = _FLOAT if spec.pixel == "float32" else _UINT8
    if picture.kind != kind:
        found = _KINDS.get(picture.kind, f"type {picture.kind}")
        raise _mismatch(where, f"takes {picture.told} of {found}", spec, "correct pixel in the bundle, or export anew")
    for axis, (has, wants) in enumerate(zip(picture.shape[1:], spec.shape, strict=True), start=1):
        if isinstance(has, int) and has != wants:
            message = f"takes {picture.told}: axis {axis} is {has}, and not {wants}"
            raise _mismatch(where, message, spec, "correct size and pixel in the bundle, or export it anew")


def _free_axes(tensor: Input) -> list[str]:
    if tensor.shape is None:
        return [f"input {tensor.name!r}, all of them"]
    free = [(axis, side) for axis, side in enumerate(tensor.shape) if isinstance(side, str)]
    return [f"input {tensor.name!r}, axis {axis}" + (f" ({side!r})" if side else "") for axis, side in free]


def _mismatch(where: str, message: str, spec: InputSpec, remedy: str) -> RefusedError:
    wanted = f"one {spec.dtype} input [batch, {', '.join(map(str, spec.shape))}] is needed"
    return RefusedError(f"{message}, and {wanted}", code="input_mismatch", where=where, remedy=remedy)


def batches_of(file: OnnxFile, most: int, dla_core: int | None) -> tuple[int, ...]:
    """The batch sizes that a plan is built for: 1 to `most`, or the one that the file is fixed to.

    A DLA takes one size only, the largest.
    """
    (picture,) = file.inputs
    assert picture.shape is not None
    fixed = picture.shape[0]
    if isinstance(fixed, int):
        return (fixed,)
    return tuple(range(1, most + 1)) if dla_core is None else (most,)


def check_dla(file: OnnxFile, precision: str, tensorrt: str, where: str) -> None:
    """Prove that this version of TensorRT can build this model for a DLA.

    Raises RefusedError (code "dla_unsupported").
    """
    version = version_of(tensorrt)
    reason = None
    if not (version[:2] <= (10, 7) or version >= (11, 4, 1)):
        reason = f"TensorRT {tensorrt} has no DLA: it was left out after 10.7 and came back in 11.4.1"
    elif file.quantised:
        reason = "its INT8 is written as Q/DQ, and a DLA takes INT8 with implicit scales only, which are not used here"
    elif precision != "fp16":
        reason = f"a DLA computes in FP16 here, and this variant is {precision}"
    if reason is not None:
        remedy = "use an FP16 variant with a TensorRT that has a DLA, or leave --dla out: the GPU takes every variant"
        raise RefusedError(reason, code="dla_unsupported", where=where, remedy=remedy)


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a build may take, in bytes. `measured`: whether the base is what the last build of it really took."""

    base_bytes: int
    workspace_bytes: int
    measured: bool = False

    @property
    def total_bytes(self) -> int:
        return self.base_bytes + self.workspace_bytes

    @property
    def told(self) -> str:
        """For messages."""
        how = "as the last build of it did" if self.measured else "an estimate"
        return f"{self.base_bytes / MiB:.0f} MiB ({how}) and {self.workspace_bytes / MiB:.0f} MiB of scratch memory"


def estimate(
    model_bytes: int, available_bytes: int | None, *, workspace_bytes: int | None = None, peak_bytes: int | None = None
) -> Estimate:
    """What a build of a model of so many bytes may take. `available_bytes`: memory that is free, where that is known.

    `workspace_bytes`: the cap that somebody wants; else a share of what is left. `peak_bytes`: what the last build of
    it took besides.
    """
    base = BASE_BYTES + MODEL_TIMES * model_bytes if peak_bytes is None else peak_bytes
    if workspace_bytes is None:
        left = MOST_WORKSPACE_BYTES if available_bytes is None else available_bytes - base - RESERVE_BYTES
        workspace_bytes = max(LEAST_WORKSPACE_BYTES, min(int(left * WORKSPACE_SHARE), MOST_WORKSPACE_BYTES))
    return Estimate(base, workspace_bytes, measured=peak_bytes is not None)


def check_memory(wanted: Estimate, available_bytes: int | None, where: str) -> None:
    """Refuse what does not fit; not where nobody knows. Raises RefusedError (code "build_memory", retryable)."""
    if available_bytes is None or available_bytes >= wanted.total_bytes + RESERVE_BYTES:
        return
    raise RefusedError(
        f"there is too little memory to build it: it takes {wanted.told}, {RESERVE_BYTES / MiB:.0f} MiB have to stay "
        f"free, and {available_bytes / MiB:.0f} MiB are",
        code="build_memory",
        where=where,
        remedy=FREE_MEMORY,
        retryable=True,
    )
