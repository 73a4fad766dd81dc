"""Brings a request into its client's history once: tried again while other changes come between, answered if it was.

Nobody but the running owner acknowledges an entry whose answer is not stored: the owner may still take it back.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Generic, TypeAlias

from acclimate_service.state.contract import Applied, Request, S
from acclimate_service.state.entry import Batch
from acclimate_service.state.errors import (
    ClientDeleted,
    Contended,
    Doubt,
    KeyReused,
    KeyUsedBeforeDelete,
    OtherModel,
    OutOfOrder,
    RequestRunning,
    StateError,
)
from acclimate_service.state.held import Context, Held, Memory
from acclimate_service.state.journal_records import Answered
from acclimate_service.state.reader import Reader
from acclimate_service.state.records import Gone, Head, Incomplete, Loaded, Mismatch, Repeat, Used
from acclimate_service.state.writer import Changing, WriteOutcome, Writer

_TRIED: Final = 8
"""Requests of a client that are remembered as tried here."""
_KEPT_CHANGING: Final = "other replicas kept changing this client's state; send the request again"
Work: TypeAlias = Batch | Changing[S]
"""What a request asks for: a batch to be folded in, or another state in the place of the present one."""


class Claims:
    """Turns away a request whose key is at work here already, before it waits for its client's turn.

    Args:
        retry_after_ms: when whoever was turned away may ask again.
    """

    def __init__(self, retry_after_ms: int = 1000) -> None:
        self._retry_after_ms = retry_after_ms
        self._running: dict[str, str] = {}

    @contextmanager
    def hold(self, request: Request) -> Iterator[None]:
        """Claim the request for the block.

        Raises:
            RequestRunning: it is at work already.
            KeyReused: its key is, with another content.
        """
        running = self._running.get(request.rid)
        if running == request.fingerprint:
            raise RequestRunning("a request with this Idempotency-Key is being answered", self._retry_after_ms)
        if running is not None:
            raise KeyReused("this Idempotency-Key is in use with another request; use a new key")
        self._running[request.rid] = request.fingerprint
        try:
            yield
        finally:
            del self._running[request.rid]


@dataclass(slots=True)
class _Visit:
    """What one request has learned.

    Args:
        life: of its client when Redis was first asked, or as the request says.
        doubt: whether an earlier try of it may still land.
        ask: True if Redis is to be asked what became of it, before anything is computed.
    """

    life: str | None = None
    doubt: Doubt = field(default_factory=Doubt)
    ask: bool = False

    def may_go_on_from(self, held: Held[S]) -> bool:
        """Whether a state in memory will do: it belongs to that life, and Redis need not be asked."""
        return not self.ask and self.life in (None, held.life)

    def admit(self, loaded: Loaded) -> None:
        if self.life is None:
            self.life = loaded.life
        elif not loaded.continues(self.life):
            raise ClientDeleted("the client was deleted while this request was under way")


class Once(Generic[S]):
    """The tries of requests of one client, one request at a time.

    Attributes:
        repeated: id of the last request that was found to be applied already.
    """

    def __init__(self, context: Context[S], memory: Memory[S], reader: Reader[S], writer: Writer[S]) -> None:
        self._context = context
        self._memory = memory
        self._reader = reader
        self._writer = writer
        self._tried = deque[str](maxlen=_TRIED)
        self.repeated = ""

    async def run(self, request: Request, work: Work[S]) -> Applied:
        """Do what a request asks for, or find out what became of it before.

        Redis is asked first what it knows of a request that replaces the state, since a repeat could not compute it
        again, and of one that was tried here before: its step need not be taken twice.

        Raises:
            StateError: it was refused, or Redis failed.
            Exception: what the work or the machine raised; nothing was changed.
        """
        visit = _Visit(request.life or None, ask=request.rid in self._tried or not isinstance(work, Batch))
        self._tried.append(request.rid)
        try:
            with visit.doubt:
                for _ in range(self._context.limits.tries):
                    applied = await self._try(request, work, visit)
                    if applied is not None:
                        return applied
                    await self._context.pause()
                raise Contended(_KEPT_CHANGING)
        except StateError:
            raise
        except Exception as error:
            if visit.doubt.committed is False:
                raise
            raise Contended("the request was given up, but an earlier try of it may land", "unknown") from error

    async def known(self, request: Request) -> Applied | Head | None:
        """What became of a request, else the head that it would find; nothing is changed."""
        context, doubt = self._context, Doubt()
        for _ in range(context.limits.tries):
            with doubt:
                loaded = await context.store.load(context.client, context.model, request.rid)
            verdict = loaded.verdict(request.fingerprint)
            if verdict is None:
                return loaded.head
            if not isinstance(verdict, Repeat):
                raise refusal(verdict)
            doubt.learn("unknown")
            with doubt:
                applied = await self._settle(request, loaded, verdict)
            if applied is not None:
                return applied
            await context.pause()
        raise Contended(_KEPT_CHANGING, doubt.committed)

    async def _try(self, request: Request, work: Work[S], visit: _Visit) -> Applied | None:
        """None: the client changed; try again, from what is stored now."""
        ready = await self._ready(request, work, visit)
        if not isinstance(ready, Held):
            return ready
        self._context.observer.found(ready.status)
        return self._judge(await self._writer.write(ready, request, work), visit)

    async def _ready(self, request: Request, work: Work[S], visit: _Visit) -> Held[S] | Applied | None:
        """The newest state, or the answer of a request that was applied before; None: it moved, look again."""
        fresh = self._reader.fresh()
        # In order after this state is in order where it is written: the write compares the tag, which stands for both.
        if fresh is not None and visit.may_go_on_from(fresh) and not request.late(fresh.number):
            return fresh
        context, aged = self._context, self._memory.held
        sid = aged.track.sid if aged else ""
        loaded = await context.store.load(context.client, context.model, request.rid, sid)
        match loaded.verdict(request.fingerprint):
            case Repeat() as repeat:
                visit.doubt.learn("unknown")  # it is applied, as long as its entry is not taken back
                return await self._settle(request, loaded, repeat)
            case Mismatch() | Used() as refused:
                raise refusal(refused)
        visit.ask = False
        visit.admit(loaded)
        _require_in_order(request, loaded.head)
        restored = await self._reader.restore(loaded, work if isinstance(work, Batch) else None)
        return restored if restored and not request.late(restored.number) else None

    def _judge(self, outcome: WriteOutcome, visit: _Visit) -> Applied | None:
        """What the caller gets for it; None: try again."""
        match outcome:
            case Applied():
                return outcome
            case Repeat(answer=answer) if answer is not None:
                return stored(outcome)
            case Repeat():
                visit.doubt.learn("unknown")
                visit.ask = True
            case Incomplete(committed=effect):
                visit.doubt.learn(effect)
            case Mismatch() | Used():
                raise refusal(outcome)
            case Gone() if visit.life is not None:
                raise refusal(outcome)
        return None

    async def _settle(self, request: Request, loaded: Loaded, repeat: Repeat) -> Applied | None:
        """What a repeated request is to be answered; None: things moved meanwhile, load again.

        Args:
            request: the repeated request.
            loaded: what Redis knows of it, and `repeat`, the verdict on it.

        Raises:
            OtherModel, RequestRunning: it may be applied; who knows it is another.
            StateError: Redis failed, or what it has cannot be read.
        """
        if repeat.answer is not None:
            return stored(repeat)
        self.repeated = request.rid
        if repeat.model != self._context.model:
            raise OtherModel("this key was used for a batch of another model, whose answer is not stored", "unknown")
        head = loaded.head
        if head is None or not head.base < repeat.seq <= head.seq:
            return Applied(repeat.seq, repeat.life, repeat.model, None, "unavailable")
        if loaded.lease and repeat.seq == head.seq and not loaded.lease.fence.endswith("." + self._context.nonce):
            raise RequestRunning("another replica is computing this request", loaded.lease.ms)
        return await self._recompute(request, loaded, repeat, head)

    async def _recompute(self, request: Request, loaded: Loaded, repeat: Repeat, head: Head) -> Applied | None:
        owed = await self._reader.answer(loaded, head, request.rid, repeat.seq)
        if owed is None or owed.rid != request.rid:
            return None
        kept = await self._context.store.journal.answer(self._context.client, owed.rid, owed.tag, owed.answer)
        if not isinstance(kept, Answered):
            return None
        return Applied(repeat.seq, repeat.life, repeat.model, kept.stored or owed.answer, "recomputed")


def _require_in_order(request: Request, head: Head | None) -> None:
    if head is not None and request.late(head.number):
        raise OutOfOrder(
            f"batch {request.number} comes after batch {head.number} of this client was applied; nothing was changed; "
            "accepted is any higher number, or the Idempotency-Key under which this batch was sent first"
        )


def stored(repeat: Repeat) -> Applied:
    """The answer that lies beside the marker."""
    return Applied(repeat.seq, repeat.life, repeat.model, repeat.answer, "stored")


def refusal(outcome: Mismatch | Used | Gone) -> StateError:
    """The error of a request that no further try would change."""
    match outcome:
        case Mismatch():
            return KeyReused("this Idempotency-Key was used with another request; use a new key")
        case Used():
            return KeyUsedBeforeDelete("this Idempotency-Key was used before the client was deleted; use a new key")
        case Gone():
            return ClientDeleted("the client was deleted while this request was under way")
