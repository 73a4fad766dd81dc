"""`acclimate-bench portfolio`: what choosing among several adapters by a few labels brings, on recorded streams.

Every arm predicts every stream once; they learn nothing from labels, so the replays need no network. The clients take
turns, a batch each. An arm at rest counts as the frozen model, as in the adapter; its state, which it would keep, goes
on. Once a batch is answered some of its rows are labelled, and count for the next answer of this
client and, by the fleet's shares, of every other. The rule is the adapter's own; only the store is not: what the fleet
tells is always up to date. Labelled are `asked` rows, drawn by lot among those where an arm and the frozen model
differ, those first in which the two best arms do; or `random` rows, of which only those count. Either way so many of
each client: what is not spent is kept.
"""

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from acclimate_adapters.portfolio import (
    DEFAULT_ARMS,
    NO_OPINION,
    Portfolio,
    at_rest,
    counted,
    remembered,
    scores,
    shrunk,
    two_best,
)
from acclimate_bench.accuracy.measure import BATCH, Classes, Hits
from acclimate_bench.accuracy.report import HARM, rounded, signed, table
from acclimate_bench.accuracy.selection import add_data, folders
from acclimate_bench.data.digits import DIGITS
from acclimate_bench.data.shift import Shift
from acclimate_bench.guard.replay import CHOICES, Choice
from acclimate_bench.guard.report import second_half
from acclimate_bench.options import Progress, Subparsers, number, positive, progress_bar

SHARES: Final = (0.01, 0.02, 0.05, 0.1)
DIGITS_ARMS: Final = ("t3a", "fedcal", "bn_adapt")
"""Those of the digits, which have no rates."""
_HEADING: Final = ("shift", "frozen", *("best arm", "is"), "portfolio", "vs best", "harmed, %", "worst client")
_NOTE: Final = f"""\
Accuracy in %, differences in points, second half of the streams, means of the runs. `best arm`: the arm that is best
for all clients of the shift together, known only afterwards. `harmed`: clients that lost more than {HARM:.0f} points
against the frozen model in that half; `worst client`: the largest loss of any client in any run."""


@dataclass(frozen=True, slots=True, eq=False)
class Predicted:
    """What each arm predicts of what the clients of a shift send, in the order of sending."""

    shift: str
    labels: Classes  # [C, N]
    arms: tuple[str, ...]  # A names
    classes: Classes  # [C, N, 1 + A]; the frozen model's first

    @property
    def right(self) -> Hits:
        """Which predictions are right, [C, N, 1 + A]."""
        return np.equal(self.classes, self.labels[:, :, None])


@dataclass(frozen=True, slots=True)
class Chosen:
    """The runs on one shift with one share of rows labelled; over the second half of the streams."""

    shift: str
    share: float
    frozen: float  # accuracy in %, and so the others
    best: float
    best_arm: str
    portfolio: float
    harmed: float  # share of the clients in %, mean of the runs
    worst: float  # points; 0 where nobody loses


def predict(shift: Shift, arms: Sequence[str], done: Progress) -> Predicted:
    """Let every arm follow every client; `done` is told of each."""
    adapter = Portfolio(tuple(arms))
    classes = []
    for row in range(len(shift.clients)):
        state, predicted = adapter.init(shift.model), []
        for x in torch.split(shift.x(row), BATCH):
            step = adapter.step(shift.model, state, x)
            assert step.frozen_logits is not None
            assert step.by_arm is not None
            state = step.state
            predicted.append(torch.cat([step.frozen_logits.argmax(dim=-1, keepdim=True), step.by_arm], dim=1))
        classes.append(torch.cat(predicted).numpy())
        done(shift.name)
    return Predicted(shift.name, shift.labels, ("none", *arms), np.stack(classes))


def replay(predicted: Predicted, share: float, choice: Choice, seed: int) -> Hits:
    """Where the answers [C, N] are right, with a share of the rows of each client labelled, chosen by this seed."""
    rng = np.random.default_rng(seed)
    clients, rows, arms = predicted.classes.shape
    right = predicted.right
    counts = np.zeros((clients, 2**arms))
    hits = np.empty((clients, rows), bool)
    budget = rng.uniform(size=(clients,))  # as if the streams began at any time
    nothing = np.full(arms, NO_OPINION)
    for start in range(0, rows, BATCH):
        batch = slice(start, start + BATCH)
        for client in rng.permutation(clients):
            fleet = shrunk(counts.sum(axis=0), nothing)
            rivals = two_best(scores(counts[client], fleet))
            hits[client, batch] = right[client, batch, rivals[0]]
            resting = at_rest(counts[client], arms)
            classes = np.where(resting, predicted.classes[client, batch, :1], predicted.classes[client, batch])
            budget[client] += share * len(classes)
            told = _told(classes, int(budget[client]), choice, rivals, rng)
            budget[client] -= len(told)
            labels = torch.from_numpy(predicted.labels[client, batch][told])
            counts[client] = remembered(counts[client] + counted(torch.from_numpy(classes[told]), labels).numpy())
    return hits


