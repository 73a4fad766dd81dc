"""What a client that asks for little waits for beside one that floods the service."""

import io
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
from numpy.typing import NDArray

from acclimate_bench.cost import flood
from acclimate_bench.cost.inputs import fashion
from acclimate_bench.cost.replica import Replica, over_http
from acclimate_bench.cost.report import Report, verdict

FLOODING: Final = 32
"""Batches of the flooding client that are under way at any time."""
BLOCKS: Final = 4
LONGER: Final = 3.0


def measure_fairness(report: Report, served: Replica, adapters: tuple[str, ...], seconds: float) -> None:
    """A row for each adapter: a light client alone and beside a flood, in blocks of so many seconds that take turns."""
    report.table(
        f"One client with a batch at a time beside another with {FLOODING}, batches of 20 (ms)",
        "alone p50",
        "alone p99",
        "beside p50",
        "beside p99",
        "p99 ratio",
        "target",
    )
    for adapter in adapters:
        light, heavy = f"light-{adapter}", f"heavy-{adapter}"
        for client in (light, heavy):
            served.client.configure(client, adapter)
        alone, beside = list[float](), list[float]()
        _ask(served, light, seconds / 4)
        for _ in range(BLOCKS):
            alone += _ask(served, light, seconds)
            with flooding(served, heavy):
                beside += _ask(served, light, seconds)
        ratio = _p99(beside) / _p99(alone)
        cells = (float(np.median(alone)), _p99(alone), float(np.median(beside)), _p99(beside))
        report.row(adapter, *cells, ratio, verdict(ratio, LONGER))


@contextmanager
def flooding(served: Replica, client: str) -> Iterator[None]:
    """A client that keeps many batches under way for the block, from a process of its own."""
    command = (sys.executable, "-m", flood.__name__, served.url, client, str(FLOODING))
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(npy(fashion()))
        process.stdin.close()
        if not process.stdout.readline():
            raise SystemExit("the flooding client came to nothing; its messages are above")
        yield
    finally:
        process.terminate()
        process.wait()


def npy(images: NDArray[np.uint8]) -> bytes:
    """The batch as NumPy stores it."""
    buffer = io.BytesIO()
    np.save(buffer, images)
    return buffer.getvalue()


def _ask(served: Replica, client: str, seconds: float) -> list[float]:
    """Milliseconds of each batch of so many seconds."""
    send, taken, end = over_http(served, client, fashion()), list[float](), time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        send()
        taken.append(1000 * (time.perf_counter() - began))
    return taken


def _p99(milliseconds: list[float]) -> float:
    return float(np.quantile(milliseconds, 0.99))
