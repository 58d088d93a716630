"""`edge-runtime bench telemetry`: parsing and printing."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from edge_runtime.cli.numbers import positive
from edge_runtime.errors import EXIT_DONE, EXIT_INTERRUPTED, UsageError

if TYPE_CHECKING:
    from edge_runtime.bench.telemetry import TelemetryBench
    from edge_runtime.bench.telemetry_faults import Faults
    from edge_runtime.bench.telemetry_figures import Backlog, Filled, Wear

_TEXT = """A daemon whose engine answers at once, a real broker (mosquitto, which has to be installed) and a line
between the two: frames per second while the broker is killed or frozen, or the line swallows everything, is slow or
refuses, and without a fault in between. Then a start with a backlog, delays while it drains, bytes to disk and to the
broker, and a spool that is full."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `bench telemetry` takes."""
    parser.description = _TEXT
    parser.add_argument("--quick", action="store_true", help="shorter phases and a smaller backlog: a few minutes")
    parser.add_argument("--seconds", type=positive, metavar="S", help="of each phase (30; 5 with --quick)")
    parser.add_argument(
        "--faults", nargs="*", metavar="NAME", help="these alone, or none: then only the figures (default: all)"
    )
    parser.add_argument("--no-figures", action="store_true", help="the faults alone")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Run the parsed benchmark; returns the exit code. Raises EdgeError."""
    from edge_runtime.bench.telemetry import QUICK, Plan, measure_telemetry
    from edge_runtime.bench.telemetry_faults import FAULTS

    plan = QUICK if args.quick else Plan()
    if args.seconds is not None:
        plan = replace(plan, seconds=args.seconds)
    if args.faults is not None:
        for name in args.faults:
            if name not in FAULTS:
                known = ", ".join(FAULTS)
                raise UsageError(f"{name!r} is no fault", where="--faults", remedy=f"any of {known}")
        plan = replace(plan, faults=tuple(args.faults))
    if args.no_figures:
        plan = replace(plan, rows=0, windows=0, cap=False)

    def progress(what: str) -> None:
        if sys.stderr.isatty():
            print(f"\r{what:24}", end="", file=sys.stderr, flush=True)

    # what fails here fails on purpose
    log = logging.getLogger("edge_runtime")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        result = measure_telemetry(plan, progress=progress)
    finally:
        log.setLevel(level)
    print(json.dumps(result.as_dict(), indent=2) if args.json else table(result))
    return EXIT_INTERRUPTED if result.interrupted else EXIT_DONE


def table(result: TelemetryBench) -> str:
    """What was measured, for people."""
    lines: list[str] = []
    if result.faults is not None:
        lines += [*_fault_lines(result.faults), ""]
    if result.backlog is not None:
        lines += [*_backlog_lines(result.backlog), ""]
    if result.wear:
        lines += [*_wear_lines(result.wear), ""]
    if result.filled is not None:
        lines += [*_filled_lines(result.filled), ""]
    if result.interrupted:
        lines += ["interrupted: the rest was not measured", ""]
    return "\n".join(lines[:-1])


def _fault_lines(faults: Faults) -> list[str]:
    return [
        f"{faults.cameras} cameras at {faults.fps:g} fps, every result published; frames per second",
        f"  {'broker':12} {'seconds':>8} {'frames/s':>9} {'of fine':>8} {'p99 ms':>8}",
        *(
            f"  {each.name:12} {each.seconds:8.1f} {each.frames_hz:9.2f} {each.of_fine:8.4f} {_number(each.p99_ms):>8}"
            for each in faults.phases
        ),
        f"  results: {faults.made} made, {faults.arrived} arrived, {faults.dropped} counted as dropped, "
        f"{faults.untold} handed to connections that broke",
    ]


def _backlog_lines(backlog: Backlog) -> list[str]:
    def delays(what: str, found: tuple[float, float] | None, more: str = "") -> str:
        return f"  {what:16} " + (
            "none came" if found is None else f"p50 {found[0]:.0f} ms, p99 {found[1]:.0f} ms{more}"
        )

    return [
        f"started with {backlog.rows} windows waiting: {backlog.start_s:.2f} s",
        f"while they drain, {backlog.drained_hz:g} a second, for {backlog.seconds:g} s; from made to arrived:",
        delays("live windows", backlog.live_ms, f", {backlog.live_lost} lost"),
        delays("events", backlog.event_ms),
    ]


def _wear_lines(wear: list[Wear]) -> list[str]:
    return [
        f"a window, means of {wear[0].windows}; a day: every 10 s",
        f"  {'cameras':>7} {'broker':7} {'JSON B':>8} {'written B':>10} {'MB a day':>9} {'sent B':>8}",
        *(
            f"  {each.cameras:7d} {each.broker:7} {each.payload_bytes:8d} {_count(each.written_bytes):>10} "
            f"{_number(each.written_mb_a_day):>9} {_count(each.uplink_bytes):>8}"
            for each in wear
        ),
    ]


def _filled_lines(filled: Filled) -> list[str]:
    return [
        f"a spool of {filled.cap_bytes / 1e6:.2f} MB given {filled.windows} windows: at most "
        f"{filled.file_bytes / 1e6:.2f} MB, and {filled.log_bytes / 1e6:.2f} MB of write-ahead log",
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)
