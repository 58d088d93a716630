"""`edge-runtime status`: what the running daemon says of itself, asked on its control socket."""

from __future__ import annotations

import argparse
import grp
import http.client
import json
import os
import pwd
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from edge_runtime.errors import EXIT_DONE, EdgeError, NotThereError

RUN_SOCKET = Path("/run/edge-runtime/control.sock")
STORE_SOCKET = Path("/var/lib/edge-runtime/control.sock")
SOCKET_NAME = "control.sock"
WATCH_S = 2.0
TIMEOUT_S = 10.0
MAX_REPLY_BYTES = 16 * 1024 * 1024
_CLEAR = "\x1b[H\x1b[2J"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `status` its options."""
    add_daemon_arguments(parser)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print one JSON document")
    how.add_argument("--watch", action="store_true", help=f"repaint every {WATCH_S:.0f} s until Ctrl-C")


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


def run(args: argparse.Namespace) -> int:
    """Print the status once, or with --watch again and again. Returns the exit code.

    Raises NotThereError where no daemon answers, and EdgeError where we may not ask it or it answers with an error.
    """
    if not args.watch:
        report = fetch_status(args)
        print(json.dumps(report, indent=2) if args.json else describe(report))
        return EXIT_DONE
    text = describe(fetch_status(args))
    while True:
        print(f"{_CLEAR if sys.stdout.isatty() else ''}{text}", flush=True)
        time.sleep(WATCH_S)
        try:
            text = describe(fetch_status(args))
        except EdgeError as error:  # it may come back: whoever watches a restart wants to see that
            text = f"edge-runtime: {error}"


def fetch_status(args: argparse.Namespace) -> dict[str, Any]:
    """The status report of the daemon that `args` name (`--socket`, `-c`, or the usual places)."""
    _, report = find_daemon(args)
    return report


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
        report = _reply(place, status, body)
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


def request(path: Path, method: str, target: str, body: bytes | None = None) -> tuple[int, bytes]:
    """One HTTP request on a control socket: status and body.

    Raises FileNotFoundError, NotADirectoryError and ConnectionRefusedError where no daemon is, PermissionError where
    we may not ask it, and EdgeError where it does not answer.
    """
    connection = _UnixConnection(path)
    try:
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


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
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


def _reply(path: Path, status: int, body: bytes) -> dict[str, Any]:
    try:
        reply = json.loads(body)
    except ValueError:
        reply = None
    if not isinstance(reply, dict):
        raise EdgeError("the answer is no JSON object", code="no_answer", where=str(path), remedy="is this our daemon?")
    if status != 200:
        code, remedy = str(reply.get("code") or "failed"), reply.get("remedy")
        raise EdgeError(
            _clean(reply.get("message") or f"the daemon answered {status}"),
            code=code,
            where=str(path),
            remedy=None if remedy is None else _clean(remedy),
            retryable=reply.get("retryable") is True,
        )
    return reply


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


# ---- the table. The report is read leniently: the daemon may be older or newer than we are.


def describe(report: Mapping[str, Any]) -> str:
    """The report for a terminal."""
    health = _map(report, "health")
    lines = [
        f"{_clean(report.get('device'))}  edge-runtime {_clean(report.get('version'))}, "
        f"up {_duration(report.get('uptime_s'))}",
        f"health   {_clean(health.get('state'))}",
        *(f"         - {_clean(reason)}" for reason in health.get("reasons") or []),
        f"power    {_power(report)}",
        f"broker   {_broker(report.get('mqtt'))}",
    ]
    if (spool := report.get("spool")) is not None:
        lines.append(f"spool    {_spool(spool)}")
    cameras = [
        (
            _clean(each.get("name")),
            _clean(each.get("model")),
            _clean(each.get("state")),
            _duration(each.get("since_s")),
            _number(each.get("fps"), 1),
            *(_count(each, key) for key in ("completed", "stale", "dropped", "failed")),
            _clean(each.get("reason") or ""),
        )
        for each in report.get("cameras") or []
    ]
    header = ("CAMERA", "MODEL", "STATE", "SINCE", "FPS", "DONE", "STALE", "DROPPED", "FAILED", "REASON")
    lines += ["", *_table(header, cameras, right=range(3, 9))]
    models = [
        (
            _clean(each.get("name")),
            "down" if each.get("engine") is None else "up",
            _clean(each.get("variant") or "-"),
            _clean(each.get("backend") or "-"),
            _clean(each.get("engine") or "-")[:19],
            _clean(each.get("reason") or ""),
        )
        for each in report.get("models") or []
    ]
    lines += ["", *_table(("MODEL", "STATE", "VARIANT", "BACKEND", "ENGINE", "REASON"), models)]
    return "\n".join(lines)


def _power(report: Mapping[str, Any]) -> str:
    parts = []
    power = report.get("power")
    if isinstance(power, Mapping):
        parts.append(f"{_number(power.get('watts'), 2)} W ({_clean(power.get('source'))})")
        parts.append(f"{_number(power.get('joules_total'), 0)} J since the start")
    else:
        parts.append(f"not measured: {_clean(report.get('power_reason') or 'unknown')}")
    ratio = _map(report, "window").get("fps_per_watt")
    if ratio is not None:
        parts.append(f"{_number(ratio, 2)} fps/W")
    thermal = report.get("thermal")
    if isinstance(thermal, Mapping):
        slowed = ", throttling" if thermal.get("throttling") else ""
        parts.append(f"Tj {_number(thermal.get('tj_c'), 1)} C{slowed}")
    return ", ".join(parts)


def _broker(mqtt: object) -> str:
    if not isinstance(mqtt, Mapping):
        return "none configured"
    state = "connected" if mqtt.get("connected") else f"away: {_clean(mqtt.get('reason') or 'unknown')}"
    counts = [f"{mqtt[key]} {word}" for key, word in _BROKER_COUNTS if mqtt.get(key)]
    return ", ".join([f"{state} for {_duration(mqtt.get('since_s'))}", *counts])


_BROKER_COUNTS = (
    ("queued", "queued"),
    ("dropped", "lost from a full queue"),
    ("results_dropped", "results lost"),
    ("refused", "refused"),
)


def _spool(spool: Mapping[str, Any]) -> str:
    why = f" ({_clean(spool.get('reason'))})" if spool.get("reason") else ""
    lanes = [
        f"{_clean(lane.get('name'))} {lane.get('queued')} waiting"
        + (f", {lane.get('dropped')} lost" if lane.get("dropped") else "")
        for lane in spool.get("lanes") or []
    ]
    return f"in {'memory' if spool.get('where') == 'memory' else 'the store'}{why}: {'; '.join(lanes) or 'empty'}"


def _map(report: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = report.get(key)
    return value if isinstance(value, Mapping) else {}


def _count(camera: Mapping[str, Any], key: str) -> str:
    value = _map(camera, "frames").get(key)
    return str(sum(value.values()) if isinstance(value, Mapping) else "-" if value is None else value)


def _number(value: object, digits: int) -> str:
    return f"{value:.{digits}f}" if isinstance(value, (int, float)) else "-"


def _duration(seconds: object) -> str:
    if not isinstance(seconds, (int, float)):
        return "-"
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    hours, days = whole // 3600 % 24, whole // 86400
    return f"{days} d {hours} h" if days else f"{hours} h {whole % 3600 // 60} min"


def _clean(value: object) -> str:
    """Text for a terminal: what a camera says may hold escape sequences."""
    return "".join(char if char.isprintable() else "?" for char in str(value))


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[int] = ()) -> list[str]:
    every = [header, *rows]
    widths = [max(len(row[column]) for row in every) for column in range(len(header))]
    to_right = set(right)
    lines = []
    for row in every:
        cells = (
            cell.rjust(width) if column in to_right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join(cells).rstrip())
    return lines
