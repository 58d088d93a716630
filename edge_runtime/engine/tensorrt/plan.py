"""Plans: serialised TensorRT engines, which are native code, and the sidecar that says what one is and was built for.

Nothing is deserialised before `verify` has passed it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from edge_runtime.engine.manifest_values import Sha256, Text
from edge_runtime.engine.tensorrt.probe import Here
from edge_runtime.errors import EngineError

SCHEMA = "edge.plan/1"
SUFFIX = ".json"
_MAGIC = (b"ptrt", b"ftrt")
_MAX_HEADER_BYTES = 1024 * 1024
_MAX_SIDECAR_BYTES = 1024 * 1024
_BUILD = "build it on this device: edge-runtime build BUNDLE"

Version = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9A-Za-z]+)*$", max_length=64)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class PlanTensor(_Table):
    """An input or output of the engine. `shape` has -1 where a side is free; `dtype` is TensorRT's word ("FLOAT")."""

    name: Text
    mode: Literal["input", "output"]
    dtype: Text
    shape: tuple[int, ...]


class Sidecar(_Table):
    """`<plan>.json`: what a plan was built from, with and for.

    `onnx_sha256` and `plan_sha256` are of the files, 64 hex digits. `batches`: the batch sizes it was built for,
    ascending. `options`: what the builder was told, as far as it matters to the result.
    """

    schema_: Annotated[Literal["edge.plan/1"], Field(alias="schema")]
    tensorrt: Version
    compute_capability: Version
    device: Text
    driver: Version
    l4t: Version | None = None
    onnx_sha256: Sha256
    plan_sha256: Sha256
    plan_bytes: Annotated[int, Field(ge=1)]
    tensors: Annotated[tuple[PlanTensor, ...], Field(min_length=2)]
    batches: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)]
    options: dict[str, str | int | float | bool | None] = {}

    @property
    def dla_core(self) -> int | None:
        """The DLA core that it was built for, or None."""
        core = self.options.get("dla_core")
        return core if isinstance(core, int) and not isinstance(core, bool) else None

    def to_json(self) -> bytes:
        """The file's content."""
        return (json.dumps(self.model_dump(by_alias=True), indent=1, sort_keys=True) + "\n").encode()


def describe(
    plan: bytes,
    here: Here,
    *,
    onnx_sha256: str,
    tensors: tuple[PlanTensor, ...],
    batches: tuple[int, ...],
    options: Mapping[str, str | int | float | bool | None],
) -> Sidecar:
    """The sidecar of a plan that was just built here."""
    return Sidecar.model_validate(
        {
            "schema": SCHEMA,
            **asdict(here),
            "onnx_sha256": onnx_sha256,
            "plan_sha256": hashlib.sha256(plan).hexdigest(),
            "plan_bytes": len(plan),
            "tensors": tensors,
            "batches": batches,
            "options": dict(options),
        }
    )


def sidecar_path(plan: Path) -> Path:
    """Where the sidecar of a plan lies: beside it."""
    return plan.with_name(plan.name + SUFFIX)


def read_sidecar(plan: Path) -> Sidecar:
    """The sidecar of a plan's file. Raises EngineError (code "plan_sidecar")."""
    path = sidecar_path(plan)
    try:
        with path.open("rb") as stream:
            raw = stream.read(_MAX_SIDECAR_BYTES + 1)
    except OSError as error:
        raise _refuse(
            "plan_sidecar", path, f"it cannot be read: {error.strerror}", f"a plan is used with it only; {_BUILD}"
        ) from None
    return parse_sidecar(raw, str(path))


def parse_sidecar(raw: bytes, where: str) -> Sidecar:
    """The sidecar in a file's content; `where` names the file. Raises EngineError (code "plan_sidecar")."""
    if len(raw) > _MAX_SIDECAR_BYTES:
        raise _refuse("plan_sidecar", where, f"it is larger than {_MAX_SIDECAR_BYTES} bytes", _BUILD)
    try:
        sidecar = Sidecar.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the file"
        raise _refuse("plan_sidecar", where, f"{place}: {first['msg']}", _BUILD) from None
    if list(sidecar.batches) != sorted(set(sidecar.batches)):
        raise _refuse("plan_sidecar", where, f"batches: {list(sidecar.batches)} do not ascend", _BUILD)
    return sidecar


def strip_header(raw: bytes | memoryview) -> tuple[memoryview, Mapping[str, Any] | None]:
    """(the plan, the metadata) of a file. Ultralytics writes four bytes of length and a JSON object before the plan;
    metadata is None where a file begins with the plan itself, or with neither."""
    view = memoryview(raw)
    if bytes(view[:4]) in _MAGIC:
        return view, None
    length = int.from_bytes(view[:4], "little")
    if 2 <= length <= min(_MAX_HEADER_BYTES, len(view) - 4):
        try:
            metadata = json.loads(bytes(view[4 : 4 + length]))
        except ValueError:
            return view, None
        if isinstance(metadata, dict):
            return view[4 + length :], metadata
    return view, None


def verify(raw: bytes, sidecar: Sidecar, here: Here, where: str) -> tuple[memoryview, tuple[str, ...]]:
    """Prove that a plan's file is the one that the sidecar is of, and was built for this device.

    Returns what to deserialise, and remarks: what changed underneath that it still can run with, but is to be built
    anew for. Raises EngineError: code "plan_damaged" where the bytes are others, "plan_invalid" where they are no
    plan, "plan_mismatch" where it is for another TensorRT, GPU or module, naming both.
    """
    # Versions first: after an upgrade that is what happened, whatever else there is to say.
    for what, built, found in (
        ("TensorRT", sidecar.tensorrt, here.tensorrt),
        ("compute capability", sidecar.compute_capability, here.compute_capability),
        ("device", sidecar.device, here.device),
    ):
        if built != found:
            message = f"the plan was built for {what} {built}, and this is {what} {found}"
            raise _refuse("plan_mismatch", where, message, _BUILD)
    digest = hashlib.sha256(raw).hexdigest()
    if digest != sidecar.plan_sha256 or len(raw) != sidecar.plan_bytes:
        message = (
            f"the plan is not the one that its sidecar is of: damaged, half-copied or exchanged ({len(raw)} bytes of "
            f"{sidecar.plan_bytes}, sha256 {digest[:12]}..., expected {sidecar.plan_sha256[:12]}...)"
        )
        raise _refuse("plan_damaged", where, message, _BUILD)
    plan, _ = strip_header(raw)
    if bytes(plan[:4]) not in _MAGIC:
        message = f"the file is no TensorRT plan: it begins with {bytes(plan[:4])!r}"
        raise _refuse("plan_invalid", where, message, _BUILD)
    changed = tuple(
        f"the plan was built under {what} {built}, and this is {found}: it should be built anew"
        for what, built, found in (
            ("a driver for CUDA", sidecar.driver, here.driver),
            ("L4T", sidecar.l4t or "none", here.l4t or "none"),
        )
        if built != found
    )
    return plan, changed


@dataclass(frozen=True, slots=True)
class PlanKey:
    """All that a plan depends on: plans of one key may be exchanged for one another.

    `size` is [width, height] of the input in px; `options` are the builder's, in any order.
    """

    onnx_sha256: str
    variant: str
    size: tuple[int, int]
    batches: tuple[int, ...]
    here: Here
    options: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """64 hex digits: the name of a plan in the store."""
        parts = {**asdict(self), "options": dict(self.options), "schema": SCHEMA}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _refuse(code: str, where: str | Path, message: str, remedy: str) -> EngineError:
    return EngineError(message, code=code, where=str(where), remedy=remedy)
