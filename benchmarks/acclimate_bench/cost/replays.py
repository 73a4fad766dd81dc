"""How long many clients wait when their states have to be computed again, or are feared to have changed."""

import argparse
import asyncio
import os
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx
import numpy as np
import redis
from numpy.typing import NDArray

from acclimate_bench.cost.inputs import BUNDLES, fashion, noise
from acclimate_bench.cost.networks import write_resnet
from acclimate_bench.cost.replica import Replica, await_that, replica, stream
from acclimate_bench.cost.report import Report, verdict
from acclimate_client.errors import DeadlineExceededError, RequestRunningError, Timeout, TooManyRequestsError
from acclimate_service.state.redis.embedded import EmbeddedRedis

ENTRIES: Final = 12
"""Batches of each client before its replica is killed; a slow machine has taken snapshots of some."""
WARM: Final = 8
ROUNDS: Final = 3
"""Of warm clients; the fastest counts."""
CALLERS: Final = 32
"""Clients that ask at the same time."""
FILLERS: Final = 2
"""And while their journals are filled: nobody waits so long that a slow machine takes snapshots meanwhile."""
DEADLINE_S: Final = 5.0
"""Of each request; it is sent again as often as need be."""
STEPS_RATIO: Final = 1.05
TIME_RATIO: Final = 1.2
ROUND_RATIO: Final = 2.0
CACHE: Final = 8 * 2**30
REPLAYED: Final = "acclimate_state_replayed_batches_total"


@dataclass(frozen=True)
class Extent:
    """How many clients there are."""

    resnet: int
    fashion: int


THOROUGH: Final = Extent(resnet=64, fashion=200)
QUICK: Final = Extent(resnet=4, fashion=12)


@contextmanager
def private_redis(directory: Path) -> Iterator[str]:
    """A Redis that outlives the replicas on it."""
    with asyncio.Runner() as runner:
        server = EmbeddedRedis(directory)
        runner.run(server.__aenter__())
        try:
            yield server.url
        finally:
            runner.run(server.__aexit__(None, None, None))


def send_round(served: Replica, clients: Sequence[str], images: NDArray[np.uint8], at_once: int = CALLERS) -> float:
    """Seconds until each client has its answer to one batch more."""

    def send(client: str) -> None:
        key, answered = uuid.uuid4().hex, False
        while not answered:
            # the replay goes on meanwhile; who is told that the device is busy comes again, too
            with suppress(Timeout, DeadlineExceededError, RequestRunningError, TooManyRequestsError):
                served.client.predict(client, images, idempotency_key=key, layout="NCHW", timeout=DEADLINE_S)
                answered = True

    began = time.perf_counter()
    with ThreadPoolExecutor(at_once) as callers:
        list(callers.map(send, clients))
    return time.perf_counter() - began


def journal_entries(served: Replica, clients: Sequence[str]) -> int:
    """Batches in the journals of these clients."""
    found = [httpx.get(f"{served.url}/clients/{client}").json()["state"] for client in clients]
    return sum(int(state["journal_entries"]) for state in found)


def measure_crash(report: Report, clients: int) -> None:
    """ResNet-18: a replica is killed, and all its clients come to another one at once."""
    images, names = noise(3, 32, 32), [f"cam-{number}" for number in range(clients)]
    with ExitStack() as stack:
        base = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_resnet(base / "bundles")
        url = stack.enter_context(private_redis(base / "redis"))
        common = {
            "model_store": base / "bundles",
            "model": "resnet18",
            "adapter": "atp",
            "cache_bytes": CACHE,
            "redis_url": url,
            "drain_lead_s": 0,
        }
        first = stack.enter_context(replica(base / "first", **common))
        second = stack.enter_context(replica(base / "second", **common))
        for _ in range(ENTRIES):
            send_round(first, names, images, FILLERS)
        entries = journal_entries(first, names)
        os.kill(first.pid, 9)
        step = float(np.median(stream(second, "plain", images, WARM)[2:]))
        before = second.metric(REPLAYED)
        seconds = send_round(second, names, images)
        replayed = second.metric(REPLAYED) - before
        step = (step + float(np.median(stream(second, "plain", images, WARM)))) / 2
    floor = step * (entries + clients)
    report.table(f"{clients} ResNet-18 clients after kill -9", "entries", "found", "ratio", "target")
    report.row(
        "batches computed again", entries, int(replayed), replayed / entries, verdict(replayed / entries, STEPS_RATIO)
    )
    report.table("and how long until all are answered (s)", "plain steps", "found", "ratio", "target")
    report.row("first batch of every client", floor, seconds, seconds / floor, verdict(seconds / floor, TIME_RATIO))


def measure_interruption(report: Report, clients: int) -> None:
    """fashion-cnn: the subscription to what other replicas say breaks, so that any client may have been deleted."""
    images, names = fashion(), [f"cam-{number}" for number in range(clients)]
    with ExitStack() as stack:
        base = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        served = stack.enter_context(replica(base / "data", model_store=BUNDLES, adapter="atp"))
        stream(served, "warm-up", images, WARM)
        cold = send_round(served, names, images)
        warm = min(send_round(served, names, images) for _ in range(ROUNDS))
        before = served.metric(REPLAYED)
        with redis.Redis.from_url(served.store) as store:
            store.client_kill_filter(_type="pubsub")
            await_that(lambda: bool(store.pubsub_numsub("acc:drop")[0][1]), "the replica listens again")
        seconds = send_round(served, names, images)
        replayed = served.metric(REPLAYED) - before
    columns = ("cold round", "warm round", "found", "ratio to cold", "computed again", "target")
    report.table(f"{clients} fashion-cnn clients after an interruption (s)", *columns)
    ratio = seconds / cold
    report.row("one batch of every client", cold, warm, seconds, ratio, int(replayed), verdict(ratio, ROUND_RATIO))


def run(options: argparse.Namespace) -> int:
    """Print all tables."""
    extent, report = QUICK if options.quick else THOROUGH, Report()
    measure_interruption(report, extent.fashion)
    measure_crash(report, extent.resnet)
    report.finish(options.json)
    return 0
