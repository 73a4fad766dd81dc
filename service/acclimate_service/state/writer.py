"""Computes one change and makes it durable: by the new state, or by the batch itself, whichever is smaller."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Final, Generic, TypeAlias

from acclimate_service.state.contract import Applied, Change, Present, S, Start
from acclimate_service.state.encoding import Batch
from acclimate_service.state.errors import Doubt, JournalFull, StateError, StepFailed
from acclimate_service.state.held import Context, Held, Memory, Owed, Snapshotter
from acclimate_service.state.journal import Appended, AppendOutcome, Fenced, Full, Undone, UndoOutcome
from acclimate_service.state.outcomes import Attempt, Committed, Conflict, Incomplete, Mismatch, Refused, Repeat, Used
from acclimate_service.state.places import Places
from acclimate_service.state.reader import Reader
from acclimate_service.state.tasks import Tasks
from acclimate_service.state.timeline import EVERY

WriteOutcome: TypeAlias = Applied | Fenced | Conflict | Incomplete | Refused
Appending: TypeAlias = asyncio.Task[AppendOutcome]
Changing: TypeAlias = Callable[[Present[S]], Awaitable[Change[S]]]
_BEGINNING: Final = 3072
"""Bytes of what Redis keeps of a client that began beside its state."""
_NOTED: Final = 256
"""Bytes of what is remembered of a request, and of a point of the timeline, at least."""


class Writer(Generic[S]):
    """One change of one client at a time. The state it starts from leaves the memory until its fate is known."""

    def __init__(
        self, context: Context[S], memory: Memory[S], reader: Reader[S], snapshotter: Snapshotter[S], tasks: Tasks
    ) -> None:
        self._context = context
        self._memory = memory
        self._reader = reader
        self._snapshotter = snapshotter
        self._tasks = tasks
        self._place_due = -math.inf
        self._length: int | None = None
        self._grown, self._room = 0, math.inf
        self._keep_due = -math.inf
        self._newest = 0  # version that was written before, of any other than a reset

    async def write(self, held: Held[S], attempt: Attempt, work: Batch | Changing[S], admit: Start) -> WriteOutcome:
        """Compute what follows this state and make it durable. Only an Applied changed anything.

        Args:
            held: the state, which leaves the memory.
            attempt: who asks for it.
            work: a batch to be folded in, or what makes another whole state of this one.
            admit: asked before it is begun; raises if nobody waits for it any more.

        Raises:
            StepFailed: the machine failed once the batch was begun.
            TooManyClients: the client is new, and there are as many as there may be.
            TooManyBytes: the client is new or has grown, and all of them take as many as they may.
            StateError: Redis failed, or the journal is full.
            Exception: whatever `work`, the machine or `admit` raised before anything was written.
        """
        self._memory.take()
        places = self._context.places
        larger = self._grown + sum(held.track.sizes.values()) > self._room
        if places is not None and (not held.seq or larger or self._context.clock() >= self._place_due):
            with self._kept(held, asyncio.CancelledError):  # nothing of it is sent
                await self._hold_place(places, held)
        if not isinstance(work, Batch):
            return await self._rewrite(held, attempt, work, admit)
        missing = attempt.number - held.number - 1  # between the newest numbered batch and this one, if it has a number
        if held.number and missing > 0:
            work = replace(work, skipped=missing)
        whole = self._context.written_whole(self._context.machine.size(held.state), work.nbytes)
        return await (self._full if whole else self._delta)(held, attempt, work, admit)

    def count_anew(self) -> None:
        """Have the bytes of the client counted again before its next change: there may be fewer."""
        self._room = -math.inf

    async def _hold_place(self, places: Places, held: Held[S]) -> None:
        """Count the client and its bytes: when it begins, before its place expires, and where it may have grown much.

        Of a client that begins it is what it is going to take, about; what it takes is counted with its second change.
        """
        context, new = self._context, not held.seq
        if new:
            size = _BEGINNING + context.machine.size(held.state)
        else:
            size = await context.store.footprint(context.client, context.model)
        await places.hold(context.client, size, new=new)
        self._place_due = context.clock() + context.limits.state_ttl_ms / 2000
        slack = 0 if new else max(context.limits.uncounted_bytes, size // 4)
        self._room = self._grown + held.track.nbytes + slack

    async def _rewrite(self, held: Held[S], attempt: Attempt, changing: Changing[S], admit: Start) -> WriteOutcome:
        with self._kept(held, Exception, asyncio.CancelledError):  # nothing is sent
            await admit()
            change = await changing(held.present)
            data = await self._context.machine.serialise(change.state)
        self.count_anew()
        return await self._commit(held, attempt, change, data)

    async def _full(self, held: Held[S], attempt: Attempt, batch: Batch, admit: Start) -> WriteOutcome:
        context = self._context
        with self._kept(held, Exception, asyncio.CancelledError):  # nothing is sent
            state, answer = await self._compute(held, batch, admit)
            data = await context.machine.serialise(state)
        if not context.written_whole(len(data), batch.nbytes):
            return await self._outgrown(held, attempt, batch, state, answer)
        inline = context.outweighed(len(data), batch.nbytes)
        change = Change(held.config, state, answer, point=state.point)
        return await self._commit(held, attempt, change, data, inline=inline)

    async def _commit(
        self, held: Held[S], attempt: Attempt, change: Change[S], data: bytes, *, inline: bool = False
    ) -> WriteOutcome:
        context = self._context
        touched = context.clock()
        if not held.seq:
            self._keep_due = -math.inf  # it begins, perhaps not for the first time
        keep = context.policy.keep if touched >= self._keep_due else 0  # the script looks whether it is time for all
        told = change.paused if held.seq or change.paused is not None else held.paused or None
        stored = Change(change.config, data, change.answer, told, change.back, change.chosen)
        with self._kept(held):
            await context.settle(held.track, held.seq)
            outcome = await context.store.commit(
                context.client,
                context.model,
                held.basis,
                attempt,
                stored,
                adapter=context.machine.adapter(change.state),
                inline=inline,
                keep=keep,
                version=context.lineage.version,
                note=context.note(change.point),
            )
        context.observer.wrote("full", _name(outcome))
        if not isinstance(outcome, Committed):
            return self._refused(held, outcome)
        if keep and held.seq:
            self._keep_due = touched + context.limits.keep_every_ms / 1000
        longer, kept = len(data) - (self._length or len(data)), len(data) if keep else 0
        self._grown += longer + kept + len(change.answer) + _NOTED
        self._length = len(data)
        held.track.rebase(outcome.seq, outcome.basis.sid)
        following = held.at(outcome.basis, attempt.number)
        paused = held.paused if change.paused is None else change.paused
        following = replace(following, config=change.config, state=change.state, touched=touched, paused=paused)
        return self._applied(following, change.answer)

    async def _compute(self, held: Held[S], batch: Batch, admit: Start) -> tuple[S, bytes]:
        begun: list[float] = []

        async def start() -> None:
            await admit()
            begun.append(self._context.clock())

        try:
            done = await self._context.machine.step(held.state, batch, start)
        except Exception as error:
            if not begun:
                raise
            raise StepFailed("the adapter failed on this batch; nothing was changed") from error
        self._snapshotter.measure(self._context.clock() - begun[0])
        return done

    async def _delta(self, held: Held[S], attempt: Attempt, batch: Batch, admit: Start) -> WriteOutcome:
        opened = held if held.track.fence else await self._opened(held)
        if opened is None:
            return Fenced()
        appending, begun = list[Appending](), 0.0

        async def start() -> None:
            nonlocal begun
            await admit()
            if not appending:
                begun = self._context.clock()
                appending.append(self._tasks.begin(self._append(opened, attempt, batch)))

        try:
            state, answer = await self._context.machine.step(opened.state, batch, start)
        except BaseException as error:
            if appending and isinstance(error, Exception):
                return await self._failed(opened, attempt, appending[0], error)
            if not appending:
                self._memory.keep(opened)
            raise
        self._snapshotter.measure(self._context.clock() - begun)
        return await self._appended(opened, attempt, batch, state, answer, appending[0], begun)

    async def _outgrown(self, held: Held[S], attempt: Attempt, batch: Batch, state: S, answer: bytes) -> WriteOutcome:
        """The new state is too large to be written whole: what was computed stands, and its batch is appended."""
        opened = held if held.track.fence else await self._opened(held)
        if opened is None:
            return Fenced()
        sent = self._context.clock()
        appending = self._tasks.begin(self._append(opened, attempt, batch))
        return await self._appended(opened, attempt, batch, state, answer, appending, sent)

    async def _opened(self, held: Held[S]) -> Held[S] | None:
        """The same state, with the journal open; None: it is not the newest one any more."""
        with self._kept(held, asyncio.CancelledError):
            opened = await self._reader.open(held.basis, held.config)
        if opened is None or opened.head.tag != held.tag or (held.seq and opened.head.sid != held.track.sid):
            return None
        held.track.fence, held.track.sid = opened.head.fence, opened.head.sid
        return replace(held, life=opened.life)

    async def _append(self, held: Held[S], attempt: Attempt, batch: Batch, *, shortened: bool = False) -> AppendOutcome:
        """A full journal is made shorter once, by a snapshot of the state before this batch."""
        context = self._context
        outcome = await context.store.journal.append(
            context.client, context.model, held.basis, held.track.fence, attempt, batch, context.machine.engine
        )
        context.observer.wrote("delta", _name(outcome))
        if not isinstance(outcome, Full):
            return outcome
        if shortened:
            detail = f"the journal is full, and snapshots of this client fail: {self._snapshotter.failure}"
            raise JournalFull(detail, outcome.committed)
        doubt = Doubt()
        doubt.learn(outcome.committed)
        with doubt:
            await self._snapshotter.now(held)
            return await self._append(held, attempt, batch, shortened=True)

    async def _appended(
        self, held: Held[S], attempt: Attempt, batch: Batch, state: S, answer: bytes, appending: Appending, sent: float
    ) -> WriteOutcome:
        """Wait for the entry of a batch that is computed; only if it is durable does the result count."""
        with self._kept(held):
            outcome = await asyncio.shield(appending)
        if not isinstance(outcome, Appended):
            return self._refused(held, outcome)
        seq = outcome.basis.seq
        self._grown += len(answer) + _NOTED  # and by its entry, of which `track` knows
        held.track.sizes[seq] = batch.nbytes
        held.track.owed[seq] = Owed(attempt.rid, attempt.tag, answer, self._context.note(state.point))
        touched = sent if outcome.touched else held.touched
        following = replace(held.at(outcome.basis, attempt.number), state=state, touched=touched)
        applied = self._applied(following, answer)
        self._tasks.start("answers", self._context.settle(held.track, seq))
        self._snapshotter.consider(following)
        return applied

    async def _failed(self, held: Held[S], attempt: Attempt, appending: Appending, error: Exception) -> WriteOutcome:
        """The step raised while its batch was being appended: take the entry back."""
        try:
            with self._kept(held):
                outcome = await asyncio.shield(appending)
        except StateError as lost:
            raise StepFailed(f"the adapter failed on this batch, and then: {lost}", lost.committed) from error
        if not isinstance(outcome, Appended):
            return self._refused(held, outcome)
        undone = await self._undo(held, attempt)
        if not isinstance(undone, Undone):
            raise StepFailed("the adapter failed on this batch, which another replica may apply", "unknown") from error
        self._memory.keep(held.at(undone.basis))
        raise StepFailed("the adapter failed on this batch; it was taken back") from error

    async def _undo(self, held: Held[S], attempt: Attempt) -> UndoOutcome | None:
        """None: Redis failed, and the entry may stay."""
        context = self._context
        with suppress(StateError):
            return await context.store.journal.undo(
                context.client, context.model, held.basis, held.number, held.track.fence, attempt
            )
        return None

    def _applied(self, held: Held[S], answer: bytes) -> Applied:
        before, self._newest = self._newest or held.seq - 1, held.seq  # resets may have come between
        if self._context.policy.timeline and before // EVERY < held.seq // EVERY:
            self._tasks.start("timeline", self._context.store.timeline.thin(self._context.client, self._context.model))
        self._memory.acknowledge(replace(held, status="warm", lost=0))
        return Applied(held.seq, held.life, self._context.model, answer, "none", held.status, held.lost)

    def _refused(self, held: Held[S], outcome: Fenced | Full | Conflict | Incomplete | Refused) -> WriteOutcome:
        """Not applied. A request that had been before says nothing against the state."""
        assert not isinstance(outcome, Full)  # `_append` raises it
        if isinstance(outcome, Repeat | Mismatch | Used):
            self._memory.keep(held)
        else:
            held.track.stale = True
        return outcome

    @contextmanager
    def _kept(self, held: Held[S], *kinds: type[BaseException]) -> Iterator[None]:
        """Go on from this state later, if the block ends in an error that surely changed nothing."""
        try:
            yield
        except StateError as error:
            if error.committed is False:
                self._memory.keep(held)
            raise
        except kinds:
            self._memory.keep(held)
            raise


def _name(outcome: object) -> str:
    """As metrics have it, where a repeat is a "replay"."""
    return "replay" if isinstance(outcome, Repeat) else type(outcome).__name__.lower()
