"""Which data and which methods the words of a command select."""

import argparse
from pathlib import Path

from acclimate_bench.accuracy.methods import METHODS
from acclimate_bench.data.digits import CARRIED as DIGITS_CARRIED
from acclimate_bench.data.fashion import CARRIED as FASHION_CARRIED
from acclimate_bench.data.shifts import SHIFTS, Folders
from acclimate_bench.options import natural, positive


def add_data(parser: argparse.ArgumentParser) -> None:
    """Add what selects data."""
    parser.add_argument(
        "--data", type=Path, default=FASHION_CARRIED, metavar="FOLDER", help="Fashion-MNIST (default: %(default)s)"
    )
    parser.add_argument(
        "--digits", type=Path, default=DIGITS_CARRIED, metavar="FOLDER", help="digits (default: %(default)s)"
    )
    parser.add_argument("--shifts", nargs="+", choices=SHIFTS, default=SHIFTS, help="default: all of them")
    parser.add_argument("--threads", type=positive, default=1, help="threads of torch (default: 1, as recorded)")


def add_selection(parser: argparse.ArgumentParser, default: str) -> None:
    """Add what selects data and methods; `default` says which methods run unless some are named."""
    add_data(parser)
    names = ", ".join(method.name for method in METHODS)
    parser.add_argument("--methods", nargs="+", default=(), metavar="METHOD", help=f"of {names}; default: {default}")
    parser.add_argument("--seed", type=natural, default=0, help="of the methods that draw random numbers (default: 0)")
    parser.add_argument(
        "--from", dest="recorded", nargs="+", type=Path, metavar="JSON", help="show earlier runs instead of measuring"
    )


def folders(arguments: argparse.Namespace) -> Folders:
    """Where the data lie that were asked for, found to be complete.

    Raises:
        BenchError: naming what is missing.
    """
    chosen = Folders(arguments.data, arguments.digits)
    chosen.check(arguments.shifts)
    return chosen
