"""Draw what the demo saw of the guarded client, from the file that it writes.

    acclimate demo --json demo.json
    python tools/draw_guarded.py demo.json docs/images/guard-demo.svg

Needs matplotlib, which `pip install ./benchmarks` brings.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from acclimate_bench.accuracy.plot import BLUE, GREY, INK, PALE, STYLE, VERMILLION, save

Moments = Sequence[Mapping[str, Any]]
SERIES: Mapping[str, Mapping[str, Any]] = {
    "frozen": {"color": GREY, "marker": "s", "linewidth": 1.2, "markersize": 4},
    "adapted": {"color": VERMILLION, "marker": "D", "linewidth": 1.2, "markersize": 4},
    "guarded": {"color": BLUE, "marker": "o", "linewidth": 6, "markersize": 10, "alpha": 0.35, "zorder": 1},
}


def draw(moments: Moments) -> Figure:
    """Accuracy by batch of the three clients, the guarded one behind the answers that it is given, and the verdict."""
    figure = Figure(figsize=(6.4, 3.0), layout="constrained")
    ax = figure.subplots()
    numbers = [m["number"] for m in moments]
    for name, style in SERIES.items():
        ax.plot(numbers, [m[name] for m in moments], label=name, **style)
    for before, after in zip([{"verdict": "undecided"}, *moments], moments, strict=False):
        if after["verdict"] != before["verdict"]:
            ax.axvline(after["number"] + 0.5, color=INK, linewidth=0.8, linestyle=":")
            said = f"{after['verdict']}: {after['losses']} losses, {after['wins']} wins, {after['labels']} labels"
            ax.text(after["number"] + 0.6, 99, said, va="top")
    ax.set(xticks=numbers, ylim=(0, 102), xlabel="batch", ylabel="accuracy in %")
    ax.grid(axis="y", color=PALE, linewidth=0.8)
    ax.set_axisbelow(True)
    ax.tick_params(length=0)
    ax.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper right", ncols=len(SERIES), frameon=False)
    return figure


def main() -> None:
    """Read, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path, help="written by `acclimate demo --json`")
    parser.add_argument("picture", type=Path, help="an .svg or .png file")
    options = parser.parse_args()
    with mpl.rc_context(STYLE):
        save(draw(json.loads(options.measured.read_text())["guarded"]), options.picture)


if __name__ == "__main__":
    main()
