"""The helper that caps for the daemon: the real process on a real socket, over a tree of files."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_runtime.backoff import Backoff
from edge_runtime.hardware.gpu_clock_client import ANSWER_S, RENEW_S, HelperClock
from edge_runtime.hardware.gpu_clock_helper import MAX_CLIENTS
from tests.awaiting import wait_until
from tests.hardware.trees import GPU_STEPS_HZ, Tree, build

ROOT = Path(__file__).resolve().parents[2]
MAX_HZ = 1_173_000_000


class Helper:
    """The process, its socket and its tree."""

    def __init__(self, folder: Path, lease_s: float) -> None:
        self.tree: Tree = build(folder / "tree", "orin-nx-16gb")
        self.path = folder / "clock.sock"
        self.note = folder / "capped"
        self._lease_s = lease_s
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        self.process = subprocess.Popen(
            [
                sys.executable, "-m", "edge_runtime.hardware.gpu_clock_helper", "--root", str(self.tree.root),
                "--socket", str(self.path), "--note", str(self.note), "--lease-s", str(self._lease_s),
            ],
            cwd=ROOT,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        wait_until(self._answers, what="the helper")
        return self.process

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.connect(str(self.path))
            return True
        return False

    def max_hz(self) -> int:
        return int((self.tree.gpu_folder() / "max_freq").read_text() or 0)

    @contextlib.contextmanager
    def connected(self) -> Iterator[socket.socket]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(10)
            sock.connect(str(self.path))
            yield sock

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(10)


@pytest.fixture
def helper(tmp_path: Path) -> Iterator[Helper]:
    found = Helper(tmp_path, lease_s=30.0)
    yield found
    found.process.kill()
    found.process.wait()


def say(sock: socket.socket, line: str) -> str:
    sock.sendall(f"{line}\n".encode())
    data = b""
    while not data.endswith(b"\n"):
        more = sock.recv(1024)
        assert more, f"closed after {data!r}"
        data += more
    return data.decode().strip()


def is_closed(sock: socket.socket) -> bool:
    with contextlib.suppress(ConnectionResetError):
        while sock.recv(1024):
            pass
    return True


def test_a_client_caps_and_frees(helper: Helper) -> None:
    with helper.connected() as sock:
        assert say(sock, "cap 510000000") == f"ok 510000000 {MAX_HZ}"
        assert helper.max_hz() == 510_000_000
        assert say(sock, "free") == f"ok 0 {MAX_HZ}"
        assert helper.max_hz() == MAX_HZ


def test_the_owner_and_the_group_may_connect_and_nobody_else(helper: Helper) -> None:
    assert stat.S_IMODE(helper.path.stat().st_mode) == 0o660


def test_the_lowest_cap_holds_and_each_ends_with_its_client(helper: Helper) -> None:
    with helper.connected() as one:
        with helper.connected() as other:
            assert say(one, "cap 714000000") == f"ok 714000000 {MAX_HZ}"
            assert say(other, "cap 408000000") == f"ok 408000000 {MAX_HZ}"
            assert say(one, "cap 612000000") == f"ok 408000000 {MAX_HZ}"
            assert helper.max_hz() == 408_000_000
        wait_until(lambda: helper.max_hz() == 612_000_000)
    wait_until(lambda: helper.max_hz() == MAX_HZ)


def test_what_is_no_step_is_refused_while_another_holds_a_lower_cap(helper: Helper) -> None:
    with helper.connected() as other:
        with helper.connected() as one:
            assert say(one, "cap 408000000").startswith("ok")
            assert say(other, "cap 999999999").startswith("error 1000 MHz is no step")
            assert helper.max_hz() == 408_000_000
        wait_until(lambda: helper.max_hz() == MAX_HZ)
        assert say(other, "cap 714000000").startswith("ok 714000000")


def test_a_cap_that_could_not_be_freed_is_tried_again(helper: Helper) -> None:
    max_freq = helper.tree.gpu_folder() / "max_freq"
    with helper.connected() as sock:
        assert say(sock, "cap 510000000").startswith("ok")
        helper.tree.write(max_freq, "fast")
        assert say(sock, "free").startswith("error max_freq")
    # it is over once the client is dropped, and that one is dropped before the next is heard
    wait_until(helper._answers)
    assert helper.note.exists()
    helper.tree.write(max_freq, "510000000")
    wait_until(lambda: helper.max_hz() == MAX_HZ, 5)
    wait_until(lambda: not helper.note.exists())
    assert helper.stop() == 0


def test_a_client_that_is_killed_holds_nothing(helper: Helper) -> None:
    program = (
        "import socket, sys, time\n"
        "sock = socket.socket(socket.AF_UNIX); sock.connect(sys.argv[1])\n"
        "sock.sendall(b'cap 306000000\\n'); print(sock.recv(99).decode(), flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(helper.path)], stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        assert client.stdout.readline().startswith(b"ok 306000000")
        assert helper.max_hz() == 306_000_000
        client.kill()
        wait_until(lambda: helper.max_hz() == MAX_HZ)


def test_a_lease_runs_out_however_much_is_said_that_does_not_renew_it(tmp_path: Path) -> None:
    helper = Helper(tmp_path, lease_s=0.4)
    try:
        with helper.connected() as silent:
            assert say(silent, "cap 510000000").startswith("ok")
            wait_until(lambda: helper.max_hz() == MAX_HZ, 5)
            assert is_closed(silent)
        with helper.connected() as renewing:
            end = time.monotonic() + 1.2
            while time.monotonic() < end:
                assert say(renewing, "cap 510000000").startswith("ok")
                assert helper.max_hz() == 510_000_000
            with contextlib.suppress(OSError, AssertionError):
                while True:
                    say(renewing, "hold on")
            assert helper.max_hz() == MAX_HZ
    finally:
        assert helper.stop() == 0


STRANGE = (
    "", "cap", "cap ", "cap 0", "cap 1", "cap -306000000", "cap 306000001", "cap 306000000 ", "cap 3.06e8",
    "cap 99999999999", "cap 306000000000000", "CAP 306000000", "max 306000000", "mode 3", "free please", "\x00",
    "cap ٣٠٦٠٠٠٠٠٠", "cap 306000000\r",
)  # fmt: skip


def test_everything_else_is_refused(helper: Helper) -> None:
    with helper.connected() as sock:
        assert say(sock, "cap 510000000").startswith("ok")
        for line in STRANGE:
            assert say(sock, line).startswith("error "), line
            # what was granted before holds on
            assert helper.max_hz() == 510_000_000
        assert say(sock, "free").startswith("ok 0")


def test_a_line_without_an_end_a_crowd_and_one_that_never_listens_harm_nobody(helper: Helper) -> None:
    with helper.connected() as sock:
        sock.sendall(b"c" * 500)
        assert is_closed(sock)
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(helper.connected()) for _ in range(MAX_CLIENTS)]
        assert say(crowd[-1], "cap 714000000").startswith("ok")
        with helper.connected() as late:
            assert is_closed(late)
    with helper.connected() as deaf:
        deaf.setblocking(False)
        with contextlib.suppress(OSError):
            for _ in range(100_000):
                deaf.send(b"free\n" * 100)
        wait_until(lambda: helper._answers())
    with helper.connected() as sock:
        assert say(sock, "cap 408000000").startswith("ok")


def test_a_stop_gives_back_and_so_does_the_start_after_a_kill(helper: Helper) -> None:
    with helper.connected() as sock:
        assert say(sock, "cap 510000000").startswith("ok")
        assert helper.stop() == 0
        assert helper.max_hz() == MAX_HZ
        assert not helper.path.exists()
        assert not helper.note.exists()
    helper.start()
    with helper.connected() as sock:
        assert say(sock, "cap 510000000").startswith("ok")
        helper.process.kill()
        helper.process.wait()
        assert helper.max_hz() == 510_000_000
    helper.start()  # over the socket that is left
    wait_until(lambda: helper.max_hz() == MAX_HZ)


def test_a_second_helper_does_not_take_the_socket(helper: Helper) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "edge_runtime.hardware.gpu_clock_helper", "--socket", str(helper.path)],
        cwd=ROOT, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "another helper listens" in done.stderr
    assert helper._answers()


# ---- the client


def client(helper: Helper) -> HelperClock:
    return HelperClock(helper.path, helper.tree.root, backoff=Backoff(base_s=0.05, limit_s=0.1, jitter=False))


def test_the_daemons_cap_is_renewed_without_asking_every_time(helper: Helper) -> None:
    clock = client(helper)
    assert clock.steps_hz() == ()
    assert clock.find() is None
    assert clock.steps_hz() == tuple(map(float, GPU_STEPS_HZ))
    assert clock.hz() == 612e6
    assert clock.cap(714e6) is None
    assert helper.max_hz() == 714_000_000
    assert clock.steps_hz()[-1] == MAX_HZ
    # looked for again while it is held, in another mode too
    assert clock.find() is None
    assert helper.max_hz() == 714_000_000
    helper.tree.write(helper.tree.gpu_folder() / "max_freq", "918000000")
    assert clock.find() is None
    assert (helper.max_hz(), clock.steps_hz()[-1]) == (714_000_000, 918e6)
    helper.process.send_signal(signal.SIGSTOP)
    try:
        assert clock.cap(714e6) is None  # asked a moment ago
        start = time.monotonic()
        assert "it takes too long" in str(clock.cap(612e6)) or "timed out" in str(clock.cap(612e6))
        assert time.monotonic() - start < ANSWER_S + 0.3
    finally:
        helper.process.send_signal(signal.SIGCONT)
    wait_until(lambda: clock.cap(408e6) is None)
    assert helper.max_hz() == 408_000_000
    assert "is no step" in str(clock.cap(1.0))
    assert clock.cap(None) is None
    wait_until(lambda: helper.max_hz() == 918_000_000)
    clock.close()


def test_no_helper_has_a_reason_and_is_asked_again_when_there_is_one(helper: Helper) -> None:
    helper.stop()
    clock = client(helper)
    assert "no answer from the helper on" in str(clock.find())
    assert clock.steps_hz() == ()
    assert clock.cap(None) is None  # nothing to take away
    assert clock.cap(510e6) is not None
    helper.start()
    wait_until(lambda: clock.cap(510e6) is None)
    assert helper.max_hz() == 510_000_000
    # it goes, and comes back
    helper.process.kill()
    helper.process.wait()
    wait_until(lambda: clock.cap(510e6) is not None, RENEW_S + 5)
    helper.start()
    wait_until(lambda: clock.cap(510e6) is None)
    assert helper.max_hz() == 510_000_000
    clock.close()


def test_the_cap_ends_with_a_daemon_that_is_killed(helper: Helper) -> None:
    program = (
        "import sys, time, pathlib\n"
        "from edge_runtime.hardware.gpu_clock_client import HelperClock\n"
        "clock = HelperClock(*map(pathlib.Path, sys.argv[1:]))\n"
        "print(clock.cap(510e6), flush=True); time.sleep(60)\n"
    )
    arguments = [sys.executable, "-c", program, str(helper.path), str(helper.tree.root)]
    with subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE) as daemon:
        assert daemon.stdout is not None
        assert daemon.stdout.readline() == b"None\n"
        assert helper.max_hz() == 510_000_000
        daemon.kill()
        wait_until(lambda: helper.max_hz() == MAX_HZ)


@pytest.mark.parametrize("answer", [b"", b"ok\n", b"nonsense\n", b"ok x y\n", b"\xff\n", b"z" * 5000])
def test_a_stranger_on_the_socket_is_survived(tmp_path: Path, answer: bytes) -> None:
    path = tmp_path / "clock.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(os.fspath(path))
        listener.listen(1)
        listener.settimeout(10)

        def serve() -> None:
            sock, _ = listener.accept()
            with sock, contextlib.suppress(OSError):
                sock.recv(100)
                sock.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        clock = HelperClock(path, tmp_path)
        assert clock.find() is not None
        assert clock.steps_hz() == ()
        thread.join()
        clock.close()
