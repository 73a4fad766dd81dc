"""The picture of `acclimate-bench budget`."""

import statistics
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from acclimate_bench.accuracy.plot import INK, PALE, SERIES, STYLE, VERMILLION, save
from acclimate_bench.budget.command import FROZEN, Portion, by_budget

ALLOWED = 0.1
"""Points of accuracy that the default may cost."""


def draw(portions: Sequence[Portion], path: Path) -> Path:
    """Draw points of accuracy against bytes of a stored state: a line for each shift, and their mean.

    The frozen network, of which nothing is stored, has no place on the axis.

    Raises:
        BenchError: there is no place for it.
    """
    with mpl.rc_context(STYLE):
        return save(_figure([each for each in portions if each.budget != FROZEN]), path)


def _figure(portions: Sequence[Portion]) -> Figure:
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    ax = figure.subplots()
    rows = list(by_budget(portions).values())
    nbytes = [statistics.fmean(each.nbytes for each in row) for row in rows]
    for place, (colour, marker) in zip(range(len(rows[0])), cycle(SERIES), strict=False):
        points = [-row[place].lost for row in rows]
        ax.plot(nbytes, points, marker, color=colour, linestyle="-", linewidth=0.8, markersize=4, alpha=0.7)
        ax.lines[-1].set_label(rows[0][place].shift)
    means = [-statistics.fmean(each.lost for each in row) for row in rows]
    ax.plot(nbytes, means, "o", color=INK, linestyle="-", linewidth=1.8, markersize=5, label="mean")
    ax.axhline(-ALLOWED, color=VERMILLION, linewidth=0.8, linestyle=":", label=f"{ALLOWED:g} points lost")
    _axes(ax, [(size, row[0].budget) for size, row in zip(nbytes, rows, strict=True)])
    figure.legend(loc="outside upper left", ncols=6, frameon=False)
    return figure


def _axes(ax: Axes, ticks: Sequence[tuple[float, float]]) -> None:
    labels = {size: f"{size / 1000:.0f} kB\n{budget:g}" for size, budget in ticks}
    ax.set_xscale("log", base=2)
    ax.set_xticks([*labels])
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: labels.get(x, "")))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlabel("bytes of a stored client, and the budget as a share of the exact ones")
    ax.set_ylabel("points of accuracy")
    ax.grid(axis="y", color=PALE, linewidth=0.8)
    ax.set_axisbelow(True)
    ax.tick_params(length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)
