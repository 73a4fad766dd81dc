"""What the scripts of the state protocol cost by themselves, without HTTP and without a model.

Every call goes the way that the service's calls go, one after the other, each kind in its turn, on a Redis of its own.
"""

import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeAlias, TypeVar

from acclimate_bench.cost.report import Report
from acclimate_bench.cost.timing import Timing
from acclimate_service.state import (
    Batch,
    Change,
    ClientScope,
    Limits,
    Link,
    StateStore,
    Wire,
    connect,
    new_id,
    random_rid,
)
from acclimate_service.state.journal import Appended, Flipped, Opened
from acclimate_service.state.outcomes import Attempt, Committed
from acclimate_service.state.records import Basis, Snapshot
from acclimate_service.state.redis.embedded import EmbeddedRedis
from acclimate_service.state.redis.wire import Argument

Fsync: TypeAlias = Literal["everysec", "always"]
Work: TypeAlias = Callable[[], Awaitable[float]]
"""Prepares what is to be measured, and returns the seconds that the measured part took."""
T = TypeVar("T")
KIB: Final = 1024
MODEL: Final = "0" * 16
ANSWER: Final = b"a" * 800
SNAPSHOT_BYTES: Final = 44_730_000
BALANCED_BYTES: Final = 77_000
# Chunks whatever is not committed `inline`; journals never fill, and snapshots are uploaded without pauses.
LIMITS: Final = Limits(inline_max=1, chunk_gap_ms=0, journal_entries=10**6, journal_bytes=2**40)

PROTOTYPE: Final[Mapping[str, tuple[str, str]]] = {
    "commit 4 KiB": ("0.09", "4.0"),
    "commit 16 KiB": ("0.12", "4.0"),
    "commit 64 KiB": ("0.24 (0.28)", "4.0"),
    "commit 1.04 MB inline": ("4.0 (5.8)", "8.0 (12)"),
    "append 60 KiB": ("0.17", "4.0"),
    "append 614 kB": ("1.3", "4.0"),
    "append 3 MB": ("8.6 (14)", "14.5"),
    "open": ("0.05", "4.0"),
    "load 64 KiB": ("0.12", "0.16"),
    "snapshot 44.73 MB: seal, upload": ("154-237", "218-376"),
    "snapshot 44.73 MB: flip": ("0.8-2.2", "0.8-2.2"),
    "snapshot 44.73 MB: read, verify": ("23-49", "14-35"),
}
"""Median (p95) in ms, of a prototype on 2 shared cores: appendfsync everysec, always."""


@dataclass(frozen=True)
class Bench:
    """A Redis of its own, and the ways to it."""

    link: Link
    store: StateStore

    async def raw(self, *command: Argument) -> float:
        """One command on a connection of the same pool: what no script can undercut."""
        lane = await self.link.lane(None)
        return await seconds(lane.ask(*command))


@dataclass
class Committing:
    """Commits states of one size, each on the last one."""

    store: StateStore
    state: bytes
    inline: bool = True
    client: ClientScope = field(default_factory=lambda: ClientScope(new_id()))
    basis: Basis = field(default_factory=Basis)

    async def __call__(self) -> float:
        """Commit once more."""
        attempt, began = _attempt(), time.perf_counter()
        outcome = await self.store.commit(
            client=self.client,
            model=MODEL,
            basis=self.basis,
            attempt=attempt,
            change=Change("", self.state, ANSWER),
            adapter="atp",
            inline=self.inline,
        )
        took = time.perf_counter() - began
        self.basis = _only(Committed, outcome).basis
        return took


@dataclass
class Journalling:
    """Appends batches of one size to a journal; the answers follow outside the measured time, as in the service."""

    store: StateStore
    batch: Batch
    client: ClientScope = field(default_factory=lambda: ClientScope(new_id()))
    nonce: str = field(default_factory=new_id)
    basis: Basis = field(default_factory=Basis)
    fence: str = ""

    async def open(self) -> float:
        """Open the journal, anew if it is open."""
        began = time.perf_counter()
        outcome = await self.store.journal.open(self.client, MODEL, self.basis, self.nonce, "")
        took = time.perf_counter() - began
        opened = _only(Opened, outcome)
        self.basis = Basis(opened.life, opened.head.seq, opened.head.tag, opened.head.sid)
        self.fence = opened.head.fence
        return took

    async def __call__(self) -> float:
        """Append once more."""
        if not self.fence:
            await self.open()
        attempt, began = _attempt(), time.perf_counter()
        outcome = await self.store.journal.append(
            self.client, MODEL, self.basis, self.fence, attempt, self.batch, "cpu"
        )
        took = time.perf_counter() - began
        self.basis = _only(Appended, outcome).basis
        await self.store.journal.answer(self.client, MODEL, attempt.rid, attempt.tag, ANSWER)
        return took


