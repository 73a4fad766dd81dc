"""Real replicas on one real Redis, a real nginx and a real Envoy as deployed, and the Dockerfile as instructions."""

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, aclosing, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import pytest
import yaml

from acclimate_service.state import StoreFacts, Wire, check, connect
from acclimate_service.state.redis.embedded import EmbeddedRedis, find_server

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(sys.executable).parent
Changes: TypeAlias = Iterable[tuple[str, str]]
PORTS_IN_CONF = ("172.30.85.11:8000", "172.30.85.12:8000", "listen 8080;")


@pytest.fixture(scope="session")
def wait() -> Callable[..., None]:
    return wait_until


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
    """An nginx or Envoy, and what it logged."""

    url: str
    log: Path
    admin_port: int = 0

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

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
def nginx(program: Callable[[str], str]) -> str:
    """Path of nginx, which is no Python package."""
    return program("nginx")


@pytest.fixture(scope="session")
def envoy(program: Callable[[str], str]) -> str:
    """Path of Envoy."""
    return program("envoy")


@pytest.fixture(scope="module")
def balance(nginx: str) -> Iterator[Callable[..., Balancer]]:
    """Starts an nginx with the deployed configuration in front of two local ports; `changes` are texts and others."""
    with ExitStack() as stack:
        yield lambda *ports, changes=(): _start_nginx(nginx, ports, changes, stack)


@pytest.fixture(scope="module")
def balance_by_envoy(envoy: str) -> Iterator[Callable[..., Balancer]]:
    """Starts an Envoy with the deployed configuration in front of two local ports; `changes` are texts and others."""
    with ExitStack() as stack:
        yield lambda *ports, changes=(): _start_envoy(envoy, ports, changes, stack)


def _changed(text: str, changes: Iterable[tuple[str, str]]) -> str:
    for deployed, local in changes:
        assert deployed in text, deployed
        text = text.replace(deployed, local)
    return text


def _start_envoy(envoy: str, upstreams: tuple[int, int], changes: Changes, stack: ExitStack) -> Balancer:
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="envoy-")))
    port, admin = free_port(), free_port()
    text = (ROOT / "deploy/kubernetes/base/envoy.yaml").read_text()
    listeners = (("0.0.0.0, port_value: 8080", f"127.0.0.1, port_value: {port}"), ("9901", f"{admin}"))
    conf = yaml.safe_load(_changed(text, (*listeners, *changes)))
    (cluster,) = conf["static_resources"]["clusters"]
    del cluster["cluster_type"]
    addresses = [{"socket_address": {"address": "127.0.0.1", "port_value": upstream}} for upstream in upstreams]
    endpoints = {"lb_endpoints": [{"endpoint": {"address": address}} for address in addresses]}
    cluster |= {"type": "STATIC", "load_assignment": {"cluster_name": "replicas", "endpoints": [endpoints]}}
    (directory / "envoy.yaml").write_text(yaml.safe_dump(conf))
    balancer = Balancer(f"http://127.0.0.1:{port}", directory / "access.log", admin)
    options = ["--disable-hot-restart", "--concurrency", "2", "--file-flush-interval-msec", "50", "--log-level", "warn"]
    _start([envoy, "--config-path", str(directory / "envoy.yaml"), *options], balancer, stack)
    return balancer


def _start(command: list[str], balancer: Balancer, stack: ExitStack) -> None:
    """Start a balancer, and wait until it lets callers in."""
    errors = balancer.log.with_name("error.log")
    with balancer.log.open("w") as out, errors.open("w") as err:
        process = stack.enter_context(subprocess.Popen(command, stdout=out, stderr=err))
    stack.callback(process.terminate)
    wait_until(lambda: _accepts(balancer.port) or process.poll() is not None, 10)
    assert process.poll() is None, errors.read_text()


def _start_nginx(nginx: str, upstreams: tuple[int, int], changes: Changes, stack: ExitStack) -> Balancer:
    # Not below tmp_path, which is closed to the user that nginx gives its workers when it is started by root.
    prefix = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nginx-")))
    prefix.chmod(0o755)
    port = free_port()
    addresses = [f"127.0.0.1:{upstream}" for upstream in upstreams]
    local = zip(PORTS_IN_CONF, (*addresses, f"listen 127.0.0.1:{port};"), strict=True)
    conf = _changed((ROOT / "deploy/nginx.conf").read_text(), (*local, *changes))
    (prefix / "nginx.conf").write_text(conf)
    balancer = Balancer(f"http://127.0.0.1:{port}", prefix / "access.log")
    _start([nginx, "-e", "stderr", "-p", f"{prefix}/", "-c", str(prefix / "nginx.conf")], balancer, stack)
    return balancer


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


@pytest.fixture
def entrust(tmp_path: Path) -> Callable[[list[str]], Awaitable[StoreFacts]]:
    """What the service thinks of a Redis that is started by a command."""

    async def start(command: list[str]) -> StoreFacts:
        socket = tmp_path / "r.sock"
        private = ["--port", "0", "--unixsocket", socket, "--dir", tmp_path, "--logfile", tmp_path / "redis.log"]
        process = await asyncio.create_subprocess_exec(find_server(), *command[1:], *private)
        try:
            while not socket.exists():
                assert process.returncode is None
                await asyncio.sleep(0.01)
            async with aclosing(Wire(await connect(f"unix://{socket}"))) as wire:
                return await check(wire)
        finally:
            process.terminate()
            await process.wait()

    return start


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
