"""`edge-runtime bench surge`: parsing and printing."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from edge_runtime.cli.numbers import count, positive
from edge_runtime.errors import EXIT_DONE, CameraError, UsageError

if TYPE_CHECKING:
    from edge_runtime.bench.surge import Phase, SurgeBench, SurgeRun

_TEXT = """Real inference on this machine: cameras bring 10 % of what the heaviest variant manages, then at once 100 %
and 200 % of it, and 10 % again; under a latency budget with tuner and ladder, and beside it without either. The first
2 s of each phase are left out."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `bench surge` takes."""
    parser.description = _TEXT
    parser.add_argument("--bundle", default="bundled:centernet", metavar="DIR", help="default: %(default)s")
    parser.add_argument("--variants", nargs="+", metavar="NAME", help="the heaviest first (default: all of the bundle)")
    parser.add_argument("--cameras", type=count, default=8, metavar="N", help="default: %(default)s")
    parser.add_argument("--budget-ms", type=positive, default=80.0, metavar="MS", help="of the p99 (%(default)s)")
    parser.add_argument("--seconds", type=positive, default=20.0, metavar="S", help="of each surge (%(default)s)")
    parser.add_argument("--clip", type=Path, metavar="FILE", help="what the cameras show (default: the bundled clip)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Run the parsed benchmark; returns the exit code. Raises EdgeError."""
    from edge_runtime.app.models import open_bundle
    from edge_runtime.bench.surge import Plan, measure_surge
    from edge_runtime.bundled import bundled_media
    from edge_runtime.camera.media import probe

    clip = args.clip or bundled_media("vtest")
    try:
        probe(f"file:{clip.resolve()}")
    except CameraError as error:
        raise UsageError(error.message, code=error.code, where=str(clip), remedy="give a video file") from error
    bundle = open_bundle(args.bundle)
    known = bundle.variants_for("onnxruntime")
    variants = args.variants or known
    for variant in variants:
        if variant not in known:
            remedy = f"any of {', '.join(known)}"
            raise UsageError(f"{variant!r} is not in the bundle", where="--variants", remedy=remedy)

    def progress(what: str) -> None:
        if sys.stderr.isatty():
            print(f"\r{what:12}", end="", file=sys.stderr, flush=True)

    result = measure_surge(bundle, clip, Plan(variants, args.cameras, args.budget_ms, args.seconds), progress=progress)
    print(json.dumps(result.as_dict(), indent=2) if args.json else _table(result))
    return EXIT_DONE


def _table(result: SurgeBench) -> str:
    capacity = ", ".join(f"{variant} {hz:.1f}" for variant, hz in result.capacity_hz.items())
    lines = [
        f"{result.bundle} on {result.lanes} lanes, {result.cameras} cameras with min_fps {result.min_fps:g} each",
        f"  capacity, frames a second: {capacity}",
    ]
    for each in result.runs:
        lines += ["", *_run_lines(each, result.budget_ms)]
    return "\n".join(lines)


def _run_lines(run: SurgeRun, budget_ms: float) -> list[str]:
    budget = f"p99 of at most {budget_ms:g} ms, tuner and ladder" if run.name == "governed" else "no budget, no ladder"
    return [
        f"{run.name}: {budget}",
        f"  {'':12} offered completed   p50 ms   p99 ms  of what could be  least fps  lanes busy  variants",
        *(_phase_line(each) for each in run.phases),
        f"  both surges: p99 {_number(run.surge_p99_ms)} ms, {run.late:.1%} of the frames later than {budget_ms:g} ms",
        f"  with the step from one to the other: p99 {_number(run.through_p99_ms)} ms",
        *(f"  {each.name}: {each.because}" for each in run.phases if run.name == "governed"),
    ]


def _phase_line(each: Phase) -> str:
    variants = ", ".join(f"{name} {share:.0%}" for name, share in each.variants.items())
    return (
        f"  {each.name:12} {each.offered_hz:7.1f} {each.completed_hz:9.1f} {_number(each.p50_ms):>8} "
        f"{_number(each.p99_ms):>8} {each.of_capacity:17.2f} {each.least_fps:10.2f} {each.busy:11.2f}  {variants}"
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
