"""`edge-runtime demo`: taken ports, other clips and bundles, Ctrl-C; and what a bad bundle does to `run`."""

from __future__ import annotations

import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from edge_runtime.app.demo import run_demo
from edge_runtime.errors import EXIT_USAGE, EdgeError
from tests.e2e.daemon import CENTERNET, DaemonProcess, write_config


def demo(*arguments: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "edge_runtime", "demo", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)


def test_the_demo_shows_windows_from_the_broker_and_a_table() -> None:
    found = demo("--seconds", "5")
    assert found.returncode == 0, found.stderr
    # it is derated or not by how fast this machine is
    said = [line for line in found.stderr.splitlines() if not re.search(r"health: (degraded: derated: |ok)", line)]
    assert said == []
    lines = re.findall(r"^window (\d+): .* fps/W \(simulated\);.* sees .*person", found.stdout, re.MULTILINE)
    assert len(lines) >= 2
    assert "Budget 5 W, 85 degC, p99 80 ms" in found.stdout
    assert "Model bundled:centernet: fp32-416, fp32-320 on onnxruntime" in found.stdout
    table = dict(re.findall(r"^(\S.*?)  +(\S.*)$", found.stdout.split("\n\n")[-1], re.MULTILINE))
    lost = int(table["stale"]) + int(table["failed"]) + int(table["in flight"])
    dropped = sum(map(int, re.findall(r"\d+", table["dropped"])))
    assert int(table["captured"]) == int(table["completed"]) + lost + dropped
    assert float(table["FPS/W (simulated)"]) > 0
    assert "p50" in next(name for name in table if "latency" in name)


def test_a_taken_default_port_is_replaced_and_a_taken_chosen_one_refused() -> None:
    try:
        taken = socket.create_server(("127.0.0.1", 1883))
    except OSError:
        pytest.skip("something holds port 1883 here already")
    with taken:
        found = demo("--seconds", "1")
        assert found.returncode == 0, found.stderr
        assert "Port 1883 is taken" in found.stdout
        refused = demo("--seconds", "2", "--port", "1883")
        assert refused.returncode == 2
        assert "127.0.0.1:1883" in refused.stderr


def test_ctrl_c_ends_the_demo_with_its_table() -> None:
    command = [sys.executable, "-m", "edge_runtime", "demo", "--seconds", "600"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        seen = []
        for line in process.stdout:
            seen.append(line)
            if line.startswith("window 0:"):
                process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0, seen
    assert any(line.startswith("captured ") for line in seen)


def test_a_clip_without_video_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "clip.mp4"
    text.write_text("not a clip", encoding="utf-8")
    for clip in (text, tmp_path / "missing.mp4", tmp_path):
        assert str(clip) in refusal(clip=clip)
    found = demo("--clip", str(text), "--seconds", "2")
    assert found.returncode == 2, found.stdout
    assert str(text) in found.stderr
    assert "Traceback" not in found.stderr


def refusal(*, clip: Path | None = None, bundle: Path | None = None) -> str:
    """Why the demo does not begin: what the command prints, without the process."""
    with pytest.raises(EdgeError) as caught:
        run_demo(seconds=2, port=None, clip=clip, bundle=bundle, say=lambda _: None)
    assert caught.value.exit_code == EXIT_USAGE
    return str(caught.value)


def bad_bundle(tmp_path: Path, fault: str) -> Path:
    bundle = tmp_path / "bundle"
    shutil.copytree(CENTERNET, bundle)
    model, manifest = bundle / "model.onnx", bundle / "bundle.toml"
    text = manifest.read_text(encoding="utf-8")
    if fault == "missing":
        model.unlink()
    elif fault == "empty":
        model.write_bytes(b"")
    elif fault == "truncated":
        model.write_bytes(model.read_bytes()[:100_000])
    elif fault == "foreign":
        model.write_bytes(b"\xff\xd8\xff\xe0" + b"JFIF" * 1000)
    elif fault == "digest":
        data = bytearray(model.read_bytes())
        data[5000] ^= 1
        model.write_bytes(bytes(data))
    elif fault == "layout":
        manifest.write_text(text.replace('layout = "centernet"', 'layout = "yolox"'), encoding="utf-8")
    elif fault == "size":
        manifest.write_text(text.replace("size = [512, 512]", "size = [500, 500]"), encoding="utf-8")
    elif fault == "key":
        manifest.write_text(text.replace("resize =", "rezise ="), encoding="utf-8")
    assert fault in ("missing", "empty", "truncated", "foreign", "digest") or manifest.read_text("utf-8") != text
    return bundle


@pytest.mark.parametrize("fault", ["missing", "empty", "truncated", "foreign", "digest", "layout", "size", "key"])
def test_a_bad_bundle_is_refused_with_2_and_says_what_is_wrong(tmp_path: Path, fault: str) -> None:
    bundle = bad_bundle(tmp_path, fault)
    config = write_config(tmp_path, model=f'name = "detector"\nbundle = "{bundle}"\nvariant = "fp32-512"')
    with DaemonProcess(config) as daemon:
        assert daemon.wait() == 2
    assert str(bundle) in daemon.log
    assert "Traceback" not in daemon.log
    assert str(bundle) in refusal(bundle=bundle)
    if fault == "missing":  # one is enough to see that the command says it
        found = demo("--bundle", str(bundle), "--seconds", "2")
        assert found.returncode == 2
        assert str(bundle) in found.stderr
