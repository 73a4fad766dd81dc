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

from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, Generic, TypeAlias

from acclimate_service.state.contract import Applied, Earlier, Looked, Present, Request, S, Start, always
from acclimate_service.state.encoding import Batch
from acclimate_service.state.errors import (
    KEPT_CHANGING,
    ClientDeleted,
    ClientUnknown,
    Contended,
    Effect,
    OutOfOrder,
    Paused,
    StateError,
)
from acclimate_service.state.held import Context, Held, Memory, Snapshotter
from acclimate_service.state.outcomes import (
    Absent,
    Attempt,
    Committed,
    Conflict,
    Gone,
    Incomplete,
    Loaded,
    Mismatch,
    Repeat,
    Used,
)
from acclimate_service.state.reader import Reader
from acclimate_service.state.records import Head
from acclimate_service.state.repeats import Repeats, refusal, stored
from acclimate_service.state.tasks import Tasks
from acclimate_service.state.writer import Changing, WriteOutcome, Writer

_TRIED: Final = 8
"""Requests of a client that are remembered as tried here."""
Work: TypeAlias = Batch | Changing[S]
"""What a request asks for: a batch to be folded in, or another state in the place of the present one."""


@dataclass(slots=True)
class _Visit:
    """What one request has learned.

    Args:
        life: of its client when Redis was first asked, or as the request says.
        ask: True if Redis is to be asked what became of it, before anything is computed.
        pauses: whether it is refused while the client is paused.
        committed: "unknown" if an earlier try of it may still land.
    """

    life: str | None = None
    ask: bool = False
    pauses: bool = False
    committed: Effect = False

    def stops_at(self, at: Held[S] | Head | None) -> bool:
        """Whether it is refused there."""
        return self.pauses and at is not None and at.paused

    def admit(self, loaded: Loaded) -> None:
        if self.life is None:
            self.life = loaded.life
        elif not loaded.continues(self.life):
            raise ClientDeleted("the client was deleted while this request was under way")


