"""`acclimate doctor` on a good set-up, and on bad ones: it names what is wrong, and what to change."""

import json
import os
import resource
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from redis import Redis

from acclimate_service.cli import main
from acclimate_service.compute.process import available_cores

ROOT = Path(__file__).parents[2]
BUNDLES = ROOT / "model_store" / "bundles"


@pytest.fixture
def good(make_replica, tmp_path, monkeypatch) -> str:
    """Variables of a sound set-up, on the Redis of a service that runs; the URL of that."""
    for name in list(os.environ):
        if name.startswith(("ACCLIMATE_", "OMP_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    replica = make_replica()
    url = replica.service.settings.redis_url
    replica.redis.config_set("maxmemory", 2**30)
    monkeypatch.setenv("ACCLIMATE_REDIS_URL", url)
    monkeypatch.setenv("ACCLIMATE_MODEL_STORE", str(BUNDLES))
    monkeypatch.setenv("ACCLIMATE_SECRET", "known to all replicas")
    monkeypatch.setenv("ACCLIMATE_THREADS", "1")
    return url


@pytest.fixture
def examine(good, capsys) -> Callable[[], tuple[int, list[dict[str, Any]]]]:
    """The exit status, and what is not fine."""

    def run() -> tuple[int, list[dict[str, Any]]]:
        code = main(["doctor", "--json"])
        return code, [each for each in json.loads(capsys.readouterr().out) if each["verdict"] != "fine"]

    return run


def test_a_good_set_up_has_no_fault_and_needs_no_advice(good, examine, capsys):
    assert examine() == (0, [])
    assert main(["doctor"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in told} == {"fine"}
    about = {line.split()[1] for line in told}
    assert about == {"settings", "store", "device", "threads", "limits", "access", "redis"}
    assert any("noeviction, durability everysec" in line for line in told)


def test_a_redis_that_could_lose_states_is_a_fault(good, examine):
    with closing(Redis.from_url(good)) as redis:
        redis.config_set("maxmemory-policy", "allkeys-lru")
        redis.config_set("appendonly", "no")
        redis.config_set("maxmemory", 0)
    code, (aof, policy, memory) = examine()
    assert code == 1
    assert (aof["verdict"], aof["change"]) == ("fault", "set `appendonly yes`")
    assert "evicts state" in policy["found"]
    assert policy["change"] == "set it to noeviction"
    assert (memory["verdict"], "set `maxmemory`" in memory["change"]) == ("advice", True)


def test_a_redis_that_is_away_is_a_fault(examine, monkeypatch):
    monkeypatch.setenv("ACCLIMATE_REDIS_URL", "redis://127.0.0.1:9")
    code, (found,) = examine()
    assert (code, found["about"], found["verdict"]) == (1, "redis", "fault")
    assert found["change"] == "start it, or mend ACCLIMATE_REDIS_URL"


def test_a_redis_that_is_far_away_or_nearly_full_is_worth_advice(good, examine, monkeypatch, tmp_path):
    with closing(Redis.from_url(good)) as redis, farther(good, tmp_path / "far.sock", 0.003) as url:
        redis.config_set("maxmemory", int(redis.info("memory")["used_memory"] * 1.1))
        monkeypatch.setenv("ACCLIMATE_REDIS_URL", url)
        code, (full, slow) = examine()
    assert code == 0
    assert (full["verdict"], full["change"]) == ("advice", "give it more `maxmemory`")
    assert (slow["verdict"], "bring it nearer" in slow["change"]) == ("advice", True)
    assert float(slow["found"].split()[3]) > 3


def test_a_bundle_that_is_damaged_or_not_there_is_a_fault(examine, monkeypatch, tmp_path):
    store = tmp_path / "store"
    shutil.copytree(BUNDLES, store)
    (weights,) = store.glob("*/1/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-8])
    monkeypatch.setenv("ACCLIMATE_MODEL_STORE", str(store))
    code, (found,) = examine()
    assert (code, found["about"], found["verdict"]) == (1, "store", "fault")
    assert "model.safetensors" in found["found"]
    monkeypatch.setenv("ACCLIMATE_MODEL", "another")
    code, (found,) = examine()
    assert (code, found["about"]) == (1, "store")
    assert "another" in found["found"]


def test_a_device_that_is_not_there_and_threads_without_cores_are_named(examine, monkeypatch):
    monkeypatch.setenv("ACCLIMATE_DEVICE", "cuda:99")
    monkeypatch.setenv("ACCLIMATE_THREADS", str(available_cores() + 1))
    code, (device, threads) = examine()
    assert (code, device["about"], device["verdict"]) == (1, "device", "fault")
    assert "cuda:99 is not there" in device["found"]
    assert (threads["verdict"], threads["change"]) == (
        "advice",
        f"unset ACCLIMATE_THREADS, or set it to {available_cores()}",
    )


def test_an_open_door_and_guessable_hashes_are_named(examine, monkeypatch):
    monkeypatch.setenv("ACCLIMATE_HOST", "0.0.0.0")
    monkeypatch.delenv("ACCLIMATE_SECRET")
    code, (door, secret) = examine()
    assert (code, door["about"], door["verdict"]) == (1, "access", "fault")
    assert "ACCLIMATE_KEYS_FILE" in door["change"]
    assert (secret["verdict"], "ACCLIMATE_SECRET" in secret["change"]) == ("advice", True)
    monkeypatch.setenv("ACCLIMATE_KEYS_FILE", "/nowhere")
    _, (keys, _) = examine()
    assert "/nowhere cannot be read" in keys["found"]


def test_limits_that_contradict_each_other_or_the_machine_are_named(examine, monkeypatch):
    monkeypatch.setenv("ACCLIMATE_STATE_TTL_S", "60")
    monkeypatch.setenv("ACCLIMATE_CACHE_BYTES", str(2**50))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        code, (ttl, memory, files) = examine()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (code, ttl["verdict"]) == (1, "fault")
    assert "ACCLIMATE_STATE_TTL_S" in ttl["change"]
    assert "ACCLIMATE_CACHE_BYTES" in memory["change"]
    assert "ulimit -n" in files["change"]


def test_a_misspelt_setting_is_all_that_is_said(examine, monkeypatch):
    monkeypatch.setenv("ACCLIMATE_THREDS", "2")
    code, (found,) = examine()
    assert (code, found["about"]) == (1, "settings")
    assert "did you mean ACCLIMATE_THREADS?" in found["found"]


@pytest.mark.parametrize(
    ("missing", "verdict", "said"),
    [("", "fine", "a private one would be started"), ("redis", "fault", "redis-server")],
)
def test_the_private_redis_is_looked_for_and_not_started(good, monkeypatch, tmp_path, capsys, missing, verdict, said):
    monkeypatch.delenv("ACCLIMATE_REDIS_URL")
    if missing:
        monkeypatch.setattr("shutil.which", lambda _: None)
        monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
        monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    assert main(["doctor", "--json"]) == int(verdict == "fault")
    found = json.loads(capsys.readouterr().out)[-1]
    assert (found["about"], found["verdict"]) == ("redis", verdict)
    assert said in found["found"]
    assert not (tmp_path / ".data").exists()


@contextmanager
def farther(url: str, path: Path, seconds: float) -> Iterator[str]:
    """A way to a Redis on which every piece that is sent takes so long."""

    def carry(source: socket.socket, target: socket.socket, delay: float) -> None:
        with suppress(OSError):
            while piece := source.recv(65_536):
                time.sleep(delay)
                target.sendall(piece)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        with suppress(OSError):
            while True:
                caller, _ = listener.accept()
                server = socket.socket(socket.AF_UNIX)
                server.connect(unquote(url.removeprefix("unix://")))
                ends.extend((caller, server))
                for pair in ((caller, server, seconds), (server, caller, 0.0)):
                    threading.Thread(target=carry, args=pair, daemon=True).start()

    ends: list[socket.socket] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield f"unix://{path}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            for each in ends:
                each.close()
