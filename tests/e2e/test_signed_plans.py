"""A thousand boxes: a plan that one device built and signed runs in another's daemon, which builds nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_runtime.cli.main import run
from tests.e2e.daemon import DaemonProcess
from tests.e2e.test_tensorrt import bundle_with_plan, configured, device, model_of, on_tensorrt
from tests.engine.graphs import SIDE
from tests.engine.tensorrt.fake_process import FakeDevice

__all__ = ["device"]

# slow, so that a machine that is busy with other tests is not too slow for it
CAMERA = f'name = "gate"\nurl = "synthetic:?width={SIDE}&height={SIDE}&fps=5"'


@pytest.mark.full
@pytest.mark.timeout(180)
def test_the_daemon_takes_a_signed_plan_and_no_other(
    tmp_path: Path, device: FakeDevice, capsys: pytest.CaptureFixture[str]
) -> None:
    key, first = tmp_path / "key.pem", tmp_path / "first"
    assert run(["build", "--new-key", str(key)]) == 0
    public = capsys.readouterr().out.strip()
    source, signed = bundle_with_plan(tmp_path / "source"), tmp_path / "bundle"
    assert run(["build", str(source), "--store", str(first), "--into", str(signed), "--sign", str(key)]) == 0
    assert device.builds() == 1
    knows = configured(tmp_path, camera=CAMERA, more=f'[engine]\nplan_keys = ["{public}"]\n')
    with DaemonProcess(knows) as daemon:
        daemon.wait_for("is running;")
        on_tensorrt(knows, daemon)
        assert "the plan of the bundle is used, signed with the key" in daemon.log
        assert daemon.stop()[0] == 0
    assert device.builds() == 1
    # a box that knows nobody builds its own, and serves on the CPU meanwhile
    device.become(gate="go")
    (tmp_path / "other").mkdir()
    signed.rename(tmp_path / "other" / "bundle")
    knows_nobody = configured(tmp_path / "other", camera=CAMERA)
    with DaemonProcess(knows_nobody) as daemon:
        daemon.wait_for("is running;")
        daemon.wait_for("a plan of the bundle is not used, one is built")
        assert "nobody is trusted to sign plans" in daemon.log
        assert model_of(knows_nobody)["backend"] == "onnxruntime"
        (device.folder / "go").touch()
        daemon.wait_for("plan built in", 60)
        assert daemon.stop()[0] == 0
    assert device.builds() == 2
