"""`acclimate-bench rates`: adaptation rates learned as `acclimate learn` does, beside those of the reference program.

Clients that teach and tune are simulated from clean images, none of which a target client of the same shift sends as it
is, with other corruptions than target clients have. Accuracy is that of `atp` on the target clients.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from acclimate_bench.accuracy.plot import BLUE, GREY, PALE, STYLE, VERMILLION, save
from acclimate_bench.data.fashion import CARRIED, FASHION, INPUT, load_fashion
from acclimate_bench.data.shift import CLASSES, Shift, load_network, read_arrays
from acclimate_bench.options import Subparsers, positive, prepare_outputs, progress_bar
from acclimate_learning.clients import SHARES, Client, Pool, Population, read_pool, simulate
from acclimate_learning.clients import Shift as Simulated
from acclimate_learning.judging import judge
from acclimate_learning.rates import Learned, Recipe, learn_rates
from acclimate_store.datasets import labelled_images

SIMULATED: Final[Mapping[str, Simulated]] = {
    "feature": "feature", "label": "label", "hybrid": "both", "multitype": "mixed",
}  # fmt: skip
"""The shift of simulated clients that stands for one of the benchmark."""
MODES: Final = ("batch", "online")
WHOLE: Final = Recipe(), Population()
"""As `acclimate learn` does it by default."""
QUICK: Final = Recipe(rounds=40, cohort=8), Population(judges=20, judge_images=60)
"""A tenth of the work, by which the pattern of the rates shows."""


@dataclass(frozen=True, slots=True)
class Relearned:
    """Rates of one shift, and the accuracy in % of both modes with them and as recorded, on the same clients."""

    shift: str
    learned: Learned
    frozen: float
    accuracy: Mapping[str, float]
    recorded: Mapping[str, float]


def add_parser(commands: Subparsers) -> None:
    """Add the `rates` command."""
    text = "learn adaptation rates anew, and compare their accuracy with that of the recorded ones"
    rates = commands.add_parser("rates", help=text, description=text)
    rates.add_argument(
        "--data", type=Path, default=CARRIED, metavar="FOLDER", help="Fashion-MNIST (default: %(default)s)"
    )
    rates.add_argument(
        "--images", type=Path, metavar="DATA", help="labelled clean images to learn from (default: those of FOLDER)"
    )
    rates.add_argument("--shifts", nargs="+", choices=FASHION, default=FASHION, help="default: all of them")
    rates.add_argument("--quick", action="store_true", help="a tenth of the work, which shows the pattern of the rates")
    rates.add_argument("--threads", type=positive, default=1, help="threads of torch (default: 1, as recorded)")
    rates.add_argument("--picture", type=Path, metavar="FILE", help="draw the rates there")
    rates.set_defaults(run=run_rates)


def run_rates(arguments: argparse.Namespace) -> int:
    """Print a table and draw what was asked for.

    Raises:
        BenchError: something cannot be read or written.
    """
    prepare_outputs((arguments.picture,))
    torch.set_num_threads(arguments.threads)
    results = []
    print(HEAD)
    for name in arguments.shifts:
        shift = load_fashion(arguments.data, name)
        pool = clean_images(arguments.data, shift, arguments.images)
        result = relearn(shift, arguments.data / name, pool, *(QUICK if arguments.quick else WHOLE))
        print(row(result), flush=True)
        results.append(result)
    if arguments.picture:
        draw(results, arguments.picture)
    return 0


def clean_images(folder: Path, shift: Shift, data: Path | None = None) -> Pool:
    """Clean images with their labels that no target client of a shift sends as they are.

    Args:
        folder: of the benchmark, whose clean target clients give them where there are no data.
        shift: whose target clients are left out.
        data: labelled images.
    """
    if data is not None:
        pool = read_pool(labelled_images(data, INPUT, [str(number) for number in range(CLASSES)]))
        images, labels = pool.images, pool.labels
    else:
        parts = [_clean_clients(folder / name) for name in ("label", "multitype")]
        images, labels = (np.concatenate(each) for each in zip(*parts, strict=True))
    sent = {image.tobytes() for client in shift.images for image in client}
    kept = np.array([image.tobytes() not in sent for image in images])
    return Pool(images[kept], labels[kept])


def _clean_clients(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    arrays = read_arrays(folder / "target.npz", "images", "labels", "corruption")
    rows = arrays["corruption"] == "none"
    images = arrays["images"][rows]
    return images.reshape(-1, *INPUT.shape), arrays["labels"][rows].reshape(-1)


def relearn(shift: Shift, folder: Path, pool: Pool, recipe: Recipe, population: Population) -> Relearned:
    """Learn the rates of a shift from a pool of clean images, and see what they do for its target clients."""
    images = min(population.judge_images, most_images(pool))
    chosen = replace(population, shift=SIMULATED[shift.name], judge_images=images)
    teachers, tuners = (simulate(pool, chosen, role) for role in ("teach", "tune"))
    with progress_bar(recipe.rounds * recipe.cohort, "client") as advance:
        learned = learn_rates(shift.model, shift.spec, teachers, tuners, recipe, progress=advance)
    model = load_network(folder, replace(shift.model.source, rates=learned.rates))
    clients = [
        Client(str(number), images[:, None], labels, "", "")
        for number, images, labels in zip(shift.clients, shift.images, shift.labels, strict=True)
    ]
    judged = {mode: judge(model, shift.spec, clients, "atp", {"mode": mode}) for mode in MODES}
    recorded = {mode: shift.recorded[f"atp_{mode}"].accuracy for mode in MODES}
    return Relearned(
        shift.name,
        learned,
        frozen=100 * float(judged["batch"].frozen.mean()),
        accuracy={mode: 100 * float(each.accuracy.mean()) for mode, each in judged.items()},
        recorded={mode: 100 * float(np.mean([found[c] for c in shift.clients])) for mode, found in recorded.items()},
    )


def most_images(pool: Pool) -> int:
    """How many images a tuning client can have, two fifths of which are of one class; a few are left to chance."""
    fewest = int(np.bincount(pool.labels, minlength=CLASSES).min())
    return int((SHARES["tune"] * fewest - 1) / 0.4)


HEAD: Final = (
    "shift       frozen   batch  recorded  online  recorded  rate of learning  rounds  best\n"
    "--------------------------------------------------------------------------------------"
)


def row(result: Relearned) -> str:
    """A line of the table."""
    best = min(result.learned.losses, key=lambda number: result.learned.losses[number])
    accuracies = "  ".join(f"{result.accuracy[mode]:6.2f}  {result.recorded[mode]:8.2f}" for mode in MODES)
    return (
        f"{result.shift:<10}  {result.frozen:6.2f}  {accuracies}  {result.learned.lr:16.2g}  "
        f"{result.learned.rounds:6}  {best:4}"
    )


def draw(results: Sequence[Relearned], path: Path) -> None:
    """Draw the rate of every module, a panel for each shift."""
    with mpl.rc_context(STYLE):
        modules = list(results[0].learned.rates)
        figure = Figure(figsize=(1.2 + 1.6 * len(results), 0.6 + 0.17 * len(modules)), layout="constrained")
        panels = figure.subplots(1, len(results), sharey=True, squeeze=False)[0]
        for panel, result in zip(panels, results, strict=True):
            rates = [result.learned.rates[name] for name in modules]
            panel.barh(range(len(modules)), rates, color=[_colour(name, modules) for name in modules])
            panel.axvline(0, color=GREY, linewidth=0.6)
            panel.grid(axis="x", color=PALE, linewidth=0.6)
            panel.set_axisbelow(True)
            panel.set_title(result.shift)
            panel.tick_params(length=0)
            panel.spines[:].set_visible(False)
        panels[0].set_yticks(range(len(modules)), modules)
        panels[0].invert_yaxis()
        kinds = {"BatchNorm statistics": BLUE, "last layer": VERMILLION, "other weights": GREY}
        figure.legend(handles=[Patch(color=c, label=n) for n, c in kinds.items()], loc="outside lower center", ncols=3)
        save(figure, path)


def _colour(name: str, modules: Sequence[str]) -> str:
    if name.rpartition(".")[2] in ("running_mean", "running_var"):
        return BLUE
    parameters = [each for each in modules if "running" not in each]
    return VERMILLION if name.rpartition(".")[0] == parameters[-1].rpartition(".")[0] else GREY
