"""Which replicas are there, and what each says of itself; whichever is asked tells the same of all."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import orjson

from acclimate_service.state.redis.scripts import PRESENCE
from acclimate_service.state.redis.wire import Argument, Wire

EVERY_S: Final = 5.0
"""Between two words of a replica."""
LASTS_MS: Final = 16_000
"""For how long one counts: a replica that died is gone after this time."""


class Spoken(NamedTuple):
    """What a replica said of itself so many seconds ago."""

    name: str
    age_s: float
    said: Mapping[str, Any]


class Presence:
    """The replicas of one deployment; all methods raise StateError where Redis fails.

    Args:
        wire: exchanges with Redis.
        tenant: of the deployment.
    """

    def __init__(self, wire: Wire, tenant: str) -> None:
        self._wire = wire
        self._key = f"acc:{{{tenant}/~replicas}}:p"

    async def tell(self, name: str, said: Mapping[str, Any]) -> None:
        """Say what there is to be said of a replica; nothing of one that ends."""
        await self._run(name, orjson.dumps(said) if said else b"")

    async def all(self) -> list[Spoken]:
        """All replicas, by name."""
        rows = await self._run()
        those = [rows[start : start + 3] for start in range(1, len(rows), 3)]
        found = [Spoken(name.decode(), int(age_ms) / 1000, orjson.loads(said)) for name, age_ms, said in those]
        return sorted(found, key=lambda each: each.name)

    async def _run(self, *spoken: Argument) -> list[bytes]:
        return list((await self._wire.run(PRESENCE, (self._key,), (LASTS_MS, *spoken))).rows)
