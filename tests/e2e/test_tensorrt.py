"""The real daemon and the real commands on a TensorRT that is a fake: plans built, exchanged, kept, and built anew."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.cli.main import run
from tests.awaiting import wait_until
from tests.e2e.daemon import VTEST, DaemonProcess, write_config
from tests.engine.graphs import SIDE, classifier, write_bundle
from tests.engine.tensorrt.fake_process import FakeDevice

CAMERA = f'name = "gate"\nurl = "synthetic:?width={SIDE}&height={SIDE}&fps=5"'


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    made = FakeDevice(tmp_path / "device")
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    yield made
    made.check()


def bundle_with_plan(root: Path, **options: Any) -> Path:
    """A bundle whose one ONNX is for both backends."""
    import hashlib

    model = options.pop("model", None) or classifier()
    file = {"path": "model.onnx", "sha256": hashlib.sha256(model).hexdigest()}
    return write_bundle(root, model, variant={"files": {"onnxruntime": file, "tensorrt": file}}, **options)


def configured(tmp_path: Path, *, backend: str = "auto", more: str = "", camera: str = CAMERA) -> Path:
    bundle = tmp_path / "bundle"
    if not bundle.exists():
        bundle_with_plan(bundle)
    model = f'name = "m"\nbundle = "{bundle}"\nbackend = "{backend}"\nlanes = 1'
    return write_config(tmp_path, camera=camera, model=model, hardware="none", more=more)


def status(config: Path) -> dict[str, Any]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert run(["status", "-c", str(config), "--json"]) == 0
    report: dict[str, Any] = json.loads(out.getvalue())
    return report


def model_of(config: Path) -> dict[str, Any]:
    model: dict[str, Any] = status(config)["models"][0]
    return model


def on_tensorrt(config: Path, daemon: DaemonProcess) -> None:
    def is_on() -> bool:
        model = model_of(config)
        return model["backend"] == "tensorrt" and model["backend_reason"] is None

    try:
        wait_until(is_on, 60, "TensorRT took over")
    except AssertionError as error:
        raise AssertionError(f"{error}: {model_of(config)}; log:\n{daemon.log}") from None


def frames(config: Path) -> dict[str, Any]:
    counts: dict[str, Any] = status(config)["cameras"][0]["frames"]
    return counts


@pytest.mark.full
@pytest.mark.timeout(180)
def test_onnx_runtime_serves_until_the_plan_is_built_and_the_next_start_has_it_at_once(
    tmp_path: Path, device: FakeDevice
) -> None:
    config = configured(tmp_path)
    with DaemonProcess(config) as daemon:
        daemon.wait_for("is running;")
        first = model_of(config)
        if first["backend"] == "onnxruntime":
            assert "has to be built" in first["backend_reason"]
        on_tensorrt(config, daemon)
        seen = frames(config)["completed"]
        wait_until(lambda: frames(config)["completed"] > seen + 5, 20, "frames go on")
        counts = frames(config)
        assert counts["failed"] == 0
        assert counts["dropped"] == {}
        assert "plan built in" in daemon.log
        assert "no frame lost" in daemon.log
        assert daemon.stop()[0] == 0
    assert device.builds() == 1
    with DaemonProcess(config) as daemon:
        daemon.wait_for("is running;")
        assert model_of(config)["backend"] == "tensorrt"
        assert "plan loaded in" in daemon.log
        assert daemon.stop()[0] == 0
    assert device.builds() == 1


@pytest.mark.full
@pytest.mark.timeout(180)
def test_after_an_upgrade_the_plan_is_built_anew_and_it_is_said_why(tmp_path: Path, device: FakeDevice) -> None:
    config = configured(tmp_path)
    with DaemonProcess(config) as daemon:
        daemon.wait_for("is running;")
        on_tensorrt(config, daemon)
        assert daemon.stop()[0] == 0
    device.become("10.7.0", gate="go")
    with DaemonProcess(config) as daemon:
        daemon.wait_for("is running;")
        model = model_of(config)
        assert model["backend"] == "onnxruntime"
        assert "built with TensorRT 10.3.0, here is 10.7.0" in model["backend_reason"]
        assert "built with TensorRT 10.3.0, here is 10.7.0" in daemon.log
        (device.folder / "go").touch()
        on_tensorrt(config, daemon)
        assert daemon.stop()[0] == 0
    # a driver alone: the plan runs on meanwhile
    device.become("10.7.0", gate="go2", machine={"driver_version": 12080})
    with DaemonProcess(config) as daemon:
        daemon.wait_for("is running;")
        model = model_of(config)
        assert model["backend"] == "tensorrt"
        assert "built with driver for CUDA 12.6, here is for CUDA 12.8" in model["backend_reason"]
        (device.folder / "go2").touch()
        wait_until(lambda: model_of(config)["backend_reason"] is None, 60, "the new plan took over")
        assert model_of(config)["backend"] == "tensorrt"
        assert daemon.stop()[0] == 0
    assert device.builds() == 3


@pytest.mark.full
@pytest.mark.timeout(120)
def test_with_tensorrt_alone_a_model_waits_for_its_plan_and_then_runs(tmp_path: Path, device: FakeDevice) -> None:
    device.become(gate="go")
    config = configured(tmp_path, backend="tensorrt")
    with DaemonProcess(config) as daemon:
        daemon.wait_for("is running;")
        model = model_of(config)
        assert (model["engine"], model["backend"]) == (None, None)
        assert "has to be built: fp32: none was built for it yet" in model["reason"]
        (device.folder / "go").touch()
        on_tensorrt(config, daemon)
        wait_until(lambda: frames(config)["completed"] > 5, 20, "frames flow")
        assert daemon.stop()[0] == 0


@pytest.mark.full
@pytest.mark.timeout(120)
def test_a_kill_while_it_builds_leaves_nothing_and_the_next_start_builds(tmp_path: Path, device: FakeDevice) -> None:
    device.become(gate="never")
    config = configured(tmp_path)
    plans = tmp_path / "store" / "plans"
    with DaemonProcess(config) as daemon:
        wait_until(lambda: device.builds() == 1, 60, "the build began")
        daemon.process.kill()
        daemon.wait()
    device.become()
    with DaemonProcess(config) as daemon:
        daemon.wait_for("is running;")
        assert "what an interrupted build left was removed" in daemon.log
        on_tensorrt(config, daemon)
        assert [each.name for each in plans.iterdir() if each.name.startswith(".")] == []
        assert daemon.stop()[0] == 0


@pytest.mark.full
@pytest.mark.timeout(120)
def test_a_stop_while_it_builds_is_quick(tmp_path: Path, device: FakeDevice) -> None:
    device.become(gate="never")
    config = configured(tmp_path)
    with DaemonProcess(config) as daemon:
        daemon.wait_for("is running;")
        wait_until(lambda: device.builds() == 1, 60, "the build began")
        code, took_s = daemon.stop()
        assert code == 0
        assert took_s < 5.0
    left = subprocess.run(
        ["pgrep", "-f", str(tmp_path / "store" / "plans")], capture_output=True, text=True, check=False
    )
    assert left.stdout == ""


@pytest.mark.full
@pytest.mark.timeout(120)
def test_a_model_that_tensorrt_does_not_take_stays_where_it_is_with_the_reason(
    tmp_path: Path, device: FakeDevice
) -> None:
    device.become(faults=[["OnnxParser.parse", "Assertion failed: the axes are not what they should be", 0, 9]])
    config = configured(tmp_path)
    with DaemonProcess(config) as daemon:
        daemon.wait_for("cannot be had")
        model = model_of(config)
        assert model["backend"] == "onnxruntime"
        assert "the axes are not what they should be" in model["backend_reason"]
        wait_until(
            lambda: any("cannot be had" in reason for reason in status(config)["health"]["reasons"]), 10, "an alarm"
        )
        assert daemon.stop()[0] == 0
    assert device.builds() == 0


@pytest.mark.full
@pytest.mark.timeout(60)
def test_where_there_is_no_tensorrt_others_run_and_one_that_needs_it_is_down(
    tmp_path: Path, device: FakeDevice
) -> None:
    device.become(no_tensorrt=True)
    bundle = bundle_with_plan(tmp_path / "bundle")
    model = f'name = "cpu"\nbundle = "{bundle}"\n[[model]]\nname = "gpu"\nbundle = "{bundle}"\nbackend = "tensorrt"'
    config = write_config(tmp_path, camera=f'{CAMERA}\nmodel = ["cpu", "gpu"]', model=model, hardware="none")
    with DaemonProcess(config) as daemon:
        daemon.wait_for("is running;")
        models = {each["name"]: each for each in status(config)["models"]}
        assert models["cpu"]["backend"] == "onnxruntime"
        assert "TensorRT cannot be imported" in models["cpu"]["backend_reason"]
        assert models["gpu"]["engine"] is None
        assert "apt packages" in models["gpu"]["reason"]
        assert daemon.stop()[0] == 0
    alone = write_config(
        tmp_path, camera=CAMERA, model=f'name = "gpu"\nbundle = "{bundle}"\nbackend = "tensorrt"', hardware="none"
    )
    with DaemonProcess(alone) as daemon:
        assert daemon.wait() == 2
        assert "apt packages" in daemon.log


@pytest.mark.full
@pytest.mark.timeout(120)
def test_what_the_command_built_is_what_the_daemon_takes(tmp_path: Path, device: FakeDevice) -> None:
    config = configured(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "edge_runtime", "build", str(tmp_path / "bundle"), "-c", str(config), "--json"],
        capture_output=True,
        text=True,
        check=False,
        env=dict(os.environ),
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["engines"][0]["how"] == "built"
    with DaemonProcess(config) as daemon:
        daemon.wait_for("is running;")
        assert model_of(config)["backend"] == "tensorrt"
        assert daemon.stop()[0] == 0
    assert device.builds() == 1


@pytest.mark.full
@pytest.mark.timeout(120)
@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_pictures_larger_than_the_input_are_scaled_on_the_gpu(
    isolation: str, tmp_path: Path, device: FakeDevice
) -> None:
    # the first launch is the trial of the kernel, all others are frames: that one of them fails shows their way
    device.become(faults=[["cuLaunchKernel", 1, 45, 1]])
    camera = f'name = "gate"\nurl = "file:{VTEST}"\nloop = true\nisolation = "{isolation}"'
    config = configured(tmp_path, backend="tensorrt", camera=camera)
    config.write_text(config.read_text().replace("lanes = 1", 'lanes = 1\nletterbox = "gpu"\nmax_batch = 2'))
    with DaemonProcess(config) as daemon:
        daemon.wait_for("is running;")
        on_tensorrt(config, daemon)
        daemon.wait_for("are scaled on the GPU")
        wait_until(lambda: frames(config)["failed"], 40, "the launch that fails")
        seen = frames(config)["completed"]
        wait_until(lambda: frames(config)["completed"] > seen, 20, "frames go on")
        assert frames(config)["failed"] in (1, 2)
        assert daemon.stop()[0] == 0
        assert "cuLaunchKernel failed" in daemon.log
    assert len(list((tmp_path / "store" / "kernels").iterdir())) == 1


@pytest.mark.full
@pytest.mark.timeout(120)
def test_where_the_kernel_cannot_be_had_auto_goes_on_and_gpu_is_refused(tmp_path: Path, device: FakeDevice) -> None:
    device.become(faults=[["cuModuleLoadData", 1, 0, 9]])
    config = configured(tmp_path, backend="tensorrt", camera=f'name = "gate"\nurl = "file:{VTEST}"\nloop = true')
    with DaemonProcess(config) as daemon:
        daemon.wait_for("is running;")
        on_tensorrt(config, daemon)
        assert daemon.log.count("pictures are scaled on the CPU: cuModuleLoadData failed") == 1
        wait_until(lambda: frames(config)["completed"] > 5, 20, "frames flow")
        assert frames(config)["failed"] == 0
        assert daemon.stop()[0] == 0
    config.write_text(config.read_text().replace("lanes = 1", 'lanes = 1\nletterbox = "gpu"'))
    with DaemonProcess(config) as daemon:
        assert daemon.wait() != 0
        assert "the GPU cannot scale pictures: cuModuleLoadData failed" in daemon.log
        assert 'letterbox = "auto"' in daemon.log


@pytest.mark.full
@pytest.mark.timeout(120)
def test_a_gpu_that_dies_ends_the_daemon_and_the_next_start_says_how_often(tmp_path: Path, device: FakeDevice) -> None:
    config = configured(tmp_path, backend="tensorrt")
    with DaemonProcess(config) as daemon:
        daemon.wait_for("is running;")
        on_tensorrt(config, daemon)
        assert status(config)["gpu_faults"] == 0
        assert daemon.stop()[0] == 0
    device.become(faults=[["device:execute", 700, 30, 1]])
    with DaemonProcess(config) as daemon:
        assert daemon.wait(60) == 1
        assert "700" in daemon.log
        assert "; stopping" in daemon.log
    device.become()
    with DaemonProcess(config) as daemon:
        daemon.wait_for("is running;")
        assert status(config)["gpu_faults"] == 1
        assert daemon.stop()[0] == 0
