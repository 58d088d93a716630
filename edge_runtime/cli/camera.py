"""`edge-runtime camera`: which cameras the running daemon has, and other ones for it while it runs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edge_runtime.cli.control import add_daemon_arguments, clean, execute, find_daemon
from edge_runtime.cli.status import duration_text, table_lines, touched_text
from edge_runtime.errors import EXIT_DONE, UsageError

OUTCOME_S = 30.0
_USAGE = frozenset({"invalid", "unknown_camera", "unknown_command"})
_FAILED = frozenset({"busy", "change_failed", "in_progress", "internal", "stopping"})
"""Codes of errors that are no judgement of what was asked for: all others are a refusal."""
MAX_URL_BYTES = 16 * 1024

_NONE = "none"
_KEYS: Mapping[str, tuple[str, str, str]] = {
    "fps": ("F", "number", "frames per second wanted"),
    "min_fps": ("F", "number", "frames per second that are kept for as long as a budget allows any"),
    "priority": ("N", "whole", "cameras with a higher one go first"),
    "pace": ("realtime|max", "text", "files only: how fast they play"),
    "loop": ("true|false", "switch", "files only: whether to start again at the end"),
    "transport": ("tcp|udp", "text", "RTSP only"),
    "stall_s": ("S", "number", "seconds without a picture after which it is opened anew"),
    "backend": ("auto|pyav|gstreamer", "text", "what reads it"),
    "isolation": ("thread|process", "text", "where it is read"),
    "ca_file": ("FILE", "text", "certificates that must have signed the camera's, an absolute path"),
}
"""The keys of [[camera]] that are options: how the value is called, what it is, what it means."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `camera` its actions."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def action(name: str, what: str, *, named: bool = True) -> argparse.ArgumentParser:
        found = actions.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
        add_daemon_arguments(found)
        found.add_argument("--json", action="store_true", help="print one JSON document")
        if named:
            found.add_argument("name", metavar="NAME", help="a camera's name")
        return found

    action("list", "the cameras in force, and which of them commands have touched", named=False)
    add = action("add", "a new camera, until it is removed or reset")
    add.add_argument("url", metavar="URL", nargs="?", help="its address; -: read it from standard input")
    _add_keys(add)
    change = action("change", "other values for keys of a camera; `none` takes a key out")
    change.add_argument("--url", metavar="URL", help="another address; -: read it from standard input")
    _add_keys(change)
    action("remove", "remove a camera; one of the configuration comes back with `reset`")
    action("pause", "bring no pictures until `resume`")
    action("resume", "go on")
    cap = action("cap", "let it bring at most so many frames per second")
    cap.add_argument("fps", metavar="FPS", type=_number, help="a number, or none to lift the cap")
    reset = action("reset", "back to what the configuration says", named=False)
    which = reset.add_mutually_exclusive_group(required=True)
    which.add_argument("name", metavar="NAME", nargs="?", help="a camera's name")
    which.add_argument("--all", action="store_true", help="everything that commands did to cameras")


def _add_keys(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url-file",
        metavar="FILE",
        help="read the address from the only line of a file (-: standard input): a password on the command line is "
        "there for everybody to see (ps)",
    )
    parser.add_argument(
        "--model", action="append", default=None, metavar="M", help="a model that sees it; may be given several times"
    )
    kinds = {"number": _number, "whole": _whole, "switch": _switch, "text": _text}
    for key, (value, kind, what) in _KEYS.items():
        option = f"--{key.replace('_', '-')}"
        parser.add_argument(option, dest=key, type=kinds[kind], default=..., metavar=value, help=what)


def _number(text: str) -> float | None:
    if text == _NONE:
        return None
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor none") from None


def _whole(text: str) -> int | None:
    if text == _NONE:
        return None
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number nor none") from None


def _switch(text: str) -> bool | None:
    known = {"true": True, "false": False, _NONE: None}
    if text not in known:
        raise argparse.ArgumentTypeError(f"{text!r} is none of true, false and none")
    return known[text]


def _text(text: str) -> str | None:
    return None if text == _NONE else text


