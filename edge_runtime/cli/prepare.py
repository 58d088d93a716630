"""`edge-runtime prepare ...`: parsing and printing."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from edge_runtime.cli import prepare_capture, prepare_evaluate, prepare_fuse, prepare_half, prepare_quantize
from edge_runtime.errors import EXIT_DONE, NotThereError, UsageError
from edge_runtime.prepare.answers import parse_number, parse_size, told
from edge_runtime.records.spec import Color, Layout, Resize

if TYPE_CHECKING:
    from edge_runtime.engine.probe import ReadImage
    from edge_runtime.prepare.importer import ImportResult
    from edge_runtime.prepare.sanity import SanityReport
    from edge_runtime.prepare.suggest import Question


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `prepare` its sub-commands."""
    commands = parser.add_subparsers(dest="prepare_command", required=True, metavar="COMMAND")
    _add_import(commands.add_parser("import", help="make a bundle of an ONNX model", description=_IMPORT))
    prepare_fuse.add_fuse(commands.add_parser("fuse", help="put preprocessing into a bundle's models"))
    prepare_half.add_half(commands.add_parser("half", help="make a bundle's models compute in FP16 on TensorRT"))
    prepare_quantize.add_quantize(commands.add_parser("quantize", help="make a bundle's models INT8, with proof"))
    prepare_capture.add_capture(commands.add_parser("capture", help="keep unlike pictures of a clip or a camera"))
    prepare_evaluate.add_evaluate(commands.add_parser("evaluate", help="measure a bundle's accuracy"))
    prepare_evaluate.add_compare(commands.add_parser("compare", help="compare two bundles' accuracy"))


_IMPORT = """Make a bundle of an ONNX model. What the file states of itself is taken, and with --layout what is
usual for that layout; anything else is asked on a terminal, and elsewhere refused with the flags to pass. With
--images the model is run on your pictures: settings that can't be right, or that others beat clearly, are refused.
OUT_DIR is written in one step or not at all."""


def _typed(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """A parser whose reason argparse shows."""

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


_number = _typed(parse_number)


def _add_import(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL.onnx", type=Path)
    parser.add_argument("out_dir", metavar="OUT_DIR", type=Path, help="the bundle's folder; must not exist")
    parser.add_argument("--labels", type=Path, metavar="FILE", help="class names: text or JSON (the metadata's)")
    parser.add_argument("--layout", choices=get_args(Layout), help="how the outputs are read")
    parser.add_argument(
        "--size",
        type=_typed(parse_size),
        action="append",
        default=[],
        metavar="WxH",
        help="input size; again for more variants",
    )
    parser.add_argument("--name", help="the bundle's name (default: OUT_DIR's)")
    parser.add_argument("--version", default="1", help="the bundle's version")
    parser.add_argument("--licence", metavar="TEXT", help="the licence of the weights")
    parser.add_argument("--color", choices=get_args(Color))
    parser.add_argument("--resize", choices=get_args(Resize))
    parser.add_argument("--pad", type=int, metavar="0-255", help="grey around a letterbox")
    parser.add_argument("--scale", type=_number, metavar="S", help="1/255, say: value = (pixel * scale - mean) / std")
    parser.add_argument("--mean", type=_number, nargs=3, metavar="M", help="per channel, in the order of --color")
    parser.add_argument("--std", type=_number, nargs=3, metavar="S", help="per channel, in the order of --color")
    parser.add_argument("--short-side", type=int, metavar="PX", help="with --resize crop: scale to this first")
    parser.add_argument("--score-threshold", type=float, default=0.3, metavar="0-1")
    parser.add_argument("--nms-iou", type=float, default=0.6, metavar="0-1")
    parser.add_argument("--max-detections", type=int, default=300, metavar="N")
    parser.add_argument("--precision", choices=("fp32", "fp16", "int8"), help="default: seen from the graph")
    parser.add_argument(
        "--golden", type=Path, action="append", default=[], metavar="PICTURE", help="a golden picture; again for more"
    )
    parser.add_argument(
        "--images", type=Path, nargs="+", default=[], metavar="PATH", help="pictures or folders for the sanity run"
    )
    parser.add_argument("--sheet", type=Path, metavar="FILE", help="contact sheet of --images (OUT_DIR.import.png)")
    parser.add_argument("--yes", action="store_true", help="take what is suggested, ask nothing")
    parser.add_argument("--force", action="store_true", help="import in spite of the sanity run")
    parser.add_argument("--tolerance", type=float, default=0.02, help="allowed deviation from the golden outputs")
    parser.add_argument("--overwrite", action="store_true", help="replace the bundle in OUT_DIR")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace, read_image: ReadImage | None = None) -> int:
    """Run the parsed command; returns the exit code. `read_image` opens golden pictures. Raises EdgeError."""
    if args.prepare_command == "evaluate":
        return prepare_evaluate.run_evaluate(args)
    if args.prepare_command == "compare":
        return prepare_evaluate.run_compare(args)
    if args.prepare_command == "fuse":
        assert read_image is not None
        return prepare_fuse.run_fuse(args, read_image)
    if args.prepare_command == "half":
        return prepare_half.run_half(args)
    if args.prepare_command == "quantize":
        return prepare_quantize.run_quantize(args)
    if args.prepare_command == "capture":
        return prepare_capture.run_capture(args)
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
        images=args.images,
        sheet=args.sheet,
        read_image=read_image,
        tolerance=args.tolerance,
        ask=_ask if sys.stdin.isatty() and sys.stderr.isatty() and not args.yes else None,
        accept=args.yes,
        force=args.force,
        overwrite=args.overwrite,
    )
    if args.json:
        json.dump(_document(result), sys.stdout, indent=2)
        print()
        return EXIT_DONE
    for note in result.notes:
        print(f"note: {note}", file=sys.stderr)
    bundle = result.bundle
    print(f"{bundle.root}: {bundle.name} {bundle.digest}, variants {', '.join(bundle.variants)}")
    return EXIT_DONE


def _ask(question: Question) -> str:
    """On the terminal: standard output stays free for the result."""
    if question.problem:
        print(f"  {question.problem}", file=sys.stderr)
    else:
        choices = f" ({', '.join(question.choices)})" if question.choices else ""
        print(f"{question.key}{choices}: {question.why}", file=sys.stderr)
    default = f" [{question.default}]" if question.default is not None else ""
    print(f"  {question.key}{default}: ", end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
        raise UsageError("the input ended before every question was answered", remedy="pass the settings as flags")
    return line.rstrip("\n")


def _document(result: ImportResult) -> dict[str, Any]:
    bundle = result.bundle
    return {
        "bundle": str(bundle.root),
        "name": bundle.name,
        "digest": bundle.digest,
        "task": bundle.manifest.bundle.task,
        "layout": bundle.manifest.output.layout,
        "variants": list(bundle.variants),
        "settings": {
            one.key: {"value": told(one.value), "source": one.source, "why": one.why} for one in result.settings
        },
        "sanity": None if result.sanity is None else _sanity_document(result.sanity, result.sheet),
        "notes": list(result.notes),
    }


def _sanity_document(report: SanityReport, sheet: Path | None) -> dict[str, Any]:
    return {
        "pictures": report.pictures,
        "seconds": round(report.seconds, 3),
        "found": [len(one.output) for one in report.seen[""]],
        "evidence": {flags or "as chosen": round(report.evidence(flags), 4) for flags in report.seen},
        "problems": report.problems,
        "better": report.better,
        "leads": report.leads,
        "sheet": str(sheet),
    }
