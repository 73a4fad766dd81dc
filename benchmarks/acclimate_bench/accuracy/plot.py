"""The pictures: gains of all methods, accuracy by shift of one adapter."""

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from acclimate_bench.accuracy.measure import Result
from acclimate_bench.accuracy.report import HARM, Figures, Report, figures, rounded, signed
from acclimate_bench.errors import BenchError

# Okabe and Ito's palette, which colour-blind readers can tell apart; direction and shape say the same as the colour.
BLUE, VERMILLION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
GREY, INK, PALE = "#8c8c8c", "#222222", "#e4e4e4"
SERIES = ((BLUE, "o"), (VERMILLION, "D"), (GREEN, "s"), (PURPLE, "^"))
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "sans-serif"],  # the first comes with matplotlib
    "font.size": 8.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.edgecolor": PALE,
    "svg.fonttype": "none",  # text stays text: smaller files that can be searched and read aloud
    "svg.hashsalt": "acclimate",  # the same identifiers in every run, so that equal pictures are equal files
}
CHAINS = "chains"  # name of the one picture of all chains


class Series(NamedTuple):
    """One row of markers of a small picture."""

    label: str
    results: Mapping[str, Result]  # by shift


def draw_gains(report: Report, prefix: Path) -> tuple[Path, Path]:
    """Draw the gain over no adaptation, one panel for each shift, as `prefix`.png and `prefix`.svg.

    Methods that were given labels are left out. A black line marks the gain of the recorded accuracy; beside the bars
    stands how many clients were harmed, if any.

    Raises:
        BenchError: there is nothing to draw, or no place for it.
    """
    report = report.only(lambda result: result.method != "none" and not result.enrolled)
    if not report.results:
        raise BenchError("there are no gains to draw: measure a method other than none that needs no enrolment")
    with mpl.rc_context(STYLE):
        figure = _gains(report)
        return (
            save(figure, prefix.with_name(f"{prefix.name}.png")),
            save(figure, prefix.with_name(f"{prefix.name}.svg")),
        )


def draw_adapters(report: Report, folder: Path) -> tuple[Path, ...]:
    """Draw `folder`/<adapter>.svg: accuracy by shift of each variant of an adapter, beside no adaptation.

    All chains share one picture, and all pictures share one scale, so that a small change looks small.

    Raises:
        BenchError: there is no place for them.
    """
    scale = _scale(report)
    with mpl.rc_context(STYLE):
        return tuple(
            save(_accuracies(series, report.shifts, scale), folder / f"{name}.svg")
            for name, series in _by_adapter(report).items()
        )


def _gains(report: Report) -> Figure:
    methods = _ranked(report)
    columns = len(report.shifts) if len(report.shifts) <= 4 else 3
    rows = math.ceil(len(report.shifts) / columns)
    size = (2.6 + 2.3 * columns, 0.85 + (0.5 + 0.24 * len(methods)) * rows)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
    gains = [figures(result).gain for result in report.results]
    margin = 0.22 * (max(gains) - min(gains) + 1)  # room for the numbers beside the bars
    for ax in axes[len(report.shifts) :]:
        ax.set_axis_off()
    for ax, shift in zip(axes, report.shifts, strict=False):
        ax.set_title(shift, fontweight="bold", fontsize=9.5)
        ax.set_xlim(min(0.0, *gains) - margin, max(0.0, *gains) + 1.5 * margin)
        ax.set_ylim(len(methods) - 0.4, -0.6)
        ax.set_yticks(range(len(methods)), methods)
        ax.tick_params(labelbottom=True)
        clean(ax)
        ax.axvline(0, color=INK, linewidth=0.8)
        for row, method in enumerate(methods):
            _bar(ax, row, report.find(method, shift))
    figure.legend(handles=_legend(), loc="outside lower right", ncols=4, frameon=False)
    figure.suptitle(f"Gain over no adaptation, in points of accuracy\n{_note(report)}", x=0.01, ha="left", fontsize=9.5)
    return figure


def _bar(ax: Axes, row: int, result: Result | None) -> None:
    if result is None:
        return
    f = figures(result)
    ax.barh(row, f.gain, height=0.68, color=BLUE if f.gain >= 0 else VERMILLION, zorder=2)
    tips = [f.gain]
    if f.gap is not None:
        recorded = f.gain - f.gap
        tips.append(recorded)
        ax.vlines(recorded, row - 0.42, row + 0.42, color="black", linewidth=1.6, zorder=3)
    beyond = 3 if f.gain >= 0 else -3
    _number(ax, signed(f.gain, 1), max(tips) if f.gain >= 0 else min(tips), row, beyond)
    if f.harmed:
        harmed = f"{f.harmed}/{len(result.clients)}"
        ax.text(
            1, row, harmed, transform=ax.get_yaxis_transform(), ha="right", va="center", fontsize=7, color=VERMILLION
        )


def _ranked(report: Report) -> list[str]:
    """Methods from the largest mean gain to the smallest."""
    gains: dict[str, list[float]] = {}
    for result in report.results:
        gains.setdefault(result.method, []).append(figures(result).gain)
    return sorted(gains, key=lambda method: statistics.fmean(gains[method]), reverse=True)


