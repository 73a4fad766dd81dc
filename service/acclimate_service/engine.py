"""From a batch to its answer: find the client's state, take the adapter's step, commit the new state, reply."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from acclimate_adapters import InputError, State, StateError, Step, guarded_step
from acclimate_service import answers
from acclimate_service.changes import Changes, Reply, Request
from acclimate_service.configuration import Configurations
from acclimate_service.problems import Problem
from acclimate_service.state import ClientScope
from acclimate_service.states import Change, ClientStates, Found
from acclimate_service.telemetry import Telemetry
from acclimate_service.worker import Worker, always
from acclimate_store import Bundle


@dataclass(frozen=True, slots=True)
class Batch:
    """One accepted request: decoded images and what is wanted of them."""

    request: Request
    images: NDArray[Any]  # [B, C, H, W], uint8 or float32, before normalisation
    adapt: bool = True
    probabilities: bool = False


class Engine:
    """Answers the batches of all clients of one model on one device."""

    def __init__(
        self,
        bundle: Bundle,
        configurations: Configurations,
        states: ClientStates,
        changes: Changes,
        worker: Worker,
        telemetry: Telemetry,
        *,
        max_waiting: int,
        note: Callable[[ClientScope, str], None],
    ) -> None:
        """Take over the collaborators; whoever made them closes them. `note` is told who was active, and how."""
        self._bundle = bundle
        self._configurations = configurations
        self._states = states
        self._changes = changes
        self._worker = worker
        self._telemetry = telemetry
        self._max_waiting = max_waiting
        self._note = note
        self._admitted = 0

    @contextmanager
    def admission(self) -> Iterator[None]:
        """Count a batch from before its body is read until it is answered, which bounds the memory of all of them.

        Raises:
            Problem: `too_many_requests`.
        """
        if self._admitted >= self._max_waiting:
            raise Problem("too_many_requests", f"{self._max_waiting} batches are waiting already; try again shortly")
        self._admitted += 1
        try:
            with self._telemetry.waiting.track_inprogress():
                yield
        finally:
            self._admitted -= 1

    async def predict(self, batch: Batch) -> Reply:
        """Answer a batch, and fold it into the client's state unless `adapt` is off.

        Batches of one client are answered one at a time, in the order of their arrival.

        Raises:
            Problem: what is wrong; nothing was changed unless its `committed` says otherwise.
            StateError: Redis failed; its `committed` says whether the state may have changed.
        """

        async def fold(found: Found) -> Change:
            return await self._compute(batch, found)

        async with self._changes.turn(batch.request):
            if not batch.adapt:
                return await self._look(batch)
            reply = await self._changes.apply(batch.request, fold, remembered=True)
            self._note(batch.request.client, reply.answer["adapter"])
            return reply

    async def warm_up(self, images: NDArray[Any]) -> None:
        """Take a step for nobody, so that no client waits for what torch does only once."""
        configuration = self._configurations.default
        state = self._configurations.adapter(configuration).init(self._bundle.model)
        await self._worker.run(lambda: self._step(configuration, state, images), always)

    async def _look(self, batch: Batch) -> Reply:
        """Answer as if the batch were to be folded in, and keep nothing."""
        found = await self._states.look(batch.request.client)
        done = await self._compute(batch, found)
        return Reply(answers.decode(done.answer), found.basis.seq, found.status, False)

    async def _compute(self, batch: Batch, found: Found) -> Change:
        def work() -> tuple[Step, Change]:
            with self._telemetry.step_seconds.time():
                step = self._step(found.configuration, found.state, batch.images)
            answer = answers.encode(step, self._bundle.manifest.classes, batch.probabilities)
            data = step.state.to_bytes() if batch.adapt else b""
            return step, Change(found.configuration, step.state, data, answer)

        step, change = await self._worker.run(work, batch.request.admit, batch.request.patience)
        self._telemetry.rows.inc(len(batch.images))
        self._telemetry.fallbacks.inc(float(step.signals["fallback"] == 1))
        return change

    def _step(self, configuration: str, state: State, images: NDArray[Any]) -> Step:
        adapter = self._configurations.adapter(configuration)
        try:
            return guarded_step(adapter, self._bundle.model, state, self._bundle.prepare(images))
        except (InputError, StateError):
            raise
        except Exception as error:
            detail = "the adapter failed on this batch and nothing was changed; the log has the details"
            raise Problem("internal", detail) from error
