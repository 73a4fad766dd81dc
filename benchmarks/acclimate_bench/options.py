"""What the commands of the benchmark have in common: how numbers are read, and where results go."""

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from tqdm import tqdm

from acclimate_bench.errors import BenchError

Progress: TypeAlias = Callable[[str], None]
"""Is told what is done, in words."""

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""Where a command adds its own."""


def prepare_outputs(files: Sequence[Path | None], folder: Path | None = None) -> None:
    """Find out at once, and not after an hour, that something is cannot be written.

    Raises:
        BenchError: saying what.
    """
    needed = {path.parent for path in files if path is not None} | ({folder} if folder else set())
    try:
        for each in needed:
            each.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BenchError(f"cannot write there: {error}") from error


@contextmanager
def progress_bar(total: int, unit: str) -> Iterator[Progress]:
    """A bar that moves on with each call, and shows its words."""
    with tqdm(total=total, unit=unit, disable=None, leave=False) as bar:

        def advance(words: str) -> None:
            bar.set_description(words, refresh=False)
            bar.update()

        yield advance


def natural(text: str) -> int:
    """A whole number from 0."""
    return _at_least(0, text)


def positive(text: str) -> int:
    """A whole number from 1."""
    return _at_least(1, text)


def number(text: str, accepts: Callable[[float], bool], accepted: str) -> float:
    """A number; `accepts` says which ones, no NaN among them, and `accepted` says so in words."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not accepts(value):
        raise argparse.ArgumentTypeError(f"{text!r}: use {accepted}")
    return value


def _at_least(low: int, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = low - 1
    if not low <= number < 2**31:
        raise argparse.ArgumentTypeError(f"{text!r}: use a whole number from {low} to {2**31 - 1}")
    return number
