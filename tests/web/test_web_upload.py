"""A bundle comes in by the control socket: whole, or nothing of it stays."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.app.door import StoreUpload
from edge_runtime.app.shelf import Shelf
from edge_runtime.cli.control import request
from edge_runtime.clock import SystemClock
from edge_runtime.engine.archive import bundle_bytes, tar_bundle
from edge_runtime.engine.bundle import load_bundle
from edge_runtime.errors import BundleError, EdgeError
from edge_runtime.web import upload as web_upload
from edge_runtime.web.door import BundleUpload
from edge_runtime.web.protocol import BoundedProtocol
from edge_runtime.web.server import WebServer
from tests.awaiting import wait_until
from tests.engine.graphs import classifier, write_bundle
from tests.web.doors import TOKEN, FakeDoor, FakeUpload, Gate, ask, dial, open_fds, read_all, say

Address = tuple[str, int]
PUT = b"PUT /api/bundles HTTP/1.1\r\nhost: x\r\n"
CHUNKED = PUT + b"transfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def put(where: Path, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    answer = ask(where, "/api/bundles", "PUT", body, headers)
    return answer.status, answer.json()


def test_a_bundle_comes_in(server: WebServer, control: Path, door: FakeDoor) -> None:
    body = bytes(range(256)) * 5000
    assert put(control, body) == (
        200,
        {
            "digest": "sha256:" + "0" * 64,
            "name": "tiny",
            "version": "1",
            "variants": ["fp32", "int8"],
            "bytes": len(body),
            "new": True,
        },
    )
    # of any length, in pieces
    assert put(control, iter([b"a" * 100, b"b" * 1_000_000, b"c"]))[0] == 200
    assert put(control, b"")[0] == 200
    assert [len(each.received) for each in door.uploads] == [len(body), 1_000_101, 0]
    assert door.uploads[0].received == body
    assert [each.ended for each in door.uploads] == ["kept"] * 3
    assert door.uploads[0].threads == {"web-upload"}


def test_one_connection_takes_several(server: WebServer, control: Path, door: FakeDoor) -> None:
    last = PUT + b"connection: close\r\ncontent-length: 2\r\n\r\nxy"
    answers = say(control, 2 * (PUT + b"content-length: 2\r\n\r\nab") + last)
    assert answers.count(b"HTTP/1.1 200 ") == 3
    assert [bytes(each.received) for each in door.uploads] == [b"ab", b"ab", b"xy"]


def test_over_tcp_nothing_comes_in(server: WebServer, tcp: Address, door: FakeDoor) -> None:
    for headers, status, code in (
        ({"Authorization": f"Bearer {TOKEN}"}, 403, "socket_only"),
        ({}, 401, "unauthorized"),
    ):
        answer = ask(tcp, "/api/bundles", "PUT", b"x", headers)
        assert (answer.status, answer.json()["code"]) == (status, code)
    assert door.uploads == []


def test_it_is_put_and_nothing_else(server: WebServer, control: Path, door: FakeDoor) -> None:
    answer = ask(control, "/api/bundles", "POST", b"x")
    assert (answer.status, answer.headers["allow"]) == (405, "PUT")
    assert ask(control, "/api/bundles?force=1", "PUT", b"x").status == 400
    assert ask(control, "/api/bundles/x", "PUT", b"x").status == 404
    assert door.uploads == []


def test_one_that_is_too_large_is_not_even_read(server: WebServer, control: Path, door: FakeDoor) -> None:
    with dial(control) as sock:
        sock.sendall(PUT + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % (web_upload.MAX_UPLOAD_BYTES + 1))
        answer = read_all(sock)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"upload_too_large" in answer
    assert door.uploads == []


def test_one_that_grows_too_large_is_cut(
    server: WebServer, control: Path, door: FakeDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_upload, "MAX_UPLOAD_BYTES", 2_000_000)
    answer = bytearray()
    with dial(control) as sock:
        try:
            sock.sendall(CHUNKED)
            for _ in range(1000):
                sock.sendall(chunk(bytes(100_000)))
        except ConnectionError:
            pass
        answer += read_all(sock)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert door.uploads[0].ended == "aborted"
    assert len(door.uploads[0].received) <= 2_000_000


def test_what_the_disk_does_not_take_is_not_read(server: WebServer, control: Path, door: FakeDoor) -> None:
    """A client that sends faster than the disk writes is held up, and everybody else is served."""
    gate = Gate()
    door.before_upload = lambda upload: setattr(upload, "before_write", gate)
    sent = 0
    with dial(control) as sock:
        sock.sendall(CHUNKED)
        wait_until(lambda: door.uploads)
        sock.settimeout(0.5)
        try:
            while sent < 100_000_000:
                sock.sendall(chunk(bytes(100_000)))
                sent += 100_000
        except TimeoutError:
            pass
        assert 500_000 < sent < 6_000_000
        for path in ("/healthz", "/api/status"):
            assert ask(control, path).status == 200
        assert put(control, b"another")[1]["code"] == "busy"
    gate.open()
    wait_until(lambda: door.uploads[0].ended == "aborted")
    wait_until(lambda: put(control, b"another")[0] == 200)


@pytest.mark.parametrize("start", [CHUNKED, PUT + b"content-length: 900000\r\n\r\n"])
def test_a_client_that_goes_away_leaves_nothing(
    server: WebServer, control: Path, door: FakeDoor, start: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    fds = open_fds()
    with dial(control) as sock:
        sock.sendall(start + (chunk(bytes(300_000)) if start == CHUNKED else bytes(300_000)))
        wait_until(lambda: door.uploads and door.uploads[0].received)
    wait_until(lambda: door.uploads[0].ended == "aborted")
    wait_until(lambda: open_fds() <= fds)
    assert put(control, b"x")[0] == 200
    assert not caplog.records


@pytest.mark.parametrize("trickle", [False, True])
def test_a_client_that_stalls_is_told_and_leaves_nothing(
    server: WebServer, control: Path, door: FakeDoor, monkeypatch: pytest.MonkeyPatch, trickle: bool
) -> None:
    monkeypatch.setattr(web_upload, "STALL_S", 0.4)
    with dial(control, timeout_s=0.02) as sock:
        t_start = time.monotonic()
        sock.sendall(CHUNKED + chunk(b"x"))
        answer = b""
        while not answer and time.monotonic() - t_start < 8:
            with suppress(TimeoutError):
                answer = sock.recv(4096)
            if trickle and not answer:
                sock.sendall(chunk(b"x"))
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert 0.35 < time.monotonic() - t_start < 4
    assert [each.ended for each in door.uploads] == ["aborted"]
    assert put(control, b"x")[0] == 200


def test_a_slow_client_that_goes_on_is_waited_for(
    server: WebServer, control: Path, door: FakeDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound of other requests on the time of the whole is none for it; and afterwards it is one again."""
    monkeypatch.setattr(BoundedProtocol, "receive_s", 0.1)
    monkeypatch.setattr("edge_runtime.web.protocol._CHECK_S", 0.02)
    with dial(control, timeout_s=0.05) as sock:
        sock.sendall(CHUNKED)
        for _ in range(10):
            with pytest.raises(TimeoutError):
                sock.recv(1)
            sock.sendall(chunk(b"slow"))
        sock.settimeout(10)
        sock.sendall(b"0\r\n\r\n")
        assert sock.recv(4096).startswith(b"HTTP/1.1 200 ")
        sock.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n")
        t_start = time.monotonic()
        assert b"HTTP/1.1" not in read_all(sock)
        assert time.monotonic() - t_start < 4
    assert door.uploads[0].received == b"slow" * 10


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (BundleError("is damaged", code="digest_mismatch", where="model.onnx", remedy="send it again"), 400),
        (EdgeError("the disk is full", code="store_full", retryable=True), 507),
        (EdgeError("the disk fails", code="store_write_failed"), 500),
        (EdgeError("no store", code="no_store"), 503),
        (EdgeError("too much", code="upload_too_large"), 413),
        (ValueError("secret: hunter2"), 500),
    ],
)
@pytest.mark.parametrize("when", ["open", "write", "finish"])
def test_what_goes_wrong_is_told(
    server: WebServer, control: Path, door: FakeDoor, error: Exception, status: int, when: str
) -> None:
    def fail() -> None:
        raise error

    def arrange(upload: FakeUpload) -> None:
        if when == "open":
            fail()
        setattr(upload, f"before_{when}", fail)

    door.before_upload = arrange
    got, body = put(control, b"x" * 1000)
    assert got == status
    assert body["code"] == (error.code if isinstance(error, EdgeError) else "internal")
    assert "hunter2" not in str(body)
    assert [each.ended for each in door.uploads] == ([] if when == "open" else ["aborted"])
    door.before_upload = lambda _: None
    assert put(control, b"x")[0] == 200