@dataclass
class Snapshotting:
    """Uploads a snapshot, makes it the base, and reads it as the next opener would."""

    journalling: Journalling
    state: bytes
    flips: list[float] = field(default_factory=list)
    reads: list[float] = field(default_factory=list)

    async def __call__(self) -> float:
        """The upload; how long it took to flip and to read is kept."""
        await self.journalling()
        store, client, basis = self.journalling.store, self.journalling.client, self.journalling.basis
        began = time.perf_counter()
        uploaded = await store.journal.upload(client, MODEL, basis, "atp", self.state)
        took = time.perf_counter() - began
        snapshot, sealed = _only(tuple, uploaded)
        flip = store.journal.flip(client, MODEL, basis, self.journalling.fence, snapshot, sealed)
        self.flips.append(await seconds(flip, Flipped))
        self.journalling.basis = Basis(basis.life, basis.seq, basis.tag, _only(Snapshot, snapshot).sid)
        head = (await store.load(client, MODEL)).head
        assert head is not None
        self.reads.append(await seconds(store.read_state(client, head)))
        return took


async def measure_scripts(report: Report, appendfsync: Fsync, repeats: int) -> None:
    """Print what each script costs beside its floor and the prototype's figure."""
    report.table(f"Scripts alone, appendfsync {appendfsync} (ms)", "p50", "p95", "prototype")
    async with _bench(appendfsync) as bench:
        _tell(report, appendfsync, await _in_turn(await _small(bench), repeats))
    async with _bench(appendfsync) as bench:
        taking = Snapshotting(Journalling(bench.store, _batch(KIB)), os.urandom(SNAPSHOT_BYTES))
        timings = await _in_turn(_large(bench, taking), max(5, repeats // 20))
        timings["snapshot 44.73 MB: flip"] = Timing(tuple(taking.flips[1:]))
        timings["snapshot 44.73 MB: read, verify"] = Timing(tuple(taking.reads[1:]))
        _tell(report, appendfsync, timings)


async def _small(bench: Bench) -> dict[str, Work]:
    """What a reply may wait for."""
    store, opening, loading = bench.store, Journalling(bench.store, _batch(1)), ClientScope("loading")
    await Committing(store, os.urandom(64 * KIB), client=loading)()
    committing = {f"commit {size} KiB": Committing(store, os.urandom(size * KIB)) for size in (4, 16, 64, 120)}
    setting = {f"raw SET {size} KiB": _raw_set(bench, size * KIB) for size in (4, 64, 120)}
    return {
        "raw PING": lambda: bench.raw("PING"),
        **setting,
        **committing,
        "append 60 KiB": Journalling(store, _batch(60 * KIB)),
        "open": opening.open,
        "load 64 KiB": lambda: seconds(store.load(loading, MODEL)),
        "77 kB state: commit inline": Committing(store, os.urandom(BALANCED_BYTES)),
        "77 kB state: chunk, commit": Committing(store, os.urandom(BALANCED_BYTES), inline=False),
    }


def _large(bench: Bench, taking: Snapshotting) -> dict[str, Work]:
    """What takes milliseconds by its size alone."""
    chunk = os.urandom(LIMITS.chunk_bytes)

    async def set_chunks() -> float:
        return sum([await bench.raw("SET", f"chunk {i}", chunk) for i in range(SNAPSHOT_BYTES // len(chunk) + 1)])

    return {
        "raw SET 1.04 MB": _raw_set(bench, 1_040_000),
        "commit 1.04 MB inline": Committing(bench.store, os.urandom(1_040_000)),
        "append 614 kB": Journalling(bench.store, _batch(614_000)),
        "raw SET 3 MB": _raw_set(bench, 3_000_000),
        "append 3 MB": Journalling(bench.store, _batch(3_000_000)),
        "raw SET 43 chunks of 1.05 MB": set_chunks,
        "snapshot 44.73 MB: seal, upload": taking,
    }


async def _in_turn(works: Mapping[str, Work], repeats: int) -> dict[str, Timing]:
    """Measure each so many times, in turn, after one round that does not count."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(1 + repeats):
        for name, work in works.items():
            taken[name].append(await work())
    return {name: Timing(tuple(times[1:])) for name, times in taken.items()}


def _tell(report: Report, appendfsync: Fsync, timings: Mapping[str, Timing]) -> None:
    for name, timing in timings.items():
        prototype = PROTOTYPE.get(name, ("", ""))[appendfsync == "always"]
        report.row(name, timing.median, timing.spread[1], prototype)


@asynccontextmanager
async def _bench(appendfsync: Fsync) -> AsyncIterator[Bench]:
    with tempfile.TemporaryDirectory() as data_dir:
        async with EmbeddedRedis(Path(data_dir), appendfsync=appendfsync) as server:
            link = await connect(server.url)
            store = StateStore(Wire(link), LIMITS)
            yield Bench(link, store)
            await store.aclose()


async def seconds(work: Awaitable[object], kind: type = object) -> float:
    """How long it takes; what comes of it must be of this kind."""
    began = time.perf_counter()
    outcome = await work
    took = time.perf_counter() - began
    _only(kind, outcome)
    return took


def _raw_set(bench: Bench, size: int) -> Work:
    value = os.urandom(size)
    return lambda: bench.raw("SET", f"raw {size}", value)


def _batch(size: int) -> Batch:
    return Batch("uint8", (size,), os.urandom(size))


def _attempt() -> Attempt:
    return Attempt(random_rid(), random_rid())


def _only(kind: type[T], outcome: object) -> T:
    if not isinstance(outcome, kind):
        raise SystemExit(f"Redis was expected to answer {kind.__name__}, not {outcome!r}")
    return outcome
