"""A real Redis Cluster on the loopback interface: masters, each with a replica, that may be killed and come back."""

import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from redis import Redis
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import MovedError, RedisError

from acclimate_service.state.redis.embedded import find_server

MASTERS = 3
BUS = 10_000  # a node talks to others at its port and this
OPTIONS = {
    "bind": "127.0.0.1",
    "cluster-enabled": "yes",
    "cluster-config-file": "nodes.conf",
    "cluster-node-timeout": "1000",
    "cluster-require-full-coverage": "no",
    "appendonly": "yes",
    "repl-diskless-sync": "yes",
    "repl-diskless-sync-delay": "0",
    "repl-ping-replica-period": "1",
    "save": "",
    "unixsocket": "redis.sock",
}


class Server:
    """One node."""

    def __init__(self, directory: Path, port: int) -> None:
        self.directory = directory
        self.port = port
        self.client = Redis(port=port, socket_timeout=5)
        directory.mkdir()
        self.start()

    def start(self) -> None:
        # Redis tries the log file out before it enters its directory, so a relative path would leave one elsewhere
        places = {"dir": str(self.directory), "logfile": str(self.directory / "redis.log")}
        options = {**OPTIONS, "port": str(self.port), **places}
        arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
        self.process = subprocess.Popen(
            [find_server(), *arguments], stdout=subprocess.DEVNULL, preexec_fn=_end_with_parent()
        )
        until(self.answers)

    def answers(self) -> bool:
        with suppress(RedisError):
            return bool(self.client.ping())
        assert self.process.poll() is None, (self.directory / "redis.log").read_text()
        return False

    def serves(self, key: str) -> bool:
        with suppress(MovedError):
            return self.client.exists(key) >= 0
        return False

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        self.client.close()
        self.process.kill()
        self.process.wait()

    def info(self) -> dict[str, str]:
        return {**self.client.info("replication"), **self.client.cluster("info")}

    @property
    def id(self) -> str:
        return str(self.client.cluster("myid"), "ascii")

    @property
    def leads(self) -> bool:
        return self.process.poll() is None and self.info()["role"] == "master"


@dataclass(frozen=True)
class Move:
    """A slot on its way from one master to another."""

    slot: int
    source: Server
    target: Server
    masters: Sequence[Server]

    def begin(self) -> None:
        self.target.client.cluster("setslot", self.slot, "importing", self.source.id)
        self.source.client.cluster("setslot", self.slot, "migrating", self.target.id)

    def carry(self) -> None:
        """Move the keys that are there."""
        while keys := self.source.client.cluster("getkeysinslot", self.slot, 10):
            self.source.client.execute_command("MIGRATE", "127.0.0.1", self.target.port, "", 0, 5000, "KEYS", *keys)

    def end(self) -> None:
        for server in (self.target, self.source, *self.masters):
            server.client.cluster("setslot", self.slot, "node", self.target.id)


class RedisCluster:
    """All nodes. Any of them may lead, once masters have been killed."""

    def __init__(self, directory: Path) -> None:
        self.servers = [Server(directory / str(port), port) for port in _free_ports(2 * MASTERS)]
        self._join()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.servers[0].port}"

    @property
    def masters(self) -> list[Server]:
        return [server for server in self.servers if server.leads]

    def master_of(self, key: str) -> Server:
        return next(server for server in self.masters if server.serves(key))

    def replica_of(self, master: Server) -> Server:
        port = master.client.info("replication")["slave0"]["port"]
        return next(server for server in self.servers if server.port == port)

    def move(self, key: str) -> Move:
        """The slot of a key is to go to another master."""
        source = self.master_of(key)
        target = next(master for master in self.masters if master is not source)
        return Move(key_slot(key.encode()), source, target, self.masters)

    def heal(self) -> None:
        """Start what was killed, let go on what was stopped, and wait until all is as it should be."""
        for server in self.servers:
            if server.process.poll() is not None:
                server.start()
            server.process.send_signal(signal.SIGCONT)
        until(self.healed)

    def flush(self) -> None:
        for server in self.masters:
            server.client.flushall()

    def sizes(self) -> list[int]:
        return [server.client.dbsize() for server in self.masters]

    def healed(self) -> bool:
        """Whether each master is followed by a replica that has all it has, and all nodes say so."""
        infos = [server.info() for server in self.servers]
        return all(
            info["cluster_state"] == "ok"
            and info["cluster_known_nodes"] == str(2 * MASTERS)
            and info["cluster_size"] == str(MASTERS)
            and (info["role"] == "master" or info["master_link_status"] == "up")
            and (info["role"] == "slave" or info["connected_slaves"] == 1)
            for info in infos
        )

    def close(self) -> None:
        for server in self.servers:
            server.close()

    def _join(self) -> None:
        first, *others = self.servers
        masters, replicas = self.servers[:MASTERS], self.servers[MASTERS:]
        share = -(-REDIS_CLUSTER_HASH_SLOTS // MASTERS)
        for number, master in enumerate(masters):
            slots = range(number * share, min((number + 1) * share, REDIS_CLUSTER_HASH_SLOTS))
            master.client.cluster("addslots", *slots)
            master.client.cluster("set-config-epoch", number + 1)
        for other in others:
            other.client.cluster("meet", "127.0.0.1", first.port)
        until(lambda: all(server.info()["cluster_known_nodes"] == str(2 * MASTERS) for server in self.servers))
        for master, replica in zip(masters, replicas, strict=True):
            replica.client.cluster("replicate", master.id)
        until(self.healed)


@contextmanager
def redis_cluster(directory: Path) -> Iterator[RedisCluster]:
    cluster = RedisCluster(directory)
    try:
        yield cluster
    finally:
        cluster.close()


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.02)


def _end_with_parent() -> Callable[[], object] | None:
    """Looked up before the fork: nothing but the call itself is safe after it."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(1, signal.SIGKILL)


def _free_ports(count: int) -> list[int]:
    """Below the ports that the kernel gives to outgoing connections, as those of the bus are too."""
    found: list[int] = []
    candidates = range(11_000, 20_000)
    for port in random.Random(os.getpid()).sample(candidates, len(candidates)):
        if _free(port) and _free(port + BUS):
            found.append(port)
        if len(found) == count:
            return found
    raise AssertionError("no free ports")


def _free(port: int) -> bool:
    with socket.socket() as probe, suppress(OSError):
        probe.bind(("127.0.0.1", port))
        return True
    return False
