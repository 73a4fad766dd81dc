"""Changes of clients: one at a time for each client, each exactly once."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from acclimate_service import answers
from acclimate_service.problems import CommittedField, Problem
from acclimate_service.state import Attempt, ClientScope, Committed, Conflict, Gone, Incomplete, Mismatch, Replay
from acclimate_service.states import Change, ClientStates, Found, refusal
from acclimate_service.turns import Expired, Turns


@dataclass(frozen=True, slots=True)
class Request:
    """Something that a caller wants of a client.

    Args:
        client: whose state.
        rid, fingerprint: tell a repeated request from a new one.
        deadline: monotonic seconds.
        gone: whether the caller has hung up.
    """

    client: ClientScope
    rid: str
    fingerprint: str
    deadline: float
    gone: Callable[[], Awaitable[bool]]

    @property
    def patience(self) -> float:
        """Seconds left until the deadline."""
        return max(0.0, self.deadline - time.monotonic())

    async def admit(self) -> None:
        """Drop work that nobody waits for any more, before it is begun.

        Raises:
            Problem: `deadline_exceeded`.
        """
        if time.monotonic() >= self.deadline:
            raise _too_late()
        if await self.gone():
            raise Problem("deadline_exceeded", "the caller hung up before the request's turn came; nothing was changed")

    def attempt(self) -> Attempt:
        """A new try, under a tag of its own."""
        return Attempt(self.rid, self.fingerprint)


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer and what became of the client's state."""

    answer: Mapping[str, Any]
    version: int
    status: str
    committed: CommittedField
    replayed: str = "none"


class Changes:
    """Applies the changes of all clients of one model on this replica."""

    def __init__(self, states: ClientStates) -> None:
        self._states = states
        self._turns = Turns()
        self._running: dict[str, str] = {}  # request id -> fingerprint

    @asynccontextmanager
    async def turn(self, request: Request) -> AsyncIterator[None]:
        """Wait for the client's turn and keep it for the block, in the order of arrival.

        Raises:
            Problem: `request_running` or `key_reused` if the key is at work on this replica already, else
                `deadline_exceeded`.
        """
        with self._claim(request):
            try:
                async with self._turns.hold(request.client.client, request.patience):
                    await request.admit()
                    yield
            except Expired:
                raise _too_late() from None

    async def apply(
        self, request: Request, compute: Callable[[Found], Awaitable[Change]], *, remembered: bool = False
    ) -> Reply:
        """Compute a change from the client's newest state and commit it; the caller holds the client's turn.

        Args:
            request: a repeated one gets the answer of the first.
            compute: called again when another replica's change came between.
            remembered: begin with the state in memory, without asking Redis what became of the request.

        Raises:
            Problem: what is wrong; nothing was changed unless its `committed` says otherwise.
            StateError: Redis failed; its `committed` says whether the state may have changed.
            Exception: whatever `compute` raises; nothing was changed.
        """
        admission: str | None = None  # life of the client when Redis was first asked
        doubt: CommittedField = False
        found: Found | Replay | None = self._states.cached(request.client) if remembered else None
        for _ in range(self._states.tries):
            if found is None:
                found = await self._states.find(request.client, request.rid, request.fingerprint, admission)
            if isinstance(found, Replay):
                return await self.replayed(request.client, found)
            change = await compute(found)
            outcome = await self._states.commit(request.client, request.attempt(), found.basis, change)
            match outcome:
                case Committed(seq=seq):
                    return Reply(answers.decode(change.answer), seq, found.status, True)
                case Replay():
                    return await self.replayed(request.client, outcome)
                case Gone() if found.remembered:
                    pass  # deleted by way of another replica before this request came: the client begins anew
                case Conflict():
                    pass
                case Incomplete(committed=effect):
                    doubt = effect or doubt
                case _:
                    raise refusal(outcome)
            if admission is None and not found.remembered:
                admission = found.basis.life
            found = None
            await self._states.pause()
        raise Problem("conflict", "other replicas kept changing this client's state; send the request again", doubt)

    async def replayed(self, client: ClientScope, replay: Replay) -> Reply:
        """What a repeated request gets.

        Raises:
            Problem: `other_model`.
        """
        if replay.answer is not None:
            return Reply(answers.decode(replay.answer), replay.seq, "warm", True, "stored")
        if replay.model != self._states.model:
            detail = "this key was used for a batch of another model version, whose answer is not stored"
            raise Problem("other_model", detail, "unknown")
        answer = {"adapter": await self._states.adapter_of(client), **answers.UNAVAILABLE}
        return Reply(answer, replay.seq, "warm", True, "unavailable")

    @contextmanager
    def _claim(self, request: Request) -> Iterator[None]:
        """Refuse a request whose key is at work on this replica already."""
        running = self._running.get(request.rid)
        if running == request.fingerprint:
            raise Problem("request_running", "a request with this Idempotency-Key is being answered; ask again")
        if running is not None:
            raise refusal(Mismatch())
        self._running[request.rid] = request.fingerprint
        try:
            yield
        finally:
            del self._running[request.rid]


def _too_late() -> Problem:
    return Problem("deadline_exceeded", "the deadline passed before the request's turn came; nothing was changed")
