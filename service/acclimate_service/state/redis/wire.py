"""Sends scripts to Redis so that the fate of every change is known, or known to be unknown.

A script without reply is sent again, byte for byte the same: the tag inside it makes that safe. What was sent is never
cancelled: a caller who goes away leaves it running, and its reply is dropped.

In a cluster a script follows its key. MOVED and ASK say that it was not run, and where to go. While a master is
replaced, or a slot is on its way, the same script is sent again for as long as the link is patient; a refusal of one
copy says nothing of an earlier one without reply.
"""

import asyncio
import itertools
import logging
import math
import random
import re
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Final, TypeAlias

from redis import exceptions as failures

from acclimate_service.metrics import SPELLS
from acclimate_service.state.errors import Effect, ForeignValue, StateError, StoreFull, StoreUnavailable
from acclimate_service.state.outcomes import Reply
from acclimate_service.state.redis.cluster import Cluster
from acclimate_service.state.redis.link import ANSWER_S, Argument, Lane, Link, Server, Target, Unreachable, dial
from acclimate_service.state.redis.scripts import Script

__all__ = ["Argument", "Wire", "connect"]

Command: TypeAlias = tuple[Argument, ...]

_HOPS: Final = 5
"""Servers that may send an exchange on before it counts as refused."""
DEADLINE: ContextVar[float] = ContextVar("deadline", default=math.inf)
"""Until when the caller of the present request waits (`time.monotonic()`); an exchange begun before ends by then.

No exchange takes longer than `ANSWER_S`, however late that is."""
_LEAST_S: Final = 1.0
"""What an exchange is given that begins just before the deadline."""
_MARGIN_S: Final = 0.1
"""For the reply, which is to be with the caller by the deadline."""
_LONGEST_PAUSE: Final = 0.25
"""Before a repeat (s)."""
_KEYLESS: Final = ("PING", "INFO", "TIME", "CONFIG", "SCAN")
"""Commands whose first argument is no key."""
_NETWORK: Final = (failures.ConnectionError, failures.TimeoutError, OSError)
# Subclasses of ConnectionError that are answers: Redis said no before it ran anything.
_DENIED: Final = (failures.BusyLoadingError, failures.AuthenticationError, failures.AuthorizationError)
# What a cluster says while it changes: a master is replaced, or a slot is on its way.
_PASSING: Final = (
    failures.BusyLoadingError,
    failures.ReadOnlyError,
    failures.TryAgainError,
    failures.ClusterDownError,
    failures.MasterDownError,
    failures.MovedError,
    failures.AskError,
)
# redis-py strips the code where it has a class for it; an error raised inside a script carries it in the middle.
_NOT_RUN_CODE: Final = re.compile(
    r"(?:^|-)(?:MISCONF|READONLY|LOADING|TRYAGAIN|NOREPLICAS|MASTERDOWN|CLUSTERDOWN|BUSY)\b"
)
_FULL_CODE: Final = re.compile(r"(?:^|-)OOM\b")
_log = logging.getLogger(__name__)


