"""Models that change under running cameras: with the command that operators use, against a daemon of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.app.shelf import Shelf
from edge_runtime.cli.control import request
from edge_runtime.cli.main import run as edge_runtime
from edge_runtime.clock import SystemClock
from edge_runtime.engine.bundle import load_bundle
from tests.awaiting import wait_until
from tests.e2e.daemon import CENTERNET, DaemonProcess, write_config
from tests.e2e.test_daemon import ask, is_up, soon
from tests.engine import bad_models
from tests.mosquitto import Mosquitto, Subscriber

SYNTHETIC = 'name = "gate"\nurl = "synthetic:?width=320&height=240&fps=15"'
MODEL = f'name = "detector"\nbundle = "{CENTERNET}"\nvariant = "fp32-320"\ntimeout_s = 2.0'


class Host:
    """A running daemon, and `edge-runtime` for it. The reader of standard output belongs to the test."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str], config: Path, daemon: DaemonProcess) -> None:
        self.folder, self.config, self.daemon = folder, config, daemon
        self.store = folder / "store"
        self._capsys = capsys

    def reload(self, *arguments: str) -> tuple[int, dict[str, Any], str]:
        """Exit code, JSON document ({} where there is none), and what went to standard error."""
        self._capsys.readouterr()
        code = edge_runtime(["reload", "-c", str(self.config), "--json", "detector", *arguments])
        out, err = self._capsys.readouterr()
        return code, json.loads(out) if out else {}, err

    def switch(self, variant: str) -> tuple[int, dict[str, Any]]:
        """HTTP status and reply of the command `variant`."""
        body = json.dumps({"args": {"model": "detector", "variant": variant}}).encode()
        status, reply = request(self.store / "control.sock", "POST", "/api/command/variant", body, timeout_s=60)
        return status, json.loads(reply)

    def running(self) -> dict[str, Any]:
        (model,) = ask(self.store, "GET", "/api/status")[1]["models"]
        return dict(model)

    def frames(self) -> dict[str, int]:
        (camera,) = ask(self.store, "GET", "/api/status")[1]["cameras"]
        return dict(camera["frames"])


SYNCED = """
import sys
from edge_runtime.app import identity
identity.clock_synced = lambda: True
from edge_runtime.cli.main import run
sys.exit(run(sys.argv[1:]))
"""
"""The daemon on a machine whose clock is synchronised, whatever this one's is."""


def start(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    *,
    model: str = MODEL,
    mqtt: str = "",
    program: Sequence[str] = (),
) -> Host:
    config = write_config(folder, camera=SYNTHETIC, model=model, mqtt=mqtt, hardware="none")
    host = Host(folder, capsys, config, DaemonProcess(config, program=program))
    wait_until(lambda: is_up(host.store), 20, "the daemon is up")
    return host


@pytest.fixture
def host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Host]:
    host = start(tmp_path, capsys)
    with host.daemon:
        yield host


def test_another_model_of_another_kind_and_back(host: Host, tmp_path: Path) -> None:
    before = host.running()
    other = bad_models.good(tmp_path / "other")
    code, result, _ = host.reload(str(other))
    assert code == 0
    assert (result["changed"], result["persisted"], result["source"]) == (True, True, "reload")
    assert result["previous"] == before["engine"]
    assert result["bundle"] == load_bundle(other).digest
    assert result["lost"]["failed"] == result["lost"]["dropped"] == 0
    assert result["judged"] > 0
    assert result["proof"]["memory_mb"] >= 0
    now = host.running()
    assert now["engine"] == result["engine"] != before["engine"]
    assert (now["source"], now["bundle"]) == ("reload", result["bundle"])
    # the bundle is the store's own now: what happens to the folder that it came from is nobody's business
    for each in other.iterdir():
        each.unlink()
    # it also runs after the next start
    assert host.daemon.stop()[0] == 0
    with DaemonProcess(host.config) as again:
        wait_until(lambda: is_up(host.store), 20, "the daemon is up")
        assert host.running()["engine"] == result["engine"]
        code, back, _ = host.reload("--reset")
        assert (code, back["source"], back["engine"]) == (0, "configuration", before["engine"])
        assert host.running()["engine"] == before["engine"]
        # the one before stays, for a way back by its digest
        assert (host.store / "bundles" / result["bundle"][7:]).is_dir()
        assert again.stop()[0] == 0
    with DaemonProcess(host.config):
        wait_until(lambda: is_up(host.store), 20, "the daemon is up")
        assert host.running()["engine"] == before["engine"]


Build = Callable[[Path], Path]

BAD: dict[str, tuple[Build, str]] = {
    "truncated": (bad_models.truncated, "damaged"),
    "bit-flipped": (bad_models.bit_flipped, "deviates by"),
    "wrong-shape": (bad_models.wrong_input_size, "px high only"),
    "wrong-layout": (bad_models.wrong_layout, "declared as 'yolox'"),
    "wrong-labels": (bad_models.wrong_labels, "3 classes and there are 2 labels"),
    "nan": (bad_models.answers_nan, "not finite"),
    "nan-when-bright": (lambda root: bad_models.answers_nan(root, "bright"), "the white picture"),
    "hanging": (lambda root: bad_models.hangs(root, "bright"), "did not come to an end"),
    "crashing": (bad_models.crashes, "SIGFPE"),
    "external-data": (bad_models.external_data, "second file"),
}
"""Each with what an operator has to read."""
SAMPLE = ("truncated", "bit-flipped", "crashing")
"""Of the ways in which a proof ends; tests/app/test_proof.py has more of each."""


