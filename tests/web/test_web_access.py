"""Who gets in: tokens, hosts, origins."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

import pytest

from edge_runtime.config_values import is_loopback
from edge_runtime.errors import UsageError
from edge_runtime.web.access import Access, DeniedError, check_listen, parse_listen, read_token
from edge_runtime.web.server import WebServer
from tests.web.doors import TOKEN, FakeDoor, ask, say

Address = tuple[str, int]
BEARER = {"Authorization": f"Bearer {TOKEN}"}


def test_on_the_socket_changes_need_no_token(server: WebServer, control: Path) -> None:
    assert ask(control, "/api/command/ping", "POST", b"{}", {"Host": "anything", "Origin": "null"}).status == 200


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        TOKEN,
        "Bearer",
        "Bearer ",
        f"Bearer {TOKEN[:-1]}",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN.upper()}",
        f"Basic {TOKEN}",
        "Bearer \xe9\xe9",
    ],
)
def test_on_tcp_a_change_without_the_token_is_refused(
    server: WebServer, tcp: Address, door: FakeDoor, header: str | None
) -> None:
    headers = {} if header is None else {"Authorization": header}
    answer = ask(tcp, "/api/command/ping", "POST", b"{}", headers)
    assert answer.status == 401
    assert answer.json()["code"] == "unauthorized"
    assert answer.headers["www-authenticate"] == "Bearer"
    assert door.executed == []


def test_on_tcp_a_change_with_the_token_is_done(server: WebServer, tcp: Address, door: FakeDoor) -> None:
    for scheme in ("Bearer", "bearer"):
        assert ask(tcp, "/api/command/ping", "POST", b"{}", {"Authorization": f"{scheme} {TOKEN}"}).status == 200
    assert [entry for _, _, entry in door.executed] == ["http", "http"]


def test_two_authorizations_are_none(server: WebServer, tcp: Address) -> None:
    line = f"authorization: Bearer {TOKEN}\r\n"
    request = f"POST /api/command/ping HTTP/1.1\r\nhost: 127.0.0.1\r\n{line}{line}content-length: 0\r\n\r\n"
    assert say(tcp, request.encode()).startswith(b"HTTP/1.1 401 ")


def test_the_loopback_may_look_without_a_token(server: WebServer, tcp: Address) -> None:
    for path in ("/healthz", "/metrics", "/api/status", "/api/windows"):
        assert ask(tcp, path).status == 200


def test_without_a_token_nothing_changes_over_tcp(door: FakeDoor, control: Path) -> None:
    with WebServer(door, control, listen="127.0.0.1:0") as server:
        assert server.address is not None
        answer = ask(server.address, "/api/command/ping", "POST", b"{}", {"Authorization": "Bearer "})
        assert (answer.status, answer.json()["code"]) == (403, "no_token")
        assert ask(control, "/api/command/ping", "POST", b"{}").status == 200


def test_off_the_loopback_everything_but_healthz_needs_the_token(door: FakeDoor, control: Path) -> None:
    with WebServer(door, control, listen="0.0.0.0:0", token=TOKEN) as server:
        assert server.address is not None
        where = ("127.0.0.1", server.address[1])
        assert ask(where, "/healthz").status == 200
        for path in ("/metrics", "/api/status", "/api/windows", "/nowhere", "/healthz/", "//healthz"):
            assert ask(where, path).status == 401, path
        assert ask(where, "/healthz", "POST").status == 401
        assert ask(where, "/metrics", headers=BEARER).status == 200


def test_a_daemon_does_not_listen_to_others_without_a_token(door: FakeDoor, control: Path) -> None:
    for listen in ("0.0.0.0:0", "[::]:0", "gate-07.example:8080"):
        with pytest.raises(UsageError) as caught:
            WebServer(door, control, listen=listen)
        assert caught.value.code == "web_token_missing"
        assert "token_file" in (caught.value.remedy or "")
    assert not control.exists()


def test_a_name_that_leads_elsewhere_is_no_loopback(
    door: FakeDoor, control: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = socket.getaddrinfo("0.0.0.0", 0, type=socket.SOCK_STREAM)
    monkeypatch.setattr("edge_runtime.web.sockets.socket.getaddrinfo", lambda *_, **__: found)
    with pytest.raises(UsageError, match="no token"):
        WebServer(door, control, listen="localhost:0").start()
    assert not control.exists()


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "", "a b", "@"])
def test_a_name_that_is_not_ours_is_refused(server: WebServer, tcp: Address, host: str) -> None:
    answer = say(tcp, f"GET /healthz HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode())
    assert answer.split()[1] in (b"403", b"400")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "10.1.2.3", "[::1]:8080", "Gate-07.local:80"])
def test_our_own_names_are_served(server: WebServer, tcp: Address, host: str) -> None:
    assert ask(tcp, "/healthz", headers={"Host": host}).status == 200


def test_no_host_is_no_browser(server: WebServer, tcp: Address) -> None:
    assert say(tcp, b"GET /healthz HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": ""},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"},
    ],
)
def test_another_origin_gets_nothing_even_with_the_token(
    server: WebServer, tcp: Address, door: FakeDoor, headers: dict[str, str]
) -> None:
    for method, path in (("GET", "/api/status"), ("GET", "/healthz"), ("POST", "/api/command/ping")):
        answer = ask(tcp, path, method, headers=headers | BEARER)
        assert (answer.status, answer.json()["code"]) == (403, "origin_refused")
    assert door.executed == []


def test_our_own_page_may_ask(server: WebServer, tcp: Address) -> None:
    own = {"Origin": f"http://{tcp[0]}:{tcp[1]}", "Sec-Fetch-Site": "same-origin"}
    assert ask(tcp, "/api/command/ping", "POST", b"{}", own | BEARER).status == 200
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    assert ask(tcp, "/healthz", headers=link).status == 200


def test_listen() -> None:
    assert parse_listen("[::1]:80") == ("::1", 80)
    assert parse_listen("gate:0") == ("gate", 0)
    for wrong in ("", "gate", "gate:", ":80", "gate:65536", "::1:80", "http://gate:80", "gate:80/"):
        with pytest.raises(UsageError):
            parse_listen(wrong)
    assert all(is_loopback(host) for host in ("localhost", "127.0.0.1", "127.9.9.9", "::1"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "gate", "localhost.gate", "::%1"))
    check_listen("127.0.0.1:80", None)
    check_listen("0.0.0.0:80", TOKEN)
    with pytest.raises(UsageError):
        check_listen("127.0.0.1:80", "short")


def test_the_token_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n", encoding="utf-8")
    path.chmod(0o640)
    assert read_token(path) == TOKEN
    assert not caplog.records
    path.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        read_token(path)
    assert "chmod 640" in caplog.text
    for wrong in ("", "short", f"{TOKEN}\n{TOKEN}", "tökenökenökenökenöken", "a" * 513, f"{TOKEN} {TOKEN}"):
        path.write_text(wrong, encoding="utf-8")
        with pytest.raises(UsageError) as caught:
            read_token(path)
        assert "hunter" not in str(caught.value)
        assert wrong == "" or wrong not in str(caught.value)
    with pytest.raises(UsageError, match="cannot be read"):
        read_token(tmp_path / "nowhere")


def test_a_denied_request_says_what_to_do() -> None:
    with pytest.raises(DeniedError) as caught:
        Access().check("POST", "/api/command/ping", {"host": "localhost"})
    assert caught.value.status == 403
    assert caught.value.remedy
