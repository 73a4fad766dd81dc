"""Connections to a Redis Cluster: each key has a slot, each slot a master, and masters change.

The map of slots is read from any node that answers, and again whenever an exchange shows that it is not true any more.
A request meets such a change as one of these:

- MOVED: another master serves the slot, after a resharding or a planned fail-over. Nothing was run; the exchange goes
  on there at once.
- ASK: the slot is on its way, and this key is there already, or nowhere. The exchange goes there, once. A script of
  several keys of which some do not exist (all of ours) is answered TRYAGAIN until the slot has arrived.
- a connection that breaks or cannot be made, and CLUSTERDOWN: the master died. Within `cluster-node-timeout` and a vote
  a replica takes its place; what was asked is repeated until then, for at most `patience`.

Redis replicates asynchronously, so a fail-over may lose the last acknowledged writes. Whoever goes on from them finds
another tag than theirs.
"""

import asyncio
import math
import random
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any, Final

from redis import exceptions as failures
from redis.asyncio.connection import AbstractConnection
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from acclimate_service.state.redis.link import Argument, Asked, Channel, Dial, Lane, Node, Pool, Target, Unreachable

_MAP_TIMEOUT: Final = 1.0
"""Longest wait for the map of one node (s); another may know it sooner."""
_MAP_AGE: Final = 0.05
"""Age up to which a map is not read again (s)."""


class Cluster:
    """All masters of a cluster, each with a pool of its own. It belongs to the event loop that uses it first.

    Args:
        dial: how to connect to the node of the URL; the others take the same options.
        patience: how long an exchange is worth repeating while masters change (s).
    """

    def __init__(self, dial: Dial, patience: float) -> None:
        self.patience = patience
        self._dial = dial
        self._seed = Node(dial.options.get("host", "localhost"), int(dial.options.get("port", 6379)))
        self._nodes = {self._seed}
        self._slots: list[Node | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        self._pools: dict[Node, Pool] = {}
        self._reading = asyncio.Lock()
        self._read_at = -math.inf

    @property
    def masters(self) -> tuple[Node, ...]:
        """Every master that serves a slot."""
        return tuple(sorted({node for node in self._slots if node}))

    def server_of(self, key: str) -> Node | None:
        """The master of a key; None if nobody serves it."""
        return self._slots[key_slot(key.encode())]

    async def lane(self, target: Target) -> Lane:
        """A connection to the master of a key, to a node, or to any master."""
        node = self._node(target)
        if node not in self._pools:
            self._pools[node] = Pool(self._dial, node)
        channel = await self._pools[node].lane()
        return _Asking(channel) if isinstance(target, Asked) else channel

    async def redirected(self, redirect: failures.AskError) -> Asked | None:
        """Learn who serves a slot now, or who is to be asked once."""
        node = Node(redirect.host or self._seed.host, redirect.port)
        if not isinstance(redirect, failures.MovedError):
            return Asked(node)
        await self.refresh()
        self._nodes.add(node)
        self._slots[redirect.slot_id] = node  # newer than what any other node may have heard
        return None

    async def refresh(self) -> None:
        """Read the map of slots again, unless that has just been done; if nobody knows it, the old one stays."""
        clock = asyncio.get_running_loop().time
        wanted = clock() - _MAP_AGE
        async with self._reading:
            if self._read_at < wanted:
                await self._read_map()
                self._read_at = clock()

    async def subscription(self) -> AbstractConnection:
        """A connection of one's own to any master: what is published reaches all nodes."""
        return await self._dial.connection(self._node(None))

    async def aclose(self) -> None:
        """Wait for the replies to what was sent, then close all connections."""
        pools, self._pools = self._pools, {}
        for pool in pools.values():
            await pool.aclose()

    def _node(self, target: Target) -> Node:
        match target:
            case Node():
                return target
            case Asked(node=node):
                return node
            case None:
                if masters := self.masters:
                    return random.choice(masters)
                raise Unreachable("no node of the cluster serves any slot")
        slot = key_slot(target.encode())
        found = self._slots[slot]
        if found is None:
            raise Unreachable(f"no node of the cluster serves slot {slot}")
        return found

    async def _read_map(self) -> None:
        for node in random.sample(sorted(self._nodes), len(self._nodes)):
            with suppress(Unreachable, failures.RedisError, OSError):
                if rows := await self._map_of(node):
                    return self._adopt(rows, node)

    async def _map_of(self, node: Node) -> list[Any]:
        connection = await self._dial.connection(node, reply_timeout=_MAP_TIMEOUT)  # the pool may be worn out
        try:
            await connection.send_command("CLUSTER", "SLOTS")
            rows: list[Any] = await connection.read_response()
        finally:
            await connection.disconnect(nowait=True)
        return rows

    def _adopt(self, rows: list[Any], teller: Node) -> None:
        slots: list[Node | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        nodes = {self._seed}
        for first, last, *servers in rows:
            found = [_address(host, port, teller) for host, port, *_ in servers]
            slots[first : last + 1] = found[:1] * (last + 1 - first)
            nodes.update(node for node in found if node)
        self._slots, self._nodes = slots, nodes
        for gone in self._pools.keys() - nodes:
            self._pools.pop(gone).retire()


class _Asking:
    """Says before each command that a redirect led here."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def ask(self, *command: Argument) -> Awaitable[Any]:
        """Send a command at once; its reply is to be awaited."""
        said = asyncio.ensure_future(self._channel.ask("ASKING"))
        said.cancel()  # nobody reads that reply
        return self._channel.ask(*command)


def _address(host: bytes | None, port: int, teller: Node) -> Node | None:
    """A node may leave out its own host; None: the teller does not know it."""
    return None if host == b"?" else Node(host.decode() if host else teller.host, port)
