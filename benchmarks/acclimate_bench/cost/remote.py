"""Pieces of work in processes of their own, which sleep while others are measured.

An idle thread of OpenMP keeps its core busy for some milliseconds before it sleeps, so what is compared runs in blocks,
in turn, with a pause before each.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeAlias

from acclimate_bench.cost.timing import Timing

Work: TypeAlias = Callable[[int], list[float]]
"""Runs so often, one after the other, and gives the seconds of each time."""

BLOCK: Final = 20
PAUSE_S: Final = 0.05
"""Before each block. It is a pause and no condition, since nothing tells when a thread of OpenMP has gone to sleep."""
LEAD: Final = 2
"""Times at the beginning of a block that do not count: caches are cold after the pause."""


def local(work: Callable[[], object]) -> Work:
    """Work of this process."""

    def run(times: int) -> list[float]:
        seconds = []
        for _ in range(times):
            began = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - began)
        return seconds

    return run


@contextmanager
def remote(module: str, *arguments: object) -> Iterator[Work]:
    """Work of another process, which runs a module of this package that ends in `obey`."""
    command = [sys.executable, "-m", f"acclimate_bench.cost.{module}", *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        asked, told = process.stdin, process.stdout
        assert asked is not None
        assert told is not None

        def run(times: int) -> list[float]:
            print(times, file=asked, flush=True)
            seconds: list[float] = json.loads(told.readline())
            return seconds

        try:
            yield run
        finally:
            asked.close()  # it ends with its input


def obey(work: Work) -> None:
    """Work whenever whoever started this process asks, until it has no more to ask."""
    for line in sys.stdin:
        print(json.dumps(work(int(line))), flush=True)


def in_blocks(repeats: int, *works: Work, block: int = BLOCK) -> tuple[Timing, ...]:
    """Time each piece of work about `repeats` times, in blocks and in turn, after a warm-up."""
    for work in works:
        work(block)
    times: tuple[list[float], ...] = tuple([] for _ in works)
    for _ in range(-(-repeats // block)):
        for work, seconds in zip(works, times, strict=True):
            time.sleep(PAUSE_S)
            seconds += work(block + LEAD)[LEAD:]
    return tuple(Timing(tuple(seconds)) for seconds in times)
