"""What it costs a ResNet-18 client, with 44.7 MB of state, that another replica goes on with it."""

import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from acclimate_bench.cost.inputs import noise
from acclimate_bench.cost.networks import write_resnet
from acclimate_bench.cost.replica import Count, Replica, await_that, count, replica, stream
from acclimate_bench.cost.report import Report
from acclimate_service.state import Limits

SHAPE: Final = 3, 32, 32
BATCHES: Final = 16
"""Too few to make a snapshot due, unless a step takes longer than 125 ms; then fewer entries are left to replay."""
COUNTED: Final = 4
"""Batches whose bytes are counted: too few even on a busy machine."""
STATE_BYTES: Final = 44_730_000
ROOM: Final = 64 * 2**20
"""Cache of a replica: one state fits, and the next client's evicts it."""
REPLAYS: Final = ("acclimate_state_replay_seconds_sum", "acclimate_state_replayed_batches_total")


@dataclass(frozen=True)
class Takeover:
    """Milliseconds of a client's first request on a replica, of the ones after it, and of the replay."""

    request: float
    warm: float
    replay: float
    entries: int


def measure_takeovers(report: Report, trials: int, ratio: float) -> None:
    """Print the bytes per batch of a large state, at most `ratio` times the batch, and what its takeovers cost."""
    with ExitStack() as stack:
        base = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_resnet(base / "bundles")
        common = {"model_store": base / "bundles", "model": "resnet18", "adapter": "atp", "cache_bytes": ROOM}
        first = stack.enter_context(replica(base / "first", **common))
        second = stack.enter_context(replica(base / "second", redis_url=first.store, drain_lead_s=0, **common))
        stream(second, "warm-up", noise(*SHAPE), BATCHES)
        report.table("Bytes to Redis per batch, ResNet-18", *Count.COLUMNS)
        count(report, Count("atp, by journal", first, noise(*SHAPE), STATE_BYTES, COUNTED, ratio))
        pairs = [_take_over(first, second, trial) for trial in range(trials)]
    columns = ("p50", "max", "minus a step", "replaying", "entries", "prototype")
    report.table(f"First batch on another replica, ResNet-18 after {BATCHES} batches (ms)", *columns)
    by_snapshot, by_journal = zip(*pairs, strict=True)
    _tell(report, "by its snapshot, after an eviction", by_snapshot, "23-49 (read)")
    _tell(report, "by its journal, after the lease", by_journal, "16 steps")


def _take_over(first: Replica, second: Replica, trial: int) -> tuple[Takeover, Takeover]:
    """Two clients of the first replica go to the second: one that the first has evicted, one that it still holds."""
    evicted, held = f"evicted-{trial}", f"held-{trial}"
    stream(first, evicted, noise(*SHAPE), BATCHES)
    stream(first, held, noise(*SHAPE), BATCHES)  # evicts the other
    lease_ends = time.monotonic() + Limits().lease_ms / 1000
    await_that(lambda: first.metric("acclimate_state_sessions") == 1, "the first client was evicted")
    by_snapshot = _observed(second, evicted)
    time.sleep(max(0.0, lease_ends - time.monotonic()))  # nothing tells that a lease has ended: it is one of time
    return by_snapshot, _observed(second, held)


def _observed(served: Replica, client: str) -> Takeover:
    before = [served.metric(name) for name in REPLAYS]
    request, *warm = stream(served, client, noise(*SHAPE), 6)
    seconds, entries = (served.metric(name) - value for name, value in zip(REPLAYS, before, strict=True))
    return Takeover(1000 * request, 1000 * float(np.median(warm)), 1000 * seconds, int(entries))


def _tell(report: Report, name: str, cases: Sequence[Takeover], prototype: str) -> None:
    requests = [case.request for case in cases]
    extra = float(np.median([case.request - case.warm for case in cases]))
    replay, entries = (float(np.median([getattr(case, part) for case in cases])) for part in ("replay", "entries"))
    report.row(name, float(np.median(requests)), max(requests), extra, replay, int(entries), prototype)
