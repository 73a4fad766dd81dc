"""What becomes of memory, speed and fairness when the clients are many.

acclimate-bench scale [--quick] [--json FILE]
"""

import argparse
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from acclimate_bench.cost.fairness import measure_fairness
from acclimate_bench.cost.inputs import BUNDLES
from acclimate_bench.cost.memory import measure_memory
from acclimate_bench.cost.replica import replica
from acclimate_bench.cost.report import Report
from acclimate_bench.cost.returning import measure_returning

MIB: Final = 2**20
ADAPTERS: Final = ("atp", "fedcal")
ROOMY: Final = 256 * MIB
"""Cache that holds all returning clients, the default of the service."""
TIGHT: Final = {"atp": 128 * 1024, "fedcal": 4 * 1024}
"""Bytes of a cache for each returning client, so that about a third of them fit."""


@dataclass(frozen=True)
class Extent:
    """How much of everything there is to do: clients, requests in a block and blocks of each kind, seconds."""

    passing: int
    returning: int
    block: int
    blocks: int
    seconds: float


THOROUGH: Final = Extent(passing=10_000, returning=500, block=250, blocks=4, seconds=4.0)
QUICK: Final = Extent(passing=800, returning=50, block=25, blocks=2, seconds=0.5)


def run(options: argparse.Namespace) -> int:
    """Print all tables."""
    report, extent = Report(), QUICK if options.quick else THOROUGH
    _returning(report, extent)
    _measure_fairness(report, extent)
    for adapter in ADAPTERS:
        measure_memory(report, adapter, extent.passing)
    report.finish(options.json)
    return 0


def _returning(report: Report, extent: Extent) -> None:
    report.table(
        f"Returning clients in turn, batches of 20, {extent.returning} against 8",
        "rows/s of 8",
        f"rows/s of {extent.returning}",
        "slower by",
        "target",
        "read back",
    )
    for adapter in ADAPTERS:
        for name, cache in (("all in memory", ROOMY), ("a third in memory", TIGHT[adapter] * extent.returning)):
            with ExitStack() as stack:
                data_dir = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                settings = {"model_store": BUNDLES, "adapter": adapter, "cache_bytes": cache, "threads": 1}
                served = stack.enter_context(replica(data_dir, **settings))
                held = cache == ROOMY
                measure_returning(
                    report, f"{adapter}, {name}", served, extent.returning, extent.block, extent.blocks, held
                )


def _measure_fairness(report: Report, extent: Extent) -> None:
    with ExitStack() as stack:
        data_dir = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        served = stack.enter_context(replica(data_dir, model_store=BUNDLES, threads=1))
        measure_fairness(report, served, ("none", "atp"), extent.seconds)
