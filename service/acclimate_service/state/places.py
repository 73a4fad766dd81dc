"""How many clients an owner has: each holds a place, and where there are no more, no new client begins."""

from typing import Final

from acclimate_service.state.errors import TooManyClients
from acclimate_service.state.limits import Limits
from acclimate_service.state.redis.keys import ClientScope, fingerprint
from acclimate_service.state.redis.scripts import LEAVE, PLACE
from acclimate_service.state.redis.wire import Wire

_TTL_FACTOR: Final = 2
"""A place outlives the state of a client that holds it again once half of the state's lifetime has passed."""


class Places:
    """The places of each owner of clients, counted in Redis; all methods raise StateError where that fails.

    Args:
        wire: exchanges with Redis.
        limits: lifetimes.
        tenant: whose clients.
        most: clients that each owner may have at a time.
        secret: of the deployment; without one the names can be guessed from the ids.
    """

    def __init__(self, wire: Wire, limits: Limits, *, tenant: str, most: int, secret: str = "") -> None:
        self._wire = wire
        self._tenant = tenant
        self._ttl_ms = _TTL_FACTOR * limits.state_ttl_ms
        self._most = most
        self._secret = secret.encode()

    async def hold(self, client: ClientScope, *, new: bool) -> None:
        """Give a client its place, or extend it.

        Args:
            client: who writes.
            new: it begins with this write.

        Raises:
            TooManyClients: it is new, and all places are taken.
        """
        args = (self._name(client), int(new), self._most, self._ttl_ms)
        reply = await self._wire.run(PLACE, (self._key(client),), args)
        if reply.rows[0] == b"FULL":
            raise TooManyClients(f"there are {self._most} clients; delete some, or wait until idle ones expire")

    async def free(self, client: ClientScope) -> None:
        """Let another client have the place."""
        await self._wire.run(LEAVE, (self._key(client),), (self._name(client),))

    def _key(self, client: ClientScope) -> str:
        of = f"{self._tenant}/{client.owner}" if client.owner else self._tenant
        return f"acc:{{{of}/~clients}}:n"

    def _name(self, client: ClientScope) -> str:
        return fingerprint(self._secret, client.digest)
