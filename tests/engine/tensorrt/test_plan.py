"""Plans are refused before anything is deserialised, naming what is wrong and both versions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.engine.tensorrt.plan import (
    PlanKey,
    PlanTensor,
    Sidecar,
    describe,
    parse_sidecar,
    read_sidecar,
    sidecar_path,
    strip_header,
    verify,
)
from edge_runtime.engine.tensorrt.probe import Here
from edge_runtime.errors import EngineError

HERE = Here(tensorrt="10.3.0", compute_capability="8.7", device="Orin Nano", driver="12.6", l4t="36.4.3")
ONNX = "ab" * 32
PLAN = b"ptrt" + bytes(range(200))
TENSORS = (
    PlanTensor(name="images", mode="input", dtype="FLOAT", shape=(-1, 3, 416, 416)),
    PlanTensor(name="boxes", mode="output", dtype="HALF", shape=(-1, 100, 4)),
)


def sidecar(plan: bytes = PLAN, **changes: Any) -> Sidecar:
    made = describe(plan, HERE, onnx_sha256=ONNX, tensors=TENSORS, batches=(1, 4), options={"fp16": True})
    return made.model_copy(update=changes)


def refused(plan: bytes, made: Sidecar, here: Here = HERE) -> EngineError:
    with pytest.raises(EngineError) as caught:
        verify(plan, made, here, "store/x.plan")
    assert caught.value.where == "store/x.plan"
    assert caught.value.remedy is not None
    assert "edge-runtime build" in caught.value.remedy
    return caught.value


def test_a_plan_that_was_built_here() -> None:
    plan, remarks = verify(PLAN, sidecar(), HERE, "x")
    assert bytes(plan) == PLAN
    assert remarks == ()


@pytest.mark.parametrize(
    ("what", "here", "words"),
    [
        ("TensorRT", replace(HERE, tensorrt="10.16.2"), ("TensorRT 10.3.0", "TensorRT 10.16.2")),
        ("capability", replace(HERE, compute_capability="11.0"), ("capability 8.7", "capability 11.0")),
        ("device", replace(HERE, device="AGX Orin"), ("Orin Nano", "AGX Orin")),
    ],
)
def test_a_plan_for_something_else_names_both(what: str, here: Here, words: tuple[str, str]) -> None:
    error = refused(PLAN, sidecar(), here)
    assert error.code == "plan_mismatch"
    assert all(word in error.message for word in words)


def test_after_an_upgrade_the_versions_are_told_before_the_digest() -> None:
    assert refused(PLAN[:-1], sidecar(), replace(HERE, tensorrt="11.4.1")).code == "plan_mismatch"


@pytest.mark.parametrize(
    "plan", [PLAN[:-1], PLAN + b"\0", PLAN[:50] + b"\xff" + PLAN[51:], b""], ids=["cut", "longer", "flipped", "empty"]
)
def test_other_bytes_are_damage(plan: bytes) -> None:
    assert refused(plan, sidecar()).code == "plan_damaged"


@pytest.mark.parametrize("plan", [b"\x08\x07onnx", b"ptr", b"PK\x03\x04zip"])
def test_what_is_no_plan(plan: bytes) -> None:
    error = refused(plan, sidecar(plan))
    assert error.code == "plan_invalid"
    assert repr(plan[:4]) in error.message


def test_what_changed_underneath_is_said_and_runs() -> None:
    _, remarks = verify(PLAN, sidecar(), replace(HERE, driver="13.2", l4t="36.5"), "x")
    assert len(remarks) == 2
    assert "12.6" in remarks[0]
    assert "13.2" in remarks[0]
    assert "36.4.3" in remarks[1]
    assert "36.5" in remarks[1]


def headed(metadata: bytes, plan: bytes = PLAN) -> bytes:
    return len(metadata).to_bytes(4, "little", signed=True) + metadata + plan


def test_the_header_that_ultralytics_writes() -> None:
    raw = headed(json.dumps({"stride": 32, "names": {"0": "person"}}).encode())
    plan, metadata = strip_header(raw)
    assert bytes(plan) == PLAN
    assert metadata == {"stride": 32, "names": {"0": "person"}}
    stripped, _ = verify(raw, sidecar(raw), HERE, "x")
    assert bytes(stripped) == PLAN


@pytest.mark.parametrize(
    "raw", [headed(b"[1, 2]"), headed(b"no json"), (2**31).to_bytes(4, "little") + b"{}", b"\x02\0\0", b""]
)
def test_no_header_is_left_alone(raw: bytes) -> None:
    plan, metadata = strip_header(raw)
    assert bytes(plan) == raw
    assert metadata is None


def test_a_sidecar_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "x.plan"
    made = sidecar(options={"dla_core": 1, "workspace_bytes": 2**28})
    sidecar_path(path).write_bytes(made.to_json())
    assert read_sidecar(path) == made
    assert made.dla_core == 1
    assert sidecar().dla_core is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": "edge.plan/2"}, "schema"),
        ({"plan_sha256": "AB"}, "plan_sha256"),
        ({"plan_bytes": "200"}, "plan_bytes"),
        ({"batches": [4, 1]}, "batches"),
        ({"batches": []}, "batches"),
        ({"batches": [0, 1]}, "batches"),
        ({"extra": 1}, "extra"),
        ({"tensors": []}, "tensors"),
        ({"tensorrt": "../../x"}, "tensorrt"),
    ],
)
def test_a_sidecar_that_says_something_else(change: dict[str, object], words: str) -> None:
    raw = json.dumps({**json.loads(sidecar().to_json()), **change}).encode()
    with pytest.raises(EngineError, match=words) as caught:
        parse_sidecar(raw, "x.plan.json")
    assert caught.value.code == "plan_sidecar"


@pytest.mark.parametrize("raw", [b"", b"{", b"null", b"\xff" * 10, b" " * (2 * 1024 * 1024)])
def test_a_sidecar_that_is_none(raw: bytes) -> None:
    with pytest.raises(EngineError) as caught:
        parse_sidecar(raw, "x.plan.json")
    assert caught.value.code == "plan_sidecar"


def test_no_sidecar_no_plan(tmp_path: Path) -> None:
    with pytest.raises(EngineError) as caught:
        read_sidecar(tmp_path / "x.plan")
    assert caught.value.code == "plan_sidecar"
    assert caught.value.where == str(tmp_path / "x.plan.json")


def test_a_key_changes_with_all_that_a_plan_depends_on() -> None:
    key = PlanKey(ONNX, "fp32", (416, 416), (1, 4), HERE, {"a": 1, "b": 2})
    others = [
        replace(key, onnx_sha256="cd" * 32),
        replace(key, variant="int8"),
        replace(key, size=(416, 320)),
        replace(key, batches=(1,)),
        replace(key, options={"a": 1, "b": 3}),
        *(
            replace(key, here=replace(HERE, **change))
            for change in (
                {"tensorrt": "10.3.1"},
                {"compute_capability": "8.6"},
                {"device": "AGX Orin"},
                {"driver": "12.7"},
                {"l4t": None},
            )
        ),
    ]
    assert len({key.digest, *(other.digest for other in others)}) == len(others) + 1
    assert replace(key, options={"b": 2, "a": 1}).digest == key.digest
    assert len(key.digest) == 64
