"""Candidates: adapters that see a share of the batches and answer nobody, so that labels can compare them.

A candidate's state of a client is one more scope of that client in Redis, under the same exactly-once rules, and goes
with it when it is deleted. What a candidate makes of a batch is computed after the reply, and given up when too much is
waiting, or when the client was deleted meanwhile: then it has seen fewer batches, and nothing else is lost.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import orjson
from numpy.typing import NDArray

from acclimate_service.clients.requests import ClientRequest
from acclimate_service.clients.sessions import Sessions
from acclimate_service.compute.batches import Asked, batch_of
from acclimate_service.errors import Problem
from acclimate_service.guard.evidence import Counts
from acclimate_service.guard.fleet import Fleet
from acclimate_service.state import Batch, ClientScope, StateError
from acclimate_service.state.tasks import Tasks
from acclimate_service.trials.switching import Duels, derived

_MOST_WAITING: Final = 32
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One configuration that is tried out, and the sessions of its clients."""

    configuration: str
    sessions: Sessions


@dataclass(frozen=True, slots=True)
class Guard:
    """What compares predictions: the labels of all clients, and the adapters that are tried out beside theirs."""

    fleet: Fleet
    shadows: "Shadows"
    duels: Duels | None = None

    async def forget(self, client: ClientScope) -> None:
        """Forget who told what a deleted client told; raises StateError where Redis fails."""
        await self.fleet.forget(client)
        if self.duels is not None:
            await self.duels.forget(client)


def scope_of(model: str, configuration: str) -> str:
    """Model scope of a candidate's states (16 hex digits)."""
    return hashlib.sha256(f"{model}\0{configuration}".encode()).hexdigest()[:16]


class Shadows:
    """Runs the candidates.

    Args:
        candidates: which.
        share: of the requests that they see, 0..1, drawn by their ids so that a repeat is drawn alike.
        fleet: told what the labels say of them.
        duels: compare them with what clients are answered; None if nobody is moved to a better one.
    """

    def __init__(self, candidates: Sequence[Candidate], share: float, fleet: Fleet, duels: Duels | None = None) -> None:
        self._candidates = candidates
        self._share = share
        self._fleet = fleet
        self._duels = duels
        self._tasks = Tasks()
        self._waiting = 0

    @property
    def configurations(self) -> frozenset[str]:
        """Of the candidates."""
        return frozenset(candidate.configuration for candidate in self._candidates)

    def see(self, request: ClientRequest, images: NDArray[Any], given: Sequence[int], current: str) -> None:
        """Show the candidates a batch that was answered.

        Args:
            request: of the batch, with the life of its client.
            images: as in `batch_of`.
            given: [B], the classes that were answered.
            current: configuration of the client; it is no candidate to itself.
        """
        if int(request.rid[:8], 16) >= self._share * 2**32:
            return
        for candidate in self._others(current):
            self._start(partial(self._see, candidate, request, images, given, current))

    def tell(self, request: ClientRequest, labels: Batch, current: str) -> None:
        """Tell the candidates labels; those of rows that they have not seen say nothing. Arguments as in `see`."""
        for candidate in self._others(current):
            self._start(partial(self._tell, candidate, request, labels, current))

    def drop(self, client: str) -> None:
        """Forget a client's states, which are to be read again."""
        for sessions in self._sessions():
            sessions.drop(client)

    def drop_all(self) -> None:
        """Forget all states."""
        for sessions in self._sessions():
            sessions.drop_all()

    async def aclose(self, budget_s: float) -> None:
        """End what runs in the background, and hand the clients over within so many seconds."""
        await self._tasks.aclose()
        until = time.monotonic() + budget_s
        for sessions in self._sessions():
            await sessions.aclose(max(0.0, until - time.monotonic()))

    def _sessions(self) -> Sequence[Sessions]:
        own = [candidate.sessions for candidate in self._candidates]
        return own if self._duels is None else [*own, *self._duels.sessions]

    def _others(self, current: str) -> Sequence[Candidate]:
        return [candidate for candidate in self._candidates if candidate.configuration != current]

    def _start(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if self._waiting < _MOST_WAITING:
            self._waiting += 1
            self._tasks.start(self._quietly(work())).add_done_callback(self._done)

    def _done(self, _: object) -> None:
        self._waiting -= 1

    async def _quietly(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except (StateError, Problem) as error:
            _log.info("a candidate gave up a request: %s", error)
        except Exception:  # nobody waits for it, so nobody else would tell
            _log.exception("a candidate failed")

    async def _see(
        self, candidate: Candidate, request: ClientRequest, images: NDArray[Any], given: Sequence[int], current: str
    ) -> None:
        name = candidate.configuration
        async with candidate.sessions.turn(derived(request, name)) as turn:
            applied = await turn.session.apply(turn.request, batch_of(images, Asked(request_id=request.name)))
        if self._duels is not None and applied.answer is not None:
            await self._duels.see(name, request, current, given, orjson.loads(applied.answer))

    async def _tell(self, candidate: Candidate, request: ClientRequest, labels: Batch, current: str) -> None:
        await self._count(candidate, request, labels)
        if self._duels is not None:
            await self._duels.tell(candidate.configuration, request, current, labels)

    async def _count(self, candidate: Candidate, request: ClientRequest, labels: Batch) -> None:
        async with candidate.sessions.turn(derived(request, candidate.configuration)) as turn:
            if await turn.session.known(turn.request) is None:
                return
            applied = await turn.session.apply(turn.request, labels)
        if applied.answer is None:
            return
        told = orjson.loads(applied.answer)["told"]
        counts = Counts(*told["counts"])
        if counts.labelled:
            await self._fleet.tell(
                request.client, candidate.configuration, applied.life, applied.seq, told["born"], counts
            )
