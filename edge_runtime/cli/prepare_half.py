"""`edge-runtime prepare half`: arguments, progress and printing."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_runtime.cli.prepare_evaluate import progress_on
from edge_runtime.cli.prepare_judged import add_judged
from edge_runtime.errors import EXIT_DONE, NotThereError

if TYPE_CHECKING:
    from edge_runtime.prepare.half import HalfResult, HalfVariant

_HALF = """Make a bundle whose models compute in FP16 on TensorRT, where that is safe: which tensors stay in range is
seen on --calibrate pictures, and sums, softmax, box decoding and the like stay in float32. Each new variant is measured
against the float one; where it may lose more than --max-loss nothing is written and the exit code is 3."""
_NAMED = 12


def add_half(parser: argparse.ArgumentParser) -> None:
    """Give `prepare half` its arguments."""
    parser.description = _HALF
    parser.add_argument("bundle", metavar="BUNDLE", help="a bundle's folder, or bundled:NAME")
    parser.add_argument("out_dir", metavar="OUT_DIR", type=Path, help="the new bundle's folder; must not exist")
    parser.add_argument(
        "--calibrate",
        nargs="+",
        required=True,
        metavar="SRC",
        help="pictures, folders of them, or clips (also bundled:NAME), such as the cameras see",
    )
    add_judged(parser)


def run_half(args: argparse.Namespace) -> int:
    """Run the parsed command; returns the exit code. Raises EdgeError."""
    try:
        from edge_runtime.app.halving import halve
    except ImportError as error:
        raise NotThereError(
            f"`prepare` needs {error.name}", code="not_installed", remedy="pip install 'edge-runtime[prepare]'"
        ) from None
    with progress_on(sys.stderr) as progress:
        result = halve(
            args.bundle,
            args.out_dir,
            calibrate=args.calibrate,
            evaluate=args.evaluate,
            variants=args.variant,
            max_loss=args.max_loss,
            accept=args.accept,
            every=args.every,
            overwrite=args.overwrite,
            seed=args.seed,
            resamples=args.resamples,
            progress=progress.show,
        )
    if args.json:
        json.dump(_document(result), sys.stdout, indent=2)
        print()
        return EXIT_DONE
    for note in result.notes:
        print(f"note: {note}", file=sys.stderr)
    for variant in result.variants:
        print("\n".join(_table(variant)))
    bundle = result.bundle
    print(f"{bundle.root}: {bundle.name} {bundle.digest}, variants {', '.join(bundle.variants)}")
    return EXIT_DONE


def _table(variant: HalfVariant) -> list[str]:
    """What a person reads."""
    plan = variant.plan
    lines = [
        f"{variant.name}, of {variant.source}",
        f"  {variant.gate}",
        f"  {len(plan.half)} of {len(plan.choices)} nodes in FP16; of {plan.weights} weights there, {plan.subnormal} "
        f"are subnormal and {plan.lost} become 0",
    ]
    for why, operators in plan.reasons().items():
        told = ", ".join(f"{number} {operator}" for operator, number in sorted(operators.items()))
        lines.append(f"  float32: {told}: it {why}")
    detailed = [choice for choice in plan.choices.values() if choice.detail is not None]
    lines += [f"    {choice.name} ({choice.operator}): {choice.detail}" for choice in detailed[:_NAMED]]
    if len(detailed) > _NAMED:
        lines.append(f"    and {len(detailed) - _NAMED} more: --json names all")
    return lines


def _document(result: HalfResult) -> dict[str, Any]:
    bundle = result.bundle
    return {
        "bundle": str(bundle.root),
        "name": bundle.name,
        "digest": bundle.digest,
        "variants": list(bundle.variants),
        "calibration_pictures": result.pictures,
        "made": [_variant_document(variant) for variant in result.variants],
        "notes": list(result.notes),
    }


def _variant_document(variant: HalfVariant) -> dict[str, Any]:
    plan = variant.plan
    return {
        "name": variant.name,
        "source": variant.source,
        "gate": variant.gate.as_dict(),
        "nodes": len(plan.choices),
        "half": len(plan.half),
        "weights": {"half": plan.weights, "subnormal": plan.subnormal, "lost": plan.lost},
        "float32": [
            {"name": choice.name, "operator": choice.operator, "why": choice.why, "detail": choice.detail}
            for choice in plan.choices.values()
            if choice.why is not None
        ],
    }
