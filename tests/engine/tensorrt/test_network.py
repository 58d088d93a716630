"""The builder through the fake of both versions: what it is told, what it says, and what is made of its refusals."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from edge_runtime.engine.tensorrt.log import capture
from edge_runtime.engine.tensorrt.network import Built, Network, Phases, Settings, named
from edge_runtime.engine.tensorrt.onnxfile import read_onnx
from edge_runtime.engine.tensorrt.owner import without_frames
from edge_runtime.engine.tensorrt.pycuda_door import PyCudaDoor
from edge_runtime.errors import EdgeError, EngineError, RefusedError
from edge_runtime.records.spec import InputSpec
from tests.engine.graphs import SIDE, classifier, graph, node
from tests.engine.tensorrt.fake_machine import Machine
from tests.engine.tensorrt.fake_plan import read_plan
from tests.engine.tensorrt.fake_pycuda import make_pycuda
from tests.engine.tensorrt.fake_tensorrt import make_tensorrt

SPEC = InputSpec(width=SIDE, height=SIDE, color="RGB", resize="stretch")
SETTINGS = Settings(batches=(1, 2, 3, 4), best=1, workspace_bytes=1 << 26)


class Rig:
    def __init__(self, version: str) -> None:
        self.machine = Machine()
        self.version = version
        self.trt = make_tensorrt(self.machine, version)
        self.door = PyCudaDoor(make_pycuda(self.machine))
        self.progress: list[tuple[str, float]] = []
        self.configs: list[Any] = []
        self.door.start()
        real = self.trt.Builder.build_serialized_network

        def build_serialized_network(builder: Any, network: Any, config: Any) -> Any:
            self.configs.append(
                {
                    "workspace": config.get_memory_pool_limit(self.trt.MemoryPoolType.WORKSPACE),
                    "dram": config.get_memory_pool_limit(self.trt.MemoryPoolType.TACTIC_DRAM),
                    "level": config.builder_optimization_level,
                    "flags": config.flags,
                    "device": config.default_device_type,
                    "core": config.DLA_core,
                    "cached": len(config._cache._known) if config._cache is not None else None,
                }
            )
            return real(builder, network, config)

        self.trt.Builder.build_serialized_network = build_serialized_network

    def build(self, model: bytes | None = None, settings: Settings = SETTINGS, cache: bytes = b"") -> Built:
        model = model or classifier()
        logger, lines = capture(self.trt)
        network = Network(self.trt, logger, lines, "model.onnx")
        try:
            return network.build(
                model, read_onnx(model, "model.onnx"), SPEC, settings, cache, lambda *told: self.progress.append(told)
            )
        except EdgeError as error:
            raise without_frames(error) from None

    def refused(self, model: bytes | None = None, settings: Settings = SETTINGS) -> EdgeError:
        with pytest.raises(EdgeError) as caught:
            self.build(model, settings)
        assert caught.value.remedy
        return without_frames(caught.value)

    def close(self) -> None:
        gc.collect()
        self.door.stop()
        self.machine.check_empty()


@pytest.fixture(params=["10.3.0", "11.4.1"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig(request.param)
    yield made
    made.close()


def test_it_is_strongly_typed_and_nothing_else_is_said_of_precision(rig: Rig) -> None:
    built = rig.build(settings=Settings((1, 2, 3, 4), 1, 1 << 26, dram_bytes=1 << 30))
    (config,) = rig.configs
    assert (config["workspace"], config["dram"], config["level"]) == (1 << 26, 1 << 30, 3)
    assert config["flags"] == 0
    header, onnx = read_plan(built.plan, rig.version, (8, 7))
    assert header.profiles == [{"x": ((1, 3, SIDE, SIDE), (1, 3, SIDE, SIDE), (4, 3, SIDE, SIDE))}]
    assert onnx == classifier()
    assert (built.layers, built.on_gpu, built.notes) == (1, (), ())


def test_free_sides_get_the_variants_size_and_fixed_ones_stay(rig: Rig) -> None:
    built = rig.build(classifier(shape=("batch", 3, "h", SIDE)), Settings((1, 2), 2, 1 << 26))
    header, _ = read_plan(built.plan, rig.version, (8, 7))
    assert header.profiles == [{"x": ((1, 3, SIDE, SIDE), (2, 3, SIDE, SIDE), (2, 3, SIDE, SIDE))}]
    static = rig.build(classifier(shape=(2, 3, SIDE, SIDE)), Settings((2,), 2, 1 << 26))
    assert read_plan(static.plan, rig.version, (8, 7))[0].profiles == []


def test_progress_comes_from_the_librarys_own_thread(rig: Rig) -> None:
    rig.build()
    phases = {name for name, _ in rig.progress}
    shares = [share for _, share in rig.progress]
    assert phases == {"Building engine"}
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)


def test_the_timing_cache_goes_round(rig: Rig) -> None:
    first = rig.build()
    assert first.cache is not None
    rig.build(cache=first.cache)
    assert [each["cached"] for each in rig.configs] == [0, 1]


def test_a_timing_cache_that_is_not_taken_costs_nothing_but_time(rig: Rig) -> None:
    cache = rig.build().cache
    assert cache is not None
    rig.machine.inject("IBuilderConfig.set_timing_cache", False)
    built = rig.build(cache=cache)
    assert "timing cache is not used" in built.notes[0]
    assert [each["cached"] for each in rig.configs] == [0, 0]
    garbage = rig.build(cache=b"no cache at all")
    assert "timing cache is not used" in garbage.notes[0]
    rig.machine.inject("IBuilderConfig.create_timing_cache", False, times=2)
    without = rig.build(cache=cache)
    assert (len(without.notes), without.cache, rig.configs[-1]["cached"]) == (2, None, None)


def test_every_unknown_operator_is_named_with_its_nodes_and_opset(rig: Rig) -> None:
    nodes = [
        node("Wobble", ["x"], ["a"], name="first", domain="com.acme"),
        node("Wobble", ["a"], ["b"], name="second", domain="com.acme"),
        node("Frobnicate", ["b"], ["y"], name="third"),
    ]
    error = rig.refused(graph(nodes, domains=("com.acme",), opset=17))
    assert isinstance(error, RefusedError)
    assert error.code == "unknown_operators"
    assert f"TensorRT {rig.version} does not know" in error.message
    assert "the operator Wobble (com.acme opset 1; nodes: first, second)" in error.message
    assert "the operator Frobnicate (ONNX opset 17; nodes: third)" in error.message


def test_what_the_parser_says_besides_is_passed_on(rig: Rig) -> None:
    rig.machine.inject("OnnxParser.parse", "Assertion failed: axes.size() == 2")
    error = rig.refused()
    assert error.code == "model_invalid"
    assert "Assertion failed: axes.size() == 2" in error.message


@pytest.mark.parametrize(
    ("said", "code", "kind"),
    [
        ("Error Code 1: Target GPU SM 87 is not supported by this TensorRT release.", "no_sm", RefusedError),
        ("Error Code 1: Cuda Runtime (no kernel image is available for execution)", "no_sm", RefusedError),
        ("Error Code 2: OutOfMemory (Requested size was 4096 bytes.)", "build_memory", RefusedError),
        ("Error Code 10: Internal Error (Could not find any implementation for node {x})", "build_failed", EngineError),
    ],
)
def test_a_build_that_fails_says_why(rig: Rig, said: str, code: str, kind: type[EdgeError]) -> None:
    rig.machine.inject("Builder.build_serialized_network", said)
    error = rig.refused()
    assert (error.code, type(error)) == (code, kind)
    assert said in error.message
    if code == "no_sm":
        assert "--system-site-packages" in str(error.remedy)


FAILURES: Sequence[str] = (
    "Builder",
    "Builder.create_network",
    "Builder.create_builder_config",
    "IBuilderConfig.add_optimization_profile",
    "init_libnvinfer_plugins",
)


@pytest.mark.parametrize("call", FAILURES)
def test_no_failure_goes_by_unseen(rig: Rig, call: str) -> None:
    rig.machine.inject(call, "told by the test")
    assert rig.refused().code in ("build_failed", "tensorrt_failed")
    rig.machine.check()


# --- DLA


def test_the_layers_that_no_dla_takes_are_named(rig: Rig) -> None:
    rig.machine.dla_cores, rig.machine.gpu_only = 2, frozenset({"Relu"})
    nodes = [
        node("Relu", ["x"], ["r"], name="act"),
        node("ReduceMean", ["r"], ["y"], name="mean", axes=[2, 3], keepdims=0),
    ]
    built = rig.build(graph(nodes), Settings((1,), 1, 1 << 26, dla_core=1))
    assert (built.on_gpu, built.layers) == (("act",), 2)
    (config,) = rig.configs
    assert (config["core"], config["device"]) == (1, rig.trt.DeviceType.DLA)
    assert config["flags"] == 1 << int(rig.trt.BuilderFlag.GPU_FALLBACK)


def test_a_core_that_is_not_there_is_refused(rig: Rig) -> None:
    settings = Settings((1,), 1, 1 << 26, dla_core=2)
    assert "has no DLA" in rig.refused(settings=settings).message
    rig.machine.dla_cores = 2
    error = rig.refused(settings=settings)
    assert (error.code, "has 2 DLA cores" in error.message, "--dla 0 to 1" in str(error.remedy)) == (
        "no_dla",
        True,
        True,
    )


def test_a_dla_that_takes_nothing_is_no_dla(rig: Rig) -> None:
    rig.machine.dla_cores, rig.machine.gpu_only = 1, frozenset({"ReduceMean"})
    assert rig.refused(settings=Settings((1,), 1, 1 << 26, dla_core=0)).code == "dla_unsupported"


# --- progress


def phases() -> tuple[Phases, list[tuple[str, float]]]:
    seen: list[tuple[str, float]] = []
    return Phases(lambda name, share: seen.append((name, round(share, 3)))), seen


def test_phases_inside_of_one_another_count_as_a_part_of_their_step() -> None:
    monitor, seen = phases()
    monitor.start("build", None, 2)
    monitor.start("tactics", "build", 4)
    monitor.step("tactics", 0)
    monitor.step("tactics", 1)
    monitor.finish("tactics")
    monitor.step("build", 0)
    assert seen == [("build", 0.0), ("build", 0.0), ("build", 0.125), ("build", 0.25), ("build", 0.0), ("build", 0.5)]


@pytest.mark.parametrize(
    "act",
    [
        lambda monitor: monitor.step("never begun", 3),
        lambda monitor: monitor.finish("never begun"),
        lambda monitor: (monitor.start("a", "a", 1), monitor.step("a", 0)),
        lambda monitor: (monitor.start("a", "b", 0), monitor.start("b", "a", 0), monitor.step("a", 7)),
    ],
)
def test_nothing_that_the_library_tells_raises_or_hangs(act: Callable[[Phases], object]) -> None:
    monitor, seen = phases()
    act(monitor)
    assert all(0.0 <= share <= 1.0 for _, share in seen)


def test_a_listener_that_fails_does_not_reach_the_library() -> None:
    def fail(name: str, share: float) -> None:
        raise ValueError(name)

    Phases(fail).start("build", None, 1)


def test_long_lists_are_cut() -> None:
    assert named([str(each) for each in range(12)]) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more"