def test_an_error_reaches_a_client_that_is_still_sending(server: WebServer, control: Path, door: FakeDoor) -> None:
    def full() -> None:
        raise EdgeError("the disk is full", code="store_full")

    door.before_upload = lambda upload: setattr(upload, "before_write", full)
    connection = http.client.HTTPConnection("localhost")
    connection.sock = dial(control)
    try:
        with pytest.raises(ConnectionError):
            connection.request("PUT", "/api/bundles", iter([bytes(100_000)] * 1000))
        with connection.sock, http.client.HTTPResponse(connection.sock, method="PUT") as response:
            response.begin()
            assert response.status == 507
            assert b"store_full" in response.read()
    finally:
        connection.close()


def test_the_command_hears_of_it_too(server: WebServer, control: Path, door: FakeDoor) -> None:
    def full() -> None:
        raise EdgeError("the disk is full", code="store_full")

    door.before_upload = lambda upload: setattr(upload, "before_write", full)
    status, body = request(control, "PUT", "/api/bundles", iter([bytes(100_000)] * 1000))
    assert status == 507
    assert b"the disk is full" in body


def test_stop_ends_an_upload(door: FakeDoor, control: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = WebServer(door, control)
    server.start()
    with dial(control) as sock:
        sock.sendall(CHUNKED + chunk(bytes(300_000)))
        wait_until(lambda: door.uploads and door.uploads[0].received)
        t_start = time.monotonic()
        assert server.stop(1.0) == []
        assert time.monotonic() - t_start < 1.5
        assert door.uploads[0].ended == "aborted"
        assert b" 200 " not in read_all(sock)
    assert not caplog.records


def test_stop_with_an_upload_that_hangs_says_so(door: FakeDoor, control: Path) -> None:
    gate = Gate()
    door.before_upload = lambda upload: setattr(upload, "before_finish", gate)
    server = WebServer(door, control)
    server.start()
    with dial(control) as sock:
        sock.sendall(PUT + b"content-length: 2\r\n\r\nab")
        wait_until(lambda: gate.waiting)
        assert server.stop(1.0) == ["web-upload"]
        assert b'"stopping"' in read_all(sock)
    gate.open()
    wait_until(lambda: server.stop() == [])


class StoreDoor(FakeDoor):
    """Keeps what comes in a real store."""

    def __init__(self, shelf: Shelf) -> None:
        super().__init__()
        self.shelf = shelf

    def open_upload(self) -> BundleUpload:
        return StoreUpload(self.shelf.bundles.open_upload(), self.shelf)


def test_a_real_bundle_in_a_real_store(folder: Path, control: Path) -> None:
    source = load_bundle(write_bundle(folder / "tiny", classifier()))
    shelf = Shelf(folder, SystemClock())
    store = shelf.bundles
    door = StoreDoor(shelf)
    with WebServer(door, control):
        for new in (True, False):
            status, answer = put(control, tar_bundle(source))
            assert status == 200
            assert answer == {
                "digest": source.digest,
                "name": "tiny",
                "version": "1",
                "variants": ["fp32"],
                "bytes": bundle_bytes(source),
                "new": new,
            }
        assert store.open(source.digest).labels == source.labels
        tar = b"".join(tar_bundle(source))
        for body, code in [(tar[:2600], "upload_invalid"), (tar.replace(b"green", b"gr33n"), "digest_mismatch")]:
            status, answer = put(control, body)
            assert (status, answer["code"]) == (400, code)
            assert ".new-" not in str(answer)
        with dial(control) as sock:
            sock.sendall(CHUNKED + chunk(tar[:3000]))
            wait_until(lambda: store.size_bytes() > bundle_bytes(source) or threads("web-upload"))
            sock.shutdown(socket.SHUT_RDWR)
        wait_until(lambda: not threads("web-upload"))
    # nothing runs it yet, and it stays for whoever is going to ask for it
    shelf.collect(set())
    assert [each.name for each in store.root.iterdir()] == [source.digest.removeprefix("sha256:")]


def threads(name: str) -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == name]
