"""What it costs that every answered batch is durable: time, bytes, takeovers.

    acclimate-bench state [--quick] [--no-timeline] [--json FILE]

Services run in processes of their own, each on a real Redis, and are asked over HTTP by the SDK. What is compared is
measured in turn in one run; absolute times depend on the machine and its disk. Some figures stand beside those of the
prototype that the state protocol was designed with, on 2 shared cores.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import torch
import uvloop

from acclimate_adapters import create
from acclimate_bench.cost.inputs import BUNDLES, fashion
from acclimate_bench.cost.remote import in_blocks, local
from acclimate_bench.cost.replica import Count, Replica, count, over_http, replica
from acclimate_bench.cost.report import Report
from acclimate_bench.cost.scripts import Fsync, measure_scripts
from acclimate_bench.cost.stepping_replica import in_process, replica_with_steps
from acclimate_bench.cost.takeover import measure_takeovers
from acclimate_service.compute.process import keep_freed_memory
from acclimate_store import Catalogue

ADAPTERS: Final = ("none", "fedcal", "atp")
COUNTED: Final = 16
"""Batches whose bytes are counted: fewer than make a snapshot due."""
BYTES_RATIO: Final = 1.2


@dataclass(frozen=True)
class Extent:
    """How much of everything there is to do."""

    requests: int
    scripts: int
    takeovers: int


THOROUGH: Final = Extent(requests=200, scripts=100, takeovers=5)
QUICK: Final = Extent(requests=40, scripts=20, takeovers=2)


def measure_requests(report: Report, appendfsync: Fsync, repeats: int, timeline: bool) -> None:
    """The same batches in process and over HTTP, and the bytes that Redis gets for them."""
    with ExitStack() as stack:
        base = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        common = {"model_store": BUNDLES, "adapter": "atp", "appendfsync": appendfsync, "timeline": timeline}
        journal = stack.enter_context(replica_with_steps(base / "journal", **common))
        whole = stack.enter_context(replica(base / "whole", journal="false", **common))
        for name in ("none", "fedcal"):
            journal.client.configure(name, name)
        if appendfsync == "everysec":
            count_bytes(report, journal, whole)
        time_requests(report, appendfsync, journal, whole, repeats)


def count_bytes(report: Report, journal: Replica, whole: Replica) -> None:
    """Bytes to Redis of each way to write."""
    images, states = fashion(), {name: state_bytes(name) for name in ADAPTERS}
    rows = (
        Count("none", journal, images, states["none"], COUNTED),
        Count("fedcal, whole", journal, images, states["fedcal"], COUNTED),
        Count("atp, by journal", journal, images, states["atp"], COUNTED, BYTES_RATIO),
        Count("atp, by journal, with its snapshots", journal, images, states["atp"], 6 * COUNTED),
        Count("atp, whole", whole, images, states["atp"], COUNTED),
    )
    for row, name in zip(rows, ADAPTERS[:2], strict=False):
        journal.client.configure(row.client, name)
    report.table("Bytes to Redis per batch, fashion-cnn", *Count.COLUMNS)
    for row in rows:
        count(report, row)


def state_bytes(name: str) -> int:
    """Bytes of a client's state after some batches."""
    bundle, adapter = Catalogue(BUNDLES).load("fashion-cnn", "1"), create(name)
    state = adapter.init(bundle.model)
    for _ in range(COUNTED):
        state = adapter.step(bundle.model, state, bundle.prepare(fashion())).state
    return len(state.to_bytes())


def time_requests(report: Report, appendfsync: Fsync, journal: Replica, whole: Replica, repeats: int) -> None:
    """What HTTP, the SDK and durability add to a step; the least is what a batch costs that changes nothing."""
    images = fashion()
    alone = {name: partial(in_process, journal, name) for name in ADAPTERS}
    served: Mapping[tuple[str, str], Callable[[], object]] = {
        ("atp", "?adapt=false: reads Redis, writes nothing"): over_http(journal, "atp", images, adapt=False),
        ("none", "whole"): over_http(journal, "none", images),
        ("fedcal", "whole"): over_http(journal, "fedcal", images),
        ("atp", "by journal"): over_http(journal, "atp", images),
        ("atp", "whole"): over_http(whole, "atp", images),
    }
    live, *timings = in_blocks(repeats, local(journal.client.live), *alone.values(), *map(local, served.values()))
    bare = dict(zip(ADAPTERS, timings, strict=False))
    report.table(f"20 raw images by the SDK, appendfsync {appendfsync} (ms)", "p50", "p95", "minus in process")
    report.row("GET /v2/health/live: HTTP and nothing else", live.median, live.spread[1], "")
    for name, timing in bare.items():
        report.row(f"{name} in process", timing.median, timing.spread[1], "")
    for (name, how), timing in zip(served, timings[len(bare) :], strict=True):
        added = timing.median - bare[name].median
        report.row(f"{name}, {how}", timing.median, timing.spread[1], added)


def run(options: argparse.Namespace) -> int:
    """Print all tables."""
    extent, report = QUICK if options.quick else THOROUGH, Report()
    keep_freed_memory()  # as the service does
    print(f"CPU, {torch.get_num_threads()} threads", flush=True)
    for appendfsync in ("everysec", "always"):
        measure_requests(report, appendfsync, extent.requests, options.timeline)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(measure_scripts(report, appendfsync, extent.scripts))
    measure_takeovers(report, extent.takeovers, BYTES_RATIO)
    report.finish(options.json)
    return 0
