"""`edge-runtime prepare ...`: parsing and printing."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from edge_runtime.errors import EXIT_DONE, NotThereError
from edge_runtime.records.spec import Color, Layout, Resize

if TYPE_CHECKING:
    from edge_runtime.engine.probe import ReadImage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `prepare` its sub-commands."""
    commands = parser.add_subparsers(dest="prepare_command", required=True, metavar="COMMAND")
    _add_import(commands.add_parser("import", help="make a bundle of an ONNX model", description=_IMPORT))


_IMPORT = """Make a bundle of an ONNX model: checks that it loads and runs, fills in what is usual for its
layout (and says so), and writes OUT_DIR in one step."""


def _size(text: str) -> tuple[int, int]:
    sides = text.lower().split("x")
    if len(sides) not in (1, 2) or not all(side.isdecimal() and int(side) > 0 for side in sides):
        raise argparse.ArgumentTypeError(f"{text!r} is not WIDTHxHEIGHT in px, such as 416x416")
    return int(sides[0]), int(sides[-1])


def _add_import(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL.onnx", type=Path)
    parser.add_argument("out_dir", metavar="OUT_DIR", type=Path, help="the bundle's folder; must not exist")
    parser.add_argument("--labels", type=Path, required=True, metavar="FILE", help="class names, one a line, or JSON")
    parser.add_argument("--layout", choices=get_args(Layout), help="how the outputs are read")
    parser.add_argument(
        "--size", type=_size, action="append", default=[], metavar="WxH", help="input size; again for more variants"
    )
    parser.add_argument("--name", help="the bundle's name (default: OUT_DIR's)")
    parser.add_argument("--version", default="1", help="the bundle's version")
    parser.add_argument("--licence", metavar="TEXT", help="the licence of the weights")
    parser.add_argument("--color", choices=get_args(Color))
    parser.add_argument("--resize", choices=get_args(Resize))
    parser.add_argument("--pad", type=int, metavar="0-255", help="grey around a letterbox")
    parser.add_argument("--scale", type=float, help="value = (pixel * scale - mean) / std")
    parser.add_argument("--mean", type=float, nargs=3, metavar="M", help="per channel, in the order of --color")
    parser.add_argument("--std", type=float, nargs=3, metavar="S", help="per channel, in the order of --color")
    parser.add_argument("--short-side", type=int, metavar="PX", help="with --resize crop: scale to this first")
    parser.add_argument("--score-threshold", type=float, default=0.3, metavar="0-1")
    parser.add_argument("--nms-iou", type=float, default=0.6, metavar="0-1")
    parser.add_argument("--max-detections", type=int, default=300, metavar="N")
    parser.add_argument("--precision", choices=("fp32", "fp16", "int8"), help="default: seen from the graph")
    parser.add_argument(
        "--golden", type=Path, action="append", default=[], metavar="PICTURE", help="a golden picture; again for more"
    )
    parser.add_argument("--tolerance", type=float, default=0.02, help="allowed deviation from the golden outputs")
    parser.add_argument("--overwrite", action="store_true", help="replace the bundle in OUT_DIR")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace, read_image: ReadImage | None = None) -> int:
    """Run the parsed command; returns the exit code. `read_image` opens golden pictures. Raises EdgeError."""
    assert args.prepare_command == "import"
    return _run_import(args, read_image)


def _run_import(args: argparse.Namespace, read_image: ReadImage | None) -> int:
    try:
        from edge_runtime.prepare.importer import import_model
    except ImportError as error:
        raise NotThereError(
            f"`prepare` needs {error.name}", code="not_installed", remedy="pip install 'edge-runtime[prepare]'"
        ) from None
    result = import_model(
        args.model,
        args.out_dir,
        labels=args.labels,
        name=args.name,
        version=args.version,
        layout=args.layout,
        sizes=args.size,
        color=args.color,
        resize=args.resize,
        pad=args.pad,
        scale=args.scale,
        mean=tuple(args.mean) if args.mean else None,
        std=tuple(args.std) if args.std else None,
        short_side=args.short_side,
        score_threshold=args.score_threshold,
        nms_iou=args.nms_iou,
        max_detections=args.max_detections,
        precision=args.precision,
        licence=args.licence,
        pictures=args.golden,
        read_image=read_image,
        tolerance=args.tolerance,
        overwrite=args.overwrite,
    )
    bundle = result.bundle
    if args.json:
        document = {
            "bundle": str(bundle.root),
            "name": bundle.name,
            "digest": bundle.digest,
            "task": bundle.manifest.bundle.task,
            "layout": bundle.manifest.output.layout,
            "variants": list(bundle.variants),
            "notes": list(result.notes),
        }
        json.dump(document, sys.stdout, indent=2)
        print()
        return EXIT_DONE
    for note in result.notes:
        print(f"note: {note}", file=sys.stderr)
    print(f"{bundle.root}: {bundle.name} {bundle.digest}, variants {', '.join(bundle.variants)}")
    return EXIT_DONE
