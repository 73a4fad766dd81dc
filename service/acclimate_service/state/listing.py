"""The clients of one owner, some at a time: found by walking over all keys of Redis, beside the batches.

There is no index beside the states, which would have to be kept in step with them: SCAN gives every key that is there
throughout the walk at least once, so a client is missed only if it comes or goes meanwhile.
"""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Final

from acclimate_service.state.footprint import footprint
from acclimate_service.state.redis.keys import ClientScope, check_model
from acclimate_service.state.redis.link import Target
from acclimate_service.state.redis.wire import Wire

_CURSOR: Final = re.compile(r"([0-9a-f]{16})\.([0-9]{1,4})\.([0-9]{1,20})")
_FIELDS: Final = ("seq", "cfg", "snap", "paused", "on", "at", "sh", "ag")


class StaleCursor(Exception):
    """A place in a walk that cannot go on: it is none, or other servers hold the states by now."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A client that has a state.

    Args:
        client: who.
        seq: version.
        config: adapter and hyper-parameters.
        sid: id of its live snapshot, empty if there is none.
        paused: whether its batches are answered and not folded in.
        changed_ms: Unix time of its last change; None of a state that was stored when that was not noted.
        shift, agreement: of its latest batch, where the timeline has them; None before the first, and after a reset.
    """

    client: ClientScope
    seq: int
    config: str
    sid: str
    paused: bool
    changed_ms: int | None
    shift: float | None
    agreement: float | None


@dataclass(frozen=True, slots=True)
class Walk:
    """A place in a walk over all servers.

    Args:
        servers: that hold states, in an order that does not change.
        mark: of these servers since their last start: cursors of others mean nothing to them.
        at: which server is looked at.
        cursor: of its SCAN.
    """

    servers: tuple[Target, ...]
    mark: str
    at: int = 0
    cursor: int = 0

    def __str__(self) -> str:
        return f"{self.mark}.{self.at}.{self.cursor}"

    @property
    def over(self) -> bool:
        """Whether all was seen."""
        return self.at == len(self.servers)


class Listing:
    """Lists clients; all methods raise StateError where Redis fails.

    Args:
        wire: exchanges with Redis.
        tenant: of the deployment.
        model: model scope of the states.
    """

    def __init__(self, wire: Wire, tenant: str, model: str) -> None:
        self._wire = wire
        self._tenant = tenant
        self._model = check_model(model)

    async def walk(self, text: str = "") -> Walk:
        """The beginning of a walk, or the place in it that `str` made a text of.

        Raises:
            StaleCursor: the text is none, or servers were started or replaced since.
        """
        there = await asyncio.gather(*(self._run_id(server) for server in self._wire.masters))
        runs = sorted(zip(there, self._wire.masters, strict=True), key=lambda each: each[0])
        mark = blake2b(b" ".join(run for run, _ in runs), digest_size=8).hexdigest()
        begun = Walk(tuple(server for _, server in runs), mark)
        if not text:
            return begun
        found = _CURSOR.fullmatch(text)
        if found is None or found[1] != mark or int(found[2]) >= len(begun.servers):
            raise StaleCursor("the listing cannot go on from there; begin it again without a cursor")
        return replace(begun, at=int(found[2]), cursor=int(found[3]))

    async def step(self, walk: Walk, owner: str, count: int) -> tuple[Sequence[ClientScope], Walk]:
        """The clients among the next keys, of which about `count` are looked at, and the place behind them.

        A client may come twice while Redis makes room for more keys or fewer.
        """
        of = f"{self._tenant}/{owner}/" if owner else f"{self._tenant}/"
        pattern, server = f"acc:{{{of}*}}:{self._model}:h", walk.servers[walk.at]
        cursor, keys = await self._wire.read("SCAN", walk.cursor, "MATCH", pattern, "COUNT", count, at=server)
        start, end = len(f"acc:{{{of}"), len(f"}}:{self._model}:h")
        names = sorted({key.decode()[start:-end] for key in keys})
        owned = f"{owner}/" if owner else ""
        clients = [ClientScope(owned + name, self._tenant) for name in names if "/" not in name]
        ended = cursor == b"0"
        return clients, replace(walk, at=walk.at + ended, cursor=0 if ended else int(cursor))

    async def describe(self, clients: Sequence[ClientScope]) -> list[Listed]:
        """What is stored of those clients that still have a state."""
        rows = await asyncio.gather(*(self._wire.read("HMGET", each.head(self._model), *_FIELDS) for each in clients))
        return [_listed(client, row) for client, row in zip(clients, rows, strict=True) if row[0] is not None]

    async def footprint(self, listed: Listed) -> int:
        """Bytes of Redis's memory that a client takes."""
        return await footprint(self._wire, listed.client, self._model, listed.sid)

    async def _run_id(self, server: Target) -> bytes:
        """What a server calls itself from one start to the next; SCAN's cursors are of no use beyond."""
        told: bytes = await self._wire.read("INFO", "server", at=server)
        return told.partition(b"run_id:")[2].partition(b"\r\n")[0]


def _listed(client: ClientScope, row: Sequence[bytes | None]) -> Listed:
    seq, config, sid, paused, changed, stored, shift, agreement = row
    when = changed or stored
    return Listed(
        client=client,
        seq=int(seq or 0),
        config=(config or b"").decode(),
        sid=(sid or b"").decode(),
        paused=paused == b"1",
        changed_ms=None if when is None else int(when),
        shift=float(shift) if shift else None,
        agreement=float(agreement) if agreement else None,
    )
