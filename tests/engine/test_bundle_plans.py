"""Plans that come with a bundle: covered by its digest like all else in it, and given for the right device alone."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.engine.archive import manifest_files, require_listed
from edge_runtime.engine.bundle import load_bundle
from edge_runtime.errors import BundleError
from tests.engine.graphs import classifier, write_bundle

MODEL = classifier()
PLAN, SIDECAR = b"ptrt native code", b'{"schema": "edge.plan/1"}'
DEVICE = {"tensorrt": "10.3.0", "compute_capability": "8.7", "device": "NVIDIA Jetson Orin Nano"}


def listed(path: str, data: bytes) -> dict[str, str]:
    return {"path": path, "sha256": hashlib.sha256(data).hexdigest()}


def with_plan(root: Path, **changed: Any) -> Path:
    """A bundle with one plan; `changed` in its entry, and `tensorrt_file` False: without the ONNX for it."""
    root.mkdir()
    (root / "orin.plan").write_bytes(PLAN)
    (root / "orin.plan.json").write_bytes(SIDECAR)
    file = listed("model.onnx", MODEL)
    entry = {**listed("orin.plan", PLAN), "sidecar": listed("orin.plan.json", SIDECAR), **DEVICE}
    both: Mapping[str, Any] = {"onnxruntime": file, "tensorrt": file}
    if changed.pop("tensorrt_file", True) is False:
        both = {"onnxruntime": file}
    return write_bundle(root, MODEL, variant={"files": {**both, "tensorrt_plan": [{**entry, **changed}]}})


def test_it_is_hashed_as_read_and_no_more_is_read_than_is_wanted(tmp_path: Path) -> None:
    bundle = load_bundle(with_plan(tmp_path / "tiny"))
    (table,) = bundle.variant("fp32").files.tensorrt_plan
    assert (bundle.read_plan(table), bundle.read_sidecar(table)) == (PLAN, SIDECAR)
    assert bundle.read_plan(table, len(PLAN)) == PLAN
    with pytest.raises(BundleError, match="more than 15 are not read"):
        bundle.read_plan(table, len(PLAN) - 1)
    (bundle.root / "orin.plan").write_bytes(PLAN[::-1])
    (bundle.root / "orin.plan.json").write_bytes(SIDECAR[::-1])
    for read in (bundle.read_plan, bundle.read_sidecar):
        with pytest.raises(BundleError) as caught:
            read(table)
        assert caught.value.code == "digest_mismatch"


def test_signatures_are_covered_by_the_digest(tmp_path: Path) -> None:
    signature = {"key": "0123456789abcdef", "value": "AA=="}
    plain = load_bundle(with_plan(tmp_path / "plain"))
    signed = load_bundle(with_plan(tmp_path / "signed", signature=[signature, {**signature, "value": "BB=="}]))
    (table,) = signed.variant("fp32").files.tensorrt_plan
    assert [each.value for each in table.signature] == ["AA==", "BB=="]
    assert signed.digest != plain.digest


@pytest.mark.parametrize("name", ["orin.plan", "orin.plan.json"])
def test_a_changed_one_makes_the_bundle_another(tmp_path: Path, name: str) -> None:
    root = with_plan(tmp_path / "tiny")
    (root / name).write_bytes(b"ptrt exchanged!!")
    with pytest.raises(BundleError) as caught:
        load_bundle(root)
    assert (caught.value.code, name in str(caught.value)) == ("digest_mismatch", True)


def test_it_travels_with_the_bundle(tmp_path: Path) -> None:
    bundle = require_listed(load_bundle(with_plan(tmp_path / "tiny")))
    assert {"orin.plan", "orin.plan.json"} <= {str(each) for each in manifest_files(bundle)}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"path": "../orin.plan"}, "leads out of the bundle's folder"),
        ({"sidecar": {"path": "/etc/passwd", "sha256": "0" * 64}}, "is an absolute path"),
        ({"sha256": "short"}, "is not 64 hex digits"),
        ({"tensorrt_file": False}, "no files.tensorrt that these plans were built from"),
        ({"l4t": "36.4"}, "there is no such key"),
        ({"signature": [{"key": "0123456789ABCDEF", "value": "AA=="}]}, "is not 16 hex digits in lower case"),
        ({"signature": [{"key": "0123456789abcdef"}]}, "value: is missing"),
        (
            {"signature": [{"key": "0123456789abcdef", "value": "AA==", "algo": "rsa"}]},
            "known keys here are key, value",
        ),
        ({"signature": [{"key": "0123456789abcdef", "value": "AA=="}] * 17}, "at most 16 items"),
    ],
)
def test_faults_are_named(tmp_path: Path, changed: dict[str, Any], told: str) -> None:
    with pytest.raises(BundleError) as caught:
        load_bundle(with_plan(tmp_path / "tiny", **changed))
    assert caught.value.code == "manifest_invalid"
    assert told in str(caught.value)
    assert "files.tensorrt_plan" in str(caught.value)
