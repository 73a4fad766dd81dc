"""Computes a state from what Redis has of it: the newest complete state, and the batches since."""

from dataclasses import dataclass
from functools import partial
from typing import Generic

from acclimate_service.state.blob import hashing
from acclimate_service.state.context import Context
from acclimate_service.state.entry import decode
from acclimate_service.state.errors import StateCorrupt, StateUnreadable
from acclimate_service.state.held import Owed
from acclimate_service.state.journal_records import Written
from acclimate_service.state.machine import S, always
from acclimate_service.state.records import Head, Moved, Restored


@dataclass(frozen=True, slots=True)
class Rebuilt(Generic[S]):
    """A state, and of the journal entries that led to it: their bytes and their answers, by version."""

    state: S
    sizes: dict[int, int]
    owed: dict[int, Owed]


class Rebuilder(Generic[S]):
    """Reads and replays; changes nothing."""

    def __init__(self, context: Context[S]) -> None:
        self._context = context

    async def rebuild(self, head: Head, until: int) -> Rebuilt[S] | None:
        """The state of version `until`; None: a part was moved away while it was read.

        Raises:
            StateCorrupt: a part is missing or damaged.
            StateUnreadable: an entry cannot be computed again.
        """
        context, sizes, owed = self._context, dict[int, int](), dict[int, Owed]()
        restored = await context.store.read_state(context.client, head)
        pieces = await context.store.journal.pieces(context.client, head, until)
        if isinstance(restored, Moved) or pieces is None:
            await self._require_moved(head)
            return None
        state, began = await self._base(head, restored), context.clock()
        for piece in pieces:
            written = await context.store.journal.fetch(context.client, head.model, piece)
            if written is None:
                await self._require_moved(head)
                return None
            for each in written:
                state, answer = await self._replay(state, each)
                sizes[each.seq] = len(each.blob)
                owed[each.seq] = Owed(each.rid, each.tag, answer)
        if sizes:
            context.observer.replayed(len(sizes), context.clock() - began)
        return Rebuilt(state, sizes, owed)

    async def _base(self, head: Head, restored: Restored | None) -> S:
        machine = self._context.machine
        if restored is None:
            return await machine.initial(head.config)
        return await machine.deserialise(head.config, restored.state)

    async def _require_moved(self, head: Head) -> None:
        found = (await self._context.store.load(self._context.client, head.model)).head
        if found is not None and (found.tag, found.base, found.sid) == (head.tag, head.base, head.sid):
            raise StateCorrupt(f"version {head.seq} of the stored state misses an entry of its journal")

    async def _replay(self, state: S, written: Written) -> tuple[S, bytes]:
        context, blob, seq = self._context, written.blob, written.seq
        entry = await hashing(partial(decode, blob, context.client, seq), len(blob))
        if entry.engine != context.machine.engine:
            context.observer.engine_changed()
            if context.policy.strict_engine:
                raise StateUnreadable(f"version {seq} was computed by {entry.engine}, here is {context.machine.engine}")
        try:
            return await context.machine.step(state, entry.batch, always)
        except Exception as error:
            raise StateUnreadable(f"the batch of version {seq} cannot be computed again: {error!r}") from error
