"""Connections to Redis, as the wire needs them.

A link knows where a key is served; it sends nothing by itself that could change anything, and nothing twice. What is
repeated, and when, is decided by the wire alone. `Server` is a link to one; `Cluster` has a module of its own.
"""

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import hiredis
from redis import exceptions as failures
from redis.asyncio import BlockingConnectionPool
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

Argument: TypeAlias = str | bytes | int
ANSWER_S: Final = 5.0
"""Longest wait of a caller for the answer to one exchange, repeats included (s). A cluster gets its patience too."""


class Node(NamedTuple):
    """Where a server of a cluster listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Asked:
    """The node that a slot is on its way to: one exchange may go there, though the slot is still another's."""

    node: Node


Target: TypeAlias = str | Node | Asked | None
"""Where an exchange goes: to the server of a key, to a node, or to any server."""


class Unreachable(Exception):
    """There is no connection to be had, so nothing was sent."""


class Lane(Protocol):
    """A way to one server."""

    def ask(self, *command: Argument) -> Awaitable[Any]:
        """Send a command at once; its reply is to be awaited. Errors are those of redis-py.

        A caller who goes away leaves the command running.
        """


class Link(Protocol):
    """Where Redis is, and how to get there."""

    @property
    def patience(self) -> float:
        """How long an exchange is worth repeating while servers change their roles (s); 0 where they never do."""

    @property
    def masters(self) -> Sequence[Target]:
        """Targets that reach every server once which holds state."""

    def server_of(self, key: str) -> Target:
        """Which of the masters serves a key; None where there is only one, or nobody does."""

    async def lane(self, target: Target) -> Lane:
        """A connection to the server of this target.

        Raises:
            Unreachable: there is none at present.
        """

    async def redirected(self, redirect: failures.AskError) -> Asked | None:
        """Learn from a server that does not serve a key; where to go once, None: where the key leads now.

        Raises:
            AskError: the redirect itself, where there is nowhere else to go.
        """

    async def refresh(self) -> None:
        """Find out again who serves what, as far as anybody answers."""

    async def subscription(self) -> AbstractConnection:
        """A connection of one's own, to be disconnected by whoever asked for it.

        Raises:
            Unreachable: there is none at present.
        """

    async def aclose(self) -> None:
        """Wait for the replies to what was sent, then close all connections."""


@dataclass(frozen=True, slots=True)
class Dial:
    """How connections are made: their class and options, and how many to one server."""

    kind: type[AbstractConnection]
    options: Mapping[str, Any]
    max_connections: int

    async def connection(self, node: Node | None = None, reply_timeout: float | None = None) -> AbstractConnection:
        """One connection to the server of the URL, or to another that takes the same credentials.

        Args:
            node: the other server.
            reply_timeout: longest wait for a reply, if not that of the options (s).

        Raises:
            Unreachable: nobody listens, or not to us.
        """
        options = {**self.options, **(node._asdict() if node else {})}
        if reply_timeout is not None:
            options["socket_timeout"] = reply_timeout
        connection = self.kind(**options)
        try:
            await connection.connect()  # type: ignore[no-untyped-call]
        except (failures.RedisError, OSError) as error:
            raise Unreachable(str(error)) from error
        return connection


def dial(url: str, *, max_connections: int = 64, connect_timeout: float = 1.0, reply_timeout: float = ANSWER_S) -> Dial:
    """How to connect to a URL.

    Args:
        url: `redis://`, `rediss://` or `unix://`.
        max_connections: callers above this number share connections, for each server.
        connect_timeout, reply_timeout: longest wait for a new connection, and for a reply (s).

    Raises:
        ValueError: an URL of another kind.
        TypeError: an option in the URL that connections do not take.
    """
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=max_connections,
        socket_connect_timeout=connect_timeout,
        socket_timeout=reply_timeout,
        decode_responses=False,
        protocol=2,
        retry=Retry(NoBackoff(), 0),  # the library's own retries would hide that an earlier copy may still land
    )
    pool.connection_class(**pool.connection_kwargs)  # not connected, but it takes or refuses every option
    return Dial(pool.connection_class, pool.connection_kwargs, pool.max_connections)


