"""The service on a host with a real systemd: start, ends of every kind, the watchdog."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.systemd.host import PREFIX, ROOT, Host, made_host

pytestmark = pytest.mark.timeout(600)  # the very first run makes the host: Debian, and wheels from PyPI

WATCHDOG_S = 3
STALL_LIMIT_S = 2  # sitecustomize.py
START_LIMIT_S = 5
CONFIG = """
[device]
id = "host"
hardware = "sim:orin-nano-8gb"
[[camera]]
name = "gate"
url = "file:/srv/pictures"
fps = 10
loop = true
[[camera]]
name = "never"
url = "file:/srv/nothing-here"
loop = true
[[model]]
name = "detector"
bundle = "bundled:centernet"
variant = "fp32-320"
lanes = 2
timeout_s = 1
[telemetry]
window_s = 0.5
"""
QUICKER = f"""
[Service]
WatchdogSec={WATCHDOG_S}
RestartSec=200ms
Environment=PYTHONPATH=/opt/edge-runtime-test
"""


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with made_host(tmp_path_factory.mktemp("host")) as host:
        host.write("/etc/systemd/system/edge-runtime.service.d/test.conf", QUICKER)
        hook = Path(__file__).with_name("sitecustomize.py").read_text(encoding="utf-8")
        host.write("/opt/edge-runtime-test/sitecustomize.py", hook)
        try:
            host.boot()
            yield host
        finally:
            host.power_off()


@pytest.fixture
def service(host: Host) -> Iterator[Host]:
    """The host with a good configuration and pictures, the service not started."""
    host.write("/etc/edge-runtime/config.toml", CONFIG)
    host.run("systemd-tmpfiles", "--create", "edge-runtime.conf")
    pictures = host.root / "srv/pictures"
    if not pictures.exists():
        shutil.copytree(ROOT / "engines/centernet/golden/fp32-320", pictures)
    host.mark()
    yield host
    host.run("systemctl", "stop", "edge-runtime")
    host.try_run("systemctl", "reset-failed", "edge-runtime")


def start(host: Host) -> str:
    """Start the service, with frames on their way; its process."""
    host.run("systemctl", "start", "edge-runtime")
    host.wait_for("camera gate: up")
    return host.show("MainPID")


def wait_for_another(host: Host, pid: str, timeout_s: float) -> None:
    """Until the service is up again as another process than `pid`."""
    host.wait(lambda: host.show("MainPID") not in (pid, "0"), "another process", timeout_s)
    host.wait(lambda: host.show("ActiveState") == "active", "active")
    assert host.show("NRestarts") == "1"


@contextmanager
def settings(host: Host, *lines: str) -> Iterator[None]:
    """The unit with other settings, for as long as this lasts."""
    drop_in = host.root / "etc/systemd/system/edge-runtime.service.d/zz.conf"
    drop_in.write_text("\n".join(["[Service]", *lines, ""]), encoding="ascii")
    try:
        host.run("systemctl", "daemon-reload")
        yield
    finally:
        drop_in.unlink()
        host.run("systemctl", "daemon-reload")


def windows(host: Host) -> int:
    return len(re.findall(r"window \d+:", host.journal()))


def test_the_unit_is_clean(service: Host) -> None:
    done = service.try_run("systemd-analyze", "verify", "--man=no", "edge-runtime.service")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_ready_comes_after_the_warm_up_and_needs_no_camera(service: Host) -> None:
    hold = service.root / "var/lib/edge-runtime/hold-warm-up"
    service.write("/var/lib/edge-runtime/hold-warm-up", "")
    shutil.rmtree(service.root / "srv/pictures")
    service.run("systemctl", "start", "--no-block", "edge-runtime")
    service.wait_for("the warm-up is held")
    assert service.show("ActiveState") == "activating"
    hold.unlink()
    service.wait(lambda: service.show("ActiveState") == "active", "active")
    service.wait_for("Started edge-runtime.service")
    journal = service.journal()
    assert journal.index("loaded and warm") < journal.index("Started edge-runtime.service")
    assert "camera gate: up" not in journal
    service.wait(lambda: "degraded" in service.show("StatusText"), "a status")


@pytest.mark.full
def test_a_long_warm_up_asks_for_more_time(service: Host) -> None:
    hold = service.root / "var/lib/edge-runtime/hold-warm-up"
    service.write("/var/lib/edge-runtime/hold-warm-up", "")
    try:
        with settings(service, f"TimeoutStartSec={START_LIMIT_S}"):
            service.run("systemctl", "start", "--no-block", "edge-runtime")
            service.wait_for("the warm-up is held")
            late = time.monotonic() + START_LIMIT_S
            service.wait(lambda: time.monotonic() > late, "the end of TimeoutStartSec")
            assert service.show("ActiveState") == "activating"
            hold.unlink()
            service.wait(lambda: service.show("ActiveState") == "active", "active")
            assert service.show("NRestarts") == "0"
    finally:
        hold.unlink(missing_ok=True)


def test_reload_proves_and_exchanges_models_inside_the_hardened_unit(service: Host) -> None:
    pid = start(service)
    before = windows(service)
    service.write("/etc/edge-runtime/config.toml", CONFIG.replace("fp32-320", "fp32-416"))
    service.run("systemctl", "reload", "edge-runtime")
    service.wait_for("the configuration was read again and is in force")
    assert re.search(r"new configuration: fp32-416 sha256:\w+ runs, exchanged in", service.journal())
    service.wait(lambda: windows(service) > before + 2, "windows")
    assert (service.show("MainPID"), service.show("NRestarts")) == (pid, "0")


def camera_processes(host: Host) -> list[str]:
    """Process ids of cameras' children; the shell and grep that look are gone by then."""
    told = host.run("sh", "-c", "grep -l edge_runtime.camera.child /proc/[0-9]*/cmdline 2>/dev/null || true")
    return [line.split("/")[2] for line in told.splitlines() if host.try_run("test", "-e", line).returncode == 0]


