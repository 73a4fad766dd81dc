"""Computes a state again by its journal: on from the newest complete one, or from one in memory."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Generic

from acclimate_service.state.contract import S, always
from acclimate_service.state.encoding import decode_entry, hashing
from acclimate_service.state.entries import Listed, Written
from acclimate_service.state.errors import StateCorrupt, StateUnreadable
from acclimate_service.state.held import Context, Held, Owed, Snapshotter, Track
from acclimate_service.state.outcomes import Moved
from acclimate_service.state.records import Head


class Replay(Generic[S]):
    """One replay. What it has come to is in `held`, and is a beginning for the next one if this one is given up.

    Args:
        context: of the client.
        snapshotter: of the client, which keeps what took long to compute.
        head: what is stored.
        life: existence of the client that it belongs to.
        until: the version wanted.
        fence: under which the journal is open for this session; empty if it is not.
        start: a state in memory.
    """

    def __init__(
        self,
        context: Context[S],
        snapshotter: Snapshotter[S],
        *,
        head: Head,
        life: str,
        until: int,
        fence: str = "",
        start: Held[S] | None = None,
    ) -> None:
        self._context = context
        self._snapshotter = snapshotter
        self._head = head
        self._life = life
        self._until = until
        self._fence = fence
        self.held = start
        self.computed = 0

    @property
    def left(self) -> int:
        """Entries that are still to be computed, as far as is known."""
        begun = self.held is not None and self.held.life == self._life and self._head.base <= self.held.seq
        return self._until - min(self._until, self.held.seq if begun and self.held else self._head.base)

    @property
    def is_quick(self) -> bool:
        """Whether there is nothing to compute, nor anything large to be read."""
        held, head = self.held, self._head
        there = held is not None and (held.life, held.seq) == (self._life, head.seq)
        return not self.left and (there or head.snapshot is None)

    async def run(self) -> Held[S] | None:
        """The state of the version wanted; None: a part was moved away while it was read.

        Raises:
            StateCorrupt: a part is missing or damaged.
            StateUnreadable: an entry cannot be computed again.
        """
        context, head, began = self._context, self._head, self._context.clock()
        listed = await context.store.entries.contents(context.client, head, self._until)
        if listed is None or not await self._of_one_history(listed):
            await self._require_moved()
            return None
        self.held = self._resumed(listed)
        if self.held is None:
            self.held = await self._read_base()
        elif head.snapshot:
            await context.store.load(context.client, head.model, sid=head.sid)  # extends what is not read
        if self.held is None:
            return None
        for piece in context.store.entries.pieces([each for each in listed if each.seq > self.held.seq]):
            written = await context.store.entries.fetch(context.client, head.model, piece)
            if written is None:
                await self._require_moved()
                return None
            for each in written:
                await self._take(each)
        if self.computed:
            context.observer.replayed(self.computed, context.clock() - began)
        if self._until < head.seq:
            return self.held
        return replace(self.held, tag=head.tag, number=head.number, paused=head.paused)

    async def _of_one_history(self, listed: Sequence[Listed]) -> bool:
        """Whether the journal is still that of the head, and not one of a life after it."""
        if not listed or self._until < self._head.seq or listed[-1].tag == self._head.tag:
            return True
        now = await self._context.store.load(self._context.client, self._head.model)  # its last entry was taken back
        return now.life == self._life and now.head is not None and now.head.tag == self._head.tag

    def _resumed(self, listed: Sequence[Listed]) -> Held[S] | None:
        """The state in memory, if the stored history led through it; its parts are as they are stored now."""
        held, head = self.held, self._head
        if held is None or (held.life, held.config) != (self._life, head.config):
            return None
        if not head.base <= held.seq <= self._until:
            return None
        tags = {each.tag for each in listed if each.seq == held.seq}
        if held.seq == head.seq:
            tags.add(head.tag)
        if held.tag not in tags:
            return None
        sizes = {each.seq: each.size for each in listed if each.seq <= held.seq}
        owed = {seq: owed for seq, owed in held.track.owed.items() if seq in sizes}
        return replace(held, track=Track(head.base, head.sid, self._fence, sizes, owed), touched=self._context.long_ago)

    async def _read_base(self) -> Held[S] | None:
        context, head = self._context, self._head
        restored = await context.store.read_state(context.client, head)
        if isinstance(restored, Moved):
            return None
        if restored is None:
            state = await context.machine.initial(head.config)
        else:
            state = await context.machine.deserialise(head.config, restored.state)
        track = Track(head.base, head.sid, self._fence)
        tag = head.tag if head.base == head.seq else ""
        return Held(self._life, head.base, tag, head.config, state, track, context.long_ago, "restored")

    async def _take(self, written: Written) -> None:
        context, held, began = self._context, self.held, self._context.clock()
        assert held is not None
        blob, seq = written.blob, written.seq
        entry = await hashing(partial(decode_entry, blob, context.client, seq), len(blob))
        if entry.engine != context.machine.engine:
            context.observer.engine_changed()
            if context.policy.strict_engine:
                raise StateUnreadable(f"version {seq} was computed by {entry.engine}, here is {context.machine.engine}")
        try:
            state, answer = await context.machine.step(held.state, entry.batch, always)
        except Exception as error:
            raise StateUnreadable(f"the batch of version {seq} cannot be computed again: {error!r}") from error
        held.track.sizes[seq] = len(blob)
        held.track.owed[seq] = Owed(written.rid, written.tag, answer, context.note(state.point))
        self.held = held = replace(held, seq=seq, tag=written.tag, state=state)
        self.computed += 1
        seconds = context.clock() - began
        context.replays.learn(seconds)
        self._snapshotter.measure(seconds)
        if self._fence and self.left >= len(held.track.sizes):  # else the snapshot costs more than it may save
            self._snapshotter.keep(held)

    async def _require_moved(self) -> None:
        head = self._head
        now = await self._context.store.load(self._context.client, head.model)
        found = now.head
        if found is not None and (found.tag, found.base, found.sid) == (head.tag, head.base, head.sid):
            raise StateCorrupt(f"version {head.seq} of the stored state misses an entry of its journal")
