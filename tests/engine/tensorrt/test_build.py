"""`edge-runtime build` in real processes on a device that is a fake: what it makes, what it refuses, and every kill."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.cli.main import run
from edge_runtime.engine.bundle import load_bundle
from edge_runtime.engine.tensorrt.build import build_plan, look_at_device
from edge_runtime.engine.tensorrt.network import Settings
from edge_runtime.engine.tensorrt.plan import read_sidecar
from edge_runtime.errors import EdgeError
from tests.app.test_keeper import wrong_golden
from tests.awaiting import wait_until
from tests.conftest import ROOT
from tests.engine.graphs import classifier, graph, node, write_bundle
from tests.engine.tensorrt.fake_process import FakeDevice

SETTINGS = Settings((1, 2), 1, 1 << 26)


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    made = FakeDevice(tmp_path / "device")
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    yield made
    made.check()


def make_bundle(root: Path, model: bytes | None = None, **options: Any) -> Path:
    model = model or classifier()
    file = {"path": "model.onnx", "sha256": hashlib.sha256(model).hexdigest()}
    variant = {"files": {"onnxruntime": file, "tensorrt": file}, **options.pop("variant", {})}
    return write_bundle(root, model, variant=variant, **options)


class Command:
    """The command in this process: its exit code and what it printed."""

    def __init__(self, store: Path) -> None:
        self.store = store
        self.out = self.err = ""

    def __call__(self, *arguments: object) -> int:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run(["build", *map(str, arguments), "--store", str(self.store)])
        self.out, self.err = out.getvalue(), err.getvalue()
        return code

    @property
    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out)
        return found

    def plans(self) -> list[Path]:
        return sorted(self.store.glob("plans/*/plan"))

    def left(self) -> list[str]:
        """What lies aside."""
        return [each.name for each in self.store.glob("plans/.*")]


@pytest.fixture
def build(tmp_path: Path) -> Command:
    return Command(tmp_path / "store")


def processes(marker: Path) -> str:
    return subprocess.run(["pgrep", "-f", str(marker)], capture_output=True, text=True, check=False).stdout


# --- what it makes


def test_a_plan_its_sidecar_and_what_is_told_of_them(tmp_path: Path, device: FakeDevice, build: Command) -> None:
    bundle = make_bundle(tmp_path / "bundle")
    assert build(bundle, "--max-batch", 3, "--workspace-mb", 70, "--json") == 0, build.err
    (engine,) = build.document["engines"]
    assert build.document["device"]["tensorrt"] == "10.3.0"
    (plan,) = build.plans()
    assert (engine["how"], engine["plan"], engine["batches"]) == ("built", str(plan), [1, 2, 3])
    assert engine["plan_sha256"] == hashlib.sha256(plan.read_bytes()).hexdigest()
    sidecar = read_sidecar(plan)
    assert (sidecar.options["workspace_bytes"], sidecar.options["width"]) == (70 * 2**20, 32)
    assert sidecar.onnx_sha256 == load_bundle(bundle).artefact("fp32", "tensorrt").sha256
    assert {each.name: each.mode for each in sidecar.tensors} == {"x": "input", "y": "output"}
    assert plan.stat().st_mode & 0o222 == 0
    lines = [json.loads(line) for line in build.err.splitlines()]
    assert {line["phase"].partition(":")[0] for line in lines} >= {"reading the model", "building", "saving the plan"}
    assert any(line["percent"] == 100.0 for line in lines)
    assert {line["expected_s"] for line in lines} == {None}
    assert build.left() == []


@pytest.mark.full
def test_what_was_built_before_is_of_use(tmp_path: Path, device: FakeDevice, build: Command) -> None:
    bundle = make_bundle(tmp_path / "bundle")
    assert build(bundle, "--max-batch", 3, "--json") == 0
    (engine,) = build.document["engines"]
    assert build(bundle, "--max-batch", 3) == 0
    assert "is there already" in build.out
    # another version: built anew, the timing cache of the first is not its own, and it is known how long it takes
    device.become("10.7.0")
    assert build(bundle, "--max-batch", 3, "--json") == 0
    assert {json.loads(line)["expected_s"] for line in build.err.splitlines()} == {engine["build_s"]}
    # another model of the same version finds what was measured
    assert build(make_bundle(tmp_path / "other", classifier(opset=12)), "--max-batch", 3) == 0
    assert device.misses() == [0, 0, 1]
    assert build.left() == []


@pytest.mark.full
def test_what_fits_is_taken_from_a_trusted_bundle_and_from_no_other(
    tmp_path: Path, device: FakeDevice, build: Command
) -> None:
    assert build(make_bundle(tmp_path / "first"), "--max-batch", 2) == 0
    (plan,) = build.plans()
    root = tmp_path / "second"
    root.mkdir()
    listed = {}
    for name, source in (("orin.plan", plan), ("orin.plan.json", plan.with_name("plan.json"))):
        (root / name).write_bytes(source.read_bytes())
        listed[name] = hashlib.sha256(source.read_bytes()).hexdigest()
    model = classifier()
    file = {"path": "model.onnx", "sha256": hashlib.sha256(model).hexdigest()}
    sidecar = read_sidecar(plan)
    brought = {
        "path": "orin.plan",
        "sha256": listed["orin.plan"],
        "sidecar": {"path": "orin.plan.json", "sha256": listed["orin.plan.json"]},
        "tensorrt": sidecar.tensorrt,
        "compute_capability": sidecar.compute_capability,
        "device": sidecar.device,
    }
    files = {"onnxruntime": file, "tensorrt": file, "tensorrt_plan": [brought]}
    write_bundle(root, model, variant={"files": files})
    for store, arguments, how in (("a", (), "built"), ("b", ("--trust-plans",), "brought")):
        other = Command(tmp_path / store)
        assert other(root, "--max-batch", 2, "--json", *arguments) == 0, other.err
        assert other.document["engines"][0]["how"] == how
    other = Command(tmp_path / "c")
    device.become("10.7.0")
    assert other(root, "--max-batch", 2, "--json", "--trust-plans") == 0
    assert other.document["engines"][0]["how"] == "built"


@pytest.mark.full
def test_on_a_dla_the_layers_that_stay_on_the_gpu_are_named(tmp_path: Path, device: FakeDevice, build: Command) -> None:
    device.become(dla_cores=2, gpu_only=["Relu"])
    nodes = [
        node("Relu", ["x"], ["r"], name="act"),
        node("ReduceMean", ["r"], ["y"], name="mean", axes=[2, 3], keepdims=0),
    ]
    bundle = make_bundle(tmp_path / "bundle", graph(nodes), variant={"precision": "fp16"})
    assert build(bundle, "--dla") == 0, build.err
    assert "1 of 2 layers are not for the DLA: act" in build.out
    assert read_sidecar(build.plans()[0]).dla_core == 0
    assert build(make_bundle(tmp_path / "fp32"), "--dla", 1) == 3
    assert "a DLA computes in FP16 here" in build.err


# --- what it refuses


def sabotage(device: FakeDevice, site: str, words: str) -> None:
    device.become(faults=[[site, words, 0, 9]])


@pytest.mark.full
@pytest.mark.parametrize(
    ("site", "words", "code", "told"),
    [
        ("Builder.build_serialized_network", "Target GPU SM 87 is not supported", 3, "apt packages"),
        ("Builder.build_serialized_network", "OutOfMemory (Requested size was 4096 bytes.)", 3, "too little memory"),
        ("Builder.build_serialized_network", "Could not find any implementation", 1, "Could not find any"),
        ("OnnxParser.parse", "Assertion failed: rank", 3, "cannot read it: Assertion failed: rank"),
        ("Runtime.deserialize_cuda_engine", "Error Code 1: Serialization", 1, "has just built"),
    ],
)
def test_what_tensorrt_refuses_is_refused_in_words_and_nothing_is_left(
    tmp_path: Path, device: FakeDevice, build: Command, site: str, words: str, code: int, told: str
) -> None:
    sabotage(device, site, words)
    assert build(make_bundle(tmp_path / "bundle")) == code
    assert told in build.err
    assert (build.plans(), build.left()) == ([], [])


@pytest.mark.full
def test_operators_that_it_does_not_know_are_named(tmp_path: Path, device: FakeDevice, build: Command) -> None:
    nodes = [node("Wobble", ["x"], ["y"], name="first", domain="com.acme")]
    assert build(make_bundle(tmp_path / "bundle", graph(nodes, domains=("com.acme",)))) == 3
    assert "does not know the operator Wobble (com.acme opset 1; nodes: first)" in build.err


@pytest.mark.full
def test_a_plan_that_does_not_compute_what_the_bundle_promises_does_not_count(
    tmp_path: Path, device: FakeDevice, build: Command
) -> None:
    bundle = make_bundle(tmp_path / "bundle")
    wrong_golden(bundle, "fp32")
    assert build(bundle) == 3
    assert "golden check failed" in build.err
    assert (build.plans(), build.left()) == ([], [])


def test_what_can_be_built_nowhere_is_said_without_a_device(tmp_path: Path, build: Command) -> None:
    bundle = make_bundle(tmp_path / "bundle", classifier(shape=("b", 3, 64, 64)))
    assert build(bundle) == 3
    assert "axis 2 is 64, and not 32" in build.err
    assert build(bundle, "--variant", "int8") == 2
    assert build(make_bundle(tmp_path / "cpu", variant={"files": {"onnxruntime": _file()}})) == 2
    assert "no variant has file for the backend 'tensorrt'" in build.err
    assert build(tmp_path / "nowhere") == 2


def _file() -> dict[str, str]:
    return {"path": "model.onnx", "sha256": hashlib.sha256(classifier()).hexdigest()}


@pytest.mark.parametrize(
    ("lack", "told"),
    [
        ({"no_tensorrt": True}, "apt packages"),
        pytest.param({"no_driver": True}, "no NVIDIA driver", marks=pytest.mark.full),
        pytest.param({"cu_init": 100}, "it finds no GPU", marks=pytest.mark.full),
    ],
)
def test_without_a_device_it_says_what_it_would_do(
    tmp_path: Path, device: FakeDevice, build: Command, lack: dict[str, Any], told: str
) -> None:
    device.become(**lack)
    bundle = make_bundle(tmp_path / "bundle")
    if "no_tensorrt" in lack:
        assert build(bundle, "--json") == 4
        (would,) = build.document["would_build"]
        assert (would["variant"], would["size"], would["max_batch"]) == ("fp32", [32, 32], 8)
        assert build.document["error"]["code"] == "tensorrt_missing"
    else:
        assert build(bundle) == 4
        assert "would build fp32: model.onnx (fp32) for the GPU, batches up to 8" in build.out
    assert told in build.err


@pytest.mark.full
def test_too_little_memory_is_refused_with_numbers(
    tmp_path: Path, device: FakeDevice, build: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_runtime.hardware.memory.available_bytes", lambda: 500 * 2**20)
    assert build(make_bundle(tmp_path / "bundle")) == 3
    assert "500 MiB are" in build.err
    assert device.builds() == 0


# --- kills


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "code", "told"),
    [
        (signal.SIGSEGV, 3, "the build crashed: SIGSEGV"),
        (signal.SIGKILL, 3, "the kernel does so where memory runs out"),
    ],
)
def test_a_builder_that_dies_is_told_of_and_nothing_is_left(
    tmp_path: Path, device: FakeDevice, build: Command, number: int, code: int, told: str
) -> None:
    device.become(crash=int(number))
    assert build(make_bundle(tmp_path / "bundle")) == code
    assert told in build.err
    assert (build.plans(), build.left()) == ([], [])


def command(tmp_path: Path, bundle: Path) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "edge_runtime", "build", str(bundle), "--store", str(tmp_path / "store")]
    return subprocess.Popen(line, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_build_leaves_no_process_and_the_next_one_works(
    tmp_path: Path, device: FakeDevice, build: Command, number: signal.Signals
) -> None:
    device.become(gate="never")
    bundle = make_bundle(tmp_path / "bundle")
    process = command(tmp_path, bundle)
    wait_until(lambda: device.builds() == 1, 30, "the build began")
    process.send_signal(number)
    process.communicate(timeout=20)
    assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL)
    wait_until(lambda: processes(tmp_path / "store") == "", 10, "every process is gone")
    assert build.plans() == []
    assert (build.left() == []) == (number == signal.SIGINT)
    device.become()
    assert build(bundle) == 0, build.err
    assert len(build.plans()) == 1


@pytest.mark.full
def test_the_second_of_two_builds_at_once_is_told_so(tmp_path: Path, device: FakeDevice, build: Command) -> None:
    device.become(gate="go")
    bundle = make_bundle(tmp_path / "bundle")
    first = command(tmp_path, bundle)
    wait_until(lambda: device.builds() == 1, 30, "the first began")
    assert build(bundle) == 1
    assert "another build is under way" in build.err
    (device.folder / "go").touch()
    out, err = first.communicate(timeout=60)
    assert first.returncode == 0, err
    assert "fp32: built in" in out
    assert build(bundle) == 0
    assert "is there already" in build.out


# --- the child itself


@pytest.mark.full
def test_a_build_is_cancelled_at_once(tmp_path: Path, device: FakeDevice) -> None:
    device.become(gate="never")
    bundle = load_bundle(make_bundle(tmp_path / "bundle"))
    cancel, folder = threading.Event(), tmp_path / "plan"
    folder.mkdir()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(
            build_plan,
            bundle,
            "fp32",
            SETTINGS,
            max_batch=2,
            plan=folder / "plan",
            cache=tmp_path / "cache",
            cancel=cancel,
        )
        wait_until(lambda: device.builds() == 1, 30, "the build began")
        cancel.set()
        with pytest.raises(EdgeError) as caught:
            running.result(10)
    assert caught.value.code == "cancelled"
    assert list(folder.iterdir()) == []
    assert processes(folder) == ""


@pytest.mark.full
def test_one_that_hangs_is_ended(tmp_path: Path, device: FakeDevice) -> None:
    device.become(gate="never")
    bundle = load_bundle(make_bundle(tmp_path / "bundle"))
    with pytest.raises(EdgeError) as caught:
        build_plan(
            bundle, "fp32", SETTINGS, max_batch=2, plan=tmp_path / "plan", cache=tmp_path / "cache", within_s=6.0
        )
    assert caught.value.code == "build_hangs"


@pytest.mark.full
def test_a_bundle_that_changes_meanwhile_is_not_built(tmp_path: Path, device: FakeDevice) -> None:
    bundle = load_bundle(make_bundle(tmp_path / "bundle"))
    make_bundle(tmp_path / "bundle", bundle={"version": "2"})
    with pytest.raises(EdgeError) as caught:
        build_plan(bundle, "fp32", SETTINGS, max_batch=2, plan=tmp_path / "plan", cache=tmp_path / "cache")
    assert (caught.value.code, caught.value.retryable) == ("digest_mismatch", True)
    assert look_at_device().tensorrt == "10.3.0"