class Session(Generic[S]):
    """Applies batches to the state of one client. Errors are those of `errors.py`; each says what may have changed.

    Attributes:
        memory: what it holds of the state, for others to look at.
    """

    def __init__(self, context: Context[S]) -> None:
        self._context = context
        self._tasks = Tasks(context.watch)
        self.memory: Memory[S] = Memory()
        self._snapshotter = Snapshotter(context, self._tasks)
        self._reader = Reader(context, self.memory, self._snapshotter, self._tasks)
        self._writer = Writer(context, self.memory, self._reader, self._snapshotter, self._tasks)
        self._repeats = Repeats(context, self._reader)
        self._tried = deque[str](maxlen=_TRIED)

    @property
    def nbytes(self) -> int:
        """Bytes of the state and the answers in memory."""
        held = self.memory.held or self._reader.progress or self.memory.past
        if held is None:
            return 0
        owed = sum([len(owed.answer) for owed in held.track.owed.values()])
        return self._context.machine.size(held.state) + held.state.beside + owed

    @property
    def replay_s(self) -> float | None:
        """About how long a replay that is under way will take (s); None if there is none."""
        flight = self._reader.restoring or self._reader.recomputing
        return None if flight is None else self._context.replays.seconds_until(flight)

    async def replay_ended(self) -> None:
        """Wait until no replay is under way."""
        await self._reader.ended()

    def knows(self, rid: str) -> bool:
        """Whether the last request that was found to be applied already is this one."""
        return self._repeats.last == rid

    def exchange(self, old: S, new: S) -> None:
        """Hold an equal state, which is in other memory, in the place of this one if it is still the newest.

        For callers who know that no turn is being taken, or whose turn it is.
        """
        held = self.memory.held
        if held is not None and held.state is old:
            equal = replace(held, state=new)
            self.memory.keep(equal)
            self._snapshotter.follow(equal)

    async def apply(self, request: Request, work: Work[S], *, while_paused: bool = True) -> Applied:
        """Fold a batch into the client's state, once, and answer it; or put another state in the place of it.

        It is tried again while other changes come between. Redis is asked first what it knows of a request that
        replaces the state, since a repeat could not compute it again, and of one that was tried here before: its step
        need not be taken twice.

        Args:
            request: a repeated one gets the first answer.
            work: a batch; or what makes the new configuration and state of the newest, as an enrolment, an import or a
                round does. That is always written whole, whoever writes the client's journal; whatever is based on the
                state before is then refused.
            while_paused: False refuses it while the client is paused.

        Raises:
            ClientDeleted, KeyReused, KeyUsedBeforeDelete, OtherModel, RequestRunning, Contended: it was refused.
            OutOfOrder: so was it, because a batch of this number or a higher one was applied before.
            Paused: so was it, because the client is paused.
            StepFailed: the adapter failed on this batch.
            JournalFull, StoreFull, StoreUnavailable, StateCorrupt, StateUnreadable: the state cannot be had or kept.
            Exception: what the work, the machine or `request.admit` raised before it was begun; nothing was changed.
        """
        ask = request.rid in self._tried or not isinstance(work, Batch)
        visit = _Visit(request.life or None, ask=ask, pauses=not while_paused)
        self._tried.append(request.rid)
        try:
            for _ in range(self._context.limits.tries):
                found = await self._find(request, work, visit)
                if isinstance(found, Applied):
                    return found
                if found is not None:
                    self._context.observer.found(found.status)
                    attempt = Attempt(request.rid, request.fingerprint, request.number)
                    outcome = await self._writer.write(found, attempt, work, request.admit)
                    if isinstance(outcome, Applied):
                        return outcome
                    if (answered := self._refused(outcome, visit)) is not None:
                        return answered
                await self._context.pause()  # the client changed: try again, from what is stored now
            raise Contended(KEPT_CHANGING)
        except StateError as error:
            error.committed = error.committed or visit.committed
            raise
        except Exception as error:
            if visit.committed is False:
                raise
            raise Contended("the request was given up, but an earlier try of it may land", "unknown") from error

    async def look(self, batch: Batch, admit: Start = always) -> Looked:
        """Answer a batch as if it were to be folded in, and keep nothing.

        Raises:
            Contended, StoreUnavailable, StateCorrupt, StateUnreadable: the state cannot be had.
            Exception: what the machine or `admit` raised.
        """
        found = await self._reader.peek()
        _, answer = await self._context.machine.step(found.state, batch, admit)
        return Looked(found.seq, answer, found.status, found.paused)

    async def present(self) -> Present[S]:
        """The newest state; nothing is changed.

        Raises:
            Contended, StoreUnavailable, StateCorrupt, StateUnreadable: it cannot be had.
        """
        return (await self._reader.peek()).present

    async def earlier(self, version: int = 0) -> Earlier[S]:
        """A state that the client had and that is kept.

        Args:
            version: which; 0 for the newest that is kept.

        Raises:
            VersionUnknown: it is not kept.
            Contended, StoreUnavailable, StateCorrupt: it cannot be had.
        """
        return await self._reader.earlier(version)

    async def known(self, request: Request) -> Applied | Head | None:
        """What became of a request that was applied before, else the head of the client's state; None: there is none.

        Raises:
            KeyReused, KeyUsedBeforeDelete, OtherModel, RequestRunning, Contended: it was refused.
            StateError: Redis failed.
        """
        return await self._repeats.known(request)

    async def reset(
        self, request: Request, config: str = "", paused: bool | None = None, *, point: bytes = b""
    ) -> Applied:
        """Take the client back to the initial state, under another configuration if one is given.

        Args:
            request: a repeated one does not reset again.
            config: adapter and hyper-parameters that were chosen for the client; empty keeps the present ones.
            paused: whether batches are no longer folded in from now on; None leaves that as it is.
            point: of the client's timeline, as in `Change`.

        Raises:
            ClientUnknown, ClientDeleted, KeyReused, KeyUsedBeforeDelete, Contended: it was refused.
            StateError: Redis failed.
        """
        self.drop()
        context = self._context
        attempt = Attempt(request.rid, request.fingerprint, request.number)
        outcome = await context.store.reset(
            context.client,
            context.model,
            attempt,
            config,
            paused,
            version=context.lineage.version,
            note=context.note(point),
        )
        match outcome:
            case Committed(seq=seq, life=life):
                self._writer.count_anew()
                return Applied(seq, life, context.model, None, status="reset")
            case Repeat():
                return stored(outcome)
            case Absent(committed=effect):
                detail = f"there is no client {context.client.name!r}; it begins with its first batch"
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
        held = self.memory.held
        if held is not None:
            self.memory.keep(replace(held, touched=self._context.long_ago))

    async def check(self) -> None:
        """Forget the state if the client was deleted since.

        Raises:
            StateError: Redis failed.
        """
        held = self.memory.held or self._reader.progress or self.memory.past
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
        held = self.memory.held
        if held is not None:
            held.track.stale = True
        self.memory.drop()

    async def hand_over(self) -> None:
        """Let go of the journal, for a replica that waits for it.

        The state stays, to go on from should that replica change nothing, or little. A replay that nobody waits for is
        given up, and goes on from where it is when somebody asks. No snapshot is begun, which would keep that replica
        waiting. One that is being taken is ended: were it given up each time, the journal of a client that moves with
        every batch would grow, and be replayed, up to its cap.
        """
        await self._reader.stop()
        held = self.memory.held or self.memory.past
        if held is None or not held.track.fence:
            return
        await self._snapshotter.finish()
        self._snapshotter.forget()
        self.memory.take()
        await self._reader.release(held.track.fence)

    async def evict(self) -> None:
        """Let go of the state, after a snapshot where it has a journal; a snapshot that fails loses nothing."""
        await self._reader.stop()
        held = self.memory.held or self.memory.past
        self.memory.drop()
        self._snapshotter.forget()
        if held is None or not held.track.fence:
            return
        await self._snapshotter.now(held)
        await self._reader.release(held.track.fence)

    async def aclose(self) -> None:
        """End what runs in the background. Without `evict` before, the next opener has more to replay."""
        self._snapshotter.forget()
        await self._tasks.aclose()

    async def _find(self, request: Request, work: Work[S], visit: _Visit) -> Held[S] | Applied | None:
        """The newest state, or the answer of a request that was applied before; None: it moved, look again."""
        if (fresh := self._fresh(visit)) is not None and not _late(request, fresh.number):
            return fresh
        context, aged = self._context, self.memory.held
        sid = aged.track.sid if aged else ""
        loaded = await context.store.load(context.client, context.model, request.rid, sid)
        match loaded.verdict(request.fingerprint):
            case Repeat() as repeat:
                visit.committed = "unknown"  # it is applied, as long as its entry is not taken back
                return await self._repeats.settle(request, loaded, repeat)
            case Mismatch() | Used() as refused:
                raise refusal(refused)
        visit.ask = False
        visit.admit(loaded)
        head = loaded.head
        if visit.stops_at(head):
            raise Paused("the client is paused; nothing was changed")
        if head is not None and _late(request, head.number):
            raise OutOfOrder(
                f"batch {request.number} comes after batch {head.number} of this client was applied; nothing was "
                "changed; accepted is any higher number, or the Idempotency-Key under which this batch was sent first"
            )
        restored = await self._reader.restore(loaded, work if isinstance(work, Batch) else None)
        if restored and visit.stops_at(restored):
            if restored.seq:
                return None  # look again: it was paused meanwhile
            raise Paused("the client was paused under an earlier version of the model; nothing was changed")
        return restored if restored and not _late(request, restored.number) else None

    def _fresh(self, visit: _Visit) -> Held[S] | None:
        """The state in memory, if it is surely still alive in Redis, and Redis need not be asked of the request first.

        The write proves that it is the newest, and the request in order after it: it compares the tag, which stands
        for both.
        """
        held = self.memory.held
        if held is None or held.track.stale or visit.ask or visit.life not in (None, held.life) or visit.stops_at(held):
            return None
        age_ms = 1000 * (self._context.clock() - held.touched)
        return held if age_ms < self._context.limits.state_ttl_ms / 2 else None

    def _refused(self, outcome: WriteOutcome, visit: _Visit) -> Applied | None:
        """What the caller gets for what was not applied; None: try again."""
        match outcome:
            case Repeat(answer=answer) if answer is not None:
                return stored(outcome)
            case Repeat():
                visit.committed = "unknown"
                visit.ask = True
            case Incomplete(committed=effect):
                visit.committed = visit.committed or effect
            case Mismatch() | Used():
                raise refusal(outcome)
            case Gone() if visit.life is not None:
                raise refusal(outcome)
        return None


def _late(request: Request, newest: int) -> bool:
    """Whether the place of a numbered batch in the client's stream is taken or passed, once `newest` was applied."""
    return 0 < request.number <= newest
