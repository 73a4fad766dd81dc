"""Finds the state of a client: in memory, or in Redis, where its journal is replayed and opened for writing."""

import asyncio
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Generic

from acclimate_service.state.blob import hashing
from acclimate_service.state.contract import S, Status, always
from acclimate_service.state.entry import Batch, decode
from acclimate_service.state.errors import Contended, StateCorrupt, StateUnreadable
from acclimate_service.state.held import Context, Held, Memory, Owed, Track
from acclimate_service.state.journal_records import Busy, Opened, Written
from acclimate_service.state.records import Basis, Head, Loaded, Moved, Restored

_POLL: Final = 0.02
"""Longest pause before a busy lease is tried again (s)."""
_ASK: Final = 0.1
"""Pause before its holder is asked for it again (s)."""


@dataclass(frozen=True, slots=True)
class Rebuilt(Generic[S]):
    """A state, and of the journal entries that led to it: their bytes and their answers, by version."""

    state: S
    sizes: dict[int, int]
    owed: dict[int, Owed]


class Reader(Generic[S]):
    """Finds the newest state of one client."""

    def __init__(self, context: Context[S], memory: Memory[S]) -> None:
        self._context = context
        self._memory = memory

    def fresh(self) -> Held[S] | None:
        """The state in memory, if it is surely still alive in Redis; its next write proves whether it is the newest."""
        held = self._memory.held
        if held is None or held.track.stale:
            return None
        age_ms = 1000 * (self._context.clock() - held.touched)
        return held if age_ms < self._context.limits.state_ttl_ms / 2 else None

    async def peek(self) -> Held[S]:
        """The newest state, found without changing anything.

        Raises:
            Contended, StoreUnavailable, StateCorrupt, StateUnreadable: it cannot be had.
        """
        context = self._context
        for _ in range(context.limits.tries):
            found = await self.restore(await context.store.load(context.client, context.model))
            if found is not None:
                context.observer.found(found.status)
                return found
            await context.pause()
        raise Contended("other replicas kept changing this client's state; send the request again")

    async def restore(self, loaded: Loaded, batch: Batch | None = None) -> Held[S] | None:
        """The state that Redis was found to hold; None: it moved, load again.

        Args:
            loaded: what was found.
            batch: what is to be folded in; the journal is opened first if there is one, or is to be one.
        """
        known = self._known(loaded)
        if known is not None:
            return known
        head, life, fence = loaded.head, loaded.life, ""
        if head is None:
            return await self._cold(life)
        if batch and (head.base < head.seq or not self._context.written_whole(head.length, batch.nbytes)):
            opened = await self.open(loaded.basis)
            if opened is None:
                return None
            head, life, fence = opened.head, opened.life, opened.head.fence
        rebuilt = await self.rebuild(head, head.seq)
        if rebuilt is None:
            return None
        track = Track(head.base, head.sid, fence, rebuilt.sizes, rebuilt.owed)
        lost = self._memory.lost(life, head.seq)
        status: Status = "rolled_back" if lost else _status(head)
        touched, number = self._long_ago, head.number
        return Held(life, head.seq, head.tag, head.config, rebuilt.state, track, touched, status, lost, number)

    async def open(self, basis: Basis) -> Opened | None:
        """Open the journal for writing; None: the client changed, read it again.

        Its lease is waited for at most `steal_after_ms`, then taken. Its holder is asked for it, who gives it back at
        once between two batches.
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

    async def rebuild(self, head: Head, until: int) -> Rebuilt[S] | None:
        """The state of version `until`, computed from the newest complete one and the batches since.

        Returns:
            None: a part was moved away while it was read.

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

    def _known(self, loaded: Loaded) -> Held[S] | None:
        held = self._memory.held
        if held is None or held.track.stale or held.basis != loaded.basis:
            return None
        return replace(held, touched=self._context.clock()) if loaded.touched else held

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

    async def _base(self, head: Head, restored: Restored | None) -> S:
        machine = self._context.machine
        if restored is None:
            return await machine.initial(head.config)
        return await machine.deserialise(head.config, restored.state)

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

    async def _require_moved(self, head: Head) -> None:
        found = (await self._context.store.load(self._context.client, head.model)).head
        if found is not None and (found.tag, found.base, found.sid) == (head.tag, head.base, head.sid):
            raise StateCorrupt(f"version {head.seq} of the stored state misses an entry of its journal")


def _status(head: Head) -> Status:
    if head.has_state or head.base < head.seq:
        return "restored"
    return "reset" if head.seq else "cold"
