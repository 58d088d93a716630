"""`edge-runtime bench cameras`: parsing and printing."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from edge_runtime.cli.numbers import count, positive
from edge_runtime.errors import EXIT_DONE, CameraError, UsageError

if TYPE_CHECKING:
    from edge_runtime.bench.cameras import CamerasBench, Cost

_TEXT = """Real decoding and real inference on this machine: cameras that show a clip as if it were live, first one of
them with every frame wanted, then one and many with a few frames a second wanted of each. CPU per completed frame is
split into decoding and all the rest. Each load runs in a process of its own, in turn, several times; medians count."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `bench cameras` takes."""
    parser.description = _TEXT
    parser.add_argument("--cameras", type=count, nargs="+", default=[1, 32], metavar="N", help="default: 1 32")
    parser.add_argument("--fps", type=positive, default=2.0, metavar="F", help="wanted of each (%(default)s)")
    parser.add_argument("--clip", type=Path, metavar="FILE", help="what the cameras show (default: the bundled clip)")
    parser.add_argument("--bundle", default="bundled:centernet", metavar="DIR", help="default: %(default)s")
    parser.add_argument("--variant", metavar="NAME", help="default: the bundle's last, by custom the lightest")
    parser.add_argument(
        "--isolation", choices=("thread", "process"), default="thread", help="where cameras are read (%(default)s)"
    )
    parser.add_argument("--seconds", type=positive, default=15.0, metavar="S", help="of each run (%(default)s)")
    parser.add_argument("--repeats", type=count, default=3, metavar="N", help="medians are over these (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Run the parsed benchmark; returns the exit code. Raises EdgeError."""
    from edge_runtime.app.models import open_bundle
    from edge_runtime.bench.cameras import Load, Plan, measure_cameras
    from edge_runtime.bundled import bundled_media
    from edge_runtime.camera.media import probe

    clip = args.clip or bundled_media("vtest")
    try:
        probe(f"file:{clip.resolve()}")
    except CameraError as error:
        raise UsageError(error.message, code=error.code, where=str(clip), remedy="give a video file") from error
    bundle = open_bundle(args.bundle)
    known = bundle.variants_for("onnxruntime")
    variant = args.variant or known[-1]
    if variant not in known:
        remedy = f"any of {', '.join(known)}"
        raise UsageError(f"{variant!r} is not in the bundle", where="--variant", remedy=remedy)

    def progress(what: str) -> None:
        if sys.stderr.isatty():
            print(f"\r{what:30}", end="", file=sys.stderr, flush=True)

    loads = [Load(1, None), *(Load(number, args.fps) for number in args.cameras)]
    plan = Plan(loads, variant, args.seconds, args.repeats, args.isolation)
    result = measure_cameras(bundle, clip, plan, progress=progress)
    print(json.dumps(result.as_dict(), indent=2) if args.json else _table(result))
    return EXIT_DONE


def _table(result: CamerasBench) -> str:
    more = result.rss_mb_per_camera()
    return "\n".join(
        [
            f"{result.bundle} {result.variant}; medians of {result.repeats}",
            "cameras        completed   of wanted        us a frame: decoding   the rest   "
            "decoding, cores   not decoded   RSS MB",
            *(_line(each) for each in result.costs),
            *([] if more is None else [f"one camera more: {more:.1f} MB"]),
        ]
    )


def _line(each: Cost) -> str:
    shares = "-" if each.least_share is None else f"{each.least_share:.2f} to {each.most_share:.2f}"
    return (
        f"{each.load!s:14} {each.completed:9.0f}   {shares:14} {each.decode_us:22.0f} {each.rest_us:10.0f}   "
        f"{each.decode_cores:15.3f}   {each.not_decoded:11.0%}   {each.rss_mb:6.0f}"
    )
