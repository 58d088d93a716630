"""Which backend runs a model and why; the thread that has plans built, and what becomes of them."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from edge_runtime.app.backing import Backing
from edge_runtime.app.building import AUTO_BATCH, Builder, Made, Need, PlanMaker
from edge_runtime.app.engines import Choice, Engines, PlanMissing
from edge_runtime.config import ModelConfig
from edge_runtime.engine.bundle import Bundle, load_bundle
from edge_runtime.engine.tensorrt.gpu import Gpu
from edge_runtime.engine.tensorrt.plan import PlanTensor, describe
from edge_runtime.engine.tensorrt.plans import FRESH_S, PlanStore
from edge_runtime.engine.tensorrt.probe import Here
from edge_runtime.errors import BundleError, EdgeError, EngineError, RefusedError
from edge_runtime.records.commands import ReloadArgs
from tests.awaiting import wait_until
from tests.engine.graphs import classifier, write_bundle

HERE = Here("10.3.0", "8.7", "NVIDIA Jetson Orin Nano", "12.6", "36.4.3")
TENSORS = (
    PlanTensor(name="x", mode="input", dtype="FLOAT", shape=(-1, 3, 32, 32)),
    PlanTensor(name="y", mode="output", dtype="FLOAT", shape=(-1, 3)),
)


def bundle_for(folder: Path, *backends: str) -> Bundle:
    model = classifier()
    file = {"path": "model.onnx", "sha256": hashlib.sha256(model).hexdigest()}
    return load_bundle(write_bundle(folder, model, variant={"files": dict.fromkeys(backends, file)}))


def config_of(backend: str = "auto", **more: Any) -> ModelConfig:
    return ModelConfig.model_validate(
        {"name": "m", "bundle": "bundled:centernet", "backend": backend, **more}, context={"base": Path("/")}
    )


class Device:
    """A store of plans, and a GPU of which nothing but what it is is looked at."""

    def __init__(self, folder: Path) -> None:
        self.store = PlanStore(folder / "plans")
        self.maker = PlanMaker(self.store, prove=cast(Any, None), free_bytes=lambda: None)
        self.here = HERE
        self.lack: EngineError | None = None
        self.opened = 0
        self.engines = Engines(self.maker, self._open)

    def _open(self) -> Gpu:
        self.opened += 1
        if self.lack is not None:
            raise self.lack
        return cast(Gpu, SimpleNamespace(here=self.here))

    def add(self, bundle: Bundle, here: Here = HERE, *, most: int = AUTO_BATCH, dla_core: int | None = None) -> None:
        need = Need(bundle, "fp32", most, dla_core)
        plan = b"ptrt"
        told = {"width": 32, "height": 32, "dla_core": dla_core}
        key = need.key(here)
        sidecar = describe(plan, here, onnx_sha256=need.onnx_sha256, tensors=TENSORS, batches=key.batches, options=told)
        self.store.put(plan, sidecar.to_json(), key, Path.exists)


@pytest.fixture
def device(tmp_path: Path) -> Device:
    return Device(tmp_path)


@pytest.fixture
def both(tmp_path: Path) -> Bundle:
    return bundle_for(tmp_path / "both", "onnxruntime", "tensorrt")


# --- the choice


def test_without_a_plan_the_cpu_runs_it_and_one_is_wanted(device: Device, both: Bundle) -> None:
    choice = device.engines.choose(config_of(), both, "auto")
    assert choice.backend == "onnxruntime"
    assert choice.reason == "its plan for NVIDIA Jetson Orin Nano has to be built: fp32: none was built for it yet"
    assert choice.needs == (Need(both, "fp32", AUTO_BATCH),)


def test_with_a_plan_it_is_tensorrt_and_nothing_is_wanted(device: Device, both: Bundle) -> None:
    device.add(both)
    choice = device.engines.choose(config_of(), both, "fp32")
    assert (choice.backend, choice.reason, choice.needs) == ("tensorrt", None, ())
    assert choice.plans == (str(device.engines.plan(config_of(), both, "fp32")),)
    assert device.opened == 1


def test_who_wants_the_cpu_opens_no_gpu(device: Device, both: Bundle) -> None:
    device.add(both)
    assert device.engines.choose(config_of("onnxruntime"), both, "auto") == Choice("onnxruntime")
    assert (device.opened, device.engines.has_gpu) == (0, False)


def test_a_changed_driver_is_a_reason_and_no_hindrance(device: Device, both: Bundle) -> None:
    device.add(both, replace(HERE, driver="12.4"))
    choice = device.engines.choose(config_of(), both, "auto")
    assert choice.backend == "tensorrt"
    assert choice.reason == ("its plan is built anew: fp32: built with driver for CUDA 12.4, here is for CUDA 12.6")
    assert len(choice.needs) == 1


def test_another_tensorrt_goes_back_to_the_cpu(device: Device, both: Bundle) -> None:
    device.add(both, replace(HERE, tensorrt="10.0.1"))
    choice = device.engines.choose(config_of(), both, "auto")
    assert choice.backend == "onnxruntime"
    assert "built with TensorRT 10.0.1, here is 10.3.0" in str(choice.reason)


def test_a_plan_of_a_dla_is_built_anew_for_that(device: Device, both: Bundle) -> None:
    device.add(both, replace(HERE, tensorrt="10.0.1"), most=1, dla_core=1)
    (need,) = device.engines.choose(config_of(), both, "auto").needs
    assert (need.dla_core, need.max_batch) == (1, 1)


def test_batches_are_the_configurations(device: Device, both: Bundle) -> None:
    device.add(both, most=2)
    assert device.engines.choose(config_of(max_batch=2), both, "auto").needs == ()
    choice = device.engines.choose(config_of(max_batch=4), both, "auto")
    assert (choice.backend, choice.needs[0].max_batch) == ("tensorrt", 4)


def test_where_nothing_else_can_run_it_waits(device: Device, both: Bundle, tmp_path: Path) -> None:
    alone = bundle_for(tmp_path / "alone", "tensorrt")
    for config, bundle in ((config_of("tensorrt"), both), (config_of(), alone)):
        with pytest.raises(PlanMissing) as caught:
            device.engines.choose(config, bundle, "auto")
        assert [need.variant for need in caught.value.needs] == ["fp32"]


def test_without_tensorrt_auto_says_why_and_the_other_does_not_run(
    device: Device, both: Bundle, tmp_path: Path
) -> None:
    device.lack = EngineError("TensorRT cannot be imported", code="tensorrt_missing", remedy="apt packages")
    choice = device.engines.choose(config_of(), both, "auto")
    assert (choice.backend, choice.reason, choice.needs) == ("onnxruntime", "TensorRT cannot be imported", ())
    for config, bundle in (
        (config_of("tensorrt"), both),
        (config_of(), bundle_for(tmp_path / "alone", "tensorrt")),
    ):
        with pytest.raises(EngineError) as caught:
            device.engines.choose(config, bundle, "auto")
        assert (caught.value.code, caught.value.remedy) == ("tensorrt_missing", "apt packages")
    assert device.opened == 1  # it is not looked for again and again


def test_a_bundle_without_a_file_for_it_is_for_the_cpu(device: Device, tmp_path: Path) -> None:
    cpu = bundle_for(tmp_path / "cpu", "onnxruntime")
    assert device.engines.choose(config_of(), cpu, "auto").backend == "onnxruntime"
    assert device.opened == 0
    with pytest.raises(BundleError) as caught:
        device.engines.choose(config_of("tensorrt"), cpu, "auto")
    assert caught.value.code == "no_artefact"


def test_a_process_without_a_gpu_of_its_own_needs_no_reason(both: Bundle) -> None:
    assert Engines().choose(config_of(), both, "auto") == Choice("onnxruntime")
    with pytest.raises(EngineError):
        Engines().choose(config_of("tensorrt"), both, "auto")


# --- what is in force


def test_a_model_on_tensorrt_does_not_go_back_to_the_cpu_unasked(device: Device, both: Bundle, tmp_path: Path) -> None:
    wanted: dict[str, Any] = {}
    backing = Backing(device.engines, want=lambda model, needs: wanted.update({model: needs}))
    device.add(both)
    backing.taken("m", backing.wish(config_of(), both, "auto"))
    assert backing.reason("m") is None
    (tmp_path / "newer").mkdir()
    newer = bundle_for_other(tmp_path / "newer")
    args = ReloadArgs(model="m", bundle=newer.digest)
    with pytest.raises(PlanMissing, match="has to be built") as caught:
        backing.wish(config_of(), newer, "auto", args)
    assert "it is being built now" in str(caught.value.remedy)
    assert [need.bundle.digest for need in wanted["m"]] == [newer.digest]
    slow = backing.wish(config_of(), newer, "auto", args.model_copy(update={"allow_slow": True}))
    assert slow.backend == "onnxruntime"
    assert backing.is_new("m", slow.choice)


def bundle_for_other(folder: Path) -> Bundle:
    model = classifier(opset=12)
    file = {"path": "model.onnx", "sha256": hashlib.sha256(model).hexdigest()}
    return load_bundle(write_bundle(folder, model, variant={"files": {"onnxruntime": file, "tensorrt": file}}))


def test_what_failed_is_an_alarm_until_something_else_runs(device: Device, both: Bundle) -> None:
    backing = Backing(device.engines)
    wish = backing.wish(config_of(), both, "auto")
    backing.taken("m", wish)
    assert "has to be built" in str(backing.reason("m"))
    backing.failed("m", "its plan cannot be had: too little memory")
    assert backing.reason("m") == "its plan cannot be had: too little memory"
    assert backing.alarms() == ["model m: its plan cannot be had: too little memory"]
    backing.taken("m", wish)
    assert backing.alarms() == []


def test_plans_in_force_stay_and_those_of_nobody_go(tmp_path: Path, both: Bundle) -> None:
    device = Device(tmp_path)
    device.add(both)
    device.add(bundle_for_other(tmp_path / "gone"))
    now_s = time.time()
    later = PlanStore(tmp_path / "plans", now=lambda: now_s + 2 * FRESH_S)
    maker = PlanMaker(later, prove=cast(Any, None), free_bytes=lambda: None)
    backing = Backing(Engines(maker, device._open), maker=maker)
    backing.collect()  # no GPU was opened: nothing is known
    assert len(list(device.store.root.glob("*/plan"))) == 2
    wish = backing.wish(config_of(), both, "auto")
    backing.taken("m", wish)
    with later.building():
        backing.collect()  # somebody builds: later
        assert len(list(device.store.root.glob("*/plan"))) == 2
    backing.collect()
    assert [str(each) for each in device.store.root.glob("*/plan")] == list(wish.choice.plans)


# --- the thread


class FakeMaker:
    """Makes a plan when it is let, or fails."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.let = threading.Event()
        self.error: EdgeError | None = None

    def make(self, need: Need, here: Here, *, cancel: threading.Event, wait: bool) -> Made:
        self.begun.append(need.variant)
        assert wait
        while not self.let.wait(0.005):
            if cancel.is_set():
                raise EngineError("cancelled", code="cancelled")
        if self.error is not None:
            raise self.error
        return cast(Made, None)


