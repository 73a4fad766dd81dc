"""What the labels of all clients say about each configuration, as this replica last heard it."""

import asyncio
import time
from collections.abc import Mapping
from typing import Final

from acclimate_service.guard.evidence import ALPHA, CLIENTS, Counts, Pooled
from acclimate_service.guard.policy import EVERY, Decision, Policy, by_policy, decide
from acclimate_service.guard.pools import Pools, Share
from acclimate_service.metrics import Background
from acclimate_service.state import ClientScope, StateError, Tasks

REFRESH_S: Final = 2.0
"""Age of what was heard above which a batch has it refreshed; the batch does not wait for that."""
_RESTARTED: Final = "-"
_TASK: Final = "evidence"


class Fleet:
    """The evidence of all clients of one model, and the policy for those without any of their own.

    Args:
        pools: where the replicas keep it.
        policy: what clients without evidence of their own are answered.
        background: watches over what nobody waits for.
        alpha: of each test.
        needed: clients that have to agree before anything follows for the others.
    """

    def __init__(
        self, pools: Pools, policy: Policy, background: Background, *, alpha: float = ALPHA, needed: int = CLIENTS
    ) -> None:
        self._pools = pools
        self.policy = policy
        self.alpha = alpha
        self._needed = needed
        self._heard: Mapping[str, Pooled] = {}
        self._against: Mapping[str, Decision] = self._decided()
        self._heard_at = -REFRESH_S
        self._tasks = Tasks()
        self._refreshing: asyncio.Task[None] | None = None
        self._background = background

    def against(self) -> Mapping[str, Decision]:
        """Configurations whose clients are answered by the frozen model, unless their own evidence says otherwise.

        `EVERY` stands for all others.
        """
        if self.policy == "follow-fleet":
            self.heard()
        return self._against

    def heard(self) -> Mapping[str, Pooled]:
        """What was heard last, by configuration; where that is old, it is refreshed in the background."""
        if time.monotonic() - self._heard_at >= REFRESH_S and not self._refreshing:
            self._refreshing = self._tasks.start(self._refresh())
            self._refreshing.add_done_callback(self._refreshed)
        return self._heard

    def decide(self, own: Counts, configuration: str) -> Decision:
        """What a client with this evidence is answered at present."""
        return decide(own, self._heard.get(configuration, Pooled(needed=self._needed)), self.policy, self.alpha)

    async def pooled(self) -> Mapping[str, Pooled]:
        """The newest evidence, by configuration; raises StateError where Redis fails."""
        counted = await self._pools.counted()
        self._heard = {name: Pooled(clients, self._needed) for name, clients in counted.items()}
        self._against = self._decided()
        self._heard_at = time.monotonic()
        self._background.succeeded(_TASK)
        return self._heard

    async def own(self, client: ClientScope, configuration: str) -> Counts:
        """The evidence that one client has told; raises StateError where Redis fails."""
        share = await self._pools.share(client, configuration)
        return share.counts if share else Counts()

    async def tell(
        self, client: ClientScope, configuration: str, *, life: str, seq: int, born: str, counts: Counts
    ) -> None:
        """Add what a client's labels say. If that fails, its next labels tell it too.

        Labels of a life that is over say nothing: it is looked at before and after, since whoever deletes the client
        takes its shares away, and may do so, on another replica, just before they are told here.
        """
        try:
            if await self._pools.life(client) == life:
                await self._pools.tell(client, configuration, Share(life, seq, born, counts))
                if await self._pools.life(client) != life:
                    await self._pools.forget(client, life)
            await self.pooled()
        except StateError as error:
            self._background.failed(_TASK, error)

    async def restart(self, client: ClientScope, configuration: str, *, life: str, seq: int) -> None:
        """Forget what one client's labels said of a state that it has no more; the rows that counted still do."""
        await self.tell(client, configuration, life=life, seq=seq, born=_RESTARTED, counts=Counts())

    async def forget(self, client: ClientScope) -> None:
        """Take away what a deleted client told; raises StateError where Redis fails."""
        await self._pools.forget(client)

    async def reset(self) -> None:
        """Let nothing count that any client told so far; raises StateError where Redis fails."""
        await self._pools.reset()
        await self.pooled()

    async def aclose(self) -> None:
        """End what runs in the background."""
        await self._tasks.aclose()

    def _decided(self) -> Mapping[str, Decision]:
        if self.policy != "follow-fleet":
            every = by_policy(Pooled(), self.policy, self.alpha)
            return {EVERY: every} if every.answer == "frozen" else {}
        decided = {name: by_policy(each, self.policy, self.alpha) for name, each in self._heard.items()}
        return {name: decision for name, decision in decided.items() if decision.answer == "frozen"}

    async def _refresh(self) -> None:
        try:
            await self.pooled()
        except StateError as error:
            self._heard_at = time.monotonic()
            self._background.failed(_TASK, error)

    def _refreshed(self, _: asyncio.Task[None]) -> None:
        self._refreshing = None
