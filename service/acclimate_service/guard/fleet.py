"""What the labels of all clients say about each configuration, as this replica last heard it."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import astuple, dataclass, field
from typing import Final

from acclimate_service.guard.evidence import ALPHA, Counts
from acclimate_service.guard.policy import Decision, Policy, by_policy, decide
from acclimate_service.guard.pools import Pools, Share
from acclimate_service.state import ClientScope, StateError
from acclimate_service.state.tasks import Tasks

REFRESH_S: Final = 2.0
"""Age of what was heard above which a batch has it refreshed; the batch does not wait for that."""
_ANEW: Final = "anew"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pooled:
    """The evidence of all clients of one configuration, and how many of them gave some."""

    counts: Counts = field(default_factory=Counts)
    clients: int = 0


class Fleet:
    """The evidence of all clients of one model, and the policy for those without any of their own.

    Args:
        pools: where the replicas keep it.
        knows: whether there is such a client; raises StateError where Redis fails.
        policy: what clients without evidence of their own are answered.
        alpha: of each test.
    """

    def __init__(
        self, pools: Pools, knows: Callable[[ClientScope], Awaitable[bool]], policy: Policy, alpha: float = ALPHA
    ) -> None:
        self._pools = pools
        self._knows = knows
        self.policy = policy
        self.alpha = alpha
        self._heard: Mapping[str, Pooled] = {}
        self._heard_at = -REFRESH_S
        self._tasks = Tasks()
        self._refreshing: asyncio.Task[None] | None = None

    def against(self) -> Mapping[str, Decision]:
        """Configurations whose clients are answered by the frozen model, unless their own evidence says otherwise."""
        if self.policy == "follow-fleet":
            self.heard()
        decided = {name: by_policy(each.counts, self.policy, self.alpha) for name, each in self._heard.items()}
        return {name: decision for name, decision in decided.items() if decision.answer == "frozen"}

    def heard(self) -> Mapping[str, Pooled]:
        """What was heard last, by configuration; where that is old, it is refreshed in the background."""
        if time.monotonic() - self._heard_at >= REFRESH_S and not self._refreshing:
            self._refreshing = self._tasks.start(self._refresh())
            self._refreshing.add_done_callback(self._refreshed)
        return self._heard

    def decide(self, own: Counts, configuration: str) -> Decision:
        """What a client with this evidence is answered at present."""
        return decide(own, self._heard.get(configuration, Pooled()).counts, self.policy, self.alpha)

    async def pooled(self) -> Mapping[str, Pooled]:
        """The newest evidence, by configuration; raises StateError where Redis fails."""
        totals = await self._pools.totals()
        self._heard = {name: Pooled(Counts(*total.numbers), total.clients) for name, total in totals.items()}
        self._heard_at = time.monotonic()
        return self._heard

    async def own(self, client: ClientScope, configuration: str) -> Counts:
        """The evidence that one client has told; raises StateError where Redis fails."""
        share = await self._pools.share(client, configuration)
        return Counts(*share.numbers) if share else Counts()

    async def tell(
        self, client: ClientScope, configuration: str, life: str, seq: int, born: str, counts: Counts
    ) -> None:
        """Add what a client's labels say. If that fails, its next labels tell it too.

        Whoever deletes a client forgets its shares, but may do so, on another replica, just before they are told here.
        """
        try:
            await self._pools.tell(client, configuration, Share(life, seq, born, astuple(counts)))
            if not await self._knows(client):
                await self._pools.forget(client)
            await self.pooled()
        except StateError as error:
            _log.warning("the fleet was not told of a client's labels: %s", error)

    async def begin_anew(self, client: ClientScope, configuration: str, life: str, seq: int) -> None:
        """Forget what one client's labels said of a state that it has no more; the fleet keeps it."""
        await self.tell(client, configuration, life, seq, _ANEW, Counts())

    async def forget(self, client: ClientScope) -> None:
        """Forget who told what a deleted client told; raises StateError where Redis fails."""
        await self._pools.forget(client)

    async def aclose(self) -> None:
        """End what runs in the background."""
        await self._tasks.aclose()

    async def _refresh(self) -> None:
        try:
            await self.pooled()
        except StateError as error:
            self._heard_at = time.monotonic()
            _log.warning("the fleet's evidence could not be read: %s", error)

    def _refreshed(self, _: asyncio.Task[None]) -> None:
        self._refreshing = None
