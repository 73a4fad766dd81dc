"""Real replicas on one real Redis, a real nginx with `deploy/nginx.conf`, and the Dockerfile as instructions."""

import asyncio
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from acclimate_service.embedded import EmbeddedRedis

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(sys.executable).parent
PORTS_IN_CONF = ("172.30.85.11:8000", "172.30.85.12:8000", "listen 8080;")


def wait_until(condition: Callable[[], Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.05)


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Replica:
    """A service in a process of its own; it keeps its port when it is started again."""

    def __init__(self, command: list[str], environment: Mapping[str, str], directory: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = command
        own = {"ACCLIMATE_HOST": "127.0.0.1", "ACCLIMATE_PORT": str(self.port), "OMP_NUM_THREADS": "1"}
        self.environment = {**environment, **own}
        self._directory = directory
        self._log = directory / f"replica-{self.port}.log"

    def start(self) -> None:
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                self._command, cwd=self._directory, env=self.environment, stdout=log, stderr=log
            )

    def wait_until_ready(self) -> None:
        wait_until(self._is_ready)

    def terminate(self) -> None:
        self._process.terminate()

    def stop(self) -> int:
        """Its exit status, on SIGTERM."""
        self.terminate()
        return self._process.wait(timeout=30)

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        try:
            return httpx.get(f"{self.url}/v2/health/ready").is_success
        except httpx.TransportError:
            return False


@dataclass(frozen=True)
class Balancer:
    """An nginx, and what it logged."""

    url: str
    log: Path

    def logged(self, request_id: str) -> dict[str, Any]:
        """The log entry of a request, which nginx writes just after the reply."""
        found: list[dict[str, Any]] = []

        def look() -> bool:
            lines = self.log.read_text().splitlines()
            found.extend(entry for line in lines if (entry := json.loads(line))["request_id"] == request_id)
            return bool(found)

        wait_until(look, 5)
        return found[0]


@pytest.fixture(scope="session")
def nginx() -> str:
    """Path of nginx, which is no Python package."""
    path = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
    if path is None:
        pytest.skip("nginx is not installed")
    return path


@pytest.fixture(scope="module")
def balance(nginx: str) -> Iterator[Callable[[int, int], Balancer]]:
    """Starts an nginx with the deployed configuration in front of two local ports."""
    with ExitStack() as stack:
        yield lambda *ports: _start_nginx(nginx, ports, stack)


def _start_nginx(nginx: str, upstreams: tuple[int, int], stack: ExitStack) -> Balancer:
    # Not below tmp_path, which is closed to the user that nginx gives its workers when it is started by root.
    prefix = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nginx-")))
    prefix.chmod(0o755)
    port = free_port()
    conf = (ROOT / "deploy/nginx.conf").read_text()
    addresses = [f"127.0.0.1:{upstream}" for upstream in upstreams]
    for deployed, local in zip(PORTS_IN_CONF, (*addresses, f"listen 127.0.0.1:{port};"), strict=True):
        assert conf.count(deployed) == 1
        conf = conf.replace(deployed, local)
    (prefix / "nginx.conf").write_text(conf)
    log = prefix / "access.log"
    command = [nginx, "-e", "stderr", "-p", f"{prefix}/", "-c", str(prefix / "nginx.conf")]
    with log.open("w") as out, (prefix / "error.log").open("w") as err:
        process = stack.enter_context(subprocess.Popen(command, stdout=out, stderr=err))
    stack.callback(process.terminate)
    wait_until(lambda: _accepts(port) or process.poll() is not None, 10)
    assert process.poll() is None, (prefix / "error.log").read_text()
    return Balancer(f"http://127.0.0.1:{port}", log)


def _accepts(port: int) -> bool:
    with closing(socket.socket()) as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Replica]]:
    """Starts services; they are not ready yet."""
    directory = tmp_path_factory.mktemp("replicas")
    started: list[Replica] = []

    def start(environment: Mapping[str, str], command: list[str] | None = None, cwd: Path = directory) -> Replica:
        one = Replica(command or [str(SCRIPTS / "acclimate"), "serve"], environment, cwd)
        one.start()
        started.append(one)
        return one

    yield start
    for one in started:
        one.terminate()
    for one in started:
        one.stop()


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    redis = EmbeddedRedis(tmp_path_factory.mktemp("redis"))
    asyncio.run(redis.start())
    yield redis.url
    asyncio.run(redis.stop())


@pytest.fixture(scope="module")
def replicas(replica: Callable[..., Replica], redis_url: str) -> tuple[Replica, Replica]:
    """Two ready services with one Redis."""
    environment = {
        "PATH": os.environ["PATH"],
        "ACCLIMATE_REDIS_URL": redis_url,
        "ACCLIMATE_MODEL_STORE": str(ROOT / "model_store/bundles"),
    }
    pair = replica(environment), replica(environment)
    for one in pair:
        one.wait_until_ready()
    return pair


@dataclass(frozen=True)
class Instruction:
    """One instruction of a Dockerfile, continued lines joined."""

    stage: str
    keyword: str
    arguments: str


@pytest.fixture(scope="session")
def dockerfile() -> tuple[Instruction, ...]:
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    instructions, stage = [], ""
    for line in filter(None, re.sub(r"\\\n\s*", "", text).splitlines()):
        keyword, arguments = line.split(maxsplit=1)
        if keyword == "FROM":
            stage = arguments.partition(" AS ")[2] or "image"
        instructions.append(Instruction(stage, keyword, arguments))
    return tuple(instructions)
