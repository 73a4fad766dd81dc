"""Callers that send every batch until it is acknowledged, sometimes twice at once, sometimes again much later."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from exactly_once.streams import Images
from numpy.typing import NDArray

from acclimate_client import Client
from acclimate_client.errors import AcclimateClientError, ProblemError

T = TypeVar("T")
AT_ONCE = {"one": 70, "twice": 10, "again": 10, "two": 10}  # in 100
PATIENCE = 240.0  # s for one batch; far more than any needs
TIMEOUTS = (10.0, 10.0, 10.0, 1.0)  # s; the short one gives up on a stopped replica that may still wake up
LONGEST_PAUSE = 0.3  # s before a batch is sent again
REPEATS = 3  # batches of each client that are sent once more at the end


@dataclass(frozen=True, slots=True)
class Work:
    """What one client sends: `groups` of batch numbers, those of one group at once, one group after the other."""

    client: str
    adapter: str
    batches: Sequence[Images]
    groups: Sequence[tuple[int, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class Acknowledgement:
    """An answer to a batch; no probabilities when the service no longer has them."""

    client: str
    number: int
    version: int
    replayed: str
    probabilities: NDArray[np.float64] | None


@dataclass
class Ledger:
    """What callers saw; filled by all of them at once."""

    started: dict[str, int] = field(default_factory=dict)  # version of each client before its first batch
    acknowledgements: list[Acknowledgement] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    _batches: set[tuple[str, int]] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def batches(self) -> int:
        """Batches acknowledged so far, each counted once."""
        return len(self._batches)

    def acknowledge(self, answer: Acknowledgement) -> None:
        with self._lock:
            self.acknowledgements.append(answer)
            self._batches.add((answer.client, answer.number))

    def fail(self, error: AcclimateClientError) -> None:
        with self._lock:
            self.failures[error.code if isinstance(error, ProblemError) else type(error).__name__] += 1


def groups(rng: random.Random, batches: int) -> list[tuple[int, ...]]:
    """Which of its batches a client sends at once."""
    made: list[tuple[int, ...]] = []
    number = 0
    while number < batches:
        (kind,) = rng.choices(tuple(AT_ONCE), tuple(AT_ONCE.values()))
        if kind == "two" and number + 1 < batches:
            made.append((number, number + 1))
        elif kind == "again" and number:
            made.append((number, rng.randrange(number)))
        else:
            made.append((number, number) if kind == "twice" else (number,))
        number = max(made[-1]) + 1
    return made


class Caller:
    """Sends the batches of some clients, taking turns between them."""

    def __init__(self, sdk: Client, ledger: Ledger, seed: str) -> None:
        self._sdk = sdk
        self.ledger = ledger
        self._rng = random.Random(seed)

    def run(self, works: Sequence[Work]) -> None:
        """Send everything; a refusal for good, which is a violation, ends it."""
        with ThreadPoolExecutor(2) as pool, suppress(AcclimateClientError):
            for work in works:
                self._begin(work)
            for turn in range(max(len(work.groups) for work in works)):
                for work in works:
                    self._send_group(work, turn, pool)

    def close_up(self, work: Work) -> int:
        """Send some of a client's batches again, which were all acknowledged; the version of its state after that."""
        with suppress(AcclimateClientError):
            for number in self._rng.sample(range(len(work.batches)), min(REPEATS, len(work.batches))):
                self._send(work, number, alone=False)
            return self.insist(lambda sdk: sdk.get(work.client).state.version, work.client)[0]
        return 0

    def _begin(self, work: Work) -> None:
        def configure(sdk: Client) -> int:
            key = f"{work.client}-configure"
            return sdk.configure(work.client, work.adapter, idempotency_key=key).state.version

        self.ledger.started[work.client] = 0 if work.adapter == "atp" else self.insist(configure, work.client)[0]

    def _send_group(self, work: Work, turn: int, pool: ThreadPoolExecutor) -> None:
        numbers = work.groups[turn] if turn < len(work.groups) else ()
        calls = [pool.submit(self._send, work, number, alone=len(numbers) == 1) for number in numbers]
        for call in calls:
            call.result()

    def _send(self, work: Work, number: int, *, alone: bool) -> None:
        """Send a batch until it is acknowledged; `alone`: nobody else sends it, or did."""
        what = f"{work.client}-{number}"

        def predict(sdk: Client) -> Acknowledgement:
            done = sdk.predict(
                work.client,
                work.batches[number],
                probabilities=True,
                idempotency_key=what,
                timeout=self._rng.choice(TIMEOUTS),
            )
            return Acknowledgement(work.client, number, done.state.version, done.state.replayed, done.probabilities)

        answer, doubt = self.insist(predict, what)
        self.ledger.acknowledge(answer)
        if alone and not doubt and answer.replayed != "none":
            self.ledger.violations.append(f"{what} was applied by a request that was told that it was not")

    def insist(self, call: Callable[[Client], T], what: str) -> tuple[T, bool]:
        """The answer, and whether a failure before it may have changed something."""
        doubt, deadline = False, time.monotonic() + PATIENCE
        while True:
            try:
                return call(self._sdk), doubt
            except AcclimateClientError as error:
                self.ledger.fail(error)
                doubt |= error.state_committed is not False
                if not error.retryable or time.monotonic() > deadline:
                    self.ledger.violations.append(f"{what} was refused for good: {error}")
                    raise
            time.sleep(self._rng.uniform(0, LONGEST_PAUSE))
