"""How many clients an owner has, and how many bytes they take: each holds a place, which has the client's size.

Where there are no more places, no new client begins; where there are no more bytes, none begins or grows.
"""

from dataclasses import dataclass
from typing import Final

from acclimate_service.state.errors import TooManyBytes, TooManyClients
from acclimate_service.state.limits import Limits
from acclimate_service.state.redis.keys import ClientScope, fingerprint
from acclimate_service.state.redis.scripts import LEAVE, PLACE, USAGE
from acclimate_service.state.redis.wire import Wire

_TTL_FACTOR: Final = 2
"""A place outlives the state of a client that holds it again once half of the state's lifetime has passed."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What the clients of an owner take, and the most that they may; None for any number.

    Args:
        clients, most_clients: how many there are.
        nbytes, most_bytes: of Redis's memory.
    """

    clients: int
    most_clients: int
    nbytes: int
    most_bytes: int | None


class Places:
    """The places of each owner of clients, counted in Redis; all methods raise StateError where that fails.

    Args:
        wire: exchanges with Redis.
        limits: lifetimes.
        tenant: whose clients.
        most: clients that each owner may have at a time.
        most_bytes: that they may take, all together; None for any number.
        secret: of the deployment; without one the names can be guessed from the ids.
    """

    def __init__(
        self, wire: Wire, limits: Limits, *, tenant: str, most: int, most_bytes: int | None = None, secret: str = ""
    ) -> None:
        self._wire = wire
        self._tenant = tenant
        self._ttl_ms = _TTL_FACTOR * limits.state_ttl_ms
        self._most = most
        self._most_bytes = most_bytes
        self._secret = secret.encode()

    async def hold(self, client: ClientScope, nbytes: int, *, new: bool) -> None:
        """Give a client its place, or extend it, and note its size.

        Args:
            client: who writes.
            nbytes: of Redis's memory that it takes.
            new: it begins with this write.

        Raises:
            TooManyClients: it is new, and all places are taken.
            TooManyBytes: it is new or has grown, and all bytes are taken.
        """
        most_bytes = "" if self._most_bytes is None else self._most_bytes
        args = (self._name(client), int(new), self._most, self._ttl_ms, nbytes, most_bytes)
        status, *rest = (await self._wire.run(PLACE, self._keys(client.owner), args)).rows
        if status == b"FULL":
            raise TooManyClients(self._most)
        if status == b"LARGE":
            assert self._most_bytes is not None
            raise TooManyBytes(int(rest[0]), self._most_bytes)

    async def free(self, client: ClientScope) -> None:
        """Let another client have the place."""
        await self._wire.run(LEAVE, self._keys(client.owner), (self._name(client),))

    async def usage(self, owner: str) -> Usage:
        """What the clients of an owner take; empty for those of nobody."""
        _, clients, nbytes = (await self._wire.run(USAGE, self._keys(owner), ())).rows
        return Usage(int(clients), self._most, int(nbytes), self._most_bytes)

    def _keys(self, owner: str) -> tuple[str, str]:
        of = f"{self._tenant}/{owner}" if owner else self._tenant
        return f"acc:{{{of}/~clients}}:n", f"acc:{{{of}/~clients}}:b"

    def _name(self, client: ClientScope) -> str:
        return fingerprint(self._secret, client.digest)
