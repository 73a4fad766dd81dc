"""Finds the state of a client: in memory, or in Redis, where its journal is opened and replayed."""

import asyncio
import math
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final, Generic, TypeVar

from acclimate_service.state.contract import Earlier, S, Status
from acclimate_service.state.encoding import Batch, event
from acclimate_service.state.errors import KEPT_CHANGING, Contended, StateError, VersionUnknown
from acclimate_service.state.held import Context, Held, Memory, Owed, Snapshotter, Track
from acclimate_service.state.journal import Busy, Opened
from acclimate_service.state.outcomes import Committed, Loaded
from acclimate_service.state.records import Basis, Head
from acclimate_service.state.redis.wire import DEADLINE
from acclimate_service.state.replay import Replay
from acclimate_service.state.tasks import Tasks, Watch

T = TypeVar("T")
_POLL: Final = 0.02
"""Longest pause before a busy lease is tried again (s)."""
_ASK: Final = 0.1
"""Pause before its holder is asked for it again (s)."""


class Flight(Generic[S, T]):
    """A replay under way, which outlives those who wait for it.

    Args:
        name: of what it leads to.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.replay: Replay[S] | None = None
        self.dropped = False  # nobody is to go on from what it comes to, but those who wait already
        self._task: asyncio.Task[T] | None = None
        self._waiting = 0

    @property
    def left(self) -> int:
        """Entries that it has still to compute, as far as is known."""
        return self.replay.left if self.replay else 0

    def begin(self, work: Coroutine[Any, Any, T], tasks: Tasks, watch: Watch) -> None:
        """Start it; `watch` is told what it came to if nobody waits for it by then."""
        self._task = tasks.begin(self._run(work))
        self._task.add_done_callback(partial(self._ended, watch))

    @staticmethod
    async def _run(work: Coroutine[Any, Any, T]) -> T:
        DEADLINE.set(math.inf)  # whoever asked first may give up
        return await work

    async def result(self) -> T:
        """What it comes to."""
        assert self._task is not None
        self._waiting += 1
        try:
            return await asyncio.shield(self._task)
        finally:
            self._waiting -= 1
            if self.dropped and not self._waiting:
                self._task.cancel()

    def drop(self) -> None:
        """End it, unless somebody waits."""
        self.dropped = True
        if self._task is not None and not self._waiting:
            self._task.cancel()

    async def stop(self) -> None:
        """End it, unless somebody waits; what it has come to stays."""
        if self._task is not None and not self._waiting:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def ended(self) -> None:
        """Wait for its end, whatever it comes to."""
        assert self._task is not None
        await asyncio.wait([self._task])

    def _ended(self, watch: Watch, task: asyncio.Task[T]) -> None:
        if self._waiting or task.cancelled():
            return
        error = task.exception()
        if error is None:
            watch.succeeded("replay")
        elif isinstance(error, Exception):
            watch.failed("replay", error)


class Reader(Generic[S]):
    """Finds the newest state of one client.

    A replay is begun once, however many ask for what it leads to, and goes on when they go away: what it came to is in
    memory when they ask again.

    Attributes:
        restoring: the replay under way that leads to the newest state.
        recomputing: one that leads to an earlier answer.
    """

    def __init__(self, context: Context[S], memory: Memory[S], snapshotter: Snapshotter[S], tasks: Tasks) -> None:
        self._context = context
        self._memory = memory
        self._snapshotter = snapshotter
        self._tasks = tasks
        self.restoring: Flight[S, Held[S] | None] | None = None
        self.recomputing: Flight[S, Owed | None] | None = None

    @property
    def progress(self) -> Held[S] | None:
        """What a replay that is under way has come to."""
        return self.restoring.replay.held if self.restoring and self.restoring.replay else None

    async def peek(self) -> Held[S]:
        """The newest state, found without changing anything.

        Raises:
            Contended, StoreUnavailable, StateCorrupt, StateUnreadable: it cannot be had.
        """
        context = self._context
        for _ in range(context.limits.tries):
            held = self._memory.held
            loaded = await context.store.load(context.client, context.model, sid=held.track.sid if held else "")
            found = await self.restore(loaded)
            if found is not None:
                context.observer.found(found.status)
                if found is self._memory.held:
                    self._memory.keep(replace(found, status="warm", lost=0))
                return found
            await context.pause()
        raise Contended(KEPT_CHANGING)

    async def earlier(self, version: int) -> Earlier[S]:
        """As `Session.earlier`."""
        context = self._context
        for _ in range(context.limits.tries):
            kept = await context.store.kept(context.client, context.model)
            found = next((each for each in kept if version in (0, each.seq)), None)
            if found is None:
                there = ", ".join(str(each.seq) for each in kept) or "none"
                wanted = f"version {version} of the client" if version else "no earlier version of the client"
                raise VersionUnknown(f"{wanted} is {'not ' if version else ''}kept; those that are: {there}")
            restored = await context.store.read_kept(context.client, context.model, found)
            if restored is not None:
                state = await context.machine.deserialise(found.config, restored.state)
                return Earlier(found.seq, found.config, state)
        raise Contended(KEPT_CHANGING)

    async def restore(self, loaded: Loaded, batch: Batch | None = None) -> Held[S] | None:
        """The state that Redis was found to hold; None: it moved, load again.

        Args:
            loaded: what was found.
            batch: what is to be folded in; the journal is opened first if there is one, or is to be one.
        """
        while True:
            known = self._known(loaded)
            if known is not None:
                return known
            head = loaded.head
            if head is None:
                return await self._cold(loaded.basis)
            if self.is_outdated(head):
                return await self._anew(loaded, head, changing=batch is not None)
            if self.restoring is not None:
                await self.restoring.result()  # perhaps of another version: then it is where the next one begins
                continue
            opens = batch is not None and (
                head.base < head.seq or not self._context.written_whole(head.length, batch.nbytes)
            )
            flight = self.restoring = Flight[S, Held[S] | None]("state")
            flight.begin(self._restore(flight, loaded, head, opens), self._tasks, self._context.watch)
            return await flight.result()

    async def answer(self, loaded: Loaded, head: Head, rid: str, seq: int) -> Owed | None:
        """The answer of a journal entry, computed again; None: it moved, or is stored by now."""
        held = self._memory.held or self._memory.past or await self.restore(loaded)
        if held is None or held.life != loaded.life or seq not in held.track.owed:
            held = await self.restore(loaded)
        if held is None:
            return None
        if seq in held.track.owed:
            return held.track.owed[seq]
        # It was stored before the replay, or is too large to be: only a replay up to it tells.
        if self.recomputing is None or self.recomputing.name != rid:
            if self.recomputing is not None:
                self.recomputing.drop()
            flight = self.recomputing = Flight[S, Owed | None](rid)
            flight.begin(self._recompute(flight, loaded, head, seq), self._tasks, self._context.watch)
        found = await self.recomputing.result()
        self.recomputing = None
        return found

    def is_outdated(self, head: Head) -> bool:
        """Whether what is stored is of no use, since it was made by another version of the model."""
        return not self._context.lineage.goes_on(head.config, head.version)

    async def open(self, basis: Basis, config: str) -> Opened | None:
        """Open the journal for writing, of a new client under this configuration; None: it changed, read it again.

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
                context.client, context.model, basis, context.nonce, config, context.lineage.version, force=left <= 0
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

    async def release(self, fence: str) -> None:
        """Let others open the journal without waiting, if this session has it open."""
        if fence:
            with suppress(StateError):  # the lease ends by itself
                await self._context.store.journal.release(self._context.client, self._context.model, fence)

    async def ended(self) -> None:
        """Wait until no replay is under way."""
        while self.restoring is not None:
            await self.restoring.ended()

    async def stop(self) -> None:
        """Give up a replay that nobody waits for; what it has come to stays in memory."""
        for flight in (self.restoring, self.recomputing):
            if flight is not None:
                await flight.stop()

    def drop(self) -> None:
        """Forget what replays come to."""
        for flight in (self.restoring, self.recomputing):
            if flight is not None:
                flight.drop()
        self.restoring = self.recomputing = None

    def _known(self, loaded: Loaded) -> Held[S] | None:
        held = self._memory.held
        if held is None or held.track.stale or held.basis != loaded.basis:
            return None
        if loaded.touched:
            self._memory.keep(replace(held, touched=self._context.clock()))
        return self._memory.held

    async def _cold(self, basis: Basis) -> Held[S]:
        context, life = self._context, basis.life
        chosen, paused = await self._inherited() if life else ("", False)
        config = chosen or context.policy.config
        state = await context.machine.initial(config)
        lost = 0 if life else self._memory.vanished(context.long_ago)
        status: Status = "rolled_back" if lost else "cold"
        track = Track(sid=basis.sid)
        return Held(life, 0, "", config, state, track, context.long_ago, status, lost, paused=paused)

    async def _inherited(self) -> tuple[str, bool]:
        """What the client chose under an earlier version of the model, empty for nothing; whether it is paused."""
        context = self._context
        for scope in context.lineage.earlier:
            found = await context.store.describe(context.client, scope)
            if found is not None:
                return context.lineage.inherited(found.config, scope, found.chosen), found.paused
        return "", False

    async def _anew(self, loaded: Loaded, head: Head, *, changing: bool) -> Held[S] | None:
        """The initial state in the place of a stored one that is of no use; None: it moved.

        Args:
            loaded, head: what was found.
            changing: whether a batch is to be folded in; the stored one is reset first, since a journal may follow it.
        """
        context, basis = self._context, loaded.basis
        found = await context.store.describe(context.client, context.model)
        chosen = found.chosen if found else ""
        config = context.lineage.inherited(head.config, context.model, chosen) or context.policy.config
        if changing:
            version = context.lineage.version
            done = await context.store.reset_from(
                context.client, context.model, basis, config, version, context.note(event("model"))
            )
            if not isinstance(done, Committed):
                return None
            basis = done.basis
        state = await context.machine.initial(config)
        track = Track(basis.seq, basis.sid, stale=not changing)
        return Held(
            life=basis.life,
            seq=basis.seq,
            tag=basis.tag,
            config=config,
            state=state,
            track=track,
            touched=context.long_ago,
            status="reset",
            number=head.number,
            paused=head.paused,
        )

    async def _restore(
        self, flight: Flight[S, Held[S] | None], loaded: Loaded, head: Head, opens: bool
    ) -> Held[S] | None:
        try:
            flight.replay = replay = self._replay(loaded.life, head, "")
            if replay.is_quick:
                return await self._restored(flight, loaded, opens)
            async with self._context.replays.place(flight):
                return await self._restored(flight, loaded, opens)
        finally:
            if self.restoring is flight:
                self.restoring = None

    async def _restored(self, flight: Flight[S, Held[S] | None], loaded: Loaded, opens: bool) -> Held[S] | None:
        """In the place in the queue, where it stays however often the stored state moves."""
        context, life = self._context, loaded.life
        for _ in range(context.limits.tries):
            head, fence = loaded.head, ""
            opened = await self.open(loaded.basis, head.config) if opens and head else None
            if opened is not None:
                head, fence = opened.head, opened.head.fence
            if head is None or loaded.life != life or self.is_outdated(head):
                return None
            try:
                held = None if opens and not opened else await self._replayed(flight, life, head, fence)
            except BaseException:
                await self.release(fence)  # whoever comes next need not wait for the lease
                raise
            if held is not None:
                return held
            await context.pause()
            loaded = await context.store.load(context.client, context.model)
        return None

    async def _replayed(self, flight: Flight[S, Held[S] | None], life: str, head: Head, fence: str) -> Held[S] | None:
        flight.replay = replay = self._replay(life, head, fence)
        self._memory.take()  # it is older
        try:
            held = await replay.run()
        finally:
            if not flight.dropped:
                self._memory.past = replay.held
        if held is None:
            return None
        lost = self._memory.lost(life, head.seq)
        status: Status = "rolled_back" if lost else _status(head)
        held = replace(held, status=status, lost=lost)
        if not flight.dropped:
            self._memory.keep(held)
        return held

    def _replay(self, life: str, head: Head, fence: str) -> Replay[S]:
        start = self._memory.held or self._memory.past
        return Replay(self._context, self._snapshotter, head=head, life=life, until=head.seq, fence=fence, start=start)

    async def _recompute(self, flight: Flight[S, Owed | None], loaded: Loaded, head: Head, seq: int) -> Owed | None:
        context = self._context
        flight.replay = Replay(context, self._snapshotter, head=head, life=loaded.life, until=seq)
        async with context.replays.place(flight):
            held = await flight.replay.run()
        return held.track.owed.get(seq) if held else None


def _status(head: Head) -> Status:
    if head.has_state or head.base < head.seq:
        return "restored"
    return "reset" if head.seq else "cold"
