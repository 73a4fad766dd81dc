"""One client on one replica: exactly once, in order, whatever the other replicas do and whatever fails.

A session holds the newest state it knows and writes by the smaller of two ways: a small state whole, a large one by
its batches, with a snapshot now and then. States are immutable and steps run elsewhere: what they are is the business
of a `Machine`. One call at a time: the caller holds the client's turn, except for `drop` and what is read of
it. To bound memory, keep sessions in a cache that counts `nbytes`, evicts under the client's turn, and passes over
clients whose turn is taken.

    context = Context(store, limits, ClientScope("cam-7"), model_hash, machine, Policy(config='{"adapter":"atp"}'))
    session = Session(context)
    batch = Batch("uint8", images.shape, images.data, parameters=b'{"probabilities":false}')
    try:
        applied = await session.apply(Request(rid, fingerprint), batch)
        reply(applied.answer, version=applied.seq, replayed=applied.replayed, status=applied.status)
    except StateError as error:
        refuse(type(error), str(error), state_committed=error.committed)
    await session.evict()
"""

from contextlib import suppress
from dataclasses import replace
from typing import Generic

from acclimate_service.state.contract import Applied, Looked, Present, Request, S, Start, always
from acclimate_service.state.entry import Batch
from acclimate_service.state.errors import ClientUnknown, Contended, StateError
from acclimate_service.state.held import Context, Memory
from acclimate_service.state.once import Once, refusal, stored
from acclimate_service.state.reader import Reader
from acclimate_service.state.records import Absent, Committed, Conflict, Head, Repeat
from acclimate_service.state.snapshotter import Snapshotter
from acclimate_service.state.tasks import Tasks
from acclimate_service.state.writer import Changing, Writer


