"""A version is rolled out and rolled back under load, on two replicas behind nginx as deployed."""

import os
import random
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.torch import load_file

from acclimate_store import Catalogue, load_streams, write_bundle
from acclimate_store.architectures import build
from acclimate_store.files import MODEL_FILE

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
RATE, CALLERS, CLIENTS = 20, 4, 6
"""Requests a second by all callers; clients of each."""
LEAST_S = 4
"""Of each stage."""


def publish(root: Path) -> None:
    """`fashion/1`, and `fashion/2` with other weights."""
    shipped = Catalogue(ROOT / "model_store/bundles").load("fashion-cnn")
    weights = load_file(ROOT / "model_store/bundles/fashion-cnn/1" / MODEL_FILE)
    for version, factor in (("1", 1.0), ("2", 0.99)):
        net = build(shipped.manifest.architecture, shipped.manifest.architecture_options)
        net.load_state_dict({n: factor * t if t.is_floating_point() else t for n, t in weights.items()})
        told = {"name": "fashion", "version": version, "files": {}}
        write_bundle(root, shipped.manifest.model_copy(update=told), net, shipped.model.source)


class Load:
    """Callers who send batches at a rate, each with a key of its own, and some of them twice; all that came back."""

    def __init__(self, url: str) -> None:
        (stream, *_) = load_streams(ROOT / "model_store/samples/fashion-hybrid/streams.npz")
        self.statuses: list[int] = []
        self.answers: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
        self._batches = [np.ascontiguousarray(stream.images[start : start + 10]) for start in range(0, 200, 10)]
        self._url = url
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=self._call, args=(number,)) for number in range(CALLERS)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def _call(self, caller: int) -> None:
        draws, due, sent = random.Random(caller), time.monotonic(), 0
        with httpx.Client(base_url=self._url, timeout=30) as http:
            while not self._ends.wait(max(0.0, due - time.monotonic())):
                due += CALLERS / RATE
                repeated = sent > 0 and draws.random() < 0.2
                sent += 0 if repeated else 1
                key = f"{caller}-{sent - draws.randrange(min(sent, 3)) if repeated else sent}"
                number = int(key.partition("-")[2])
                images = self._batches[number % len(self._batches)]
                reply = http.post(
                    f"/clients/cam-{caller}-{number % CLIENTS}/predict",
                    content=images.tobytes(),
                    headers={
                        "Content-Type": "application/octet-stream",
                        "X-Tensor-Shape": ",".join(map(str, images.shape)),
                        "Idempotency-Key": key,
                    },
                )
                self.statuses.append(reply.status_code)
                if reply.is_success:
                    self.answers[key].append(reply.json())


def test_a_canary_a_promotion_and_a_roll_back_fail_no_request_and_count_every_batch_once(
    balance: Callable[..., Any], replica: Callable[..., Any], redis_url: str, tmp_path: Path, wait: Callable[..., None]
) -> None:
    publish(tmp_path / "store")
    environment = {
        "PATH": os.environ["PATH"],
        "ACCLIMATE_REDIS_URL": redis_url,
        "ACCLIMATE_MODEL_STORE": str(tmp_path / "store"),
        "ACCLIMATE_MODEL": "fashion/1",
        "ACCLIMATE_MAX_QUEUE_MS": "60000",  # a busy machine is not what is tried here
    }
    pair = [replica({**environment, "ACCLIMATE_REPLICA": name}) for name in ("one", "two")]
    for each in pair:
        each.wait_until_ready()
    balancer = balance(*(each.port for each in pair))

    def operate(*words: str) -> str:
        """Through the balancer, as an operator may who sees nothing else."""
        command = [str(Path(sys.executable).with_name("acclimate")), "models", *words, "--url", balancer.url]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def seen(version: str) -> int:
        return sum(given[0]["model"]["version"] == version for given in list(load.answers.values()))

    load = Load(balancer.url)
    try:
        wait(lambda: seen("1") > 3 * RATE)
        for command in (("canary", "fashion/2", "--share", "0.5"), ("promote", "fashion"), ("rollback", "fashion")):
            operate(*command)
            until, before = time.monotonic() + LEAST_S, len(load.statuses)
            wait(lambda until=until, before=before: time.monotonic() > until and len(load.statuses) > before + RATE)
    finally:
        load.stop()

    assert set(load.statuses) == {200}
    assert len(load.statuses) > 10 * RATE
    repeats = [given for given in load.answers.values() if len(given) > 1]
    assert len(repeats) > RATE
    for given in repeats:
        assert len({(each["model"]["version"], each["state"]["version"]) for each in given}) == 1
    counted = defaultdict[tuple[str, str], list[int]](list)
    for first, *_ in load.answers.values():
        assert first["state"]["replayed"] == "none"
        counted[first["client_id"], first["model"]["version"]].append(first["state"]["version"])
    assert {version for _, version in counted} == {"1", "2"}
    for (client, version), numbers in counted.items():
        assert sorted(numbers) == list(range(1, len(numbers) + 1)), (client, version)
    assert "fashion/1: answers 100 % of the clients (default)" in operate("rollout", "fashion")
    operate("unload", "fashion/2")
    for (client, version), numbers in counted.items():
        if version == "1":
            state = httpx.get(f"{balancer.url}/clients/{client}").json()["state"]
            assert state["version"] == len(numbers)
