"""Sends scripts to Redis so that the fate of every change is known, or known to be unknown.

A script without reply is sent again, byte for byte the same: the tag inside it makes that safe. What was sent is never
cancelled: a caller who goes away leaves the exchange running, so that no connection is returned half-read.
"""

import asyncio
import random
import re
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

from redis import exceptions as failures
from redis.asyncio import BlockingConnectionPool
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from acclimate_service.state.errors import Effect, StateError, StoreFull, StoreUnavailable
from acclimate_service.state.scripts import Script

Argument: TypeAlias = str | bytes | int
T = TypeVar("T")

_NETWORK: Final = (failures.ConnectionError, failures.TimeoutError, OSError)
# Subclasses of ConnectionError that are answers: Redis said no before it ran anything.
_DENIED: Final = (failures.BusyLoadingError, failures.AuthenticationError, failures.AuthorizationError)
# redis-py strips the code where it has a class for it; an error raised inside a script carries it in the middle.
_NOT_RUN: Final = (
    *_DENIED,
    failures.ReadOnlyError,
    failures.TryAgainError,
    failures.ClusterDownError,
    failures.MasterDownError,
    failures.MovedError,
    failures.AskError,
)
_NOT_RUN_CODE: Final = re.compile(
    r"(?:^|-)(?:MISCONF|READONLY|LOADING|TRYAGAIN|NOREPLICAS|MASTERDOWN|CLUSTERDOWN|BUSY)\b"
)
_FULL_CODE: Final = re.compile(r"(?:^|-)OOM\b")


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a script. `unsettled`: an earlier copy of it had no reply, and may still land."""

    rows: list[Any]
    unsettled: bool

    @property
    def effect(self) -> Effect:
        """Of a refusal for a reason that may pass: it says nothing of the earlier copy."""
        return _effect(self.unsettled)


def connect(
    url: str,
    *,
    max_connections: int = 64,
    pool_timeout: float = 1.0,
    connect_timeout: float = 1.0,
    timeout: float = 5.0,
) -> BlockingConnectionPool:
    """A pool of connections to one Redis. A pool belongs to the event loop that uses it first.

    Args:
        url: `redis://`, `rediss://` or `unix://`.
        max_connections: callers above this number wait.
        pool_timeout, connect_timeout, timeout: longest wait for a free connection, for a new one, and for a reply (s).

    Raises:
        ValueError: an URL of another kind.
    """
    return BlockingConnectionPool.from_url(
        url,
        max_connections=max_connections,
        timeout=pool_timeout,
        socket_connect_timeout=connect_timeout,
        socket_timeout=timeout,
        decode_responses=False,
        protocol=2,
        retry=Retry(NoBackoff(), 0),  # the library's own retries would hide that an earlier copy may still land
    )


class Wire:
    """Exchanges with Redis that survive lost replies and callers who go away.

    Args:
        pool: connections, from `connect`.
        resend: how often an exchange without reply is repeated.
        jitter_ms: longest random pause before a repeat (ms).
    """

    def __init__(self, pool: BlockingConnectionPool, *, resend: int = 2, jitter_ms: float = 20) -> None:
        self._pool = pool
        self._resend = resend
        self._jitter = jitter_ms / 1000
        self._running: set[asyncio.Task[Any]] = set()

    async def run(self, script: Script, keys: Sequence[str], args: Sequence[Argument]) -> Reply:
        """Run a script.

        Raises:
            StoreUnavailable: no reply, or Redis cannot run it at present.
            StoreFull: refused whole, for lack of memory.
        """
        tail = (len(keys), *keys, *args)

        async def exchange(connection: AbstractConnection) -> Any:
            try:
                return await _ask(connection, "EVALSHA", script.sha, *tail)
            except failures.NoScriptError:
                return await _ask(connection, "EVAL", script.text, *tail)

        return await self._shielded(self._deliver(exchange, script.decides))

    async def read(self, *command: Argument) -> Any:
        """Run one command that changes nothing.

        Raises:
            StoreUnavailable: no reply, or Redis cannot run it at present.
        """
        reply = await self._shielded(self._deliver(lambda connection: _ask(connection, *command), decides=False))
        return reply.rows

    async def aclose(self) -> None:
        """Wait for what is still running, then close the connections."""
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._pool.aclose()

    async def _deliver(self, exchange: Callable[[AbstractConnection], Awaitable[Any]], decides: bool) -> Reply:
        unsettled = False
        for repeat in range(self._resend + 1):
            if repeat:
                await asyncio.sleep(random.uniform(0, self._jitter))
            try:
                connection = await self._pool.get_connection()  # type: ignore[no-untyped-call]
            except _NETWORK as error:  # nothing was sent
                lost: Exception = error
                continue
            try:
                return Reply(await exchange(connection), unsettled)
            except (failures.ResponseError, *_DENIED) as error:
                raise _refusal(error, decides, unsettled) from error
            except _NETWORK as error:
                lost, unsettled = error, decides
            finally:
                await self._pool.release(connection)
        raise StoreUnavailable(f"Redis does not answer: {lost}", _effect(unsettled)) from lost

    async def _shielded(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._finished)
        return await asyncio.shield(task)

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as seen: the caller may have gone away


async def _ask(connection: AbstractConnection, *command: Argument) -> Any:
    await connection.send_command(*command)
    return await connection.read_response()


def _effect(unsettled: bool) -> Effect:
    return "unknown" if unsettled else False


def _refusal(error: Exception, decides: bool, unsettled: bool) -> StateError:
    """What Redis said instead of running the script; an earlier copy without reply may land all the same."""
    text = str(error)
    if isinstance(error, failures.OutOfMemoryError) or _FULL_CODE.search(text):
        return StoreFull(f"Redis is full: {text}", _effect(unsettled))
    if isinstance(error, _NOT_RUN) or _NOT_RUN_CODE.search(text):
        return StoreUnavailable(f"Redis takes no changes at present: {text}", _effect(unsettled))
    return StoreUnavailable(f"Redis failed: {text}", _effect(decides))
