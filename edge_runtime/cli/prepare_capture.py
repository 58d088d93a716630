"""`edge-runtime prepare capture`: arguments, progress and printing."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from edge_runtime.cli.numbers import count, positive
from edge_runtime.cli.prepare_evaluate import progress_on
from edge_runtime.errors import EXIT_DONE, EXIT_INTERRUPTED, NotThereError, UsageError

_CAPTURE = """Keep pictures of a clip or a camera that are unlike each other, to calibrate with (--calibrate OUT_DIR).
Frames that show what is there already are left out; when there are --count, a new one takes the place of one of the two
most alike. The same command goes on with a folder that it made; ctrl-C ends it with all that was kept."""


def add_capture(parser: argparse.ArgumentParser) -> None:
    """Give `prepare capture` its arguments."""
    parser.description = _CAPTURE
    parser.add_argument(
        "source",
        metavar="SRC",
        help="a clip, a folder of pictures, bundled:NAME or a camera's URL (-: read it from standard input); with "
        "--config the name of a camera",
    )
    parser.add_argument("out_dir", metavar="OUT_DIR", type=Path, help="folder of the pictures and capture.json")
    parser.add_argument(
        "-c",
        "--config",
        type=Path,
        metavar="FILE",
        help="the configuration that names the camera: it is opened beside the daemon that may run with it",
    )
    parser.add_argument("--count", type=count, default=500, metavar="N", help="pictures to keep (%(default)s)")
    parser.add_argument("--max-mb", type=positive, default=2000.0, metavar="MB", help="of disk (%(default)g)")
    parser.add_argument("--every", type=count, default=1, metavar="N", help="of files, every Nth frame (%(default)s)")
    parser.add_argument(
        "--fps", type=positive, default=2.0, metavar="F", help="of a camera, frames a second (%(default)g)"
    )
    parser.add_argument(
        "--for",
        dest="within_s",
        type=positive,
        metavar="S",
        help="of a camera, seconds from its first picture (default: until there are --count pictures)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run_capture(args: argparse.Namespace) -> int:
    """Run the parsed command; returns the exit code, 130 after ctrl-C. Raises EdgeError."""
    try:
        from edge_runtime.app.capturing import capture_source
        from edge_runtime.prepare.capture import MANIFEST, PRIVACY
    except ImportError as error:
        raise NotThereError(
            f"`prepare` needs {error.name}", code="not_installed", remedy="pip install 'edge-runtime[prepare]'"
        ) from None
    print(f"note: {PRIVACY}", file=sys.stderr)
    try:
        with progress_on(sys.stderr) as progress:
            result = capture_source(
                _address(args.source),
                args.out_dir,
                config=args.config,
                count=args.count,
                max_bytes=int(args.max_mb * 1e6),
                every=args.every,
                fps=args.fps,
                within_s=args.within_s,
                progress=lambda looked_at, kept: progress.show(f"{kept} kept, looked at", looked_at, 0),
            )
    except KeyboardInterrupt:
        print(f"{args.out_dir}: interrupted; what was kept is there, and the same command goes on", file=sys.stderr)
        return EXIT_INTERRUPTED
    if args.json:
        document: dict[str, Any] = {
            "folder": str(result.folder),
            "manifest": str(result.folder / MANIFEST),
            "looked_at": result.looked_at,
            "before": result.before,
            "closest": None if result.closest is None else round(result.closest, 4),
            "ended": result.ended,
            "pictures": [picture.as_dict() for picture in result.pictures],
        }
        json.dump(document, sys.stdout, indent=2)
        print()
        return EXIT_DONE
    size_mb = sum(picture.size_bytes for picture in result.pictures) / 1e6
    before = f", {result.before} of them from before" if result.before else ""
    print(
        f"{result.folder}: {len(result.pictures)} pictures{before}, {size_mb:.1f} MB, of {result.looked_at} looked at; "
        f"{result.ended}"
    )
    if len(result.pictures) < args.count and result.ended == "the source ended":
        print("note: the others showed nothing new: capture at other times of day, or other cameras", file=sys.stderr)
    return EXIT_DONE


def _address(source: str) -> str:
    """A URL may have a password, which everybody could see on a command line."""
    if source != "-":
        return source
    line = sys.stdin.readline().strip()
    if not line:
        raise UsageError("no URL was given", where="standard input", remedy="write it as the only line")
    return line
