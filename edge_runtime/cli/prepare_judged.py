"""The arguments of `prepare` commands that make a coarser model and have it judged: `half` and `quantize`."""

from __future__ import annotations

import argparse
from pathlib import Path

from edge_runtime.cli.numbers import count, resamples, share, whole


def add_judged(parser: argparse.ArgumentParser) -> None:
    """By what it is judged, which variants are made, and what is drawn and printed."""
    parser.add_argument(
        "--evaluate",
        type=Path,
        metavar="DATASET",
        help="labelled pictures that were not calibrated with, as for `prepare evaluate` (default: every fourth of "
        "--calibrate is held back, and the float model's answers are taken for right)",
    )
    parser.add_argument(
        "--max-loss", type=share, default=0.01, metavar="0-1", help="of the metric, relative (%(default)s)"
    )
    parser.add_argument(
        "--accept",
        choices=("bound", "point"),
        default="bound",
        help="what must be within --max-loss: the 90 %% bound of the loss, or the loss as seen (%(default)s)",
    )
    parser.add_argument(
        "--variant", action="append", default=[], metavar="V", help="default: all of fp32; again for more"
    )
    parser.add_argument("--every", type=count, default=10, metavar="N", help="of a clip, every Nth frame (%(default)s)")
    parser.add_argument("--seed", type=whole, default=0, help="of what is drawn (%(default)s)")
    parser.add_argument("--resamples", type=resamples, default=2000, metavar="N", help="of the bound (%(default)s)")
    parser.add_argument("--overwrite", action="store_true", help="replace the bundle in OUT_DIR")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
