"""The GPU is opened in the right order, or not at all; and an engine is loaded from a plan's file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edge_runtime.engine.tensorrt import gpu as gpus
from edge_runtime.engine.tensorrt import probe
from edge_runtime.engine.tensorrt.cuda import Cuda
from edge_runtime.engine.tensorrt.gpu import open_gpu
from edge_runtime.engine.tensorrt.plan import sidecar_path
from edge_runtime.errors import EngineError
from tests.engine.graphs import classifier
from tests.engine.tensorrt.fake_tensorrt import make_tensorrt
from tests.engine.tensorrt.rigs import TENSORRT, USUAL, Kind, Rig, fill


class Driver:
    """libcuda, as ctypes loads it."""

    def __init__(self, number: int) -> None:
        self.number = number

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return self.number + flags


class Place:
    """A machine with TensorRT, whose driver answers `number`. `order`: what was looked for, in order."""

    def __init__(self, kind: Kind, root: Path, patch: pytest.MonkeyPatch, number: int = 0) -> None:
        self.rig = Rig(kind, root)
        self.rig.machine.driver_present = number == 0
        self.trt = make_tensorrt(self.rig.machine, kind.version)
        self.order: list[str] = []
        self.fatal: list[str] = []

        def load(name: str) -> Any:
            self.order.append(name)
            return self.trt if name == "tensorrt" else Driver(number)

        patch.setattr(gpus, "import_tensorrt", lambda: probe.import_tensorrt(load))
        patch.setattr(gpus, "require_driver", lambda: probe.require_driver(load))

    def door(self) -> Cuda:
        self.order.append("door")
        return self.rig.door()

    def open(self) -> gpus.Gpu:
        return open_gpu(self.fatal.append, self.rig.root, open_door=self.door)


@pytest.fixture(params=[each for each in TENSORRT if each.name in USUAL], ids=lambda each: each.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    made: Kind = request.param
    return made


def test_without_a_driver_nothing_of_tensorrts_is_made(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(kind, tmp_path, monkeypatch, number=100)
    with pytest.raises(EngineError, match="it finds no GPU") as caught:
        place.open()
    assert caught.value.code in probe.NO_DEVICE
    assert place.order == ["tensorrt", "libcuda.so.1"]
    assert dict(place.rig.machine.calls) == {}
    place.rig.machine.check_empty()


def test_a_plan_is_loaded_from_its_file(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(kind, tmp_path, monkeypatch)
    gpu = place.open()
    assert place.order == ["tensorrt", "libcuda.so.1", "door"]
    assert (gpu.here.tensorrt, gpu.here.compute_capability, gpu.here.device) == (kind.version, "8.7", "Orin")
    assert gpu.is_integrated()
    rig = place.rig
    rig.here = gpu.here
    bundle = rig.bundle(classifier())
    plan, sidecar = rig.build(classifier(), bundle.input_spec("fp32").shape, (1, 2))
    file = tmp_path / "model.plan"
    file.write_bytes(plan)
    sidecar_path(file).write_bytes(sidecar.to_json())
    before = gpu.free_bytes()
    engine = gpu.load(bundle, "fp32", file)
    assert gpu.free_bytes() < before
    lane, buffer = engine.open_lane(), engine.allocate(2)
    expected = fill(buffer.array, 1, 2)
    lane.submit(buffer, 2)
    assert lane.collect()["y"] == pytest.approx(expected, rel=1e-5)
    engine.close()
    engine.release(buffer)
    file.unlink()
    with pytest.raises(EngineError, match="cannot be read") as caught:
        gpu.load(bundle, "fp32", file)
    assert caught.value.code == "plan_unreadable"
    assert gpu.stop() == []
    assert place.fatal == []
    rig.machine.check_empty()


@pytest.mark.parametrize(("call", "number"), [("cuDevicePrimaryCtxRetain", 999), ("cuDevicePrimaryCtxRetain", 2)])
def test_a_gpu_that_does_not_start_leaves_nothing_and_ends_nothing(
    call: str, number: int, kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(kind, tmp_path, monkeypatch)
    place.rig.machine.inject(call, number)
    with pytest.raises(EngineError, match=call) as caught:
        place.open()
    assert caught.value.code in ("cuda_failed", "gpu_memory")
    assert caught.value.remedy
    assert place.fatal == []
    place.rig.machine.check_empty()


def test_a_gpu_that_does_not_say_what_it_is_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(next(each for each in TENSORRT if each.door == "bindings"), tmp_path, monkeypatch)
    place.rig.machine.inject("cuDriverGetVersion", 1)
    with pytest.raises(EngineError, match="cuDriverGetVersion"):
        place.open()
    place.rig.machine.check_empty()
