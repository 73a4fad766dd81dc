"""Evidence of all clients of one model, in Redis: sums by configuration, and what each client's share of them is.

A share is told as a whole and replaces the one before, so that telling it again, or late, counts nothing twice. The
shares of clients stand under hashes of their ids, keyed by the secret of the deployment: without it, nobody who knows
an id can find its share.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b, sha256
from typing import Final, TypeAlias

from acclimate_service.state.limits import Limits
from acclimate_service.state.redis.keys import ClientScope, check_model
from acclimate_service.state.redis.scripts import POOL_FORGET, POOL_TELL
from acclimate_service.state.redis.wire import Argument, Wire

Numbers: TypeAlias = tuple[int, ...]
"""Counts, in the order of whoever keeps them here; always as many."""
_TTL_FACTOR: Final = 4
"""Evidence outlives the clients it came from, for those that come after them."""


@dataclass(frozen=True, slots=True)
class Share:
    """One client's evidence.

    Args:
        life, seq: the point of its history that it stands for.
        born: tells evidence that began anew, as after a reset, from more of the same.
        numbers: the counts since then.
    """

    life: str
    seq: int
    born: str
    numbers: Numbers


@dataclass(frozen=True, slots=True)
class Total:
    """The sum of all shares of one configuration, and how many clients ever had one."""

    numbers: Numbers
    clients: int


class Pools:
    """The evidence about one model; all methods raise StateError where Redis fails.

    Args:
        wire: exchanges with Redis; whoever made it closes it.
        limits: lifetimes.
        model: content hash of the frozen model.
        tenant: whose clients.
        secret: of the deployment, the same on every replica; without one the names can be guessed from the ids.
    """

    def __init__(self, wire: Wire, limits: Limits, model: str, tenant: str, secret: str = "") -> None:
        self._wire = wire
        self._ttl_ms = _TTL_FACTOR * limits.state_ttl_ms
        self._prefix = f"acc:{{{tenant}/~{check_model(model)}}}:p"
        self._key = sha256(secret.encode()).digest()

    async def tell(self, client: ClientScope, configuration: str, share: Share) -> None:
        """Take a client's evidence in; one that is older than what is known changes nothing."""
        keys = (self._shares(configuration), self._prefix)
        point = (share.life, share.seq, share.born)
        args: tuple[Argument, ...] = (self._name(client), configuration, *point, self._ttl_ms, *share.numbers)
        await self._wire.run(POOL_TELL, keys, args)

    async def totals(self) -> Mapping[str, Total]:
        """The sums, by configuration."""
        flat: list[bytes] = await self._wire.read("HGETALL", self._prefix)
        parsed = {
            name.decode(): [int(part) for part in value.split(b"|")]
            for name, value in zip(flat[::2], flat[1::2], strict=True)
        }
        return {name: Total(tuple(numbers), clients) for name, (*numbers, clients) in parsed.items()}

    async def share(self, client: ClientScope, configuration: str) -> Share | None:
        """One client's evidence; None if it never told any."""
        found: bytes | None = await self._wire.read("HGET", self._shares(configuration), self._name(client))
        if found is None:
            return None
        life, seq, born, *numbers = found.decode().split("|")
        return Share(life, int(seq), born, tuple(map(int, numbers)))

    async def forget(self, client: ClientScope) -> None:
        """Remove one client's share of every configuration; the sums keep its counts, as those of nobody.

        Only for a client that is gone: one that is there would add all its counts anew with its next labels.
        """
        shares = [self._shares(configuration) for configuration in await self.totals()]
        if shares:
            await self._wire.run(POOL_FORGET, shares, (self._name(client),))

    def _name(self, client: ClientScope) -> str:
        return blake2b(client.digest(), digest_size=16, key=self._key).hexdigest()

    def _shares(self, configuration: str) -> str:
        return f"{self._prefix}:{sha256(configuration.encode()).hexdigest()[:16]}"
