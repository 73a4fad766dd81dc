"""Record what this version keeps in Redis, for later versions to read: `python tools/record_states.py OUT.json`.

Real services write the states of clients of many kinds and are killed. Every key is dumped as it is then. A service of
this version goes on from the keys, and what it answers is recorded beside them.
`tests/service/state/test_recorded.py` restores the keys and compares.
"""

import base64
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from redis import Redis

from acclimate_client import Client, LabelledRow
from acclimate_store.samples import load_streams

ROOT = Path(__file__).parents[1]
STREAMS = load_streams(ROOT / "model_store" / "samples" / "fashion-hybrid" / "streams.npz")
ROWS = 10
EXPORTED_WHOLE = 8192
"""Bytes of the largest export that is recorded; of others, the SHA-256 is."""
GROUPS: dict[str, dict[str, Any]] = {
    "defaults": {
        "settings": {},
        "clients": {
            "none": {"adapter": "none"},
            "atp": {"adapter": "atp"},
            "atp-snapshot": {"adapter": "atp", "snapshot": True},
            "dynfed": {"adapter": "dynfed"},
            "fedcal": {"adapter": "fedcal"},
            "em": {"adapter": "em"},
            "em-labelled": {"adapter": "em", "labelled_rows": 30},
            "fedcal-learning": {"adapter": "fedcal", "options": {"label_weight": 2.0}, "labelled_rows": 15},
            "fedthe-enrolled": {"adapter": "fedthe", "enrolled": 20},
            "balanced": {"adapter": "balanced"},
            "t3a": {"adapter": "t3a"},
            "reset": {"adapter": "em", "reset": True},
        },
    },
    "exact": {
        "settings": {"STATE_BUDGET": "1"},
        "clients": {"atp": {"adapter": "atp"}, "atp.fedcal": {"adapter": "atp+fedcal"}},
    },
    "journals": {
        "settings": {"INLINE_MAX": "1024"},
        "clients": {
            "t3a": {"adapter": "t3a", "snapshot": True},
            "t3a-labelled": {"adapter": "t3a", "labelled_rows": 20},
            "tent": {"adapter": "tent"},
            "bn_adapt.em": {"adapter": "bn_adapt+em"},
        },
    },
}


def main(out: Path) -> None:
    """Write the file."""
    with tempfile.TemporaryDirectory() as folder, _redis(Path(folder) / "redis.sock") as redis:
        groups = {name: _record(redis, Path(folder), **group) for name, group in GROUPS.items()}
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    engine = {
        "torch": torch.__version__,
        "onnxruntime": version("onnxruntime"),
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }
    out.write_text(
        json.dumps({"commit": commit.strip(), "engine": engine, "groups": groups}, separators=(",", ":")) + "\n"
    )


def _record(redis: Redis, folder: Path, settings: dict[str, str], clients: dict[str, Any]) -> dict[str, Any]:
    redis.flushall()
    environment = {"REDIS_URL": f"unix://{folder / 'redis.sock'}", "DRAIN_LEAD_S": "0", "GUARD": "adapt", **settings}
    requests: dict[str, str] = {}
    with _service(environment, folder, signal.SIGTERM) as sdk:
        for name, client in clients.items():
            _begin(sdk, name, client)
            if client.get("snapshot"):
                _predict(sdk, name, clients, 0, 2)
    with _service(environment, folder, signal.SIGKILL) as sdk:
        for name, client in clients.items():
            requests[name] = _predict(sdk, name, clients, 2 if client.get("snapshot") else 0, 4)
            _tell(sdk, name, clients, requests[name])
        time.sleep(1)  # the labels of all clients are pooled in the background
    keys = _dumped(redis)
    with _service(environment, folder, signal.SIGKILL) as sdk:
        recorded = {name: _describe(sdk, name, clients, requests[name]) for name in clients}
    return {"settings": settings, "keys": keys, "clients": recorded}


def _begin(sdk: Client, name: str, client: dict[str, Any]) -> None:
    sdk.configure(name, client["adapter"], **client.get("options", {}))
    if number := client.get("enrolled"):
        sdk.enroll(name, STREAMS[0].images[-number:], STREAMS[0].labels[-number:].tolist())


