"""What becomes of memory and speed when the clients are many.

acclimate bench scale [--quick] [--json FILE]
"""

import argparse
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import uvloop

from acclimate_service.bench.cost.bed import TAKEN, Replica, over_http, replica
from acclimate_service.bench.cost.report import Report, verdict
from acclimate_service.bench.cost.serve import BUNDLES
from acclimate_service.bench.cost.state import fashion
from acclimate_service.state import ClientScope, Limits, StateStore, Wire, connect

CACHE_BYTES: Final = 64 * 2**20
CALLERS: Final = 2
KEPT: Final = 500
"""Clients that stay in Redis, so that it does not grow to gigabytes; more than the cache holds of large states."""
GROWTH: Final = 0.05


def run(options: argparse.Namespace) -> int:
    """Print all tables."""
    report = Report()
    for adapter in ("fedcal", "atp"):
        measure_memory(report, adapter, 2_000 if options.quick else 10_000)
    report.finish(options.json)
    return 0


def measure_memory(report: Report, adapter: str, clients: int) -> None:
    """The memory of a service that is asked by many clients, once by each."""
    images, tenth = fashion(2), clients // 10
    settings = {"model_store": BUNDLES, "adapter": adapter, "cache_bytes": CACHE_BYTES, "threads": 1}
    columns = ("resident MB", "sessions", "evicted", "snapshots", "seconds")
    report.table(f"Memory: {adapter}, clients with one batch of 2, cache of 64 MiB", *columns)
    levels, began = list[float](), time.monotonic()
    with ExitStack() as stack:
        data_dir = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        served = stack.enter_context(replica(data_dir, **settings))
        callers = stack.enter_context(ThreadPoolExecutor(CALLERS))
        for done in range(tenth, clients + 1, tenth):
            batches = [over_http(served, f"once-{i}", images) for i in range(done - tenth, done)]
            list(callers.map(lambda send: send(), batches))
            levels.append(served.resident_mb)
            sessions, snapshots = served.metric("acclimate_state_sessions"), served.metric(**TAKEN)
            counts = (int(sessions), done - int(sessions), int(snapshots))
            report.row(f"{done} clients", levels[-1], *counts, time.monotonic() - began)
            if snapshots:
                forgotten = range(max(0, done - tenth - KEPT), done - KEPT)
                uvloop.run(forget(served, [f"once-{i}" for i in forgotten]))
    growth = max(abs(level / levels[1] - 1) for level in levels[1:])
    print(f"after the first fifth it changes by {100 * growth:.1f} %, {verdict(growth, GROWTH)}")


async def forget(served: Replica, clients: list[str]) -> None:
    """Delete clients as another replica would, so that the service has nothing to do with it."""
    store = StateStore(Wire(await connect(served.store)), Limits())
    for client in clients:
        await store.delete(ClientScope(client))
    await store.aclose()
