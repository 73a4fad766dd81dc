"""How many rows one, two and four replicas answer, behind nginx and on one Redis or a cluster, and what limits them.

    acclimate-bench replicas [--quick] [--json FILE]

Each replica has a core of its own as far as there are cores; nginx, Redis and the callers have those that are left, or
share all of them. The rate of every point is foretold, and held against the measured one, by three things that are
known without it: what a batch takes of a core in each process where one replica serves, how many times as much of a
core a bare step takes where as many processes take them at once as the point has replicas, and the shares of the
clients that nginx gives to each. The first two are measured anew in turn with each point, since the host of a virtual
machine makes its cores slower and faster from minute to minute.
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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from acclimate_bench.cost import callers
from acclimate_bench.cost.inputs import BUNDLES
from acclimate_bench.cost.remote import Work, remote
from acclimate_bench.cost.replica import Replica, await_that, free_port
from acclimate_bench.cost.report import Report, verdict
from acclimate_bench.cost.stepping_replica import in_process, replica_with_steps
from acclimate_bench.cost.stores import Store, one_redis, redis_cluster

CONF: Final = Path(__file__).parents[3] / "deploy/nginx.conf"
SERVERS: Final = re.compile(r"^ *server \d[^;]*;\n", re.MULTILINE)
REPLICAS: Final[tuple[int, ...]] = (1, 2, 4)
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
WARM: Final = 20
"""Bare steps that tell how many fill a time."""
COLUMNS: Final = (
    "rows/s", "foretold", "off by", "target", "limit", "p50 ms", "p99 ms",
    "one replica ms", "bare step x", "largest share",
    "replica ms", "Redis ms", "nginx ms", "callers ms", "busy cores", "cores of others",
)  # fmt: skip
StoreOf: TypeAlias = Callable[[ExitStack], Store]


class Times(NamedTuple):
    """How often all takes its turn, and for how many seconds: one replica, a point, and bare steps before each."""

    rounds: int
    one: int
    point: int
    bare: float


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
class Deployment:
    """Replicas behind an nginx (its process) on a Redis, callers that call for so many seconds, and shares of clients.

    nginx chooses the replica by the name of the client, so that each has a share of its own, whatever it can do.
    """

    served: Sequence[Replica]
    store: Store
    nginx: int
    call: Work
    shares: Sequence[float]

    def cpu_s(self) -> tuple[float, float, float]:
        """Seconds of a core so far, of all replicas, of Redis and of nginx with its workers."""
        workers = Path(f"/proc/{self.nginx}/task/{self.nginx}/children").read_text().split()
        return (
            sum(cpu_s(each.pid) for each in self.served),
            sum(map(cpu_s, self.store.pids)),
            sum(cpu_s(int(pid)) for pid in workers),
        )


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


class Found(NamedTuple):
    """What foretells a point, and what was measured there.

    `known` is one replica on one Redis, `bare` how many times as much of a core as there a bare step takes with all
    replicas of the point at it, and `shares` are those of the clients that each replica has.
    """

    known: Point
    bare: float
    shares: Sequence[float]
    point: Point

    def foretell(self, cores: int) -> tuple[float, str]:
        """Batches a second, and what limits them; nothing else grows as steps do."""
        spent = self.known.spent
        return foretell(spent._replace(replica=self.bare * spent.replica), self.shares, cores)


def run(options: argparse.Namespace) -> int:
    """Print a table for each adapter, and what a batch takes of Redis."""
    counts, times = REPLICAS, Times(rounds=3, one=2, point=4, bare=1.0)
    if options.quick:
        counts, times = counts[:2], Times(rounds=1, one=1, point=1, bare=0.2)
    report, cores = Report(), sorted(os.sched_getaffinity(0))
    told, to_plan = list[tuple[str, Point]](), dict[str, Point]()
    for adapter in ADAPTERS:
        report.table(f"{adapter}, batches of {ROWS}, {len(cores)} cores, {CALLERS} callers a replica", *COLUMNS)
        with ExitStack() as whole:
            one = deploy(whole, adapter, one_redis, cores, 1)
            for name, store in (("one Redis", one_redis), ("a cluster of 3", redis_cluster)):
                for count in counts:
                    with ExitStack() as stack:
                        found = in_turn(one, deploy(stack, adapter, store, cores, count), adapter, times)
                    _row(report, f"{count} replicas, {name}", found, len(cores))
                    told.append((f"{adapter}, {count} replicas, {name}", found.point))
                    if adapter not in to_plan or (store is one_redis and count <= len(cores)):
                        to_plan[adapter] = found.point
    report.table("What a batch takes of Redis", "commands", "bytes received", "CPU ms")
    for name, point in told:
        report.row(name, point.commands, point.received, 1e3 * point.spent.redis)
    for adapter, point in to_plan.items():
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


def mean(points: Sequence[Point]) -> Point:
    """What was measured in turn at one point."""
    return Point(
        rate=float(np.mean([each.rate for each in points])),
        seconds=[taken for each in points for taken in each.seconds],
        spent=Spent(*np.mean([each.spent for each in points], axis=0).tolist()),
        commands=float(np.mean([each.commands for each in points])),
        received=float(np.mean([each.received for each in points])),
        elsewhere=float(np.mean([each.elsewhere for each in points])),
    )


def foretell(spent: Spent, shares: Sequence[float], cores: int) -> tuple[float, str]:
    """Batches a second, and what limits them (utilisation law: a core works no more than a second in one).

    Args:
        spent: by one batch.
        shares: of all batches, that each replica gets. Replicas take the cores in turn, each one of its own while there
            are cores.
        cores: of the machine. What no replica has is for all else; if nothing is left, that goes wherever it can.
    """
    own = spent.replica * max(sum(shares[core::cores]) for core in range(cores))
    if len(shares) < cores:
        others, rest = spent.others / (cores - len(shares)), "all else"
    else:
        others, rest = (spent.replica + spent.others) / cores, "all cores"
    return 1 / max(own, others), "replicas" if own > others else rest


def spare(cores: Sequence[int], replicas: int) -> Sequence[int]:
    """The cores that are not a replica's alone; all of them where none is left."""
    return cores[replicas:] or cores


