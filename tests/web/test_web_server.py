"""Sockets, bounds on clients, and an end that comes in time."""

from __future__ import annotations

import gc
import os
import socket
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from edge_runtime.errors import EdgeError, UsageError
from edge_runtime.web.protocol import MAX_CONNECTIONS, BoundedProtocol
from edge_runtime.web.server import WebServer
from edge_runtime.web.sockets import MAX_PATH_BYTES, ControlSocket, bind_tcp
from tests.awaiting import wait_until
from tests.web.doors import TOKEN, FakeDoor, Gate, ask, dial, open_fds, read_all, say

Address = tuple[str, int]
GET = b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_the_socket_is_for_the_owner_and_the_group(door: FakeDoor, control: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        with WebServer(door, control):
            assert mode(control) == 0o660
            assert stat.S_ISSOCK(control.stat().st_mode)
            assert mode(control.parent) == 0o750
            assert ask(control, "/healthz").status == 200
    finally:
        assert os.umask(before) == umask
    assert not control.exists()


def test_a_folder_that_is_there_stays_as_it_is(door: FakeDoor, control: Path) -> None:
    control.parent.mkdir()
    control.parent.chmod(0o700)
    with WebServer(door, control):
        assert mode(control.parent) == 0o700


def test_a_dead_daemons_socket_is_replaced(door: FakeDoor, control: Path) -> None:
    control.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(control))
    assert control.exists()
    with WebServer(door, control):
        assert ask(control, "/healthz").status == 200


def test_a_living_daemons_socket_is_not(server: WebServer, control: Path) -> None:
    with pytest.raises(EdgeError) as caught:
        WebServer(FakeDoor(), control).start()
    assert caught.value.code == "socket_held"
    assert ask(control, "/healthz").status == 200


def test_what_is_no_socket_is_left_alone(door: FakeDoor, control: Path) -> None:
    control.parent.mkdir()
    control.write_text("precious", encoding="utf-8")
    with pytest.raises(UsageError, match="is no socket"):
        WebServer(door, control).start()
    assert control.read_text(encoding="utf-8") == "precious"


def test_only_our_own_socket_is_removed(door: FakeDoor, control: Path) -> None:
    with WebServer(door, control):
        control.unlink()
        other = ControlSocket(control)
    assert control.exists()
    other.remove()
    other.remove()
    other.socket.close()
    assert not control.exists()


def test_a_path_that_no_socket_can_have(door: FakeDoor, folder: Path) -> None:
    room = MAX_PATH_BYTES - len(os.fsencode(folder)) - 1
    with pytest.raises(UsageError) as caught:
        WebServer(door, folder / ("x" * (room + 1))).start()
    assert caught.value.code == "socket_path"
    assert "--socket" in str(caught.value)
    with WebServer(door, folder / ("x" * room)):
        assert ask(folder / ("x" * room), "/healthz").status == 200


def test_a_folder_that_cannot_be(door: FakeDoor, folder: Path) -> None:
    (folder / "file").touch()
    with pytest.raises(UsageError) as caught:
        WebServer(door, folder / "file" / "control.sock").start()
    assert caught.value.code == "socket_unusable"


def test_a_port_that_is_taken(door: FakeDoor, control: Path, tmp_path: Path) -> None:
    fds = open_fds()
    with bind_tcp("127.0.0.1:0") as taken:
        with pytest.raises(EdgeError) as caught:
            WebServer(door, control, listen=f"127.0.0.1:{taken.getsockname()[1]}").start()
        assert (caught.value.code, caught.value.retryable) == ("web_listen", True)
        assert "another" in (caught.value.remedy or "")
    assert not control.exists()
    for address in ("192.0.2.1:0", "no-such-host.invalid:80"):
        with pytest.raises(EdgeError) as caught:
            WebServer(door, control, listen=address, token=TOKEN).start()
        assert caught.value.code == "web_listen"
    assert open_fds() == fds


