"""From a batch to its answer: take the client's turn, fold the batch into its state, reply."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from numpy.typing import NDArray

from acclimate_adapters import AcclimateError
from acclimate_service.clients.last_images import LastImages
from acclimate_service.clients.requests import Caller, ClientRequest, Replies, Reply, too_late
from acclimate_service.clients.sessions import Sessions, Turn
from acclimate_service.compute.adapter_machine import AdapterMachine
from acclimate_service.compute.adapters import canonical
from acclimate_service.compute.steps import GUARD_SAID, StepParameters, image_batch
from acclimate_service.errors import Problem
from acclimate_service.guard.arms import Arms
from acclimate_service.guard.fleet import Fleet
from acclimate_service.guard.questions import Questions
from acclimate_service.logs import hashed
from acclimate_service.metrics import Metrics
from acclimate_service.state import ClientScope, Paused, Start, StateError, StepFailed, StoreUnavailable, always

FROZEN: Final = canonical("none", {})
"""Configuration of the global model."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Batch:
    """One accepted request: decoded images and what is wanted of them."""

    request: ClientRequest
    images: NDArray[Any]  # [B, C, H, W], uint8 or float32, before normalisation
    adapt: bool = True
    probabilities: bool = False
    logits: bool = False


class Engine:
    """Answers the batches of all clients of one model on one device."""

    def __init__(
        self,
        sessions: Sessions,
        machine: AdapterMachine,
        replies: Replies,
        metrics: Metrics,
        *,
        fleet: Fleet | None,
        arms: Arms | None,
        questions: Questions | None,
        ask_budget: float,
        images: LastImages,
        frozen_on_outage: bool,
        secret: str,
        on_harm: Callable[[ClientScope], None] | None = None,
    ) -> None:
        """Take over the collaborators; whoever made them closes them.

        Args:
            sessions, machine, replies, metrics: of the service.
            fleet: what all labels say of adapted against frozen predictions; None if nobody compares them.
            arms: what they say of the arms of portfolios.
            questions: the list of what clients are asked; None if nobody compares.
            ask_budget: share of their rows that they may be asked for.
            images: the last ones of clients.
            frozen_on_outage: whether batches are answered by the global model while Redis is away, not refused.
            secret: by which clients are hashed in the log.
            on_harm: called with a client that its own labels turn to the frozen model.
        """
        self._sessions = sessions
        self._machine = machine
        self._replies = replies
        self._metrics = metrics
        self._fleet = fleet
        self._arms = arms
        self._questions = questions
        self._ask_budget = ask_budget
        self._images = images
        self._frozen_on_outage = frozen_on_outage
        self._secret = secret
        self._on_harm = on_harm

    async def predict(self, batch: Batch) -> Reply:
        """Answer a batch, and fold it into the client's state unless `adapt` is off or the client is paused.

        Batches of one client are answered one at a time, in the order of their arrival.

        Raises:
            Problem: what is wrong; nothing was changed unless its `committed` says otherwise.
            StateError: the same; its `committed` says whether the state may have changed.
        """
        async with self._sessions.turn(batch.request) as turn:
            try:
                reply = await (self._fold(batch, turn) if batch.adapt else self._look(batch, turn))
            except StoreUnavailable as error:
                if not self._frozen_on_outage:
                    raise
                _log.warning("a batch is answered by the global model: %s", error)
                reply = await self._freeze(batch, turn, error)
        self._metrics.state.answers.labels(reply.replayed).inc()
        return reply

    async def predict_frozen(self, images: NDArray[Any], parameters: StepParameters, caller: Caller) -> Reply:
        """Answer a batch by the global model, for no client: no state is looked at and none is kept.

        Args:
            images: [B, C, H, W], uint8 or float32, before normalisation.
            parameters: what the answer is to hold.
            caller: who waits for it.

        Raises:
            Problem: `deadline_exceeded`, and what a step is refused with.
        """
        try:
            async with asyncio.timeout(max(0.0, caller.deadline - time.monotonic())) as limit:

                async def start() -> None:
                    await caller.admit()
                    limit.reschedule(None)

                return await self._frozen(images, parameters, start)
        except TimeoutError:
            if not limit.expired():
                raise
            raise too_late() from None

    async def warm_up(self, images: NDArray[Any], configuration: str) -> None:
        """Take a step for nobody, so that no client waits for what torch does only once."""
        state = await self._machine.initial(configuration)
        await self._machine.step(state, image_batch(images), always)

    async def _fold(self, batch: Batch, turn: Turn) -> Reply:
        client = batch.request.client
        images = image_batch(batch.images, self._parameters(batch, self._ask_budget))
        held = turn.session.memory.held
        before = held.state.record if held else None
        try:
            applied = await turn.session.apply(turn.request, images, while_paused=False)
        except Paused as paused:
            if paused.committed is not False:
                raise
            return await self._look(batch, turn)
        held = turn.session.memory.held
        record = held.state.record if held else None
        if self._questions and held and record and record.questions != (before.questions if before else ()):
            self._questions.tell(client, held.life, held.seq, record.questions)
        if self._images.on and applied.answer is not None and applied.replayed == "none":
            self._images.keep(turn, batch.request.name, batch.images, applied.answer)
        reply = await self._replies.of(client, applied, held.config if held else "")
        if GUARD_SAID in reply.answer and reply.replayed == "none":
            self._observe(client, **reply.members["guard"])
        return reply

    def _parameters(self, batch: Batch, ask_budget: float = 0.0) -> StepParameters:
        if self._fleet is None:
            return StepParameters(batch.probabilities, logits=batch.logits)
        return StepParameters(
            probabilities=batch.probabilities,
            logits=batch.logits,
            request_id=batch.request.name,
            against=self._fleet.against(),
            alpha=self._fleet.alpha,
            shares=self._arms.latest if self._arms else {},
            ask_budget=ask_budget,
        )

    def _observe(self, client: ClientScope, answering: str, because: str, switched: bool) -> None:
        if answering == "frozen":
            self._metrics.guarded.labels(because).inc()
        if switched:
            self._metrics.switches.labels(answering, because).inc()
            who = hashed(self._secret, client.client)
            _log.warning("client %s is answered by the %s model from now on: %s", who, answering, because)
            if because == "own_harmful" and self._on_harm is not None:
                self._on_harm(client)

    async def _look(self, batch: Batch, turn: Turn) -> Reply:
        """Answer as if the batch were to be folded in, and keep nothing."""
        try:
            looked = await turn.session.look(image_batch(batch.images, self._parameters(batch)), turn.request.admit)
        except (StateError, AcclimateError, Problem, TimeoutError):
            raise
        except Exception as error:
            raise StepFailed("the adapter failed on this batch") from error
        return self._replies.of_look(looked)

    async def _freeze(self, batch: Batch, turn: Turn, error: StoreUnavailable) -> Reply:
        """Answer by the global model; what Redis will make of the batch, if anything, is said."""
        parameters = StepParameters(batch.probabilities, logits=batch.logits)
        try:
            reply = await self._frozen(batch.images, parameters, turn.request.admit)
        except Problem:  # too late for that: what is to be said is that the state is away
            raise error from None
        return replace(reply, committed=error.committed)

    async def _frozen(self, images: NDArray[Any], parameters: StepParameters, start: Start) -> Reply:
        state = await self._machine.initial(FROZEN)
        _, answer = await self._machine.step(state, image_batch(images, parameters), start)
        return Reply(answer, version=0, status="frozen", committed=False)
