"""A round whose replica is killed in the middle."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import orjson
import pytest
import torch
from redis import Redis
from safetensors.torch import load_file

from acclimate_adapters import Anchors, State
from acclimate_client import Client
from acclimate_store import Catalogue, load_streams, write_bundle
from acclimate_store.architectures import build

ROOT = Path(__file__).parents[2]
BUNDLES = ROOT / "model_store" / "bundles"
CLIENTS = 20


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """The bundled model with labelled anchors."""
    bundle = Catalogue(BUNDLES).load("fashion-cnn")
    net = build(bundle.manifest.architecture, bundle.manifest.architecture_options)
    net.load_state_dict(load_file(BUNDLES / bundle.manifest.key / "model.safetensors"))
    (client, *_) = load_streams(ROOT / "model_store" / "samples" / "fashion-hybrid" / "streams.npz")
    anchors = Anchors(bundle.prepare(client.images[:30]), torch.from_numpy(client.labels[:30].astype(np.int64)))
    source = bundle.model.source
    parts = {name: getattr(source, name) for name in source.__dataclass_fields__}
    path = tmp_path_factory.mktemp("store")
    write_bundle(path, bundle.manifest, net, type(source)(**{**parts, "anchors": anchors}))
    return path


class Runner:
    """A replica that runs one round."""

    def __init__(self, environment):
        command = [Path(sys.executable).with_name("acclimate"), "round"]
        self._process = subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def kill(self):
        self._process.kill()
        self._process.communicate()
        assert self._process.returncode == -9, "the round was over before it could be killed"

    def finish(self):
        out, err = self._process.communicate(timeout=60)
        return self._process.returncode, out, err


def wait_until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before the new version", "after it"])
def test_a_killed_round_leaves_a_complete_version_and_the_next_replica_makes_one_new_one(
    serve, stream, store, tmp_path, moment
):
    options = {"layers": "all", "eta_max": 0.001, "epochs": 1}
    service = serve(model_store=store, adapter="fed_ade", adapter_options=orjson.dumps(options).decode())
    environment = {
        "ACCLIMATE_DATA_DIR": str(tmp_path / "data"),
        "ACCLIMATE_MODEL_STORE": str(store),
        "ACCLIMATE_THREADS": "1",
    }
    with Client(service.url) as client, Redis(unix_socket_path=str(tmp_path / "data" / "redis.sock")) as redis:
        for number in range(CLIENTS):
            for images in stream(number % 8, 2):
                client.predict(f"cam-{number}", images)
        prefix = redis.keys("acc:{default/~*}:m")[0].decode().removesuffix("m")
        assert redis.zcard(f"{prefix}m") == CLIENTS
        before = {number: client.export_state(f"cam-{number}") for number in range(CLIENTS)}

        first = Runner(environment)
        key = "l" if moment == "before the new version" else "c"
        wait_until(lambda: redis.exists(prefix + key))
        first.kill()
        version = int(redis.hget(f"{prefix}c", "version") or 0)
        assert version == (0 if key == "l" else 1)
        if key == "l":
            assert before == {number: client.export_state(f"cam-{number}") for number in range(CLIENTS)}
        assert redis.exists(f"{prefix}l")
        wait_until(lambda: not redis.exists(f"{prefix}l"))

        status, out, err = Runner(environment).finish()
        assert (status, err) == (0, "")
        assert out == f"acclimate: the cohort is at version 1; {CLIENTS} clients took part in the round\n"
        assert int(redis.hget(f"{prefix}c", "version")) == 1
        shared = set()
        for number in range(CLIENTS):
            assert client.get(f"cam-{number}").state.version == 3
            state = State.from_bytes(client.export_state(f"cam-{number}"))
            assert state.step == 2
            shared.add(
                b"".join(t.numpy().tobytes() for n, t in sorted(state.tensors.items()) if n.startswith("shared."))
            )
            assert client.predict(f"cam-{number}", stream(number % 8, 1)[0]).state.version == 4
        assert len(shared) == 1, "all have the layers of the one new version"


def test_a_round_needs_a_running_service(tmp_path):
    status, out, err = Runner(
        {"ACCLIMATE_DATA_DIR": str(tmp_path / "none"), "ACCLIMATE_MODEL_STORE": str(BUNDLES)}
    ).finish()
    assert (status, out) == (2, "")
    assert err.startswith("acclimate: no service runs on ")
    assert err.count("\n") == 1
