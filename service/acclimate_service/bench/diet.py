"""`acclimate bench diet`: what accuracy is left when stored states are given fewer bytes.

Every client is stored and restored after each of its batches, which is the worst case: a service rounds a state when a
snapshot is taken, and goes on from it only when another replica takes the client over.
"""

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from acclimate_adapters import create
from acclimate_adapters.coding import decode, encode, sensitivity
from acclimate_service.bench.accuracy import BATCH, Classes, Progress
from acclimate_service.bench.data import Shift
from acclimate_service.bench.digits import CARRIED as DIGITS
from acclimate_service.bench.fashion import CARRIED, FASHION
from acclimate_service.bench.options import number, positive, prepare_outputs, progress_bar
from acclimate_service.bench.report import rounded, signed, table
from acclimate_service.bench.shifts import Folders

if TYPE_CHECKING:
    from acclimate_service.bench.cli import Subparsers

ADAPTER = "atp"
BUDGETS = (0.5, 0.25, 0.1875, 0.125, 0.0625, 0.03125)


@dataclass(frozen=True, slots=True)
class Portion:
    """What one budget leaves of one shift.

    Args:
        shift: its name.
        budget: share of their exact bytes that stored tensors may take; 1 is exact.
        clients: how many there are.
        nbytes: mean size of a stored state after the last batch.
        accuracy: mean over the clients in %.
        lost: points of accuracy under exact states.
        changed: % of all predictions that differ from those with exact states.
    """

    shift: str
    budget: float
    clients: int
    nbytes: float
    accuracy: float
    lost: float
    changed: float


def measure(shift: Shift, budgets: Sequence[float], progress: Progress) -> Iterator[Portion]:
    """Measure exact states, and then each budget.

    Args:
        shift: the data.
        budgets: shares below 1.
        progress: called after each client.
    """
    exact, nbytes = _follow(shift, 1.0, progress)
    right = float((exact == shift.labels).mean())
    yield Portion(shift.name, 1.0, len(shift.clients), nbytes, 100 * right, 0.0, 0.0)
    for budget in budgets:
        classes, nbytes = _follow(shift, budget, progress)
        accuracy, changed = float((classes == shift.labels).mean()), float((classes != exact).mean())
        yield Portion(
            *(shift.name, budget, len(shift.clients), nbytes),
            *(100 * accuracy, 100 * (right - accuracy), 100 * changed),
        )


def _follow(shift: Shift, budget: float, progress: Progress) -> tuple[Classes, float]:
    """What all clients are answered, [C, N], and the mean size of their states in the end."""
    adapter = create(ADAPTER)
    weights = sensitivity(adapter, shift.model)
    classes, sizes = [], []
    for row in range(len(shift.clients)):
        data, predicted = encode(adapter.init(shift.model), budget, weights), []
        for batch in torch.split(shift.x(row), BATCH):
            step = adapter.step(shift.model, decode(data), batch)
            data = encode(step.state, budget, weights)
            predicted.append(step.logits.argmax(dim=1))
        classes.append(torch.cat(predicted).numpy())
        sizes.append(len(data))
        progress(f"{shift.name} {budget:g}")
    return np.stack(classes), statistics.fmean(sizes)


def to_text(portions: Sequence[Portion]) -> str:
    """The table: one row for each budget, accuracy in % and differences in points."""
    shifts = list(dict.fromkeys(each.shift for each in portions))
    heading = ("budget", "bytes a client", "of exact", "accuracy", "points", *shifts, "other predictions")
    return table(heading, (_row(row, portions[0].nbytes) for row in by_budget(portions).values()))


def by_budget(portions: Sequence[Portion]) -> dict[float, list[Portion]]:
    """The portions of all shifts by budget, in the order of measuring."""
    found: dict[float, list[Portion]] = {}
    for each in portions:
        found.setdefault(each.budget, []).append(each)
    return found


def _row(row: Sequence[Portion], exact: float) -> list[str]:
    nbytes = statistics.fmean(each.nbytes for each in row)
    return [
        f"{row[0].budget:g}",
        f"{nbytes:,.0f}",
        f"{100 * nbytes / exact:.1f} %",
        f"{rounded(statistics.fmean(each.accuracy for each in row), 2):.2f}",
        signed(-statistics.fmean(each.lost for each in row)),
        *(signed(-each.lost) for each in row),
        f"{statistics.fmean(each.changed for each in row):.2f} %",
    ]


def add_parser(commands: "Subparsers") -> None:
    """Add the `diet` command."""
    text = "accuracy of atp whose stored states are given fewer bytes"
    diet = commands.add_parser("diet", help=text, description=text)
    diet.add_argument(
        "--data", type=Path, default=CARRIED, metavar="FOLDER", help="Fashion-MNIST (default: %(default)s)"
    )
    diet.add_argument("--shifts", nargs="+", choices=FASHION, default=FASHION, help="default: all of them")
    shares = " ".join(f"{each:g}" for each in BUDGETS)
    diet.add_argument(
        "--budgets",
        nargs="+",
        type=_budget,
        default=BUDGETS,
        metavar="SHARE",
        help=f"of exact bytes (default: {shares})",
    )
    diet.add_argument("--threads", type=positive, default=1, help="threads of torch (default: 1)")
    diet.add_argument("--json", type=Path, metavar="FILE", help="write the results of every shift")
    diet.add_argument("--plot", type=Path, metavar="FILE", help="draw them as .svg or .png")
    diet.set_defaults(run=run_diet)


def run_diet(arguments: argparse.Namespace) -> int:
    """Print the table and write what else was asked for.

    Raises:
        BenchError: something cannot be read or written; said before anything is measured.
    """
    prepare_outputs((arguments.json, arguments.plot))
    data = Folders(arguments.data, DIGITS)
    data.check(arguments.shifts)
    torch.set_num_threads(arguments.threads)
    portions = [each for name in arguments.shifts for each in _measure(data.load(name), arguments.budgets)]
    print(to_text(portions))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(each) for each in portions], indent=2) + "\n")
    if arguments.plot:
        from acclimate_service.bench import diet_plot  # of the extra `bench`

        diet_plot.draw_diet(portions, arguments.plot)
    return 0


def _measure(shift: Shift, budgets: Sequence[float]) -> list[Portion]:
    with progress_bar(len(shift.clients) * (1 + len(budgets)), "client") as advance:
        return list(measure(shift, budgets, advance))


def _budget(text: str) -> float:
    accepted = "a share between 0 and 1, such as 0.25; 1 is always measured"
    return number(text, lambda share: 0 < share < 1, accepted)
