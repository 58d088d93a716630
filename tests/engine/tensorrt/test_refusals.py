"""What TensorRT does not take, or this device not: refused with both sides named, and with TensorRT's own words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from edge_runtime.engine.tensorrt.plan import Sidecar, describe
from edge_runtime.errors import EdgeError, EngineError
from tests.engine.graphs import classifier
from tests.engine.tensorrt.fake_machine import Machine
from tests.engine.tensorrt.fake_plan import make_plan, read_plan
from tests.engine.tensorrt.rigs import TENSORRT, USUAL, Kind, Rig, fill

BOTH = tuple(kind for kind in TENSORRT if kind.name in USUAL)


@pytest.fixture(params=BOTH, ids=lambda kind: kind.name)
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    made = Rig(request.param, tmp_path)
    made.start()
    yield made
    made.stop()
    made.machine.check_empty()


def refused(rig: Rig, changed: Callable[[bytes, Sidecar], tuple[bytes, Sidecar]]) -> EdgeError:
    with pytest.raises(EngineError) as caught:
        rig.load_bundle(rig.bundle(classifier()), changed=changed)
    error = caught.value.with_traceback(None)
    assert error.where == "fp32.plan"
    assert error.remedy
    assert "edge-runtime build" in error.remedy
    return error


def again(plan: bytes, sidecar: Sidecar, rig: Rig) -> tuple[bytes, Sidecar]:
    """A sidecar that says of this plan what it should: the plan itself is to be refused."""
    assert rig.here is not None
    return plan, describe(
        plan,
        rig.here,
        onnx_sha256=sidecar.onnx_sha256,
        tensors=sidecar.tensors,
        batches=sidecar.batches,
        options=sidecar.options,
    )


def rebuilt(plan: bytes, rig: Rig, version: str, capability: tuple[int, int]) -> bytes:
    header, onnx = read_plan(plan, rig.kind.version, rig.machine.capability)
    return make_plan(onnx, version=version, capability=capability, profiles=header.profiles)


def test_a_plan_of_another_tensorrt(rig: Rig) -> None:
    def changed(plan: bytes, sidecar: Sidecar) -> tuple[bytes, Sidecar]:
        return again(rebuilt(plan, rig, "8.5.2", (8, 7)), sidecar, rig)

    error = refused(rig, changed)
    assert error.code == "plan_refused"
    assert "Version tag does not match" in error.message


def test_a_plan_of_another_gpu(rig: Rig) -> None:
    def changed(plan: bytes, sidecar: Sidecar) -> tuple[bytes, Sidecar]:
        return again(rebuilt(plan, rig, rig.kind.version, (7, 2)), sidecar, rig)

    error = refused(rig, changed)
    assert error.code == "plan_refused"
    assert "expecting compute 8.7 got compute 7.2" in error.message


def test_a_plan_that_is_damaged_inside(rig: Rig) -> None:
    error = refused(rig, lambda plan, sidecar: again(plan[:-7], sidecar, rig))
    assert error.code == "plan_refused"
    assert "corrupt" in error.message


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("tensorrt", "8.5.2", "plan_mismatch"),
        ("compute_capability", "7.2", "plan_mismatch"),
        ("device", "another board", "plan_mismatch"),
        ("onnx_sha256", "0" * 64, "plan_mismatch"),
        ("plan_sha256", "0" * 64, "plan_damaged"),
    ],
)
def test_nothing_is_deserialised_before_it_is_verified(rig: Rig, field: str, value: str, code: str) -> None:
    def changed(plan: bytes, sidecar: Sidecar) -> tuple[bytes, Sidecar]:
        return plan, sidecar.model_copy(update={field: value})

    error = refused(rig, changed)
    assert error.code == code
    if len(value) < 60:
        assert value in error.message
    assert "Runtime" not in rig.machine.calls
    assert "Runtime.deserialize_cuda_engine" not in rig.machine.calls


def test_a_runtime_that_would_run_a_plans_own_code(rig: Rig) -> None:
    rig.trt.Runtime.engine_host_code_allowed = True
    with pytest.raises(EngineError, match="host code") as caught:
        rig.load(classifier())
    assert caught.value.code == "tensorrt_failed"
    assert "Runtime.deserialize_cuda_engine" not in rig.machine.calls


def test_a_sidecar_that_says_other_tensors(rig: Rig) -> None:
    def changed(plan: bytes, sidecar: Sidecar) -> tuple[bytes, Sidecar]:
        renamed = sidecar.tensors[0].model_copy(update={"name": "images"})
        return plan, sidecar.model_copy(update={"tensors": (renamed, *sidecar.tensors[1:])})

    error = refused(rig, changed)
    assert error.code == "plan_mismatch"
    assert "images" in error.message
    assert "x" in error.message


def test_a_sidecar_that_says_more_batches_than_the_profile(rig: Rig) -> None:
    def changed(plan: bytes, sidecar: Sidecar) -> tuple[bytes, Sidecar]:
        return plan, sidecar.model_copy(update={"batches": (1, 2, 64)})

    error = refused(rig, changed)
    assert error.code == "plan_mismatch"
    assert "64" in error.message


def test_no_memory_for_another_lane(rig: Rig) -> None:
    engine = rig.load(classifier())
    rig.machine.total_bytes = rig.machine.used_bytes() + 1
    lane = engine.open_lane()  # the warm-up's
    with pytest.raises(EngineError) as caught:
        engine.open_lane()
    assert caught.value.code == "gpu_memory"
    assert "fewer lanes" in str(caught.value.remedy)
    engine.close()
    del lane


def test_a_run_that_fails_once_is_an_error_once(rig: Rig) -> None:
    engine = rig.load(classifier())
    lane, buffer = engine.open_lane(), engine.allocate(2)
    expected = fill(buffer.array, 1, 2)
    rig.machine.inject("IExecutionContext.execute_async_v3", "Error Code 2: Internal Error (Assertion failed)")
    lane.submit(buffer, 2)
    with pytest.raises(EngineError, match="Assertion failed") as caught:
        lane.collect()
    assert caught.value.code == "inference_failed"
    lane.submit(buffer, 2)
    np.testing.assert_allclose(lane.collect()["y"], expected, rtol=1e-5)
    engine.close()
    engine.release(buffer)


@pytest.mark.parametrize("kind", BOTH, ids=lambda kind: kind.name)
def test_a_sticky_error_that_only_tensorrts_words_tell(kind: Kind, tmp_path: Path) -> None:
    rig = Rig(kind, tmp_path)
    rig.start()
    engine = rig.load(classifier())
    lane, buffer = engine.open_lane(), engine.allocate(2)
    words = "Cuda failure: an illegal memory access was encountered"
    rig.machine.inject("IExecutionContext.execute_async_v3", words)
    lane.submit(buffer, 2)
    for call in (lane.collect, lambda: lane.submit(buffer, 1), engine.open_lane, lambda: engine.allocate(1)):
        with pytest.raises(EngineError, match="illegal memory access") as caught:
            call()
        assert caught.value.code == "gpu_fatal"
    assert len(rig.fatal) == 1
    engine.close()
    rig.stop()


@pytest.mark.parametrize("kind", BOTH, ids=lambda kind: kind.name)
def test_no_driver(kind: Kind, tmp_path: Path) -> None:
    rig = Rig(kind, tmp_path, Machine(driver_present=False))
    with pytest.raises(EngineError) as caught:
        rig.start()
    assert "no CUDA-capable device" in caught.value.message
    rig.stop()
    assert "Runtime" not in rig.machine.calls
    rig.machine.check_empty()
