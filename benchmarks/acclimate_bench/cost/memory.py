"""What becomes of the memory of a service that is asked by many clients, once by each."""

import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import uvloop

from acclimate_bench.cost.inputs import BUNDLES, fashion
from acclimate_bench.cost.replica import TAKEN, Replica, over_http, replica
from acclimate_bench.cost.report import Report, verdict
from acclimate_service.state import ClientScope, Limits, StateStore, Wire, connect

CACHE_BYTES: Final = 64 * 2**20
CALLERS: Final = 2
KEPT: Final = 500
"""Clients that stay in Redis, so that it does not grow to gigabytes; more than the cache holds of large states."""
GROWTH: Final = 0.05
SAMPLING_S: Final = 0.5


@dataclass
class Gauge:
    """The bytes of states in memory, as the service tells them from time to time."""

    served: Replica
    highest: float = 0.0
    _done: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look again and again for as long as the block lasts."""
        watcher = threading.Thread(target=self._watch)
        watcher.start()
        try:
            yield
        finally:
            self._done.set()
            watcher.join()

    def _watch(self) -> None:
        while not self._done.wait(SAMPLING_S):
            self.highest = max(self.highest, self.served.metric("acclimate_state_cache_bytes"))


def measure_memory(report: Report, adapter: str, clients: int) -> None:
    """A table of the memory while the clients come, and whether it and the states in it keep to their limits."""
    images, tenth = fashion(2), clients // 10
    settings = {"model_store": BUNDLES, "adapter": adapter, "cache_bytes": CACHE_BYTES, "threads": 1}
    report.table(
        f"Memory: {adapter}, clients with one batch of 2, cache of 64 MiB",
        "resident MB",
        "sessions",
        "evicted",
        "snapshots",
        "seconds",
    )
    levels, full, began = list[float](), list[float](), time.monotonic()
    with ExitStack() as stack:
        data_dir = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        served = stack.enter_context(replica(data_dir, **settings))
        callers = stack.enter_context(ThreadPoolExecutor(CALLERS))
        gauge = Gauge(served)
        stack.enter_context(gauge.watching())
        for done in range(tenth, clients + 1, tenth):
            batches = [over_http(served, f"once-{i}", images) for i in range(done - tenth, done)]
            list(callers.map(lambda send: send(), batches))
            levels.append(served.resident_mb)
            sessions, snapshots = served.metric("acclimate_state_sessions"), served.metric(**TAKEN)
            counts = (int(sessions), done - int(sessions), int(snapshots))
            report.row(f"{done} clients", levels[-1], *counts, time.monotonic() - began)
            full += levels[-1:] if counts[1] else []
            if snapshots:
                forgotten = range(max(0, done - tenth - KEPT), done - KEPT)
                uvloop.run(forget(served, [f"once-{i}" for i in forgotten]))
    report.table(f"Memory: {adapter}, limits", "share", "target")
    for name, since in (("change after the first fifth", levels[1:]), ("change while the cache is full", full)):
        if since:
            growth = max(abs(level / since[0] - 1) for level in since)
            report.row(name, growth, verdict(growth, GROWTH))
    most = gauge.highest / CACHE_BYTES
    report.row("most bytes of states, of the cache's", most, verdict(most, 1.0))


async def forget(served: Replica, clients: list[str]) -> None:
    """Delete clients as another replica would, so that the service has nothing to do with it."""
    store = StateStore(Wire(await connect(served.store)), Limits())
    for client in clients:
        await store.delete(ClientScope(client))
    await store.aclose()
