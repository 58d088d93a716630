"""`device-check`: every check passes on the fakes, and each is failed by what it is there to find."""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_runtime.app import device_check_bench, device_check_children, device_check_gpu, device_check_letterbox
from edge_runtime.app.building import Need
from edge_runtime.app.device_check import WOULD, DeviceCheck
from edge_runtime.app.device_check_bench import Bench
from edge_runtime.app.device_check_children import Job, carry_out_job
from edge_runtime.app.device_check_gpu import LEAK_BYTES
from edge_runtime.app.device_check_host import CHECKS as HOST_CHECKS
from edge_runtime.app.device_check_host import Host
from edge_runtime.app.device_check_report import Outcome, carry_out, document, save
from edge_runtime.app.evaluate import read_image
from edge_runtime.engine.tensorrt.cuda import Cuda
from edge_runtime.engine.tensorrt.gpu import Gpu
from edge_runtime.engine.tensorrt.letterbox import NAME
from edge_runtime.engine.tensorrt.plan import Sidecar, sidecar_path
from edge_runtime.engine.tensorrt.probe import Here
from edge_runtime.engine.tensorrt.stopwatch import Stopwatch, with_stopwatch
from edge_runtime.errors import EdgeError, EngineError, RefusedError
from edge_runtime.hardware.survey import survey
from edge_runtime.records.sensors import SensorReport
from tests.engine.graphs import classifier, graph, node
from tests.engine.tensorrt import kernel_cpu
from tests.engine.tensorrt.fake_nvrtc import FakeNvrtc
from tests.engine.tensorrt.fake_parts import ILLEGAL_ADDRESS
from tests.engine.tensorrt.rigs import TENSORRT, Rig

PYCUDA, BINDINGS = TENSORRT[0], TENSORRT[2]
MiB = 1024 * 1024


class TimedRig(Rig):
    """A rig whose door is a stopwatch."""

    stopwatch: Stopwatch

    def door(self) -> Cuda:
        real = super().door()
        door, self.stopwatch = with_stopwatch(open_door=lambda _: real)
        return door


@pytest.fixture(autouse=True)
def few_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (device_check_bench, device_check_gpu):
        monkeypatch.setattr(module, "RUNS", 3)
    monkeypatch.setattr(device_check_letterbox, "SIZES", ((320, 180), (640, 360)))


@pytest.fixture(params=[PYCUDA, BINDINGS], ids=lambda kind: kind.name)
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TimedRig]:
    yield from started(TimedRig(request.param, tmp_path))


@pytest.fixture
def pycuda(tmp_path: Path) -> Iterator[TimedRig]:
    yield from started(TimedRig(PYCUDA, tmp_path))


@pytest.fixture
def bindings(tmp_path: Path) -> Iterator[TimedRig]:
    yield from started(TimedRig(BINDINGS, tmp_path))


def started(made: TimedRig) -> Iterator[TimedRig]:
    made.machine.kernels[NAME] = kernel_cpu.on_machine
    made.start()
    yield made
    made.stop()
    made.machine.check()


def bench_of(
    rig: TimedRig, model: bytes | None = None, change: Callable[[Sidecar], Sidecar] = lambda each: each, **more: Any
) -> Bench:
    """A bundle of the classifier, with a plan of `model` (default: the same)."""
    own = classifier()
    bundle = rig.bundle(own)
    right = rig.build(own, bundle.input_spec("fp32").shape, (1, 2))
    plan, sidecar = right if model is None else rig.build(model, bundle.input_spec("fp32").shape, (1, 2))
    sidecar = change(sidecar.model_copy(update={"onnx_sha256": right[1].onnx_sha256}))
    file = rig.root / "plan"
    file.write_bytes(plan)
    sidecar_path(file).write_bytes(sidecar.to_json())
    assert rig.owner is not None
    assert rig.here is not None
    gpu = Gpu(rig.trt, rig.owner, rig.here)
    options: dict[str, Any] = {"reloads": 3, "load_library": lambda _: FakeNvrtc(), "kernels": rig.root / "kernels"}
    return Bench(gpu, rig.stopwatch, bundle, "fp32", file, read_image, **options | more)


def check(name: str, bench: Bench) -> Outcome:
    outcome = carry_out(name, partial(device_check_gpu.CHECKS[name], bench))
    json.dumps(outcome.numbers, default=str)
    return outcome


