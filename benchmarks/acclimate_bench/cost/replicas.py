"""How many rows one, two and four replicas answer, behind nginx and on one Redis or a cluster, and what limits them.

    acclimate-bench replicas [--quick] [--json FILE]

Each replica has a core of its own as far as there are cores; nginx, Redis and the callers have those that are left, or
share all of them. What a batch takes of a core in each process is counted at the first point. With it alone the rate of
every point is foretold, and held against the measured one.
"""

import argparse
import math
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from acclimate_bench.cost.inputs import BUNDLES
from acclimate_bench.cost.remote import remote
from acclimate_bench.cost.replica import Replica, await_that, free_port, replica
from acclimate_bench.cost.report import Report, verdict
from acclimate_bench.cost.stores import Store, one_redis, redis_cluster

CONF: Final = Path(__file__).parents[3] / "deploy/nginx.conf"
SERVERS: Final = re.compile(r"^ *server \d[^;]*;\n", re.MULTILINE)
REPLICAS: Final = (1, 2, 4)
ADAPTERS: Final = ("atp", "fedcal")
CALLERS: Final = 8
"""For each replica, so that it has as much to do at once at every point."""
OFF: Final = 0.15
"""Largest share of the measured rate by which the foretold one may differ."""
ROWS: Final = 20
CLIENTS: Final = (10**3, 10**4, 10**5, 10**6, 10**7)
DAILY: Final = 24
"""Batches that each client sends in a day, and `PEAK`, how many times the mean come in the busiest hour."""
PEAK: Final = 3.0
BUSY: Final = 0.6
"""Share of a core that is planned with; above it, waiting times grow fast."""
COLUMNS: Final = (
    "rows/s", "foretold", "off by", "target", "p50 ms", "p99 ms",
    "replica ms", "Redis ms", "nginx ms", "callers ms", "busy cores", "cores of others", "limit",
)  # fmt: skip


class Spent(NamedTuple):
    """Seconds of a core that a batch takes in each kind of process."""

    replica: float
    redis: float
    nginx: float
    callers: float

    @property
    def others(self) -> float:
        """All but the replica's."""
        return self.redis + self.nginx + self.callers


@dataclass(frozen=True)
class Point:
    """What was measured: batches a second, seconds of each batch, and what one takes of the cores and of Redis.

    `elsewhere` are the cores that were busy with what has nothing to do with it: where they are many, nothing is shown.
    """

    rate: float
    seconds: Sequence[float]
    spent: Spent
    commands: float
    received: float
    elsewhere: float

    @property
    def busy(self) -> float:
        """Cores that were at work for these batches."""
        return self.rate * (self.spent.replica + self.spent.others)


def run(options: argparse.Namespace) -> int:
    """Print a table for each adapter, and what a batch takes of Redis."""
    report, seconds = Report(), 1 if options.quick else 10
    counts = REPLICAS[:2] if options.quick else REPLICAS
    cores = sorted(os.sched_getaffinity(0))
    told, firsts = list[tuple[str, Point]](), dict[str, Point]()
    for adapter in ADAPTERS:
        report.table(f"{adapter}, batches of {ROWS}, {len(cores)} cores, {CALLERS} callers a replica", *COLUMNS)
        for name, store in (("one Redis", one_redis), ("a cluster of 3", redis_cluster)):
            for count in counts:
                with ExitStack() as stack:
                    with on(spare(cores, count)):
                        servers = store(stack)
                    point = measure(stack, adapter, servers, cores, count, seconds)
                first = firsts.setdefault(adapter, point).spent
                _row(report, f"{count} replicas, {name}", point, foretell(first, count, len(cores)), len(cores))
                told.append((f"{adapter}, {count} replicas, {name}", point))
    report.table("What a batch takes of Redis", "commands", "bytes received", "CPU ms")
    for name, point in told:
        report.row(name, point.commands, point.received, 1e3 * point.spent.redis)
    for adapter, point in firsts.items():
        plan(report, adapter, point)
    report.finish(options.json)
    return 0


def plan(report: Report, adapter: str, point: Point) -> None:
    """A table of what very many clients take, by what a batch takes."""
    title = (
        f"{adapter}: clients with {DAILY} batches of {ROWS} a day, {PEAK:g} times that at peak, cores {BUSY:.0%} busy"
    )
    report.table(title, "batches/s", "replicas", "cores for Redis", "cores for nginx", "MB/s to Redis")
    for clients in CLIENTS:
        rate = clients * DAILY * PEAK / 86_400
        cores = [rate * each / BUSY for each in point.spent[:3]]
        report.row(f"{clients:,}", rate, max(1, math.ceil(cores[0])), *cores[1:], rate * point.received / 1e6)