def test_a_camera_comes_into_a_process_of_its_own_inside_the_hardened_unit(service: Host) -> None:
    main = start(service)
    apart = '[[camera]]\nname = "apart"\nurl = "file:/srv/pictures"\nfps = 10\nisolation = "process"\n[[model]]'
    service.write("/etc/edge-runtime/config.toml", CONFIG.replace("[[model]]", apart))
    service.run("systemctl", "reload", "edge-runtime")
    service.wait_for("camera apart: up")
    (child,) = camera_processes(service)
    service.run("sh", "-c", f"kill -SEGV {child}")
    service.wait_for("its process died (SIGSEGV)")
    service.wait(lambda: service.journal().count("camera apart: up") == 2, "it is up again")
    assert (service.show("MainPID"), service.show("NRestarts")) == (main, "0")
    service.run("systemctl", "stop", "edge-runtime")
    assert camera_processes(service) == []


def test_it_runs_as_its_own_user_in_its_own_folders(service: Host) -> None:
    pid = start(service)
    assert service.run("stat", "-c", "%U", f"/proc/{pid}").strip() == "edge-runtime"
    assert {"video", "render"} <= set(service.run("id", "-nG", "edge-runtime").split())
    for path, wanted in {
        "/var/lib/edge-runtime": "edge-runtime edge-runtime 750",
        "/run/edge-runtime": "edge-runtime edge-runtime 750",
        "/etc/edge-runtime": "root edge-runtime 750",
        "/etc/edge-runtime/config.toml": "root edge-runtime 640",
        "/var/lib/edge-runtime/lock": "edge-runtime edge-runtime 640",
    }.items():
        assert service.run("stat", "-c", "%U %G %a", path).strip() == wanted, path
    status = service.run("cat", f"/proc/{pid}/status")
    assert re.search(r"^NoNewPrivs:\s1$", status, re.MULTILINE)
    assert re.search(r"^CapBnd:\s0+$", status, re.MULTILINE)


