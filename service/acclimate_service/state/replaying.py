"""Answers requests that were applied before, without applying them again.

Nobody but the running owner acknowledges an entry whose answer is not stored: the owner may still take it back.
"""

from typing import Generic

from acclimate_service.state.context import Context
from acclimate_service.state.errors import OtherModel, RequestRunning
from acclimate_service.state.journal_records import Answered
from acclimate_service.state.machine import Applied, Request, S
from acclimate_service.state.rebuilding import Rebuilder
from acclimate_service.state.records import Head, Loaded, Replay


class Replays(Generic[S]):
    """The first answers of repeated requests."""

    def __init__(self, context: Context[S], rebuilder: Rebuilder[S]) -> None:
        self._context = context
        self._rebuilder = rebuilder

    async def settle(self, request: Request, loaded: Loaded, replay: Replay) -> Applied | None:
        """What the request is to be answered; None: things moved meanwhile, load again.

        Args:
            request: the repeated request.
            loaded: what Redis knows of it, and `replay`, the verdict on it.

        Raises:
            OtherModel, RequestRunning: it may be applied; who knows it is another.
            StateError: Redis failed, or what it has cannot be read.
        """
        if replay.answer is not None:
            return stored(replay)
        if replay.model != self._context.model:
            raise OtherModel("this key was used for a batch of another model, whose answer is not stored", "unknown")
        head = loaded.head
        if head is None or not head.base < replay.seq <= head.seq:
            return Applied(replay.seq, replay.life, replay.model, None, "unavailable")
        if loaded.lease and replay.seq == head.seq and not loaded.lease.fence.endswith("." + self._context.nonce):
            raise RequestRunning("another replica is computing this request", loaded.lease.ms)
        return await self._recompute(request, replay, head)

    async def _recompute(self, request: Request, replay: Replay, head: Head) -> Applied | None:
        rebuilt = await self._rebuilder.rebuild(head, replay.seq)
        if rebuilt is None or rebuilt.owed[replay.seq].rid != request.rid:
            return None
        owed = rebuilt.owed[replay.seq]
        kept = await self._context.store.journal.answer(self._context.client, owed.rid, owed.tag, owed.answer)
        if not isinstance(kept, Answered):
            return None
        return Applied(replay.seq, replay.life, replay.model, kept.stored or owed.answer, "recomputed")


def stored(replay: Replay) -> Applied:
    """The answer that lies beside the marker."""
    return Applied(replay.seq, replay.life, replay.model, replay.answer, "stored")