def run(args: argparse.Namespace) -> int:
    """Do it and print what was done. Raises EdgeError where everything is as it was, NotThereError where there is no
    daemon."""
    wanted: dict[str, Any] = {"action": args.action}
    if args.action == "add":
        wanted["camera"] = {"name": args.name, **_keys(args)}
        if "url" not in wanted["camera"]:
            raise UsageError("no URL was given", where="URL", remedy="edge-runtime camera add NAME URL")
    elif args.action == "change":
        wanted["name"], wanted["camera"] = args.name, _keys(args)
        if not wanted["camera"]:
            raise UsageError("nothing is to change", where="change", remedy="name a key, as --fps 5")
    elif args.action != "list" and args.name is not None:
        wanted["name"] = args.name
    if args.action == "cap":
        wanted["fps"] = args.fps
    place, report = find_daemon(args)
    if args.action == "list":
        cameras = report.get("cameras")
        lines = [*_listed(cameras), *filter(None, [touched_text(report)])]
        print(json.dumps(cameras, indent=2) if args.json else "\n".join(lines))
        return EXIT_DONE
    result = execute(place, "camera", wanted, usage=_USAGE, failed=_FAILED, timeout_s=OUTCOME_S)
    print(json.dumps(result, indent=2) if args.json else describe(result))
    return EXIT_DONE


def describe(result: Mapping[str, Any]) -> str:
    """The outcome for a person. Read leniently: the daemon may be older or newer than we are."""
    lines = [clean(each) for each in result.get("done") or []] or ["nothing to do: it was so already"]
    return "\n".join([*lines, *(f"  note: {clean(note)}" for note in result.get("notes") or [])])


def _keys(args: argparse.Namespace) -> dict[str, Any]:
    """The keys that the options name."""
    keys = {key: value for key in _KEYS if (value := getattr(args, key)) is not ...}
    if args.model is not None:
        keys["model"] = args.model
    if args.url is not None and args.url_file is not None:
        raise UsageError("give the address once", where="--url-file", remedy="leave URL or --url-file out")
    source = args.url_file if args.url_file is not None else "-" if args.url == "-" else None
    if source is not None:
        keys["url"] = _read_url(source)
    elif args.url is not None:
        from edge_runtime.source_url import redact_url

        if redact_url(args.url) != args.url:
            note = "a password on the command line is there for everybody to see (ps); --url-file FILE hides it"
            print(f"edge-runtime: note: {note}", file=sys.stderr)
        keys["url"] = args.url
    return keys


def _read_url(source: str) -> str:
    """The only line of a file, or of standard input."""
    where = "standard input" if source == "-" else source
    try:
        if source == "-":
            text = sys.stdin.read(MAX_URL_BYTES + 1)
        else:
            with Path(source).open(encoding="utf-8") as stream:
                text = stream.read(MAX_URL_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror or error}", where=where) from None
    except ValueError:
        raise UsageError("is no UTF-8 text", where=where) from None
    lines = text.split("\n") if len(text) <= MAX_URL_BYTES else []
    if len(lines) not in (1, 2) or lines[1:] not in ([], [""]) or not lines[0].strip():
        raise UsageError("has to hold the address as its only line", where=where)
    return lines[0].rstrip("\r")


def _listed(cameras: object) -> list[str]:
    rows: dict[str, tuple[str, ...]] = {}
    models: dict[str, list[str]] = {}
    for each in cameras if isinstance(cameras, list) else []:
        if isinstance(each, Mapping):
            name = clean(each.get("name"))
            models.setdefault(name, []).append(clean(each.get("model")))
            rows[name] = (
                clean(each.get("state")),
                duration_text(each.get("since_s")),
                _rate(each.get("fps_wanted")),
                _rate(each.get("cap_fps")),
                clean(each.get("source") or "-"),
                clean(each.get("address") or "-"),
                clean(each.get("reason") or ""),
            )
    header = ("CAMERA", "MODEL", "STATE", "SINCE", "WANTED", "CAP", "SOURCE", "ADDRESS", "REASON")
    return table_lines(header, [(name, ",".join(models[name]), *row) for name, row in rows.items()], right=range(3, 6))


def _rate(fps: object) -> str:
    return f"{fps:g}" if isinstance(fps, (int, float)) else "-"
