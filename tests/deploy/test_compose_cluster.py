"""The Redis Cluster of `deploy/compose.cluster.yaml`, as a file and as six real servers."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from acclimate_service.settings import Settings
from acclimate_service.state.redis.embedded import find_server

DEPLOY = Path(__file__).parents[2] / "deploy"
COMPLETED = {"condition": "service_completed_successfully"}


@pytest.fixture(scope="module")
def single() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "compose.cluster.yaml").read_text())["services"]


@pytest.fixture(scope="module")
def nodes(services: dict[str, Any]) -> dict[str, str]:
    """Name and address of every Redis."""
    redis = {name: one for name, one in services.items() if "command" in one and name != "redis-cluster"}
    return {name: one["networks"]["backend"]["ipv4_address"] for name, one in redis.items()}


@pytest.fixture(scope="module")
def making(services: dict[str, Any]) -> str:
    """The script that makes the cluster, with local addresses."""
    (shell, option, script) = services["redis-cluster"]["command"]
    assert (shell, option) == ("sh", "-ec")
    return script.replace("$$", "$").replace("172.", "127.")


@pytest.fixture(scope="module")
def cluster(services, nodes, making, tmp_path_factory) -> Iterator[dict[str, str]]:
    """The six servers, made a cluster; their names and local addresses."""
    local = {name: address.replace("172.", "127.") for name, address in nodes.items()}
    with ExitStack() as stack:
        for name, address in local.items():
            _skip_unless_free(address)
            directory = tmp_path_factory.mktemp(name)
            private = ["--bind", address, "--dir", directory, "--logfile", directory / "log", "--protected-mode", "no"]
            process = stack.enter_context(subprocess.Popen([find_server(), *services[name]["command"][1:], *private]))
            stack.callback(process.kill)
        assert run(making).returncode == 0
        yield local


def run(script: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["sh", "-ec", script]
    return subprocess.run(command, env={"PATH": path}, capture_output=True, text=True, check=False, timeout=60)


def _skip_unless_free(address: str) -> None:
    with closing(socket.socket()) as probe:
        try:
            probe.bind((address, 6379))
        except OSError as error:
            pytest.skip(f"{address}:6379 cannot be used here: {error.strerror}")


def test_every_node_is_as_durable_as_the_single_redis(services, single, nodes):
    durable = single["redis"]["command"]
    assert all(services[name]["command"][: len(durable)] == durable for name in nodes)


def test_every_other_node_is_the_single_redis_with_data_and_an_address_of_its_own(services, nodes):
    others = [name for name in nodes if name != "redis"]
    assert len(others) == 5
    assert all(services[name]["extends"] == {"file": "compose.yaml", "service": "redis"} for name in others)
    assert [services[name]["volumes"] for name in others] == [[f"{name}:/data"] for name in others]
    assert len(set(nodes.values())) == len(nodes)


def test_the_cluster_is_made_of_all_nodes_once_they_are_up(services, nodes):
    command = services["redis-cluster"]["command"][-1]
    assert re.findall(r"([\d.]+):6379", command) == list(nodes.values())
    assert services["redis-cluster"]["depends_on"].keys() == nodes.keys()


def test_the_replicas_wait_for_the_cluster_and_take_settings_that_exist(services):
    for name in ("acclimate-1", "acclimate-2"):
        assert services[name]["depends_on"] == {"redis-cluster": COMPLETED}
        names = {variable.removeprefix("ACCLIMATE_").lower() for variable in services[name]["environment"]}
        assert names <= Settings.model_fields.keys()


def test_the_script_makes_a_cluster_of_three_masters_with_a_replica_each(cluster, wait):
    def roles():
        nodes = run(f"redis-cli -h {cluster['redis']} cluster nodes").stdout
        return len(re.findall(r"\bmaster\b", nodes)), len(re.findall(r"\bslave\b", nodes))

    wait(lambda: roles() == (3, 3), 20)


def test_the_health_check_of_the_first_node_speaks_for_the_cluster(cluster, services, wait):
    check = services["redis"]["healthcheck"]["test"][1].replace("redis-cli", f"redis-cli -h {cluster['redis']}")
    wait(lambda: run(check).returncode == 0, 20)
    assert run(check.replace(":ok", ":fail")).returncode != 0


def test_a_cluster_that_is_there_is_left_alone(cluster, making):
    before = run(f"redis-cli -h {cluster['redis']} cluster slots").stdout
    again = run(making)
    assert (again.returncode, again.stdout) == (0, "")
    assert run(f"redis-cli -h {cluster['redis']} cluster slots").stdout == before
