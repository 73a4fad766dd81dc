"""A client with five batches a second, alone and beside attackers, and what it saw."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hostile.wire import Reply, Target, batch

PACE_S = 0.2
SETTINGS = {"cache_bytes": 16 * 2**20, "secret": "a secret"}
"""Of the service; states of the attackers' clients in memory would count as memory that does not come back."""


@dataclass
class Seen:
    """What the client saw.

    Args:
        seconds: from the time each batch was due to its answer.
        refused: other replies than 200.
        disturbed: answers that are not those of a client that is adapted with its own batches alone.
    """

    seconds: list[float] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    disturbed: list[str] = field(default_factory=list)
    _version: int | None = None

    def note(self, reply: Reply | None) -> None:
        """Look at a reply."""
        if reply is None or reply.status != 200:
            self.refused.append("closed" if reply is None else f"{reply.status} {reply.body[:200]!r}")
            return
        state = json.loads(reply.body)["state"]
        if state["status"] in {"reset", "guarded", "frozen"} or self._version not in {None, state["version"] - 1}:
            self.disturbed.append(f"version {state['version']} after {self._version}, {state['status']}")
        self._version = state["version"]

    @property
    def p99(self) -> float:
        return float(np.quantile(self.seconds, 0.99))


def send_batches(url: str, client: str, seconds: float) -> Seen:
    """Send a batch of ten every 0.2 s; what cannot be sent in time counts as refused."""
    target, seen, began = Target(url, patience_s=10), Seen(), time.monotonic()
    connection = target.connect()
    for number in range(round(seconds / PACE_S)):
        due = began + number * PACE_S
        if time.monotonic() > began + seconds:
            seen.refused.append("the one before was not answered in time")
            continue
        time.sleep(max(0.0, due - time.monotonic()))
        reply = target.ask(batch(client, 10), connection)
        seen.seconds.append(time.monotonic() - due)
        seen.note(reply)
        if reply is None:
            connection.close()
            connection = target.connect()
    connection.close()
    return seen


def warm(url: str) -> None:
    """Let a service answer for a while: its memory is that of one at work."""
    send_batches(url, "warm", 5)
    for _ in range(3):
        reply = Target(url).ask(batch("warm", 256))  # as many as there may be
        assert reply is not None
        assert reply.status == 200


@contextmanager
def attacked(url: str, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Attackers in processes of their own, for the block; afterwards what each was replied."""
    told: dict[str, Any] = {}
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with ExitStack() as stack:
        processes = {
            name: stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", "hostile", name, url],
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for name in names
        }
        try:
            yield told
        finally:
            for process in processes.values():
                assert process.stdin is not None
                process.stdin.close()
            for name, process in processes.items():
                assert process.stdout is not None
                told[name] = json.loads(process.stdout.read() or '{"replies": {}, "wrong": ["the attacker failed"]}')


def resident_mb(pid: int) -> float:
    """Memory of a process (MB)."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