class Wire:
    """Exchanges with Redis that survive lost replies, callers who go away, and masters that are replaced.

    Args:
        link: connections, from `connect`.
        resend: how often an exchange without reply is repeated; more often while the link is patient.
        jitter_ms: longest random pause before the first repeat (ms); it doubles from one to the next.
        replicas: how many replicas are to have a change before it is acknowledged.
        wait_ms: longest wait for them (ms, above 0); then the change is acknowledged all the same, and counted.
        observe: told how long each exchange took (s).

    Attributes:
        unreplicated: changes that fewer replicas had in time. They are lost if their master dies now.
    """

    def __init__(
        self,
        link: Link,
        *,
        resend: int = 2,
        jitter_ms: float = 20,
        replicas: int = 0,
        wait_ms: int = 50,
        observe: Callable[[float], None] | None = None,
    ) -> None:
        self._link = link
        self._resend = resend
        self._jitter = jitter_ms / 1000
        self._replicas = replicas
        self._wait_ms = wait_ms
        self._observe = observe
        self.unreplicated = 0

    @property
    def masters(self) -> Sequence[Target]:
        """Where to `read` of every server once that holds state."""
        return self._link.masters

    def server_of(self, key: str) -> Target:
        """Which of the masters serves a key; None where there is only one, or nobody does."""
        return self._link.server_of(key)

    async def run(self, script: Script, keys: Sequence[str], args: Sequence[Argument]) -> Reply:
        """Run a script.

        Raises:
            StoreUnavailable: no reply, or Redis cannot run it at present.
            StoreFull: refused whole, for lack of memory.
        """
        return await self._deliver(("EVALSHA", script.sha, len(keys), *keys, *args), keys[0], script)

    async def read(self, *command: Argument, at: Target = None) -> Any:
        """Run one command that changes nothing: where its key is, or at a certain server.

        Raises:
            StoreUnavailable: no reply, or Redis cannot run it at present.
        """
        return (await self._deliver(command, at if command[0] in _KEYLESS else str(command[1]))).rows

    async def publish(self, channel: str, message: str) -> None:
        """Tell whoever listens. It is a hint: where it does not reach Redis, that is logged and nothing else."""
        try:
            await self._deliver(("PUBLISH", channel, message), None)
        except StateError as error:
            _log.warning("nothing was published on %s: %s", channel, error)

    async def aclose(self) -> None:
        """Wait for the replies to what was sent, then close the connections."""
        await self._link.aclose()

    async def _deliver(self, command: Command, target: Target, script: Script | None = None) -> Reply:
        clock, decides = asyncio.get_running_loop().time, script is not None and script.decides
        unsettled, patient_until = False, clock() + self._link.patience
        began = time.monotonic()
        left, limit = DEADLINE.get() - began, ANSWER_S + self._link.patience
        if left > 0:
            limit = min(limit, max(_LEAST_S, left - _MARGIN_S))
        try:
            async with asyncio.timeout(limit):
                for repeat in itertools.count():
                    try:
                        return Reply(await self._exchange(command, target, script), unsettled)
                    except Unreachable as error:
                        lost: Exception = error
                    except (failures.ResponseError, *_DENIED) as error:
                        if not (self._link.patience and isinstance(error, _PASSING)):
                            raise _failure(error, decides, unsettled) from error
                        lost = error
                    except _NETWORK as error:
                        lost, unsettled = error, decides
                    if repeat >= self._resend and clock() >= patient_until:
                        break
                    await self._link.refresh()
                    await asyncio.sleep(random.uniform(0, min(self._jitter * 2**repeat, _LONGEST_PAUSE)))
        except TimeoutError:
            raise StoreUnavailable(f"Redis does not answer within {limit:.1f} s", _effect(decides)) from None
        finally:
            ended = time.monotonic()
            if self._observe is not None:
                self._observe(ended - began)
            if (spells := SPELLS.get()) is not None:
                spells.append(("store", began, ended))
        raise _failure(lost, decides, unsettled) from lost

    async def _exchange(self, command: Command, target: Target, script: Script | None) -> Any:
        """Ask the server of the target. One that sends the exchange on has run nothing."""
        there: Target = target
        for _ in range(_HOPS):
            lane = await self._link.lane(there)
            try:
                try:
                    rows = await lane.ask(*command)
                except failures.NoScriptError:
                    if script is None:
                        raise
                    rows = await lane.ask("EVAL", script.text, *command[2:])
            except failures.AskError as error:  # or MOVED
                redirect = error
                there = await self._link.redirected(redirect) or target
                continue
            if script is not None and script.decides and self._replicas:
                await self._replicated(lane)
            return rows
        raise redirect

    async def _replicated(self, lane: Lane) -> None:
        """Wait for the replicas, on the connection of the change; its reply stands, whatever comes of this."""
        try:
            reached: int = await lane.ask("WAIT", self._replicas, self._wait_ms)
        except (failures.RedisError, OSError):
            reached = 0
        self.unreplicated += reached < self._replicas


async def connect(
    url: str,
    *,
    max_connections: int = 64,
    connect_timeout: float = 1.0,
    reply_timeout: float = ANSWER_S,
    patience: float = 10.0,
) -> Link:
    """A link to a Redis, or to the cluster that it says it belongs to.

    Args:
        url: `redis://`, `rediss://` or `unix://`; of a cluster, any node, or a name that resolves to several.
        max_connections: callers above this number share connections, for each server.
        connect_timeout, reply_timeout: longest wait for a new connection, and for a reply (s).
        patience: how long a cluster is given to replace a master before callers are refused (s).

    Raises:
        ValueError: an URL of another kind, or a cluster that is to be reached by a unix socket.
        TypeError: an option in the URL that connections do not take.
        StoreUnavailable: nobody answers, or a cluster whose slots nobody serves.
    """
    way = dial(
        url,
        max_connections=max_connections,
        connect_timeout=connect_timeout,
        reply_timeout=reply_timeout,
    )
    server = Server(way)
    try:
        clustered = b"cluster_enabled:1" in await Wire(server).read("INFO", "cluster")
    except BaseException:
        await server.aclose()
        raise
    if not clustered:
        return server
    await server.aclose()
    if "path" in way.options:
        raise ValueError("a cluster is reached by redis:// or rediss://, not by a unix socket")
    cluster = Cluster(way, patience)
    await cluster.refresh()
    if not cluster.masters:
        raise StoreUnavailable("this Redis belongs to a cluster whose slots nobody serves; assign them first")
    return cluster


def _effect(unsettled: bool) -> Effect:
    return "unknown" if unsettled else False


def _failure(error: Exception, decides: bool, unsettled: bool) -> StateError:
    """Why an exchange came to nothing; an earlier copy without reply may land all the same."""
    text = str(error)
    if isinstance(error, failures.OutOfMemoryError) or _FULL_CODE.search(text):
        return StoreFull(f"Redis is full: {text}", _effect(unsettled))
    if isinstance(error, (*_DENIED, *_PASSING)) or _NOT_RUN_CODE.search(text):
        return StoreUnavailable(f"Redis takes no changes at present: {text}", _effect(unsettled))
    if "WRONGTYPE" in text:
        return ForeignValue(f"Redis has a value of another type under a key of the service: {text}", _effect(decides))
    if isinstance(error, failures.ResponseError):
        return StoreUnavailable(f"Redis failed: {text}", _effect(decides))
    return StoreUnavailable(f"Redis does not answer: {text}", _effect(unsettled))