class Building:
    def __init__(self) -> None:
        self.maker = FakeMaker()
        self.told: list[tuple[str, str | None]] = []
        self.builder = Builder(
            cast(PlanMaker, self.maker),
            lambda: HERE,
            made=lambda model: self.told.append((model, None)),
            failed=lambda model, error: self.told.append((model, error.code)),
        )

    def comes(self, condition: Callable[[], object], what: str) -> None:
        wait_until(condition, 10, what)


@pytest.fixture
def building() -> Iterator[Building]:
    made = Building()
    made.builder.start()
    yield made
    assert made.builder.stop(5.0) == []


def need(variant: str) -> Need:
    bundle = SimpleNamespace(name="tiny")
    return Need(cast(Bundle, bundle), variant)


def test_all_that_a_model_wants_is_built_before_it_is_told(building: Building) -> None:
    building.maker.let.set()
    building.builder.want("m", [need("a"), need("b")])
    building.comes(lambda: building.told == [("m", None)], "the model was told")
    assert building.maker.begun == ["a", "b"]
    assert building.builder.building is None


def test_what_two_models_want_is_built_once(building: Building) -> None:
    same = need("a")
    building.builder.want("m", [same])
    building.builder.want("n", [same])
    building.maker.let.set()
    building.comes(lambda: sorted(building.told) == [("m", None), ("n", None)], "both were told")
    assert building.maker.begun == ["a"]


