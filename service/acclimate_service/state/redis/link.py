"""Connections to Redis, as the wire needs them.

A link knows where a key is served; it sends nothing by itself that could change anything, and nothing twice. What is
repeated, and when, is decided by the wire alone. `Server` is a link to one; `Cluster` has a module of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

from redis import exceptions as failures
from redis.asyncio import BlockingConnectionPool
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

Argument: TypeAlias = str | bytes | int


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
    """One connection, for the time of one exchange."""

    async def ask(self, *command: Argument) -> Any:
        """Send a command and wait for its reply; errors are those of redis-py."""

    async def release(self) -> None:
        """Let others use the connection."""


class Link(Protocol):
    """Where Redis is, and how to get there."""

    @property
    def patience(self) -> float:
        """How long an exchange is worth repeating while servers change their roles (s); 0 where they never do."""

    @property
    def masters(self) -> Sequence[Target]:
        """Targets that reach every server once which holds state."""

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
        """Close all connections."""


@dataclass(frozen=True, slots=True)
class Dial:
    """How connections are made: their class and options, how many to one server, and the wait for a free one (s)."""

    kind: type[AbstractConnection]
    options: Mapping[str, Any]
    max_connections: int
    pool_timeout: float | None

    def pool(self, node: Node | None = None) -> BlockingConnectionPool:
        """Connections to the server of the URL, or to another that takes the same credentials."""
        return BlockingConnectionPool(self.max_connections, self.pool_timeout, self.kind, **self._options(node))

    async def connection(self, node: Node | None = None, reply_timeout: float | None = None) -> AbstractConnection:
        """One connection outside any pool, with its own longest wait for a reply (s).

        Raises:
            Unreachable: nobody listens, or not to us.
        """
        options = self._options(node)
        if reply_timeout is not None:
            options["socket_timeout"] = reply_timeout
        connection = self.kind(**options)
        try:
            await connection.connect()  # type: ignore[no-untyped-call]
        except (failures.RedisError, OSError) as error:
            raise Unreachable(str(error)) from error
        return connection

    def _options(self, node: Node | None) -> dict[str, Any]:
        return {**self.options, **(node._asdict() if node else {})}


def dial(
    url: str,
    *,
    max_connections: int = 64,
    pool_timeout: float = 1.0,
    connect_timeout: float = 1.0,
    reply_timeout: float = 5.0,
) -> Dial:
    """How to connect to a URL.

    Args:
        url: `redis://`, `rediss://` or `unix://`.
        max_connections: callers above this number wait, for each server.
        pool_timeout, connect_timeout, reply_timeout: longest wait for a free connection, a new one, and a reply (s).

    Raises:
        ValueError: an URL of another kind.
        TypeError: an option in the URL that connections do not take.
    """
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=max_connections,
        timeout=pool_timeout,
        socket_connect_timeout=connect_timeout,
        socket_timeout=reply_timeout,
        decode_responses=False,
        protocol=2,
        retry=Retry(NoBackoff(), 0),  # the library's own retries would hide that an earlier copy may still land
    )
    pool.connection_class(**pool.connection_kwargs)  # not connected, but it takes or refuses every option
    return Dial(pool.connection_class, pool.connection_kwargs, pool.max_connections, pool.timeout)


class Pool:
    """Connections to one server. Once retired it closes, as soon as the last one is given back."""

    def __init__(self, dial: Dial, node: Node | None = None) -> None:
        self._pool = dial.pool(node)
        self._users = 0
        self._retired = False

    async def lane(self, asking: bool = False) -> "PooledLane":
        """Borrow a connection.

        Args:
            asking: say before each command that a redirect led here.

        Raises:
            Unreachable: no free one in time, nobody listens, or not to us.
        """
        self._users += 1
        try:
            connection = await self._pool.get_connection()  # type: ignore[no-untyped-call]
        except BaseException as error:
            await self._leave()
            if isinstance(error, failures.RedisError | OSError):
                raise Unreachable(str(error)) from error
            raise
        return PooledLane(self, connection, asking)

    async def give_back(self, connection: AbstractConnection) -> None:
        """Let others use a connection."""
        await self._pool.release(connection)
        await self._leave()

    async def retire(self) -> None:
        """Close when nobody uses it any more."""
        self._retired = True
        await self._close_if_unused()

    async def _leave(self) -> None:
        self._users -= 1
        await self._close_if_unused()

    async def _close_if_unused(self) -> None:
        if self._retired and not self._users:
            await self._pool.disconnect()


class PooledLane:
    """A connection that goes back to its pool."""

    def __init__(self, pool: Pool, connection: AbstractConnection, asking: bool) -> None:
        self._pool = pool
        self._connection = connection
        self._asking = asking

    async def ask(self, *command: Argument) -> Any:
        """Send a command and wait for its reply."""
        if self._asking:
            await self._exchange("ASKING")
        return await self._exchange(*command)

    async def release(self) -> None:
        """Let others use the connection."""
        await self._pool.give_back(self._connection)

    async def _exchange(self, *command: Argument) -> Any:
        await self._connection.send_command(*command)
        return await self._connection.read_response()


class Server:
    """One server, at the address of a URL. It belongs to the event loop that uses it first."""

    patience = 0.0
    masters: tuple[Target, ...] = (None,)

    def __init__(self, dial: Dial) -> None:
        self._dial = dial
        self._pool = Pool(dial)

    async def lane(self, target: Target) -> PooledLane:
        """A connection to the server."""
        return await self._pool.lane()

    async def redirected(self, redirect: failures.AskError) -> None:
        """There is nowhere else to go."""
        raise redirect

    async def refresh(self) -> None:
        """There is nothing to find out."""

    async def subscription(self) -> AbstractConnection:
        """A connection of one's own."""
        return await self._dial.connection()

    async def aclose(self) -> None:
        """Close all connections."""
        await self._pool.retire()