def test_a_body_that_is_too_large(server: WebServer, control: Path, door: FakeDoor) -> None:
    limit = 64 * 1024
    assert ask(control, "/api/command/ping", "POST", b"x" * limit).status == 200
    for size in (limit + 1, 3 * limit):
        answer = ask(control, "/api/command/ping", "POST", b"x" * size)
        assert (answer.status, answer.json()["code"]) == (413, "too_large")
    # without saying how long it is, and for ever
    with dial(control) as sock:
        sock.sendall(b"POST /api/command/ping HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
        sent = 0
        try:
            while sent < 256:
                sock.sendall(chunk)
                sent += 1
        except ConnectionError:
            pass
        assert sent < 256
    assert [len(body) for _, body, _ in door.executed] == [limit]


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\r\n\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /%ff%fe HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nhost: x\r\nx-long: " + b"y" * 70_000 + b"\r\n\r\n",
        b"GET /" + b"y" * 70_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nhost: x\r\nbad header\r\n\r\n",
        b"POST /api/command/ping HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
        b"POST /api/command/ping HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n",
        b"POST /api/command/ping HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip\r\n\r\n",
        b"POST /api/command/ping HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"CONNECT evil:443 HTTP/1.1\r\nhost: evil:443\r\nconnection: close\r\n\r\n",
        b"GET http://evil/healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        bytes(range(256)) * 300,
    ],
)
def test_what_is_no_request_is_refused_and_nothing_breaks(
    server: WebServer, control: Path, door: FakeDoor, request_bytes: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with dial(control) as sock:
        try:
            sock.sendall(request_bytes)
            sock.shutdown(socket.SHUT_WR)
        except ConnectionError:
            pass
        answer = read_all(sock)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 4"), answer
    assert door.executed == []
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
    assert ask(control, "/healthz").status == 200


def test_an_upgrade_is_not_made(server: WebServer, tcp: Address, caplog: pytest.LogCaptureFixture) -> None:
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    assert ask(tcp, "/healthz", headers=upgrade).status == 200
    assert not caplog.records


def test_pipelined_requests_are_answered_in_turn(server: WebServer, control: Path) -> None:
    last = GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    assert say(control, GET * 9 + last).count(b"HTTP/1.1 200 ") == 10


def test_a_client_that_never_finishes_is_cut(
    server: WebServer, control: Path, tcp: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundedProtocol, "receive_s", 0.5)
    starts = (
        b"",
        b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\n",
        b"POST /api/command/ping HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer "
        + TOKEN.encode()
        + b"\r\ncontent-length: 9\r\n\r\nx",
    )

    def cut_after_s(client: tuple[Address | Path, bytes]) -> float:
        where, start = client
        with dial(where) as sock:
            t_start = time.monotonic()
            sock.sendall(start)
            dribbled = 0
            sock.settimeout(0.05)
            try:
                # a header line at a time is no progress
                while time.monotonic() - t_start < 5:
                    try:
                        if not sock.recv(1):
                            break
                    except TimeoutError:
                        if start.endswith(b"1\r\n"):
                            sock.sendall(b"x-%d: y\r\n" % dribbled)
                            dribbled += 1
            except ConnectionError:
                pass
            return time.monotonic() - t_start

    clients = [(where, start) for where in (control, tcp) for start in starts]
    with ThreadPoolExecutor(len(clients)) as pool:
        assert all(0.4 < took_s < 4 for took_s in pool.map(cut_after_s, clients))


def test_a_client_that_does_not_read_is_cut_and_holds_nothing(
    server: WebServer, control: Path, door: FakeDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundedProtocol, "send_s", 0.3)
    snapshots = threading.Event()
    door.before_snapshot = snapshots.set
    with dial(control) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(b"GET /api/windows?last=360 HTTP/1.1\r\nhost: x\r\n\r\n" * 20)
        # others are served all the while
        assert ask(control, "/api/status").status == 200
        assert snapshots.is_set()

        def is_cut() -> bool:
            try:
                sock.sendall(b"x")
            except ConnectionError:
                return True
            return False

        wait_until(is_cut, 10)


def test_fifty_clients_at_once(server: WebServer, control: Path, tcp: Address) -> None:
    paths = ["/healthz", "/metrics", "/api/status", "/api/windows?last=5"]

    def client(number: int) -> int:
        return ask(control if number % 2 else tcp, paths[number % 4]).status

    with ThreadPoolExecutor(50) as pool:
        assert set(pool.map(client, range(200))) == {200}


def test_idle_clients_cannot_lock_others_out(
    server: WebServer, control: Path, tcp: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_runtime.web.protocol.EVICT_S", 0.0)
    idle = [dial(tcp) for _ in range(2 * MAX_CONNECTIONS)]
    try:
        for _ in range(5):
            assert ask(tcp, "/healthz").status == 200
            assert ask(control, "/healthz").status == 200
    finally:
        for sock in idle:
            sock.close()


def test_stop_cuts_a_client_that_hangs(door: FakeDoor, control: Path) -> None:
    server = WebServer(door, control, listen="127.0.0.1:0")
    server.start()
    assert server.address is not None
    hanging = [dial(where) for where in (control, server.address)]
    hanging.append(dial(control))
    hanging[0].sendall(b"GET /hea")
    hanging[1].sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n")
    hanging[2].sendall(b"POST /api/command/ping HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nx")
    assert ask(control, "/healthz").status == 200
    t_start = time.monotonic()
    assert server.stop(1.0) == []
    assert time.monotonic() - t_start < 1.5
    for sock in hanging:
        with sock:
            assert b" 200 " not in read_all(sock)
    assert not control.exists()
    with pytest.raises(OSError, match="refused"):
        dial(server.address)
    assert server.stop() == []


def test_stop_with_a_command_that_hangs_says_so(
    door: FakeDoor, control: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate()
    door.before_execute = gate
    server = WebServer(door, control)
    server.start()
    with dial(control) as sock:
        sock.sendall(b"POST /api/command/reload HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}")
        wait_until(lambda: gate.waiting)
        t_start = time.monotonic()
        assert server.stop(1.0) == ["web-command"]
        assert time.monotonic() - t_start < 1.5
        answer = read_all(sock)
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b'"stopping"' in answer
    assert not caplog.records
    gate.open()
    wait_until(lambda: gate.waiting == 0)
    assert server.stop() == []


def test_stop_lets_a_request_in_hand_finish(door: FakeDoor, control: Path) -> None:
    gate = Gate()
    door.before_execute = gate
    server = WebServer(door, control)
    server.start()
    with dial(control) as sock:
        sock.sendall(b"POST /api/command/ping HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}")
        wait_until(lambda: gate.waiting)
        with ThreadPoolExecutor(1) as pool:
            stopping = pool.submit(server.stop, 10.0)
            wait_until(lambda: not_accepting(control))
            gate.open()
            assert read_all(sock).startswith(b"HTTP/1.1 200 ")
            assert stopping.result() == []


def not_accepting(control: Path) -> bool:
    try:
        dial(control).close()
    except OSError:
        return True
    return False


def test_nothing_is_left_open(door: FakeDoor, folder: Path) -> None:
    def once() -> None:
        with WebServer(door, folder / "control.sock", listen="127.0.0.1:0") as server:
            assert server.address is not None
            for where in (folder / "control.sock", server.address):
                assert ask(where, "/api/status").status == 200
                dial(where).close()

    once()
    gc.collect()
    fds = open_fds()
    for _ in range(5):
        once()
    gc.collect()
    assert open_fds() <= fds
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("web")]


def test_a_server_starts_once(server: WebServer) -> None:
    with pytest.raises(EdgeError, match="started before"):
        server.start()


def test_a_loop_that_dies_is_told(door: FakeDoor, control: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    died: list[str] = []

    def break_(*_: object, **__: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr("edge_runtime.web.server.build_app", break_)
    server = WebServer(door, control, on_death=lambda name, error: died.append(f"{name}: {error}"))
    with pytest.raises(EdgeError) as caught:
        server.start()
    assert caught.value.code == "web_failed"
    wait_until(lambda: died == ["web: broken"])
    assert not control.exists()
    server.stop()


def test_signals_and_logs_stay_ours(server: WebServer) -> None:
    import logging
    import signal

    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert logging.getLogger("uvicorn").handlers == []
