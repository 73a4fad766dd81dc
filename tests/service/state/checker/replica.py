"""A replica that can crash: it forgets everything, but what it sent goes on."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from checker.faults import CALLER, Faults, FaultyPool
from checker.recorder import Recorder
from checker.toy import Toy, ToyState
from prometheus_client import CollectorRegistry

from acclimate_service.clients.requests import ClientRequest
from acclimate_service.clients.sessions import Sessions
from acclimate_service.metrics import Background
from acclimate_service.state import (
    ClientScope,
    Context,
    Limits,
    Link,
    Policy,
    Request,
    Session,
    StateStore,
    Wire,
    random_rid,
)
from acclimate_service.state.replay_queue import ReplayQueue

T = TypeVar("T")
PATIENT = 3600.0
"""Seconds that a caller waits who does not give up."""


async def _there() -> bool:
    return False


class Replica:
    """Serves one client of one history.

    Args:
        name: for the dice and the history.
        pool: connections to Redis, shared by all.
        faults: what goes wrong.
        seed: of its dice.
        client: the client.
        machine, limits, policy, resend: how it is configured.
        mutated: scripts to run in the place of others.
        budget: bytes of states that it keeps in memory.
        clock: seconds, as sessions see them.
    """

    def __init__(
        self,
        name: str,
        pool: Link,
        faults: Faults,
        seed: str,
        client: ClientScope,
        machine: Toy,
        limits: Limits,
        policy: Policy,
        resend: int,
        mutated: Mapping[str, str],
        budget: int,
        clock: Callable[[], float],
    ) -> None:
        self.name = name
        self.limits = limits
        self.policy = policy
        self._pool = pool
        self._faults = faults
        self._dice = random.Random(f"{seed}/{name}")
        self._client = client
        self.machine = machine
        self._resend = resend
        self._mutated = mutated
        self._budget = budget
        self._clock = clock
        self._requests: set[asyncio.Task[Any]] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._boot()

    def _boot(self) -> None:
        self._link = FaultyPool(self._pool, self._faults, self._dice, self.crash, self._mutated)
        wire = Wire(self._link, resend=self._resend, jitter_ms=2)  # type: ignore[arg-type]
        self._store = StateStore(wire, self.limits)
        self._sessions: dict[str, Sessions] = {}
        self._replays = ReplayQueue()

    def crash(self) -> None:
        self._link.dead = True
        for task in self._requests:
            task.cancel()
        for sessions in self._sessions.values():
            task = asyncio.create_task(self._end(sessions))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        self._boot()

    def start(
        self,
        model: str,
        work: Callable[[Session[ToyState], Request], Awaitable[T]],
        request: Request | None = None,
        patience: float = PATIENT,
    ) -> asyncio.Task[T]:
        """Begin a request: its turn comes after those before it. The task is cancelled if the replica crashes.

        Args:
            model: the model scope.
            work: what it does in its turn.
            request: which; one of its own if None.
            patience: seconds after which its caller gives up what has not begun.
        """
        sessions, asked = self._of(model), request or Request(random_rid(), "")

        async def serve() -> T:
            CALLER.set(asyncio.current_task())
            wanted = ClientRequest(
                client=self._client,
                rid=asked.rid,
                fingerprint=asked.fingerprint,
                deadline=time.monotonic() + patience,
                gone=_there,
                number=asked.number,
            )
            async with sessions.turn(wanted) as turn:
                return await work(turn.session, turn.request)  # type: ignore[arg-type]

        task = asyncio.create_task(serve())
        self._requests.add(task)
        task.add_done_callback(self._requests.discard)
        return task

    def drop(self) -> None:
        """What a replica does that hears of a deletion, whether there was one or not."""
        for sessions in self._sessions.values():
            sessions.drop(self._client.client)

    def check(self) -> None:
        """What a replica does that may have missed a deletion."""
        for sessions in self._sessions.values():
            sessions.check_all()

    def hand_over(self, model: str) -> None:
        """What a replica does that is asked for a client's journal."""
        self._of(model).hand_over(self._client.client)

    async def evict(self, model: str) -> None:
        """As if others needed the memory."""
        sessions = self._of(model)
        if self._client.client in sessions._sessions:
            await asyncio.wait([sessions._leave(self._client.client)])

    async def idle(self) -> None:
        """Wait until nothing that was sent is on its way."""
        with suppress(Exception):
            await self._store.aclose()
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _of(self, model: str) -> Sessions:
        if model not in self._sessions:

            def make(client: ClientScope) -> Session[ToyState]:
                context = Context(
                    store=self._store,
                    limits=self.limits,
                    client=client,
                    model=model,
                    machine=self.machine,
                    policy=self.policy,
                    observer=Recorder(self._observe),
                    clock=self._clock,
                    replays=self._replays,
                )
                return Session(context)

            self._sessions[model] = Sessions(make, self._budget, Background(CollectorRegistry()))  # type: ignore[arg-type]
        return self._sessions[model]

    @staticmethod
    async def _end(sessions: Sessions) -> None:
        await sessions._tasks.aclose()
        for session in tuple(sessions._sessions.values()):
            await session.aclose()

    def _observe(self, event: str) -> None:
        self._faults.injected[event] += 1