def test_stop_is_quick_and_clean(service: Host) -> None:
    start(service)
    began = time.monotonic()
    service.run("systemctl", "stop", "edge-runtime")
    assert time.monotonic() - began < 5
    assert (service.show("Result"), service.show("ExecMainStatus")) == ("success", "0")
    assert "Traceback" not in service.journal()


@pytest.mark.full
def test_stop_is_quick_with_a_lane_that_is_stuck(service: Host) -> None:
    start(service)
    service.run("touch", "/run/edge-runtime/stuck-lane")
    service.wait_for("a lane is stuck")
    began = time.monotonic()
    service.run("systemctl", "stop", "edge-runtime")
    assert time.monotonic() - began < 5
    assert service.show("ActiveState") in ("inactive", "failed")
    assert service.show("NRestarts") == "0"


def test_a_killed_daemon_comes_back(service: Host) -> None:
    pid = start(service)
    service.run("systemctl", "kill", "--kill-who=main", "-s", "KILL", "edge-runtime")
    wait_for_another(service, pid, 10)


def test_a_daemon_that_lost_a_thread_ends_and_comes_back(service: Host) -> None:
    pid = start(service)
    service.run("touch", "/run/edge-runtime/dead-lane")
    wait_for_another(service, pid, 15)
    assert re.search(r"thread lane-detector-\d died", service.journal())


@pytest.mark.full
def test_a_stuck_lane_is_killed_with_all_stacks_shown_and_comes_back(service: Host) -> None:
    pid = start(service)
    service.run("touch", "/run/edge-runtime/stuck-lane")
    service.wait_for("a lane is stuck")
    began = time.monotonic()
    service.wait_for("health: wedged: model detector: a lane has been in one run for more than 2 s", STALL_LIMIT_S + 2)
    service.wait_for("Watchdog timeout", WATCHDOG_S + 2)
    took = time.monotonic() - began
    assert STALL_LIMIT_S <= took < STALL_LIMIT_S + WATCHDOG_S + 1
    wait_for_another(service, pid, 15)
    journal = service.journal()
    # once by the supervisor, with names, and once at SIGABRT
    own, _, at_abort = journal.partition("Watchdog timeout")
    assert "Fatal Python error: Aborted" in at_abort
    for shown in (own, at_abort):
        assert "in collect_for_the_test" in shown
        assert "in _supervise" in shown
        assert shown.count("(most recent call first)") >= 5
    named = re.search(r"(0x[0-9a-f]{16}) lane-detector-\d", own)
    assert named is not None
    assert f"hread {named.group(1)} (most recent call first)" in own
    # the one that came back is well
    service.mark()
    service.wait(lambda: windows(service) > 2 * (STALL_LIMIT_S + WATCHDOG_S), "windows")
    assert service.show("NRestarts") == "1"


@pytest.mark.full
def test_a_lane_that_holds_the_interpreter_is_killed_with_its_stack_shown(service: Host) -> None:
    pid = start(service)
    service.run("touch", "/run/edge-runtime/hold-gil")
    service.wait_for("a lane holds the interpreter")
    wait_for_another(service, pid, WATCHDOG_S + 10)
    journal = service.journal()
    assert "Watchdog timeout" in journal
    assert "Fatal Python error: Aborted" in journal
    assert "in collect_for_the_test" in journal


@pytest.mark.full
def test_a_process_that_was_stopped_for_a_while_lives_on(service: Host) -> None:
    with settings(service, "WatchdogSec=20"):  # so that the pause is far below it
        pid = start(service)
        service.wait(lambda: "degraded" in service.show("StatusText"), "the supervisor's first look")
        service.run("systemctl", "kill", "--kill-who=main", "-s", "STOP", "edge-runtime")
        again = time.monotonic() + STALL_LIMIT_S + 1
        service.wait(lambda: time.monotonic() > again, "the end of the pause")
        service.run("systemctl", "kill", "--kill-who=main", "-s", "CONT", "edge-runtime")
        service.wait_for("this process did not run for")
        seen = windows(service)
        service.wait(lambda: windows(service) > seen + 2, "windows")
        assert (service.show("MainPID"), service.show("NRestarts")) == (pid, "0")
        assert "wedged" not in service.journal()


