"""What happens to a fleet while it works, drawn from a seed and tied to the progress of the work."""

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from exactly_once.fleet import Fleet
from exactly_once.processes import wait_until

Kind = Literal["SIGKILL of a replica", "SIGSTOP of a replica", "SIGKILL of Redis", "rolling restart"]
PER_1000: dict[Kind, float] = {
    "SIGKILL of a replica": 6,
    "SIGSTOP of a replica": 12,
    "SIGKILL of Redis": 1.5,
    "rolling restart": 1,
}
LONGEST_STOP = 4.0  # s; a lease lasts 3 s
LONGEST_OUTAGE = 1.5  # s


@dataclass(frozen=True, slots=True)
class Blow:
    """One thing that happens, once so many batches are acknowledged; `draw` in 0..1 says to whom and for how long."""

    after: int
    kind: Kind
    draw: float


def plan(seed: int, batches: int) -> tuple[Blow, ...]:
    """What happens during so many batches: each kind at least once, at moments spread over all of them."""
    rng = random.Random(f"blows {seed}")
    kinds = [kind for kind, rate in PER_1000.items() for _ in range(max(1, round(rate * batches / 1000)))]
    return tuple(sorted((Blow(rng.randrange(batches), kind, rng.random()) for kind in kinds), key=lambda b: b.after))


class Chaos:
    """Deals the blows of a plan, as far as the work gets.

    They may overlap: Redis is killed while one replica is stopped and another starts.
    """

    def __init__(self, fleet: Fleet) -> None:
        self.dealt: Counter[str] = Counter()
        self._fleet = fleet
        self._over = threading.Event()
        self._running: list[Future[None]] = []

    @contextmanager
    def during(self, blows: tuple[Blow, ...], progress: Callable[[], int]) -> Iterator[None]:
        """Deal the blows while the block runs; afterwards everything serves again."""
        with ThreadPoolExecutor(8) as pool:
            dealing = pool.submit(self._deal, blows, progress, pool)
            try:
                yield
            finally:
                self._over.set()
                for each in (dealing, *self._running):
                    each.result()
        wait_until(self._fleet.serves)

    def _deal(self, blows: tuple[Blow, ...], progress: Callable[[], int], pool: ThreadPoolExecutor) -> None:
        for blow in blows:
            while progress() < blow.after:
                if self._over.wait(0.01):
                    return
            self._running.append(pool.submit(self._strike, blow))
            self.dealt[blow.kind] += 1

    def _strike(self, blow: Blow) -> None:
        replicas = self._fleet.replicas
        replica = replicas[int(blow.draw * 1000) % len(replicas)]
        match blow.kind:
            case "SIGKILL of a replica":
                replica.send(signal.SIGKILL)
            case "SIGSTOP of a replica":
                replica.send(signal.SIGSTOP)
                time.sleep(0.05 + (LONGEST_STOP - 0.05) * blow.draw**2)
                replica.send(signal.SIGCONT)
            case "SIGKILL of Redis":
                self._fleet.redis.kill()
                time.sleep(LONGEST_OUTAGE * blow.draw)
                self._fleet.redis.start()
                wait_until(self._fleet.redis.serves)
            case "rolling restart":
                for each in replicas:
                    wait_until(each.serves)
                    self._fleet.restart(each)
