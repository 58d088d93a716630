"""The daemon's control socket, from the side of whoever asks: finding it, and one request."""

from __future__ import annotations

import argparse
import grp
import http.client
import json
import os
import pwd
import socket
from collections.abc import Iterable, Mapping, Set
from contextlib import suppress
from pathlib import Path
from typing import Any

from edge_runtime.errors import EdgeError, NotThereError, RefusedError, UsageError

RUN_SOCKET = Path("/run/edge-runtime/control.sock")
STORE_SOCKET = Path("/var/lib/edge-runtime/control.sock")
SOCKET_NAME = "control.sock"
TIMEOUT_S = 10.0
MAX_REPLY_BYTES = 16 * 1024 * 1024


def add_daemon_arguments(parser: argparse.ArgumentParser) -> None:
    """How a command finds the daemon."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("-c", "--config", type=Path, metavar="CONFIG", help="the daemon of this configuration's store")
    which.add_argument(
        "--socket",
        type=Path,
        metavar="PATH",
        help=f"its control socket (default: {RUN_SOCKET}, else {STORE_SOCKET})",
    )


def find_daemon(args: argparse.Namespace) -> tuple[Path, dict[str, Any]]:
    """The control socket of the daemon that `args` name, and its status report. Raises NotThereError, EdgeError."""
    store: Path | None = None
    if args.socket is not None:
        places = [args.socket]
    elif args.config is not None:
        from edge_runtime.config import load_config

        store = load_config(args.config).device.store
        # a service has its socket in /run, whatever its store
        places = [store / SOCKET_NAME, RUN_SOCKET]
    else:
        places = [RUN_SOCKET, STORE_SOCKET]
    looked: list[str] = []
    denied: EdgeError | None = None
    for place in places:
        try:
            status, body = request(place, "GET", "/api/status")
        except (FileNotFoundError, NotADirectoryError):
            looked.append(f"{place} (not there)")
            continue
        except ConnectionRefusedError:
            looked.append(f"{place} (nobody listens)")
            continue
        except PermissionError:
            denied = denied or _denied(place)
            continue
        report = checked_reply(place, status, body)
        if store is not None and not _same_folder(store, report.get("store")):
            looked.append(f"{place} (serves another store)")
            continue
        return place, report
    if denied is not None:
        raise denied
    raise NotThereError(
        f"no daemon is running: looked at {', '.join(looked)}",
        code="no_daemon",
        remedy="start it with: edge-runtime run -c CONFIG; or say where it is with -c or --socket",
    )


def request(
    path: Path,
    method: str,
    target: str,
    body: bytes | Iterable[bytes] | None = None,
    *,
    timeout_s: float = TIMEOUT_S,
) -> tuple[int, bytes]:
    """One HTTP request on a control socket: status and body. `timeout_s`: how long to wait for each step of it.

    Raises FileNotFoundError, NotADirectoryError and ConnectionRefusedError where no daemon is, PermissionError where
    we may not ask it, and EdgeError where it does not answer.
    """
    connection = _UnixConnection(path, timeout_s)
    try:
        with suppress(BrokenPipeError, ConnectionResetError):  # it may have answered before it had all of it
            connection.request(method, target, body)
        response = connection.getresponse()
        data = response.read(MAX_REPLY_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError, PermissionError):
        raise
    except (OSError, http.client.HTTPException) as error:
        raise EdgeError(
            f"the daemon does not answer: {str(error) or type(error).__name__}",
            code="no_answer",
            where=str(path),
            remedy="look at its log",
            retryable=True,
        ) from error
    finally:
        connection.close()
    if len(data) > MAX_REPLY_BYTES:
        raise EdgeError("the answer is too long", code="no_answer", where=str(path))
    return response.status, data


def request_found(
    path: Path, method: str, target: str, body: bytes | Iterable[bytes] | None, *, timeout_s: float
) -> tuple[int, bytes]:
    """`request`, of a daemon that has been found. Raises EdgeError, NotThereError where it has ended since."""
    try:
        return request(path, method, target, body, timeout_s=timeout_s)
    except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError) as error:
        raise NotThereError(
            "the daemon has ended", code="no_daemon", where=str(path), remedy="look at its log"
        ) from error
    except PermissionError as error:
        raise _denied(path) from error


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        try:
            self.sock.connect(os.fspath(self._path))
        except OSError as error:
            if error.errno is None:  # Python's own: the path is too long for a socket
                raise FileNotFoundError(str(error)) from None
            raise


def checked_reply(path: Path, status: int, body: bytes) -> dict[str, Any]:
    try:
        reply = json.loads(body)
    except ValueError:
        reply = None
    if not isinstance(reply, dict):
        raise EdgeError("the answer is no JSON object", code="no_answer", where=str(path), remedy="is this our daemon?")
    if status != 200:
        code, remedy = str(reply.get("code") or "failed"), reply.get("remedy")
        raise EdgeError(
            clean(reply.get("message") or f"the daemon answered {status}"),
            code=code,
            where=str(path),
            remedy=None if remedy is None else clean(remedy),
            retryable=reply.get("retryable") is True,
        )
    return reply


def execute(
    path: Path, name: str, args: Mapping[str, Any], *, usage: Set[str], failed: Set[str], timeout_s: float = TIMEOUT_S
) -> dict[str, Any]:
    """A command on a control socket, and its result.

    Raises UsageError for errors whose code is in `usage`, EdgeError for those in `failed` and where the daemon does not
    answer, NotThereError where it has ended meanwhile, RefusedError for all others.
    """
    body = json.dumps({"args": args}).encode()
    status, answer = request_found(path, "POST", f"/api/command/{name}", body, timeout_s=timeout_s)
    try:
        reply = json.loads(answer)
    except ValueError:
        reply = None
    if isinstance(reply, dict) and isinstance(error := reply.get("error"), dict):
        code, where, remedy = str(error.get("code")), error.get("where"), error.get("remedy")
        kind = UsageError if code in usage else EdgeError if code in failed else RefusedError
        raise kind(
            clean(error.get("message")),
            code=code,
            where=None if where is None else clean(where),
            remedy=None if remedy is None else clean(remedy),
            retryable=error.get("retryable") is True,
        )
    result = checked_reply(path, status, answer).get("result")
    return result if isinstance(result, dict) else {}


def _denied(path: Path) -> EdgeError:
    """Who may: the group of the socket, or of the first folder above it that can be looked at."""
    for each in (path, *path.parents):
        try:
            found = each.stat()
        except OSError:
            continue
        return EdgeError(
            f"this user may not ask the daemon: {each} belongs to user {_user(found.st_uid)}, "
            f"group {_group(found.st_gid)}",
            code="permission_denied",
            where=str(path),
            remedy=f"run this as {_user(found.st_uid)} (sudo), or: usermod -aG {_group(found.st_gid)} USER",
        )
    return EdgeError("this user may not ask the daemon", code="permission_denied", where=str(path))


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def _same_folder(store: Path, said: object) -> bool:
    return isinstance(said, str) and Path(said).resolve() == store.resolve()


def clean(value: object) -> str:
    """Text for a terminal: what a camera says may hold escape sequences."""
    return "".join(char if char.isprintable() else "?" for char in str(value))
