"""`acclimate-bench guard`: what a trickle of labels makes of every method."""

import argparse
from collections.abc import Sequence
from itertools import groupby, product
from pathlib import Path

import torch

from acclimate_bench.accuracy.measure import LeftOut, count_clients
from acclimate_bench.accuracy.methods import Method, choose
from acclimate_bench.accuracy.report import Protocol
from acclimate_bench.accuracy.selection import add_selection, folders
from acclimate_bench.data.shifts import Folders
from acclimate_bench.errors import BenchError
from acclimate_bench.guard import learning
from acclimate_bench.guard.replay import CHOICES, Choice, Streams, recorded_streams, replay
from acclimate_bench.guard.report import Afterwards, Guarded, GuardReport, from_json, merge, to_json
from acclimate_bench.guard.text import to_text
from acclimate_bench.options import Subparsers, number, positive, prepare_outputs, progress_bar

METHODS = ("atp_online", "em", "fedcal_pl", "fedcal_em", "bn_adapt", "tent", "balanced")
SHARES = (0.01, 0.05, 0.1)


def add_parser(commands: Subparsers) -> None:
    """Add the `guard` command."""
    text = "accuracy and harm of methods whose answers a guard by feedback chooses, for several shares of labels"
    guard = commands.add_parser("guard", help=text, description=text)
    add_selection(guard, default=", ".join(METHODS))
    guard.add_argument(
        "--labels", nargs="+", type=_share, default=SHARES, metavar="SHARE", help="of all rows (default: 0.01 0.05 0.1)"
    )
    guard.add_argument(
        "--choice",
        nargs="+",
        choices=CHOICES,
        default=("random",),
        help="which rows: random ones, or those that the service asks for (default: random)",
    )
    guard.add_argument("--seeds", type=positive, default=20, help="runs, each with other rows labelled (default: 20)")
    guard.add_argument(
        "--learn",
        nargs="+",
        type=_weight,
        metavar="WEIGHT",
        help="let methods learn from labels that count for so many rows each, without a guard",
    )
    guard.add_argument("--json", type=Path, metavar="FILE", help="write the results of every run")
    guard.add_argument("--plot", type=Path, metavar="PREFIX", help="draw them as PREFIX.png and PREFIX.svg")
    guard.add_argument("--spent", type=Path, metavar="PREFIX", help="draw labels against clients harmed, as PREFIX.svg")
    guard.set_defaults(run=run_guard)


def run_guard(arguments: argparse.Namespace) -> int:
    """Print the tables and write what else was asked for.

    Raises:
        BenchError: something cannot be read, measured or written; said before anything is measured.
    """
    if arguments.learn:
        print(_learn(arguments), end="")
        return 0
    prepare_outputs((arguments.json, arguments.plot, arguments.spent))
    report = merge([from_json(path) for path in arguments.recorded]) if arguments.recorded else _measure(arguments)
    print(to_text(report), end="")
    if arguments.json:
        arguments.json.write_text(to_json(report))
    if arguments.plot:
        from acclimate_bench.guard.plot import draw_guard

        draw_guard(report, arguments.plot)
    if arguments.spent:
        from acclimate_bench.guard.plot import draw_spent

        draw_spent(report, arguments.spent)
    return 0


def _measure(arguments: argparse.Namespace) -> GuardReport:
    methods = choose(arguments.methods or METHODS, slow=False)
    data = folders(arguments)
    torch.set_num_threads(arguments.threads)
    found = [entry for name in arguments.shifts for entry in _streams(data, name, methods, arguments.seed)]
    streams = [entry for entry in found if isinstance(entry, Streams)]
    return GuardReport(
        Protocol(seed=arguments.seed, threads=arguments.threads),
        arguments.seeds,
        _replays(streams, sorted(set(arguments.labels)), tuple(dict.fromkeys(arguments.choice)), arguments.seeds),
        tuple(entry for entry in found if isinstance(entry, LeftOut)),
        tuple(Afterwards.of([*group]) for _, group in groupby(streams, key=lambda entry: entry.shift)),
    )


def _learn(arguments: argparse.Namespace) -> str:
    if arguments.json or arguments.plot or arguments.recorded:
        raise BenchError("--learn prints a table; it takes none of --json, --plot and --from")
    prepare_outputs(())
    methods = learning.learners(choose(arguments.methods, slow=False) if arguments.methods else ())
    data, shares, weights = folders(arguments), sorted(set(arguments.labels)), sorted(set(arguments.learn))
    torch.set_num_threads(arguments.threads)
    runs = len(arguments.shifts) * learning.count_runs(methods, weights, shares, arguments.seeds)
    found: list[learning.Learned | LeftOut] = []
    with progress_bar(runs, "run") as done:
        for name in arguments.shifts:
            found += learning.measure(data.load(name), methods, weights, shares, arguments.seeds, done)
    return learning.to_text(found, weights, arguments.seeds)


def _streams(data: Folders, name: str, methods: Sequence[Method], seed: int) -> list[Streams | LeftOut]:
    shift = data.load(name)
    with progress_bar(count_clients(shift, methods), "client") as done:
        return list(recorded_streams(shift, methods, seed, done))


def _replays(
    found: Sequence[Streams], shares: Sequence[float], choices: Sequence[Choice], seeds: int
) -> tuple[Guarded, ...]:
    results = []
    with progress_bar(len(found) * len(shares) * len(choices), "result") as done:
        for choice, share, streams in product(choices, shares, found):
            runs = (replay(streams, share, seed, choice) for seed in range(seeds))
            results.append(Guarded.of(streams, share, runs, choice))
            done(f"{streams.shift} {streams.method} {share:g}")
    return tuple(results)


def _weight(text: str) -> float:
    return number(text, lambda weight: 0 < weight <= 1000, "a weight above 0, up to 1000, such as 1")


def _share(text: str) -> float:
    return number(text, lambda share: 0 <= share <= 1, "a share of the rows from 0 to 1, such as 0.05")
