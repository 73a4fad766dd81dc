"""Brings a request into its client's history once: tried again while other changes come between."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic, TypeAlias

from acclimate_service.state.context import Context
from acclimate_service.state.errors import (
    ClientDeleted,
    Contended,
    Doubt,
    KeyReused,
    KeyUsedBeforeDelete,
    OutOfOrder,
    StateError,
)
from acclimate_service.state.finding import Finder
from acclimate_service.state.held import Held, Memory
from acclimate_service.state.machine import Applied, Request, S
from acclimate_service.state.records import Gone, Head, Incomplete, Loaded, Mismatch, Replay, Used
from acclimate_service.state.replaying import Replays, stored
from acclimate_service.state.writing import WriteOutcome

Restore: TypeAlias = Callable[[Loaded], Awaitable[Held[S] | None]]
Write: TypeAlias = Callable[[Held[S]], Awaitable[WriteOutcome]]


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
    """The tries of requests of one client, one request at a time."""

    def __init__(self, context: Context[S], memory: Memory[S], finder: Finder[S], replays: Replays[S]) -> None:
        self._context = context
        self._memory = memory
        self._finder = finder
        self._replays = replays

    async def run(self, request: Request, restore: Restore[S], write: Write[S], *, ask: bool = False) -> Applied:
        """Do what a request asks for, or find out what became of it before.

        Args:
            request: which.
            restore: the state to start from, of what Redis was found to hold; None: it moved, load again.
            write: computes the change from a state and writes it, on condition that this is the newest one.
            ask: begin with what Redis knows of the request, for a change that a repeat could not compute again.

        Raises:
            StateError: it was refused, or Redis failed.
            Exception: what `restore` or `write` raised; nothing was changed.
        """
        visit = _Visit(request.life or None, ask=ask)
        try:
            with visit.doubt:
                for _ in range(self._context.limits.tries):
                    applied = await self._try(request, restore, write, visit)
                    if applied is not None:
                        return applied
                    await self._context.pause()
                raise Contended("other replicas kept changing this client's state; send the request again")
        except StateError:
            raise
        except Exception as error:
            if visit.doubt.committed is False:
                raise
            raise Contended("the request was given up, but an earlier try of it may land", "unknown") from error

    async def known(self, request: Request) -> Applied | Head | None:
        """What became of a request, else the head that it would find; nothing is changed."""
        context = self._context
        for _ in range(context.limits.tries):
            loaded = await context.store.load(context.client, context.model, request.rid)
            verdict = loaded.verdict(request.fingerprint)
            if verdict is None:
                return loaded.head
            if not isinstance(verdict, Replay):
                raise refusal(verdict)
            applied = await self._replays.settle(request, loaded, verdict)
            if applied is not None:
                return applied
            await context.pause()
        raise Contended("other replicas kept changing this client's state; send the request again")

    async def _try(self, request: Request, restore: Restore[S], write: Write[S], visit: _Visit) -> Applied | None:
        """None: the client changed; try again, from what is stored now."""
        ready = await self._ready(request, restore, visit)
        if not isinstance(ready, Held):
            return ready
        self._context.observer.found(ready.status)
        return self._judge(await write(ready), visit)

    async def _ready(self, request: Request, restore: Restore[S], visit: _Visit) -> Held[S] | Applied | None:
        """The newest state, or the answer of a request that was applied before; None: it moved, look again."""
        fresh = self._finder.fresh()
        # In order after this state is in order where it is written: the write compares the tag, which stands for both.
        if fresh is not None and visit.may_go_on_from(fresh) and not request.late(fresh.number):
            return fresh
        context, aged = self._context, self._memory.held
        sid = aged.track.sid if aged else ""
        loaded = await context.store.load(context.client, context.model, request.rid, sid)
        match loaded.verdict(request.fingerprint):
            case Replay() as replay:
                return await self._replays.settle(request, loaded, replay)
            case Mismatch() | Used() as refused:
                raise refusal(refused)
        visit.ask = False
        visit.admit(loaded)
        _require_in_order(request, loaded.head)
        restored = self._memory.held = await restore(loaded)
        return restored if restored and not request.late(restored.number) else None

    def _judge(self, outcome: WriteOutcome, visit: _Visit) -> Applied | None:
        """What the caller gets for it; None: try again."""
        match outcome:
            case Applied():
                return outcome
            case Replay(answer=answer) if answer is not None:
                return stored(outcome)
            case Replay():
                visit.ask = True
            case Incomplete(committed=effect):
                visit.doubt.learn(effect)
            case Mismatch() | Used():
                raise refusal(outcome)
            case Gone() if visit.life is not None:
                raise refusal(outcome)
        return None


def _require_in_order(request: Request, head: Head | None) -> None:
    if head is not None and request.late(head.number):
        raise OutOfOrder(
            f"batch {request.number} comes after batch {head.number} of this client was applied; nothing was changed; "
            "accepted is any higher number, or the Idempotency-Key under which this batch was sent first"
        )


def refusal(outcome: Mismatch | Used | Gone) -> StateError:
    """The error of a request that no further try would change."""
    match outcome:
        case Mismatch():
            return KeyReused("this Idempotency-Key was used with another request; use a new key")
        case Used():
            return KeyUsedBeforeDelete("this Idempotency-Key was used before the client was deleted; use a new key")
        case Gone():
            return ClientDeleted("the client was deleted while this request was under way")