def wrong_model() -> bytes:
    """The classifier, and a tenth too much."""
    nodes = [node("ReduceMean", ["x"], ["m"], axes=[2, 3], keepdims=0), node("Mul", ["m", "k"], ["y"])]
    return graph(nodes, initializers={"k": [1.1, 1.1, 1.1]})


# --- the GPU's checks


@pytest.mark.parametrize("name", [each for each in device_check_gpu.CHECKS if each not in ("dla", "graphs")])
def test_every_check_passes(name: str, rig: TimedRig) -> None:
    outcome = check(name, bench_of(rig))
    assert (outcome.status, outcome.numbers != {}) == ("passed", True), outcome.words
    rig.machine.check()


def test_graphs_are_for_the_door_that_has_them(rig: TimedRig) -> None:
    outcome = check("graphs", bench_of(rig))
    if rig.kind is PYCUDA:
        assert outcome.status == "skipped"
        assert "cuda.bindings" in outcome.words
    else:
        assert outcome.status == "passed", outcome.words
        assert outcome.numbers["captured"] is True
        assert rig.machine.calls["cuGraphLaunch"] > 0


def test_a_plan_for_a_dla_runs_there(rig: TimedRig) -> None:
    rig.machine.dla_cores = 1
    outcome = check("dla", bench_of(rig, change=lambda each: each.model_copy(update={"options": {"dla_core": 0}})))
    assert outcome.status == "passed", outcome.words
    assert "core 0" in outcome.words


