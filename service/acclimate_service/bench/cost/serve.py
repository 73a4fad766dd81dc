"""What HTTP, decoding and the durable write of the state add to a step.

    acclimate bench serve [--repeats 200] [--json FILE]

The bundled model answers the same batches of 20 raw uint8 images in this process and, in turn, in a service on a
private Redis, through the SDK. The difference of the medians is the price of serving.
"""

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from acclimate_adapters import create
from acclimate_client import Client
from acclimate_service.bench.cost.measure import in_turn
from acclimate_service.bench.cost.report import Report, verdict
from acclimate_service.memory import keep_freed_memory
from acclimate_store import Catalogue, load_streams

ROOT = Path(__file__).parents[4]
BUNDLES = ROOT / "model_store/bundles"
SAMPLES = ROOT / "model_store/samples/fashion-hybrid/streams.npz"
TARGET_MS = 3.0
BLOCK = 20


@contextmanager
def running_service(adapter: str) -> Iterator[Client]:
    """A service of its own process on a private Redis, and a client that reached it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with tempfile.TemporaryDirectory() as data_dir:
        settings = {"PORT": str(port), "DATA_DIR": data_dir, "MODEL_STORE": str(BUNDLES), "ADAPTER": adapter}
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("ACCLIMATE_")}
        environment = inherited | {f"ACCLIMATE_{name}": value for name, value in settings.items()}
        command = [str(Path(sys.executable).with_name("acclimate")), "serve"]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        try:
            with Client(f"http://127.0.0.1:{port}") as client:
                while not client.ready():
                    if process.poll() is not None:
                        raise SystemExit("the service did not start; its messages are above")
                    time.sleep(0.1)
                yield client
        finally:
            process.terminate()
            process.wait()


def in_process(adapter_name: str) -> Callable[[], object]:
    """The step alone: normalisation, adapter, no serving."""
    bundle = Catalogue(BUNDLES).load("fashion-cnn", "1")
    adapter, images = create(adapter_name), load_streams(SAMPLES)[0].images[:20]
    state = adapter.init(bundle.model)

    def work() -> None:
        nonlocal state
        state = adapter.step(bundle.model, state, bundle.prepare(images)).state

    return work


def over_http(client: Client) -> Callable[[], object]:
    """The same batch through the service."""
    images = load_streams(SAMPLES)[0].images[:20]
    return lambda: client.predict("benchmark", images, layout="NCHW")


def run(options: argparse.Namespace) -> int:
    """Print the differences."""
    keep_freed_memory()  # as the service does
    report, repeats = Report(), options.repeats
    where = f"CPU, {torch.get_num_threads()} threads"
    columns = ("p50", "p95", "minus in process", "target")
    report.table(f"fashion-cnn, 20 x 1 x 28 x 28 raw uint8, {where}, {repeats} repeats in turn (ms)", *columns)
    for adapter in ("none", "atp"):
        with running_service(adapter) as client:
            alone, served = in_turn(repeats, in_process(adapter), over_http(client), block=BLOCK)
        extra = served.median - alone.median
        report.row(f"{adapter} in process", alone.median, alone.spread[1], "", "")
        cells = (served.median, served.spread[1], extra, verdict(extra, TARGET_MS))
        report.row(f"{adapter} over HTTP, durable", *cells)
    report.finish(options.json)
    return 0