def foretell(spent: Spent, replicas: int, cores: int) -> float:
    """Batches a second, by what a batch takes of a core (utilisation law: a core works no more than a second in one).

    Args:
        spent: by one batch.
        replicas: each on a core of its own while there are cores.
        cores: of the machine. What no replica has is for all else; if nothing is left, that goes wherever it can.
    """
    if replicas < cores:
        return min(replicas / spent.replica, (cores - replicas) / spent.others)
    return cores / (spent.replica + spent.others)


def limit(spent: Spent, replicas: int, cores: int) -> str:
    """What is as busy as can be."""
    if replicas >= cores:
        return "all cores"
    own, others = replicas / spent.replica, (cores - replicas) / spent.others
    return "replicas" if own < others else "all else"


def spare(cores: Sequence[int], replicas: int) -> Sequence[int]:
    """The cores that are not a replica's alone; all of them where none is left."""
    return cores[replicas:] or cores


def measure(stack: ExitStack, adapter: str, store: Store, cores: Sequence[int], count: int, seconds: int) -> Point:
    """Start so many replicas on this Redis, and let callers call for so many seconds."""
    base = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    settings = {"model_store": BUNDLES, "adapter": adapter, "threads": 1, "redis_url": store.url}
    served = []
    for number in range(count):
        with on(cores[number % len(cores) :][:1]):
            served.append(stack.enter_context(replica(base / str(number), **settings)))
    with on(spare(cores, count)):
        port, nginx = _nginx(stack, [int(each.url.rpartition(":")[2]) for each in served])
        call = stack.enter_context(remote("callers", port, "1,28,28", CALLERS * count))
    call(1)  # until every client has a state, and every cache is warm
    before, began = _times(served, nginx, store), time.perf_counter()
    (commands, received), cores_s = store.facts(), _busy_s()
    own, *taken = call(seconds)
    lasted, batches = time.perf_counter() - began, len(taken)
    busy_s = _busy_s() - cores_s
    after, facts = _times(served, nginx, store), store.facts()
    of_replicas, of_redis, of_nginx = ((late - early) / batches for early, late in zip(before, after, strict=True))
    spent = Spent(of_replicas, of_redis, of_nginx, own / batches)
    return Point(
        rate=batches / lasted,
        seconds=taken,
        spent=spent,
        elsewhere=max(0.0, busy_s - batches * (spent.replica + spent.others)) / lasted,
        commands=(facts[0] - commands) / batches,
        received=(facts[1] - received) / batches,
    )


@contextmanager
def on(cores: Sequence[int]) -> Iterator[None]:
    """Let processes that are started meanwhile run on these cores alone."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def cpu_s(pid: int) -> float:
    """Seconds of a core that a process has had so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _times(served: Sequence[Replica], nginx: int, store: Store) -> tuple[float, float, float]:
    """Seconds of a core so far, of all replicas, of Redis and of nginx with its workers."""
    workers = Path(f"/proc/{nginx}/task/{nginx}/children").read_text().split()
    return (
        sum(cpu_s(each.pid) for each in served),
        sum(map(cpu_s, store.pids)),
        sum(cpu_s(int(pid)) for pid in workers),
    )


def _busy_s() -> float:
    """Seconds that all cores together have been at work so far; what waits for a disk is no work."""
    user, nice, system, _, _, irq, soft, *_ = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")


def _nginx(stack: ExitStack, replicas: Sequence[int]) -> tuple[int, int]:
    """An nginx as it is deployed before these ports: its own port and process."""
    program, port = shutil.which("nginx"), free_port()
    if program is None:
        raise SystemExit("nginx is not installed; it stands before the replicas here as it does when deployed")
    base = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nginx-")))
    base.chmod(0o755)  # its workers are of another user where it is started by root
    lines = "".join(f"        server 127.0.0.1:{each} max_fails=1 fail_timeout=3s;\n" for each in replicas)
    first, *others = SERVERS.findall(CONF.read_text())
    text = CONF.read_text().replace(first, lines).replace("listen 8080;", f"listen 127.0.0.1:{port};")
    for other in others:
        text = text.replace(other, "")
    (base / "nginx.conf").write_text(text)
    command = [program, "-e", "stderr", "-p", f"{base}/", "-c", str(base / "nginx.conf")]
    process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.DEVNULL))
    stack.callback(process.terminate)
    await_that(lambda: _accepts(port), "nginx listens")
    return port, process.pid


def _accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _row(report: Report, name: str, point: Point, foretold: float, cores: int) -> None:
    off = abs(foretold / point.rate - 1)
    p50, p99 = (1e3 * float(np.quantile(point.seconds, q)) for q in (0.5, 0.99))
    count = int(name.split()[0])
    report.row(
        name, ROWS * point.rate, ROWS * foretold, off, verdict(off, OFF), p50, p99,
        *(1e3 * each for each in point.spent), point.busy, point.elsewhere, limit(point.spent, count, cores),
    )  # fmt: skip
