"""What the labels of all clients say about each configuration, as this replica last heard it."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Final, Generic

from acclimate_service.guard.evidence import ALPHA, CLIENTS, Counts, Pooled
from acclimate_service.guard.policy import EVERY, Decision, Policy, by_policy, decide
from acclimate_service.guard.pools import Pools, Share, T
from acclimate_service.metrics import Background
from acclimate_service.state import ClientScope, StateError, StoreUnavailable, Tasks

REFRESH_S: Final = 2.0
"""Age of what was heard above which a batch has it refreshed; the batch does not wait for that."""
_TRIES: Final = 4
"""Of telling what finds the share of another life each time, which happens where a client is deleted and comes back."""
_RESTARTED: Final = "-"
_TASK: Final = "evidence"


class Heard(ABC, Generic[T]):
    """Tells the other replicas what clients told, and hears of them.

    Args:
        pools: where the replicas keep it.
        background: watches over what nobody waits for.
        task: what this is called there.
    """

    def __init__(self, pools: Pools[T], background: Background, task: str) -> None:
        self._pools = pools
        self._background = background
        self._task = task
        self._heard_at = -REFRESH_S
        self._tasks = Tasks(background)
        self._refreshing: asyncio.Task[None] | None = None

    @abstractmethod
    def understand(self, counted: Mapping[str, tuple[T, ...]]) -> None:
        """Take in the rows of each client that count, by configuration."""

    def keep_fresh(self) -> None:
        """Refresh what was heard in the background, where it is old."""
        if time.monotonic() - self._heard_at >= REFRESH_S and not self._refreshing:
            self._refreshing = self._tasks.start(self._task, self._refresh())
            self._refreshing.add_done_callback(self._refreshed)

    async def hear(self) -> None:
        """Hear the newest now; raises StateError where Redis fails."""
        self.understand(await self._pools.counted())
        self._heard_at = time.monotonic()
        self._background.succeeded(self._task)

    async def tell(self, client: ClientScope, configuration: str, *, life: str, seq: int, born: str, counts: T) -> None:
        """Add what a client's labels say. If that fails, its next labels tell it too.

        Labels of a life that is over say nothing: it is looked at before and after, since whoever deletes the client
        takes its shares away, and may do so, on another replica, just before they are told here. They take the place of
        no share that came meanwhile, which may be that of the next life.
        """
        try:
            for _ in range(_TRIES):
                known = await self._pools.share(client, configuration)  # before the life: so it is no later one's
                if await self._pools.life(client) != life:
                    break
                share = Share(life, seq, born, counts)
                if await self._pools.tell(client, configuration, share, known.life if known else ""):
                    if await self._pools.life(client) != life:
                        await self._pools.forget(client, life)
                    break
            else:
                raise StoreUnavailable(f"the share of a client went from life to life {_TRIES} times", committed=False)
            await self.hear()
        except StateError as error:
            self._background.failed(self._task, error)

    async def reset(self) -> None:
        """Let nothing count that any client told so far; raises StateError where Redis fails."""
        await self._pools.reset()
        await self.hear()

    async def aclose(self) -> None:
        """End what runs in the background."""
        await self._tasks.aclose()

    async def _refresh(self) -> None:
        self._heard_at = time.monotonic()  # whatever comes of it, the next one is not due before its time
        await self.hear()

    def _refreshed(self, _: asyncio.Task[None]) -> None:
        self._refreshing = None


class Fleet(Heard[Counts]):
    """The evidence of all clients of one model, and the policy for those without any of their own.

    Args:
        pools: where the replicas keep it.
        policy: what clients without evidence of their own are answered.
        background: watches over what nobody waits for.
        alpha: of each test.
        needed: clients that have to agree before anything follows for the others.
        others: where it is kept of other versions of the model, from whose states clients may go on.
    """

    def __init__(
        self,
        pools: Pools[Counts],
        policy: Policy,
        background: Background,
        *,
        alpha: float = ALPHA,
        needed: int = CLIENTS,
        others: Sequence[Pools[Counts]] = (),
    ) -> None:
        super().__init__(pools, background, _TASK)
        self.policy = policy
        self.alpha = alpha
        self._needed = needed
        self._others = others
        self._heard: Mapping[str, Pooled] = {}
        self._against: Mapping[str, Decision] = self._decided()

    def understand(self, counted: Mapping[str, tuple[Counts, ...]]) -> None:
        """Pool the rows of all clients, and decide by them, as `Heard.understand`."""
        self._heard = {name: Pooled(clients, self._needed) for name, clients in counted.items()}
        self._against = self._decided()

    def against(self) -> Mapping[str, Decision]:
        """Configurations whose clients are answered by the frozen model, unless their own evidence says otherwise.

        `EVERY` stands for all others.
        """
        if self.policy == "follow-fleet" and time.monotonic() - self._heard_at >= REFRESH_S:
            self.keep_fresh()
        return self._against

    def heard(self) -> Mapping[str, Pooled]:
        """What was heard last, by configuration; where that is old, it is refreshed in the background."""
        self.keep_fresh()
        return self._heard

    def decide(self, own: Counts, configuration: str) -> Decision:
        """What a client with this evidence is answered at present."""
        return decide(own, self._heard.get(configuration, Pooled(needed=self._needed)), self.policy, self.alpha)

    async def pooled(self) -> Mapping[str, Pooled]:
        """The newest evidence, by configuration; raises StateError where Redis fails."""
        await self.hear()
        return self._heard

    async def own(self, client: ClientScope, configuration: str) -> Counts | None:
        """The evidence that one client has told; None: it was told under another version, and only the state knows it.

        Raises StateError where Redis fails.
        """
        life = await self._pools.life(client)
        share = await self._pools.share(client, configuration)
        if share is not None:
            return share.counts if share.life == life else Counts()
        before = [await pools.share(client, configuration) for pools in self._others]
        return None if any(each is not None and each.life == life for each in before) else Counts()

    async def restart(self, client: ClientScope, configuration: str, *, life: str, seq: int) -> None:
        """Forget what one client's labels said of a state that it has no more; the rows that counted still do."""
        await self.tell(client, configuration, life=life, seq=seq, born=_RESTARTED, counts=Counts())

    def _decided(self) -> Mapping[str, Decision]:
        if self.policy != "follow-fleet":
            every = by_policy(Pooled(), self.policy, self.alpha)
            return {EVERY: every} if every.answer == "frozen" else {}
        decided = {name: by_policy(each, self.policy, self.alpha) for name, each in self._heard.items()}
        return {name: decision for name, decision in decided.items() if decision.answer == "frozen"}
