"""`edge-runtime prepare quantize`: arguments, progress and printing."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_runtime.cli.numbers import count, positive, share
from edge_runtime.cli.prepare_evaluate import progress_on
from edge_runtime.cli.prepare_judged import add_judged
from edge_runtime.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_REFUSED, NotThereError
from edge_runtime.source_url import redact_url

if TYPE_CHECKING:
    from edge_runtime.prepare.quantize_records import Artefact, QuantizeResult, Tried

_QUANTIZE = """Make a bundle with INT8 variants that are proved: what stays in float is searched on --calibrate pictures
against the float model, and what comes of it is judged once, on pictures that were not searched with. A variant that
may lose more than --max-loss is not written, and the exit code is 3. Says what INT8 brings on this machine, even if
that is nothing, and writes a page about it."""


def add_quantize(parser: argparse.ArgumentParser) -> None:
    """Give `prepare quantize` its arguments."""
    parser.description = _QUANTIZE
    parser.add_argument("bundle", metavar="BUNDLE", help="a bundle's folder, or bundled:NAME")
    parser.add_argument(
        "out_dir", metavar="OUT_DIR", type=Path, nargs="?", help="the new bundle's folder (BUNDLE-int8, beside it)"
    )
    parser.add_argument(
        "--calibrate",
        nargs="+",
        required=True,
        metavar="SRC",
        help="500 to 1,000 varied pictures such as the cameras see: files, folders, clips (also bundled:NAME), a "
        "camera's URL (rtsp://..., v4l2:/dev/video0, csi:0), or with --config a camera's name",
    )
    parser.add_argument(
        "-c",
        "--config",
        type=Path,
        metavar="FILE",
        help="the configuration that names the cameras: they are opened beside the daemon that may run with it",
    )
    parser.add_argument(
        "--search-loss",
        type=share,
        metavar="0-1",
        help="what the search may lose on calibration pictures against the float model's own answers, relative: less "
        "keeps more in float and passes more surely, more is faster (default: --max-loss)",
    )
    parser.add_argument(
        "--family",
        choices=("both", "onnxruntime", "tensorrt"),
        default="both",
        help="for which backend (%(default)s): what is fast on one is slow on the other",
    )
    parser.add_argument(
        "--method",
        choices=("auto", "minmax", "entropy", "percentile", "mse"),
        default="auto",
        help="how ranges are chosen (%(default)s: the one that loses least)",
    )
    parser.add_argument("--fps", type=positive, default=2.0, metavar="F", help="of a camera, a second (%(default)g)")
    parser.add_argument("--frames", type=count, default=500, metavar="N", help="at most, of a camera (%(default)s)")
    parser.add_argument("--seconds", type=positive, metavar="S", help="at most, of a camera")
    parser.add_argument("--minutes", type=positive, metavar="M", help="at most, for the search of each artefact")
    parser.add_argument(
        "--work",
        type=Path,
        metavar="DIR",
        help="where what was done is kept, so that the same command goes on after an interruption (beside OUT_DIR, and "
        "removed in the end)",
    )
    add_judged(parser)


def run_quantize(args: argparse.Namespace) -> int:
    """Run the parsed command; returns the exit code. Raises EdgeError."""
    try:
        from edge_runtime.app import quantizing
        from edge_runtime.prepare.quantize_records import SEARCHING
    except ImportError as error:
        raise NotThereError(
            f"`prepare` needs {error.name}", code="not_installed", remedy="pip install 'edge-runtime[prepare]'"
        ) from None
    out_dir = args.out_dir or quantizing.default_out_dir(args.bundle)
    try:
        with progress_on(sys.stderr) as progress:

            def show(what: str, done: int, of: int) -> None:
                progress.show(what, done, of, "steps" if what.startswith(SEARCHING) else "pictures")

            result = quantizing.quantize(
                args.bundle,
                out_dir,
                calibrate=args.calibrate,
                evaluate=args.evaluate,
                config=args.config,
                variants=args.variant,
                families=quantizing.FAMILIES if args.family == "both" else (args.family,),
                method=args.method,
                max_loss=args.max_loss,
                search_loss=args.search_loss,
                accept=args.accept,
                every=args.every,
                fps=args.fps,
                frames=args.frames,
                seconds=args.seconds,
                minutes=args.minutes,
                work=args.work,
                overwrite=args.overwrite,
                seed=args.seed,
                resamples=args.resamples,
                progress=show,
            )
    except KeyboardInterrupt:
        work = args.work or quantizing.default_work(out_dir)
        again = shlex.join(["edge-runtime", *map(redact_url, sys.argv[1:])])
        kept = f"what was done is in {work}, and this goes on: {again}" if work.is_dir() else "nothing was done yet"
        print(f"edge-runtime: interrupted; {kept}", file=sys.stderr)
        return EXIT_INTERRUPTED
    if args.json:
        json.dump(_document(result), sys.stdout, indent=2)
        print()
    else:
        for note in result.notes:
            print(f"note: {note}", file=sys.stderr)
        for artefact in result.artefacts:
            print("\n".join(_table(artefact)))
        print(f"report: {result.report}")
        if (bundle := result.bundle) is not None:
            print(f"{bundle.root}: {bundle.name} {bundle.digest}, variants {', '.join(bundle.variants)}")
    if result.code is None:
        return EXIT_DONE
    for line in _refusal(result):
        print(f"edge-runtime: {line}", file=sys.stderr)
    return EXIT_REFUSED


def _refusal(result: QuantizeResult) -> list[str]:
    lines = [f"{each.name}: {each.told()}" for each in result.refused]
    if not lines:
        lines = [f"{each.name}: {each.searched.said}" for each in result.artefacts]
    if result.bundle is None:
        lines.append("nothing was written: keep float, or see the report for what could be allowed")
    else:
        lines.append(f"the bundle was written without {', '.join(each.name for each in result.refused)}")
    if result.code == "not_enough_data":
        lines.append(f"{_more(result)}; --accept point takes the loss as it was seen")
    return lines


def _more(result: QuantizeResult) -> str:
    gates = [each.gate for each in result.refused if each.gate is not None]
    needed = max((gate.pictures_needed or 0 for gate in gates), default=0)
    about = f"about {needed}" if needed else "more"
    if any(gate.basis == "agreement" for gate in gates):
        often = f" ({needed * 4} of --calibrate, of which every fourth judges)" if needed else ""
        return f"judge by {about} pictures{often}, or by labelled ones: --evaluate"
    return f"evaluate on {about} pictures"


def _table(artefact: Artefact) -> list[str]:
    """What a person reads."""
    searched = artefact.searched
    lines = [f"{artefact.name}, of {artefact.source}", f"  {searched.said}"]
    if artefact.gate is not None:
        lines.append(f"  {artefact.told()}")
    front = [each for each in searched.tried if each.front or each.chosen]
    if front:
        lines.append("  of what was tried, none is better in all than (losses on calibration pictures)")
        lines += [f"    {_point(each)}" for each in front]
    if searched.sensitivities:
        lines.append(f"  most sensitive ({searched.unit})")
        lines += [f"    {value:.4g}  {name}" for name, value in searched.sensitivities[:5]]
    return lines


def _point(each: Tried) -> str:
    speed = ""
    if each.speed is not None and each.latency_ms is not None:
        speed = f", {each.latency_ms:.2f} ms ({each.speed:.2f} x, 90 % {each.speed_low:.2f} to {each.speed_high:.2f})"
    mark = " (chosen)" if each.chosen else ""
    return f"{each.name}: loss {each.loss:.2%}{speed}, {each.size_bytes / 1e6:.2f} MB{mark}"


def _document(result: QuantizeResult) -> dict[str, Any]:
    bundle = result.bundle
    calibration = result.calibration
    return {
        "bundle": None if bundle is None else str(bundle.root),
        "name": None if bundle is None else bundle.name,
        "digest": None if bundle is None else bundle.digest,
        "variants": None if bundle is None else list(bundle.variants),
        "code": result.code,
        "report": str(result.report),
        "calibration": {
            "sha256": calibration.sha256,
            "pictures": calibration.images,
            "unlike": [asdict(each) for each in calibration.unlike],
        },
        "artefacts": [_artefact_document(each) for each in result.artefacts],
        "notes": list(result.notes),
    }


def _artefact_document(artefact: Artefact) -> dict[str, Any]:
    searched = artefact.searched
    return {
        "name": artefact.name,
        "source": artefact.source,
        "family": artefact.family,
        "outcome": artefact.outcome.replace(" ", "_"),
        "said": searched.said,
        "gate": None if artefact.gate is None else artefact.gate.as_dict(),
        "method": searched.method,
        "kept_float": searched.kept_float,
        "improved": list(searched.improved),
        "search_loss": searched.allowed,
        "float_ms": searched.float_ms,
        "tried": [asdict(each) for each in searched.tried],
        "sensitivities": {"unit": searched.unit, "nodes": [list(each) for each in searched.sensitivities]},
    }
