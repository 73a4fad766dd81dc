"""Replicas on one Redis behind one nginx, as they are deployed; a replica that ends is started again at once."""

import signal
import tempfile
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from exactly_once.processes import Balancer, Process, Redis, Replica, wait_until

EXPECTED_ENDS = {
    0: "by SIGTERM",
    2: "found no Redis",
    -signal.SIGKILL: "by SIGKILL",
    -signal.SIGTERM: "by SIGTERM while it started",
}


class Fleet:
    """A context manager: inside, everything runs.

    Args:
        directory: of the database and the logs.
        settings: of each replica, without their prefix.
        sticky: whether nginx sends a client to the same replica each time.

    Attributes:
        ends: how often replicas ended, by how.
    """

    def __init__(self, directory: Path, settings: Sequence[Mapping[str, Any]], *, sticky: bool) -> None:
        self._stack = ExitStack()
        prefix = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="nginx-")))
        prefix.chmod(0o755)
        self.redis = Redis(directory)
        self.replicas = [Replica(directory, self.redis.url, each) for each in settings]
        self.balancer = Balancer(prefix, directory, [one.port for one in self.replicas], sticky=sticky)
        self.ends: Counter[str] = Counter()
        self._closing = threading.Event()

    def __enter__(self) -> Self:
        with self._stack:
            self._run(self.redis)
            wait_until(self.redis.serves)
            for process in (*self.replicas, self.balancer):
                self._run(process)
            wait_until(self.serves)
            keeper = threading.Thread(target=self._keep)
            keeper.start()
            self._stack.callback(keeper.join)
            self._stack.callback(self._closing.set)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def serves(self) -> bool:
        """Whether all of it does."""
        return self.balancer.serves() and all(replica.serves() for replica in self.replicas)

    def restart(self, replica: Replica) -> None:
        """Let a replica end in its own way, and wait for the next one in its place."""
        starts = replica.starts
        replica.send(signal.SIGTERM)
        wait_until(lambda: replica.starts > starts and replica.serves())

    def _run(self, process: Process) -> None:
        process.start()
        self._stack.callback(process.kill)

    def _keep(self) -> None:
        while not self._closing.wait(0.05):
            for replica in self.replicas:
                status = replica.ended
                if status is not None:
                    self.ends[EXPECTED_ENDS.get(status, f"with status {status}")] += 1
                    replica.start()
