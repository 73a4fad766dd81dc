"""`acclimate-bench budget`: what accuracy is left when stored states are given fewer bytes.

Every client is stored and restored after each of its batches, which is the worst case: a service rounds a state when a
snapshot is taken, and goes on from it only when another replica takes the client over.
"""

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch

from acclimate_adapters import create
from acclimate_adapters.compression.coding import decode, encode
from acclimate_adapters.compression.sensitivity import sensitivity
from acclimate_bench.accuracy.measure import BATCH, Classes, frozen_classes
from acclimate_bench.accuracy.report import rounded, signed, table
from acclimate_bench.budget import resnet
from acclimate_bench.cost.report import Report, verdict
from acclimate_bench.data.digits import CARRIED as DIGITS
from acclimate_bench.data.fashion import CARRIED, FASHION
from acclimate_bench.data.shift import Shift
from acclimate_bench.data.shifts import Folders
from acclimate_bench.errors import BenchError
from acclimate_bench.options import Progress, Subparsers, number, positive, prepare_outputs, progress_bar
from acclimate_store.manifest import STATE_BUDGET

ADAPTER = "atp"
FROZEN: Final = 0.0
"""The budget of a client that nothing is stored of: the frozen network answers it."""
FASHION_CNN, RESNET18 = "fashion-cnn", "resnet18"
BUDGETS: Final[Mapping[str, Sequence[float]]] = {
    FASHION_CNN: (0.5, 0.25, 0.1875, 0.125, 0.0625, 0.03125),
    RESNET18: (0.25, 0.125, 0.0625, 0.001),
}
SHARE, LOST = 25, 0.1
"""Targets at the default budget: % of the exact bytes, and points of accuracy."""
STEP_S, LEARNING_S = 0.2, 120
"""About what a batch of a ResNet-18 takes with its state stored, and learning the network, on two cores."""


@dataclass(frozen=True, slots=True)
class Portion:
    """What one budget leaves of one shift.

    Args:
        shift: its name.
        budget: share of their exact bytes that stored tensors may take; 1 is exact, 0 the frozen network.
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
        budgets: shares below 1; 0 measures the frozen network.
        progress: called after each client.
    """
    exact, nbytes = _follow(shift, 1.0, progress)
    right = float((exact == shift.labels).mean())
    yield Portion(shift.name, 1.0, len(shift.clients), nbytes, accuracy=100 * right, lost=0.0, changed=0.0)
    for budget in budgets:
        classes, nbytes = _follow(shift, budget, progress)
        accuracy, changed = float((classes == shift.labels).mean()), float((classes != exact).mean())
        yield Portion(
            shift=shift.name,
            budget=budget,
            clients=len(shift.clients),
            nbytes=nbytes,
            accuracy=100 * accuracy,
            lost=100 * (right - accuracy),
            changed=100 * changed,
        )


def _follow(shift: Shift, budget: float, progress: Progress) -> tuple[Classes, float]:
    """What all clients are answered, [C, N], and the mean size of their states in the end."""
    if budget == FROZEN:
        return frozen_classes(shift, progress), 0.0
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
        f"{row[0].budget:g}" if row[0].budget != FROZEN else "frozen",
        f"{nbytes:,.0f}",
        f"{100 * nbytes / exact:.1f} %",
        f"{rounded(statistics.fmean(each.accuracy for each in row), 2):.2f}",
        signed(-statistics.fmean(each.lost for each in row)),
        *(signed(-each.lost) for each in row),
        f"{statistics.fmean(each.changed for each in row):.2f} %",
    ]


def report_targets(portions: Sequence[Portion]) -> None:
    """Print whether the service's default budget keeps to the targets, if it was measured."""
    budget = STATE_BUDGET
    rows = by_budget(portions)
    if budget not in rows:
        return
    share = (
        100 * statistics.fmean(each.nbytes for each in rows[budget]) / statistics.fmean(each.nbytes for each in rows[1])
    )
    lost = statistics.fmean(each.lost for each in rows[budget])
    report = Report()
    report.table(f"A state stored at {budget:g}, the default of the service", "measured", "target")
    report.row("% of the exact bytes", share, verdict(share, SHARE))
    report.row("points of accuracy lost", rounded(lost, 2), verdict(lost, LOST))


