"""`acclimate-bench`: accuracy of every method, with and without the guard, and what adapting costs, measured."""

import argparse
import signal
import sys
from collections.abc import Sequence

from acclimate_adapters import AcclimateError
from acclimate_bench.accuracy import command as accuracy
from acclimate_bench.accuracy import rates
from acclimate_bench.budget import command as budget
from acclimate_bench.cost import commands as cost
from acclimate_bench.guard import command as guard
from acclimate_bench.guard import portfolio


def main(words: Sequence[str] | None = None) -> int:
    """Run one benchmark; the exit status is 0, or 2 with one clear message when it cannot."""
    arguments = _parser().parse_args(words)
    try:
        return int(arguments.run(arguments))
    except AcclimateError as error:
        print(f"acclimate-bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="acclimate-bench", description="Claims about Acclimate, measured.")
    commands = parser.add_subparsers(dest="command", required=True)
    accuracy.add_parser(commands)
    rates.add_parser(commands)
    guard.add_parser(commands)
    portfolio.add_parser(commands)
    budget.add_parser(commands)
    cost.add_parsers(commands)
    return parser