class Session(Generic[S]):
    """Applies batches to the state of one client. Errors are those of `errors.py`; each says what may have changed."""

    def __init__(self, context: Context[S]) -> None:
        self._context = context
        self._tasks = Tasks()
        self._memory: Memory[S] = Memory()
        self._snapshotter = Snapshotter(context, self._tasks)
        self._reader = Reader(context, self._memory, self._snapshotter, self._tasks)
        writer = Writer(context, self._memory, self._reader, self._snapshotter, self._tasks)
        self._once = Once(context, self._memory, self._reader, writer)

    @property
    def nbytes(self) -> int:
        """Bytes of the state and the answers in memory."""
        held = self._memory.held or self._reader.progress or self._memory.past
        if held is None:
            return 0
        return self._context.machine.size(held.state) + sum([len(owed.answer) for owed in held.track.owed.values()])

    @property
    def replay_s(self) -> float | None:
        """About how long a replay that is under way will take (s); None if there is none."""
        return self._reader.replay_s

    async def replay_ended(self) -> None:
        """Wait until no replay is under way."""
        await self._reader.ended()

    def knows(self, rid: str) -> bool:
        """Whether the last request that was found to be applied already is this one."""
        return self._once.repeated == rid

    @property
    def version(self) -> int | None:
        """Version of the state in memory, if there is one."""
        return self._memory.held.seq if self._memory.held else None

    @property
    def config(self) -> str | None:
        """Adapter and hyper-parameters of the state in memory, if there is one."""
        return self._memory.held.config if self._memory.held else None

    @property
    def state(self) -> S | None:
        """The state in memory, if there is one."""
        return self._memory.held.state if self._memory.held else None

    def exchange(self, old: S, new: S) -> None:
        """Hold an equal state, which is in other memory, in the place of this one if it is still the newest.

        For callers who know that no turn is being taken.
        """
        held = self._memory.held
        if held is not None and held.state is old:
            equal = replace(held, state=new)
            self._memory.keep(equal)
            self._snapshotter.follow(equal)

    @property
    def journal(self) -> tuple[int, int]:
        """Entries and bytes of the client's journal, as far as this session knows."""
        held = self._memory.held
        return (len(held.track.sizes), held.track.nbytes) if held else (0, 0)

    async def apply(self, request: Request, batch: Batch) -> Applied:
        """Fold a batch into the client's state, once, and answer it.

        Raises:
            ClientDeleted, KeyReused, KeyUsedBeforeDelete, OtherModel, RequestRunning, Contended: it was refused.
            OutOfOrder: so was it, because a batch of this number or a higher one was applied before.
            StepFailed: the adapter failed on this batch.
            JournalFull, StoreFull, StoreUnavailable, StateCorrupt, StateUnreadable: the state cannot be had or kept.
            Exception: what the machine or `request.admit` raised before the batch was begun; nothing was changed.
        """
        return await self._once.run(request, batch)

    async def replace(self, request: Request, change: Changing[S]) -> Applied:
        """Put another state in the place of the client's, once: an enrolment, an import, the result of a round.

        It is always written whole, whoever writes the client's journal; whatever is based on the state before is then
        refused.

        Args:
            request: a repeated one gets the first answer.
            change: makes the new configuration and state of the newest; called again if another change came between.

        Raises:
            ClientDeleted, KeyReused, KeyUsedBeforeDelete, OtherModel, RequestRunning, Contended: it was refused.
            StoreFull, StoreUnavailable, StateCorrupt, StateUnreadable: the state cannot be had or kept.
            Exception: what `change`, the machine or `request.admit` raised; nothing was changed.
        """
        return await self._once.run(request, change)

    async def look(self, batch: Batch, admit: Start = always) -> Looked:
        """Answer a batch as if it were to be folded in, and keep nothing.

        Raises:
            Contended, StoreUnavailable, StateCorrupt, StateUnreadable: the state cannot be had.
            Exception: what the machine or `admit` raised.
        """
        found = await self._reader.peek()
        _, answer = await self._context.machine.step(found.state, batch, admit)
        return Looked(found.seq, answer, found.status)

    async def present(self) -> Present[S]:
        """The newest state; nothing is changed.

        Raises:
            Contended, StoreUnavailable, StateCorrupt, StateUnreadable: it cannot be had.
        """
        return (await self._reader.peek()).present

    async def known(self, request: Request) -> Applied | Head | None:
        """What became of a request that was applied before, else the head of the client's state; None: there is none.

        Raises:
            KeyReused, KeyUsedBeforeDelete, OtherModel, RequestRunning, Contended: it was refused.
            StateError: Redis failed.
        """
        return await self._once.known(request)

    async def reset(self, request: Request, config: str = "") -> Applied:
        """Take the client back to the initial state, under another configuration if one is given.

        Raises:
            ClientUnknown, ClientDeleted, KeyReused, KeyUsedBeforeDelete, Contended: it was refused.
            StateError: Redis failed.
        """
        self.drop()
        context = self._context
        outcome = await context.store.reset(context.client, context.model, request.attempt(), config)
        match outcome:
            case Committed(seq=seq, life=life):
                return Applied(seq, life, context.model, None, status="reset")
            case Repeat():
                return stored(outcome)
            case Absent(committed=effect):
                detail = f"there is no client {context.client.client!r}; it begins with its first batch"
                raise ClientUnknown(detail, effect)
            case Conflict(committed=effect):
                raise Contended("the client's batches kept coming between; reset again", effect)
            case _:
                raise refusal(outcome)

    async def delete(self) -> bool:
        """Remove the client from every model, and all that was learned for it; False if there was none.

        Raises:
            Contended: batches kept coming between.
            StateError: Redis failed.
        """
        self.drop()
        await self._context.store.mend(self._context.client, self._context.model)
        outcome = await self._context.store.delete(self._context.client)
        if isinstance(outcome, Conflict):
            raise Contended("the client's batches kept coming between; delete again", outcome.committed)
        if self._context.places is not None:
            with suppress(StateError):  # else the place is free once it expires
                await self._context.places.free(self._context.client)
        return outcome.existed

    def doubt(self) -> None:
        """Ask Redis before the state is used again, which may have changed unheard."""
        held = self._memory.held
        if held is not None:
            self._memory.keep(replace(held, touched=self._context.long_ago))

    async def check(self) -> None:
        """Forget the state if the client was deleted since.

        Raises:
            StateError: Redis failed.
        """
        held = self._memory.held or self._reader.progress or self._memory.past
        if held is not None and held.life:
            loaded = await self._context.store.load(self._context.client, self._context.model)
            if loaded.life != held.life:
                self.drop()

    def drop(self) -> None:
        """Forget the state at once, without a snapshot: it was deleted elsewhere, or may have been.

        May be called at any time; a request under way goes on, and Redis decides whether it comes too late.
        """
        self._snapshotter.forget()
        self._reader.drop()
        held = self._memory.held
        if held is not None:
            held.track.stale = True
        self._memory.drop()

    async def hand_over(self) -> None:
        """Let go of the journal, for a replica that waits for it.

        The state stays, to go on from should that replica change nothing, or little. A replay that nobody waits for is
        given up, and goes on from where it is when somebody asks. No snapshot is begun, which would keep that replica
        waiting. One that is being taken is ended: were it given up each time, the journal of a client that moves with
        every batch would grow, and be replayed, up to its cap.
        """
        await self._reader.stop()
        held = self._memory.held or self._memory.past
        if held is None or not held.track.fence:
            return
        await self._snapshotter.finish()
        self._snapshotter.forget()
        self._memory.take()
        await self._reader.release(held.track.fence)

    async def evict(self) -> None:
        """Let go of the state, after a snapshot where it has a journal; a snapshot that fails loses nothing."""
        await self._reader.stop()
        held = self._memory.held or self._memory.past
        self._memory.drop()
        self._snapshotter.forget()
        if held is None or not held.track.fence:
            return
        await self._snapshotter.now(held)
        await self._reader.release(held.track.fence)

    async def aclose(self) -> None:
        """End what runs in the background. Without `evict` before, the next opener has more to replay."""
        self._snapshotter.forget()
        await self._tasks.aclose()
