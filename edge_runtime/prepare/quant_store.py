"""What a search keeps from one run to the next, and the pictures that its probe kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnx

from edge_runtime.durable import write_atomic
from edge_runtime.errors import CameraError
from edge_runtime.prepare.quant_probe import Judgement
from edge_runtime.records.frames import InputArray, Transform
from edge_runtime.records.spec import InputSpec

__all__ = ["Kept", "Store"]


class Kept:
    """A kept input as a picture that puts itself into a batch."""

    def __init__(self, array: InputArray) -> None:
        self._array = array[0]
        self.width, self.height = 0, 0

    def write_into(self, place: InputArray, spec: InputSpec) -> Transform:
        place[:] = self._array
        return Transform(*(spec.width, spec.height) * 3, 0, 0)

    def to_rgb(self) -> Any:
        raise CameraError("a model's input has no colours to show any more", code="pixels_unreadable")


class Store:
    """What was judged, in a file, by the digest of the candidate; nothing of it counts for other pictures."""

    def __init__(self, path: Path, pictures: str) -> None:
        self._path = path
        self._content: dict[str, Any] = {"pictures": pictures, "found": {}}
        try:
            content = json.loads(path.read_text())
            if content["pictures"] == pictures and isinstance(content["found"], dict):
                self._content = content
        except (OSError, ValueError, KeyError, TypeError):
            pass  # none, or cut short: judged anew

    def number(self, kind: str, data: bytes, find: Callable[[], float]) -> float:
        return float(self._get(f"{kind} {hashlib.sha256(data).hexdigest()}", find))

    def model(self, key: bytes, find: Callable[[], Any]) -> Any:
        """The onnx.ModelProto that was made of what `key` says, in a file of its own."""
        digest = hashlib.sha256(self._content["pictures"].encode() + key).hexdigest()
        path = self._path.with_name(f"{digest[:32]}.onnx")
        try:
            made: Any = onnx.load_model_from_string(path.read_bytes())
            onnx.checker.check_model(made)
        except Exception:  # noqa: BLE001  none, or damaged: protobuf and onnx have no common base
            made = find()
            write_atomic(path, made.SerializeToString(deterministic=True))
        return made

    def judgement(self, data: bytes, find: Callable[[], Judgement]) -> Judgement:
        def plain() -> Mapping[str, Any]:
            found = find()
            return {"loss": found.loss, "agreement": found.agreement, "distance": found.distance,
                    "sqnr_db": dict(found.sqnr_db)}  # fmt: skip

        return Judgement(**self._get(f"judged {hashlib.sha256(data).hexdigest()}", plain))

    def _get(self, key: str, find: Callable[[], Any]) -> Any:
        found = self._content["found"]
        if key not in found:
            found[key] = find()
            write_atomic(self._path, json.dumps(self._content).encode())
        return found[key]
