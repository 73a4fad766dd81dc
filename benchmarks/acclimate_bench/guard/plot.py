"""The picture of the guard: frozen, adapted and guarded side by side."""

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from acclimate_bench.accuracy.plot import BLUE, GREEN, INK, PURPLE, STYLE, VERMILLION, clean, save
from acclimate_bench.accuracy.report import HARM
from acclimate_bench.errors import BenchError
from acclimate_bench.guard.report import BELOW_FROZEN, Guarded, GuardReport

COLUMNS = 3
SHARES = ((PURPLE, "^"), (BLUE, "o"), (GREEN, "s"))  # from few labels to many; more of them start again


def draw_guard(report: GuardReport, prefix: Path) -> tuple[Path, Path]:
    """Draw what adapted and guarded answers gain over frozen ones, as `prefix`.png and `prefix`.svg.

    One panel for each shift; accuracy over the second half of the streams. A marker is the mean of the runs, its line
    spans the worst and the best of them. Where rows were chosen in several ways, those of the first are drawn.

    Raises:
        BenchError: there is nothing to draw, or no place for it.
    """
    if not report.results:
        raise BenchError("there is nothing to draw: none of these methods could be measured on these shifts")
    with mpl.rc_context(STYLE):
        figure = _figure(report)
        return (
            save(figure, prefix.with_name(f"{prefix.name}.png")),
            save(figure, prefix.with_name(f"{prefix.name}.svg")),
        )


def draw_spent(report: GuardReport, prefix: Path) -> Path:
    """Draw how many clients were harmed by how many labels, for each choice of rows, as `prefix`.svg.

    A point is the mean over all methods, shifts and runs.

    Raises:
        BenchError: there is nothing to draw, or no place for it.
    """
    if not report.results:
        raise BenchError("there is nothing to draw: none of these methods could be measured on these shifts")
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.6, 3.2), layout="constrained")
        ax = figure.subplots()
        for choice, (colour, marker) in zip(report.choices, SHARES, strict=False):
            labelled = [report.labelled(share, choice) for share in report.shares]
            harmed = [report.harmed(share, choice) for share in report.shares]
            ax.plot(labelled, harmed, color=colour, marker=marker, markersize=4, label=f"{choice} rows")
        ax.set_ylim(0)
        ax.set_xlabel("rows labelled, %")
        ax.set_title(f"Clients that lose more than {HARM:.0f} points, %", loc="left")
        ax.legend(frameon=False)
        clean(ax)
        return save(figure, prefix.with_name(f"{prefix.name}.svg"))


def _figure(report: GuardReport) -> Figure:
    columns = min(COLUMNS, len(report.shifts))
    rows = math.ceil(len(report.shifts) / columns)
    size = (1.6 + 2.8 * columns, 1.1 + (0.5 + 0.36 * len(report.methods)) * rows)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
    for ax in axes[len(report.shifts) :]:
        ax.set_axis_off()
    for ax, shift in zip(axes, report.shifts, strict=False):
        _panel(ax, report, shift)
    figure.legend(handles=_legend(report.shares), loc="outside lower right", ncols=3, frameon=False)
    title = "Accuracy over the second half of the streams, in points above the frozen model"
    figure.suptitle(f"{title}\n{report.runs} runs with other rows labelled: mean, worst and best", x=0.01, ha="left")
    return figure


def _panel(ax: Axes, report: GuardReport, shift: str) -> None:
    methods, shares = report.methods, report.shares
    ax.set_title(shift, fontweight="bold", fontsize=9.5)
    ax.set_yticks(range(len(methods)), methods)
    ax.set_ylim(len(methods) - 0.45, -0.55)
    ax.tick_params(labelbottom=True)
    clean(ax)
    ax.axvline(0, color=INK, linewidth=0.8)
    ax.axvline(-BELOW_FROZEN, color=VERMILLION, linewidth=0.8, linestyle=":")
    for result in report.only(lambda result: (result.shift, result.choice) == (shift, report.choices[0])):
        row, place = methods.index(result.method), shares.index(result.share)
        if place == 0:
            gain = result.adapted - result.frozen
            ax.barh(row, gain, height=0.8, color=_colour(gain), alpha=0.22, zorder=1)
        _runs(ax, row + (place - (len(shares) - 1) / 2) * 0.7 / len(shares), result, *SHARES[place % len(SHARES)])


def _colour(gain: float) -> str:
    return BLUE if gain >= 0 else VERMILLION


def _runs(ax: Axes, y: float, result: Guarded, colour: str, marker: str) -> None:
    over = result.over_frozen
    ax.hlines(y, over.min(), over.max(), color=colour, linewidth=1.2, zorder=2)
    ax.plot(over.mean(), y, marker, color=colour, markersize=4, zorder=3)


def _legend(shares: Sequence[float]) -> list[Patch | Line2D]:
    handles: list[Patch | Line2D] = [
        Patch(color=BLUE, alpha=0.22, label="adapted, always: gain"),
        Patch(color=VERMILLION, alpha=0.22, label="adapted, always: loss"),
        Line2D([], [], color=VERMILLION, linestyle=":", label=f"{BELOW_FROZEN:.0f} point under frozen"),
    ]
    for place, share in enumerate(shares):
        colour, marker = SHARES[place % len(SHARES)]
        words = f"guarded, {100 * share:g} % of rows labelled"
        handles.append(Line2D([], [], color=colour, marker=marker, markersize=4, label=words))
    return handles
