"""Plots of a report, as SVG to stand inside of a page: the same figures give the same bytes."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from edge_runtime.prepare.quantize_records import Tried

__all__ = ["pareto_plot", "sensitivity_plot"]

_BLUE, _ORANGE, _GREY = "#1f5fa8", "#c8501e", "#9a9a9a"
_BARS = 15
_TICKS = (-100, -50, -20, -10, -5, -2, -1, 0, 1, 2, 5, 10, 20, 50, 100)
# Without a date, and with names of clips and markers that come from what they are: no bytes that change.
_SETTINGS = {
    "svg.hashsalt": "edge-runtime",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


def pareto_plot(tried: Sequence[Tried], *, allowed: float, float_ms: float | None) -> str:
    """Loss (%) of every candidate against its latency (ms), or its share of multiplications in INT8 (%) where none was
    timed. `allowed`: relative loss (0-1)."""
    timed = any(each.latency_ms is not None for each in tried)
    points = [each for each in tried if not timed or each.latency_ms is not None]
    with mpl.rc_context(_SETTINGS):
        figure = Figure(figsize=(6.4, 3.6))
        axes = figure.add_axes((0.1, 0.14, 0.87, 0.82))

        def place(each: Tried) -> tuple[float, float]:
            along = each.latency_ms if each.latency_ms is not None else 100 * each.int8_share
            return along, 100 * each.loss

        others = [place(each) for each in points if not each.front and not each.chosen]
        if others:
            axes.plot(*_columns(others), "o", ms=4, color=_GREY, label="tried")
        front = sorted(place(each) for each in points if each.front)
        if front:
            axes.plot(*_columns(front), "o-", ms=5, lw=1, color=_BLUE, label="none better in both")
        chosen = [place(each) for each in points if each.chosen]
        if chosen:
            axes.plot(*_columns(chosen), "*", ms=11, color=_ORANGE, label="chosen")
        axes.axhline(100 * allowed, color=_ORANGE, lw=0.8, ls="--", label="allowed")
        if timed and float_ms is not None:
            axes.axvline(float_ms, color=_GREY, lw=0.8, ls=":", label="float")
        axes.set_xlabel("latency of one picture on one thread, ms" if timed else "multiplications in INT8, %")
        axes.set_ylabel("loss on calibration pictures, %")
        axes.set_yscale("symlog", linthresh=1.0)
        axes.margins(0.08)
        highest = max([100 * allowed, *(100 * each.loss for each in points)])
        lowest = min([0.0, *(100 * each.loss for each in points)])
        axes.set_yticks([tick for tick in _TICKS if 1.1 * lowest <= tick <= 1.1 * highest])
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter("{x:g}")
        axes.legend(frameon=False, fontsize=8)
        return _svg(figure)


def sensitivity_plot(sensitivities: Sequence[tuple[str, float]], unit: str) -> str:
    """A bar for each of the worst layers."""
    shown = list(sensitivities[:_BARS])[::-1]
    with mpl.rc_context(_SETTINGS):
        height = 0.7 + 0.2 * len(shown)
        figure = Figure(figsize=(6.4, height))
        axes = figure.add_axes((0.4, 0.5 / height, 0.57, 1 - 0.6 / height))
        axes.barh(range(len(shown)), [value for _, value in shown], color=_BLUE, height=0.7)
        # a layer's name is no formula
        names = [_short(name).replace("$", r"\$") for name, _ in shown]
        axes.set_yticks(range(len(shown)), names, fontsize=7.5)
        axes.set_ylim(-0.6, len(shown) - 0.4)
        axes.set_xlabel(unit.replace("$", r"\$"))
        return _svg(figure)


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _short(name: str) -> str:
    return name if len(name) <= 44 else f"...{name[-41:]}"


def _svg(figure: Figure) -> str:
    stream = io.StringIO()
    FigureCanvasSVG(figure)  # without it a display is looked for
    figure.savefig(stream, format="svg", metadata=_METADATA)
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    # Several stand on one page: groups need no names, and all of them would have the same.
    return re.sub(r'<g id="[^"]*"', "<g", text)
