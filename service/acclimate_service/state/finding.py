"""Finds the newest state of a client: in memory, or in Redis."""

from dataclasses import replace
from typing import Generic

from acclimate_service.state.context import Context
from acclimate_service.state.entry import Batch
from acclimate_service.state.errors import Contended
from acclimate_service.state.held import Held, Memory, Track
from acclimate_service.state.machine import S, Status
from acclimate_service.state.opening import Opener
from acclimate_service.state.rebuilding import Rebuilder
from acclimate_service.state.records import Head, Loaded


class Finder(Generic[S]):
    """Reads the state of one client."""

    def __init__(self, context: Context[S], memory: Memory[S], opener: Opener[S], rebuilder: Rebuilder[S]) -> None:
        self._context = context
        self._memory = memory
        self._opener = opener
        self._rebuilder = rebuilder

    def fresh(self) -> Held[S] | None:
        """The state in memory, if it is surely still alive in Redis; its next write proves whether it is the newest."""
        held = self._memory.held
        if held is None or held.track.stale:
            return None
        age_ms = 1000 * (self._context.clock() - held.touched)
        return held if age_ms < self._context.limits.state_ttl_ms / 2 else None

    async def restore(self, loaded: Loaded, batch: Batch) -> Held[S] | None:
        """The state that Redis was found to hold, to go on from with this batch; None: it moved, load again.

        The journal is opened first if there is one, or is to be one.
        """
        known = self._known(loaded)
        if known is not None:
            return known
        head, life, fence = loaded.head, loaded.life, ""
        if head is None:
            return await self._cold(life)
        if head.base < head.seq or not self._context.written_whole(head.length, batch.nbytes):
            opened = await self._opener.open(loaded.basis)
            if opened is None:
                return None
            head, life, fence = opened.head, opened.life, opened.head.fence
        return await self._rebuild(head, life, fence)

    async def read(self, loaded: Loaded) -> Held[S] | None:
        """The state that Redis was found to hold, found without opening its journal; None: it moved, load again."""
        known = self._known(loaded)
        if known is not None:
            return known
        return await self._rebuild(loaded.head, loaded.life, "") if loaded.head else await self._cold(loaded.life)

    async def peek(self) -> Held[S]:
        """The newest state, found without changing anything.

        Raises:
            Contended, StoreUnavailable, StateCorrupt, StateUnreadable: it cannot be had.
        """
        context = self._context
        for _ in range(context.limits.tries):
            found = await self.read(await context.store.load(context.client, context.model))
            if found is not None:
                context.observer.found(found.status)
                return found
            await context.pause()
        raise Contended("other replicas kept changing this client's state; send the request again")

    def _known(self, loaded: Loaded) -> Held[S] | None:
        held = self._memory.held
        if held is None or held.track.stale or held.basis != loaded.basis:
            return None
        return replace(held, touched=self._context.clock()) if loaded.touched else held

    async def _rebuild(self, head: Head, life: str, fence: str) -> Held[S] | None:
        rebuilt = await self._rebuilder.rebuild(head, head.seq)
        if rebuilt is None:
            return None
        track = Track(head.base, head.sid, fence, rebuilt.sizes, rebuilt.owed)
        lost = self._memory.lost(life, head.seq)
        status: Status = "rolled_back" if lost else _status(head)
        touched, number = self._long_ago, head.number
        return Held(life, head.seq, head.tag, head.config, rebuilt.state, track, touched, status, lost, number)

    async def _cold(self, life: str) -> Held[S]:
        config = self._context.policy.config
        state = await self._context.machine.initial(config)
        lost = 0 if life else self._memory.vanished(self._long_ago)
        status: Status = "rolled_back" if lost else "cold"
        return Held(life, 0, "", config, state, Track(), self._long_ago, status, lost)

    @property
    def _long_ago(self) -> float:
        """For a state that was read, which need not have extended its life."""
        return self._context.clock() - self._context.limits.state_ttl_ms / 1000


def _status(head: Head) -> Status:
    if head.has_state or head.base < head.seq:
        return "restored"
    return "reset" if head.seq else "cold"
