"""Services of their own processes, and what is seen of them from outside."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import httpx
import numpy as np
import redis
from numpy.typing import NDArray
from prometheus_client.parser import text_string_to_metric_families

from acclimate_bench.cost.remote import local
from acclimate_bench.cost.report import Report, verdict
from acclimate_client import Client
from acclimate_service.state.redis.embedded import running_at

PATIENCE_S: Final = 30.0
SETTLING_S: Final = 0.2
"""Until Redis has all that a reply does not wait for. No condition tells: any write might be the last one."""
TAKEN: Final = {"name": "acclimate_state_snapshots_total", "result": "taken"}
WARM: Final = 2


@dataclass(frozen=True)
class Traffic:
    """Bytes that a Redis has received, and bytes that its append-only file has grown to."""

    received: int
    file: int

    def __sub__(self, earlier: "Traffic") -> "Traffic":
        return Traffic(self.received - earlier.received, self.file - earlier.file)


@dataclass(frozen=True)
class Replica:
    """A running service. `url` is where it answers, `pid` its process, and `store` the URL of its Redis."""

    url: str
    pid: int
    store: str
    client: Client

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of a metric that bear these labels."""
        families = text_string_to_metric_families(httpx.get(f"{self.url}/metrics").text)
        samples = (sample for family in families for sample in family.samples if sample.name == name)
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    @property
    def resident_mb(self) -> float:
        """Memory of the service's process, without its Redis (MB)."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    @property
    def loop_s(self) -> float:
        """CPU seconds that its event loop has had so far, which is the first thread of its process."""
        return int(Path(f"/proc/{self.pid}/task/{self.pid}/schedstat").read_text().split()[0]) / 1e9

    @property
    def traffic(self) -> Traffic:
        """What its Redis has received and written."""
        with redis.Redis.from_url(self.store) as store:
            facts = store.info("all")
        return Traffic(facts["total_net_input_bytes"], facts["aof_current_size"])


def replica(data_dir: Path, **settings: object) -> AbstractContextManager[Replica]:
    """A service of its own process, on a private Redis in `data_dir` unless `redis_url` is among the settings."""
    return running((str(Path(sys.executable).with_name("acclimate")), "serve"), data_dir, **settings)


@contextmanager
def running(command: Sequence[str], data_dir: Path, /, **settings: object) -> Iterator[Replica]:
    """The same, started by this command."""
    port = free_port()
    given = {"port": port, "data_dir": data_dir, **settings}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("ACCLIMATE_")}
    environment = inherited | {f"ACCLIMATE_{name.upper()}": str(value) for name, value in given.items()}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        with Client(f"http://127.0.0.1:{port}") as client:
            await_that(lambda: client.ready() or process.poll() is not None, "the service is ready")
            if process.poll() is not None:
                raise SystemExit(f"the service ended with status {process.poll()}; its messages are above")
            store = str(settings.get("redis_url") or running_at(data_dir))
            yield Replica(f"http://127.0.0.1:{port}", process.pid, store, client)
    finally:
        process.terminate()
        process.wait()


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def await_that(condition: Callable[[], bool], what: str) -> None:
    """Look again and again until something has come true.

    Raises:
        SystemExit: it did not within half a minute.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"waited {PATIENCE_S:g} s in vain until {what}")
        time.sleep(0.05)


def over_http(served: Replica, client: str, images: NDArray[np.uint8], **options: Any) -> Callable[[], object]:
    """A batch of this client, sent once more at each call."""
    return lambda: served.client.predict(client, images, layout="NCHW", **options)


def stream(served: Replica, client: str, images: NDArray[np.uint8], batches: int) -> list[float]:
    """Seconds that each of so many batches takes, one after the other."""
    return local(over_http(served, client, images))(batches)


@dataclass(frozen=True)
class Count:
    """Batches of one client whose bytes are counted.

    Args:
        name: of the row; the client bears it too, as far as ids may.
        served: where they go.
        images: the batch.
        state: bytes of the client's state.
        batches: how many.
        target: largest ratio of the bytes received to the smaller of batch and state; None: there is none.
    """

    COLUMNS: ClassVar = ("batch", "state", "received", "to file", "ratio", "snapshots", "target")

    name: str
    served: Replica
    images: NDArray[np.uint8]
    state: int
    batches: int
    target: float | None = None

    @property
    def client(self) -> str:
        """Id of the client."""
        return "bytes-" + "".join(letter for letter in self.name if letter.isalnum())


def count(report: Report, counted: Count) -> None:
    """Print what Redis receives and writes for one batch of a warm client."""
    served, batches = counted.served, counted.batches
    stream(served, counted.client, counted.images, WARM)
    time.sleep(SETTLING_S)
    snapshots, before = served.metric(**TAKEN), served.traffic
    stream(served, counted.client, counted.images, batches)
    time.sleep(SETTLING_S)
    grown, taken = served.traffic - before, served.metric(**TAKEN) - snapshots
    received, batch = grown.received / batches, counted.images.nbytes
    ratio = received / min(batch, counted.state)
    sizes = (batch, counted.state, int(received), grown.file // batches)
    report.row(counted.name, *sizes, ratio, int(taken), verdict(ratio, counted.target))
