"""Real Redis servers for benchmarks: one, or a cluster of three, and what they have done so far."""

import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import redis
from redis.crc import REDIS_CLUSTER_HASH_SLOTS

from acclimate_bench.cost.replica import await_that, free_port
from acclimate_service.state import find_server

MASTERS: Final = 3
LASTING: Final = ("--appendonly", "yes", "--appendfsync", "everysec", "--save", "")
"""As the private Redis of the service."""


@dataclass(frozen=True)
class Store:
    """Servers that keep the states together. `url` is for the service, and `pids` are their processes."""

    url: str
    pids: Sequence[int]
    servers: Sequence[redis.Redis]

    def facts(self) -> tuple[int, int]:
        """Commands that all have done so far, and bytes that they have received."""
        told = [server.info("stats") for server in self.servers]
        return sum(t["total_commands_processed"] for t in told), sum(t["total_net_input_bytes"] for t in told)


def one_redis(stack: ExitStack) -> Store:
    """One server."""
    return _store([_started(stack)])


def redis_cluster(stack: ExitStack) -> Store:
    """A cluster of masters, each with a third of the slots."""
    started = [_started(stack, "--cluster-enabled", "yes") for _ in range(MASTERS)]
    ends = [number * REDIS_CLUSTER_HASH_SLOTS // MASTERS for number in range(MASTERS + 1)]
    first = started[0][1]
    for number, (_, server, port) in enumerate(started):
        server.cluster("addslots", *range(ends[number], ends[number + 1]))
        first.cluster("meet", "127.0.0.1", port)
    await_that(lambda: all(_whole(server) for _, server, _ in started), "the cluster is whole")
    return _store(started)


def _whole(server: redis.Redis) -> bool:
    told = server.cluster("info")
    return bool(told["cluster_state"] == "ok" and told["cluster_known_nodes"] == str(MASTERS))


def _started(stack: ExitStack, *options: str) -> tuple[int, redis.Redis, int]:
    """Process, connection and port of a server that answers."""
    port, folder = free_port(), Path(stack.enter_context(tempfile.TemporaryDirectory()))
    command = [str(find_server()), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), *LASTING, *options]
    process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.DEVNULL))
    stack.callback(process.terminate)
    server = stack.enter_context(redis.Redis(port=port, socket_timeout=30))
    await_that(lambda: _answers(server), "Redis answers")
    return process.pid, server, port


def _answers(server: redis.Redis) -> bool:
    try:
        return bool(server.ping())
    except redis.RedisError:
        return False


def _store(started: Sequence[tuple[int, redis.Redis, int]]) -> Store:
    pids, servers, ports = zip(*started, strict=True)
    return Store(f"redis://127.0.0.1:{ports[0]}", pids, servers)
