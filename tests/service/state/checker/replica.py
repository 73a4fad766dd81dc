"""A replica that can crash: it forgets everything, but what it sent goes on."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from checker.faults import CALLER, Faults, FaultyPool
from checker.recorder import Recorder
from checker.toy import Toy, ToyState
from redis.asyncio import BlockingConnectionPool

from acclimate_service.state import Claims, ClientScope, Context, Limits, Policy, Request, Session, StateStore, Wire

T = TypeVar("T")


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
    """

    def __init__(
        self,
        name: str,
        pool: BlockingConnectionPool,
        faults: Faults,
        seed: str,
        client: ClientScope,
        machine: Toy,
        limits: Limits,
        policy: Policy,
        resend: int,
        mutated: Mapping[str, str],
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
        self._requests: set[asyncio.Task[Any]] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._boot()

    def _boot(self) -> None:
        self._link = FaultyPool(self._pool, self._faults, self._dice, self.crash, self._mutated)
        wire = Wire(self._link, resend=self._resend, jitter_ms=2)  # type: ignore[arg-type]
        self._store = StateStore(wire, self.limits)
        self._sessions: dict[str, tuple[Session[ToyState], asyncio.Lock]] = {}
        self._claims = Claims()

    def crash(self) -> None:
        self._link.dead = True
        for task in self._requests:
            task.cancel()
        for session, _ in self._sessions.values():
            task = asyncio.create_task(session.aclose())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        self._boot()

    def start(
        self, model: str, work: Callable[[Session[ToyState]], Awaitable[T]], request: Request | None = None
    ) -> asyncio.Task[T]:
        """Begin a request: its turn comes after those before it. The task is cancelled if the replica crashes."""
        session, turn = self._session(model)
        claims = self._claims

        async def serve() -> T:
            CALLER.set(asyncio.current_task())  # type: ignore[arg-type]
            if request is None:
                async with turn:
                    return await work(session)
            with claims.hold(request):
                async with turn:
                    return await work(session)

        task = asyncio.create_task(serve())
        self._requests.add(task)
        task.add_done_callback(self._requests.discard)
        return task

    def drop(self) -> None:
        """What a replica does that may have missed a deletion."""
        for session, _ in self._sessions.values():
            session.drop()

    async def idle(self) -> None:
        """Wait until nothing that was sent is on its way."""
        with suppress(Exception):
            await self._store.aclose()
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _session(self, model: str) -> tuple[Session[ToyState], asyncio.Lock]:
        if model not in self._sessions:
            observer = Recorder(self._observe)
            context = Context(self._store, self.limits, self._client, model, self.machine, self.policy, observer)
            self._sessions[model] = Session(context), asyncio.Lock()
        return self._sessions[model]

    def _observe(self, event: str) -> None:
        self._faults.injected[event] += 1
