"""From a batch to its answer: take the client's turn, fold the batch into its state, reply."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from numpy.typing import NDArray

from acclimate_adapters import AcclimateError
from acclimate_service.clients.admission import Admission
from acclimate_service.clients.replies import Replies
from acclimate_service.clients.requests import ClientRequest, Reply
from acclimate_service.clients.sessions import Sessions, Turn
from acclimate_service.compute import answers
from acclimate_service.compute.adapter_machine import AdapterMachine
from acclimate_service.compute.batches import Asked, batch_of
from acclimate_service.compute.configuration import canonical
from acclimate_service.errors import Problem
from acclimate_service.metrics import Telemetry
from acclimate_service.settings import Outage
from acclimate_service.state import ClientScope, StateError, StepFailed, StoreUnavailable, always
from acclimate_service.trials.shadows import Guard

_log = logging.getLogger(__name__)
_FROZEN = canonical("none", {})
_FEW = 8
"""Batches that any client may have under way while there is a place at all."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One accepted request: decoded images and what is wanted of them."""

    request: ClientRequest
    images: NDArray[Any]  # [B, C, H, W], uint8 or float32, before normalisation
    adapt: bool = True
    probabilities: bool = False


class Engine:
    """Answers the batches of all clients of one model on one device."""

    def __init__(
        self,
        sessions: Sessions,
        machine: AdapterMachine,
        replies: Replies,
        telemetry: Telemetry,
        *,
        max_waiting: int,
        max_waiting_rows: int,
        outage: Outage,
        guard: Guard | None,
        note: Callable[[ClientScope, str], None],
    ) -> None:
        """Take over the collaborators; whoever made them closes them.

        Args:
            sessions, machine, replies, telemetry: of the service.
            max_waiting: most batches that may be under way; a client may have no more of them than it leaves free.
            max_waiting_rows: most images in them, of those whose bodies have been read.
            outage: what becomes of them while Redis is away.
            guard: what compares frozen and adapted predictions; None if nobody does.
            note: told who was active, and how.
        """
        self._sessions = sessions
        self._machine = machine
        self._replies = replies
        self._telemetry = telemetry
        self._places = Admission(max_waiting, "batches", few=_FEW)
        self._rows = Admission(max_waiting_rows, "images")
        self._outage = outage
        self._guard = guard
        self._note = note

    @contextmanager
    def admission(self, client: str) -> Iterator[None]:
        """Count a batch from before its body is read until it is answered, which bounds the memory of all of them.

        Raises:
            Problem: `too_many_requests`.
        """
        with self._places.hold(client), self._telemetry.waiting.track_inprogress():
            yield

    async def predict(self, batch: Batch) -> Reply:
        """Answer a batch, and fold it into the client's state unless `adapt` is off.

        Batches of one client are answered one at a time, in the order of their arrival.

        Raises:
            Problem: what is wrong; nothing was changed unless its `committed` says otherwise.
            StateError: the same; its `committed` says whether the state may have changed.
        """
        client, rows = batch.request.client.client, len(batch.images)
        with self._rows.hold(client, rows):
            reply = await self._answer(batch)
        self._telemetry.state.answers.labels(reply.replayed).inc()
        self._telemetry.rows.inc(rows)
        self._telemetry.fallbacks.inc(reply.answer["signals"].get("fallback", 0))
        return reply

    async def _answer(self, batch: Batch) -> Reply:
        async with self._sessions.turn(batch.request) as turn:
            try:
                return await (self._fold(batch, turn) if batch.adapt else self._look(batch, turn))
            except StoreUnavailable as error:
                if self._outage == "fail":
                    raise
                _log.warning("a batch is answered by the global model: %s", error)
                return await self._freeze(batch, turn, error)

    async def warm_up(self, images: NDArray[Any], configuration: str) -> None:
        """Take a step for nobody, so that no client waits for what torch does only once."""
        state = await self._machine.initial(configuration)
        await self._machine.step(state, batch_of(images), always)

    async def _fold(self, batch: Batch, turn: Turn) -> Reply:
        client = batch.request.client
        applied = await turn.session.apply(turn.request, batch_of(batch.images, self._asked(batch)))
        reply = await self._replies.of(client, applied)
        self._note(client, reply.answer["adapter"])
        if self._guard is not None and reply.replayed == "none":
            given = [each["index"] for each in reply.answer["predictions"]]
            seen = replace(batch.request, life=applied.life)
            self._guard.shadows.see(seen, batch.images, given, turn.session.config or "")
        if "guard" in reply.answer and reply.replayed == "none":
            self._observe(client, **reply.answer["guard"])
        return reply

    def _asked(self, batch: Batch) -> Asked:
        if self._guard is None:
            return Asked(batch.probabilities)
        fleet = self._guard.fleet
        return Asked(batch.probabilities, batch.request.name, fleet.against(), fleet.alpha)

    def _observe(self, client: ClientScope, answering: str, because: str, switched: bool) -> None:
        if answering == "frozen":
            self._telemetry.guarded.labels(because).inc()
        if switched:
            self._telemetry.switches.labels(answering, because).inc()
            _log.warning("client %s is answered by the %s model from now on: %s", client.client, answering, because)

    async def _look(self, batch: Batch, turn: Turn) -> Reply:
        """Answer as if the batch were to be folded in, and keep nothing."""
        try:
            looked = await turn.session.look(batch_of(batch.images, self._asked(batch)), turn.request.admit)
        except (StateError, AcclimateError, Problem, TimeoutError):
            raise
        except Exception as error:
            raise StepFailed("the adapter failed on this batch") from error
        return self._replies.of_look(looked)

    async def _freeze(self, batch: Batch, turn: Turn, error: StoreUnavailable) -> Reply:
        """Answer by the global model; what Redis will make of the batch, if anything, is said."""
        state = await self._machine.initial(_FROZEN)
        try:
            _, answer = await self._machine.step(
                state, batch_of(batch.images, Asked(batch.probabilities)), turn.request.admit
            )
        except Problem:  # too late for that: what is to be said is that the state is away
            raise error from None
        return Reply(answers.decode(answer), 0, "frozen", error.committed)
