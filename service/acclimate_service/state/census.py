"""Which clients have states in which model scopes: found by walking over all keys of Redis, beside the batches."""

import asyncio
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import dataclass
from typing import Final

from acclimate_service.state.redis.wire import Wire

_HEAD: Final = re.compile(rb"acc:\{([^/]+)/[^}]+\}:([0-9a-f]{16}):h")
_AT_ONCE: Final = 1000
"""Keys that Redis looks at before others are served again: half a millisecond."""


@dataclass(frozen=True, slots=True)
class Census:
    """How many clients have a state, by tenant and model scope; `complete` unless time ran out before all were seen."""

    clients: Mapping[tuple[str, str], int]
    complete: bool


async def take_census(wire: Wire, longest_s: float) -> Census:
    """Count the clients of all tenants and model scopes. One whose keys move meanwhile may count twice.

    Raises:
        StateError: Redis failed.
    """
    until, found = time.monotonic() + longest_s, Counter[tuple[str, str]]()
    async for page in _pages(wire, "acc:{*}:*:h"):
        if time.monotonic() > until:
            return Census(found, complete=False)
        for key in page:
            if (match := _HEAD.fullmatch(key)) is not None:
                found[match[1].decode(), match[2].decode()] += 1
    return Census(found, complete=True)


async def clients_of_version(wire: Wire, tenants: Collection[str], scope: str, version: str) -> int:
    """How many clients have a state that a certain version of a model made last.

    Args:
        wire: exchanges with Redis.
        tenants: whose clients.
        scope: that the version has its states in.
        version: as heads have it, which is empty for that of the scope.

    Raises:
        StateError: Redis failed.
    """
    found = set[bytes]()
    for tenant in tenants:
        async for page in _pages(wire, f"acc:{{{tenant}/*}}:{scope}:h"):
            made_by = await asyncio.gather(*(wire.read("HGET", key.decode(), "ver") for key in page))
            found |= {key for key, by in zip(page, made_by, strict=True) if (by or b"").decode() == version}
    return len(found)


async def _pages(wire: Wire, pattern: str) -> AsyncIterator[list[bytes]]:
    """The keys of all masters that are like a pattern, some at a time; a few may come twice."""
    for server in wire.masters:
        cursor = b"0"
        while True:
            cursor, keys = await wire.read("SCAN", cursor, "MATCH", pattern, "COUNT", _AT_ONCE, at=server)
            yield keys
            if cursor == b"0":
                break