class Channel(asyncio.Protocol):
    """A connection on which commands follow each other without waiting; replies come in the order of the commands.

    redis-py connects, by whatever the URL asks for; from then on an exchange is a write, and a future that is settled
    when its reply is there. That is an eighth of the calls of an exchange by redis-py, and no task.

    Args:
        connection: fresh; it belongs to the channel from now on.
        lost: told once the channel cannot be used any more.

    Attributes:
        pending: the replies that are not there yet, and when each is overdue.
    """

    def __init__(self, connection: AbstractConnection, lost: Callable[["Channel"], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._timeout: float = connection.socket_timeout or math.inf
        self._lost = lost
        self._error: Exception | None = None
        self.pending: deque[tuple[asyncio.Future[Any], float]] = deque()
        self._watch: asyncio.TimerHandle | None = None
        self._retired = False
        self._closed = self._loop.create_future()
        self._reader = hiredis.Reader(replyError=connection._parser.parse_error)
        writer = connection._writer
        assert writer is not None
        connection._reader = connection._writer = None  # it would close what it does not use any more
        self._writer = writer  # whose end would close the transport
        self._transport = writer.transport
        self._transport.set_protocol(self)

    def ask(self, *command: Argument) -> Awaitable[Any]:
        """Send a command at once; its reply is to be awaited."""
        if self._error is not None:
            raise self._error
        self._transport.write(hiredis.pack_command(command))  # type: ignore[arg-type]
        reply = self._loop.create_future()
        self.pending.append((reply, self._loop.time() + self._timeout))
        if self._watch is None and self._timeout < math.inf:
            self._watch = self._loop.call_later(self._timeout, self._look)
        return reply

    def retire(self) -> None:
        """Close as soon as the last reply is there."""
        self._retired = True
        if not self.pending:
            self._fail(failures.ConnectionError("closed"))

    async def closed(self) -> None:
        """Wait for the end of the connection."""
        await self._closed

    def data_received(self, data: bytes) -> None:
        """Redis replied, perhaps only in part."""
        self._reader.feed(data)
        try:
            while (reply := self._reader.gets()) is not False:
                waiting, _ = self.pending.popleft()
                if waiting.done():  # its caller has gone away
                    continue
                if isinstance(reply, Exception):
                    waiting.set_exception(reply)
                else:
                    waiting.set_result(reply)
        except (hiredis.ProtocolError, IndexError) as error:
            self._fail(failures.ConnectionError(f"Redis said what nobody had asked for: {error!r}"))
        if self._retired and not self.pending:
            self.retire()

    def connection_lost(self, error: Exception | None) -> None:
        """The connection is over, whoever closed it."""
        self._fail(failures.ConnectionError(str(error or "the connection was closed")))
        if not self._closed.done():
            self._closed.set_result(None)

    def _look(self) -> None:
        """End a connection on which a reply is overdue: nothing tells it from those that come later."""
        self._watch = None
        if not self.pending:
            return
        _, due = self.pending[0]
        if due > self._loop.time():
            self._watch = self._loop.call_at(due, self._look)
        else:
            self._fail(failures.TimeoutError(f"no reply within {self._timeout:g} s"))

    def _fail(self, error: Exception) -> None:
        if self._error is not None:
            return
        self._error = error
        self._transport.abort()
        if self._watch is not None:
            self._watch.cancel()
        while self.pending:
            waiting, _ = self.pending.popleft()
            if not waiting.done():
                waiting.set_exception(error)
        self._lost(self)


class Pool:
    """Connections to one server: a caller gets an idle one, a new one, or a share in the least busy one."""

    def __init__(self, dial: Dial, node: Node | None = None) -> None:
        self._dial = dial
        self._node = node
        self._channels: list[Channel] = []
        self._connecting: asyncio.Task[Channel] | None = None
        self._retired = False

    async def lane(self, target: Target = None) -> Channel:
        """A connection, whatever is to be reached. One is made at a time: who needs one meanwhile shares, or waits too.

        Raises:
            Unreachable: nobody listens, or not to us.
        """
        for channel in self._channels:
            if not channel.pending:
                return channel
        if self._channels and (self._connecting or len(self._channels) >= self._dial.max_connections):
            return min(self._channels, key=lambda channel: len(channel.pending))
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect())
            self._connecting.add_done_callback(self._connected)
        return await asyncio.shield(self._connecting)

    def retire(self) -> list[Channel]:
        """Close every connection as soon as the last reply on it is there; those are given."""
        self._retired, channels = True, list(self._channels)
        for channel in channels:
            channel.retire()
        return channels

    async def aclose(self) -> None:
        """Wait for the replies to what was sent, then close."""
        if self._connecting is not None:
            await asyncio.wait([self._connecting])
        for channel in self.retire():
            await channel.closed()

    async def _connect(self) -> Channel:
        channel = Channel(await self._dial.connection(self._node), self._channels.remove)
        self._channels.append(channel)
        if self._retired:
            channel.retire()
        return channel

    def _connected(self, connecting: asyncio.Task[Channel]) -> None:
        self._connecting = None
        if not connecting.cancelled():
            connecting.exception()  # whoever waits for it is told


class Server(Pool):
    """One server, at the address of a URL. It belongs to the event loop that uses it first."""

    patience = 0.0
    masters: tuple[Target, ...] = (None,)

    def server_of(self, key: str) -> None:
        """There is only one."""

    async def redirected(self, redirect: failures.AskError) -> None:
        """There is nowhere else to go."""
        raise redirect

    async def refresh(self) -> None:
        """There is nothing to find out."""

    async def subscription(self) -> AbstractConnection:
        """A connection of one's own."""
        return await self._dial.connection()
