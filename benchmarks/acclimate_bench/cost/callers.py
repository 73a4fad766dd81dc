"""Callers that never rest, each with clients of its own, as work of a process of its own.

    python -m acclimate_bench.cost.callers PORT SHAPE CALLERS

Asked for so many seconds, each caller sends batches of its clients in turn over a new kept-alive connection, the next
one once it has the last reply. Told are the seconds of CPU that this process took, and then those that each batch took.
"""

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from acclimate_bench.cost.load import Connection
from acclimate_bench.cost.remote import obey

CLIENTS: Final = 8
"""Clients of each caller."""


def call(connections: list[Connection], seconds: int) -> list[float]:
    """Let all call for so many seconds."""
    for connection in connections:
        connection.close()  # it may have been idle for longer than the server allows
        connection.connect()
    cpu = time.process_time()
    with ThreadPoolExecutor(len(connections)) as threads:
        taken = list(threads.map(partial(_call, time.perf_counter() + seconds), connections))
    return [time.process_time() - cpu, *(each for of_one in taken for each in of_one)]


def _call(end: float, connection: Connection) -> list[float]:
    taken, began = list[float](), time.perf_counter()
    while began < end:
        connection.exchange()
        now = time.perf_counter()
        taken.append(now - began)
        began = now
    return taken


if __name__ == "__main__":
    port, shape, callers = sys.argv[1:]
    obey(
        partial(
            call,
            [
                Connection(
                    int(port),
                    [f"/clients/caller-{caller}-{client}/predict" for client in range(CLIENTS)],
                    tuple(map(int, shape.split(","))),
                )
                for caller in range(int(callers))
            ],
        )
    )
