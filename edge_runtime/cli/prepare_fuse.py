"""`edge-runtime prepare fuse`: arguments and printing."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from edge_runtime.errors import EXIT_DONE, NotThereError

if TYPE_CHECKING:
    from edge_runtime.engine.probe import ReadImage

_FUSE = """Make a bundle whose models take the bytes of a picture: colours, scale and mean are computed in the graph, so
that a GPU does it and fewer bytes go there. Each new model is compared with the one it was made of, on
pictures; exit code 3 where it does not say the same. OUT_DIR is written in one step or not at all. Whether it pays on
this machine's CPU, --pixel auto measures; exit code 3 where it does not."""
_FRAMES = 20
"""Kept in memory for the measurement: they differ as little in cost as in size."""


def add_fuse(parser: argparse.ArgumentParser) -> None:
    """Give `prepare fuse` its arguments."""
    parser.description = _FUSE
    parser.add_argument("bundle", metavar="BUNDLE", help="a bundle's folder, or bundled:NAME")
    parser.add_argument("out_dir", metavar="OUT_DIR", type=Path, help="the new bundle's folder; must not exist")
    parser.add_argument(
        "--pixel",
        required=True,
        choices=("bgr24", "rgba", "nv12", "auto"),
        help="the bytes that the model is to take; auto: what costs the least CPU here, for models that run on it",
    )
    parser.add_argument(
        "--frames",
        nargs="+",
        default=["bundled:vtest"],
        metavar="SRC",
        help="with auto, measure on these: clips (also bundled:NAME), pictures or folders of them (%(default)s)",
    )
    parser.add_argument(
        "--variant", action="append", default=[], metavar="V", help="default: all of float32; again for more"
    )
    parser.add_argument(
        "--images", type=Path, nargs="+", default=[], metavar="PICTURE", help="compare on these (the golden pictures)"
    )
    parser.add_argument("--keep", action="store_true", help="keep the bundle's own variants too, after the new ones")
    parser.add_argument("--overwrite", action="store_true", help="replace the bundle in OUT_DIR")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run_fuse(args: argparse.Namespace, read_image: ReadImage) -> int:
    """Run the parsed command; returns the exit code. Raises EdgeError."""
    try:
        from edge_runtime.prepare.fuse import fuse_bundle
    except ImportError as error:
        raise NotThereError(
            f"`prepare` needs {error.name}", code="not_installed", remedy="pip install 'edge-runtime[prepare]'"
        ) from None
    from edge_runtime.app.halving import calibration_pictures
    from edge_runtime.app.models import open_bundle

    frames = []
    if args.pixel == "auto":
        frames = [each.read() for each in islice(calibration_pictures(args.frames), _FRAMES)]
    result = fuse_bundle(
        open_bundle(args.bundle),
        args.out_dir,
        pixel=args.pixel,
        variants=args.variant,
        pictures=args.images,
        frames=frames,
        keep=args.keep,
        overwrite=args.overwrite,
        read_image=read_image,
    )
    bundle = result.bundle
    if args.json:
        document = {
            "bundle": str(bundle.root),
            "name": bundle.name,
            "digest": bundle.digest,
            "variants": list(bundle.variants),
            "parity": {name: asdict(parity) for name, parity in result.parity.items()},
            "costs": {name: [asdict(cost) for cost in costs] for name, costs in result.costs.items()},
            "notes": list(result.notes),
        }
        json.dump(document, sys.stdout, indent=2)
        print()
        return EXIT_DONE
    for note in result.notes:
        print(f"note: {note}", file=sys.stderr)
    print(f"{bundle.root}: {bundle.name} {bundle.digest}, variants {', '.join(bundle.variants)}")
    return EXIT_DONE
