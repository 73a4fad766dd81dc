"""From a batch to its answer: find the client's state, take the adapter's step, commit the new state, reply."""

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from acclimate_adapters import State, Step, guarded_step
from acclimate_service import answers
from acclimate_service.configuration import Configurations
from acclimate_service.problems import CommittedField, Problem
from acclimate_service.state import Attempt, ClientScope, Committed, Conflict, Incomplete, Mismatch, Replay
from acclimate_service.states import ClientStates, Found, refusal
from acclimate_service.telemetry import Telemetry
from acclimate_service.turns import Turns
from acclimate_service.worker import Worker
from acclimate_store import Bundle


@dataclass(frozen=True, slots=True)
class Batch:
    """One accepted request: decoded images and what is wanted of them."""

    client: ClientScope
    images: NDArray[Any]  # [B, C, H, W], uint8 or float32, before normalisation
    rid: str
    fingerprint: str
    deadline: float  # monotonic seconds
    gone: Callable[[], Awaitable[bool]]  # whether the caller has hung up
    adapt: bool = True
    probabilities: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer and what became of the client's state."""

    answer: Mapping[str, Any]
    version: int
    status: str
    committed: CommittedField
    replayed: str = "none"


@dataclass(frozen=True, slots=True)
class Computed:
    """A step and what is to be stored of it."""

    step: Step
    state: bytes
    answer: bytes


class Engine:
    """Serves all clients of one model on one device."""

    def __init__(
        self,
        bundle: Bundle,
        configurations: Configurations,
        states: ClientStates,
        worker: Worker,
        telemetry: Telemetry,
        *,
        max_waiting: int,
    ) -> None:
        """Take over the collaborators; whoever made them closes them."""
        self._bundle = bundle
        self._configurations = configurations
        self._states = states
        self._worker = worker
        self._telemetry = telemetry
        self._max_waiting = max_waiting
        self._turns = Turns()
        self._running: dict[str, str] = {}  # request id -> fingerprint

    async def predict(self, batch: Batch) -> Reply:
        """Answer a batch, and fold it into the client's state unless `adapt` is off.

        Batches of one client are answered one at a time, in the order of their arrival.

        Raises:
            Problem: what is wrong; nothing was changed.
            StateError: Redis failed; its `committed` says whether the state may have changed.
        """
        if self._turns.waiting >= self._max_waiting:
            raise Problem("too_many_requests", f"{self._max_waiting} batches are waiting already; try again shortly")
        with self._claim(batch), self._telemetry.waiting.track_inprogress():
            async with self._turns.hold(batch.client.client):
                await _admit(batch)
                return await (self._apply(batch) if batch.adapt else self._look(batch))

    async def reset(self, client: ClientScope, attempt: Attempt) -> Reply:
        """Take a client back to the global model; raises as `ClientStates.reset`."""
        async with self._turns.hold(client.client):
            version, replayed = await self._states.reset(client, attempt)
            description = await self._states.describe(client)
            return Reply({"adapter": description["adapter"]}, version, "reset", True, replayed)

    async def delete(self, client: ClientScope) -> None:
        """Remove a client; raises as `ClientStates.delete`."""
        async with self._turns.hold(client.client):
            await self._states.delete(client)

    async def warm_up(self, images: NDArray[Any]) -> None:
        """Take a step for nobody, so that no client waits for what torch does only once."""
        configuration = self._configurations.default
        state = self._configurations.adapter(configuration).init(self._bundle.model)
        await self._worker.run(lambda: self._step(configuration, state, images), _always)

    async def _apply(self, batch: Batch) -> Reply:
        admission: str | None = None
        for retry in range(self._states.tries):
            found: Found | Replay | None = self._states.cached(batch.client) if retry == 0 else None
            if found is None:
                found = await self._states.find(batch.client, batch.rid, batch.fingerprint, admission)
                if isinstance(found, Replay):
                    return self._replayed(found)
                admission = found.basis.life if admission is None else admission
            assert isinstance(found, Found)
            done = await self._compute(batch, found)
            attempt = Attempt(batch.rid, batch.fingerprint)
            outcome = await self._states.commit(batch.client, attempt, found, done.step.state, done.state, done.answer)
            match outcome:
                case Committed(seq=seq):
                    return Reply(answers.decode(done.answer), seq, found.status, True)
                case Replay():
                    return self._replayed(outcome)
                case Conflict() | Incomplete():
                    await self._states.pause()
                case _:
                    raise refusal(outcome)
        raise Problem("conflict", "other replicas kept changing this client's state; send the batch again")

    async def _look(self, batch: Batch) -> Reply:
        """Answer as if the batch were to be folded in, and keep nothing."""
        found = self._states.cached(batch.client)
        if found is None:
            read = await self._states.find(batch.client, "", "")
            assert isinstance(read, Found)  # no request has an empty id, so nothing is ever replayed
            found = read
        done = await self._compute(batch, found)
        return Reply(answers.decode(done.answer), found.basis.seq, found.status, False)

    async def _compute(self, batch: Batch, found: Found) -> Computed:
        def work() -> Computed:
            with self._telemetry.step_seconds.time():
                step = self._step(found.configuration, found.state, batch.images)
            answer = answers.encode(step, self._bundle.manifest.classes, batch.probabilities)
            return Computed(step, step.state.to_bytes() if batch.adapt else b"", answer)

        done = await self._worker.run(work, lambda: _admit(batch))
        self._telemetry.rows.inc(len(batch.images))
        self._telemetry.fallbacks.inc(float(done.step.signals["fallback"] == 1))
        return done

    def _step(self, configuration: str, state: State, images: NDArray[Any]) -> Step:
        adapter = self._configurations.adapter(configuration)
        return guarded_step(adapter, self._bundle.model, state, self._bundle.prepare(images))

    def _replayed(self, replay: Replay) -> Reply:
        if replay.answer is not None:
            return Reply(answers.decode(replay.answer), replay.seq, "warm", True, "stored")
        if replay.model != self._bundle.model.content_hash:
            detail = "this key was used for a batch of another model version, whose answer is not stored"
            raise Problem("other_model", detail, "unknown")
        return Reply(answers.UNAVAILABLE, replay.seq, "warm", True, "unavailable")

    @contextmanager
    def _claim(self, batch: Batch) -> Iterator[None]:
        """Refuse a request whose key is at work on this replica already."""
        running = self._running.get(batch.rid)
        if running == batch.fingerprint:
            raise Problem("request_running", "a request with this Idempotency-Key is being answered; ask again")
        if running is not None:
            raise refusal(Mismatch())
        self._running[batch.rid] = batch.fingerprint
        try:
            yield
        finally:
            del self._running[batch.rid]


async def _admit(batch: Batch) -> None:
    """Drop work that nobody waits for any more, before it is begun.

    Raises:
        Problem: `deadline_exceeded`.
    """
    if time.monotonic() >= batch.deadline:
        raise Problem("deadline_exceeded", "the deadline passed before the batch's turn came; nothing was changed")
    if await batch.gone():
        raise Problem("deadline_exceeded", "the caller hung up before the batch's turn came; nothing was changed")


async def _always() -> None:
    """Admit work that no caller waits for."""
