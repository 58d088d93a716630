"""`edge-runtime bench input` (scripts/benchmark input): parsing and printing."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from itertools import islice

from edge_runtime.cli.numbers import count
from edge_runtime.errors import EXIT_DONE, NotThereError

_INPUT = """CPU time of a frame by the format that a model takes, write and run, on one thread: float32, and the bytes
that `prepare fuse` makes it take, frame by frame in turn. Only the ratios can be compared between runs."""
_FRAMES = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `bench input` its arguments."""
    parser.description = _INPUT
    parser.add_argument("--bundle", default="bundled:centernet", metavar="DIR", help="default: %(default)s")
    parser.add_argument(
        "--variant", action="append", default=[], metavar="V", help="default: all of float32; again for more"
    )
    parser.add_argument(
        "--frames",
        nargs="+",
        default=["bundled:vtest"],
        metavar="SRC",
        help="clips (also bundled:NAME), pictures or folders of them (%(default)s)",
    )
    parser.add_argument("--repeats", type=count, default=60, metavar="N", help="frames of each (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Measure and print; returns the exit code. Raises EdgeError."""
    try:
        from edge_runtime.prepare.fuse import float_variants, input_costs
    except ImportError as error:
        raise NotThereError(
            f"`bench input` needs {error.name}", code="not_installed", remedy="pip install 'edge-runtime[prepare]'"
        ) from None
    from edge_runtime.app.halving import calibration_pictures
    from edge_runtime.app.models import open_bundle

    bundle = open_bundle(args.bundle)
    frames = [each.read() for each in islice(calibration_pictures(args.frames), _FRAMES)]
    costs = {
        name: input_costs(bundle, name, frames, repeats=args.repeats) for name in args.variant or float_variants(bundle)
    }
    if args.json:
        print(json.dumps({name: [asdict(cost) for cost in measured] for name, measured in costs.items()}, indent=2))
        return EXIT_DONE
    for name, measured in costs.items():
        print(f"{bundle.name} {name}")
        for cost in measured:
            print(f"  {cost.pixel:8} {cost}")
    return EXIT_DONE
