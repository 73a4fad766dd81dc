"""What a fleet is made of: processes that can be killed at any moment and started again in their place."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import redis

from acclimate_service.state.redis.embedded import find_server

ROOT = Path(__file__).parents[3]
PORTS = range(20_000, 30_000)  # below those that the kernel gives to outgoing connections, which could take ours
UPSTREAM = re.compile(r"server [\d.]+:8000(.*;)")


def wait_until(condition: Callable[[], bool], seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds} s")
        time.sleep(0.02)


def free_port() -> int:
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", random.choice(PORTS)))
            return int(probe.getsockname()[1])


def find_nginx() -> str | None:
    """Path of nginx, which is no Python package."""
    return shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")


class Process:
    """A command that runs, ends and is started again; what it says is kept in `<name>.log`.

    Args:
        name: of its log.
        directory: where the log is.
        command: what runs.
        environment: its variables, beside those of this process that are no settings of the service.
    """

    def __init__(
        self, name: str, directory: Path, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        self.log = directory / f"{name}.log"
        self._command = command
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("ACCLIMATE_")}
        self._environment = {**inherited, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def ended(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self._running.poll()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def send(self, number: signal.Signals) -> None:
        self._running.send_signal(number)

    def kill(self) -> None:
        self._running.kill()
        self._running.wait()

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "it was not started"
        return self._process


class Redis(Process):
    """A Redis that has everything it acknowledged on the disk."""

    def __init__(self, directory: Path) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}"
        options = {"port": self.port, "dir": directory, "appendonly": "yes", "appendfsync": "always", "save": ""}
        arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        super().__init__("redis", directory, [str(find_server()), *arguments])

    def serves(self) -> bool:
        """Whether it answers, its data loaded."""
        with redis.Redis(port=self.port) as client, contextlib.suppress(redis.RedisError):
            return bool(client.ping())
        return False


class Replica(Process):
    """A service that keeps its port when it is started again, and stores states exactly, as the verdict expects."""

    def __init__(self, directory: Path, redis_url: str, settings: Mapping[str, Any]) -> None:
        self.port = free_port()
        self.starts = 0
        ours = {"redis_url": redis_url, "port": self.port, "threads": 1, "model_store": ROOT / "model_store/bundles"}
        ours["state_budget"] = 1
        variables = {f"ACCLIMATE_{name.upper()}": str(value) for name, value in {**ours, **settings}.items()}
        command = [str(Path(sys.executable).with_name("acclimate")), "serve"]
        super().__init__(f"replica-{self.port}", directory, command, {"OMP_NUM_THREADS": "1", **variables})

    def start(self) -> None:
        super().start()
        self.starts += 1

    def serves(self) -> bool:
        """Whether it answers batches."""
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"http://127.0.0.1:{self.port}/v2/health/ready", timeout=5).is_success
        return False


class Balancer(Process):
    """nginx with the deployed configuration in front of other replicas.

    Args:
        prefix: where its files are; open to the user that nginx gives its workers when it is started by root.
        directory: where its log is.
        ports: of the replicas.
        sticky: as deployed; else each request goes to the next replica, whoever its client is.
    """

    def __init__(self, prefix: Path, directory: Path, ports: Sequence[int], *, sticky: bool) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._port = port
        conf = prefix / "nginx.conf"
        conf.write_text(_configuration(port, ports, sticky=sticky))
        nginx = find_nginx()
        assert nginx, "nginx is not installed"
        super().__init__("nginx", directory, [nginx, "-e", "stderr", "-p", f"{prefix}/", "-c", str(conf)])

    def kill(self) -> None:
        """End it with its workers, which would outlive a master that is killed."""
        self.send(signal.SIGTERM)
        self._running.wait(timeout=10)

    def serves(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._port)) == 0

    def failures(self) -> Counter[str]:
        """Replies 5xx by the access log. That nginx holds every replica for down does not mean that they are."""
        requests = [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]
        return Counter(_failure(each) for each in requests if each["status"] >= 500)


def _configuration(port: int, upstreams: Sequence[int], *, sticky: bool) -> str:
    conf = (ROOT / "deploy/nginx.conf").read_text()
    (options,) = set(UPSTREAM.findall(conf))
    servers = [f"server 127.0.0.1:{upstream}{options}" for upstream in upstreams]
    conf = UPSTREAM.sub("", conf)
    conf = _replaced(conf, "zone acclimate 128k;", " ".join(["zone acclimate 128k;", *servers]))
    conf = _replaced(conf, "listen 8080;", f"listen 127.0.0.1:{port};")
    return conf if sticky else _replaced(conf, "hash $balancing_key consistent;", "")


def _failure(request: Mapping[str, Any]) -> str:
    if request["status"] == 502 and request["upstream"].endswith("acclimate"):
        return "502 because nginx held every replica for down"
    return "502 because the connection to the replica broke" if request["status"] == 502 else str(request["status"])


def _replaced(conf: str, deployed: str, local: str) -> str:
    assert conf.count(deployed) == 1, f"deploy/nginx.conf should hold {deployed!r} once"
    return conf.replace(deployed, local)