def test_what_is_built_is_said_while_it_lasts_and_ends_when_nobody_wants_it(building: Building) -> None:
    building.builder.want("m", [need("a")])
    building.comes(lambda: building.maker.begun == ["a"], "it began")
    assert building.builder.building == "an engine for this device is being built (tiny a)"
    building.builder.want("m", [])
    building.comes(lambda: building.builder.building is None, "it was ended")
    building.builder.want("m", [need("b")])
    building.maker.let.set()
    building.comes(lambda: building.told == [("m", None)], "the other was built")
    assert building.maker.begun == ["a", "b"]


def test_a_build_that_fails_is_told_once_and_not_tried_again(building: Building) -> None:
    building.maker.error = RefusedError("no", code="unknown_operators")
    building.maker.let.set()
    building.builder.want("m", [need("a"), need("b")])
    building.comes(lambda: building.told == [("m", "unknown_operators")], "the failure was told")
    assert building.maker.begun == ["a"]
    building.maker.error = None
    building.builder.want("m", [need("a")])
    building.comes(lambda: building.told[1:] == [("m", None)], "a new wish is a new try")


def test_a_stop_ends_the_build_under_way() -> None:
    made = Building()
    made.builder.start()
    made.builder.want("m", [need("a")])
    made.comes(lambda: made.maker.begun == ["a"], "it began")
    assert made.builder.stop(5.0) == []
    assert made.told == []
