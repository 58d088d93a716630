"""`edge-runtime budget`: what the running daemon holds, and other budgets for it until its next start."""

from __future__ import annotations

import argparse
import json
import math

from edge_runtime.cli.control import add_daemon_arguments, execute, find_daemon
from edge_runtime.cli.status import budget_text
from edge_runtime.errors import EXIT_DONE

_KEYS = ("power_w", "temperature_c", "latency_p99_ms")
_USAGE = frozenset({"invalid", "unknown_command"})
_FAILED = frozenset({"busy", "in_progress", "internal", "stopping"})
"""Codes of errors that are no judgement of the budget: all others are a refusal."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `budget` its options."""
    add_daemon_arguments(parser)
    for option, unit, what in (
        ("--power-w", "W", "watts of the module"),
        ("--temperature-c", "C", "degrees Celsius of the hottest junction"),
        ("--latency-p99-ms", "MS", "ms from capture to result, 99th percentile"),
    ):
        parser.add_argument(option, type=_number_or_none, default=..., metavar=f"{unit}|none", help=what)
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def _number_or_none(text: str) -> float | None:
    if text == "none":
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor none")
    return value


def run(args: argparse.Namespace) -> int:
    """Print the budget in force, changed first if the options say so. Raises EdgeError where it is what it was,
    NotThereError where there is no daemon."""
    wanted = {key: value for key in _KEYS if (value := getattr(args, key)) is not ...}
    place, report = find_daemon(args)
    if wanted:
        result = execute(place, "set-budget", wanted, usage=_USAGE, failed=_FAILED)
        found = report.get("budget")
        report["budget"] = {**(found if isinstance(found, dict) else {}), **result, "set_by": "command"}
    print(json.dumps(report.get("budget"), indent=2) if args.json else f"budget: {budget_text(report)}")
    return EXIT_DONE
