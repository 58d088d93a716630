"""`edge-runtime bench governor`: parsing and printing."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from edge_runtime.cli.numbers import count
from edge_runtime.errors import EXIT_DONE, UsageError

if TYPE_CHECKING:
    from edge_runtime.bench.governor import GovernorBench, Row
    from edge_runtime.bench.governor_judge import Figures

_TEXT = """The governor on simulated modules, in virtual time: ten minutes a run, judged by the power that the simulated
device really takes, beside no control at all, a fixed point and on-off control. What it says depends on nothing
but the seed; it says nothing about any real device."""
DEFAULT_CELLS = 28
WORST_SHOWN = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `bench governor` takes."""
    parser.description = _TEXT
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--cells",
        type=count,
        default=DEFAULT_CELLS,
        metavar="N",
        help="of a random sample (%(default)s), and each fault",
    )
    which.add_argument("--all", action="store_true", help="the whole grid and every fault on every module: an hour")
    which.add_argument("--cell", action="append", metavar="NAME", help="this one, again for more: names as printed")
    parser.add_argument(
        "--clocks", action="store_true", help="the same cells with a GPU clock that can be capped (a helper's doing)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sample (%(default)s)")
    parser.add_argument("--controllers", nargs="+", metavar="NAME", help="default: all of them")
    parser.add_argument("--jobs", type=count, default=1, metavar="N", help="processes (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Run the parsed benchmark; returns the exit code. Raises UsageError."""
    from edge_runtime.bench.governor import CONTROLLERS, run_cells
    from edge_runtime.bench.governor_cells import grid, parse, sample

    controllers = args.controllers or list(CONTROLLERS)
    for name in controllers:
        if name not in CONTROLLERS:
            known = ", ".join(CONTROLLERS)
            raise UsageError(f"{name!r} is no controller", where="--controllers", remedy=f"any of {known}")
    cells = [parse(name) for name in args.cell or ()] or (grid() if args.all else sample(args.cells, args.seed))
    if args.clocks:
        cells = [replace(cell, clocks=True) for cell in cells]

    def progress(done: int, of: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{done} of {of} runs", end="" if done < of else "\n", file=sys.stderr, flush=True)

    result = run_cells(cells, controllers, jobs=args.jobs, progress=progress)
    print(json.dumps(result.as_dict(), indent=2) if args.json else _table(result, each=bool(args.cell)))
    return EXIT_DONE


def _table(result: GovernorBench, *, each: bool) -> str:
    lines: list[str] = []
    for controller in result.controllers():
        found = result.of(controller, faults=False)
        if found:
            lines += ["", f"{controller}, {len(found)} cells", *_row_lines(result.summary(controller, faults=False))]
        lines += _fault_lines(controller, result.of(controller, faults=True), result.summary(controller, faults=True))
    if each:
        lines += ["", *(json.dumps(figures.as_dict()) for figures in result.figures)]
    lines += _left_out_lines(result)
    return "\n".join(lines[1:])


def _row_lines(rows: list[Row]) -> list[str]:
    def shown(value: float) -> str:
        return f"{value:9.3f}" if math.isfinite(value) else f"{'never':>9}"

    return [
        f"  {'':36}   met    median     worst   the worst cell",
        *(f"  {row.title:36} {row.met:5.0%} {shown(row.median)} {shown(row.worst)}   {row.worst_cell}" for row in rows),
    ]


def _fault_lines(controller: str, found: list[Figures], summary: list[Row]) -> list[str]:
    if not found:
        return []
    head = f"  {'':60} over budget  overshoot  periods to safe point  s until back"
    rows = [
        f"  {figures.cell:60} {figures.fault_over or 0.0:11.0%} {figures.fault_overshoot or 0.0:10.3f} "
        f"{_number(figures.safe_periods):>22} {_number(figures.back_s):>13}"
        for figures in found
    ]
    return [
        "",
        f"{controller}, sensor faults of 20 s, with the load rising tenfold 5 s into them",
        *_row_lines(summary),
        head,
        *rows,
    ]


def _number(value: float | None) -> str:
    return "never" if value is None else f"{value:g}"


def _left_out_lines(result: GovernorBench) -> list[str]:
    if not result.left_out:
        return []
    shown = [f"  {each.cell}: {each.reason}" for each in result.left_out[:WORST_SHOWN]]
    if len(result.left_out) > WORST_SHOWN:
        shown.append(f"  and {len(result.left_out) - WORST_SHOWN} more (--json names all of them)")
    return ["", f"left out, {len(result.left_out)} cells that no governor could hold:", *shown]
