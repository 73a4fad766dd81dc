"""LitServe beside the service, on the same work.

It gets an environment of its own, since it pins packages that the service needs in other versions; torch and all
else that is installed here is seen from there.
"""

import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import httpx
import numpy as np

from acclimate_bench.cost.remote import PAUSE_S, Work, remote
from acclimate_bench.cost.replica import await_that, free_port, replica
from acclimate_bench.cost.report import Report

ROUNDS: Final = 6
REQUESTS: Final = 160
"""In each round, for each server."""
CONNECTIONS: Final = (1, 8)
BATCHES: Final = (1, 8)
"""Largest number of requests that LitServe computes together; the faster choice counts."""
TARGET: Final = 1.0
COLUMNS: Final = ("requests/s", "lowest", "highest", "of LitServe's", "target")


def prepare_litserve(folder: Path) -> Path:
    """The Python of an environment that has LitServe, made at the first call.

    Raises:
        subprocess.CalledProcessError, OSError: it cannot be made, as without a network.
    """
    python = folder / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    probe = subprocess.run([python, "-c", "import litserve"], capture_output=True, check=False)
    if probe.returncode:
        site = "import sysconfig; print(sysconfig.get_path('purelib'))"
        there = Path(subprocess.run([python, "-c", site], check=True, capture_output=True, text=True).stdout.strip())
        here = sysconfig.get_path("purelib")
        (there / "inherited.pth").write_text(f"import site; site.addsitedir({here!r})\n", encoding="utf-8")
        subprocess.run([python, "-m", "pip", "install", "--quiet", "litserve"], check=True)
    return python


@contextmanager
def litserve(python: Path, bundles: Path, model: str, threads: int, batches: int) -> Iterator[int]:
    """A LitServe server of a bundle; the port that it listens on."""
    port, script = free_port(), Path(__file__).with_name("peer_server.py")
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    command = [str(part) for part in (python, script, bundles, model, port, threads, batches)]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        await_that(lambda: process.poll() is not None or _is_healthy(port), "LitServe is ready")
        yield port
    finally:
        os.killpg(process.pid, 15)
        process.wait()


def compare(
    report: Report,
    python: Path,
    bundles: Path,
    model: str,
    shape: str,
    base: Path,
    threads: int,
    runtimes: Sequence[str],
) -> None:
    """Print the requests per second of the service without adaptation, by runtime, and of LitServe at the same load."""
    with ExitStack() as stack:
        loads: dict[str, tuple[int, str]] = {}
        for runtime in runtimes:
            settings = {"model_store": bundles, "model": model, "adapter": "none", "runtime": runtime}
            served = stack.enter_context(replica(base / runtime, threads=threads, **settings))
            port = int(served.url.rpartition(":")[2])
            loads[f"acclimate, none, durable, {runtime}"] = port, "/clients/load-{}/predict"
        for n in BATCHES:
            port = stack.enter_context(litserve(python, bundles, model, threads, n))
            loads[f"LitServe, torch, at most {n} at once"] = port, "/predict"
        for number in CONNECTIONS:
            works = {name: stack.enter_context(remote("load", *where, shape, number)) for name, where in loads.items()}
            rates = {name: _rates(runs) for name, runs in _alternate(works, REQUESTS).items()}
            _tell(report, number, rates, len(runtimes))


def _is_healthy(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def _alternate(works: dict[str, Work], requests: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work(requests)
    for _ in range(ROUNDS):
        for name, work in works.items():
            time.sleep(PAUSE_S)
            seconds[name] += work(requests)
    return seconds


def _rates(seconds: list[float]) -> list[float]:
    return [1 / each for each in seconds]


def _tell(report: Report, number: int, rates: dict[str, list[float]], ours: int) -> None:
    """A table; the first rows are ours, and have a target where connections are several."""
    report.table(f"Requests per second, {number} connections", *COLUMNS)
    medians = [float(np.median(values)) for values in rates.values()]
    peer = max(medians[ours:])
    for place, (name, values) in enumerate(rates.items()):
        ratio = medians[place] / peer
        aim = f">= {TARGET:g} {'met' if ratio >= TARGET else 'MISSED'}" if number > 1 else ""
        report.row(name, medians[place], min(values), max(values), *((ratio, aim) if place < ours else ("", "")))