@pytest.mark.full
def test_without_any_camera_it_lives_on(service: Host) -> None:
    pid = start(service)
    shutil.rmtree(service.root / "srv/pictures")
    service.wait(lambda: "camera gate is down" in service.show("StatusText"), "degraded")
    assert service.show("StatusText").startswith("degraded")
    service.mark()
    # windows of half a second, for twice as long as a stall would take to be its end
    service.wait(lambda: windows(service) > 2 * 2 * (STALL_LIMIT_S + WATCHDOG_S), "windows")
    assert (service.show("MainPID"), service.show("NRestarts")) == (pid, "0")
    assert "wedged" not in service.journal()


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        (CONFIG.replace("lanes", "lane"), "unknown key"),
        (CONFIG.replace("bundled:centernet", "/srv/no-bundle"), "no-bundle"),
    ],
    ids=["unknown-key", "no-model"],
)
def test_a_wrong_configuration_is_not_started_again(service: Host, wrong: str, word: str) -> None:
    service.write("/etc/edge-runtime/config.toml", wrong)
    assert service.try_run("systemctl", "start", "edge-runtime").returncode != 0
    # were it to be started again, this would be "activating"
    assert (service.show("ActiveState"), service.show("ExecMainStatus")) == ("failed", "2")
    assert service.show("NRestarts") == "0"
    assert word in service.journal()


def test_the_command_is_where_the_unit_says(service: Host) -> None:
    command = f"/{PREFIX}/bin/edge-runtime"
    assert command in service.show("ExecStart")
    service.run(command, "check-config", "/etc/edge-runtime/config.toml")


@pytest.mark.full
def test_a_password_is_handed_over_by_systemd(service: Host) -> None:
    mqtt = '[mqtt]\nport = 1\nusername = "gate-07"\npassword_file = "credential:mqtt"\n'
    service.write("/etc/edge-runtime/config.toml", f"{CONFIG}{mqtt}")
    service.run("systemctl", "start", "edge-runtime")
    service.wait_for("cannot read credential:mqtt: systemd handed no credentials over (LoadCredential=)")
    service.run("systemctl", "stop", "edge-runtime")
    service.mark()
    drop_in = service.root / "etc/systemd/system/edge-runtime.service.d/mqtt-credentials.conf"
    kept = service.root / "etc/edge-runtime.credentials/mqtt"
    kept.parent.mkdir(mode=0o700)
    kept.write_text("correct-horse", encoding="ascii")
    kept.chmod(0o600)  # root's alone: not even the service's user may read it where it lies
    try:
        shutil.copyfile(ROOT / "deploy/systemd/mqtt-credentials.conf", drop_in)
        service.run("systemctl", "daemon-reload")
        # as on any machine that was booted; this host's mounts were made before its systemd was there
        service.run("mount", "--make-rshared", "/")
        verified = service.try_run("systemd-analyze", "verify", "--man=no", "edge-runtime.service")
        assert (verified.returncode, verified.stdout, verified.stderr) == (0, "", "")
        service.run("systemctl", "start", "edge-runtime")
        # it is read before the broker is looked for
        service.wait_for("mqtt: 127.0.0.1:1: unreachable: connection refused")
        assert "credential" not in service.journal()
        assert "every user" not in service.journal()
        mode = service.run("stat", "-c", "%a", "/run/credentials/edge-runtime.service/mqtt")
        assert int(mode, 8) & 0o007 == 0
        pid = service.show("MainPID")
        for told in ("cmdline", "environ"):
            assert "correct-horse" not in service.run("cat", f"/proc/{pid}/{told}")
    finally:
        drop_in.unlink()
        shutil.rmtree(kept.parent)
        service.run("systemctl", "daemon-reload")
