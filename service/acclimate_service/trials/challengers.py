"""Challengers: adapters that see a share of the batches and answer nobody, so that labels can compare them.

A challenger's state of a client is one more scope of that client in Redis, under the same exactly-once rules, and goes
with it when it is deleted. What a challenger makes of a batch is computed after the reply, and given up when too much
is waiting, or when the client was deleted meanwhile: then it has seen fewer batches, and nothing else is lost.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import orjson
from numpy.typing import NDArray

from acclimate_service.clients.requests import BACKGROUND_PATIENCE_S, ClientRequest, never_gone
from acclimate_service.clients.sessions import Sessions
from acclimate_service.compute.steps import StepParameters, image_batch
from acclimate_service.errors import Problem
from acclimate_service.guard.evidence import Counts
from acclimate_service.guard.fleet import Fleet
from acclimate_service.metrics import Background
from acclimate_service.state import Batch, ClientDeleted, Contended, RequestRunning, Tasks

_MOST_WAITING: Final = 32
_GIVEN_UP: Final = (ClientDeleted, Contended, Problem, RequestRunning)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Challenger:
    """One configuration that is tried out.

    Args:
        configuration: which.
        sessions: of its clients.
    """

    configuration: str
    sessions: Sessions


def scope_of(model: str, configuration: str) -> str:
    """Model scope of a challenger's states (16 hex digits)."""
    return hashlib.sha256(f"{model}\0{configuration}".encode()).hexdigest()[:16]


class Challengers:
    """Runs the challengers.

    Args:
        challengers: which.
        share: of the requests that they see, 0..1, drawn by their ids so that a repeat is drawn alike.
        fleet: told what the labels say of them.
        background: watches over what they do.
    """

    def __init__(self, challengers: Sequence[Challenger], share: float, fleet: Fleet, background: Background) -> None:
        self._challengers = challengers
        self._share = share
        self._fleet = fleet
        self._tasks = Tasks(background)
        self._waiting = 0

    @property
    def configurations(self) -> frozenset[str]:
        """Of the challengers."""
        return frozenset(challenger.configuration for challenger in self._challengers)

    @property
    def sessions(self) -> Sequence[Sessions]:
        """Of all challengers."""
        return [challenger.sessions for challenger in self._challengers]

    def see(self, request: ClientRequest, images: NDArray[Any], current: str) -> None:
        """Show the challengers a batch that was answered.

        Args:
            request: of the batch, with the life of its client.
            images: [B, C, H, W], as they were answered.
            current: configuration of the client; it does not challenge itself.
        """
        if int(request.rid[:8], 16) >= self._share * 2**32:
            return
        for challenger in self._others(current):
            self._start(partial(self._see, challenger, request, images))

    def tell(self, request: ClientRequest, labels: Batch, current: str) -> None:
        """Tell the challengers labels; those of rows that they have not seen say nothing. Arguments as in `see`."""
        for challenger in self._others(current):
            self._start(partial(self._tell, challenger, request, labels))

    async def stop(self) -> None:
        """End what runs in the background; the sessions are left to whoever closes them."""
        await self._tasks.aclose()

    def _others(self, current: str) -> Sequence[Challenger]:
        return [challenger for challenger in self._challengers if challenger.configuration != current]

    def _start(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if self._waiting < _MOST_WAITING:
            self._waiting += 1
            self._tasks.start("challenger", self._quietly(work)).add_done_callback(self._done)

    def _done(self, _: object) -> None:
        self._waiting -= 1

    async def _quietly(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await work()
        except _GIVEN_UP as error:  # as it may any time: it has seen one batch fewer
            _log.info("a challenger gave up a request: %s", error)

    async def _see(self, challenger: Challenger, request: ClientRequest, images: NDArray[Any]) -> None:
        batch = image_batch(images, StepParameters(request_id=request.name))
        async with challenger.sessions.turn(_derived(request, challenger.configuration)) as turn:
            await turn.session.apply(turn.request, batch)

    async def _tell(self, challenger: Challenger, request: ClientRequest, labels: Batch) -> None:
        async with challenger.sessions.turn(_derived(request, challenger.configuration)) as turn:
            if await turn.session.known(turn.request) is None:
                return
            applied = await turn.session.apply(turn.request, labels)
        if applied.answer is None:
            return
        told = orjson.loads(applied.answer)["told"]
        counts = Counts.of_kinds(told["counts"])
        if counts.labelled:
            await self._fleet.tell(
                client=request.client,
                configuration=challenger.configuration,
                life=applied.life,
                seq=applied.seq,
                born=told["born"],
                counts=counts,
            )


def _derived(request: ClientRequest, configuration: str) -> ClientRequest:
    """The same request for a challenger, in the background, under an id of its own."""
    rid = hashlib.sha256(f"{request.rid}\0{configuration}".encode()).hexdigest()[: len(request.rid)]
    return replace(request, rid=rid, deadline=time.monotonic() + BACKGROUND_PATIENCE_S, gone=never_gone, number=0)