def _legend() -> list[Patch | Line2D]:
    recorded = Line2D([], [], color="black", marker="|", linestyle="", markersize=9, markeredgewidth=1.6)
    recorded.set_label("recorded reference")
    harmed = Line2D([], [], color=VERMILLION, marker="$3/40$", linestyle="", markersize=18, markeredgewidth=0.1)
    harmed.set_label(f"clients that lost more than {HARM:.0f} points")
    return [Patch(color=BLUE, label="gain"), Patch(color=VERMILLION, label="loss"), recorded, harmed]


def _note(report: Report) -> str:
    sizes = {f"{len(result.clients)} clients x {result.images} images" for result in report.results}
    largest = max(report.results, key=lambda result: len(result.clients) * result.images)
    note = f"{len(largest.clients)} clients x {largest.images} images per shift, batches of {report.protocol.batch}"
    return f"{note}; some fewer, see the table" if len(sizes) > 1 else note


def _by_adapter(report: Report) -> dict[str, list[Series]]:
    pictures: dict[str, list[Series]] = {}
    for method in report.methods:
        found = {result.shift: result for result in report.results if result.method == method}
        adapter = next(iter(found.values())).adapter
        if adapter != "none":
            pictures.setdefault(CHAINS if "+" in adapter else adapter, []).append(Series(method, found))
    return pictures


def _scale(report: Report) -> tuple[float, float]:
    """Limits in % that hold every accuracy, with room for the numbers beside the markers."""
    found = [figures(result) for result in report.results]
    ends = [end for f in found for end in (f.mean, f.mean - f.gain)]
    margin = 2 + 0.12 * (max(ends) - min(ends))
    return min(ends) - margin, max(ends) + margin


def _accuracies(series: Sequence[Series], shifts: Sequence[str], scale: tuple[float, float]) -> Figure:
    shown = [shift for shift in shifts if any(shift in entry.results for entry in series)]
    rows = len(shown) * (0.16 * len(series) + 0.22)  # inches
    pad = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06)
    figure = Figure(figsize=(5.2, rows + 0.06 * len(series) + 0.95), layout=pad)
    ax = figure.subplots()
    for row, shift in enumerate(shown):
        _row(ax, row, [(entry.label, entry.results.get(shift)) for entry in series])
    ax.set_yticks(range(len(shown)), shown)
    ax.set_ylim(len(shown) - 0.45, -0.55)
    ax.set_xlim(scale)
    ax.set_xlabel(_size(series), fontsize=8)
    clean(ax)
    handles, labels = ax.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    columns = len(once) if len(once) <= 4 else 3
    figure.legend(once.values(), once.keys(), loc="outside upper left", ncols=columns, frameon=False, fontsize=8)
    return figure


def _row(ax: Axes, row: int, entries: Sequence[tuple[str, Result | None]]) -> None:
    """The variants of an adapter on one shift, one below the other."""
    for i, ((label, result), (colour, marker)) in enumerate(zip(entries, cycle(SERIES), strict=False)):
        if result is not None:
            y = row + (i - (len(entries) - 1) / 2) * 0.72 / max(len(entries), 2)
            _dumbbell(ax, y, figures(result), colour, marker, label)


def _dumbbell(ax: Axes, y: float, f: Figures, colour: str, marker: str, label: str) -> None:
    before = f.mean - f.gain
    ax.plot([before, f.mean], [y, y], color=colour, linewidth=2, zorder=2)
    ax.plot(before, y, "o", color="white", markeredgecolor=GREY, markeredgewidth=1.4, zorder=3, label="no adaptation")
    ax.plot(f.mean, y, marker, color=colour, linestyle="", zorder=4, label=label)
    _number(ax, f"{rounded(f.mean, 1):.1f}", f.mean, y, 6 if f.gain >= 0 else -6)


def _number(ax: Axes, text: str, x: float, y: float, beyond: float) -> None:
    """Write a number so many points to the right of a place, or to its left when negative."""
    side = "left" if beyond > 0 else "right"
    ax.annotate(text, (x, y), (beyond, 0), textcoords="offset points", ha=side, va="center", fontsize=7.5)


def _size(series: Sequence[Series]) -> str:
    results = [result for entry in series for result in entry.results.values()]
    sizes = sorted({(len(result.clients), result.images) for result in results})
    words = " or ".join(f"{clients} clients x {images} images" for clients, images in sizes)
    enrolled = results[0].enrolled
    given = f", after {enrolled} labelled ones" if enrolled else ""
    return f"accuracy in %\n{words}{given}"


def clean(ax: Axes) -> None:
    """Leave a grid of values and nothing else."""
    ax.grid(axis="x", color=PALE, linewidth=0.8)
    ax.set_axisbelow(True)
    ax.tick_params(length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)


def save(figure: Figure, path: Path) -> Path:
    """Write a figure, the same bytes for the same figure; raises BenchError where there is no place for it."""
    metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
    try:
        figure.savefig(path, dpi=160, facecolor="white", metadata=metadata)
    except OSError as error:
        raise BenchError(f"cannot write {path}: {error}") from error
    return path