def deploy(stack: ExitStack, adapter: str, store: StoreOf, cores: Sequence[int], count: int) -> Deployment:
    """Start so many replicas on a Redis, and call until every client has a state and every cache is warm."""
    base = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    with on(spare(cores, count)):
        servers = store(stack)
    settings = {"model_store": BUNDLES, "adapter": adapter, "threads": 1, "redis_url": servers.url}
    served = []
    for number in range(count):
        with on(cores[number % len(cores) :][:1]):
            served.append(stack.enter_context(replica_with_steps(base / str(number), **settings)))
    with on(spare(cores, count)):
        port, nginx = _nginx(stack, [int(each.url.rpartition(":")[2]) for each in served])
        call = stack.enter_context(remote("callers", port, "1,28,28", CALLERS * count))
    held, clients = [0.0], CALLERS * count * callers.CLIENTS
    while sum(held) < clients:
        call(1)
        held = [each.metric("acclimate_state_sessions") for each in served]
    return Deployment(served, servers, nginx, call, [each / sum(held) for each in held])


def bare_s(served: Sequence[Replica], adapter: str, seconds: float) -> float:
    """Seconds of a core that a step takes without any serving, while all replicas take some for about so long."""

    def take(times: int) -> float:
        with ThreadPoolExecutor(len(served)) as threads:
            taken = list(threads.map(lambda each: in_process(each, adapter, times), served))
        return float(np.mean(taken))

    times = max(1, int(seconds / take(WARM)))
    before = sum(cpu_s(each.pid) for each in served)
    take(times)
    return (sum(cpu_s(each.pid) for each in served) - before) / (times * len(served))


def serve(deployed: Deployment, seconds: int) -> Point:
    """Let callers call for so many seconds."""
    store = deployed.store
    before, (commands, received) = deployed.cpu_s(), store.facts()
    cores_s, began = _busy_s(), time.perf_counter()
    own, *taken = deployed.call(seconds)
    lasted, busy_s, batches = time.perf_counter() - began, _busy_s() - cores_s, len(taken)
    after, facts = deployed.cpu_s(), store.facts()
    of_replicas, of_redis, of_nginx = ((late - early) / batches for early, late in zip(before, after, strict=True))
    spent = Spent(of_replicas, of_redis, of_nginx, own / batches)
    return Point(
        rate=CALLERS * len(deployed.served) / float(np.mean(taken)),  # Little's law: callers never rest
        seconds=taken,
        spent=spent,
        elsewhere=max(0.0, busy_s - batches * (spent.replica + spent.others)) / lasted,
        commands=(facts[0] - commands) / batches,
        received=(facts[1] - received) / batches,
    )


def in_turn(one: Deployment, many: Deployment, adapter: str, times: Times) -> Found:
    """Measure one replica, the bare steps of as many as a point has, and the point, again and again."""
    known, points, bare = list[Point](), list[Point](), list[tuple[float, float]]()
    for _ in range(times.rounds):
        alone = bare_s(one.served, adapter, times.bare)
        known.append(serve(one, times.one))
        bare.append((alone, bare_s(many.served, adapter, times.bare)))
        points.append(serve(many, times.point))
    alone, together = np.mean(bare, axis=0)
    return Found(mean(known), float(together / alone), many.shares, mean(points))


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


def _row(report: Report, name: str, found: Found, cores: int) -> None:
    point, (foretold, limit) = found.point, found.foretell(cores)
    off = abs(foretold / point.rate - 1)
    p50, p99 = (1e3 * float(np.quantile(point.seconds, q)) for q in (0.5, 0.99))
    report.row(
        name, ROWS * point.rate, ROWS * foretold, off, verdict(off, OFF), limit, p50, p99,
        1e3 * found.known.spent.replica, found.bare, max(found.shares),
        *(1e3 * each for each in point.spent), point.busy, point.elsewhere,
    )  # fmt: skip
