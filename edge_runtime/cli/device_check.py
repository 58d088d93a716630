"""`edge-runtime device-check`: what only a real device can show, and a report to send. Parsing and printing."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_runtime.cli.build import told as progress_told
from edge_runtime.cli.control import STORE_SOCKET, clean
from edge_runtime.cli.numbers import count
from edge_runtime.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_REFUSED, EngineError, NotThereError

if TYPE_CHECKING:
    from edge_runtime.app.device_check import DeviceCheck
    from edge_runtime.app.device_check_report import Outcome
    from edge_runtime.engine.bundle import Bundle
    from edge_runtime.engine.tensorrt.build import Progress
    from edge_runtime.engine.tensorrt.probe import Here

_RELOADS = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `device-check` its options."""
    parser.add_argument("--report", type=Path, metavar="FILE", help="write a report into this file, to be sent")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON document")
    parser.add_argument("--bundle", default="bundled:centernet", metavar="DIR", help="default: bundled:centernet")
    parser.add_argument("--variant", default="auto", metavar="V", help="one of its variants (default: the first)")
    parser.add_argument("--reloads", type=count, default=_RELOADS, metavar="N", help=f"default {_RELOADS}")
    help_store = "where plans are, and are built into (default: the daemon's store where it can be written to)"
    parser.add_argument("--store", type=Path, metavar="DIR", help=help_store)


def run(args: argparse.Namespace) -> int:
    """Check, print and write. Raises EdgeError."""
    from edge_runtime.app.device_check import DeviceCheck, writable_store
    from edge_runtime.app.models import open_bundle
    from edge_runtime.engine.tensorrt.build import look_at_device
    from edge_runtime.engine.tensorrt.probe import NO_DEVICE

    bundle = open_bundle(args.bundle)
    variant = bundle.variant(args.variant, "tensorrt").name
    try:
        here = look_at_device()
    except EngineError as error:
        if error.code not in NO_DEVICE:
            raise
        raise _no_device(args, bundle, variant, error) from None
    outcomes: list[Outcome] = []
    interrupted = False
    with writable_store(args.store or STORE_SOCKET.parent) as store:
        check = DeviceCheck(bundle, variant, store, here, args.reloads, on_progress=_Shown(variant))
        try:
            _carry_out(check, outcomes, show=not args.json)
        except KeyboardInterrupt:
            interrupted = True
    _report(args, outcomes, here, bundle, variant, complete=not interrupted)
    if interrupted:
        return EXIT_INTERRUPTED
    return EXIT_REFUSED if any(each.status == "failed" for each in outcomes) else EXIT_DONE


def _carry_out(check: DeviceCheck, outcomes: list[Outcome], *, show: bool) -> None:
    running = check.run()
    try:
        for outcome in running:
            outcomes.append(outcome)
            if show:
                print(line(outcome), flush=True)
    finally:
        running.close()


def _no_device(args: argparse.Namespace, bundle: Bundle, variant: str, error: EngineError) -> NotThereError:
    """What would be done on a device, told; the error then says why it is not."""
    from edge_runtime.app.device_check import WOULD
    from edge_runtime.app.device_check_report import Outcome

    outcomes = [Outcome(name, "skipped", f"would {what}") for name, what in WOULD.items()]
    if not args.json:
        for name, what in WOULD.items():
            print(f"{name}: would {what}")
    _report(args, outcomes, None, bundle, variant, complete=False, error=error)
    return NotThereError(error.message, code=error.code, where=error.where, remedy=error.remedy)


def _report(
    args: argparse.Namespace,
    outcomes: list[Outcome],
    here: Here | None,
    bundle: Bundle,
    variant: str,
    *,
    complete: bool,
    error: EngineError | None = None,
) -> None:
    from edge_runtime.app.device_check_report import document, save

    told = {"name": bundle.name, "digest": bundle.digest, "variant": variant}
    device = None if here is None else asdict(here)
    report: dict[str, Any] = document(outcomes, device, told, complete=complete, now=time.time, error=error)
    if args.json:
        print(json.dumps(report, indent=1))
    if args.report is not None:
        save(report, args.report)
        print(f"report: {args.report}", file=sys.stderr)


def line(outcome: Outcome) -> str:
    """A check's end in one line."""
    took = f" ({outcome.took_s:.1f} s)" if outcome.took_s >= 1 else ""
    return f"{outcome.name}: {outcome.status}: {clean(outcome.words)}{took}"


class _Shown:
    """Says on standard error that a build has begun, and how long it may take."""

    def __init__(self, variant: str) -> None:
        self._variant = variant
        self._phase = ""

    def __call__(self, progress: Progress) -> None:
        phase = progress.phase.partition(":")[0]
        if phase != self._phase:
            self._phase = phase
            print(progress_told(self._variant, progress), file=sys.stderr, flush=True)