@pytest.mark.parametrize("names", [SAMPLE, pytest.param(tuple(BAD), marks=pytest.mark.full)], ids=["some", "all"])
def test_no_bad_model_takes_over(host: Host, tmp_path: Path, names: Sequence[str]) -> None:
    """One daemon for all of them: it has to be as good as new after each."""
    before = host.running()
    for name in names:
        build, words = BAD[name]
        frames = host.frames()
        code, result, err = host.reload(str(build(tmp_path / name)))
        assert (code, result) == (3, {}), (name, err)
        assert words in err, name
        assert host.running() == before, name
        events = [line for line in host.daemon.log.splitlines() if "model detector: reload: refused" in line]
        assert events, name
        assert "runs on" in events[-1], name
        assert words in events[-1], name
        wait_until(lambda seen=frames: host.frames()["completed"] > seen["completed"], 10, "frames go on")  # type: ignore[misc]
        now = host.frames()
        assert now["failed"] == 0, name
        assert not now["dropped"], name
    assert host.daemon.process.poll() is None
    assert host.daemon.stop()[0] == 0


@pytest.mark.full
def test_a_model_that_is_too_slow_for_its_cameras(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = bad_models.slow(tmp_path / "slow", layers=250)
    host = start(tmp_path, capsys, model=MODEL.replace("timeout_s = 2.0", "lanes = 1"))
    with host.daemon:
        code, _, err = host.reload(str(slow))
        assert code == 3, err
        assert "too slow for its cameras" in err
        assert "--allow-slow" in err
        code, result, err = host.reload(str(slow), "--allow-slow")
        assert code == 0, err
        assert host.running()["engine"] == result["engine"]


def test_wrong_usage_is_told_apart(host: Host, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = host.reload(str(tmp_path / "nowhere"))
    assert (code, "there is no such folder" in err) == (2, True)
    code, _, err = host.reload("sha256:" + "0" * 64)
    assert code == 2, err
    code, _, err = host.reload(str(CENTERNET), "--variant", "int8-999")
    assert (code, "fp32-512" in err) == (2, True)
    assert edge_runtime(["reload", "-c", str(host.config), "other", str(CENTERNET)]) == 2
    assert "the daemon has detector" in capsys.readouterr().err
    assert edge_runtime(["reload", "-c", str(host.config), "detector"]) == 2
    assert edge_runtime(["reload", "--socket", str(tmp_path / "no.sock"), "detector", str(CENTERNET)]) == 4


def test_for_people(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["reload", "-c", str(host.config), "detector", str(CENTERNET), "--variant", "fp32-416"]
    assert edge_runtime(arguments) == 0
    out = capsys.readouterr().out
    assert "model detector: fp32-416 of sha256:" in out
    assert "exchanged in" in out
    assert "golden pictures" in out


def test_variants_are_switched_and_the_ladder_is_there_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    host = start(tmp_path, capsys, model=MODEL + '\nladder = ["fp32-416"]')
    with host.daemon:
        status, reply = host.switch("fp32-416")
        assert (status, reply["ok"]) == (200, True), reply
        result = reply["result"]
        assert (result["variant"], result["proof"], result["persisted"]) == ("fp32-416", None, False)
        assert result["exchange_ms"] < 5
        assert host.running()["variant"] == "fp32-416"
        # one that is not on the ladder is proved and loaded first
        status, reply = host.switch("fp32-512")
        assert (status, reply["result"]["variant"]) == (200, "fp32-512"), reply
        assert reply["result"]["proof"]["took_s"] > 0
        status, reply = host.switch("int8")
        assert (status, reply["error"]["code"]) == (400, "unknown_variant")


def test_sighup_takes_over_models_and_says_what_needs_a_restart(host: Host) -> None:
    before = host.running()
    text = host.config.read_text(encoding="utf-8")
    host.config.write_text(text.replace("fp32-320", "fp32-416"), encoding="utf-8")
    host.daemon.process.send_signal(signal.SIGHUP)
    host.daemon.wait_for("the configuration was read again and is in force")
    assert host.running()["variant"] == "fp32-416"
    # a wrong one changes nothing
    host.config.write_text(text + "\nnonsense = 1\n", encoding="utf-8")
    host.daemon.process.send_signal(signal.SIGHUP)
    host.daemon.wait_for("was not taken over")
    assert host.running()["variant"] == "fp32-416"
    # some tables are for a restart; the model is taken over all the same
    host.config.write_text(text + "\n[web]\n", encoding="utf-8")
    host.daemon.process.send_signal(signal.SIGHUP)
    host.daemon.wait_for("[web]: changed, needs a restart")
    assert host.running()["engine"] == before["engine"]
    # what was reloaded goes before what the file says
    assert host.reload(str(CENTERNET), "--variant", "fp32-416")[0] == 0
    host.config.write_text(text.replace("fp32-320", "fp32-512"), encoding="utf-8")
    host.daemon.process.send_signal(signal.SIGHUP)
    host.daemon.wait_for("runs what was reloaded last")
    assert host.running()["variant"] == "fp32-416"
    assert host.daemon.stop()[0] == 0


def test_over_mqtt_only_a_digest_of_the_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Mosquitto(tmp_path) as broker, Subscriber(broker, "edge/v1/test-device/#") as subscriber:
        script = tmp_path / "synced.py"
        script.write_text(SYNCED, encoding="utf-8")
        mqtt = f'host = "127.0.0.1"\nport = {broker.port}'
        host = start(tmp_path, capsys, mqtt=mqtt, program=[sys.executable, str(script)])
        with host.daemon:
            assert host.reload(str(CENTERNET), "--variant", "fp32-416")[0] == 0
            digest = host.running()["bundle"]

            def command(number: int, args: dict[str, Any]) -> dict[str, Any]:
                body = json.dumps({"id": f"r{number}", "expires_utc": soon(), "args": args})
                subscriber.publish("edge/v1/test-device/cmd/reload", body.encode())
                topic = f"edge/v1/test-device/reply/r{number}"
                subscriber.wait_for(lambda _: subscriber.payloads(topic), 30, topic)
                reply: dict[str, Any] = json.loads(subscriber.payloads(topic)[0])
                return reply

            refused = command(1, {"model": "detector", "bundle": str(CENTERNET)})
            assert (refused["ok"], refused["error"]["code"]) == (False, "invalid")
            gone = command(2, {"model": "detector", "bundle": "sha256:" + "1" * 64})
            assert gone["error"]["code"] == "not_in_store"
            done = command(3, {"model": "detector", "bundle": digest, "variant": "fp32-320"})
            assert (done["ok"], done["result"]["variant"]) == (True, "fp32-320"), done
            host.daemon.stop()


@pytest.mark.full
def test_a_chosen_bundle_that_is_damaged_in_the_store(host: Host, tmp_path: Path) -> None:
    configured = host.running()["engine"]
    code, result, _ = host.reload(str(bad_models.good(tmp_path / "other")))
    assert code == 0
    assert host.daemon.stop()[0] == 0
    folder = host.store / "bundles" / result["bundle"][7:]
    model = next(folder.glob("*.onnx"))
    folder.chmod(0o755)
    model.chmod(0o644)
    data = bytearray(model.read_bytes())
    data[len(data) // 2] ^= 1
    model.write_bytes(data)
    with DaemonProcess(host.config):
        wait_until(lambda: is_up(host.store), 20, "the daemon is up")
        assert host.running()["engine"] == configured
        wait_until(
            lambda: ask(host.store, "GET", "/healthz")[1]["status"] == "degraded", 5, "it says that it is not well"
        )
        health = ask(host.store, "GET", "/healthz")[1]
        assert any("what was reloaded last cannot run" in reason for reason in health["reasons"])
        # a reload that works ends it
        assert host.reload(str(bad_models.good(tmp_path / "third")))[0] == 0
        wait_until(lambda: ask(host.store, "GET", "/healthz")[1]["status"] == "ok", 5, "healthy again")


def test_a_stop_while_what_was_chosen_is_proved_again(
    tmp_path: Path,
) -> None:
    """A newer runtime may hang on it, and a start can be given up all the same."""
    config = write_config(tmp_path, camera=SYNTHETIC, model=MODEL, hardware="none")
    shelf = Shelf(tmp_path / "store", SystemClock())
    (tmp_path / "store").mkdir()
    shelf.choose("detector", shelf.add(bad_models.hangs(tmp_path / "hangs", "loading")).digest, "auto")
    with DaemonProcess(config) as daemon:
        wait_until(lambda: children(daemon.process.pid), 20, "the proof has begun")
        code, took_s = daemon.stop()
        assert code == 0, daemon.log
        assert took_s < 5
    assert "what was reloaded last cannot run" not in daemon.log


def children(pid: int) -> str:
    """Process ids of a process's children, as far as its main thread has any."""
    return Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").strip()


def test_two_at_once_and_a_stop_in_the_middle(host: Host, tmp_path: Path) -> None:
    hanging = bad_models.hangs(tmp_path / "hangs")
    first = subprocess.Popen(
        [sys.executable, "-m", "edge_runtime", "reload", "-c", str(host.config), "detector", str(hanging)],
        stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_until(lambda: any((host.store / "bundles").glob("?" * 64)), 20, "the first one is uploaded")

    def busy() -> bool:
        code, _, err = host.reload("--reset")
        return code == 1 and "another change of models is under way" in err

    wait_until(busy, 10, "the second one is told to wait")
    start = time.monotonic()
    assert host.daemon.stop()[0] == 0
    assert time.monotonic() - start < 5
    out, err = first.communicate(timeout=20)
    assert first.returncode in (1, 4), (out, err)
    assert err