@pytest.mark.parametrize(
    ("code", "status"), [("no_dla", "skipped"), ("dla_unsupported", "skipped"), ("build_failed", "failed")]
)
def test_a_module_without_a_dla(code: str, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Maker:
        def make(self, need: Need, *_: Any, **__: Any) -> Any:
            assert need.dla_core == 0
            raise RefusedError("this device has no DLA: there is no core 0", code=code)

    monkeypatch.setattr(DeviceCheck, "_maker", lambda *_: Maker())
    bundle = Rig(PYCUDA, tmp_path).bundle(classifier())
    (outcome,) = DeviceCheck(bundle, "fp32", tmp_path, HERE, 1)._on_dla()
    assert (outcome.name, outcome.status) == ("dla", status)
    assert "no DLA" in outcome.words


def test_a_load_that_fails(pycuda: TimedRig) -> None:
    pycuda.machine.inject("cuStreamCreate", 2)
    outcome = check("load", bench_of(pycuda))
    assert outcome.status == "failed"
    assert outcome.numbers["code"] == "gpu_memory"
    assert check("load", bench_of(pycuda)).status == "passed"


def test_wrong_answers_are_found(pycuda: TimedRig) -> None:
    outcome = check("parity", bench_of(pycuda, wrong_model()))
    assert outcome.status == "failed"
    assert outcome.numbers["deviations"]["y"] == pytest.approx(0.1, rel=0.05)


def test_answers_that_are_no_numbers_are_found() -> None:
    nan, one = {"y": np.array([np.nan])}, {"y": np.array([1.0])}
    assert device_check_bench.deviation(nan, one) == float("inf")
    assert device_check_bench.deviation({"z": one["y"]}, one) == float("inf")
    assert device_check_bench.deviation({"y": np.ones((2, 1))}, one) == float("inf")


class Leak:
    """Something that grows with every look at it."""

    def __init__(self, step: int, start: int = 4 * 2**30) -> None:
        self.value, self.step = start, step

    def __call__(self) -> int:
        self.value += self.step
        return self.value


@pytest.mark.parametrize("what", ["process", "system", "device"])
def test_memory_that_grows_is_found(what: str, pycuda: TimedRig) -> None:
    reloads = 30
    step = 4 * LEAK_BYTES // reloads
    still = Leak(0)

    def lose() -> int:
        pycuda.machine.hidden_bytes += step
        return still()

    probes: dict[str, dict[str, Any]] = {
        "process": {"resident_bytes": Leak(step), "available_bytes": still},
        "system": {"resident_bytes": still, "available_bytes": Leak(-step)},
        "device": {"resident_bytes": still, "available_bytes": lose},
    }
    bench = bench_of(pycuda, reloads=reloads, **probes[what])
    outcome = check("reloads", bench)
    assert outcome.status == "failed"
    assert f"({what})" in outcome.words
    others = bench_of(pycuda, reloads=reloads, resident_bytes=still, available_bytes=still)
    assert check("reloads", others).status == "passed"
    pycuda.machine.hidden_bytes = 0


def test_memory_that_grows_at_first_alone_is_no_leak(pycuda: TimedRig) -> None:
    values = iter([0, 200 * MiB, *[300 * MiB] * 28])
    bench = bench_of(pycuda, reloads=30, resident_bytes=lambda: next(values), available_bytes=lambda: None)
    outcome = check("reloads", bench)
    assert outcome.status == "passed", outcome.words
    assert outcome.numbers["lost_bytes"]["system"] is None


class Disturbed:
    """An engine whose answers are off by one where `when` says so."""

    def __init__(self, engine: Any, when: Callable[[], bool]) -> None:
        self._engine, self._when = engine, when

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def open_lane(self) -> Any:
        lane, when = self._engine.open_lane(), self._when

        class Lane:
            submit = lane.submit

            def collect(self) -> Mapping[str, Any]:
                return {name: each + 1 if when() else each for name, each in lane.collect().items()}

        return Lane()


def disturb(monkeypatch: pytest.MonkeyPatch, when: Callable[[dict[str, Any]], bool]) -> None:
    real = Bench.load

    def load(self: Bench, **options: Any) -> Any:
        return Disturbed(real(self, **options), lambda: when(options))

    monkeypatch.setattr(Bench, "load", load)


@pytest.mark.parametrize(
    ("name", "when"),
    [
        ("threads", lambda _: threading.current_thread() is not threading.main_thread()),
        ("buffers", lambda options: options["mapped"]),
        ("graphs", lambda options: options["graphs"]),
    ],
)
def test_answers_that_differ_are_found(
    name: str, when: Callable[[dict[str, Any]], bool], bindings: TimedRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = bench_of(bindings)
    assert check(name, bench).status == "passed"
    disturb(monkeypatch, when)
    outcome = check(name, bench)
    assert outcome.status == "failed"
    assert outcome.numbers["deviation"] > 0.1


def test_an_error_on_one_of_the_threads_is_the_checks(pycuda: TimedRig) -> None:
    pycuda.machine.inject("cuEventRecord", 1, after=70)
    outcome = check("threads", bench_of(pycuda))
    assert outcome.status == "failed", outcome.words
    assert outcome.numbers["code"] == "cuda_failed"


def test_a_graph_that_cannot_be_captured_is_found(bindings: TimedRig) -> None:
    bindings.machine.inject("cuStreamBeginCapture", 1, times=100)
    outcome = check("graphs", bench_of(bindings))
    assert outcome.status == "failed"
    assert outcome.numbers["captured"] is False


def test_timers_that_do_not_work_are_found(rig: TimedRig) -> None:
    rig.machine.inject("cuEventElapsedTime", 1)
    outcome = check("shares", bench_of(rig))
    assert outcome.status == "failed"
    assert rig.owner is not None
    assert rig.machine.live()["contexts"] == 1
    assert "events" not in rig.machine.live()


def test_shares_are_of_the_whole(rig: TimedRig) -> None:
    numbers = check("shares", bench_of(rig)).numbers
    inside = numbers["copy_in_ms"] + numbers["execute_ms"] + numbers["copy_out_ms"]
    assert 0 < inside <= numbers["wall_ms"] + numbers["outside_ms"]
    assert numbers["launch_ms"] > 0


def test_memory_of_its_own_is_not_read_in_place(tmp_path: Path) -> None:
    made = TimedRig(PYCUDA, tmp_path)
    made.machine.integrated = False
    for each in started(made):
        assert check("buffers", bench_of(each)).status == "skipped"


def test_a_kernel_that_is_wrong_is_found(pycuda: TimedRig) -> None:
    def shifted(machine: Any, values: Any, grid: Any, block: Any) -> None:
        kernel_cpu.on_machine(machine, [*values[:17], values[17] + 8, *values[18:]], grid, block)  # the padding

    pycuda.machine.kernels[NAME] = shifted
    bench = bench_of(pycuda)
    letterboxed = pycuda.bundle(classifier(), input={"resize": "letterbox-center"})
    outcome = check("letterbox", replace(bench, bundle=letterboxed))
    assert outcome.status == "failed"
    assert outcome.numbers["levels_off"] == pytest.approx(8, rel=0.01)
    pycuda.machine.kernels[NAME] = kernel_cpu.on_machine
    outcome = check("letterbox", replace(bench, bundle=letterboxed))
    assert outcome.status == "passed"
    assert [each["source"] for each in outcome.numbers["sources"]] == [[320, 180, "nv12"], [640, 360, "nv12"]]
    for each in outcome.numbers["sources"]:
        parts = each["gpu_copy_ms"] + each["gpu_upload_ms"] + each["gpu_kernel_ms"]
        assert each["gpu_ms"] == pytest.approx(parts)
        assert each["pays"] == (each["gpu_ms"] < each["cpu_ms"])


def test_no_compiler_is_said(pycuda: TimedRig) -> None:
    def none(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    outcome = check("letterbox", bench_of(pycuda, load_library=none))
    assert outcome.status == "failed"
    assert outcome.numbers["code"] == "nvrtc_missing"
    assert "cuda-nvrtc-12-6" in outcome.words


def test_a_sticky_error_is_told_as_one(pycuda: TimedRig) -> None:
    pycuda.machine.inject("device:execute", ILLEGAL_ADDRESS)
    outcome = check("load", bench_of(pycuda))
    assert outcome.status == "failed"
    assert outcome.numbers["code"] == "gpu_fatal"
    assert check("parity", bench_of(pycuda)).numbers["code"] == "gpu_fatal"


def test_a_check_that_breaks_is_no_crash() -> None:
    def broken() -> Any:
        raise ZeroDivisionError("oh")

    outcome = carry_out("x", broken)
    assert outcome.status == "failed"
    assert "itself broke" in outcome.words


# --- those without a GPU

HERE = Here("10.3.0", "8.7", "NVIDIA Jetson Orin Nano", "12.6", "36.4.3")


def report_of(**changes: Any) -> SensorReport:
    plain = survey(Path("/nonexistent"), [], wait_s=0.1)
    return plain.model_copy(update=changes)


def host(**changes: Any) -> Host:
    return replace(Host(HERE, 10 * MiB, find_element=lambda _: True, available_bytes=lambda: 4 * 2**30), **changes)


def host_check(name: str, where: Host) -> Outcome:
    return carry_out(name, partial(HOST_CHECKS[name], where))


def test_versions_are_told(tmp_path: Path) -> None:
    outcome = host_check("versions", host(root=tmp_path))
    assert outcome.status == "passed"
    assert "TensorRT 10.3.0" in outcome.words
    assert outcome.numbers["libraries"]["numpy"] == np.__version__


def test_memory_and_elements_and_sensors_that_are_not_there() -> None:
    assert host_check("memory", host()).status == "passed"
    for few in (lambda: 200 * MiB, lambda: None):
        assert host_check("memory", host(available_bytes=few)).status == "failed"
    assert host_check("gstreamer", host()).status == "passed"
    outcome = host_check("gstreamer", host(find_element=lambda name: name != "nvvidconv"))
    assert outcome.status == "failed"
    assert "nvidia-l4t-gstreamer" in outcome.words
    outcome = host_check("sensors", host(survey=report_of))
    assert outcome.status == "failed"
    assert "module" in outcome.words


def test_what_is_no_jetson_has_no_sensors_and_no_decoder_to_check() -> None:
    other = host(here=replace(HERE, l4t=None), survey=report_of)
    assert host_check("sensors", other).status == "skipped"
    assert host_check("gstreamer", other).status == "skipped"


# --- processes


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Job]:
    monkeypatch.setattr(device_check_children, "MODULE", "tests.app.device_check_stub")
    rig = Rig(PYCUDA, tmp_path)
    bundle = rig.bundle(classifier())
    return lambda *checks, door=None: Job(checks, bundle, "fp32", tmp_path / "p", tmp_path / "k", 1, door)


def ended(outcomes: Iterator[Outcome]) -> list[tuple[str, str]]:
    return [(each.name, each.status) for each in outcomes]


def test_a_crash_fails_one_check_and_the_others_go_on(job: Callable[..., Job]) -> None:
    outcomes = list(carry_out_job(job("fine", "crash", "good", "exit", "well")))
    assert ended(iter(outcomes)) == [
        ("fine", "passed"),
        ("crash", "failed"),
        ("good", "passed"),
        ("exit", "failed"),
        ("well", "passed"),
    ]
    assert "SIGSEGV ended its process; it said: last words" in outcomes[1].words
    assert "its process ended with 7" in outcomes[3].words


@pytest.mark.full
def test_a_check_that_hangs_is_ended(job: Callable[..., Job]) -> None:
    outcomes = list(carry_out_job(job("hang", "fine"), within_s=3.0))
    assert ended(iter(outcomes)) == [("hang", "failed"), ("fine", "passed")]
    assert "within 3 s" in outcomes[0].words


def test_after_a_sticky_error_the_next_check_has_a_new_process(job: Callable[..., Job]) -> None:
    outcomes = list(carry_out_job(job("fine", "sticky", "good")))
    assert ended(iter(outcomes)) == [("fine", "passed"), ("sticky", "failed"), ("good", "passed")]
    assert outcomes[0].numbers["pid"] != outcomes[2].numbers["pid"]


@pytest.mark.parametrize(("door", "status"), [("none", "skipped"), ("locked", "failed"), ("dead", "failed")])
def test_a_gpu_that_cannot_be_opened(job: Callable[..., Job], door: str, status: str) -> None:
    outcomes = list(carry_out_job(job("fine", "good", door=door)))
    assert ended(iter(outcomes)) == [("fine", status), ("good", status)]


def test_nothing_is_left_where_it_is_interrupted(job: Callable[..., Job]) -> None:
    running = carry_out_job(job("fine", "hang"))
    first = next(running)
    running.close()  # type: ignore[attr-defined]
    assert not Path("/proc", str(first.numbers["pid"])).exists()


# --- the report


def test_the_report_names_no_home(tmp_path: Path) -> None:
    outcome = Outcome("load", "failed", f"{Path.home()}/store/plan: no", {"where": f"{Path.home()}/x"})
    report = document([outcome], {"tensorrt": "10.3.0"}, {"name": "m"}, complete=True, now=lambda: 0.0)
    assert report["schema"] == "edge.device-check/1"
    assert (report["failed"], report["passed"], report["t_utc"]) == (1, 0, "1970-01-01T00:00:00Z")
    assert report["checks"][0]["words"] == "~/store/plan: no"
    save(report, tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_bytes()) == report
    with pytest.raises(EdgeError, match="cannot be written"):
        save(report, tmp_path / "none" / "report.json")


def test_the_report_names_nobody_elses_home_and_no_error_does() -> None:
    lib = "/home/somebody/venv/lib/x.so: cannot open shared object file"
    error = EngineError(f"TensorRT cannot be imported: {Path.home()}/a {lib}", code="tensorrt_missing")
    outcome = Outcome("load", "failed", lib)
    report = document([outcome], None, {}, complete=False, now=lambda: 0.0, error=error)
    assert report["checks"][0]["words"] == "~/venv/lib/x.so: cannot open shared object file"
    assert report["error"]["code"] == "tensorrt_missing"
    assert "somebody" not in json.dumps(report)
    assert f"{Path.home()}/" not in json.dumps(report)


@pytest.mark.parametrize("home", ["/", "//", None])
def test_the_report_of_a_user_without_a_home(home: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def find() -> Path:
        if home is None:
            raise RuntimeError("Could not determine home directory.")
        return Path(home)

    monkeypatch.setattr(Path, "home", find)
    outcome = Outcome("load", "failed", "/var/lib/edge-runtime/plans: no")
    report = document([outcome], None, {"name": "m"}, complete=True, now=lambda: 0.0)
    assert report["schema"] == "edge.device-check/1"
    assert report["checks"][0]["words"] == "/var/lib/edge-runtime/plans: no"


def test_the_report_is_json_for_everybody() -> None:
    numbers = {"deviations": {"y": float("inf")}, "runs": (float("nan"), 1.5)}
    report = document([Outcome("parity", "failed", "no", numbers)], None, {}, complete=True, now=lambda: 0.0)
    json.dumps(report, allow_nan=False)
    assert report["checks"][0]["numbers"] == {"deviations": {"y": "inf"}, "runs": ["nan", 1.5]}


def test_every_check_says_what_it_would_do() -> None:
    assert list(WOULD) == [*HOST_CHECKS, "plan", *device_check_gpu.CHECKS]
    assert ctypes.sizeof(ctypes.c_void_p) == 8