def add_parser(commands: Subparsers) -> None:
    """Add the `budget` command."""
    text = "accuracy of atp whose stored states are given fewer bytes"
    budget = commands.add_parser("budget", help=text, description=text)
    budget.add_argument(
        "--data", type=Path, default=CARRIED, metavar="FOLDER", help="Fashion-MNIST (default: %(default)s)"
    )
    budget.add_argument(
        "--network",
        choices=tuple(BUDGETS),
        default=FASHION_CNN,
        help="resnet18 is learned first from some of the clients (default: %(default)s)",
    )
    budget.add_argument(
        "--shifts", nargs="+", choices=FASHION, help="default: all that the network was not learned from"
    )
    budget.add_argument(
        "--budgets", nargs="+", type=_budget, metavar="SHARE", help=f"of exact bytes (default: {_shares()})"
    )
    budget.add_argument(
        "--keep", type=Path, metavar="STORE", help="model store to keep the learned network in, for the next time"
    )
    budget.add_argument("--threads", type=positive, default=1, help="threads of torch (default: 1)")
    budget.add_argument("--json", type=Path, metavar="FILE", help="write the results of every shift")
    budget.add_argument("--plot", type=Path, metavar="FILE", help="draw them as .svg or .png")
    budget.set_defaults(run=run_budget)


def run_budget(arguments: argparse.Namespace) -> int:
    """Print the tables and write what else was asked for.

    Raises:
        BenchError: something cannot be read or written; said before anything is measured.
    """
    prepare_outputs((arguments.json, arguments.plot), arguments.keep)
    torch.set_num_threads(arguments.threads)
    budgets = [*(arguments.budgets or BUDGETS[arguments.network]), FROZEN]
    shifts = _resnet18(arguments, len(budgets)) if arguments.network == RESNET18 else _fashion_cnn(arguments)
    portions = [each for shift in shifts for each in _measure(shift, budgets)]
    print(to_text(portions))
    report_targets(portions)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(each) for each in portions], indent=2) + "\n")
    if arguments.plot:
        from acclimate_bench.budget import plot

        plot.draw(portions, arguments.plot)
    return 0


def _fashion_cnn(arguments: argparse.Namespace) -> Iterator[Shift]:
    if arguments.keep:
        raise BenchError(f"--keep is for a network that is learned here: use it with --network {RESNET18}")
    data, names = Folders(arguments.data, DIGITS), arguments.shifts or FASHION
    data.check(names)
    return (data.load(name) for name in names)


def _resnet18(arguments: argparse.Namespace, runs: int) -> Sequence[Shift]:
    names = arguments.shifts or resnet.CORRUPTED
    if resnet.CLEAN in names:
        raise BenchError(f"the ResNet-18 is learned from {resnet.CLEAN}: use {', '.join(resnet.CORRUPTED)}")
    data = Folders(arguments.data, DIGITS)
    data.check(FASHION)
    clean, *corrupted = map(data.load, (resnet.CLEAN, *resnet.CORRUPTED))
    evaluated = [shift.labels[resnet.DEFAULT.teachers :] for shift in corrupted if shift.name in names]
    batches = sum(labels.size for labels in evaluated) / BATCH
    seconds = STEP_S * runs * batches + (0 if resnet.is_kept(arguments.keep) else LEARNING_S)
    print(f"This takes about {seconds / 60:.0f} minutes on two cores.", flush=True)
    return [shift for shift in resnet.learned(clean, corrupted, arguments.keep) if shift.name in names]


def _measure(shift: Shift, budgets: Sequence[float]) -> list[Portion]:
    with progress_bar(len(shift.clients) * (1 + len(budgets)), "client") as advance:
        return list(measure(shift, budgets, advance))


def _shares() -> str:
    return "; ".join(f"{name} {' '.join(f'{each:g}' for each in budgets)}" for name, budgets in BUDGETS.items())


def _budget(text: str) -> float:
    accepted = "a share between 0 and 1, such as 0.25; 1 is always measured"
    return number(text, lambda share: 0 < share < 1, accepted)
