"""One layer through which every exchange with Redis goes, and in which it fails as a seeded generator says."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from redis import exceptions
from redis.asyncio.connection import AbstractConnection

from acclimate_service.state import Link
from acclimate_service.state.redis import scripts
from acclimate_service.state.redis.link import Asked, Target, Unreachable

NAMES = {script.sha: script.name for script in vars(scripts).values() if isinstance(script, scripts.Script)}

RATES: Mapping[str, float] = {
    "crash before": 0.008,
    "crash after": 0.012,
    "pause before": 0.010,
    "pause after": 0.010,
    "drop": 0.018,
    "reply lost": 0.025,
    "delayed": 0.025,
    "cancelled": 0.008,
    "slow": 0.060,
}
"""How often each fault strikes one exchange."""

CALLER: ContextVar[asyncio.Task[Any] | None] = ContextVar("caller", default=None)
"""The task of the request that an exchange serves; what goes on in the background serves none."""


@dataclass
class Faults:
    """The dice of one history.

    Args:
        rates: of each fault; that of a single script goes before, as in `flip: delayed`.
        injected: what was drawn so far, and what the sessions observed.
        active: False once all is to go well.
        detached: commands that travel on by themselves.
        exchanges: the tasks whose exchanges are under way.
        delay: of such commands (s).
    """

    rates: Mapping[str, float] = field(default_factory=lambda: RATES)
    injected: Counter[str] = field(default_factory=Counter)
    active: bool = True
    detached: set[asyncio.Task[None]] = field(default_factory=set)
    exchanges: set[asyncio.Task[Any]] = field(default_factory=set)
    delay: tuple[float, float] = (0.005, 0.25)

    def draw(self, dice: random.Random, script: str) -> str:
        """The fault of the next exchange, "" for none."""
        point = dice.random()
        if not self.active:
            return ""
        for fault in RATES:
            point -= self.rates.get(f"{script}: {fault}", self.rates.get(fault, 0.0))
            if point < 0:
                self.injected[fault] += 1
                return fault
        return ""

    def detach(self, work: Coroutine[Any, Any, None]) -> None:
        """Let a command travel on, whoever gives up waiting for it."""
        task = asyncio.create_task(work)
        self.detached.add(task)
        task.add_done_callback(self.detached.discard)


class FaultyPool:
    """A link of one life of a replica. After its crash nothing more is sent; what was sent goes on.

    It has no patience of its own: how often an exchange is repeated is drawn with the history.
    """

    patience = 0.0

    def __init__(
        self,
        link: Link,
        faults: Faults,
        dice: random.Random,
        crash: Callable[[], None],
        mutated: Mapping[str, str],
    ) -> None:
        self.link = link
        self.faults = faults
        self.dice = dice
        self.crash = crash
        self.mutated = mutated  # SHA-1 of a script -> that of the one to run in its place
        self.dead = False

    @property
    def masters(self) -> Sequence[Target]:
        return self.link.masters

    async def lane(self, target: Target) -> "FaultyLane":
        if self.dead:
            raise Unreachable("this replica has crashed")
        return FaultyLane(self, target)

    async def redirected(self, redirect: exceptions.AskError) -> Asked | None:
        return await self.link.redirected(redirect)

    async def refresh(self) -> None:
        await self.link.refresh()

    async def subscription(self) -> AbstractConnection:
        return await self.link.subscription()

    async def aclose(self) -> None:
        pass


class FaultyLane:
    """One exchange."""

    def __init__(self, pool: FaultyPool, target: Target) -> None:
        self._pool = pool
        self._target = target

    async def ask(self, *command: Any) -> Any:
        """What was sent goes on, whoever goes away."""
        exchange, under_way = asyncio.create_task(self._exchange(command)), self._pool.faults.exchanges
        under_way.add(exchange)
        exchange.add_done_callback(self._ended)
        return await asyncio.shield(exchange)

    def _ended(self, exchange: asyncio.Task[Any]) -> None:
        self._pool.faults.exchanges.discard(exchange)
        if not exchange.cancelled():
            exchange.exception()  # whoever wanted to know has asked

    async def _exchange(self, command: tuple[Any, ...]) -> Any:
        pool = self._pool
        fault = pool.faults.draw(pool.dice, NAMES.get(command[1], "read"))
        match fault:
            case "crash before":
                self._crash()
            case "drop":
                raise exceptions.ConnectionError("dropped")
            case "delayed":
                pool.faults.detach(self._later(command, pool.dice.uniform(*pool.faults.delay)))
                raise exceptions.TimeoutError("given up")
            case "slow":
                await asyncio.sleep(pool.dice.uniform(0.001, 0.01))
            case "pause before":
                await asyncio.sleep(pool.dice.uniform(0.02, 0.2))
            case "cancelled":
                if (caller := CALLER.get()) is not None:
                    caller.cancel()
        reply = await self._send(command)
        match fault:
            case "crash after":
                self._crash()
            case "reply lost":
                raise exceptions.ConnectionError("reply lost")
            case "pause after":
                await asyncio.sleep(pool.dice.uniform(0.02, 0.2))
        return reply

    def _crash(self) -> None:
        self._pool.crash()
        raise exceptions.ConnectionError("crashed")

    async def _later(self, command: tuple[Any, ...], delay: float) -> None:
        await asyncio.sleep(delay)
        with suppress(exceptions.RedisError, OSError, Unreachable):  # nobody is there to hear it
            await self._send(command)

    async def _send(self, command: tuple[Any, ...]) -> Any:
        verb, sha, *tail = command
        lane = await self._pool.link.lane(self._target)
        return await lane.ask(verb, self._pool.mutated.get(sha, sha), *tail)
