"""What a repeated request is answered: what is stored of the first one, or what is computed again."""

from typing import Generic

from acclimate_service.state.contract import Applied, Request, S
from acclimate_service.state.errors import (
    KEPT_CHANGING,
    ClientDeleted,
    Contended,
    Doubt,
    KeyReused,
    KeyUsedBeforeDelete,
    OtherModel,
    RequestRunning,
    StateError,
)
from acclimate_service.state.held import Context
from acclimate_service.state.journal import Answered
from acclimate_service.state.outcomes import Gone, Loaded, Mismatch, Repeat, Used
from acclimate_service.state.reader import Reader
from acclimate_service.state.records import Head


class Repeats(Generic[S]):
    """The repeats of one client's requests.

    Attributes:
        last: id of the last request that was found to be applied already, and whose answer was not stored.
    """

    def __init__(self, context: Context[S], reader: Reader[S]) -> None:
        self._context = context
        self._reader = reader
        self.last = ""

    async def known(self, request: Request) -> Applied | Head | None:
        """As `Session.known`."""
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
                applied = await self.settle(request, loaded, verdict)
            if applied is not None:
                return applied
            await context.pause()
        raise Contended(KEPT_CHANGING, doubt.committed)

    async def settle(self, request: Request, loaded: Loaded, repeat: Repeat) -> Applied | None:
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
        self.last = request.rid
        if repeat.model != self._context.model:
            detail = "this key was used for a batch of another model, whose answer is not stored"
            raise OtherModel(detail, repeat.model)
        head = loaded.head
        if head is None or not head.base < repeat.seq <= head.seq or self._reader.is_outdated(head):
            return Applied(repeat.seq, repeat.life, repeat.model, None, "unavailable")
        if loaded.lease and repeat.seq == head.seq and not loaded.lease.fence.endswith("." + self._context.nonce):
            raise RequestRunning("another replica is computing this request", loaded.lease.ms)
        return await self._recompute(request, loaded, repeat, head)

    async def _recompute(self, request: Request, loaded: Loaded, repeat: Repeat, head: Head) -> Applied | None:
        context = self._context
        owed = await self._reader.answer(loaded, head, request.rid, repeat.seq)
        if owed is None or owed.rid != request.rid:
            return None
        kept = await context.store.journal.answer(
            context.client, context.model, owed.rid, owed.tag, owed.answer, owed.note
        )
        if not isinstance(kept, Answered):
            return None
        return Applied(repeat.seq, repeat.life, repeat.model, kept.stored or owed.answer, "recomputed")


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
