"""One client on one replica: exactly once, in order, whatever the other replicas do and whatever fails.

A session holds the newest state it knows and writes by the smaller of two ways: a small state whole, a large one by
its batches, with a snapshot now and then. States are immutable and steps run elsewhere: what they are is the business
of a `Machine`. One call at a time: the caller holds the client's turn, except for `nbytes`. To bound memory, keep
sessions in a cache that counts `nbytes`, evicts under the client's turn, and passes over clients whose turn is taken.

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

import asyncio
import random
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic

from acclimate_service.state.context import Context
from acclimate_service.state.entry import Batch
from acclimate_service.state.errors import (
    ClientDeleted,
    ClientUnknown,
    Contended,
    Doubt,
    KeyReused,
    KeyUsedBeforeDelete,
    StateError,
)
from acclimate_service.state.finding import Finder
from acclimate_service.state.held import Held, Memory
from acclimate_service.state.machine import Applied, Looked, Request, S, Start, always
from acclimate_service.state.opening import Opener
from acclimate_service.state.rebuilding import Rebuilder
from acclimate_service.state.records import (
    Absent,
    Committed,
    Conflict,
    Gone,
    Incomplete,
    Loaded,
    Mismatch,
    Replay,
    Used,
)
from acclimate_service.state.replaying import Replays, stored
from acclimate_service.state.snapshotting import Snapshotter
from acclimate_service.state.tasks import Tasks
from acclimate_service.state.writing import WriteOutcome, Writer


@dataclass(slots=True)
class _Visit:
    """What one request has learned.

    Args:
        life: of its client when Redis was first asked.
        doubt: whether an earlier try of it may still land.
        repeated: True if it was applied before, so that its answer is to be looked for.
    """

    life: str | None = None
    doubt: Doubt = field(default_factory=Doubt)
    repeated: bool = False

    def admit(self, loaded: Loaded) -> None:
        if self.life is None:
            self.life = loaded.life
        elif not loaded.continues(self.life):
            raise ClientDeleted("the client was deleted while this request was under way")


class Session(Generic[S]):
    """Applies batches to the state of one client. Errors are those of `errors.py`; each says what may have changed."""

    def __init__(self, context: Context[S]) -> None:
        self._context = context
        self._tasks = Tasks()
        self._memory: Memory[S] = Memory()
        opener, rebuilder = Opener(context), Rebuilder(context)
        self._finder = Finder(context, self._memory, opener, rebuilder)
        self._replays = Replays(context, rebuilder)
        self._snapshotter = Snapshotter(context, self._tasks)
        self._writer = Writer(context, self._memory, opener, self._snapshotter, self._tasks)

    @property
    def nbytes(self) -> int:
        """Bytes of the state and the answers in memory."""
        held = self._memory.held
        if held is None:
            return 0
        return self._context.machine.size(held.state) + sum(len(owed.answer) for owed in held.track.owed.values())

    async def apply(self, request: Request, batch: Batch) -> Applied:
        """Fold a batch into the client's state, once, and answer it.

        Raises:
            ClientDeleted, KeyReused, KeyUsedBeforeDelete, OtherModel, RequestRunning, Contended: it was refused.
            StepFailed: the adapter failed on this batch.
            JournalFull, StoreFull, StoreUnavailable, StateCorrupt, StateUnreadable: the state cannot be had or kept.
            Exception: what the machine or `request.admit` raised before the batch was begun; nothing was changed.
        """
        visit = _Visit()
        try:
            with visit.doubt:
                for _ in range(self._context.limits.tries):
                    applied = await self._try(request, batch, visit)
                    if applied is not None:
                        return applied
                    await self._pause()
                raise Contended("other replicas kept changing this client's state; send the batch again")
        except StateError:
            raise
        except Exception as error:
            if visit.doubt.committed is False:
                raise
            raise Contended("the request was given up, but an earlier try of it may land", "unknown") from error

    async def look(self, batch: Batch, admit: Start = always) -> Looked:
        """Answer a batch as if it were to be folded in, and keep nothing.

        Raises:
            Contended, StoreUnavailable, StateCorrupt, StateUnreadable: the state cannot be had.
            Exception: what the machine or `admit` raised.
        """
        for _ in range(self._context.limits.tries):
            found = await self._finder.peek()
            if found is not None:
                _, answer = await self._context.machine.step(found.state, batch, admit)
                return Looked(found.seq, answer, found.status)
            await self._pause()
        raise Contended("other replicas kept changing this client's state; send the batch again")

    async def reset(self, request: Request, config: str = "") -> Applied:
        """Take the client back to the initial state, under another configuration if one is given.

        Raises:
            ClientUnknown, ClientDeleted, KeyReused, KeyUsedBeforeDelete, Contended: it was refused.
            StateError: Redis failed.
        """
        self._drop()
        context = self._context
        outcome = await context.store.reset(context.client, context.model, request.attempt(), config)
        match outcome:
            case Committed(seq=seq, life=life):
                return Applied(seq, life, context.model, None, status="reset")
            case Replay():
                return stored(outcome)
            case Absent(committed=effect):
                detail = f"there is no client {context.client.client!r}; it begins with its first batch"
                raise ClientUnknown(detail, effect)
            case Conflict(committed=effect):
                raise Contended("the client's batches kept coming between; reset again", effect)
            case _:
                raise _refusal(outcome)

    async def delete(self) -> bool:
        """Remove the client from every model, and all that was learned for it; False if there was none.

        Raises:
            Contended: batches kept coming between.
            StateError: Redis failed.
        """
        self._drop()
        outcome = await self._context.store.delete(self._context.client)
        if isinstance(outcome, Conflict):
            raise Contended("the client's batches kept coming between; delete again", outcome.committed)
        return outcome.existed

    async def evict(self) -> None:
        """Let go of the state, after a snapshot where it has a journal; a snapshot that fails loses nothing."""
        held = self._memory.take()
        self._snapshotter.forget()
        if held is None or not held.track.fence:
            return
        await self._snapshotter.now(held)
        with suppress(StateError):  # the lease ends by itself
            await self._context.store.journal.release(self._context.client, self._context.model, held.track.fence)

    async def aclose(self) -> None:
        """End what runs in the background. Without `evict` before, the next opener has more to replay."""
        self._snapshotter.forget()
        await self._tasks.aclose()

    async def _try(self, request: Request, batch: Batch, visit: _Visit) -> Applied | None:
        """None: the client changed; try again, from what is stored now."""
        ready = await self._ready(request, batch, visit)
        if not isinstance(ready, Held):
            return ready
        return self._judge(await self._writer.write(ready, request, batch), visit)

    async def _ready(self, request: Request, batch: Batch, visit: _Visit) -> Held[S] | Applied | None:
        """The newest state, or the answer of a request that was applied before; None: it moved, look again."""
        fresh = self._finder.fresh()
        if fresh is not None and not visit.repeated:
            return fresh
        context = self._context
        aged = self._memory.held
        sid = aged.track.sid if aged else ""
        loaded = await context.store.load(context.client, context.model, request.rid, sid)
        match loaded.verdict(request.fingerprint):
            case Replay() as replay:
                return await self._replays.settle(request, loaded, replay)
            case Mismatch() | Used() as refused:
                raise _refusal(refused)
        visit.repeated = False
        visit.admit(loaded)
        self._memory.held = await self._finder.restore(loaded, batch)
        return self._memory.held

    def _judge(self, outcome: WriteOutcome, visit: _Visit) -> Applied | None:
        """What the caller gets for it; None: try again."""
        match outcome:
            case Applied():
                return outcome
            case Replay(answer=answer) if answer is not None:
                return stored(outcome)
            case Replay():
                visit.repeated = True
            case Incomplete(committed=effect):
                visit.doubt.learn(effect)
            case Mismatch() | Used():
                raise _refusal(outcome)
            case Gone() if visit.life is not None:
                raise _refusal(outcome)
        return None

    def _drop(self) -> None:
        self._snapshotter.forget()
        held = self._memory.take()
        if held is not None:
            held.track.stale = True

    async def _pause(self) -> None:
        """A random moment, so that replicas that met do not meet again."""
        await asyncio.sleep(random.uniform(0, self._context.limits.jitter_ms) / 1000)


def _refusal(outcome: Mismatch | Used | Gone) -> StateError:
    match outcome:
        case Mismatch():
            return KeyReused("this Idempotency-Key was used with another request; use a new key")
        case Used():
            return KeyUsedBeforeDelete("this Idempotency-Key was used before the client was deleted; use a new key")
        case Gone():
            return ClientDeleted("the client was deleted while this request was under way")