def _stream(clients: dict[str, Any], name: str) -> int:
    return list(clients).index(name) % len(STREAMS)


def _part(clients: dict[str, Any], name: str, batch: int) -> SimpleNamespace:
    """A batch of the client's stream: `images` and `labels`."""
    stream, rows = STREAMS[_stream(clients, name)], slice(batch * ROWS, (batch + 1) * ROWS)
    return SimpleNamespace(images=stream.images[rows], labels=stream.labels[rows])


def _predict(sdk: Client, name: str, clients: dict[str, Any], first: int, end: int) -> str:
    """Send these batches; the request id of the last one."""
    for batch in range(first, end):
        prediction = sdk.predict(name, _part(clients, name, batch).images)
        if batch == 0 and clients[name].get("reset"):
            sdk.reset(name)
    return prediction.request_id


def _tell(sdk: Client, name: str, clients: dict[str, Any], request: str) -> None:
    """Labels for the rows of the last batch, and for images that come along."""
    if number := clients[name].get("labelled_rows"):
        labels = _part(clients, name, 3).labels
        sdk.feedback(name, [LabelledRow(request, row, int(label)) for row, label in enumerate(labels)])
        if number > ROWS:
            sdk.feedback_images(name, STREAMS[1].images[ROWS:number], STREAMS[1].labels[ROWS:number].tolist())


def _describe(sdk: Client, name: str, clients: dict[str, Any], request: str) -> dict[str, Any]:
    """What this version says of the client, gives as its state, and answers to one further batch."""
    info = sdk.get(name)
    exported = sdk.export_state(name)
    stored = {
        "version": info.state.version,
        "bytes": info.state.bytes,
        "base": info.state.base,
        "journal_entries": info.state.journal_entries,
    }
    guard = info.guard and {
        name: getattr(info.guard.evidence, name) for name in ("verdict", "labelled", "wins", "losses")
    }
    whole = base64.b64encode(exported).decode() if len(exported) <= EXPORTED_WHOLE else None
    further = sdk.predict(name, _part(clients, name, 5).images, probabilities=True)
    assert further.probabilities is not None
    return {
        "adapter": clients[name]["adapter"],
        "hyperparameters": dict(info.hyperparameters),
        "stored": stored,
        "guard": guard,
        "last_request": request,
        "exported": {"bytes": len(exported), "sha256": hashlib.sha256(exported).hexdigest(), "whole": whole},
        "further": {
            "stream": _stream(clients, name),
            "rows": [5 * ROWS, 6 * ROWS],
            "version": further.state.version,
            "labels": list(further.labels),
            "probabilities": further.probabilities.round(9).tolist(),
        },
    }


def _dumped(redis: Any) -> dict[str, Any]:
    """Every key: its type, its time to live in ms, and its value in the serialisation of Redis."""
    return {
        key.decode(): {
            "type": redis.type(key).decode(),
            "pttl": redis.pttl(key),
            "dump": base64.b64encode(redis.dump(key)).decode(),
        }
        for key in sorted(redis.keys())
    }


@contextmanager
def _redis(path: Path) -> Iterator[Redis]:
    server = str(Path(sys.executable).with_name("redis-server"))
    options = ["--port", "0", "--unixsocket", str(path), "--dir", str(path.parent), "--appendonly", "yes", "--save", ""]
    with subprocess.Popen([server, *options], stdout=subprocess.DEVNULL) as process:
        while not path.exists():
            time.sleep(0.02)
        with Redis(unix_socket_path=str(path)) as redis:
            yield redis
        process.terminate()


@contextmanager
def _service(settings: dict[str, str], folder: Path, end: int) -> Iterator[Client]:
    """A service for a block; then it gets the signal `end`."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    variables = {**settings, "PORT": str(port), "THREADS": "1", "MODEL_STORE": str(ROOT / "model_store" / "bundles")}
    environment = {**os.environ, **{f"ACCLIMATE_{name}": value for name, value in variables.items()}}
    command = [str(Path(sys.executable).with_name("acclimate")), "serve"]
    with subprocess.Popen(command, env=environment, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        if " at http://" not in process.stdout.readline():
            raise RuntimeError("the service did not start")
        with Client(f"http://127.0.0.1:{port}") as sdk:
            yield sdk
        process.send_signal(end)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
