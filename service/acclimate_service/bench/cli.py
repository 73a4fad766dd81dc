"""`acclimate bench accuracy`: measure every method and compare it with recorded accuracies."""

import argparse
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from acclimate_service.bench.accuracy import LeftOut, Result, measure, streams
from acclimate_service.bench.data import CARRIED, SHIFTS, check_folder, load_shift
from acclimate_service.bench.errors import BenchError
from acclimate_service.bench.methods import METHODS, Method, choose
from acclimate_service.bench.report import Protocol, Report, from_json, merge, to_json, to_text

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(subparsers: "Subparsers") -> None:
    """Add the `bench` command; it sets `run`, a function from the parsed arguments to the exit code, as others do."""
    bench = subparsers.add_parser("bench", help="measure the methods")
    commands = bench.add_subparsers(dest="bench_command", required=True)
    text = "accuracy of every method, against none and against recorded accuracies"
    accuracy = commands.add_parser("accuracy", help=text, description=text)
    _add_selection(accuracy)
    _add_outputs(accuracy)
    accuracy.set_defaults(run=run_accuracy)


def run_accuracy(arguments: argparse.Namespace) -> int:
    """Print the tables and write what else was asked for.

    Raises:
        BenchError: something cannot be read, measured or written; said before anything is measured.
    """
    _prepare_outputs(arguments)
    report = merge([from_json(path) for path in arguments.recorded]) if arguments.recorded else _measure(arguments)
    print(to_text(report), end="")
    if arguments.json:
        arguments.json.write_text(to_json(report))
    if arguments.plot or arguments.images:
        _draw(report, arguments)
    return 0


def _add_selection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data", type=Path, default=CARRIED, metavar="FOLDER", help="benchmark folder (default: %(default)s)"
    )
    parser.add_argument("--shifts", nargs="+", choices=SHIFTS, default=SHIFTS, help="default: all of them")
    names = ", ".join(method.name for method in METHODS)
    parser.add_argument(
        "--methods", nargs="+", default=(), metavar="METHOD", help=f"of {names}; default: the fast ones"
    )
    parser.add_argument("--slow", action="store_true", help="also the methods that take minutes, on a recorded subset")
    parser.add_argument("--seed", type=_natural, default=0, help="of the methods that draw random numbers (default: 0)")
    parser.add_argument("--threads", type=_positive, default=1, help="threads of torch (default: 1, as recorded)")
    parser.add_argument(
        "--from", dest="recorded", nargs="+", type=Path, metavar="JSON", help="show earlier runs instead of measuring"
    )


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results of every client")
    parser.add_argument("--plot", type=Path, metavar="PREFIX", help="draw the gains as PREFIX.png and PREFIX.svg")
    parser.add_argument("--images", type=Path, metavar="FOLDER", help="draw FOLDER/<adapter>.svg for each adapter")


def _measure(arguments: argparse.Namespace) -> Report:
    methods = choose(arguments.methods, slow=arguments.slow)
    check_folder(arguments.data, arguments.shifts)
    torch.set_num_threads(arguments.threads)
    found = [
        entry for name in arguments.shifts for entry in _measure_shift(arguments.data, name, methods, arguments.seed)
    ]
    return Report(
        Protocol(seed=arguments.seed, threads=arguments.threads),
        tuple(entry for entry in found if isinstance(entry, Result)),
        tuple(entry for entry in found if isinstance(entry, LeftOut)),
    )


def _measure_shift(folder: Path, name: str, methods: Sequence[Method], seed: int) -> list[Result | LeftOut]:
    from tqdm import tqdm  # of the extra `bench`

    shift = load_shift(folder, name)
    with tqdm(total=streams(shift, methods), unit="client", disable=None, leave=False) as bar:

        def advance(words: str) -> None:
            bar.set_description(words, refresh=False)
            bar.update()

        return list(measure(shift, methods, seed, advance))


def _draw(report: Report, arguments: argparse.Namespace) -> None:
    from acclimate_service.bench import plot  # of the extra `bench`

    if arguments.plot:
        plot.draw_gains(report, arguments.plot)
    if arguments.images:
        plot.draw_adapters(report, arguments.images)


def _prepare_outputs(arguments: argparse.Namespace) -> None:
    """Find out at once, and not after an hour, that something is missing or cannot be written."""
    absent = [name for name in ("matplotlib", "tqdm") if importlib.util.find_spec(name) is None]
    if absent:
        raise BenchError(f"the benchmark needs {' and '.join(absent)}: pip install 'acclimate[bench]'")
    files = [path for path in (arguments.json, arguments.plot) if path is not None]
    folders = {path.parent for path in files} | ({arguments.images} if arguments.images else set())
    try:
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BenchError(f"cannot write there: {error}") from error


def _natural(text: str) -> int:
    return _at_least(0, text)


def _positive(text: str) -> int:
    return _at_least(1, text)


def _at_least(low: int, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = low - 1
    if not low <= number < 2**31:
        raise argparse.ArgumentTypeError(f"{text!r}: use a whole number from {low} to {2**31 - 1}")
    return number
