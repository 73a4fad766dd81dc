"""`acclimate-bench accuracy`: measure every method, and show what it gains and whom it harms."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from acclimate_bench.accuracy.measure import LeftOut, Result, count_clients, measure
from acclimate_bench.accuracy.methods import Method, choose
from acclimate_bench.accuracy.report import Protocol, Report, from_json, merge, to_json, to_text
from acclimate_bench.accuracy.selection import add_selection, folders
from acclimate_bench.data.shifts import Folders
from acclimate_bench.options import Subparsers, prepare_outputs, progress_bar


def add_parser(commands: Subparsers) -> None:
    """Add the `accuracy` command."""
    text = "accuracy of every method, against none and against recorded accuracies"
    accuracy = commands.add_parser("accuracy", help=text, description=text)
    add_selection(accuracy, default="the fast ones")
    accuracy.add_argument("--slow", action="store_true", help="also the methods that take minutes, on a subset")
    _add_outputs(accuracy)
    accuracy.set_defaults(run=run_accuracy)


def run_accuracy(arguments: argparse.Namespace) -> int:
    """Print the tables and write what else was asked for.

    Raises:
        BenchError: something cannot be read, measured or written; said before anything is measured.
    """
    prepare_outputs((arguments.json, arguments.plot), arguments.images)
    report = merge([from_json(path) for path in arguments.recorded]) if arguments.recorded else _measure(arguments)
    print(to_text(report), end="")
    if arguments.json:
        arguments.json.write_text(to_json(report))
    if arguments.plot or arguments.images:
        _draw(report, arguments)
    return 0


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results of every client")
    parser.add_argument("--plot", type=Path, metavar="PREFIX", help="draw gains and harm as PREFIX.png and PREFIX.svg")
    parser.add_argument("--images", type=Path, metavar="FOLDER", help="draw FOLDER/<adapter>.svg for each adapter")


def _measure(arguments: argparse.Namespace) -> Report:
    methods = choose(arguments.methods, slow=arguments.slow)
    data = folders(arguments)
    torch.set_num_threads(arguments.threads)
    found = [entry for name in arguments.shifts for entry in _measure_shift(data, name, methods, arguments.seed)]
    return Report(
        Protocol(seed=arguments.seed, threads=arguments.threads),
        tuple(entry for entry in found if isinstance(entry, Result)),
        tuple(entry for entry in found if isinstance(entry, LeftOut)),
    )


def _measure_shift(data: Folders, name: str, methods: Sequence[Method], seed: int) -> list[Result | LeftOut]:
    shift = data.load(name)
    with progress_bar(count_clients(shift, methods), "client") as advance:
        return list(measure(shift, methods, seed, advance))


def _draw(report: Report, arguments: argparse.Namespace) -> None:
    from acclimate_bench.accuracy import plot

    if arguments.plot:
        plot.draw_gains(report, arguments.plot)
    if arguments.images:
        plot.draw_adapters(report, arguments.images)
