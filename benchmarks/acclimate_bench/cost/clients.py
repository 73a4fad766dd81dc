"""What a Redis holds when the clients of a ResNet-18 are very many, and what a batch of one of them costs.

    acclimate-bench clients [--clients 100000] [--budget 0.001] [--json FILE]

A few clients send batches. What the service has stored of each when it ends is then copied under many other names, with
the name inside and the checksum changed, so that each is a client that the next service goes on with: a sample of them
comes back.
"""

import argparse
import asyncio
import hashlib
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np
import redis
from tqdm import tqdm

from acclimate_bench.cost.inputs import noise
from acclimate_bench.cost.networks import write_resnet
from acclimate_bench.cost.remote import local
from acclimate_bench.cost.replica import PATIENCE_S, Replica, over_http, replica
from acclimate_bench.cost.report import Report, verdict
from acclimate_service.state import ClientScope, EmbeddedRedis

SHAPE: Final = (3, 32, 32)
TEACHERS: Final = 8
"""Clients that really send what the others are copied from, and `LESSONS`, how many batches each."""
LESSONS: Final = 5
SAMPLE: Final = 20
"""Clients of either kind that come back."""
MILLION_GB: Final = 64.0
"""Target: memory of a Redis with a million such clients."""
ENVELOPE: Final = slice(5, 21)
"""Where a stored state says whose it is."""
COLUMNS: Final = ("p50 ms", "p99 ms", "commands", "bytes to Redis", "bytes from Redis", "Redis CPU ms")
HELD: Final = ("bytes of state", "bytes in Redis", "GB for a million", "target")
SLOWER: Final = 0.1
TOGETHER: Final = 200
"""Clients whose copies go to Redis in one piece."""


def run(options: argparse.Namespace) -> int:
    """Print what they take, and what a batch costs."""
    report = Report()
    with ExitStack() as stack:
        base = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_resnet(base / "bundles")
        server = EmbeddedRedis(base / "redis")
        asyncio.run(server.start())
        stack.callback(lambda: asyncio.run(server.stop()))
        store = stack.enter_context(redis.Redis.from_url(server.url, socket_timeout=PATIENCE_S))
        settings = {
            "model_store": base / "bundles", "adapter": "atp", "state_budget": options.budget, "keep_snapshots": 0,
            "redis_url": server.url, "threads": 1, "cache_bytes": 0,
        }  # fmt: skip
        names = [f"teacher-{k}" for k in range(max(TEACHERS, SAMPLE))]
        with replica(base / "first", **settings) as served:
            for name in tqdm(names, "sending", disable=None, leave=False):
                for _ in range(LESSONS if name in names[:TEACHERS] else 1):
                    over_http(served, name, noise(*SHAPE))()
        report.table(f"Batches of clients that come back, {len(names)} clients in Redis", *COLUMNS)
        with replica(base / "few", **settings) as served:
            few = returning(report, served, store, names[:SAMPLE])
        crowd = [f"client-{k}" for k in range(options.clients)]
        report.table(f"{options.clients:,} clients with a state of a ResNet-18, a budget of {options.budget:g}", *HELD)
        before = store.info("memory")["used_memory"]
        copy(store, names[:TEACHERS], crowd)
        each = (store.info("memory")["used_memory"] - before) / len(crowd)
        state = float(np.mean([stored(store, name) for name in names[:TEACHERS]]))
        report.row("a client", state, each, each * 1e6 / 1e9, verdict(each * 1e6 / 1e9, MILLION_GB))
        report.table(f"Batches of clients that come back, {len(crowd):,} clients in Redis", *COLUMNS)
        drawn = np.random.default_rng(0).choice(len(crowd), SAMPLE, replace=False)
        with replica(base / "many", **settings) as served:
            many = returning(report, served, store, [crowd[k] for k in drawn])
        report.table("Among many against among few", "slower by", "target")
        report.row("a batch of a client that comes back", many / few - 1, verdict(many / few - 1, SLOWER))
    report.finish(options.json)
    return 0


def returning(report: Report, served: Replica, store: redis.Redis, names: Sequence[str]) -> float:
    """A row about the first batch that each of these clients sends again, and the median of their milliseconds.

    Raises:
        SystemExit: one of them began anew.
    """
    images, seconds = noise(*SHAPE), list[float]()
    over_http(served, "warm-up", images)()
    before = facts(store)
    for name in names:
        seconds += local(lambda: went_on(served, name, images))(1)  # noqa: B023
    spent = {key: (value - before[key]) / len(names) for key, value in facts(store).items()}
    median, most = (1e3 * float(np.quantile(seconds, q)) for q in (0.5, 0.99))
    report.row(f"{len(names)} clients, one batch each", median, most, *spent.values())
    return median


def went_on(served: Replica, name: str, images: Any) -> None:
    """Send a batch of a client whose state is in Redis alone."""
    status = served.client.predict(name, images, layout="NCHW").state.status
    if status != "restored":
        raise SystemExit(f"{name} should have been restored from Redis, and is {status}")


def facts(store: redis.Redis) -> dict[str, float]:
    """Commands, bytes received and sent, and milliseconds of CPU so far."""
    told = store.info("all")
    return {
        "commands": told["total_commands_processed"],
        "received": told["total_net_input_bytes"],
        "sent": told["total_net_output_bytes"],
        "cpu": 1e3 * (told["used_cpu_user"] + told["used_cpu_sys"]),
    }


def stored(store: redis.Redis, name: str) -> int:
    """Bytes of the state of a client."""
    (key,) = store.scan_iter(f"{prefix(name)}*:s:*", count=100_000)
    return int(store.hstrlen(key, "0"))


def prefix(name: str) -> str:
    """What the keys of a client begin with."""
    return ClientScope(name).registry[:-1]


def copy(store: redis.Redis, teachers: Sequence[str], names: Sequence[str]) -> None:
    """Store all that is kept of the teachers under other names, in turn."""
    originals = [copier(store, teacher) for teacher in teachers]
    with tqdm(total=len(names), desc="copying", unit="client", disable=None, leave=False) as bar:
        for first in range(0, len(names), TOGETHER):
            with store.pipeline(transaction=False) as pipe:
                for number in range(first, min(first + TOGETHER, len(names))):
                    originals[number % len(originals)](pipe, names[number])
                pipe.execute()
            bar.update(TOGETHER)


def copier(store: redis.Redis, teacher: str) -> Callable[[Any, str], None]:
    """What stores a client like this one; Redis copies all but the state, which says whose it is."""
    own = prefix(teacher)
    keys = [key.decode() for key in store.scan_iter(f"{own}*", count=100_000)]
    (snapshot,) = (key for key in keys if ":s:" in key)
    (head,) = (key for key in keys if key.endswith(":h"))
    state, lives = store.hget(snapshot, "0"), store.pttl(snapshot)
    assert isinstance(state, bytes)
    assert store.hlen(snapshot) == 1

    def write(pipe: Any, name: str) -> None:
        theirs = {key: key.replace(own, prefix(name), 1) for key in keys}
        for key in keys:
            if key != snapshot:
                pipe.copy(key, theirs[key])
        changed = b"".join((state[: ENVELOPE.start], ClientScope(name).digest, state[ENVELOPE.stop :]))
        pipe.hset(theirs[snapshot], "0", changed)
        pipe.pexpire(theirs[snapshot], lives)
        pipe.hset(theirs[head], "sum", hashlib.sha256(changed).hexdigest())

    return write
