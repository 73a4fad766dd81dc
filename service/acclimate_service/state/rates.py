"""How fast an owner of clients may send images, counted in Redis over all replicas."""

from typing import Final

from acclimate_service.state.errors import RateExceeded
from acclimate_service.state.redis.scripts import RATE
from acclimate_service.state.redis.wire import Wire

WINDOW_S: Final = 60
"""A quota is for so long; it comes back evenly."""


class Rates:
    """The rates of all owners in one tenant.

    Args:
        wire: exchanges with Redis.
        tenant: of the deployment.
        quota: images that each owner may send in `WINDOW_S` seconds, all at once if it likes.
    """

    def __init__(self, wire: Wire, tenant: str, quota: int) -> None:
        self._wire = wire
        self._tenant = tenant
        self._quota = quota

    async def take(self, owner: str, images: int) -> None:
        """Count images. More than the quota are let through where nothing of it is used.

        Raises:
            RateExceeded: there are too many for now; nothing is counted.
            StateError: Redis failed.
        """
        of = f"{self._tenant}/{owner}" if owner else self._tenant
        reply = await self._wire.run(RATE, (f"acc:{{{of}/~rate}}:q",), (images, self._quota, 1000 * WINDOW_S))
        status, *rest = reply.rows
        if status != b"OK":
            wait_ms, left = map(int, rest)
            raise RateExceeded(images, left=left, quota=self._quota, window_s=WINDOW_S, wait_s=wait_ms / 1000)
