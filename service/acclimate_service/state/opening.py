"""Opens a journal for writing, in turn with other replicas."""

import asyncio
from typing import Final, Generic

from acclimate_service.state.context import Context
from acclimate_service.state.journal_records import Busy, Opened
from acclimate_service.state.machine import S
from acclimate_service.state.records import Basis

_POLL: Final = 0.02
"""Longest pause before a busy lease is tried again (s)."""
_ASK: Final = 0.1
"""Pause before its holder is asked for it again (s)."""


class Opener(Generic[S]):
    """Takes the lease of one client's journal."""

    def __init__(self, context: Context[S]) -> None:
        self._context = context

    async def open(self, basis: Basis) -> Opened | None:
        """Wait for the lease at most `steal_after_ms`, then take it; None: the client changed, read it again.

        Its holder is asked for it, who gives it back at once between two batches.
        """
        context = self._context
        clock = asyncio.get_running_loop().time
        asking = clock()
        deadline = asking + context.limits.steal_after_ms / 1000
        while True:
            left = deadline - clock()
            outcome = await context.store.journal.open(
                context.client, context.model, basis, context.nonce, context.policy.config, force=left <= 0
            )
            if not isinstance(outcome, Busy):
                break
            if clock() >= asking:
                await context.store.journal.ask(context.client, context.model)
                asking = clock() + _ASK
            await asyncio.sleep(min(left, outcome.ms / 1000, _POLL))
        if not isinstance(outcome, Opened):
            return None
        context.observer.opened(left <= 0)
        return outcome
