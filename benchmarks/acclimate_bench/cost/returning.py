"""Whether clients who come again and again are slower to serve because they are many."""

import itertools
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from acclimate_bench.cost.inputs import fashion
from acclimate_bench.cost.replica import Replica, over_http
from acclimate_bench.cost.report import Report, verdict

CALLERS: Final = 4
FEW: Final = 8
SLOWER: Final = 0.1
RESTORED: Final = {"name": "acclimate_state_loads_total", "tier": "redis"}


class Crowd:
    """Clients whose turns go round, asked by a fixed number of callers at once."""

    def __init__(self, served: Replica, callers: ThreadPoolExecutor, name: str, size: int) -> None:
        self._served = served
        self._callers = callers
        self._images = fashion()
        self.clients = [f"{name}-{i}" for i in range(size)]
        self._turns: Iterator[str] = itertools.cycle(self.clients)
        self.rates: list[float] = []

    def ask(self, requests: int) -> float:
        """Rows per second of so many requests."""
        began = time.perf_counter()
        list(self._callers.map(self._send, itertools.islice(self._turns, requests)))
        return requests * len(self._images) / (time.perf_counter() - began)

    def measure(self, requests: int) -> None:
        """Ask, and keep the rate."""
        self.rates.append(self.ask(requests))

    def _send(self, client: str) -> None:
        over_http(self._served, client, self._images)()


def measure_returning(
    report: Report, name: str, served: Replica, many: int, block: int, blocks: int, held: bool
) -> None:
    """A row of the rates of few clients and of many, in blocks that take turns.

    Args:
        report: where the row goes, and `name`, its name.
        served: where the clients are.
        many: how many clients.
        block: requests of a block, and `blocks`, how many of each kind there are.
        held: whether all fit in memory, so that they should be as fast as few.
    """
    with ThreadPoolExecutor(CALLERS) as callers:
        crowds = Crowd(served, callers, "few", FEW), Crowd(served, callers, "many", many)
        for crowd in crowds:
            crowd.ask(len(crowd.clients))
        before = served.metric(**RESTORED)
        for _, crowd in itertools.product(range(blocks), crowds):
            crowd.measure(block)
        restored = served.metric(**RESTORED) - before
    few, all_of_them = (statistics.median(crowd.rates) for crowd in crowds)
    slower = 1 - all_of_them / few
    report.row(name, few, all_of_them, slower, verdict(slower, SLOWER if held else None), int(restored))
