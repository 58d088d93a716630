"""Plans that come with a bundle: which are for this device, who vouches for them, and what is wrong with the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from edge_runtime.engine.bundle import Bundle
from edge_runtime.engine.manifest import PlanTable
from edge_runtime.engine.signing import PlanKeys, Statement
from edge_runtime.engine.tensorrt.plan import parse_sidecar
from edge_runtime.engine.tensorrt.probe import Here
from edge_runtime.errors import EdgeError, RefusedError


@dataclass(frozen=True, slots=True)
class BroughtPlan:
    """A plan and its sidecar, byte for byte what the manifest lists; `key` is the id of the key that signed it, None
    where the caller vouches for the bundle."""

    plan: bytes
    sidecar: bytes
    key: str | None


def brought_plans(
    bundle: Bundle, variant: str, here: Here, keys: PlanKeys | None, refused: Callable[[EdgeError], None]
) -> Iterator[BroughtPlan]:
    """The plans of a bundle that were built for a device like this one, one at a time.

    `keys` None: whoever signed them, since the caller trusts the bundle. `refused` is told of each that is not used.
    """
    onnx_sha256 = bundle.artefact(variant, "tensorrt").sha256
    tables = bundle.variant(variant, "tensorrt").files.tensorrt_plan
    ours = [table for table in tables if is_for(table, here)]
    if tables and not ours and (keys is None or keys):
        refused(_none_for(here, tables, str(bundle.root)))
    for table in ours:
        plan = _read(bundle, table, onnx_sha256, keys)
        if isinstance(plan, EdgeError):
            refused(plan)
        else:
            yield plan


def is_for(table: PlanTable, here: Here) -> bool:
    """Whether the manifest says that a plan was built for a device like this one."""
    found = (table.tensorrt, table.compute_capability, table.device)
    return found == (here.tensorrt, here.compute_capability, here.device)


def statement_of(table: PlanTable, onnx_sha256: str) -> Statement:
    """What a signature of this plan has to say."""
    return Statement(
        plan_sha256=table.sha256,
        sidecar_sha256=table.sidecar.sha256,
        onnx_sha256=onnx_sha256,
        tensorrt=table.tensorrt,
        compute_capability=table.compute_capability,
        device=table.device,
    )


def _none_for(here: Here, tables: Sequence[PlanTable], where: str) -> EdgeError:
    devices = sorted({f"{table.device} with TensorRT {table.tensorrt}" for table in tables})
    message = f"there are plans for {', '.join(devices)}, and this is {here.device} with TensorRT {here.tensorrt}"
    return RefusedError(message, code="plan_elsewhere", where=where)


def _read(bundle: Bundle, table: PlanTable, onnx_sha256: str, keys: PlanKeys | None) -> BroughtPlan | EdgeError:
    where = str(bundle.root / table.path)
    try:
        # First, and of the hashes: of what nobody vouches for no byte is read, however large it is.
        key = None if keys is None else keys.check(statement_of(table, onnx_sha256), table.signature, where)
        sidecar = bundle.read_sidecar(table)
        size_bytes = parse_sidecar(sidecar, str(bundle.root / table.sidecar.path)).plan_bytes
        return BroughtPlan(bundle.read_plan(table, size_bytes), sidecar, key)
    except EdgeError as error:
        return error.with_traceback(None)
