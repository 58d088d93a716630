"""The fake's plans: `ptrt`, a header as JSON, and the ONNX that is run in its place."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Header:
    """What a plan was built by and for. `profiles`: per profile, input name -> (min, opt, max)."""

    version: str
    capability: tuple[int, int] = (8, 7)
    profiles: Sequence[Mapping[str, tuple[Shape, Shape, Shape]]] = field(default_factory=tuple)
    name: str = "tiny"


class BadPlan(Exception):
    """Why a plan is not taken, in the words of the real library."""


def make_plan(
    onnx: bytes,
    *,
    version: str,
    capability: tuple[int, int] = (8, 7),
    profiles: Sequence[Mapping[str, tuple[Shape, Shape, Shape]]] = (),
) -> bytes:
    """A plan that runs this ONNX. Dynamic inputs need a profile."""
    header = json.dumps(
        {
            "version": version,
            "capability": list(capability),
            "profiles": [{name: [list(s) for s in shapes] for name, shapes in each.items()} for each in profiles],
            "sha256": hashlib.sha256(onnx).hexdigest(),
        }
    ).encode()
    return b"ptrt" + struct.pack("<I", len(header)) + header + onnx


def batches(name: str, rest: Shape, sizes: tuple[int, int, int]) -> list[dict[str, tuple[Shape, Shape, Shape]]]:
    """One profile for an input [batch, *rest]: min, opt and max of the batch."""
    low, best, high = sizes
    return [{name: ((low, *rest), (best, *rest), (high, *rest))}]


def read_plan(data: bytes, version: str, capability: tuple[int, int]) -> tuple[Header, bytes]:
    """The plan's header and its ONNX. Raises BadPlan."""
    if data[:4] not in (b"ptrt", b"ftrt") or len(data) < 8:
        raise BadPlan("IRuntime::deserializeCudaEngine: Error Code 1: Serialization (Magic tag does not match)")
    (size,) = struct.unpack("<I", data[4:8])
    try:
        header = json.loads(data[8 : 8 + size])
    except ValueError:
        raise BadPlan("IRuntime::deserializeCudaEngine: Error Code 4: Internal Error (Engine is corrupt)") from None
    onnx = data[8 + size :]
    if hashlib.sha256(onnx).hexdigest() != header["sha256"]:
        raise BadPlan("IRuntime::deserializeCudaEngine: Error Code 4: Internal Error (Engine is corrupt)")
    if header["version"] != version:
        raise BadPlan(
            "IRuntime::deserializeCudaEngine: Error Code 1: Serialization (Serialization assertion stdVersionRead == "
            "kSERIALIZATION_VERSION failed.Version tag does not match. Note: Current Version: 239, Serialized Engine "
            "Version: 236)"
        )
    if tuple(header["capability"]) != capability:
        wanted, got = (".".join(map(str, each)) for each in (capability, header["capability"]))
        raise BadPlan(
            "IRuntime::deserializeCudaEngine: Error Code 6: API Usage Error (The engine plan file is generated on an "
            f"incompatible device, expecting compute {wanted} got compute {got}, please rebuild.)"
        )
    profiles = [
        {name: (tuple(low), tuple(best), tuple(high)) for name, (low, best, high) in each.items()}
        for each in header["profiles"]
    ]
    return Header(header["version"], capability, profiles), onnx