def _told(
    classes: Classes, most: int, choice: Choice, rivals: tuple[int, int], rng: np.random.Generator
) -> NDArray[np.intp]:
    """Which rows of a batch [B, 1 + A] are labelled; of those asked, first the ones in which the rivals differ."""
    if choice == "random":
        return rng.permutation(len(classes))[:most]
    rows = rng.permutation(np.flatnonzero((classes != classes[:, :1]).any(axis=1)))
    same = classes[rows, rivals[0]] == classes[rows, rivals[1]]
    return rows[np.argsort(same, kind="stable")][:most]


def choose(predicted: Predicted, share: float, choice: Choice, seeds: int) -> Chosen:
    """Runs with the seeds 0, 1, ... in numbers."""
    half = predicted.labels.shape[1] // 2
    arms = [second_half(predicted.right[:, :, arm]) for arm in range(len(predicted.arms))]
    best = int(np.argmax(arms))
    runs = [replay(predicted, share, choice, seed)[:, half:] for seed in range(seeds)]
    frozen = predicted.right[:, half:, 0].sum(axis=1)
    changes = [100 * (run.sum(axis=1) - frozen) / run.shape[1] for run in runs]  # exact: 2 points are not more than 2
    return Chosen(
        shift=predicted.shift,
        share=share,
        frozen=arms[0],
        best=arms[best],
        best_arm=predicted.arms[best],
        portfolio=100 * statistics.fmean(float(run.mean()) for run in runs),
        harmed=100 * statistics.fmean(float((each < -HARM).mean()) for each in changes),
        worst=min(0.0, *(float(each.min()) for each in changes)),
    )


def add_parser(commands: Subparsers) -> None:
    """Add the `portfolio` command."""
    text = "accuracy and harm where a few labels choose among several adapters, for each client"
    parser = commands.add_parser("portfolio", help=text, description=text)
    add_data(parser)
    parser.add_argument(
        "--arms", nargs="+", metavar="ARM", help=f"default: {', '.join(DEFAULT_ARMS)}; digits: {', '.join(DIGITS_ARMS)}"
    )
    parser.add_argument(
        "--labels", nargs="+", type=_share, default=SHARES, metavar="SHARE", help="of each client's rows"
    )
    parser.add_argument("--choice", choices=CHOICES, default="asked", help="which rows (default: %(default)s)")
    parser.add_argument("--seeds", type=positive, default=20, help="runs, each with other rows labelled (default: 20)")
    parser.set_defaults(run=run_portfolio)


def run_portfolio(arguments: argparse.Namespace) -> int:
    """Print the tables; raises BenchError where something cannot be read."""
    data = folders(arguments)
    torch.set_num_threads(arguments.threads)
    found = list[Chosen]()
    for name in arguments.shifts:
        shift, arms = data.load(name), arguments.arms or (DIGITS_ARMS if name in DIGITS else DEFAULT_ARMS)
        with progress_bar(len(shift.clients), "client") as done:
            predicted = predict(shift, arms, done)
        found += [choose(predicted, share, arguments.choice, arguments.seeds) for share in arguments.labels]
    print("\n\n".join(_text(found, arguments.choice, arguments.seeds)))
    return 0


def _text(found: Sequence[Chosen], choice: Choice, seeds: int) -> Iterator[str]:
    yield f"{_NOTE}\n{seeds} runs, with {choice} rows labelled."
    for share in sorted({each.share for each in found}):
        those = [each for each in found if each.share == share]
        yield f"## {100 * share:g} % of rows labelled"
        yield table(_HEADING, [*map(_row, those), *([_mean(those)] if len(those) > 1 else [])])


def _row(each: Chosen) -> list[str]:
    accuracies = (f"{rounded(value, 1):.1f}" for value in (each.frozen, each.best, each.portfolio))
    frozen, best, portfolio = accuracies
    over, harm = signed(each.portfolio - each.best, 1), f"{rounded(each.harmed, 1):.1f}"
    return [each.shift, frozen, each.best_arm, best, portfolio, over, harm, signed(each.worst, 1)]


def _mean(those: Sequence[Chosen]) -> list[str]:
    over = statistics.fmean(each.portfolio - each.best for each in those)
    harmed = statistics.fmean(each.harmed for each in those)
    return [
        "mean",
        *["-"] * 4,
        signed(over, 1),
        f"{rounded(harmed, 1):.1f}",
        signed(min(each.worst for each in those), 1),
    ]


def _share(text: str) -> float:
    return number(text, lambda share: 0 <= share <= 1, "a share of the rows from 0 to 1, such as 0.02")
